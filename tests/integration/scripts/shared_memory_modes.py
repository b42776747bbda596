"""A rank on a host where all ranks share memory: STORE RANK RANKS CASE [MODE PLACE].

Prints what the case found, as JSON.
"""

import copy
import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import PacelineError
from paceline.training import prepare
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.ranks import find_ranks

STORE, RANK, RANKS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
ENGINES = ("allreduce", "sharded", "root")


def net(seed=0):
    """Layers of odd sizes, in more than one bucket, with buffers, and one that is never used."""
    torch.manual_seed(seed)
    # No bias before a normalisation: its gradient is rounding, which Adam would magnify.
    first = nn.Linear(5, 700, bias=False)
    layers = [first, nn.BatchNorm1d(700), nn.Tanh(), nn.Linear(700, 401), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(401, 1)).double()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


def batch(step):
    generator = torch.Generator().manual_seed(100 * RANK + step)
    return torch.randn(6, 5, generator=generator, dtype=torch.float64)


def train(prepared, steps):
    model, optimizer = prepared
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def adam(model):
    return torch.optim.Adam(model.parameters(), 0.01)


def far(model, other):
    for wrapped in (model, other):
        wrapped.state_dict()  # awaits what other ranks updated
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def case_copies():
    """What rank 0 writes to its parameters is there, or is not, on the others."""
    found = {}
    for engine in ENGINES:
        model, optimizer = prepare(model := net(), adam(model), engine=engine)
        train((model, optimizer), range(2))
        dist.barrier()
        if RANK == 0:
            with torch.no_grad():
                next(model.parameters()).fill_(7)
        dist.barrier()
        found[engine] = bool((next(model.parameters()) == 7).all())
        dist.barrier()
    return found


def case_together():
    """Two models train in turns, with evaluation between steps; each as if it were alone."""
    reference = {}
    for engine in ENGINES:
        alone = prepare(model := net(), adam(model), engine="allreduce")
        train(alone, range(4))
        reference[engine] = alone.model
    pairs = {engine: prepare(model := net(), adam(model), engine=engine) for engine in ENGINES}
    losses = []
    for step in range(4):
        for prepared in pairs.values():
            train(prepared, [step])
            with torch.no_grad():  # the same on all ranks: evaluation has the means of all
                prepared.model.eval()
                probe = torch.ones(2, 5, dtype=torch.float64)
                hidden = prepared.model.module[0](probe)
                losses.append(float(hidden.sum()))
                prepared.model.train()
    every = [None] * RANKS
    dist.all_gather_object(every, losses)
    buffers = [float(p.model.module[1].running_mean.sum()) for p in pairs.values()]
    return {
        "errors": {engine: far(pairs[engine].model, reference[engine]) for engine in ENGINES},
        "losses_equal": all(other == every[0] for other in every),
        "buffers": buffers,
    }


def case_states():
    """Training goes on from the state of each engine in each engine."""
    whole = prepare(model := net(), adam(model), engine="allreduce")
    train(whole, range(4))
    found = {}
    for first in ENGINES:
        prepared = prepare(model := net(), adam(model), engine=first)
        train(prepared, range(2))
        state = copy.deepcopy(prepared.state_dict())
        for second in ENGINES:
            other = prepare(model := net(seed=1), adam(model), engine=second)
            train(other, [9])
            other.load_state_dict(copy.deepcopy(state))
            train(other, range(2, 4))
            found[f"{first} to {second}"] = far(other.model, whole.model)
    return found


def case_lost():
    """Rank 1 ends after its backward pass, or in its forward pass; others wait for it."""
    mode, place = sys.argv[5:7]
    optimizer = adam(model := net())
    model = DataParallel(model, find_ranks(model), mode=mode)
    model.adopt(optimizer)
    train((model, optimizer), range(2))
    if RANK == 1 and place == "forward":
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        optimizer.zero_grad()
        model(batch(2)).square().mean().backward()
        if RANK == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        model(batch(2))
    except PacelineError as problem:
        print(json.dumps({"kind": type(problem).__name__, "text": str(problem)}), flush=True)
    os._exit(0)  # no tidy end: the group cannot be used any more


def main():
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(STORE, RANKS),
        rank=RANK,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    print(json.dumps(globals()[f"case_{sys.argv[4]}"]()))
    dist.destroy_process_group()


main()
