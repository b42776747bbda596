"""What does recording cost? The step time of the same script, recorded and not.

Three jobs of two ranks train the same net, each in processes of its own, all with one thread per
rank: `paceline run` (recorded), `paceline run --no-record` (the launcher alone), and torchrun.
They take turns in blocks of steps, in an order that is drawn anew for each round; who waits for its
turn sleeps. So they are ordinary runs as a user starts them, and still see the same machine. The
script measures its steps itself. A pair is two blocks of one round; the median over all pairs of
the ratio of their median step times stands with its bootstrapped 95 % interval (jobs drawn first,
then their rounds).

What differs between runs of one script by more than what is to be measured is held still, in all
jobs alike: each rank stays on a core, and the allocator keeps what a step frees instead of giving
it back to the system, which costs page faults in the next step.

    python bench/record_overhead.py --json [--quick]

The cost of an event is measured by itself, hook included: with and without the hook around a call
that does nothing, an all-reduce in a group of one, and the end of a step.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, median_interval, options, tell

BIN = Path(sys.executable).parent
RANKS = 2
MODES = {
    "recorded": [BIN / "paceline", "run", "-n", str(RANKS), "--out", "RUN"],
    "launched": [BIN / "paceline", "run", "-n", str(RANKS), "--no-record", "--out", "RUN"],
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", str(RANKS)],
}
# For glibc: no memory goes back; what is large comes from the heap too.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "1000000000000",
}
LONG_S, SHORT_S = 0.05, 0.006
WARM = 2  # steps of a block that do not count
BAR_RATIO, BAR_SHARE = 1.02, 0.01


# --- in the ranks --------------------------------------------------------------------------------


def train(folder):
    """Train blocks of steps as they are asked for: each line of the pipe is a batch and a count."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # in all jobs alike
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = []
    for width, wider in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()
    images, labels = torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,))
    pipes = Path(folder)
    with (pipes / f"go-{rank}").open() as go, (pipes / f"done-{rank}").open("w") as done:
        for line in go:
            batch, count = map(int, line.split())
            wanted = torch.arange(batch * count) % len(images)
            loader = DataLoader(TensorDataset(images[wanted], labels[wanted]), batch_size=batch)
            dist.barrier()
            ends = [time.perf_counter()]
            for inputs, target in loader:
                optimizer.zero_grad()
                loss_fn(model(inputs), target).backward()
                optimizer.step()
                ends.append(time.perf_counter())
            steps = [after - before for before, after in itertools.pairwise(ends)]
            print(json.dumps(steps), file=done, flush=True)
    dist.destroy_process_group()


def costs():
    """Print the seconds that an event costs, by what it is of."""
    import torch
    import torch.distributed as dist

    from paceline.native import Recorder
    from paceline.trace.collectors.torch import TorchCollector
    from paceline.trace.format.events import Kind

    class Nothing:
        def hooked(self):
            pass

        bare = hooked

    def each_s(call, count=2000):
        """Return the typical seconds of a call: the median of rounds that other work disturbs."""
        rounds = []
        for _ in range(15):
            begin = time.perf_counter()
            for _ in range(count):
                call()
            rounds.append((time.perf_counter() - begin) / count)
        return statistics.median(rounds)

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        one = torch.zeros(1)
        bare_s = each_s(lambda: dist.all_reduce(one), 300)
        recorder = Recorder(f"{folder}/rank-00000.trace", 0, 1, 1 << 20)
        collector = TorchCollector(recorder)
        collector.install()
        collector.phases.wrap(Nothing, "hooked", Kind.FORWARD, "nothing")
        nothing = Nothing()
        result = {
            "phase": each_s(nothing.hooked) - each_s(nothing.bare),
            "collective": each_s(lambda: dist.all_reduce(one), 300) - bare_s,
            "step": each_s(recorder.end_step, 300),
        }
        assert recorder.dropped_count == 0
        recorder.close()
        print(json.dumps(result), flush=True)
        os._exit(0)


# --- in the benchmark ----------------------------------------------------------------------------


class Job:
    """One job of two ranks that trains when it is its turn."""

    def __init__(self, mode, folder):
        self.folder = folder
        folder.mkdir()
        for rank in range(RANKS):
            os.mkfifo(folder / f"go-{rank}")
            os.mkfifo(folder / f"done-{rank}")
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*MODES[mode], __file__, "--train", str(folder)],
                cwd=folder,
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        signal.alarm(60)  # a job that does not come up must not hang us in opening its pipes
        self.go = [(folder / f"go-{rank}").open("w") for rank in range(RANKS)]
        self.done = [(folder / f"done-{rank}").open() for rank in range(RANKS)]
        signal.alarm(0)

    def block(self, batch, count):
        """Train a block; return the seconds of each step of the slower rank."""
        for pipe in self.go:
            print(batch, count + WARM, file=pipe, flush=True)
        signal.alarm(120)
        steps = [json.loads(pipe.readline()) for pipe in self.done]
        signal.alarm(0)
        return [max(pair) for pair in zip(*steps, strict=True)][WARM:]

    def end(self):
        """Let the job end as ordinary jobs do; its trace is then whole."""
        for pipe in self.go:
            pipe.close()
        self.process.wait(60)
        for pipe in self.done:
            pipe.close()

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def batch_for(job, step_s, *, at_least):
    """Return the batch whose step takes about `step_s`, or at least that."""
    batch = 4
    wanted_s = step_s * (1.3 if at_least else 1.0)  # others may have slowed these few steps
    for _ in range(6):
        measured_s = statistics.median(job.block(batch, 10))
        if abs(measured_s / wanted_s - 1) < 0.1:
            break
        batch = max(1, min(1024, round(batch * wanted_s / measured_s)))
    return batch


def run_jobs(folder, number, rng, rounds, batches):
    """Run all three jobs once; return their blocks of steps by mode and size, and their folder."""
    place = folder / str(number)
    place.mkdir()
    jobs = {}
    try:
        for mode in MODES:
            jobs[mode] = Job(mode, place / mode)
        if not batches:
            batches["long"] = batch_for(jobs["torchrun"], LONG_S, at_least=True)
            batches["short"] = batch_for(jobs["torchrun"], SHORT_S, at_least=False)
            tell(f"samples per rank and step: {batches}")
        times = {mode: {"long": [], "short": []} for mode in MODES}
        for job in jobs.values():  # first blocks of a process are slower
            job.block(batches["short"], 10)
        for _ in range(rounds):
            for mode in rng.permutation(list(MODES)):
                times[mode]["long"].append(jobs[mode].block(batches["long"], 8))
            for mode in rng.permutation(list(MODES)):
                times[mode]["short"].append(jobs[mode].block(batches["short"], 20))
        for job in jobs.values():
            job.end()
    finally:
        for job in jobs.values():
            job.kill()
    return times, place


def events_per_step(run):
    """Return how many events of each sort rank 0 recorded per step."""
    from paceline.trace.format.events import Kind
    from paceline.trace.merge import load_run

    events = load_run(run).ranks[0].events
    kinds = events["kind"]
    steps = int((kinds == Kind.STEP).sum())
    ends = int(np.isin(kinds, [Kind.STEP, Kind.COUNTER]).sum())
    collectives = int((kinds == Kind.COLLECTIVE).sum())
    return {
        "phase": (len(events) - ends - collectives) / steps,
        "collective": collectives / steps,
        "step": 1.0,
        "all": len(events) / steps,
    }


def measured_costs():
    """Return the seconds that an event costs, measured in a process of its own."""
    output = subprocess.run(
        [sys.executable, __file__, "--costs"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    ).stdout
    return json.loads(output)


def compare(report, launches, on, off, size):
    """Add the row of one comparison; return the median ratio and the ends of its interval."""
    middle_s = statistics.median
    ratios = [
        [
            middle_s(mine) / middle_s(theirs)
            for mine, theirs in zip(times[on][size], times[off][size], strict=True)
        ]
        for times in launches
    ]
    middle, low, high = median_interval(ratios)
    steps = [seconds for times in launches for block in times[off][size] for seconds in block]
    report.row(
        on=on,
        off=off,
        pairs=sum(map(len, ratios)),
        step_s=middle_s(steps),
        ratio=middle,
        low=low,
        high=high,
        ratios_of_launches=[middle_s(ratio) for ratio in ratios],
    )
    return middle, high


def main():
    flags = options(__doc__, "--train", "--costs")
    if flags.train:
        train(flags.train[0])
        return 0
    if flags.costs is not None:
        costs()
        return 0
    report = Report("record_overhead", flags.json)
    count, rounds = (2, 4) if flags.quick else (8, 12)
    rng = np.random.default_rng(0)
    launches, batches = [], {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            begin = time.perf_counter()
            times, place = run_jobs(Path(name), number, rng, rounds, batches)
            launches.append(times)
            tell(f"launch {number + 1} of {count}: {time.perf_counter() - begin:.0f} s")
        per_step = events_per_step(place / "recorded" / "RUN")
    cost = measured_costs()
    cost_s = sum(cost[what] * per_step[what] for what in cost)
    _, high = compare(report, launches, "recorded", "launched", "long")
    compare(report, launches, "recorded", "launched", "short")
    against, _ = compare(report, launches, "recorded", "torchrun", "long")
    compare(report, launches, "recorded", "torchrun", "short")
    long_s, short_s = (row["step_s"] for row in report.rows[:2])
    report.row(
        events_per_step=per_step,
        cost_s=cost,
        cost_per_step_s=cost_s,
        share_of_long_step=cost_s / long_s,
        share_of_short_step=cost_s / short_s,
    )
    shape = f"{count * rounds} pairs, step of {long_s * 1e3:.0f} ms"
    fits = long_s >= LONG_S and count * rounds >= 15
    reason = "" if fits else f"only {shape}"
    report.bar(
        f"recorded / not recorded, upper end of 95 % ({shape})",
        high if fits or flags.quick else None,
        BAR_RATIO,
        reason=reason,
    )
    report.bar("events per step x cost of an event / step", cost_s / long_s, BAR_SHARE)
    report.bar("paceline run / torchrun, step time", against, BAR_RATIO)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
