"""A rank that trains two models, in an order of its own: STORE RANK RANKS BACKEND WHAT.

WHAT: `train` prints how far gradients are from the mean over the ranks, by case; `differ` has the
last rank train fewer models, and prints the error; `ddp` has torch's DistributedDataParallel, whose
order `paceline run` checks; `ddp-same` has it in the same order.
"""

import dataclasses
import itertools
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.ranks import find_ranks

WIDTH, STEPS = 6, 12


class Branches(nn.Module):
    """Layers that ranks run in orders of their own; the last one only some ranks use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, chosen):
        return sum(self.layers[number](x).square().sum() for number in chosen)


def loss_of(models, rank, step):
    """Return a loss whose gradients become ready in an order that differs by rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    orders = list(itertools.permutations(range(3)))
    layers = list(orders[(step + 2 * rank) % len(orders)]) + [3] * ((step + rank) % 2)
    turned = list(models.items())[:: -1 if (rank + step) % 2 else 1]
    return sum(float(name) * model(x, layers) for name, model in turned)


def trained_in(step, names):
    """Return the models of a step: alone and together in turns, as a GAN's."""
    return names if step % 3 else names[: 1 + step % 2]


def errors_of(rank, ranks, *, shares_memory, overlap, bucket_bytes):
    names = ["1", "2", "3"]
    torch.manual_seed(5)
    plain = {name: Branches().double() for name in names}
    found = find_ranks(nn.ModuleList(plain.values()))
    if not shares_memory:
        found = dataclasses.replace(found, heap=None)
    sizes = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": bucket_bytes}
    wrapped = {
        name: DataParallel(model, found, overlap_gradients=overlap, **sizes)
        for name, model in plain.items()
    }
    worst = 0.0
    for step in range(STEPS):
        chosen = trained_in(step, names)
        expected = mean_gradients({name: plain[name] for name in chosen}, ranks, step)
        for model in plain.values():
            model.zero_grad()
        loss_of({name: wrapped[name] for name in chosen}, rank, step).backward()
        for name, model in plain.items():
            for key, parameter in model.named_parameters():
                want = expected.get((name, key))
                have = parameter.grad
                assert (want is None) == (have is None), (step, name, key)
                if want is not None:
                    worst = max(worst, float((have - want).abs().max()))
    return worst


def mean_gradients(models, ranks, step):
    """Return the mean gradients over the ranks, by model and parameter, without the engine."""
    keys = [(n, k) for n, model in models.items() for k, _ in model.named_parameters()]
    parameters = [p for model in models.values() for p in model.parameters()]
    sums = {}
    for rank in range(ranks):
        loss = loss_of(models, rank, step)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for key, gradient in zip(keys, gradients, strict=True):
            if gradient is not None:
                sums[key] = sums.get(key, 0) + gradient / ranks
    return sums


def train(rank, ranks):
    cases = itertools.product((True, False), (True, False), (1, 1 << 20))
    return {
        f"shares_memory={shares} overlap={overlap} bucket_bytes={size}": errors_of(
            rank, ranks, shares_memory=shares, overlap=overlap, bucket_bytes=size
        )
        for shares, overlap, size in cases
    }


def differ(rank, ranks):
    models = {name: Branches().double() for name in ("1", "2")}
    found = dataclasses.replace(find_ranks(models["1"]), heap=None)
    wrapped = {name: DataParallel(model, found) for name, model in models.items()}
    if rank == ranks - 1:
        del wrapped["1"]
    try:
        loss_of(wrapped, rank, 0).backward()
    except UsageError as error:
        return str(error)
    return "no error"


def ddp(rank, _ranks):
    from paceline.launch.worker.ddp_order import check_order

    check_order()
    models = {name: Branches().double() for name in ("1", "2")}
    wrapped = {
        name: nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        for name, model in models.items()
    }
    try:  # in step 0 the two ranks call the models in different orders
        loss_of(wrapped, rank if sys.argv[5] == "ddp" else 0, 0).backward()
    except UsageError as error:
        return str(error)
    return "no error"


def main():
    store, rank, ranks, backend, what = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:6]
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    run = {"train": train, "differ": differ}.get(what, ddp)
    print(json.dumps(run(rank, ranks)))
    dist.barrier()


main()
