"""A rank of a small training job: STORE RANK RANKS BACKEND [ENGINES...].

Prints how far the parameters of each engine are from those of one process.
"""

import copy
import dataclasses
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.training import prepare
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.ranks import find_ranks

STEPS, BATCH = 6, 12


class Model(nn.Module):
    """Layers that are used, one that is not, and one that only odd ranks use."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 33)
        self.norm = nn.LayerNorm(33)
        self.second = nn.Linear(33, 5)
        self.sometimes = nn.Linear(33, 5)
        self.never = nn.Linear(33, 5)

    def forward(self, given, sometimes=False):
        hidden = self.norm(self.first(given)).tanh()
        result = self.second(hidden)
        return result + self.sometimes(hidden) if sometimes else result


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
}
CASES = [
    (engine, optimizer, overlap)
    for engine in ("allreduce", "sharded", "root")
    for optimizer in OPTIMIZERS
    for overlap in (False, True)
] + [
    ("ddp", "sgd", None),
    *((f"{mode} apart", "sgd", True) for mode in ("allreduce", "sharded", "root")),
]


def batches(seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield (
            torch.randn(BATCH, 7, generator=generator, dtype=torch.float64),
            torch.randn(BATCH, 5, generator=generator, dtype=torch.float64),
        )


def loss_of(model, given, wanted, sometimes):
    return nn.functional.mse_loss(model(given, sometimes=sometimes), wanted)


def alone(model, optimizer, ranks):
    """Train as one process would: the mean over the parts of all ranks."""
    for given, wanted in batches(0):
        optimizer.zero_grad()
        parts = zip(given.chunk(ranks), wanted.chunk(ranks), strict=True)
        losses = [loss_of(model, *part, r % 2) for r, part in enumerate(parts)]
        (sum(losses) / ranks).backward()
        optimizer.step()


def wrapped(model, optimizer, engine, overlap):
    """Return the prepared model and optimizer; `apart`: as if the ranks shared no memory."""
    if not engine.endswith("apart"):
        return tuple(prepare(model, optimizer, engine=engine, overlap=overlap))
    ranks = dataclasses.replace(find_ranks(model), heap=None)
    each = {"bucket_bytes": 1, "first_bucket_bytes": 1}  # a bucket for each parameter
    parallel = DataParallel(model, ranks, mode=engine.split()[0], overlap_gradients=overlap, **each)
    parallel.adopt(optimizer)
    return parallel, optimizer


def together(prepared, rank, ranks, accumulate):
    model, optimizer = prepared
    for given, wanted in batches(0):
        optimizer.zero_grad()
        given, wanted = given.chunk(ranks)[rank], wanted.chunk(ranks)[rank]
        if accumulate and ranks > 1:
            halves = list(zip(given.chunk(2), wanted.chunk(2), strict=True))
            with model.no_sync():
                (loss_of(model, *halves[0], rank % 2) / 2).backward()
            (loss_of(model, *halves[1], rank % 2) / 2).backward()
        else:
            loss_of(model, given, wanted, rank % 2).backward()
        # Also those of a layer that did not run: the update must not meet their return.
        assert not getattr(model, "_returning", {}), "parameters are still on their way"
        optimizer.step()


def differences(rank, ranks, engines):
    """Return the largest difference of a parameter in each case.

    The models are gone when it returns: torch's DistributedDataParallel can hang where it outlives
    its process group, since it ends gloo's threads while it holds the interpreter's lock.
    """
    found = {}
    for engine, name, overlap in (case for case in CASES if not engines or case[0] in engines):
        for accumulate in (False, True):
            torch.manual_seed(7)
            reference = Model().double()
            model = copy.deepcopy(reference)
            if rank:  # the engine starts from rank 0's
                nn.init.zeros_(model.first.weight)
            alone(reference, OPTIMIZERS[name](reference.parameters()), ranks)
            prepared = wrapped(model, OPTIMIZERS[name](model.parameters()), engine, overlap)
            together(prepared, rank, ranks, accumulate)
            state = prepared[0].state_dict()
            error = max(
                float((state[key] - value).abs().max())
                for key, value in reference.state_dict().items()
            )
            found[f"{engine} {name} overlap={overlap} accumulate={accumulate}"] = error
    return found


def main():
    store, rank, ranks, backend = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group(
            backend,
            store=dist.FileStore(store, ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=60),
        )
    found = differences(rank, ranks, sys.argv[5:])
    print(json.dumps(found))
    if ranks > 1:
        dist.destroy_process_group()


main()
