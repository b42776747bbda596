"""What does communication cost a training step, on gloo and on the backend ``paceline``?

Two ranks, a core each, train a residual CNN (11 M parameters, 32 x 32 images) and a transformer
(5 M, 64 tokens) with DistributedDataParallel, batch 4, in one pair of processes and three forms:

    none      a communication hook that communicates nothing: no backend can be faster
    gloo      torch's backend for CPUs
    paceline  the memory that the ranks share

A step is forward and backward pass, all gradients reduced when it ends. Blocks of steps of the
three forms take turns, in an order drawn for each round, between barriers; a block counts with its
slower rank. `efficiency` is the time of "none" over that of the form, the median over rounds, with
its bootstrapped 95 % interval. The gradients after the last step must agree between both backends.

With `--engine`, Paceline's data-parallel engine takes the place of DistributedDataParallel on the
backend, and a step has the update of plain SGD as well:

    allreduce     gradients averaged in shared memory, all parameters updated by every rank
    sharded       gradients reduce-scattered, each rank updates its part, all-gathered back
    SC-B          S-Caffe: all gradients reduced to rank 0, which updates; one blocking broadcast
    SC-OB         the broadcast awaited layer by layer
    SC-OBR        the reduction during the backward pass as well

and the modes between two emulated hosts follow, where that is possible: `engine_between_hosts.py`.

    python bench/step_time.py --json [--engine] [--quick]
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

from engine_between_hosts import between_hosts
from harness import Report, await_ranks, median_interval, options, tell

from paceline.core.allocator import KEEP

RANKS, BATCH, WARM = 2, 4, 3
QUICK_ENGINE_ROUNDS = 2  # of the CNN alone
FORMS = ("none", "gloo", "paceline")
BARS = {"cnn": 0.88, "transformer": 0.92}
ENGINE_FORMS = {  # mode, overlap of gradients, of parameters
    "allreduce": ("allreduce", False, False),
    "sharded": ("sharded", False, False),
    "SC-B": ("root", False, False),
    "SC-OB": ("root", False, True),
    "SC-OBR": ("root", True, True),
}


def main():
    given = options(__doc__, "--rank", switches={"--engine": "Paceline's data-parallel engine"})
    if given.rank:
        rank, folder, rounds = given.rank
        return train(int(rank), Path(folder), int(rounds), given.engine)
    report = Report("step_time_engine" if given.engine else "step_time", given.json)
    with tempfile.TemporaryDirectory() as folder:
        rounds = (QUICK_ENGINE_ROUNDS if given.engine else 5) if given.quick else 20
        arguments = [sys.executable, __file__, *(["--engine"] if given.engine else []), "--rank"]
        ranks = [
            subprocess.Popen(
                [*arguments, str(rank), folder, str(rounds)],
                env={**os.environ, **KEEP, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(RANKS)
        ]
        await_ranks(ranks, 1200)
        measured = json.loads((Path(folder) / "measured.json").read_text())
    for model, found in measured.items():
        times = found["step_s"]
        efficiencies = {}
        for form in times:
            median, low, high = median_interval([times[form]])
            ratios = [none / own for none, own in zip(times["none"], times[form], strict=True)]
            efficiency, worst, best = median_interval([ratios])
            efficiencies[form] = efficiency
            report.row(
                model=model,
                parameters=found["parameters"],
                form=form,
                step_ms=median * 1e3,
                step_ms_interval=[low * 1e3, high * 1e3],
                efficiency=efficiency,
                efficiency_interval=[worst, best],
                rounds=len(ratios),
            )
        if given.engine and model == "cnn":
            engine_bars(report, times, efficiencies)
        if not given.engine:
            name = f"{model}: efficiency"
            report.bar(name, efficiencies["paceline"], BARS[model], at_least=True)
        kind = "parameters" if given.engine else "gradients"
        report.bar(f"{model}: {kind} differ, relative", found["difference"], 1e-5)
    if given.engine:
        between_hosts(report, given.quick)
    return report.print()


def engine_bars(report, times, efficiencies):
    """Compare the engine's modes with no communication, with gloo, and with each other."""
    best = efficiencies["allreduce"]
    report.bar("cnn: allreduce, efficiency", best, 0.92, at_least=True)
    report.bar(
        "cnn: allreduce against gloo", ratio(times, "gloo", "allreduce"), 1.25, at_least=True
    )
    forms = ["SC-B", "SC-OB", "SC-OBR", "allreduce", "sharded"]
    for before, after in itertools.pairwise(forms[:3]):
        report.bar(f"cnn: {after} / {before}", ratio(times, after, before), 1.0)
    for form in forms[3:]:
        report.bar(f"cnn: {form} / SC-OBR", ratio(times, form, "SC-OBR"), 1.0)


def ratio(times, form, other):
    """Return the median over rounds of the ratio of two forms' times."""
    return statistics.median(a / b for a, b in zip(times[form], times[other], strict=True))


def train(rank, folder, rounds, engine):
    """Train all models in all forms as one rank; rank 0 writes what was measured."""
    import torch
    import torch.distributed as dist

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "paceline", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=300)
    )
    gloo = dist.new_group(backend="gloo")
    measured = {}
    is_quick = engine and rounds == QUICK_ENGINE_ROUNDS
    for name in ("cnn",) if is_quick else ("cnn", "transformer"):
        measured[name] = measure(name, rank, gloo, rounds, engine)
    dist.destroy_process_group()
    if rank == 0:
        (folder / "measured.json").write_text(json.dumps(measured))
    return 0


def measure(name, rank, gloo, rounds, engine):
    """Return the parameters of a model, and the seconds of its steps by form."""
    import torch
    import torch.distributed as dist

    make, given, loss_of = workload(name, rank)
    groups = {"none": gloo, "gloo": gloo, "paceline": dist.group.WORLD}
    trained = {
        form: with_update(wrapped(make(), groups[form], form == "none"), engine)
        for form in (FORMS[:2] if engine else FORMS)
    }
    if engine:
        trained |= {form: in_engine(make(), *how) for form, how in ENGINE_FORMS.items()}
    forms = list(trained)

    def steps(form, count):
        model, optimizer = trained[form]
        for _ in range(count):
            model.zero_grad()
            loss_of(model(given)).backward()
            if optimizer is not None:
                optimizer.step()

    for form in forms:
        steps(form, WARM)
    count, times = 4, {form: [] for form in forms}
    order = random.Random(0)
    for number in range(rounds):
        for form in order.sample(forms, len(forms)):
            dist.barrier()
            begin = time.perf_counter()
            steps(form, count)
            took = torch.tensor([(time.perf_counter() - begin) / count])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            times[form].append(took.item())
        if rank == 0:
            tell(f"{name}: round {number + 1} of {rounds}")
    return {
        "parameters": sum(parameter.numel() for parameter in trained["none"][0].parameters()),
        "step_s": times,
        "difference": max(difference(trained, form) for form in forms if form != "none"),
    }


def difference(trained, form):
    """Return how far a form's gradients, or parameters after its updates, are from gloo's."""
    import torch

    def values(name):
        model, optimizer = trained[name]
        parameters = list(model.state_dict().values()) if optimizer else None
        tensors = parameters or [parameter.grad for parameter in model.parameters()]
        return torch.cat([tensor.flatten().double() for tensor in tensors])

    ours, theirs = values(form), values("gloo")
    return float((ours - theirs).norm() / theirs.norm())


def with_update(model, updates):
    """Return the model with an optimizer, or with None."""
    import torch

    return model, torch.optim.SGD(model.parameters(), 1e-4) if updates else None


def in_engine(model, mode, overlap_gradients, overlap_parameters, **sizes):
    """Return a model in the engine, and its optimizer; `sizes` are those of buckets."""
    import torch

    from paceline.training.engine.data_parallel import DataParallel
    from paceline.training.engine.ranks import find_ranks

    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    blocking = not (overlap_gradients or overlap_parameters)
    parallel = DataParallel(
        model,
        find_ranks(model),
        mode=mode,
        overlap_gradients=overlap_gradients,
        overlap_parameters=overlap_parameters,
        **({"bucket_bytes": 1 << 40, "first_bucket_bytes": 1 << 40} if blocking else sizes),
    )
    parallel.adopt(optimizer)
    return parallel, optimizer


def wrapped(model, group, silent):
    """Return the model under DistributedDataParallel; a silent one communicates nothing."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    parallel = DistributedDataParallel(
        model, process_group=group, broadcast_buffers=False, gradient_as_bucket_view=True
    )
    if silent:

        def keep(_state, bucket):
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        parallel.register_comm_hook(None, keep)
    return parallel


def workload(name, rank, batch=BATCH):
    """Return what makes a model, a batch of a rank, and the loss of the model's output."""
    import torch
    from torch import nn

    torch.manual_seed(rank)
    if name == "cnn":
        wanted = torch.randint(0, 10, (batch,))
        loss = nn.CrossEntropyLoss()
        return cnn, torch.randn(batch, 3, 32, 32), lambda output: loss(output, wanted)
    given, wanted = torch.randint(0, 4096, (2, batch, 64))
    loss = nn.CrossEntropyLoss()
    return transformer, given, lambda output: loss(output.flatten(0, 1), wanted.flatten())


def cnn():
    """Return a residual network as ResNet-18, for images of 32 x 32."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.first_norm = nn.BatchNorm2d(outputs)
            self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.second_norm = nn.BatchNorm2d(outputs)
            self.skip = (
                nn.Identity()
                if (inputs, stride) == (outputs, 1)
                else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            )

        def forward(self, given):
            hidden = self.first_norm(self.first(given)).relu()
            return (self.second_norm(self.second(hidden)) + self.skip(given)).relu()

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    for inputs, outputs, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def transformer():
    """Return an encoder of four layers, 256 wide, between an embedding and a projection."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(4096, 256), encoder, nn.Linear(256, 4096))


if __name__ == "__main__":
    sys.exit(main())
