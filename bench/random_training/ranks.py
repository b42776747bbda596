"""Trains random models in random ways on real ranks, and in one process: are they equal?

    ranks.py STORE RANK RANKS BACKEND FIRST COUNT

A case is drawn from its number: model, branches that ranks use at times, what is frozen and when it
is unfrozen, passes before a step, which of them synchronise, how gradients are forgotten,
optimizer, engine, overlap, type, precision. Every rank trains it on its part of each batch with
`prepare`, and beside it a copy on all parts, as one process would. Prints an object: for each case
what came of it, "right", "refused: ..." (an error of Paceline's, by name), "wrong: ..." or
"raised: ...".

The reference follows no rule of the engine: the mean loss over the parts of all ranks, `backward`,
and the optimizer's own step.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import faulthandler
import functools
import io
import json
import os
import sys
import traceback
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError, first_line
from paceline.training import preparation, prepare
from paceline.training.engine.ranks import find_ranks
from paceline.training.optimizers import LAMB, LARS

STEPS = 4
SAMPLES = 4  # of a rank in a pass
WIDTH = 6
ENGINES = ("allreduce", "sharded", "root", "ddp", "fsdp2")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}
# What a low precision may move weights by, in what it moves those of the reference by: its sums
# are rounded in another order.
ROUNDINGS = 4
# With their own epsilons, gradients that are nearly zero would move weights by their sign alone.
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, eps=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, eps=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, eps=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.1),
    "lars": lambda p: LARS(p, 0.5),
    "lamb": lambda p: LAMB(p, 0.01, eps=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=3),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}
FOR_COMPLEX = ("sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad")
# How gradients are forgotten before a step's passes; "never" adds those of all steps up.
FORGET = ("optimizer", "model", "module", "to zero", "never")


@dataclass(frozen=True, kw_only=True)
class Pass:
    """A forward and a backward pass.

    Attributes:
        reduces: whether it is outside of `no_sync`.
        branches: that each rank uses.
        losses: how many, each with a backward pass of its own.
    """

    reduces: bool
    branches: tuple[tuple[int, ...], ...]
    losses: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    seed: int
    engine: str
    optimizer: str
    dtype: torch.dtype
    precision: str | None
    branches: int
    tied: bool
    norm: bool
    frozen: bool
    unfrozen_at: int | None  # step
    added_at: int | None  # step at which the optimizer gets the parameters of branch 0
    frozen_at: int | None
    skipped: int | None  # step of which the gradients are forgotten in place of a step
    forget: str
    overlap: bool | None
    apart: bool
    clip: float | None
    table: str  # "", or how an embedding's gradients come: dense, sparse
    turned: bool  # whether a parameter is complex
    steps: tuple[tuple[Pass, ...], ...]


def draw(seed, ranks):
    """Return the case of a number."""
    rng = np.random.default_rng([seed, ranks])

    def chance(likely):
        return bool(rng.random() < likely)

    def step_or_none(likely):
        return int(rng.integers(1, STEPS)) if chance(likely) else None

    branches = int(rng.integers(0, 4))
    engine = ENGINES[int(rng.integers(len(ENGINES)))]
    own = engine not in ("ddp", "fsdp2")
    always = chance(0.4)  # all branches, in all passes

    def one_pass(is_last):
        used = tuple(
            tuple(b for b in range(branches) if always or chance(0.6)) for _ in range(ranks)
        )
        if engine == "fsdp2":  # gathers a layer on all ranks, or waits for those that do not use it
            used = used[:1] * ranks
        return Pass(reduces=is_last or chance(0.5), branches=used, losses=2 if chance(0.15) else 1)

    optimizer = str(rng.choice(list(OPTIMIZERS)))
    counts = [int(rng.choice([1, 1, 2, 3])) for _ in range(STEPS)]
    frozen = chance(0.3)
    forget = FORGET[int(rng.choice(len(FORGET), p=[0.5, 0.15, 0.1, 0.15, 0.1]))]
    more = np.random.default_rng([seed, ranks, 1])
    precision = "bfloat16" if np.random.default_rng([seed, ranks, 2]).random() < 0.2 else None
    table = str(more.choice(["", "", "dense", "sparse" if own else "dense"]))
    return Case(
        seed=seed,
        engine=engine,
        optimizer=optimizer,
        dtype=torch.float64 if chance(0.7) and precision is None else torch.float32,
        precision=precision,
        branches=branches,
        tied=chance(0.15),
        norm=chance(0.3),
        frozen=frozen,
        unfrozen_at=step_or_none(0.5) if frozen else None,
        added_at=step_or_none(0.15) if branches and optimizer != "lbfgs" else None,
        frozen_at=step_or_none(0.1),
        skipped=step_or_none(0.15),
        # Where it is never, rank 0 of `root` refuses, and the others wait for it.
        forget=FORGET[0] if engine == "root" and forget == "never" else forget,
        overlap=None if not own else [None, True, False][int(rng.integers(3))],
        apart=own and chance(0.4),
        clip=0.5 if chance(0.2) else None,
        table=table,
        turned=bool(more.random() < 0.15) and optimizer in FOR_COMPLEX,
        steps=tuple(
            tuple(one_pass(number == count - 1) for number in range(count)) for count in counts
        ),
    )


class Model(nn.Module):
    """A trunk, and branches that a pass may leave out."""

    def __init__(self, case, *, sparse=False):
        super().__init__()
        torch.manual_seed(case.seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if case.norm else nn.Identity()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(case.branches))
        self.last = nn.Linear(WIDTH, WIDTH)
        if case.tied:
            self.last.weight = self.first.weight
        if case.table:
            self.table = nn.Embedding(9, WIDTH, sparse=sparse and case.table == "sparse")
        self.to(case.dtype)
        if case.turned:  # which `to` would make real
            parts = torch.randn(WIDTH, WIDTH, 2, dtype=case.dtype) / 4
            self.turned = nn.Parameter(torch.view_as_complex(parts))
        self.frozen.requires_grad_(not case.frozen)

    def forward(self, given, branches):
        hidden = self.norm(self.first(given)).tanh()
        hidden = hidden + self.frozen(hidden)
        if hasattr(self, "table"):
            hidden = hidden + self.table((given[:, 0] * 10).long() % 9)
        if hasattr(self, "turned"):
            hidden = hidden + (hidden.to(self.turned.dtype) @ self.turned).real.tanh()
        for branch in branches:
            hidden = hidden + self.branches[branch](hidden).tanh()
        return self.last(hidden)


def data(case, step, number, rank):
    """Return inputs and targets of a rank's part of a pass."""
    rng = np.random.default_rng([case.seed, step, number, rank])
    values = torch.from_numpy(rng.standard_normal((2, SAMPLES, WIDTH))).to(case.dtype)
    return values[0], values[1]


def losses_of(model, case, step, number, rank):
    """Return the losses of a rank's part of a pass."""
    one_pass = case.steps[step][number]
    given, wanted = data(case, step, number, rank)
    outputs = model(given, one_pass.branches[rank]).to(case.dtype)
    errors = (outputs - wanted).square().mean(0)
    if one_pass.losses == 1:
        return [errors.mean()]
    return [errors[: WIDTH // 2].mean(), errors[WIDTH // 2 :].mean()]


def optimizer_of(case, model):
    left_out = {id(p) for p in model.branches[0].parameters()} if case.added_at else set()
    return OPTIMIZERS[case.optimizer]([p for p in model.parameters() if id(p) not in left_out])


def train(case, model, optimizer, module, run_pass, forget):
    """Train; `run_pass(step, number)` makes the gradients of a pass."""
    branch = list(module.branches[0].parameters()) if case.added_at else []
    for step, passes in enumerate(case.steps):
        if step == case.unfrozen_at:
            module.frozen.requires_grad_(True)
        if step == case.frozen_at:
            module.first.requires_grad_(False)
        if step == case.added_at:
            optimizer.add_param_group({"params": branch})

        def closure(step=step, passes=passes):
            forget()
            for number in range(len(passes)):
                run_pass(step, number)
            return torch.zeros(())

        if case.optimizer == "lbfgs":
            optimizer.step(closure)
            continue
        closure()
        if step == case.skipped:
            optimizer.zero_grad()
            for parameter in branch:
                parameter.grad = None
        else:
            optimizer.step()


def forgetting(case, model, optimizer, module):
    """Return what forgets the gradients of the step before."""
    ways = {
        "optimizer": optimizer.zero_grad,
        "model": model.zero_grad,
        "module": module.zero_grad,
        "to zero": lambda: optimizer.zero_grad(set_to_none=False),
        "never": lambda: None,
    }

    def forget():
        ways[case.forget]()
        if case.added_at:  # which the optimizer may not know yet
            for parameter in module.branches[0].parameters():
                if case.forget != "never":
                    parameter.grad = None

    return forget


def reference(case, ranks):
    """Return the state after training in one process."""
    model = Model(case)
    optimizer = optimizer_of(case, model)
    autocast = contextlib.nullcontext
    if case.precision:
        autocast = functools.partial(torch.autocast, "cpu", getattr(torch, case.precision))

    def run_pass(step, number):
        with autocast():
            each = [losses_of(model, case, step, number, rank) for rank in range(ranks)]
        for losses in zip(*each, strict=True):
            (sum(losses) / ranks).backward(retain_graph=True)

    def clipped(*_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, case.clip)

    if case.clip is not None:
        optimizer.register_step_pre_hook(clipped)
    train(case, model, optimizer, model, run_pass, forgetting(case, model, optimizer, model))
    return model.state_dict()


def prepared(case, rank, ranks):
    """Return the state after training on all ranks, and that of a copy of the model."""
    module = Model(case, sparse=True)
    if rank:
        nn.init.zeros_(module.first.weight)  # the engine starts from rank 0's
    optimizer = optimizer_of(case, module)
    if case.apart:
        preparation.find_ranks = lambda *args: dataclasses.replace(find_ranks(*args), heap=None)
    try:
        model, optimizer = prepare(
            module,
            optimizer,
            engine=case.engine,
            overlap=case.overlap,
            clip_norm=case.clip,
            precision=case.precision,
            alarm=False,
        )
    finally:
        preparation.find_ranks = find_ranks

    def run_pass(step, number):
        alone = getattr(model, "no_sync", None)
        if case.steps[step][number].reduces or alone is None:
            alone = contextlib.nullcontext
        with alone():
            for loss in losses_of(model, case, step, number, rank):
                loss.backward(retain_graph=True)

    train(case, model, optimizer, module, run_pass, forgetting(case, model, optimizer, module))
    state = {name: whole(value) for name, value in model.state_dict().items()}
    if case.engine != "fsdp2":
        torch.save(model, io.BytesIO())
        for copied in (copy.deepcopy(model), copy.deepcopy(module)):
            values = copied.state_dict()
            if any(not torch.equal(values[name], value) for name, value in state.items()):
                raise AssertionError("a copy of the model has other parameters")
    return state


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def outcome(case, rank, ranks):
    expected = reference(case, ranks)
    try:
        found = prepared(case, rank, ranks)
    except PacelineError as error:
        return f"refused: {first_line(error)}"
    except Exception as error:  # any class: a user would see it, too, and it counts as wrong
        traceback.print_exc()
        return f"raised: {type(error).__name__}: {first_line(error)}"
    if found.keys() != expected.keys():
        return f"wrong: the state has {sorted(found)}"
    name, far = farthest(found, expected)
    tolerance = TOLERANCES[case.dtype]
    if case.precision:
        exact = reference(dataclasses.replace(case, precision=None), ranks)
        tolerance = max(tolerance, ROUNDINGS * farthest(exact, expected)[1])
    return "right" if far <= tolerance else f"wrong: {name} by {far:.1e} of at most {tolerance:.1e}"


def farthest(found, expected):
    """Return the tensor of `found` that is farthest from that of `expected`, and how far."""
    far = {name: float((found[name] - value).abs().max()) for name, value in expected.items()}
    name = max(far, key=lambda name: far[name] if far[name] == far[name] else float("inf"))
    return name, far[name]


def main(store, rank, ranks, backend, first, count):
    torch.set_num_threads(1)
    rank, ranks, first = int(rank), int(ranks), int(first)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=10),
    )
    outcomes = {}
    for seed in range(first, first + int(count)):
        faulthandler.dump_traceback_later(60, exit=True)  # a rank that hangs prints its stack
        outcomes[seed] = outcome(draw(seed, ranks), rank, ranks)
        if outcomes[seed].startswith("raised"):
            break  # the ranks may have left each other's way
    print(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)  # models outlive their group here


if __name__ == "__main__":
    main(*sys.argv[1:])
