"""Whether sharing pays on a real machine, and whether the simulator says so.

`paceline queue serve` runs drawn training jobs (seed 1) on two CPU slots under our policy, each
slot to one job (exclusive) and then shared by up to two; some jobs wait for their data most of the
time, as jobs on GPUs do. Then the simulator plays the same jobs, submitted at the same times.

    measured    before: each class alone and beside each class on its core, the other core busy as
                well: steps per second, shares kept; what a start and an end cost in the queue
    real        completion times as the daemon logged them; the two modes take turns
    simulated   the same policy, the measured rates, the measured cost of a start; where a core is
                shared, of a start beside a neighbour

    python bench/scheduler_real.py --json [--quick]
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from harness import Report, options, tell

from paceline.core.clock import SystemClock
from paceline.core.errors import Missing
from paceline.scheduler.job import Job
from paceline.scheduler.local.jobs.devices import cpu_devices
from paceline.scheduler.local.jobs.rates import read_measured
from paceline.scheduler.local.jobs.submission import Submission
from paceline.scheduler.local.paths import queue_paths
from paceline.scheduler.local.protocol.client import ask, wait_for_end
from paceline.scheduler.local.protocol.messages import Request
from paceline.scheduler.policies import POLICIES
from paceline.scheduler.simulate.engine import Simulation, World

TRAINING = str(Path(__file__).with_name("queue_training.py"))
SLOTS = 2
POLICY = "paceline"
START = "start"
QUIET = 0.95  # share of a core that a class gets which computes all the time
READY_S = 120  # a daemon or a measured process must be there by then
# More threads of one job would take cores that are other jobs'.
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Scale(NamedTuple):
    """How much is run.

    Attributes:
        kinds: classes of jobs, drawn with equal probability.
        jobs: of the queue.
        least_s, most_s: time of a job alone, drawn log-uniformly.
        within_s: in which all are submitted.
        measured_s: for each rate.
        repeats: of both modes.
    """

    kinds: tuple[str, ...]
    jobs: int
    least_s: float
    most_s: float
    within_s: float
    measured_s: float
    repeats: int


FULL = Scale(("vision", "tabular", "remote", "stream"), 20, 5, 40, 60, 6, 2)
QUICK = Scale(("vision", "remote"), 6, 2, 4, 6, 1.5, 1)


def main():
    chosen = options(__doc__)
    report = Report("scheduler_real", chosen.json)
    scale = QUICK if chosen.quick else FULL
    with tempfile.TemporaryDirectory(prefix="queue-") as folder:
        compare(report, scale, Path(folder))
    return report.print()


def compare(report, scale, folder):
    measured = measure(report, scale)
    files = {"exclusive": write_rates(folder, measured), "shared": []}
    files["shared"] = [*files["exclusive"], *write_sharing(folder, measured)]
    alone_s = start_cost_s(scale, measured, folder, files["exclusive"])
    kept = float(np.mean(list(measured["start_kept"].values())))
    cost_s = {"exclusive": alone_s, "shared": alone_s / kept}
    report.row(part="start and end of a job", **{f"{mode}_s": cost_s[mode] for mode in files})
    means = {(how, mode): [] for how in ("real", "simulated") for mode in files}
    for repeat, mode in itertools.product(range(scale.repeats), files):
        jobs = drawn(scale, measured, cost_s[mode])
        views = served(folder / f"{mode}-{repeat}", jobs, files[mode])
        outcome = simulated(views, jobs, files[mode])
        real_s = {view.name: view.ended_s - view.submitted_s for view in views}
        figures = {
            "real": (list(real_s.values()), sum(view.starts - 1 for view in views)),
            "simulated": (
                [job.ended_s - job.job.submitted_s for job in outcome.values()],
                sum(job.starts - 1 for job in outcome.values()),
            ),
        }
        for how, (times_s, restarts) in figures.items():
            means[how, mode].append(float(np.mean(times_s)))
            report.row(
                part=f"{how}, {mode}",
                jobs=len(times_s),
                jct_mean_s=means[how, mode][-1],
                jct_p50_s=float(np.median(times_s)),
                jct_max_s=max(times_s),
                restarts=restarts,
            )
    mean = {key: float(np.mean(values)) for key, values in means.items()}
    shared, exclusive = mean["real", "shared"], mean["real", "exclusive"]
    report.bar("shared / exclusive, mean completion time", shared / exclusive, 1.0)
    for mode in files:
        off = abs(mean["simulated", mode] / mean["real", mode] - 1)
        report.bar(f"simulated / real, mean completion time, {mode}, off by", off, 0.10)


# Rates.


def measure(report, scale):
    """Return rate and share of a core of each class alone, and the shares kept in pairs.

    Starts of jobs are measured like a class.
    """
    kinds = (*scale.kinds, START)
    pairs = itertools.combinations_with_replacement(kinds, 2)
    groups = [*((kind,) for kind in kinds), *(pair for pair in pairs if pair != (START, START))]
    cores = cpu_devices(SLOTS).cores
    found = {}
    for at in range(0, len(groups), len(cores)):
        # The other core is busy as well, as it is in the queue: both share memory and clock.
        batch = [groups[(at + index) % len(groups)] for index in range(len(cores))]
        found.update(together(dict(zip(cores, batch, strict=True)), scale.measured_s))
    alone = {kind: found[kind,][0] for kind in kinds}
    kept = {kind: {} for kind in kinds}
    for group, results in found.items():
        if len(group) == 2:
            shares = [
                result["rate"] / alone[kind]["rate"]
                for kind, result in zip(group, results, strict=True)
            ]
            if group[0] == group[1]:
                shares = [sum(shares) / 2] * 2
            for kind, neighbour, share in zip(group, reversed(group), shares, strict=True):
                kept[kind][neighbour] = min(1.0, share)
    for kind in kinds:
        report.row(
            part=f"{kind} alone",
            per_s=alone[kind]["rate"],
            core=alone[kind]["core"],
            kept_beside=kept[kind],
        )
    if max(result["core"] for result in alone.values()) < QUIET:
        tell("other processes used the cores while rates were measured: figures will be off")
    start_kept = kept.pop(START)
    del alone[START]
    pairs = {kind: {other: kept[kind][other] for other in scale.kinds} for kind in scale.kinds}
    return {"alone": alone, "pairs": pairs, "start_kept": start_kept}


def together(by_core, seconds):
    """Run groups of classes, each on a core, and return what each member measured."""
    processes = [
        (group, start_measuring(kind, core)) for core, group in by_core.items() for kind in group
    ]
    try:
        for _, process in processes:
            if process.stdout.readline() != "ready\n":
                raise SystemExit(f"a measured job ended:\n{process.stderr.read()}")
        begin_s = time.monotonic() + 0.1
        for _, process in processes:
            process.stdin.write(f"{begin_s} {begin_s + seconds}\n")
            process.stdin.flush()
        found = {}
        for group, process in processes:
            output, _ = process.communicate(timeout=seconds + READY_S)
            found.setdefault(group, []).append(json.loads(output))
    finally:
        for _, process in processes:
            process.kill()
            process.wait()
    return found


def start_measuring(kind, core):
    return subprocess.Popen(
        ["taskset", "-c", str(core), sys.executable, TRAINING, kind, "--measure"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRON,
        start_new_session=True,  # as a job's: the kernel divides a core between sessions
    )


def write_rates(folder, measured):
    path = folder / "rates.csv"
    lines = [f"{kind},{alone['rate']}" for kind, alone in measured["alone"].items()]
    path.write_text("\n".join(["profile,rate", *lines]) + "\n")
    return ["--rates", str(path)]


def write_sharing(folder, measured):
    path = folder / "sharing.json"
    used = {kind: [alone["core"]] for kind, alone in measured["alone"].items()}
    sharing = {"version": 1, "most": 2, "used": used, "pairs": measured["pairs"]}
    path.write_text(json.dumps(sharing))
    return ["--sharing", str(path)]


def start_cost_s(scale, measured, folder, files):
    """Return the seconds of a job in the queue that are not training: its start and its end."""
    costs_s = []
    for at in range(0, len(scale.kinds), SLOTS):  # none waits
        jobs = []
        for kind in scale.kinds[at : at + SLOTS]:
            steps = max(1, round(measured["alone"][kind]["rate"]))
            jobs.append(Job(name=f"start-{kind}", profile=kind, work=steps))
        for job, view in zip(jobs, served(folder / "starts", jobs, files), strict=True):
            training_s = job.work / measured["alone"][job.profile]["rate"]
            costs_s.append(view.ended_s - view.submitted_s - training_s)
    return float(np.mean(costs_s))


# Jobs.


def drawn(scale, measured, cost_s):
    """Return the jobs of the queue: the same classes, times and seconds of work in every run."""
    random_state = random.Random(1)
    submitted_s = sorted(random_state.uniform(0, scale.within_s) for _ in range(scale.jobs))
    jobs = []
    for number, at_s in enumerate(submitted_s):
        kind = random_state.choice(scale.kinds)
        seconds = scale.least_s * (scale.most_s / scale.least_s) ** random_state.random()
        jobs.append(
            Job(
                name=f"{kind}-{number}",
                submitted_s=at_s - submitted_s[0],
                profile=kind,
                work=max(1, round(seconds * measured["alone"][kind]["rate"])),
                start_s=cost_s,
                restart_s=cost_s,
            )
        )
    return jobs


def served(folder, jobs, files):
    """Run jobs by a daemon of their own; return each as the daemon has it at the end."""
    clock, never = SystemClock(), threading.Event()
    paths = queue_paths(folder, {})
    with daemon(paths, files):
        begin_s = clock.now_s()
        for job in jobs:
            clock.wait(never, max(0.0, begin_s + job.submitted_s - clock.now_s()))
            ask(paths, Request(verb="submit", submission=submission(job)), clock)
        views = [wait_for_end(paths, job.name, clock).jobs[0] for job in jobs]
        for view in views:
            if view.status != "done" or view.work_done not in (0.0, view.work):
                raise SystemExit(f"{view.name} is {view.status}: {view.reason}\n{view.log}")
    shutil.rmtree(folder)
    return views


def submission(job):
    command = (sys.executable, TRAINING, job.profile, "--steps", str(int(job.work)))
    return Submission(job=job, command=command, folder=str(Path.cwd()), environ=ENVIRON)


@contextlib.contextmanager
def daemon(paths, files):
    """Serve a queue; let no job survive."""
    clock, never = SystemClock(), threading.Event()
    serve = [sys.executable, "-m", "paceline", "queue", "serve", "--dir", str(paths.folder)]
    serve += ["--slots", str(SLOTS), "--policy", POLICY, *files]
    process = subprocess.Popen(serve, stderr=subprocess.PIPE, text=True, env=ENVIRON)
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(process.stderr), daemon=True)
    reader.start()
    try:
        until_s = clock.now_s() + READY_S
        while process.poll() is None and clock.now_s() < until_s:
            with contextlib.suppress(Missing):
                ask(paths, Request(verb="list"), clock)
                break
            clock.wait(never, 0.1)
        yield
    except BaseException:
        tell("".join(lines))
        with contextlib.suppress(Exception):
            for view in ask(paths, Request(verb="list"), clock).jobs:
                ask(paths, Request(verb="cancel", name=view.name), clock)
                wait_for_end(paths, view.name, clock)
        raise
    finally:
        process.terminate()
        process.wait()
        reader.join()


def simulated(views, jobs, files):
    """Return what becomes of the same jobs, submitted at the same times, in the simulator."""
    named = dict(zip(files[::2], map(Path, files[1::2]), strict=True))
    cluster = cpu_devices(SLOTS).cluster
    rates = read_measured(named["--rates"], named.get("--sharing")).model(cluster)
    first_s = min(view.submitted_s for view in views)
    submitted_s = {view.name: view.submitted_s - first_s for view in views}
    played = [replace(job, submitted_s=submitted_s[job.name]) for job in jobs]
    world = World(jobs=played, cluster=cluster, rates=rates)
    return Simulation(world, POLICIES[POLICY](), rates).run().jobs


if __name__ == "__main__":
    sys.exit(main())
