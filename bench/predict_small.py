"""Does prediction meet measurement on small models? |predicted / measured - 1| of the step time.

Six models that the estimate was not tuned on (MLP, CNN, transformer; two widths each), on 1 and on
2 ranks with threads = cores / ranks, trained under DDP over gloo with the data in memory. The
machine is probed, and every model captured, measured step by step and predicted as `paceline plan`
does, before the first one is trained; rows are measured in two interleaved rounds, so that a
disturbance does not fall on one model alone.

    python bench/predict_small.py --json [--quick] [--tuning]

``--tuning`` uses the other models, on which the estimate was developed. Before and after each row a
matrix product of fixed size is timed: `disturbance` is its slowest time over its fastest in rows of
as many ranks, so rows measured while something else ran can be told from wrong predictions.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

from paceline.core.allocator import KEEP

BAR = 0.25
RANKS = (1, 2)
ROUNDS = 2


def mlp(width, depth, batch):
    import torch
    from torch import nn

    layers = [nn.Linear(784, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    module = nn.Sequential(*layers, nn.Linear(width, 10))
    return module, torch.randn(batch, 784), torch.randint(0, 10, (batch,))


def cnn(width, size, batch, channels=3):
    import torch
    from torch import nn

    def block(a, b):
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [*block(channels, width), *block(width, 2 * width), *block(2 * width, 4 * width)]
    flat = 4 * width * (size // 8) ** 2
    module = nn.Sequential(*layers, nn.Flatten(), nn.Linear(flat, 10))
    return module, torch.randn(batch, channels, size, size), torch.randint(0, 10, (batch,))


def transformer(width, heads, depth, length, batch, vocabulary=256):
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            b, t, w = x.shape
            q, k, v = (
                part.view(b, t, heads, w // heads).transpose(1, 2)
                for part in self.qkv(self.norm1(x)).chunk(3, -1)
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(vocabulary, width)
            self.place = nn.Parameter(torch.zeros(length, width))
            self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
            self.head = nn.Linear(width, vocabulary)

        def forward(self, tokens_in):
            return self.head(self.blocks(self.token(tokens_in) + self.place)).flatten(0, 1)

    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    return Model(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous().flatten()


HELD_OUT = {
    "mlp-256": (mlp, (256, 2, 64), "SGD"),
    "mlp-1024": (mlp, (1024, 3, 128), "Adam"),
    "cnn-16": (cnn, (16, 32, 32), "SGD"),
    "cnn-48": (cnn, (48, 32, 32), "SGD"),
    "transformer-64": (transformer, (64, 4, 2, 64, 8), "AdamW"),
    "transformer-256": (transformer, (256, 8, 2, 64, 8), "AdamW"),
}
TUNING = {
    "mlp-128": (mlp, (128, 4, 32), "Adam"),
    "mlp-640": (mlp, (640, 2, 96), "SGD"),
    "cnn-8": (cnn, (8, 16, 64, 1), "Adam"),
    "cnn-32": (cnn, (32, 32, 24), "SGD"),
    "transformer-96": (transformer, (96, 3, 3, 48, 12), "Adam"),
    "transformer-192": (transformer, (192, 6, 2, 128, 6), "SGD"),
}
MODELS = {**HELD_OUT, **TUNING}


def make(name):
    """Return module, inputs, target, loss and optimizer factory of a model."""
    import torch

    build, arguments, kind = MODELS[name]
    torch.manual_seed(0)
    module, inputs, target = build(*arguments)
    settings = {"lr": 0.01, "momentum": 0.9} if kind == "SGD" else {"lr": 1e-3}
    return (
        module,
        inputs,
        target,
        torch.nn.functional.cross_entropy,
        lambda p: getattr(torch.optim, kind)(p, **settings),
    )


def reference_s():
    """Return the typical seconds of a matrix product: slower when something disturbs."""
    import time

    import torch

    a = torch.ones(256, 256)
    samples = []
    for _ in range(40):
        begin = time.perf_counter()
        torch.mm(a, a)
        samples.append(time.perf_counter() - begin)
    return sorted(samples)[len(samples) // 2]


def train(name, rank, ranks, threads, meeting, seconds):
    """Train one rank for about `seconds`; print its step times and the disturbance."""
    import time

    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        os.sched_setaffinity(0, cores[rank * threads :][:threads])
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(threads)
    module, inputs, target, loss_fn, factory = make(name)
    before = reference_s()
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks
        )
        module = DistributedDataParallel(module)
    optimizer = factory(module.parameters())
    steps, count = [], None
    warm, least = (6, 8) if seconds < 1 else (12, 20)
    marks = []
    while count is None or len(steps) < count + warm:
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_fn(module(inputs), target)
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        steps.append(end - begin)
        marks.append((forward - begin, backward - forward, end - backward))
        if len(steps) == warm:
            each = torch.tensor(sorted(steps)[warm // 2])
            if ranks > 1:
                dist.all_reduce(each, dist.ReduceOp.MAX)
            count = max(least, min(2000, int(seconds / each.item())))
    after = reference_s()
    if ranks > 1:
        dist.destroy_process_group()
    print(json.dumps({"steps": steps[warm:], "marks": marks[warm:], "reference": [before, after]}))


def run_ranks(name, ranks, cores, seconds):
    """Return what each rank of one training printed."""
    threads = max(1, cores // ranks)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--train", name]
                + [str(value) for value in (rank, ranks, threads, f"{folder}/store", seconds)],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **KEEP},  # as the plan has it
            )
            for rank in range(ranks)
        ]
        try:
            return [json.loads(process.communicate(timeout=120)[0]) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


def middle(values, part=0.5):
    return sorted(values)[int(len(values) * part)]


def _function(name):
    """Return what `paceline plan` would be given: a function of what a step needs."""
    return lambda: make(name)


for _name in MODELS:
    globals()[_name.replace("-", "_")] = _function(_name)


def predictions(machine, names, cores):
    """Return the estimate of each model on each number of ranks, as ``paceline plan`` makes it."""
    from paceline.core.plan import Mesh, Plan
    from paceline.studies.measured_estimate import estimate_here
    from paceline.training.capture_process import capture_file

    result = {}
    for name in names:
        target = f"{__file__}:{name.replace('-', '_')}"
        workload = capture_file(target)
        for ranks in RANKS:
            plan = Plan(mesh=Mesh(data=ranks), threads=max(1, cores // ranks))
            result[name, ranks] = estimate_here(machine, workload, plan, target, "measured")
    return result


def compare(name, ranks, predicted, rounds):
    # A step ends with its slowest rank; the ranks meet in every step.
    slowest = [
        max(each)
        for outcomes in rounds
        for each in zip(*(outcome["steps"] for outcome in outcomes), strict=False)
    ]
    measured = middle(slowest)
    references = [
        reference for outcomes in rounds for each in outcomes for reference in each["reference"]
    ]
    marks = [mark for outcomes in rounds for mark in outcomes[0]["marks"]]
    phases = [middle([mark[i] for mark in marks]) for i in range(3)]
    return {
        "model": name,
        "ranks": ranks,
        "predicted_s": predicted.step_time_s,
        "measured_s": measured,
        "measured_s_p20": middle(slowest, 0.2),
        "error": abs(predicted.step_time_s / measured - 1),
        "ratio": predicted.step_time_s / measured,
        "limit": predicted.limit,
        "holds": predicted.low_s <= measured <= predicted.high_s,
        "predicted_phases_s": dict(predicted.breakdown.items()),
        "measured_phases_s": dict(zip(("forward", "backward", "optimizer"), phases, strict=True)),
        "reference_s": references,
    }


def measure_rounds(predicted, cores, *, quick):
    """Return what each training printed, by model and ranks, one list of ranks per round."""
    outcomes = {key: [] for key in predicted}
    for _ in range(1 if quick else ROUNDS):
        for name, ranks in predicted:
            outcomes[name, ranks].append(run_ranks(name, ranks, cores, 0.2 if quick else 1.5))
    return outcomes


def main():
    flags = options(__doc__, "--train", switches={"--tuning": "the models used in development"})
    if flags.train:
        name, rank, ranks, threads, meeting, seconds = flags.train
        train(name, int(rank), int(ranks), int(threads), meeting, float(seconds))
        return 0
    from paceline.probe.measure import measure

    report = Report("predict_small", flags.json)
    with tempfile.TemporaryDirectory() as folder:
        report.machine = measure(Path(folder), quick=flags.quick, on_progress=tell)
    cores = report.machine.devices[0].cores
    predicted = predictions(report.machine, TUNING if flags.tuning else HELD_OUT, cores)
    rounds = measure_rounds(predicted, cores, quick=flags.quick)
    rows = [
        compare(name, ranks, predicted[name, ranks], rounds[name, ranks]) for name, ranks in rounds
    ]
    least = {  # by ranks: the more of them, the fewer threads each has
        ranks: min(
            reference for row in rows if row["ranks"] == ranks for reference in row["reference_s"]
        )
        for ranks in RANKS
    }
    for row in rows:
        report.row(**row, disturbance=max(row["reference_s"]) / least[row["ranks"]])
    error = statistics.median(row["error"] for row in rows)
    report.bar("median step_time_error", error, BAR)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
