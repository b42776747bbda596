"""A rank that trains a model in stages: STORE RANK RANKS BACKEND CASE ARGUMENTS. Prints JSON."""

import copy
import itertools
import json
import os
import random
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from pipeline_models import (
    MODELS,
    Chooses,
    Masked,
    RandomGraph,
    Repeats,
    ResidualNet,
    graph_loss,
    make,
    masked_inputs,
)
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from paceline.core.errors import PacelineError
from paceline.training import Trainer, prepare
from paceline.training.local_tensors import local, whole
from paceline.training.optimizers import LARS, parameter_groups
from paceline.training.pipeline.graph import capture

RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
BACKEND, CASE, *ARGUMENTS = sys.argv[4:]


def rows(batch, samples, begin, end):
    def own(leaf):
        is_whole = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == samples
        return leaf[begin:end] if is_whole else leaf

    return tree_map(own, batch)


def run_alone(model, inputs, target, loss_fn):
    given = inputs if isinstance(inputs, dict | tuple) else (inputs,)
    outputs = model(**given) if isinstance(given, dict) else model(*given)
    loss = loss_fn(outputs, target)
    loss.backward()
    return loss.detach()


def own_rows(prepared, replicas, samples, inputs, target):
    """Return the part of a batch of this rank's replica; replica 0 has a sample more."""
    assert prepared.replicas == replicas
    replica = prepared.replica
    bounds = [0, *(samples * (r + 1) // replicas + (r + 1 < replicas) for r in range(replicas))]
    begin, end = bounds[replica], bounds[replica + 1]
    return rows(inputs, samples, begin, end), rows(target, samples, begin, end)


def own_parameters(prepared, model):
    return dict(prepared.model.own if prepared.is_divided else model.named_parameters())


def largest_error(own, expected):
    errors = []
    for name, parameter in own.items():
        gradient = expected[name].grad
        assert (parameter.grad is None) == (gradient is None), name
        if gradient is not None:
            errors.append(float((whole(parameter.grad) - gradient).norm() / gradient.norm()))
    return max(errors, default=0.0)


def grid(partitions, replicas, microbatches, samples, models=MODELS, **options):
    """Return the largest relative errors of gradients and of losses, by model and microbatches."""
    found = {}
    for name in models:
        for count in map(int, microbatches.split(",")):
            model, inputs, target, loss_fn = make(name, int(samples))
            alone = copy.deepcopy(model)
            expected = run_alone(alone, inputs, target, loss_fn)
            prepared = prepare(
                model,
                torch.optim.SGD(model.parameters(), 0.1),
                partitions=int(partitions),
                replicas=int(replicas),
                microbatches=count,
                loss_fn=loss_fn,
                example_inputs=rows(inputs, int(samples), 0, 2),
                deadline_s=60.0,
                **options,
            )
            own = own_rows(prepared, int(replicas), int(samples), inputs, target)
            losses = []
            for _ in range(2):  # the second time all forms are known, and receives are posted early
                prepared.optimizer.zero_grad()
                losses.append(prepared.forward_backward(*own))
            parameters = own_parameters(prepared, model)
            found[f"{name} {count}"] = [
                largest_error(parameters, dict(alone.named_parameters())),
                max(float((loss - expected).abs()) for loss in losses),
            ]
    return found


def graphs(seeds):
    """Return the errors of random graphs, cut anywhere, in any order of any microbatches."""
    found = {}
    torch.set_default_dtype(torch.float64)
    for seed in range(int(seeds)):
        choices = random.Random(seed)
        torch.manual_seed(seed)
        model = RandomGraph(seed)
        layers = len(capture(model).layers)
        schedule = choices.choice(["1f1b", "fill_drain", "zero_bubble", "interleaved"])
        stages = 2 * RANKS if schedule == "interleaved" and layers >= 2 * RANKS else RANKS
        schedule = "1f1b" if schedule == "interleaved" and stages == RANKS else schedule
        cuts = [0, *sorted(choices.sample(range(1, layers), stages - 1)), layers]
        alone = copy.deepcopy(model)
        samples = choices.randint(1, 9)
        inputs = (torch.randn(samples, 5), torch.randn(samples, 5))
        target = torch.randn(samples, 5)
        expected = run_alone(alone, inputs, target, graph_loss)
        prepared = prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            partitions=RANKS,
            microbatches=choices.randint(1, 5),
            schedule=schedule,
            layers=tuple(end - begin for begin, end in itertools.pairwise(cuts)),
            loss_fn=graph_loss,
            deadline_s=60.0,
        )
        for _ in range(2):
            prepared.optimizer.zero_grad()
            loss = prepared.forward_backward(inputs, target)
        error = largest_error(prepared.model.own, dict(alone.named_parameters()))
        found[seed] = [error, float((loss - expected).abs())]
    return found


def sharded():
    """The same where FSDP2 shards each stage over its replicas, in every order; and its memory."""
    found = {name: grid(2, 2, "3", 11, engine="fsdp2", **options) for name, options in SHARDED}
    return {
        "grid": found,
        "library": library(2, 2, "3", 11, engine="fsdp2"),
        "steps": steps(2, 2, engine="fsdp2"),
        "memory": memory(),
        "accumulated": accumulated(),
    }


def memory():
    """Return the bytes that this rank keeps between steps, whole and sharded."""
    found = []
    for engine in ("allreduce", "fsdp2"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        optimizer = torch.optim.Adam(model.parameters())
        given = {"loss_fn": nn.functional.mse_loss, "partitions": 2, "engine": engine}
        prepared = prepare(model, optimizer, **given)
        prepared.forward_backward(torch.randn(8, 64), torch.randn(8, 64))
        optimizer.step()
        kept = [local(p) for p in model.parameters() if not p.is_meta]
        state = [local(value) for values in optimizer.state.values() for value in values.values()]
        gradients = [local(p.grad) for p in model.parameters() if p.grad is not None]
        found.append([sum(x.nbytes for x in part) for part in (kept, gradients, state)])
    return found


class Scaled(ResidualNet):
    """Has a parameter without a dimension that could be divided."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return super().forward(x) * self.scale


def accumulated():
    """Return the error of gradients of two batches with an evaluation between them."""
    _, inputs, target, loss_fn = make("residual", 11)
    model = Scaled()
    alone = copy.deepcopy(model)
    expected = [run_alone(alone, inputs, target, loss_fn) for _ in range(2)]
    given = {"loss_fn": loss_fn, "example_inputs": inputs[:2], "microbatches": 2}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = prepare(model, optimizer, partitions=2, engine="fsdp2", **given)
    own = own_rows(prepared, 2, 11, inputs, target)
    losses = [prepared.forward_backward(*own)]
    with torch.no_grad():
        outputs = prepared.model(own[0])
    losses.append(prepared.forward_backward(*own))
    errors = [float((a - b).abs()) for a, b in zip(losses, expected, strict=True)]
    with torch.no_grad():
        if outputs is not None:
            errors.append(float((outputs - alone(own[0])).abs().max()))
    return max(*errors, largest_error(prepared.model.own, dict(alone.named_parameters())))


def library(partitions, replicas, microbatches, samples, **options):
    """The same for a model that decides in Python."""
    return grid(partitions, replicas, microbatches, samples, ["library"], **options)


ORDERS = {
    "fill_drain": {"schedule": "fill_drain"},
    "interleaved": {"schedule": "interleaved"},
    "zero_bubble": {"schedule": "zero_bubble"},
    "recompute": {"recompute": True},
}


SHARDED = [("1f1b", {}), *ORDERS.items()]


def orders(partitions, replicas, microbatches, samples):
    """Return the errors of all schedules, and of stages that recompute."""
    shape = (partitions, replicas, microbatches, samples)
    return {name: grid(*shape, **options) for name, options in ORDERS.items()}


def statistics():
    """Return the statistics of batch normalisation without and with recomputation."""
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4)]
        model = nn.Sequential(*layers)
        prepared = prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            partitions=2,
            microbatches=2,
            layers=(3, 1),
            recompute=recompute,
            loss_fn=nn.functional.mse_loss,
        )
        torch.manual_seed(1)
        prepared.forward_backward(torch.randn(8, 4), torch.randn(8, 4))
        state = prepared.state_dict()["model"]
        gradient = prepared.model.own[f"{0 if RANK == 0 else 3}.weight"].grad
        found.append([gradient.tolist(), {n: v.tolist() for n, v in state.items() if n[0] == "1"}])
    return found


def repeats(schedule, *layers):
    """Return the error of the gradients where stages use shared layers in different orders."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, inputs, target = Repeats(), torch.randn(6, 4), torch.randn(6, 4)
    alone = copy.deepcopy(model)
    run_alone(alone, inputs, target, nn.functional.mse_loss)
    prepared = prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        partitions=RANKS,
        schedule=schedule,
        layers=tuple(map(int, layers)),
        loss_fn=nn.functional.mse_loss,
        deadline_s=20.0,
    )
    prepared.forward_backward(inputs, target)
    return largest_error(prepared.model.own, dict(alone.named_parameters()))


def masked():
    """Return the errors of gradients where inputs for all samples have as many rows as there are.

    The example is the batch itself, or has fewer samples.
    """
    torch.set_default_dtype(torch.float64)
    found = []
    for seen in (6, 2):
        torch.manual_seed(0)
        model, inputs, target = Masked(), masked_inputs(6, 6), torch.randn(6, 2)
        alone = copy.deepcopy(model)
        run_alone(alone, inputs, target, nn.functional.mse_loss)
        prepared = prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            partitions=2,
            microbatches=6,
            loss_fn=nn.functional.mse_loss,
            example_inputs={**inputs, "x": inputs["x"][:seen]},
        )
        prepared.forward_backward(inputs, target)
        found.append(largest_error(prepared.model.own, dict(alone.named_parameters())))
    return found


class NeverOne(nn.Module):
    """Computes something else for a batch of one sample."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.high(self.low(x).tanh() * (2 if x.shape[0] == 1 else 1))


def by_default():
    """Return errors of a model whose graph takes no single sample, by types; and the loss's type.

    Nothing is said of microbatches: eight of the seven samples would be too many.
    """
    found = []
    for default, own in ((torch.float32, torch.float64), (torch.float64, torch.float32)):
        torch.manual_seed(0)
        torch.set_default_dtype(default)
        model = NeverOne().to(own)
        inputs, target = torch.randn(7, 4, dtype=own), torch.randn(7, 2, dtype=own)
        alone = copy.deepcopy(model)
        expected = run_alone(alone, inputs, target, nn.functional.mse_loss)
        prepared = prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            partitions=2,
            loss_fn=nn.functional.mse_loss,
            example_inputs=inputs[:4],
        )
        loss = prepared.forward_backward(inputs, target)
        error = largest_error(prepared.model.own, dict(alone.named_parameters()))
        epsilon = torch.finfo(own).eps
        found.append([error / epsilon, float((loss - expected).abs()) / epsilon, str(loss.dtype)])
    return found


def splits():
    """Return the error of the gradients of a model that only split points can divide."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    model, inputs, target = Chooses(), torch.randn(6, 4), torch.randn(6, 4)
    alone = copy.deepcopy(model)
    run_alone(alone, inputs, target, nn.functional.mse_loss)
    prepared = prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        partitions=2,
        split_points=("a", "b"),
        loss_fn=nn.functional.mse_loss,
        deadline_s=20.0,
    )
    prepared.forward_backward(inputs, target)
    return largest_error(prepared.model.own, dict(alone.named_parameters()))


def chosen(strategy):
    """Train by a strategy; return whether layers are divided, and how far the weights are off."""
    model, inputs, target, loss_fn = make("residual", 7)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"loss_fn": loss_fn, "example_inputs": inputs[:4]}
    prepared = prepare(model, optimizer, strategy=strategy, **given)
    prepared.forward_backward(
        *own_rows(prepared, 1 if prepared.is_divided else 2, 7, inputs, target)
    )
    optimizer.step()
    run_alone(alone, inputs, target, loss_fn)
    torch.optim.SGD(alone.parameters(), 0.1).step()
    error = far(prepared.state_dict(), alone) if RANK == 0 else 0.0
    return [prepared.is_divided, error]


def steps(partitions, replicas, **options):
    """Train with clipping, momentum and LARS; compare the whole state with one process's."""
    found = {}
    for kind in ("sgd", "lars"):
        model, inputs, target, loss_fn = make("transformer", 7)
        alone = copy.deepcopy(model)

        def optimizer_of(trained, kind=kind):
            if kind == "sgd":
                return torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
            return LARS(parameter_groups(trained, weight_decay=0.01), lr=0.5, momentum=0.9)

        prepared = prepare(
            model,
            optimizer_of(model),
            partitions=int(partitions),
            replicas=int(replicas),
            microbatches=2,
            clip_norm=0.5,
            loss_fn=loss_fn,
            example_inputs=inputs[:2],
            **options,
        )
        optimizer = optimizer_of(alone)
        own = own_rows(prepared, int(replicas), 7, inputs, target)
        half = None
        for step in range(4):
            optimizer.zero_grad()
            run_alone(alone, inputs, target, loss_fn)
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
            optimizer.step()
            prepared.optimizer.zero_grad()
            prepared.forward_backward(*own)
            prepared.optimizer.step()
            if step == 1:
                shared = [copy.deepcopy(prepared.state_dict())]
                dist.broadcast_object_list(shared)
                half = shared[0]
        state = prepared.state_dict()
        prepared.load_state_dict(half)
        for _ in range(2):
            prepared.optimizer.zero_grad()
            prepared.forward_backward(*own)
            prepared.optimizer.step()
        resumed = prepared.state_dict()
        found[kind] = [far(state, alone), far(resumed, alone)] if RANK == 0 else [0.0, 0.0]
        found[kind].append(sorted(state["model"]) == sorted(alone.state_dict()))
        found[kind].append(sum(p.numel() for p in model.parameters() if not p.is_meta))
    return found


def far(state, alone):
    pairs = [(state["model"][key], value) for key, value in alone.state_dict().items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def outputs():
    """Return how far outputs without a backward pass are off, in between two steps, and their mode.

    On ranks that have no outputs: -1.
    """
    found = []
    for name in MODELS:
        model, inputs, target, loss_fn = make(name, 5)
        alone = copy.deepcopy(model)
        prepared = prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            partitions=RANKS,
            microbatches=2,
            loss_fn=loss_fn,
            example_inputs=rows(inputs, 5, 0, 2),
        )
        prepared.forward_backward(inputs, target)
        given = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
        with torch.no_grad():
            called = prepared.model
            returned = called(**given) if isinstance(given, dict) else called(*given)
        prepared.forward_backward(inputs, target)
        expected = alone(**given) if isinstance(given, dict) else alone(*given)
        pairs = zip(tree_leaves(returned), tree_leaves(expected), strict=True)
        errors = [] if returned is None else [float((a - b.detach()).abs().max()) for a, b in pairs]
        found.append(max(errors, default=-1.0))
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
    settings = {"partitions": RANKS, "microbatches": 2, "loss_fn": nn.functional.mse_loss}
    prepared = prepare(model, torch.optim.SGD(model.parameters(), 0.1), **settings)
    x = torch.ones(8, 4)
    prepared.model.eval()
    first, second = prepared.model(x), prepared.model(x)
    return [*found, first is None or torch.equal(first, second)]


def trainer():
    """The trainer's loop, with two partitions."""
    model, inputs, target, loss_fn = make("residual", 12)
    batches = list(zip(inputs.split(5), target.split(5), strict=True))
    trained = Trainer(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_fn,
        partitions=2,
        microbatches=2,
        schedule="fill_drain",
        example_inputs=inputs[:2],
    )
    assert trained.prepared.model.schedule_of(1).name == "fill_drain"
    return [[epoch.loss, epoch.samples] for epoch in trained.fit(batches, epochs=3)]


def halves():
    """Two models with tied weights, each on half of the ranks; one rank is in more groups."""
    half = RANKS // 2
    groups = [dist.new_group(range(half)), dist.new_group(range(half, RANKS))]
    dist.new_group([0], use_local_synchronization=True)
    model, inputs, target, loss_fn = make("transformer", 6, seed=RANK // half)
    alone = copy.deepcopy(model)
    run_alone(alone, inputs, target, loss_fn)
    prepared = prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        group=groups[RANK // half],
        partitions=half,
        microbatches=2,
        loss_fn=loss_fn,
        example_inputs=inputs[:2],
        deadline_s=20.0,
    )
    prepared.forward_backward(inputs, target)
    return largest_error(prepared.model.own, dict(alone.named_parameters()))


def said(call):
    """Return what the error of a call says; None without one."""
    try:
        call()
    except PacelineError as problem:
        return f"{problem.what}: {problem.why}"
    return None


def refused():
    """Batches that ranks do not have alike, and options and models that do not fit."""
    model, inputs, target, loss_fn = make("residual", 6)
    alone = copy.deepcopy(model)
    run_alone(alone, inputs, target, loss_fn)
    options = {"loss_fn": loss_fn, "example_inputs": inputs[:2], "deadline_s": 20.0}
    prepared = prepare(model, torch.optim.SGD(model.parameters(), 0.1), partitions=RANKS, **options)
    other = inputs + RANK
    fewer = slice(0, 6 - RANK)
    given = (inputs,) if RANK == 0 else (inputs, inputs)
    found = {
        "values": said(lambda: prepared.forward_backward(other, target)),
        "samples": said(lambda: prepared.forward_backward(inputs[fewer], target[fewer])),
        "arguments": said(lambda: prepared.forward_backward(given, target)),
        "empty": said(lambda: prepared.forward_backward(inputs[:0], target[:0])),
        "evaluation": said(torch.no_grad()(lambda: prepared.model(other))),
        "outputs": said(lambda: prepared.model(inputs)),
        "given": said(lambda: model(inputs)),
        "again": said(
            lambda: prepare(model, torch.optim.SGD(model.parameters(), 0.1), partitions=RANKS)
        ),
    }
    prepared.forward_backward(inputs, target)  # nothing was computed, and so nothing is mixed up
    found["error"] = largest_error(prepared.model.own, dict(alone.named_parameters()))
    models = [nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2)]
    models[0][1] = (nn.ReLU, nn.Tanh)[RANK]()
    for kind, model, extra in (
        ("models", models[0], {}),
        ("rank", models[1], {"split_points": ("0", "2") if RANK == 0 else ("0", "none")}),
        ("order", models[1], {"stages_per_rank": 3}),
        ("layers", models[1], {"layers": [5, *[1] * (RANKS - 1)]}),
        ("rate", models[1], {}),
    ):
        optimizer = torch.optim.SGD(model.parameters(), 0.2 if kind == "rate" and RANK else 0.1)
        settings = {"partitions": RANKS, "loss_fn": nn.functional.mse_loss, **extra}
        found[kind] = said(lambda m=model, o=optimizer, s=settings: prepare(m, o, **s))
    # Only one rank has what it needs: the other one's error is that of both, and none waits.
    own = {"loss_fn": nn.functional.mse_loss if RANK == 0 else None}
    example = {"example_inputs": torch.ones(2, 4) if RANK == 0 else None}
    for kind, settings in (("loss", {"partitions": RANKS, **own}), ("auto", example)):
        settings = {"strategy": "auto" if kind == "auto" else None, **settings}
        optimizer = torch.optim.SGD(models[1].parameters(), 0.1)
        found[kind] = said(lambda o=optimizer, s=settings: prepare(models[1], o, **s))
    return found


def fails():
    """The forward pass of stage 0 raises an error; what each rank says to that and to the next."""
    model, inputs, target, loss_fn = make("residual", 6)
    options = {"loss_fn": loss_fn, "example_inputs": inputs[:2], "deadline_s": 3.0}
    prepared = prepare(model, torch.optim.SGD(model.parameters(), 0.1), partitions=RANKS, **options)

    def fail(*_):
        raise ValueError("a bug")

    if RANK == 0:
        prepared.model.staged.stages[0].module.register_forward_hook(fail)
    try:
        prepared.forward_backward(inputs, target)
    except ValueError as problem:
        first = str(problem)
    except PacelineError as problem:
        first = f"{problem.what}: {problem.why}"
    return [first, said(lambda: prepared.forward_backward(inputs, target))]


def dies(how, deadline_s, engine="allreduce"):
    """Rank 1 gets a signal in its second step; the others say whom they miss."""
    model, inputs, target, loss_fn = make("residual", 6)
    prepared = prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        partitions=2 if engine == "fsdp2" else RANKS,
        engine=engine,
        microbatches=3,
        loss_fn=loss_fn,
        example_inputs=inputs[:2],
        deadline_s=float(deadline_s),
    )
    prepared.forward_backward(inputs, target)
    if RANK == 1:
        stage = prepared.model.staged.stages[prepared.model.mesh.place].module
        stage.register_forward_hook(lambda *_: os.kill(os.getpid(), getattr(signal, how)))
    try:
        prepared.forward_backward(inputs, target)
    except PacelineError as problem:
        return {"kind": type(problem).__name__, "what": problem.what, "where": problem.where}
    return {}


limit = timedelta(seconds=60)
store = dist.FileStore(sys.argv[1], RANKS)
torch.set_num_threads(1)
dist.init_process_group(BACKEND, store=store, rank=RANK, world_size=RANKS, timeout=limit)
if CASE == "all":
    result = {
        "grid": grid(2, 1, "1,2,3,4", 6),
        "steps": steps(2, 1),
        "trainer": trainer(),
        "orders": orders(2, 1, "3", 7),
        "statistics": statistics(),
        "outputs": outputs(),
        "repeats": [repeats("1f1b", 3, 2), repeats("interleaved", 2, 1, 1, 1)],
        "splits": splits(),
        "masked": masked(),
        "by_default": by_default(),
        "refused": refused(),
        "library": [library(2, 1, "3", 7), library(2, 1, "2", 5, schedule="zero_bubble")],
        "chosen": [chosen("auto"), chosen("data")],
    }
else:
    result = globals()[CASE](*ARGUMENTS)
print(json.dumps(result), flush=True)
if CASE in ("dies", "fails"):
    os._exit(0)  # no tidy end: the group cannot be used any more
dist.destroy_process_group()
