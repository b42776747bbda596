"""Does blame tell the truth? Planted culprits, beside a busy neighbour or not, and clean runs.

    python bench/truth.py --json [--quick] [--campaign] [--framework torch gloo mpi]
                          [--keep FOLDER] [--minutes MINUTES] [--seed SEED] [--cases NUMBER ...]

On torch, under DistributedDataParallel; and on torch/gloo and mpi4py, by programs that exchange
messages in a ring, whose cases `truth_ring.py` describes. `--campaign` has 300 cases with a
culprit, slowed by 20 % or more, and 300 clean runs of each. It takes an hour or more:
`--minutes` ends each part earlier, and with `--keep` the next call goes on there.

Each case on torch is a run of its own: two or three ranks under DistributedDataParallel, recorded
by the recorder and the collector of `paceline run`, analysed as `paceline run` analyses them. In a
case with a culprit one rank is slowed by 10 to 50 % for one cause (data, compute, blocked, stopped,
not_running, checkpoint, gc) in one shape (persistent, for all of the run or for a part of it;
periodic; drifting; intermittent; recurring, in blocks of random length and duty). In half of the
cases, and of the clean runs, a neighbour takes a core now and then, for a fifth of the time.

The analysis sees the traces alone. A case counts by its main straggler: the first that is named.
A clean run counts as accused if a straggler is named; beside the neighbour, ranks whose threads
waited for a core are no accusation: that is the neighbour. Ranks whose core is slower are none in
any run: that is another tenant of the machine's host.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import harness
import numpy as np
import truth_ranks
from truth_ring import LEAST_SLOW, judge_ring, make_ring_cases, slowed
from truth_ring_runs import GlooStage, MpiStage
from truth_server import compile_slow_files, start_server

CAUSES = ("data", "compute", "blocked", "stopped", "not_running", "checkpoint", "gc")
# What the script does between phases on one rank: how its cause is named, in which function it is.
OWN_WORK = {"metrics": ("compute", "_metrics"), "log": ("blocked", "_log")}
SHAPES = ("persistent", "window", "periodic", "drifting", "intermittent", "recurring")
STEPS = 300
BASE_S = 0.010  # of a step that nobody slows
CULPRITS, CLEAN = 84, 60
CAMPAIGN = 300  # cases with a culprit, and clean runs
RING_CULPRITS, RING_CLEAN, RING_QUICK = 56, 40, (0, 1, 2, 3, 4, 5, 6, 8, 15, 56, 57)
QUICK = (0, 11, 19, 23, 34, 36, 52, 84, 85, 86)
PERIODS = (3, 5, 7, 10, 20)
BARS = {"rank": 0.97, "cause and shape": 0.90, "accused": 1}
BOTH_BAR, WAITING_BAR = 0.98, 0.05  # right rank and cause; error of waiting times


@dataclass(frozen=True)
class Case:
    """One run: who is slowed, by what, in which steps, and what disturbs it."""

    number: int
    seed: int
    ranks: int
    neighbour: bool
    culprit: int | None = None
    cause: str = ""
    shape: str = ""
    slow: float = 0.0
    period: int = 0
    framework: str = "torch"

    @property
    def real_time(self):
        """Whether the ranks, and the hog, are scheduled in real time, as `truth_ring.py` says why.

        A neighbour would then take a core for as long as it wants it.
        """
        return self.cause == "not_running" and not self.neighbour

    @property
    def expected_shape(self):
        return "persistent" if self.shape == "window" else self.shape

    def seconds(self):
        """Return the seconds by which each step of the culprit is slowed."""
        random = np.random.default_rng([self.seed, self.number, 1])
        extra = np.zeros(STEPS)
        mean_s = self.slow * BASE_S
        if self.shape == "persistent":
            extra[:] = mean_s
        elif self.shape == "window":
            length = int(random.integers(STEPS // 3, 2 * STEPS // 3))
            first = int(random.integers(5, STEPS - length - 5))
            extra[first : first + length] = mean_s
        elif self.shape == "periodic":
            extra[int(random.integers(self.period)) :: self.period] = mean_s * self.period
        elif self.shape == "drifting":
            extra[:] = 2 * mean_s * np.arange(STEPS) / STEPS
        elif self.shape == "intermittent":
            step = int(random.integers(3, 20))
            while step < STEPS - 6:
                length = int(random.integers(2, 7))
                extra[step : step + length] = 1.0
                step += length + int(random.integers(8, 25))
            extra *= mean_s / extra.mean()
        elif self.shape == "recurring":
            period = int(random.integers(40, 91))
            length = max(10, round(period * random.uniform(0.25, 0.55)))
            for step in range(int(random.integers(period - length)), STEPS, period):
                extra[step : step + length] = mean_s * period / length
        return extra


def make_cases(seed, culprits=CULPRITS, clean=CLEAN, least=0.1):
    """Return all cases of a seed: each cause in each shape, clean runs, the work of scripts."""
    random = np.random.default_rng([seed, 0])
    cases = []
    for number in range(culprits):
        ranks = 2 + number // (len(CAUSES) * len(SHAPES)) % 2
        cases.append(
            Case(
                number=number,
                seed=seed,
                ranks=ranks,
                neighbour=bool((number + number // len(CAUSES)) % 2),
                culprit=int(random.integers(ranks)),
                cause=CAUSES[number % len(CAUSES)],
                shape=SHAPES[number // len(CAUSES) % len(SHAPES)],
                slow=float(random.uniform(least, 0.5)),
                period=int(random.choice(PERIODS)),
            )
        )
    for number in range(culprits, culprits + clean):
        neighbour = bool(number % 2)
        cases.append(Case(number=number, seed=seed, ranks=2 + number // 2 % 2, neighbour=neighbour))
    for cause in OWN_WORK:
        for shape in SHAPES:
            ranks = 2 + len(cases) % 2
            cases.append(
                Case(
                    number=len(cases),
                    seed=seed,
                    ranks=ranks,
                    neighbour=bool(len(cases) // 2 % 2),
                    culprit=int(random.integers(ranks)),
                    cause=cause,
                    shape=shape,
                    slow=float(random.uniform(max(least, LEAST_SLOW), 0.5)),
                    period=int(random.choice(PERIODS)),
                )
            )
    return cases


# --- a run ----------------------------------------------------------------------------------------


class Stage:
    """Starts the processes of a case, all forked from one server that has torch imported."""

    def __init__(self, server):
        self.context = server
        self.cores = sorted(os.sched_getaffinity(0))
        receiver, sender = self.context.Pipe(duplex=False)
        self._started(truth_ranks.measure_units, sender).join()
        self.unit_s, self.object_s = receiver.recv()

    def _process(self, target, *arguments):
        return self.context.Process(target=target, args=arguments, daemon=True)

    def _started(self, target, *arguments):
        process = self._process(target, *arguments)
        process.start()
        return process

    def run(self, case, folder):
        """Run a case and leave its traces in `folder`.

        Raises:
            RuntimeError: a rank failed, or did not end.
        """
        (folder / "trace").mkdir(parents=True)
        others = []
        if case.neighbour:
            others.append(self._started(truth_ranks.disturb, case.seed * 1000 + case.number))
        demand = None
        if case.cause in ("stopped", "not_running"):
            receiver, demand = self.context.Pipe()
            if case.cause == "stopped":
                others.append(self._started(truth_ranks.stop_on_demand, receiver))
            else:
                cores = self._cores(case, case.culprit)
                arguments = (receiver, cores, case.real_time)
                others.append(self._started(truth_ranks.compute_on_demand, *arguments))
        ranks = [self._rank(case, folder, rank, demand) for rank in range(case.ranks)]
        truth_ranks.run_to_the_end(f"case {case.number}", ranks, others)

    def _rank(self, case, folder, rank, demand):
        is_culprit = rank == case.culprit
        plant = None
        if is_culprit:
            plant = truth_ranks.Plant(
                case.cause,
                tuple(case.seconds().tolist()),
                self.unit_s,
                self.object_s,
                case.number,
            )
        return self._process(
            truth_ranks.train,
            str(folder),
            rank,
            case.ranks,
            self._cores(case, rank),
            plant,
            round(truth_ranks.BUSY_S / self.unit_s),
            STEPS,
            demand if is_culprit else None,
            case.real_time,
        )

    def _cores(self, case, rank):
        """Return a rank's cores: one each if there are enough, and where one is to be taken."""
        if case.ranks <= len(self.cores):
            return {self.cores[rank]}
        if case.cause == "not_running":
            return {self.cores[-1] if rank == case.culprit else self.cores[0]}
        return set(self.cores)


# --- the judgement --------------------------------------------------------------------------------


def judge(case, stragglers, step_s):
    """Return what was found beside what was planted, as a row.

    Args:
        case: the case.
        stragglers: those that were found.
        step_s: what the ranks noted of each step, shape (ranks, steps), seconds.
    """
    found = [late.to_json() for late in stragglers]
    row = {**asdict(case), "found": found}
    if case.culprit is None:
        no_accusation = {"slow_core", *(["not_running"] if case.neighbour else [])}
        row["accused"] = any(late.cause not in no_accusation for late in stragglers)
        return row
    row["slowed"] = slowed(case.culprit, case.seconds(), step_s)
    main = stragglers[0] if stragglers else None
    row["rank_right"] = main is not None and main.rank == case.culprit
    cause, function = OWN_WORK.get(case.cause, (case.cause, ""))
    row["cause_right"] = row["rank_right"] and main.cause == cause
    if function:
        row["place_right"] = row["rank_right"] and function in main.place
    row["shape_right"] = row["rank_right"] and getattr(main, "shape", "") == case.expected_shape
    return row


def add_bars(report, rows):
    """Add the bars of torch's cases to a report."""
    planted = [row for row in rows if row["culprit"] is not None and row["cause"] not in OWN_WORK]
    clean = [row for row in rows if row["culprit"] is None]
    own_work = [row for row in rows if row["cause"] in OWN_WORK]
    if own_work:
        count = len(own_work)
        named = sum(row["cause_right"] and row["place_right"] for row in own_work) / count
        report.bar(
            f"script's own work: right cause and line, of {count} cases",
            named,
            BARS["cause and shape"],
            at_least=True,
            reason=by_plant(own_work),
        )
    if planted:
        count = len(planted)
        ranks = sum(row["rank_right"] for row in planted) / count
        both = sum(row["cause_right"] and row["shape_right"] for row in planted) / count
        report.bar(f"right rank, of {count} cases", ranks, BARS["rank"], at_least=True)
        report.bar(
            f"right cause and shape, of {count} cases", both, BARS["cause and shape"], at_least=True
        )
    if clean:
        accused = sum(row["accused"] for row in clean)
        report.bar(f"accused, of {len(clean)} clean runs", accused, BARS["accused"])


def add_named_bars(report, rows, name):
    """Add the bars that hold for any framework, as far as its rows have what they are of."""
    planted = [row for row in rows if row["culprit"] is not None]
    clean = [row for row in rows if row["culprit"] is None]
    slowed = [row for row in planted if row.get("slowed", LEAST_SLOW) >= LEAST_SLOW]
    if slowed:
        both = sum(row["cause_right"] for row in slowed) / len(slowed)
        of_cases = f"{name}: right rank and cause, of {len(slowed)} cases"
        report.bar(of_cases, both, BOTH_BAR, at_least=True, reason=by_plant(planted))
    if clean:
        accused = sum(row["accused"] for row in clean)
        slower = sum(row.get("core_slower", False) for row in clean)
        reason = f"{slower} on a core that was slower" if slower else ""
        of_runs = f"{name}: accused, of {len(clean)} clean runs"
        report.bar(of_runs, accused, BARS["accused"], reason=reason)
    states = [row["state_right"] for row in slowed if "state_right" in row]
    if states:
        right = sum(states) / len(states)
        of_states = f"{name}: right wait state and who caused it, of {len(states)} cases"
        report.bar(of_states, right, BOTH_BAR, at_least=True)
    exact = [row["bytes_right"] for row in rows if "bytes_right" in row]
    if exact:
        of_bytes = f"{name}: bytes by pair of ranks exact, of {len(exact)} runs"
        report.bar(of_bytes, sum(exact) / len(exact), 1.0, at_least=True)
    add_waiting_bar(report, rows, name)


def add_waiting_bar(report, rows, name):
    """Add the bar of runs whose ranks know well enough themselves how long they waited."""
    waited = [row for row in rows if row.get("waiting_error") is not None]
    known = [row for row in waited if row["waiting_known_within"] <= WAITING_BAR]
    roughly = [row for row in waited if row["waiting_known_within"] > WAITING_BAR]
    if not known:
        return
    reason = ""
    if roughly:
        agree = sum(abs(row["waiting_error"]) <= WAITING_BAR for row in roughly)
        width = np.median([row["waiting_known_within"] for row in roughly])
        reason = f"{agree} of {len(roughly)} more, whose ranks know it within {width:.0%}, agree"
    within = float(np.mean([abs(row["waiting_error"]) <= WAITING_BAR for row in known]))
    of_waiting = f"{name}: waiting within 5 %, share of {len(known)} runs"
    report.bar(of_waiting, within, 1.0, at_least=True, reason=reason)


def by_plant(rows):
    """Return how many cases are right, for each cause or pattern, and of those slowed by less."""
    counts = {}
    for row in rows:
        plant = row.get("pattern") or row["cause"]
        if row.get("slowed", LEAST_SLOW) < LEAST_SLOW:
            plant = f"{plant} slowed by less"
        right, count = counts.get(plant, (0, 0))
        counts[plant] = right + row["cause_right"], count + 1
    return ", ".join(f"{plant} {right} of {count}" for plant, (right, count) in counts.items())


def chosen_cases(flags):
    """Return the cases of each framework that the flags ask for."""
    seed = int(flags.seed[0]) if flags.seed else 0
    quick = {"torch": QUICK, "gloo": RING_QUICK, "mpi": RING_QUICK}
    if flags.campaign:
        cases = {"torch": make_cases(seed, CAMPAIGN, CAMPAIGN, LEAST_SLOW)}
        planted, clean = CAMPAIGN, CAMPAIGN
    else:
        cases = {"torch": make_cases(seed)}
        planted, clean = RING_CULPRITS, RING_CLEAN
    for framework in ("gloo", "mpi"):
        cases[framework] = make_ring_cases(framework, seed, planted, clean)
    for framework, own in cases.items():
        numbers = [int(number) for number in flags.cases or ()]
        numbers = numbers or (quick[framework] if flags.quick else ())
        cases[framework] = [own[number] for number in numbers] if numbers else own
    wanted = flags.framework or list(cases)
    return {framework: cases[framework] for framework in wanted}


def in_turn(cases):
    """Return the cases in an order in which a part of them is of all kinds: clean ones between."""
    planted = [case for case in cases if case.culprit is not None]
    clean = [case for case in cases if case.culprit is None]
    order = [(number / max(1, len(own)), case) for own in (planted, clean)
             for number, case in enumerate(own)]  # fmt: skip
    return [case for _, case in sorted(order, key=lambda pair: pair[0])]


def run_cases(cases, root, report, flags, make_stage):
    """Run the cases of a framework that have no row yet; return all rows."""
    deadline_s = time.monotonic() + 60 * float(flags.minutes[0]) if flags.minutes else float("inf")
    stage = None
    rows = []
    for case in in_turn(cases):
        folder = root / f"{case.framework}-{case.seed}-{case.number:03d}"
        known = folder / "row.json"
        if known.is_file():  # of an earlier call
            rows.append(json.loads(known.read_text()))
            report.rows.append(rows[-1])
            continue
        if time.monotonic() > deadline_s:
            continue
        if stage is None:
            stage = make_stage()
        shutil.rmtree(folder, ignore_errors=True)
        stage.run(case, folder)
        row = judged(case, folder)
        report.row(**row)
        rows.append(row)
        if flags.keep:
            known.write_text(json.dumps(row))
        else:
            shutil.rmtree(folder)
    return rows


class Stages:
    """Makes the stage of a framework when its first case is to run.

    Args:
        root: the folder of all cases.
        frameworks: all that will be asked for: they have one server.
    """

    def __init__(self, root, frameworks):
        self.root = root
        self.with_files = bool({"gloo", "mpi"} & set(frameworks))
        self.slow_files = None
        self.server = None

    def make(self, framework):
        if self.with_files and self.slow_files is None:
            self.slow_files = compile_slow_files(self.root)
        if framework == "mpi":
            return MpiStage(self.slow_files)
        if self.server is None:
            self.server = start_server(self.root, self.slow_files)
        return (
            GlooStage(self.slow_files, self.server) if framework == "gloo" else Stage(self.server)
        )


def judged(case, folder):
    """Return the row of a case."""
    from paceline.trace.analysis import analyse
    from paceline.trace.merge import load_run

    if case.framework == "torch":
        notes = [folder / f"notes-{rank}.json" for rank in range(case.ranks)]
        step_s = np.array([json.loads(path.read_text()) for path in notes])
        return judge(case, analyse(load_run(folder)).stragglers, step_s)
    return judge_ring(case, folder)


def main():
    flags = harness.options(
        __doc__,
        *("--cases", "--seed", "--keep", "--framework", "--minutes"),
        switches={"--campaign": "300 cases with a culprit and 300 clean runs of each framework"},
    )
    report = harness.Report("truth", flags.json)
    with tempfile.TemporaryDirectory(prefix="paceline-truth-") as name:
        root = Path(flags.keep[0] if flags.keep else name).absolute()
        root.mkdir(parents=True, exist_ok=True)
        chosen = chosen_cases(flags)
        stages = Stages(root, chosen)
        for framework, cases in chosen.items():
            make_stage = functools.partial(stages.make, framework)
            rows = run_cases(cases, root, report, flags, make_stage)
            if framework == "torch":
                add_bars(report, rows)
            if framework != "torch" or flags.campaign:
                add_named_bars(report, rows, framework)
            if flags.campaign:
                share = len(rows) / len(cases)
                report.bar(f"{framework}: share of the campaign", share, 1.0, at_least=True)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
