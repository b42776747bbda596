"""What would remedies against load imbalance bring at 6 to 24,576 ranks, from measured steps?

Two ranks that mp.spawn starts, with two DataLoader workers each and a transform that takes CPU
time, share this host's cores; OMP_NUM_THREADS is unset. Their steps are recorded, and
`perf.imbalance` forecasts from them, at each number of ranks, what a CPU budget, paced input and
rebalancing would bring: once with no rank slower than all that were measured, once with a fitted
tail. Nodes of two ranks are copied: how a node of six differs is not known here.

What can be checked here is checked: a second recording of the same job against the forecast from
the first, and what the CPU budget of `paceline run` alone brings the same script against what it
was forecast to bring at 2 ranks. Threads of ranks that spin for each other are not in the forecast.

Beside it stands the one published figure, up to 35 % on 24,576 GPUs (Pumma et al., CCGrid 2020).
The solutions of that study are not known to us, nor what its percentage is of; ours are ours.

    python bench/imbalance_simulated.py --json [--quick]
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

BIN = Path(sys.executable).parent
RANKS, WORKERS, BATCH = 2, 2, 16
STEPS, QUICK_STEPS = 300, 40
DEADLINE_S = 600
PUBLISHED = {"ranks": 24_576, "gain": 0.35}
OWN_BAR = 0.15  # of a step, between two recordings of the same job: the issue sets no bar


# --- in the ranks --------------------------------------------------------------------------------


def job(folder, steps):
    """Run the ranks: these processes if a launcher made them, else spawned ones."""
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), folder, steps)
        return
    import torch.multiprocessing as mp

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": str(RANKS)}
    mp.spawn(train, (folder, steps), nprocs=RANKS)


def train(rank, folder, steps):
    """Train, and write the CPU time that the loader's workers took in a step, once started."""
    import torch
    import torch.distributed as dist
    from torch import nn

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 16 * 16, 10)),
    )
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    loader = torch.utils.data.DataLoader(Images(steps * BATCH), BATCH, num_workers=WORKERS)
    started_s = None
    for inputs, target in loader:
        started_s = children_s() if started_s is None else started_s
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()
    del loader
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    (Path(folder) / f"workers-{rank}.json").write_text(
        json.dumps((used.ru_utime + used.ru_stime - started_s) / steps)
    )


def children_s():
    """Return the CPU time of this process's children until now."""
    from paceline.core.processes import stat_fields

    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    stats = [stat_fields(int(pid)) for pid in children]
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


class Images:
    """Samples whose transform, a blur and a rotation, takes some milliseconds of CPU time."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        import numpy as np
        import torch

        random = np.random.default_rng(index)
        image = random.random((96, 96, 3), dtype=np.float32)
        for _ in range(random.integers(2, 6)):  # samples are not alike
            image = (image + np.roll(image, 1, axis=0) + np.roll(image, 1, axis=1)) / 3
        image = np.rot90(image, index % 4)[16:80, 16:80]
        return torch.from_numpy(image.copy()).permute(2, 0, 1), index % 10


# --- recording -----------------------------------------------------------------------------------


def recorded(folder, steps, *, budget):
    """Record the job; return the parts of its steps."""
    from paceline.perf.imbalance import busy_parts
    from paceline.trace.analysis import analyse
    from paceline.trace.merge import load_run

    run = Path(folder) / "run"
    script = [__file__, "--job", str(folder), str(steps)]
    command = [BIN / "paceline", "record", "--out", run, "--", sys.executable, *script]
    if budget:
        alone = ("--allocator", "system", "--pace", "off")
        command = [BIN / "paceline", "run", "-n", str(RANKS), *alone, "--out", run, *script]
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    subprocess.run(
        command,
        env=environ,
        stdout=sys.stderr,
        check=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
    )
    workers_s = [
        json.loads((Path(folder) / f"workers-{rank}.json").read_text()) for rank in range(RANKS)
    ]
    return busy_parts(
        analyse(load_run(run)),
        loader_workers=WORKERS,
        cores=len(os.sched_getaffinity(0)),
        worker_cpu_s=sum(workers_s) / RANKS,
    )


def record_all(steps):
    """Return the parts of two recordings of the job, and of one with cores of its own a rank."""
    found = []
    for name, budget in (("spawned", False), ("spawned again", False), ("paceline run", True)):
        tell(f"recording: {name}")
        with tempfile.TemporaryDirectory() as folder:
            found.append(recorded(folder, steps, budget=budget))
    return found


# --- forecasts -----------------------------------------------------------------------------------


def simulated_part(report, quick):
    """Record the job, forecast from it and check; rows and bars go to the report."""
    from paceline.perf.imbalance import ForecastSettings, forecast_remedies

    first, second, budgeted = record_all(QUICK_STEPS if quick else STEPS)
    draws = 50 if quick else 200
    for tail in ("measured", "pareto"):
        settings = ForecastSettings(tail=tail, draws=draws)
        found = forecast_remedies(first, None, settings)
        if tail == "measured":
            show_measured(report, found, first)
            check(report, found, second, budgeted)
        for world in found.worlds:
            for gain in world.gains:
                report.row(
                    case="forecast",
                    tail=tail,
                    ranks=world.ranks,
                    remedy=gain.remedy,
                    step_s=gain.step_s,
                    p95_s=gain.p95_s,
                    gain=gain.gain,
                    gain_low=gain.gain_low,
                    gain_high=gain.gain_high,
                    throughput_gain=1 / (1 - gain.gain) - 1,
                    ranks_wait=world.waiting,
                )
    report.row(case="published", study="Pumma et al. 2020", remedy="four, not known", **PUBLISHED)


def show_measured(report, found, parts):
    """State the parameters of the forecasts, and what they rest on."""
    shown = found.to_json()
    for name in ("worlds", "version"):
        shown.pop(name)
    report.row(case="parameters", least_step_s=parts.least_step_s, **shown)


def check(report, found, second, budgeted):
    """Compare forecasts at the measured ranks with recordings that they do not rest on."""
    few = found.worlds[0]
    again = few.gain_of("none").step_s / second.step_s - 1
    brought = 1 - budgeted.step_s / ((found.step_s + second.step_s) / 2)
    budget = few.gain_of("budget")
    report.row(case="second recording", step_s=second.step_s, forecast_s=found.step_s, error=again)
    report.row(
        case="paceline run at 2 ranks",
        step_s=budgeted.step_s,
        gain=brought,
        forecast_gain=budget.gain,
        forecast_low=budget.gain_low,
        forecast_high=budget.gain_high,
    )
    report.bar("forecast of a second recording, error (our bar)", abs(again), OWN_BAR)
    report.bar("forecast of steps that were held out, error (our bar)",
               abs(found.held_out_error), OWN_BAR)  # fmt: skip


def main():
    asked = options(__doc__, "--job")
    if asked.job:
        job(asked.job[0], int(asked.job[1]))
        return
    report = Report("imbalance_simulated", asked.json)
    simulated_part(report, asked.quick)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
