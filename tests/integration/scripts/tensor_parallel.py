"""A rank of a model with divided layers: STORE RANK RANKS BACKEND CASE... Prints JSON by case.

A case may have arguments: `equal:classifier,many`.
"""

import copy
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pipeline_models import make
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map

from paceline.core.errors import PacelineError
from paceline.training import prepare
from paceline.training.optimizers import LAMB, LARS, parameter_groups

RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
BACKEND, *CASES = sys.argv[4:]
SAMPLES = [5, 2, 4, 3][:RANKS]  # of each rank
CLIP = 0.3


class Classifier(nn.Module):
    """Convolutions, then a pair with a function between, and a layer of few outputs."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten())
        self.classifier = nn.Sequential(nn.Linear(108, 37), nn.GELU(), nn.Linear(37, 11))
        self.head = nn.Linear(11, 5, bias=False)

    def forward(self, x):
        return self.head(torch.tanh(self.classifier(self.features(x))))


DIVIDED = {
    "classifier": ["classifier.0", "classifier.2", "head"],
    "transformer": ["layers.0.project", "layers.1.mix.0", "layers.1.mix.2", "layers.2.mix.2"],
    "many": ["middle", "left", "kind"],
}
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01),
    # A gradient that is 0 but for rounding moves weights by its size / eps.
    "adam": lambda model: torch.optim.AdamW(model.parameters(), 0.01, eps=1e-4),
    "lars": lambda model: LARS(
        parameter_groups(model, weight_decay=0.01), 0.5, trust_coefficient=0.1
    ),
    "lamb": lambda model: LAMB(parameter_groups(model, weight_decay=0.01), 0.01),
}


def model_of(name, samples, seed=0):
    """Return a model, a batch, its targets, and the loss."""
    if name != "classifier":
        return make(name, samples, seed)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Classifier()
    torch.manual_seed(seed + 1)
    images = torch.randn(samples, 2, 8, 8)
    return model, images, torch.randint(0, 5, (samples,)), functional.cross_entropy


def own_rows(batch):
    """Return this rank's samples of all ranks' batch."""
    begin, end = sum(SAMPLES[:RANK]), sum(SAMPLES[: RANK + 1])

    def own(leaf):
        is_whole = isinstance(leaf, torch.Tensor) and leaf.shape[:1] == (sum(SAMPLES),)
        return leaf[begin:end] if is_whole else leaf

    return tree_map(own, batch)


def step_alone(model, optimizer, inputs, target, loss_fn, clip=None):
    optimizer.zero_grad()
    given = inputs if isinstance(inputs, dict | tuple) else (inputs,)
    outputs = model(**given) if isinstance(given, dict) else model(*given)
    loss = loss_fn(outputs, target)
    loss.backward()
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return loss.detach()


def far(state, other):
    assert list(state) == list(other)
    return max(float((state[name] - other[name]).abs().max()) for name in state)


def prepared_for(name, kind="sgd", steps=0, **options):
    """Return what trains a model, its reference in one process, and how far losses are."""
    model, inputs, target, loss_fn = model_of(name, sum(SAMPLES))
    alone = copy.deepcopy(model)
    reference = OPTIMIZERS[kind](alone)
    options = {"tensor_parallel": DIVIDED[name], **options}
    prepared = prepare(
        model, OPTIMIZERS[kind](model), loss_fn=loss_fn, deadline_s=60.0, alarm=False, **options
    )
    losses = []
    for step in range(steps):
        _, inputs, target, _ = model_of(name, sum(SAMPLES), seed=step)
        expected = step_alone(alone, reference, inputs, target, loss_fn, options.get("clip_norm"))
        prepared.optimizer.zero_grad()
        loss = prepared.forward_backward(own_rows(inputs), own_rows(target))
        prepared.optimizer.step()
        losses.append(abs(float(loss - expected)))
    return prepared, alone, max(losses, default=0.0)


def case_equal(*names):
    """Train with each optimizer on unequal batches, with and without clipping."""
    found = {}
    for name in names:
        for kind in OPTIMIZERS:
            clip = {"clip_norm": CLIP} if kind != "adam" else {}
            prepared, alone, loss = prepared_for(name, kind, steps=3, **clip)
            weights = [p.numel() for p in prepared.model.parameters()]
            whole = [p.numel() for p in alone.parameters()]
            state = prepared.model.state_dict()
            found[f"{name} {kind}"] = {
                "error": far(state, alone.state_dict()),
                "loss": loss,
                "kept": sum(weights) / sum(whole),
            }
    return found


def case_groups(shared_by):
    """Several groups, each with a part of every divided layer on each of its ranks."""
    found = {}
    for kind in ("sgd", "lars"):
        prepared, alone, _ = prepared_for(
            "classifier", kind, 3, clip_norm=CLIP, tensor_parallel_ranks=int(shared_by)
        )
        own = dict(alone.named_parameters())
        part = prepared.model.module.classifier[0].weight
        found[kind] = {
            "error": far(prepared.model.state_dict(), alone.state_dict()),
            "parts": own["classifier.0.weight"].numel() / part.numel(),
        }
    return found


def case_state(folder):
    """Save whole states; go on from them, here and in one process."""
    found = {}
    for kind in ("adam", "lamb"):
        prepared, alone, _ = prepared_for("classifier", kind, 2)
        state = copy.deepcopy(prepared.state_dict())
        path = Path(folder) / f"{kind}.pt"
        if RANK == 0:
            torch.save(state, path)
        again, *_ = prepared_for("classifier", kind)
        again.load_state_dict(state)
        _, inputs, target, _ = model_of("classifier", sum(SAMPLES), seed=9)
        for trained in (prepared, again):
            trained.optimizer.zero_grad()
            trained.forward_backward(own_rows(inputs), own_rows(target))
            trained.optimizer.step()
        found[kind] = {
            "names": list(state["model"]) == list(alone.state_dict()),
            "same": far(prepared.model.state_dict(), again.model.state_dict()),
        }
        moments = state["optimizer"]["state"]["classifier.0.weight"]
        found[kind]["moments"] = [list(moments[key].shape) for key in sorted(moments)[:1]]
    return found


def case_load(folder):
    """Go on from a state that another number of ranks saved."""
    found = {}
    for kind in ("adam", "lamb"):
        state = torch.load(Path(folder) / f"{kind}.pt", weights_only=True)
        prepared, *_ = prepared_for("classifier", kind)
        prepared.load_state_dict(copy.deepcopy(state))
        model, inputs, target, loss_fn = model_of("classifier", sum(SAMPLES), seed=9)
        model.load_state_dict(state["model"])
        alone = prepare(model, OPTIMIZERS[kind](model), group=single())
        alone.load_state_dict(copy.deepcopy(state))
        step_alone(alone.model, alone.optimizer, inputs, target, loss_fn)
        prepared.optimizer.zero_grad()
        prepared.forward_backward(own_rows(inputs), own_rows(target))
        prepared.optimizer.step()
        found[kind] = far(prepared.model.state_dict(), model.state_dict())
    return found


def single():
    """Return a group of this rank alone."""
    return [dist.new_group([rank]) for rank in range(RANKS)][RANK]


def error_of(call):
    try:
        call()
    except PacelineError as problem:
        return f"{problem} {problem.where}"
    return ""


def case_nan():
    """A sample of the last rank is NaN, and then it is not."""
    prepared, _, _ = prepared_for("classifier", steps=1)
    before = copy.deepcopy(prepared.model.state_dict())
    _, inputs, target, _ = model_of("classifier", sum(SAMPLES))
    inputs[-1] = torch.nan
    own = own_rows(inputs), own_rows(target)

    def step():
        prepared.optimizer.zero_grad()
        prepared.forward_backward(*own)
        prepared.optimizer.step()

    text = error_of(step)
    kept = far(prepared.model.state_dict(), before)
    own[0].nan_to_num_()
    return {"text": text, "kept": kept, "again": error_of(step)}


def case_clipped():
    """Clip by hand: a bound that clips is an error, and one that does not is none."""
    found = {}
    for most in (1e9, 1e-3):
        prepared, _, _ = prepared_for("classifier")
        _, inputs, target, _ = model_of("classifier", sum(SAMPLES))
        prepared.forward_backward(own_rows(inputs), own_rows(target))
        nn.utils.clip_grad_norm_(prepared.model.parameters(), most)
        found[f"{most:g}"] = error_of(prepared.optimizer.step)
    return found


def case_gone():
    """Rank 1 evaluates while the others train; then layers are called in other orders."""
    prepared, *_ = prepared_for("classifier", steps=1)
    _, inputs, _, _ = model_of("classifier", sum(SAMPLES))

    def differ():
        with torch.set_grad_enabled(RANK != 1):
            prepared.model(own_rows(inputs))

    def other_layer():
        module = prepared.model.module
        layer = module.head if RANK == 1 else module.classifier[0]
        with torch.no_grad():
            layer(torch.zeros(2, layer.in_features))

    def saves():
        if RANK == 1:
            prepared.model(own_rows(inputs))
        else:
            prepared.model.module.head.state_dict()

    def forwards():
        outputs = prepared.model(own_rows(inputs))
        if RANK == 1:
            prepared.model(own_rows(inputs))
        else:
            outputs.sum().backward()

    return {
        "backward": error_of(forwards),
        "mode": error_of(differ),
        "layer": error_of(other_layer),
        "state": error_of(saves),
    }


def case_evaluates():
    """Evaluate on unequal batches, also without rows; layers of a pair are called alone."""
    prepared, alone, _ = prepared_for("classifier", steps=1)
    _, inputs, _, _ = model_of("classifier", sum(SAMPLES))
    own = own_rows(inputs) if RANK else inputs[:0]
    prepared.model.eval()
    with torch.no_grad():
        error = (prepared.model(own) - alone(own)).abs().sum()
        layer, single_layer = prepared.model.module.classifier[0], alone.classifier[0]
        x = torch.randn(2, 3, layer.in_features)
        error += (layer(x) - single_layer(x)).abs().max()
    return {"error": float(error), "shape": list(layer(x).shape)}


def case_auto():
    """What auto divides, and what it says."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    tied = nn.Linear(600, 600)
    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 5), nn.Flatten(), nn.Linear(2304, 600), nn.ReLU()),
        *(tied, tied, nn.Linear(600, 2), nn.Linear(2, 700)),
    )
    example = torch.randn(4, 1, 28, 28)
    prepared = prepare(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        tensor_parallel="auto",
        example_inputs=example,
        loss_fn=functional.mse_loss,
    )
    prepared.forward_backward(example, torch.zeros(4, 700))
    prepared.optimizer.step()
    return {"kept": [p.shape[0] * p[0].numel() for p in model.parameters() if p.ndim == 2]}


def case_refused():
    """Name what does not work."""
    found = {}
    options = {
        "engine": {"engine": "sharded"},
        "compression": {"compression": "float16"},
        "memory_budget": {"memory_budget": 1 << 30},
        "partitions": {"partitions": RANKS, "example_inputs": torch.randn(2, 2, 8, 8)},
        "unknown": {"tensor_parallel": ["classifier.1"]},
        "misspelt": {"tensor_parallel": ["heat"]},
        "text": {"tensor_parallel": "head"},
        "none": {"tensor_parallel": []},
        "no example": {"tensor_parallel": "auto"},
        "groups": {"tensor_parallel_ranks": 3},
    }
    for name, given in options.items():
        found[name] = error_of(lambda given=given: prepared_for("classifier", **given))
    found["tied"] = error_of(
        lambda: prepared_for("transformer", tensor_parallel=["head"]),
    )
    model, *_ = model_of("classifier", 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    found["lbfgs"] = error_of(lambda: prepare(model, optimizer, tensor_parallel=["head"]))
    return found


def case_differ():
    """One rank has what the others have not: all ranks raise the same error, and none waits."""
    found = {}
    model, *_ = model_of("classifier", 4)
    # The example is rank 0's: the error of its forward pass is that of all ranks.
    example = torch.randn(2, 3, 8, 8) if RANK == 0 else torch.randn(2, 2, 8, 8)
    optimizer = OPTIMIZERS["sgd"](model)
    found["example"] = error_of(
        lambda: prepare(model, optimizer, tensor_parallel="auto", example_inputs=example)
    )
    kind = torch.optim.LBFGS if RANK == 1 else torch.optim.SGD
    found["optimizer"] = error_of(
        lambda: prepare(model, kind(model.parameters()), tensor_parallel=["head"])
    )
    model.head.weight.requires_grad_(RANK != 1)
    found["frozen"] = error_of(lambda: prepare(model, optimizer, tensor_parallel=["head"]))
    return found


def case_part(size):
    """The first ranks of the job train, in groups of two; rank 0 is in more groups than they."""
    chosen = list(range(int(size)))
    group = dist.new_group(chosen)
    dist.new_group([0], use_local_synchronization=True)
    if RANK not in chosen:
        return None
    model, inputs, target, loss_fn = model_of("classifier", 3)
    alone = copy.deepcopy(model)
    step_alone(alone, OPTIMIZERS["sgd"](alone), inputs, target, loss_fn)
    prepared = prepare(
        model,
        OPTIMIZERS["sgd"](model),
        group=group,
        loss_fn=loss_fn,
        deadline_s=20.0,
        tensor_parallel=DIVIDED["classifier"],
        tensor_parallel_ranks=2,
    )
    prepared.forward_backward(inputs, target)
    prepared.optimizer.step()
    return far(prepared.model.state_dict(), alone.state_dict())


def case_half():
    """Train in bfloat16 and in float16, with a step that overflows."""
    found = {}
    for precision in ("bfloat16", "float16"):
        torch.set_default_dtype(torch.float64)
        model, inputs, target, loss_fn = model_of("classifier", sum(SAMPLES))
        model.float()
        alone = copy.deepcopy(model)
        prepared = prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            tensor_parallel=DIVIDED["classifier"],
            precision=precision,
            loss_fn=loss_fn,
        )
        inputs = inputs.float()
        prepared.forward_backward(own_rows(inputs), own_rows(target))
        prepared.optimizer.step()
        step_alone(alone, torch.optim.SGD(alone.parameters(), 0.1), inputs, target, loss_fn)
        state = prepared.model.state_dict()
        found[precision] = {
            "error": far(state, alone.state_dict()),
            "types": sorted({str(value.dtype) for value in state.values()}),
        }
    return found


def case_lost():
    """The last rank is gone in the second step; the others do not wait for ever."""
    prepared, *_ = prepared_for("classifier", steps=1)
    if RANK == RANKS - 1:
        print("{}", flush=True)
        os._exit(0)
    _, inputs, _, _ = model_of("classifier", sum(SAMPLES))
    return error_of(lambda: prepared.model(own_rows(inputs)))


def main():
    dist.init_process_group(
        BACKEND,
        store=dist.FileStore(sys.argv[1], RANKS),
        rank=RANK,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    torch.set_num_threads(1)
    found = {}
    for case in CASES:
        name, _, arguments = case.partition(":")
        found[name] = globals()[f"case_{name}"](*filter(None, arguments.split(",")))
    print(json.dumps(found), flush=True)
    if "lost" in CASES:
        os._exit(0)  # the group has lost a rank, and cannot end together
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
