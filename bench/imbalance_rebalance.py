"""What does `paceline run --rebalance` recover, find, cost, and does it leave even ranks alone?

Two ranks on a core each train a CNN with DistributedDataParallel on gloo, by turns with and without
--rebalance; the samples of each step are the same.

- hog: from a step on, a process computes on rank 1's core. disk: from a step on, a token bucket
  holds back rank 1's reads of samples from a file. Both double its step. How many steps later the
  rank is found, with which cause, and which part of what can be recovered is: with equal shares a
  step takes `slow`, undisturbed `clean`, and with shares by speed 2 / (1/clean + 1/slow) at best,
  as if nothing of a step was the same whatever its samples.
- quota: rank 1 has 60 % of its core, by a quota of its control group (or, without one, by being
  stopped for 40 % of the time), from the start. Throughput against the sum of what the two ranks
  reach, and how far the loss curve is from that of equal shares.
- even: nothing disturbs. What rebalancing costs: in one job, neighbouring epochs with and without
  its hooks, in an order drawn for each pair; CPU time of a step (mean of the ranks, all threads),
  with the share of the exchanges between ranks. Beside it the control, pairs without hooks on
  either side, and wall time. And how many of 100 jobs see an action, although their cores were
  equally fast: a loop of fixed length in each step of each rank tells it.

    python bench/imbalance_rebalance.py --json [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, median_interval, options, run_sections, tell

RANKS, BATCH = 2, 128  # 128: as CIFAR-10 is usually trained; of a step with 32, half is fixed
STEPS, DISTURBED_FROM, SETTLED = 140, 40, 60  # of a job; steps after which shares have settled
EPOCH, WARM = 50, 10  # steps of an epoch of the job whose hooks are taken out; that do not count
QUOTA = 0.6
EVEN_CORES = 1.1
FOUND_WITHIN, RECOVERED, IDEAL, OVERHEAD = 20, 0.7, 0.9, 0.01
CAUSES = {"hog": "not_running", "disk": "data"}
DEADLINE_S = 600


# --- a rank -----------------------------------------------------------------------------------


class File:
    """Images in a file, whose reads a token bucket may hold back, as a throttled disk does."""

    def __init__(self, path, count):
        import torch

        self.size = 3 * 32 * 32
        self.file = os.open(path, os.O_RDONLY)
        self.labels = torch.arange(count) % 10
        self.bytes_per_s = None
        self.free_at_s = 0.0

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        import torch

        data = os.pread(self.file, self.size, int(index) * self.size)
        if self.bytes_per_s is not None:
            now_s = time.monotonic()
            self.free_at_s = max(now_s, self.free_at_s) + len(data) / self.bytes_per_s
            time.sleep(self.free_at_s - now_s)
        image = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(3, 32, 32)
        return image.float().div_(255), self.labels[index]


def hog():
    """Start a process that computes on this process's core."""
    core = next(iter(os.sched_getaffinity(0)))
    code = f"import os\nwhile os.getppid() == {os.getpid()}:\n for _ in range(10000): pass"
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    os.sched_setaffinity(process.pid, {core})
    return process


def core_s():
    """Return the seconds of a loop of fixed length: how fast this rank's core is now."""
    begin_s, count = time.perf_counter(), 0
    while count < 3000:
        count += 1
    return time.perf_counter() - begin_s


def pairs_of_epochs():
    """Yield for each pair of epochs whether the first and the second have hooks; all ranks alike.

    The first pair warms up. Every third one after it is of the control.
    """
    drawn = random.Random(0)
    yield True, True
    for number in itertools.count():
        yield (False, False) if number % 3 == 2 else drawn.choice(((True, False), (False, True)))


def train(given):
    """Train in a rank, and write what each step took and what it lost."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    if given.group and int(os.environ["RANK"]) == 1:
        Path(given.group, "cgroup.procs").write_text(str(os.getpid()))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    per_epoch = EPOCH if given.paused else 100
    data = File(given.data, per_epoch * RANKS * BATCH)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    balance = None
    if given.paused:
        from paceline.training.balance.script import ScriptBalance

        balance = ScriptBalance(Path(given.out))
        balance.install()
    with_hooks = itertools.chain.from_iterable(pairs_of_epochs())
    seconds, cpu, losses, cores, other = [], [], [], [], None
    epoch = 0
    last_s, last_cpu_s = time.perf_counter(), time.process_time()
    while len(seconds) < given.steps:
        sampler.set_epoch(epoch)
        if balance is not None:
            changes = [balance.hooks.remove, balance.hooks.put_back]
            for change in changes if next(with_hooks) else reversed(changes):
                change()  # both, so that each epoch begins after the same
        for images, labels in loader:
            if len(seconds) == given.disturbed and rank == 1:
                if given.case == "hog":
                    other = hog()
                elif given.case == "disk":  # as long again as a step takes
                    median_s = statistics.median(seconds[given.disturbed // 2 :])
                    data.bytes_per_s = BATCH * data.size / median_s
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append((loss.item() * len(labels), len(labels)))
            cores.append(core_s())
            now_s, cpu_s = time.perf_counter(), time.process_time()
            seconds.append(now_s - last_s)
            cpu.append(cpu_s - last_cpu_s)
            last_s, last_cpu_s = now_s, cpu_s
            if len(seconds) == given.steps:
                break
        epoch += 1
        last_s, last_cpu_s = time.perf_counter(), time.process_time()
    if other is not None:
        other.kill()
        other.wait()
    said = {"seconds": seconds, "cpu": cpu, "losses": losses, "cores": cores}
    Path(given.out, f"said-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


# --- jobs -------------------------------------------------------------------------------------


def job(data, case, *, steps=STEPS, rebalance=(), disturbed=DISTURBED_FROM, group="", paused=False):
    """Run a job of two ranks; return the steps, the loss of each step, and the actions."""
    from paceline.runs.balance import read_balance

    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "paceline", "run", "-n", str(RANKS), "--no-record", *rebalance),
            *("--out", f"{folder}/run", __file__, "--case", case, "--data", data),
            *("--out", folder, "--steps", str(steps), "--disturbed", str(disturbed)),
            *(("--group", group) if group else ()),
            *(("--paused",) if paused else ()),
        ]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=DEADLINE_S
        )
        if done.returncode:
            sys.exit(f"a job failed: {done.stderr}")
        ranks = [json.loads(Path(folder, f"said-{rank}.json").read_text()) for rank in range(RANKS)]
        balance = read_balance(Path(folder, "run"))
    curves = zip(*(rank["losses"] for rank in ranks), strict=True)
    curve = [sum(loss for loss, _ in step) / sum(count for _, count in step) for step in curves]
    actions = balance.actions if balance is not None else ()
    nodes = balance.slow_nodes if balance is not None else ()
    cpu = [statistics.mean(step) for step in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    return {"seconds": ranks[0]["seconds"], "cpu": cpu, "curve": curve, "actions": actions,
            "nodes": nodes, "cores": [rank["cores"] for rank in ranks]}  # fmt: skip


def ideal_s(clean_s, slow_s):
    """Return the step's time with shares by speed, of ranks that take so long with equal ones."""
    return 2 / (1 / clean_s + 1 / slow_s)


def disturbed(report, data, case, rounds):
    """Measure what is found and recovered when rank 1 becomes slower within a job."""
    found, recovered, causes = [], [], []
    for _ in range(rounds):
        plain = job(data, case)
        balanced = job(data, case, rebalance=("--rebalance",))
        clean_s = statistics.median(plain["seconds"][5:DISTURBED_FROM])
        slow_s = statistics.median(plain["seconds"][DISTURBED_FROM + 5 :])
        after_s = statistics.median(balanced["seconds"][DISTURBED_FROM + SETTLED :])
        best_s = ideal_s(clean_s, slow_s)
        first = next((action for action in balanced["actions"] if action.kind == "found"), None)
        found.append(first.step - DISTURBED_FROM if first is not None else float("inf"))
        causes.append(first.cause if first is not None and first.rank == 1 else "")
        recovered.append((slow_s - after_s) / max(1e-9, slow_s - best_s))
        report.row(case=case, clean_s=clean_s, slow_s=slow_s, ideal_s=best_s, balanced_s=after_s,
                   found_after=found[-1], cause=causes[-1], recovered=recovered[-1],
                   actions=[action.kind for action in balanced["actions"]],
                   samples=list(shares(balanced)),
                   slow_node=[node.sentence for node in balanced["nodes"]])  # fmt: skip
    right = sum(cause == CAUSES[case] for cause in causes) / len(causes)
    report.bar(f"{case}: steps until the rank is found, median", statistics.median(found),
               FOUND_WITHIN)  # fmt: skip
    report.bar(f"{case}: share of jobs that name the cause, {CAUSES[case]}", right, 1.0,
               at_least=True)  # fmt: skip
    report.bar(f"{case}: share of what is recoverable that is recovered, median",
               statistics.median(recovered), RECOVERED, at_least=True)  # fmt: skip


def shares(done):
    return next(
        (action.new_samples for action in reversed(done["actions"]) if action.new_samples), ()
    )


@contextlib.contextmanager
def quota():
    """Yield the folder of a control group with 60 % of a core; None where none can be made."""
    own = next(
        (line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()
         if "cpu" in line.split(":")[1].split(",")),
        "/",
    )  # fmt: skip
    folder = Path("/sys/fs/cgroup/cpu") / own.lstrip("/") / f"rebalance-{os.getpid()}"
    try:
        folder.mkdir()
        # Short periods: a step has many of them.
        (folder / "cpu.cfs_period_us").write_text("5000")
        (folder / "cpu.cfs_quota_us").write_text(str(int(5000 * QUOTA)))
    except OSError as problem:
        tell(f"no control group with a quota: {problem}")
        yield None
        return
    try:
        yield str(folder)
    finally:
        folder.rmdir()


def uneven(report, data, rounds):
    """Measure the throughput of two ranks of which one has 60 % of its core."""
    reached, given, differences = [], [], []
    with quota() as group:
        if group is None:
            report.bar("quota: throughput of the ideal one", None, IDEAL, at_least=True,
                       reason="no control group (version 1) with a CPU quota here")  # fmt: skip
            return
        for _ in range(rounds):
            clean = job(data, "none", steps=60)
            equal = job(data, "quota", group=group)
            measured = job(data, "quota", group=group, rebalance=("--rebalance",))
            asked = job(data, "quota", group=group, rebalance=("--shares", f"1,{QUOTA}"))
            clean_s = statistics.median(clean["seconds"][5:])
            equal_s = statistics.median(equal["seconds"][5:])
            best_s = ideal_s(clean_s, equal_s)
            settled_s = statistics.median(measured["seconds"][SETTLED:])
            asked_s = statistics.median(asked["seconds"][SETTLED:])
            reached.append(best_s / settled_s)
            given.append(best_s / asked_s)
            pairs = zip(equal["curve"], measured["curve"], strict=True)
            differences.append(max(abs(loss - other) for loss, other in pairs))
            report.row(case="quota", clean_s=clean_s, equal_s=equal_s, ideal_s=best_s,
                       measured_s=settled_s, given_s=asked_s, of_ideal=reached[-1],
                       of_ideal_given=given[-1], samples=list(shares(measured)),
                       loss_first=measured["curve"][0], loss_last=measured["curve"][-1],
                       loss_difference=differences[-1],
                       actions=[action.kind for action in measured["actions"]])  # fmt: skip
    report.bar("quota: throughput of the ideal one, shares as measured, median",
               statistics.median(reached), IDEAL, at_least=True)  # fmt: skip
    report.bar("quota: throughput of the ideal one, from --shares 1,0.6, median",
               statistics.median(given), IDEAL, at_least=True)  # fmt: skip
    report.bar("quota: largest difference of the loss of a step from equal shares",
               max(differences), 1e-3)  # fmt: skip


def even(report, data, quick):
    """Measure what rebalancing costs where there is nothing to do, and whether it does nothing."""
    clocks = {"cpu": "cpu", "wall": "seconds"}
    found = {key: [] for key in itertools.product(("with hooks and without", "control"), clocks)}
    count = 8 if quick else 30
    for _ in range(1 if quick else 3):
        done = job(data, "even", steps=2 * EPOCH * (count + 1), paused=True)
        for clock, name in clocks.items():
            steps = np.reshape(done[name], (count + 1, 2, EPOCH))[1:, :, WARM:]
            # A step in ten exchanges figures: the median of every tenth step, then their mean.
            turns = np.reshape(steps, (count, 2, (EPOCH - WARM) // 10, 10))
            steps = np.median(turns, axis=2).mean(axis=2)
            shares_of = {"with hooks and without": [], "control": []}
            pairs = itertools.islice(pairs_of_epochs(), 1, count + 1)
            for (first, second), pair in zip(steps, pairs, strict=True):
                # Of a pair without hooks either side may stand for the one with them.
                share = second / first - 1 if pair == (False, True) else first / second - 1
                shares_of["with hooks and without" if any(pair) else "control"].append(share)
            for kind, values in shares_of.items():
                found[kind, clock].append(values)
    figures = {key: median_interval(jobs) for key, jobs in found.items()}
    for (kind, clock), (median, low, high) in figures.items():
        report.row(case="overhead", pairs=kind, clock=clock, median=median, low=low,
                   high=high)  # fmt: skip
    _, low, high = figures["control", "cpu"]
    report.bar("even: overhead of a step, CPU time", figures["with hooks and without", "cpu"][0],
               OVERHEAD, reason=f"nothing against nothing: {low:.2g} to {high:.2g}")  # fmt: skip
    acted = uneven_cores = 0
    count = 3 if quick else 100
    for number in range(count):
        done = job(data, "even", steps=40, rebalance=("--rebalance",))
        if not done["actions"]:
            continue
        differ = cores_differ(done["cores"], done["actions"][0].step)
        if differ > EVEN_CORES:
            uneven_cores += 1
        else:
            acted += 1
        report.row(case="an action in an even run", run=number, cores_differ=differ,
                   actions=[action.to_json() for action in done["actions"]])  # fmt: skip
    report.row(case="even runs", runs=count, with_an_action=acted, on_uneven_cores=uneven_cores)
    report.bar(f"even: runs of {count} with an action on even cores", acted, 0,
               reason=f"{uneven_cores} more, on cores of which one was slower")  # fmt: skip


def cores_differ(cores, step):
    """Return by which factor a rank's core was slower than the other's before an action."""
    slow, fast = sorted((statistics.median(rank[max(0, step - 10) : step]) for rank in cores),
                        reverse=True)  # fmt: skip
    return slow / fast


def rebalancing_part(report, quick):
    """Measure all parts; rows and bars go to the report."""
    rounds = 1 if quick else 3
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/images"
        size = 100 * RANKS * BATCH * 3 * 32 * 32
        Path(data).write_bytes(os.urandom(size))
        parts = {
            "hog": lambda: disturbed(report, data, "hog", rounds),
            "disk": lambda: disturbed(report, data, "disk", rounds),
            "quota": lambda: uneven(report, data, rounds),
            "even": lambda: even(report, data, quick),
        }
        run_sections(parts, lambda name: parts[name](), report)


def rank_options():
    parser = argparse.ArgumentParser()
    for name in ("--case", "--data", "--out", "--group"):
        parser.add_argument(name, default="")
    for name in ("--steps", "--disturbed"):
        parser.add_argument(name, type=int, default=0)
    parser.add_argument("--paused", action="store_true")
    return parser.parse_args()


def main():
    if "RANK" in os.environ:
        train(rank_options())
        return
    asked = options(__doc__)
    report = Report("imbalance_rebalance", asked.json)
    rebalancing_part(report, asked.quick)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
