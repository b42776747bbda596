"""One rank of tests/integration/test_compression.py: STORE RANK RANKS CASE OPTIONS BACKEND.

OPTIONS is a JSON list of options: the case runs once with each, and prints what it found as a list.
"""

import json
import math
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError
from paceline.training.compression import (
    DeepGradientCompression,
    DensitySchedule,
    DGCOptions,
    HalfCompression,
    MomentumTakeover,
    measure,
    register_hook,
    register_powersgd,
)

SHAPES = {"first.weight": (40, 30), "first.bias": (40,), "second.weight": (8, 5, 3), "norm": (7,)}


def options(given):
    """Return DGC's options of the test's JSON."""
    given = dict(given)
    dtype = getattr(torch, given.pop("dtype", "float32"))
    density = DensitySchedule(density=given.pop("density", 0.05), steps_per_stage=0)
    given.pop("hosts", None)
    return DGCOptions(density=density, value_dtype=dtype, **given)


def gradients(rank, step):
    """Return gradients of which all sums are exact in float32: multiples of 1/16 below 64."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    return {
        name: torch.randint(-1000, 1000, shape, generator=random) / 16.0
        for name, shape in SHAPES.items()
    }


def host_means(rank, hosts, step):
    """Return the gradients that the host of a rank averages, weighted as all ranks' average is."""
    own = next(host for host in hosts if rank in host)
    sums = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for peer in own:
        for name, gradient in gradients(peer, step).items():
            sums[name] += gradient
    ranks = sum(map(len, hosts))
    return {name: value * len(hosts) / ranks for name, value in sums.items()}


def conservation(rank, ranks, given):
    """Without momentum: what was averaged and what stays is what all ranks put in, exactly."""
    hosts = given.get("hosts") or [[peer] for peer in range(ranks)]
    compressor = DeepGradientCompression(options(given), hosts=given.get("hosts"))
    sent = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    largest_count = 0
    for step in range(6):
        own = gradients(rank, step)
        if step == 3:  # names in another order: another bucket
            own = dict(reversed(own.items()))
        compressor.reduce(own.items())
        compressor.end_step()
        for name, mean in own.items():
            sent[name] += mean
        largest_count = max(largest_count, int((own["first.weight"] != 0).sum()))
    first = {name: tensor.clone() for name, tensor in sent.items()}
    for tensor in first.values():
        dist.broadcast(tensor, 0)
    equal = all(torch.equal(first[name], sent[name]) for name in sent)
    state = compressor.state_dict()
    wrong = []
    for name, shape in SHAPES.items():
        total = torch.zeros(shape)
        for peer in (host[0] for host in hosts):
            for step in range(6):
                total += host_means(peer, hosts, step)[name]
        rest = state["residual"].get(name, torch.zeros(1)).sum() * 0
        kept = torch.zeros(total.numel())
        if name in state["residual"]:
            kept += state["residual"][name]
        dist.all_reduce(kept)
        if not torch.equal(sent[name] * len(hosts) + kept.view(shape) + rest, total):
            wrong.append(name)
    return {"wrong": wrong, "equal": equal, "sent": largest_count, "names": list(state["residual"])}


def reference(rank, ranks, given):
    """Step by step against the published algorithm in float64, of all ranks, by sorting."""
    factor, density, clip = 0.9, 0.01, 10.0
    shapes = {"matrix": (20, 10), "stack": (2, 3, 20), "vector": (9,)}  # at most 2 / density

    def drawn(peer, step):
        random = torch.Generator().manual_seed(1000 * peer + step)
        return {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}

    nesterov, mask = given["nesterov"], given["mask_momentum"]
    compressor = DeepGradientCompression(
        DGCOptions(
            density=DensitySchedule(density=density, steps_per_stage=0),
            momentum=factor,
            nesterov=nesterov,
            mask_momentum=mask,
            clip_norm=clip,
        )
    )
    states = {name: np.zeros((2, ranks, math.prod(shape))) for name, shape in shapes.items()}
    worst = 0.0
    for step in range(8):
        own = drawn(rank, step)
        compressor.reduce(own.items())
        compressor.end_step()
        for name, shape in shapes.items():
            every = [drawn(peer, step)[name].flatten().double().numpy() for peer in range(ranks)]
            expected = np.zeros(math.prod(shape))
            for peer, g in enumerate(every):
                u, v = states[name][:, peer]
                if len(shape) == 1:
                    expected += g
                    continue
                g = g * min(1.0, clip / math.sqrt(ranks) / np.sqrt((g * g).sum()))
                u[:] = factor * (u + g) if nesterov else factor * u + g
                v += u + g if nesterov else u
                chosen = np.argsort(-np.abs(v), kind="stable")[: math.ceil(density * v.size)]
                expected[chosen] += v[chosen]
                v[chosen] = 0
                if mask:
                    u[chosen] = 0
            expected /= ranks
            if len(shape) == 1:  # dense, with momentum after the average
                u = states[name][0, 0]
                u[:] = factor * u + expected
                expected = expected + factor * u if nesterov else u.copy()
            error = np.abs(own[name].flatten().numpy() - expected).max()
            worst = max(worst, float(error / np.abs(expected).max()))
    return {"error": worst}


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.LayerNorm(30), nn.ReLU(), nn.Linear(30, 5))


def train(rank, model, optimizer, *, steps, first=0):
    for step in range(first, first + steps):
        random = torch.Generator().manual_seed(100 * step + rank)
        loss = model(torch.randn(8, 20, generator=random)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def dense_equal(rank, ranks, given):
    """At density 1 without masking, hooks change nothing but rounding."""
    how = {"momentum": 0.9, "nesterov": given["nesterov"], "weight_decay": 0.01}
    plain = DistributedDataParallel(model_of(), bucket_cap_mb=0.002)
    train(rank, plain, torch.optim.SGD(plain.parameters(), 0.1, **how), steps=12)
    model = DistributedDataParallel(model_of(), bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, **how)
    takeover = MomentumTakeover(optimizer, model.module.named_parameters())
    register_hook(
        model,
        DeepGradientCompression(
            DGCOptions(
                density=DensitySchedule(density=1.0),
                momentum=takeover.momentum,
                nesterov=takeover.nesterov,
                mask_momentum=False,
            ),
            hosts=given.get("hosts"),
        ),
    )
    train(rank, model, optimizer, steps=12)
    moved = (flat(plain) - flat(model_of())).norm()
    return {"error": float((flat(plain) - flat(model)).norm() / moved)}


def resumed(rank, ranks, given):
    """A run that is saved, loaded and continued ends with the bits of one that is not."""

    def start():
        model = DistributedDataParallel(model_of(), bucket_cap_mb=0.002)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        takeover = MomentumTakeover(optimizer, model.module.named_parameters())
        compressor = DeepGradientCompression(options(given), hosts=given.get("hosts"))
        register_hook(model, compressor)
        return model, optimizer, takeover, compressor

    model, optimizer, takeover, compressor = start()
    train(rank, model, optimizer, steps=5)
    saved = {
        "model": {name: value.clone() for name, value in model.module.state_dict().items()},
        "takeover": clone(takeover.state_dict()),
        "compressor": clone(compressor.state_dict()),
    }
    train(rank, model, optimizer, steps=5, first=5)
    again, optimizer, takeover, compressor = start()
    again.module.load_state_dict(saved["model"])
    takeover.load_state_dict(saved["takeover"])
    compressor.load_state_dict(saved["compressor"])
    train(rank, again, optimizer, steps=5, first=5)
    return {"same": torch.equal(flat(model), flat(again)), "step": compressor.step}


def clone(state):
    if isinstance(state, dict):
        return {name: clone(value) for name, value in state.items()}
    return state.clone() if isinstance(state, torch.Tensor) else state


def half(rank, ranks, given):
    """The average in 16 bits, rounded once from the exact one."""
    dtype = getattr(torch, given["dtype"])
    values = torch.randn(1001, generator=torch.Generator().manual_seed(rank))
    sums = torch.stack(
        [
            torch.randn(1001, generator=torch.Generator().manual_seed(peer)).to(dtype).double()
            for peer in range(ranks)
        ]
    )
    compressor = HalfCompression(dtype)
    compressor.reduce([("a", values[:400].view(20, 20)), ("b", values[400:])])
    error = (values.double() - sums.mean(0)).abs() / sums.mean(0).abs().clamp(min=1e-3)
    model = DistributedDataParallel(model_of())
    register_hook(model, HalfCompression(dtype))
    train(rank, model, torch.optim.SGD(model.parameters(), 0.1), steps=2)
    first = flat(model)
    dist.broadcast(first, 0)
    return {"error": float(error.max()), "equal": torch.equal(first, flat(model))}


def powersgd(rank, ranks, given):
    model = DistributedDataParallel(model_of(), bucket_cap_mb=0.002)  # several buckets at once
    register_powersgd(model, rank=1, dense_steps=2)
    before = flat(model)
    train(rank, model, torch.optim.SGD(model.parameters(), 0.1), steps=40)
    first = flat(model)
    dist.broadcast(first, 0)
    return {"equal": torch.equal(first, flat(model)), "moved": float((first - before).norm())}


def not_finite(rank, ranks, given):
    """The last rank with a NaN names the parameter; no rank's state takes anything of the bucket.

    The others must not wait for it until a timeout, which is longer than the test's deadline.
    """
    model = DistributedDataParallel(model_of())
    compressor = DeepGradientCompression()
    register_hook(model, compressor)
    if rank in given["bad"]:
        with torch.no_grad():
            model.module[3].weight[2, 3] = float("nan")
    message = ""
    try:
        train(rank, model, torch.optim.SGD(model.parameters(), 0.1), steps=1)
    except (UsageError, RuntimeError) as problem:
        message = str(problem)
    return {"message": message, "names": list(compressor.state_dict()["velocity"])}


def unused(rank, ranks, given):
    model = DistributedDataParallel(model_of(), find_unused_parameters=True)
    try:
        register_hook(model, DeepGradientCompression())
    except UsageError as problem:
        return {"message": problem.what}
    return {"message": ""}


def dies(rank, ranks, given):
    """The last rank ends between two steps; the others say what their backward pass raised."""
    model = DistributedDataParallel(model_of())
    register_hook(model, DeepGradientCompression())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(rank, model, optimizer, steps=2)
    message = ""
    if rank < ranks - 1:
        try:
            train(rank, model, optimizer, steps=3, first=2)
        except RuntimeError as problem:
            message = str(problem)
    print(json.dumps([{"message": message}]), flush=True)
    os._exit(0)


def measured(rank, ranks, given):
    found = measure(300_000)
    return {"text": str(found), "pays": found.pays, "dense_s": found.dense_s}


def main():
    store, rank, ranks, case = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    several = json.loads(sys.argv[5])
    torch.set_num_threads(1)
    backend = sys.argv[6]
    dist.init_process_group(
        backend, store=dist.FileStore(store, ranks), rank=rank, world_size=ranks
    )
    result = [globals()[case](rank, ranks, options) for options in several]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
