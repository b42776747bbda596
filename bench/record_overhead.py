"""What does recording cost a step? Hooks in and hooks out, in turn, inside one running process.

Two ranks train under `paceline run`, in step with each other. Between blocks of k steps both take
the recorder's hooks out of torch, or put them back (`TorchCollector.pause` and `resume`); batch,
data, allocator and placement of the process stay. Neighbouring blocks, one recorded and one not, in
an order drawn for each pair, form a pair. The estimate is the median over pairs of the difference
of their CPU time per step (the median over the block of CLOCK_PROCESS_CPUTIME_ID, less the
recorder's writer thread; the mean of both ranks), with its bootstrapped 95 % interval. The writer
works in few steps: its CPU time is counted by itself, on average, and added. So is what looking
closely at some steps takes (layers, memory), by the recorder's own counters. Wall time, the slower
rank's, stands beside it.

The control is the same estimator on pairs of which neither block is recorded ("nothing against
nothing"), drawn in between. If its interval reaches beyond a bar, this machine cannot tell whether
the bar is met, and the outcome says so instead of passing or failing.

    python bench/record_overhead.py --json [--quick]

Two more figures stand beside it: the blocks without hooks, and those with hooks, against a job of
the same script under torchrun, which takes turns with the recorded one; and the events of a step
times what an event costs by itself, in a loop ("hot") and after 16 MiB of other data went through
the caches ("cold"), as in training. Both miss a part: processes differ by more than what is sought,
and an event by itself finds its code and data nearer than amid a step.

Each rank stays on a core, and the allocator keeps what a step frees: what page faults differ by
between steps is more than what is to be measured.
"""

from __future__ import annotations

import functools
import gc
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

from paceline.core.allocator import KEEP

BIN = Path(sys.executable).parent
RANKS = 2
MODES = {
    "recorded": [BIN / "paceline", "run", "-n", str(RANKS), "--out", "RUN"],
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc-per-node", str(RANKS)],
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **KEEP}  # also of torchrun's ranks: memory alike
LONG_S, SHORT_S = 0.05, 0.006
# Steps of a block: the writer thread looks for events every 0.2 s.
STEPS = {"long": 8, "short": 48}
WARM = 3  # steps of a block that do not count: after a change of hooks Python's caches are cold
WRITER = "paceline-writer"
BAR_SHARE, BAR_S, BAR_RATIO = 0.01, 300e-6, 1.02


# --- in the ranks --------------------------------------------------------------------------------


def train(folder):
    """Train blocks of steps as they are asked for: each line of the pipe is a request."""
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # in all jobs alike
    dist.init_process_group("gloo")
    step, data = make_step()
    collector = running_collector()
    pipes = Path(folder)
    with (pipes / f"go-{rank}").open() as go, (pipes / f"done-{rank}").open("w") as done:
        for line in go:
            request = json.loads(line)
            dist.barrier()
            if collector is not None:
                # Out and in, or in and out: each block begins after the same change of hooks.
                for change in sorted(("pause", "resume"), reverse=not request["recorded"]):
                    getattr(collector, change)()
            loader = batches(data, request["batch"], request["count"])
            print(json.dumps(timed_steps(step, loader)), file=done, flush=True)
    dist.destroy_process_group()


def running_collector():
    """Return the collector that records this process; None if nothing does."""
    found = [thing for thing in gc.get_objects() if type(thing).__name__ == "TorchCollector"]
    assert len(found) <= 1
    return found[0] if found else None


def make_step():
    """Return a function that trains a batch, and the data."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = []
    for width, wider in ((3, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()]
        layers += [nn.MaxPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_fn = nn.CrossEntropyLoss()

    def step(inputs, target):
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()

    return step, (torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))


def batches(data, batch, count):
    """Return a loader of `count` batches."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    images, labels = data
    wanted = torch.arange(batch * count) % len(images)
    return DataLoader(TensorDataset(images[wanted], labels[wanted]), batch_size=batch)


def timed_steps(step, loader):
    """Train the loader's batches; return the seconds of each step: wall, CPU, the writer's CPU."""
    writer = writer_schedstat()
    ends = [times(writer)]
    for inputs, target in loader:
        step(inputs, target)
        ends.append(times(writer))
    return [list(map(float, durations)) for durations in np.diff(ends, axis=0)]


def times(writer):
    """Return (wall, CPU of all threads but the writer, CPU of the writer) until now, in seconds."""
    writer_s = int(os.pread(writer, 96, 0).split()[0]) / 1e9 if writer is not None else 0.0
    return time.perf_counter(), time.process_time() - writer_s, writer_s


@functools.cache
def writer_schedstat():
    """Return a descriptor of the writer thread's scheduler statistics; None if there is none."""
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == WRITER:
            return os.open(task / "schedstat", os.O_RDONLY)
    return None


def costs():
    """Print the seconds that an event costs, by what it is of, hot and cold."""
    import torch
    import torch.distributed as dist

    from paceline.native import Recorder
    from paceline.trace.collectors.torch import TorchCollector
    from paceline.trace.format.events import Kind

    class Nothing:
        def hooked(self):
            pass

        bare = hooked

    other = torch.zeros(4 << 20)

    def hot_s(call, count=1000):
        """Return the typical seconds of a call: the median of rounds that other work disturbs."""
        rounds = []
        for _ in range(15):
            begin = time.perf_counter()
            for _ in range(count):
                call()
            rounds.append((time.perf_counter() - begin) / count)
        return statistics.median(rounds)

    def cold_s(call):
        samples = []
        for _ in range(300):
            other.add_(1.0)
            begin = time.perf_counter()
            call()
            samples.append(time.perf_counter() - begin)
        return statistics.median(samples)

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        one = torch.zeros(1)
        recorder = Recorder(f"{folder}/rank-00000.trace", 0, 1, 1 << 20)
        collector = TorchCollector(recorder)
        collector.install()
        collector.phases.wrap(Nothing, "hooked", Kind.FORWARD, "nothing")
        nothing = Nothing()

        def reduce():
            dist.all_reduce(one)

        result = {}
        for name, each_s in (("hot", hot_s), ("cold", cold_s)):
            collector.pause()
            bare_s = each_s(reduce)
            collector.resume()
            result[name] = {
                "phase": each_s(nothing.hooked) - each_s(nothing.bare),
                "collective": each_s(reduce) - bare_s,
                "step": each_s(recorder.end_step),
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

    def block(self, batch, count, *, recorded=False):
        """Train a block; return seconds per step: wall of the slower rank, CPU of each rank."""
        request = json.dumps({"count": count + WARM, "batch": batch, "recorded": recorded})
        for pipe in self.go:
            print(request, file=pipe, flush=True)
        signal.alarm(120)
        ranks = np.asarray([json.loads(pipe.readline())[WARM:] for pipe in self.done])
        signal.alarm(0)
        wall, cpu, writer = np.moveaxis(ranks, 2, 0)  # each of shape (ranks, steps)
        return {
            "wall": float(np.median(wall.max(axis=0))),
            "cpu": np.median(cpu, axis=1),
            "writer": np.mean(writer, axis=1),
        }

    def end(self):
        """Let the job end as ordinary jobs do; its trace is then complete."""
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
        measured_s = job.block(batch, 10)["wall"]
        if abs(measured_s / wanted_s - 1) < 0.1:
            break
        batch = max(1, min(1024, round(batch * wanted_s / measured_s)))
    return batch


def launch(place, rng, rounds, batches):
    """Run both jobs once; return their pairs by size and kind.

    A pair is two neighbouring blocks: ``on`` recorded and not, ``nothing`` neither of them,
    ``launcher`` recorded under Paceline and under torchrun, ``paused`` without hooks and under
    torchrun.
    """
    place.mkdir()
    jobs = {}
    try:
        for mode in MODES:
            jobs[mode] = Job(mode, place / mode)
        if not batches:
            batches["long"] = batch_for(jobs["torchrun"], LONG_S, at_least=True)
            batches["short"] = batch_for(jobs["torchrun"], SHORT_S, at_least=False)
            tell(f"samples per rank and step: {batches}")
        for job in jobs.values():  # the first blocks of a process are slower
            job.block(batches["short"], 10, recorded=True)
        pairs = {size: {"on": [], "nothing": [], "launcher": [], "paused": []} for size in STEPS}
        for _, size in itertools.product(range(rounds), STEPS):
            measure_round(jobs, pairs[size], rng, batches[size], STEPS[size])
        for job in jobs.values():
            job.end()
    finally:
        for job in jobs.values():
            job.kill()
    return pairs


def measure_round(jobs, pairs, rng, batch, count):
    """Add a pair of each kind to `pairs`."""
    recorded = jobs["recorded"]
    blocks = {}
    for is_on in rng.permutation([True, False]):
        blocks[bool(is_on)] = recorded.block(batch, count, recorded=bool(is_on))
    pairs["on"].append((blocks[True], blocks[False]))
    nothing = [recorded.block(batch, count) for _ in range(2)]
    pairs["nothing"].append(tuple(nothing))
    bare = jobs["torchrun"].block(batch, count)
    pairs["paused"].append((nothing[1], bare))
    pairs["launcher"].append((blocks[True], bare))


def differences(pairs, clock):
    """Return the differences of pairs, seconds per step; of CPU time the mean of both ranks."""
    return [np.mean(first[clock]) - np.mean(second[clock]) for first, second in pairs]


def ratios(pairs, clock):
    """Return the ratios of pairs."""
    return [np.mean(first[clock]) / np.mean(second[clock]) for first, second in pairs]


def interval(launches, size, kind, clock, function=differences):
    """Return {median, low, high} over all pairs of a kind."""
    groups = [function(pairs[size][kind], clock) for pairs in launches]
    return dict(zip(("median", "low", "high"), median_interval(groups), strict=True))


def judge(report, launches, size, sampled_s=0.0):
    """Add the rows of one step size; return (added CPU time, how far the control reaches).

    `sampled_s` is what looking closely at some steps takes, for each step.
    """
    pairs = [pair for launch_pairs in launches for pair in launch_pairs[size]["on"]]
    step_s = statistics.median(off["wall"] for _, off in pairs)
    writer_s = float(np.mean([on["writer"] for on, _ in pairs]))
    for clock in ("wall", "cpu"):
        added = interval(launches, size, "on", clock)
        control = interval(launches, size, "nothing", clock)
        if clock == "cpu":
            added = {name: seconds + writer_s + sampled_s for name, seconds in added.items()}
        report.row(
            size=size,
            step_s=step_s,
            clock=clock,
            pairs=len(pairs),
            added_s=added,
            nothing_against_nothing_s=control,
        )
    by_rank = np.median([on["cpu"] - off["cpu"] for on, off in pairs], axis=0)
    report.row(
        size=size,
        hooks_cpu_s_by_rank=by_rank.tolist(),
        writer_cpu_s=writer_s,
        sampled_cpu_s=sampled_s,
    )
    for kind, hooks in (("paused", "out"), ("launcher", "in")):
        report.row(
            size=size,
            against="torchrun",
            hooks=hooks,
            cpu_ratio=interval(launches, size, kind, "cpu", ratios),
            wall_ratio=interval(launches, size, kind, "wall", ratios),
        )
    return added, max(abs(control["low"]), abs(control["high"]))


def add_bar(report, name, added_s, control_s, limit_s, unit_s):
    """Add a bar on the estimate; it has no value where the control reaches beyond the limit."""
    can_tell = control_s <= limit_s
    reason = f"nothing against nothing differs by up to {control_s / unit_s:.3g}"
    if not can_tell:
        reason = f"cannot tell here: {reason}"
    value = added_s["median"] / unit_s if can_tell else None
    report.bar(name, value, limit_s / unit_s, reason=reason)


def sampled_s_per_step(run):
    """Return what looking closely at some steps took for each step of the run, mean over ranks."""
    from paceline.trace.analysis.sampled import step_samples
    from paceline.trace.format.events import Kind
    from paceline.trace.merge import load_run

    ranks = load_run(run).ranks
    steps = int((ranks[0].events["kind"] == Kind.STEP).sum())
    return step_samples(ranks).cost_s / steps


def events_per_step(run):
    """Return how many events of each sort rank 0 recorded per step."""
    from paceline.trace.format.events import Kind
    from paceline.trace.merge import load_run

    events = load_run(run).ranks[0].events
    kinds = events["kind"]
    steps = int((kinds == Kind.STEP).sum())
    apart = [Kind.STEP, Kind.COUNTER, Kind.LAYER, Kind.GRADIENT]  # these are counted by time
    ends = int(np.isin(kinds, apart).sum())
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


def main():
    flags = options(__doc__, "--train", "--costs")
    if flags.train:
        train(flags.train[0])
        return 0
    if flags.costs is not None:
        costs()
        return 0
    report = Report("record_overhead", flags.json)
    count, rounds = (1, 6) if flags.quick else (4, 15)
    rng = np.random.default_rng(0)
    launches, batches = [], {}
    with tempfile.TemporaryDirectory() as name:
        for number in range(count):
            begin = time.perf_counter()
            place = Path(name) / str(number)
            launches.append(launch(place, rng, rounds, batches))
            tell(f"launch {number + 1} of {count}: {time.perf_counter() - begin:.0f} s")
        per_step = events_per_step(place / "recorded" / "RUN")
        sampled_s = sampled_s_per_step(place / "recorded" / "RUN")
    long_added, long_control = judge(report, launches, "long", sampled_s)
    short_added, short_control = judge(report, launches, "short", sampled_s)
    cost_s = {}
    for heat, cost in measured_costs().items():
        cost_s[heat] = sum(cost[what] * per_step[what] for what in cost)
        report.row(caches=heat, events_per_step=per_step, cost_s=cost, cost_per_step_s=cost_s[heat])
    add_bar(
        report,
        "added CPU time per rank, share of a step of 50 ms",
        *(long_added, long_control, BAR_SHARE * LONG_S, LONG_S),
    )
    add_bar(
        report,
        "added CPU time per rank of a short step, us",
        *(short_added, short_control, BAR_S, 1e-6),
    )
    cold_s = cost_s["cold"] + sampled_s
    report.bar("events per step x cost of an event / step", cold_s / LONG_S, BAR_SHARE)
    against = interval(launches, "long", "launcher", "wall", ratios)
    control = interval(launches, "long", "nothing", "wall", ratios)
    reach = max(abs(control["low"] - 1), abs(control["high"] - 1))
    can_tell = reach <= BAR_RATIO - 1
    report.bar(
        "paceline run / torchrun, step time",
        against["median"] if can_tell else None,
        BAR_RATIO,
        reason=f"{'' if can_tell else 'cannot tell here: '}nothing against nothing differs by up "
        f"to {reach:.3f}",
    )
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
