"""What does paced input gain: refills where cores are free, or loader workers of low priority?

A CNN, an LSTM and a transformer under DDP and `paceline run`, 2 ranks on 2 cores, each with 2
workers of torch's DataLoader, or 2 threads of `store.Loader`, whose transform keeps a core busy
(`imbalance_ranks.py`). Within one job, blocks of steps take turns:

- unpaced   refills begin as a batch is taken
- paced     refills begin where the loop leaves cores free (`--pace auto`)
- nice      workers of a DataLoader at nice 10, unpaced
- both      paced, at nice 10

Two loads: `busy`, where each sample is transformed, and `spare`, where one in `SHARED` is, so that
the loader has time to spare.
The step time is that of the slower rank, with its wait for data.

    python bench/imbalance_pacing.py --json [--quick]
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, options, run_sections

HERE = Path(__file__).parent
RANKS, DEADLINE_S = 2, 600
WARM_UP, BLOCK, SETTLE = 8, 14, 4  # steps: of a job; of a block; of those, not counted
ROUNDS, QUICK_ROUNDS = 10, 3
SHARED = 4
NICE = 10
MODELS = ("cnn", "lstm", "transformer")
LOADERS = {"torch": ("unpaced", "paced", "nice", "both"), "store": ("unpaced", "paced")}
LOADS = ("busy", "spare")


class PacingFailed(Exception):
    """A job that ended badly: its case has no figures."""


# --- a rank --------------------------------------------------------------------------------------


class Repeated:
    """A data set of which one sample in `share` is transformed, and the others are copies."""

    def __init__(self, samples, share):
        self.samples, self.share, self.last = samples, share, None

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if self.last is None or index // RANKS % self.share == 0:
            self.last = self.samples[index]
        return self.last


def torch_batches(samples, batch, steps, rank):
    """Return batches of a DataLoader, and what switches a way on."""
    from torch.utils.data import DataLoader

    from paceline.store.feed.paced_workers import pacing_of

    order = range(rank, batch * RANKS * steps, RANKS)
    batches = iter(DataLoader(samples, batch, sampler=order, num_workers=2))
    pids = [worker.pid for worker in batches._workers]  # noqa: SLF001

    def switch(way):
        pacing_of(batches).pacer.is_on = way in ("paced", "both")
        for pid in pids:  # upwards it needs a privilege
            os.setpriority(os.PRIO_PROCESS, pid, NICE if way in ("nice", "both") else 0)

    return batches, switch


def store_batches(samples, batch, steps, rank):
    """Return batches of a `store.Loader`, each sample of whose pack is a number."""
    from paceline import store

    path = f"numbers-{rank}.pack"
    count = batch * RANKS * steps
    numbers = ((f"{n:08}", n.to_bytes(8, "little")) for n in range(count))
    store.pack(store.Samples(numbers), path)
    asked = store.LoaderOptions(workers=2, shuffle="none", pace="on")
    loader = store.Loader(
        path,
        batch * RANKS,
        transform=lambda stored: samples[int.from_bytes(stored, "little")],
        rank=rank,
        world_size=RANKS,
        options=asked,
    )
    batches = iter(loader)

    def switch(way):
        batches._threads.pacer.is_on = way == "paced"  # noqa: SLF001

    return (content for content, _ in batches), switch


def train(name, source, load, rounds, out):
    import torch
    import torch.distributed as dist
    from imbalance_ranks import BATCH, CASES
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    make, data = CASES[name]
    ways = LOADERS[source]
    blocks = [way for turn in range(rounds) for way in (ways if turn % 2 == 0 else ways[::-1])]
    steps = WARM_UP + BLOCK * len(blocks) + 8  # its workers live until the end
    samples = data(BATCH * RANKS * steps)
    samples = Repeated(samples, SHARED) if load == "spare" else samples
    makes = {"torch": torch_batches, "store": store_batches}[source]
    batches, switch = makes(samples, BATCH, steps, rank)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    def step():
        began = time.perf_counter()
        inputs, targets = next(batches)
        came = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        return time.perf_counter() - began, came - began

    for _ in range(WARM_UP):
        step()
    found = []
    for way in blocks:
        dist.barrier()
        switch(way)
        taken = [step() for _ in range(BLOCK)][SETTLE:]
        found.append([way, *map(list, zip(*taken, strict=True))])
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# --- all of them ---------------------------------------------------------------------------------


def measure(model, source, load, rounds, folder):
    """Return step times and waits by way: of each block, a row."""
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [
        *(sys.executable, "-m", "paceline", "run", "-n", RANKS, "--pace", "auto", "--no-record"),
        *("--out", out / "run", Path(__file__).resolve()),
        *("--case", model, source, load, rounds, out),
    ]
    done = subprocess.run(
        list(map(str, command)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=out,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise PacingFailed(f"{model}, {source}, {load}: {done.stderr[-600:]}")
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    found = {way: [] for way in LOADERS[source]}
    for same in zip(*ranks, strict=True):
        step_s = np.max([block[1] for block in same], axis=0)
        found[same[0][0]].append((step_s, np.mean([block[2] for block in same])))
    return found


def pacing_part(report, quick):
    """Add rows and bars to a report."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    cases = itertools.product(MODELS[:1] if quick else MODELS, LOADERS, LOADS)
    if quick:
        cases = [("cnn", "torch", "busy")]
    with tempfile.TemporaryDirectory(prefix="pacing-") as folder:
        for model, source, load in cases:
            found = measure(model, source, load, rounds, folder)
            plain = summary(found["unpaced"])
            for way, blocks in found.items():
                figures = summary(blocks)
                ratios = {f"{key}_against_unpaced": figures[key] / plain[key]
                          for key in ("median_s", "p95_s")}  # fmt: skip
                report.row(part="pacing", model=model, loader=source, load=load, way=way,
                           blocks=len(blocks), **figures, **ratios)  # fmt: skip
            paced = summary(found["paced"])
            report.bar(f"{model}, {source}, {load}: median step, paced / unpaced",
                       paced["median_s"] / plain["median_s"], 1.01)  # fmt: skip


def summary(blocks):
    steps = np.concatenate([step_s for step_s, _ in blocks])
    return {
        "median_s": float(np.median(steps)),
        "p95_s": float(np.quantile(steps, 0.95)),
        "mean_s": float(np.mean(steps)),
        "wait_s": float(np.mean([wait_s for _, wait_s in blocks])),
    }


def main():
    asked = options(__doc__, "--case")
    if asked.case:
        model, source, load, rounds, out = asked.case
        train(model, source, load, int(rounds), out)
        return
    report = Report("imbalance_pacing", asked.json)
    if len(os.sched_getaffinity(0)) > RANKS:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:RANKS])
    run_sections(["pacing"], lambda _: pacing_part(report, asked.quick), report,
                 failures=(PacingFailed, subprocess.TimeoutExpired))  # fmt: skip
    sys.exit(report.print())


if __name__ == "__main__":
    main()
