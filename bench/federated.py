"""Federations: how soon which strategy reaches an accuracy, and at what cost to whom.

100 clients share Fashion-MNIST (Dirichlet 0.3 and 0.1, and 0.3 with classes 6 and 8 on the slowest
devices) on phones with the scores of an AI benchmark; one local epoch, a cohort of 10. All
strategies see the same clients, sessions, devices and first models; times are simulated seconds.
Sections:

- a split each: every strategy with every seed; medians over the seeds, ratios within a seed.
- longer: our strategy with twice the budget, in which nearly every client is online once.
- knobs: each goal raised alone; its own metric must move, by a paired sign test over the seeds.
- overhead: seconds of a round beyond the clients' work, over those of Flower's simulation, if
  build/flower has it (`scripts/campaign flower` makes it).
- selector: seconds to choose 10 of 10,000 clients.

    python bench/federated.py --json [--quick] [--data DIR] [--only SECTION ...] [--seeds N]
                              [--minutes M]

DIR holds `fashion-mnist/` and `devices/phone_ai_benchmark.json`; without it the digits of
scikit-learn and log-normal devices stand in, and no figure is compared with a bar. `--quick` is one
seed of the first split. Two processes; the results do not depend on how busy the machine is.

Each simulation with DIR is appended to bench/results/federated.jsonl when it ends, and a run that
is started again takes what is there: stop it at any time, or give it `--minutes M`, after which no
simulation begins. Delete the file when a strategy has changed. The seeds of what bars need come
first.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import federated_overhead
import numpy as np
from harness import Report, options, run_sections, tell

from paceline.federated.config import DataOptions, FederationConfig
from paceline.federated.selection import ClientsView, Goals, GoalSelector
from paceline.federated.strategies import STRATEGIES
from paceline.federated.study import FederationResult, read_data, simulate

SPLITS = {"dirichlet 0.3": (0.3, ()), "dirichlet 0.1": (0.1, ()), "correlated": (0.3, (6, 8))}
SPLIT_OF = {"knobs": "dirichlet 0.3", "longer": "dirichlet 0.3"}
SEEDS = 5
KNOB_SEEDS = 20  # a goal moves its metric by less than strategies differ
BUDGET_S = 9000.0
ROUNDS = 5000  # more than any strategy makes within the budget
PROCESSES = 2
# least ratio of the baseline's seconds to 80 % over ours
SPEED_BARS = {"random": 4.0, "over-selected": 1.7, "oort": 1.2, "fedbuff": 1.1}
NEUTRAL = Goals(fast=0.0, resource_fair=0.0, accuracy_fair=0.0, quality=0.0)
# goal: to what it is raised, the metric that it is for, and whether that rises
KNOBS = {
    "fast": (1.0, "to_target_s", False),
    "resource_fair": (1.0, "work_fairness", True),
    "accuracy_fair": (3.0, "worst_class", True),
    "quality": (1.0, "final", True),
}
FIELDS = (
    *("final", "worst_class", "worst_clients", "fairness", "work_fairness"),
    *("never_used", "never_online", "waste", "rounds"),
)
MANY_CLIENTS, CHOICE_BAR_S = 10_000, 0.05


class Job(NamedTuple):
    """A simulation: of a split or of "knobs"; `goal` is the one that is raised, or ""."""

    section: str
    goal: str
    strategy: str
    seed: int


def main():
    given = options(__doc__, "--data", "--only", "--seeds", "--minutes")
    folder = Path(given.data[0]) if given.data else None
    seeds = int(given.seeds[0]) if given.seeds else 1 if given.quick else SEEDS
    end = time.monotonic() + 60 * float(given.minutes[0]) if given.minutes else math.inf
    report = Report("federated", given.json)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes that simulate
    sections = (*SPLITS, "longer", "knobs", "selector", "overhead")
    names = given.only or (("dirichlet 0.3", "selector") if given.quick else sections)
    with tempfile.TemporaryDirectory() as scratch:
        is_kept = folder is not None and not given.quick
        results = Path(__file__).parent / "results" if is_kept else Path(scratch)
        found = run_all(jobs_of(names, seeds), folder, results / "federated.jsonl", end)
    others = {
        "longer": lambda: longer(report, found),
        "knobs": lambda: knobs(report, found, folder, seeds),
        "selector": lambda: selector(report),
        "overhead": lambda: overhead(report),
    }
    run_sections(
        names,
        lambda name: (
            others[name]() if name in others else compare(report, found, name, folder, seeds)
        ),
        report,
    )
    return report.print()


# ------------------------------------------------------------------ simulations


def jobs_of(sections, seeds):
    """Return the simulations of some sections: those that bars need first, seed by seed."""
    barred = ("paceline", *SPEED_BARS)
    rest = tuple(name for name in STRATEGIES if name not in barred)
    jobs = []
    for strategies in (barred, rest):
        for seed in range(max(seeds, knob_seeds(seeds))):
            for section in sections:
                if seed >= (knob_seeds(seeds) if section == "knobs" else seeds):
                    continue
                if section in SPLITS:
                    jobs += [Job(section, "", name, seed) for name in strategies]
                elif section == "longer" and strategies is barred:
                    jobs.append(Job(section, "", "paceline", seed))
                elif section == "knobs" and strategies is barred:
                    jobs += [Job(section, goal, "paceline", seed) for goal in ("", *KNOBS)]
    return jobs


def knob_seeds(seeds):
    """Return how many seeds the knobs have where the rest has `seeds`."""
    return KNOB_SEEDS if seeds == SEEDS else seeds


def config_of(job, folder):
    alpha, slow = SPLITS[SPLIT_OF.get(job.section, job.section)]
    data = str(folder / "fashion-mnist") if folder else ""
    scores = str(folder / "devices/phone_ai_benchmark.json") if folder else ""
    goals = Goals()
    if job.section == "knobs":
        goals = replace(NEUTRAL, **{job.goal: KNOBS[job.goal][0]}) if job.goal else NEUTRAL
    data = DataOptions(folder=data, alpha=alpha, slow_classes=slow)
    budget_s = (2 if job.section == "longer" else 1) * BUDGET_S
    return FederationConfig(rounds=ROUNDS, budget_s=budget_s, data=data, scores=scores, goals=goals)


def run_all(jobs, folder, kept, end):
    """Return the results by job: those in the file `kept`, and those that begin before `end`."""
    text = kept.read_text() if kept.exists() else ""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):  # killed while it wrote
        kept.write_text("".join(lines[:-1]))
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    found = {Job(*e["job"]): FederationResult.from_json(e["result"]) for e in entries}
    todo = deque(job for job in jobs if job not in found)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        running = set()
        while todo or running:
            while todo and len(running) < PROCESSES and time.monotonic() < end:
                running.add(pool.submit(_run, todo.popleft(), folder))
            if not running:
                tell(f"stopped after --minutes: {len(todo)} simulations are left")
                break
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for job, result in (future.result() for future in ended):
                found[job] = result
                with kept.open("a") as file:
                    file.write(json.dumps({"job": job, "result": result.to_json()}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
    return {job: result for job, result in found.items() if job in set(jobs)}


_READ = {}


def _run(job, folder):
    config = config_of(job, folder)
    begin = time.perf_counter()
    if folder not in _READ:
        _READ[folder] = read_data(config)
    data, scores = _READ[folder]
    result = simulate(config, data, scores, job.strategy, job.seed)
    reached = result.to_target_s and round(result.to_target_s)
    name = " ".join(filter(None, (job.section, job.goal, job.strategy)))
    tell(f"  {name}, seed {job.seed}: {reached} s ({time.perf_counter() - begin:.0f} s)")
    return job, replace(result, curve=(), returned=(), cluster_of=(), unpaid=())


# ------------------------------------------------------------------ bars


def compare(report, results, split, folder, seeds):
    found = {
        name: {job.seed: r for job, r in results.items() if (*job[:3],) == (split, "", name)}
        for name in STRATEGIES
    }
    for name, by_seed in found.items():
        if not by_seed:
            continue
        reached = [r.to_target_s for r in by_seed.values() if r.to_target_s is not None]
        report.row(
            section=split,
            strategy=name,
            seeds=len(by_seed),
            reached=len(reached),
            to_80_s=statistics.median(reached) if reached else None,
            **{
                field: statistics.median(getattr(result, field) for result in by_seed.values())
                for field in FIELDS
            },
        )
    if folder is None:
        tell(f"{split}: no bars: the data are not those of the issue (--data)")
        return
    missing = {name: seeds - len(by_seed) for name, by_seed in found.items()}
    partly = ", ".join(f"{n} seeds of {name} missing" for name, n in missing.items() if n)

    def bar(name, value, limit, *, at_least=False, reason=""):
        reason = "; ".join(filter(None, (reason, partly)))
        report.bar(f"{split}: {name}", value, limit, at_least=at_least, reason=reason)

    ours = found["paceline"]
    for name, least in SPEED_BARS.items():
        both = sorted(ours.keys() & found[name].keys())
        ratios = [_seconds(found[name][seed]) / _seconds(ours[seed]) for seed in both]
        median = statistics.median(ratios) if ratios else None
        bar(f"seconds to 80 %, {name} / paceline", median, least, at_least=True)
        if name == "fedbuff":
            lowest = min(ratios, default=None)
            report.row(section=split, figure="lowest ratio to fedbuff of a seed", value=lowest)

    def median(name, field):
        values = [getattr(result, field) for result in found[name].values()]
        return statistics.median(values) if values else math.nan

    best = max(median(name, "final") for name in STRATEGIES if found[name])
    bar("final accuracy below the best", best - median("paceline", "final"), 0.005)
    worst = median("paceline", "worst_class") - median("over-selected", "worst_class")
    bar("worst class, paceline - over-selected", worst, 0.0, at_least=True)
    bar("fairness (Jain)", median("paceline", "fairness"), 0.6, at_least=True)
    reachable = [r.never_used - r.never_online for r in ours.values()]
    reason = (
        f"{median('paceline', 'never_online'):.0%} were offline all the time; of the others "
        f"{statistics.median(reachable):.0%} were not used"
    )
    bar("clients never used", median("paceline", "never_used"), 0.05, reason=reason)
    bar("wasted work", median("paceline", "waste"), 0.1)


def _seconds(result):
    """Return the seconds to the target; the whole budget at least where it was not reached."""
    return result.seconds if result.to_target_s is None else result.to_target_s


def longer(report, results):
    """Show who is left out when time is long enough for all to be online; no bar is for this."""
    found = [result for job, result in results.items() if job.section == "longer"]
    for field in FIELDS if found else ():
        values = [getattr(result, field) for result in found]
        report.row(section="longer", figure=field, value=statistics.median(values), values=values)


def knobs(report, results, folder, seeds):
    """Raise each goal alone; count in how many seeds its metric moves its way."""
    found = {
        goal: {job.seed: r for job, r in results.items() if job[:2] == ("knobs", goal)}
        for goal in ("", *KNOBS)
    }
    for goal, (_, field, rises) in KNOBS.items():
        both = sorted(found[""].keys() & found[goal].keys())
        pairs = [(_metric(found[""][s], field), _metric(found[goal][s], field)) for s in both]
        moves = [after - before for before, after in pairs]
        right = sum((move > 0) == rises and move != 0 for move in moves)
        p_value = sign_test(right, len(moves))
        report.row(
            section="knobs",
            goal=goal,
            metric=field,
            before=[before for before, _ in pairs],
            moves=moves,
            p_value=p_value,
        )
        if folder is not None:
            reason = f"{right} of {len(both)} seeds"
            report.bar(f"knobs: {goal} moves {field}, p", p_value, 0.05, reason=reason)


def sign_test(right, count):
    """Return how probable so many of `count` moves are in one direction, if it were chance.

    >>> sign_test(5, 5)
    0.03125
    """
    return sum(math.comb(count, k) for k in range(right, count + 1)) / 2**count


def _metric(result, field):
    return _seconds(result) if field == "to_target_s" else getattr(result, field)


def selector(report):
    rng = np.random.default_rng(0)
    many = MANY_CLIENTS
    view = ClientsView(
        is_free=rng.random(many) < 0.5,
        expected_s=rng.lognormal(3, 1, many),
        is_measured=np.ones(many, bool),
        selected=rng.poisson(5, many),
        returned=rng.poisson(5, many),
        spent_s=rng.lognormal(5, 1, many),
        loss=rng.lognormal(0, 1, many),
        samples=rng.integers(20, 600, many),
        surprise=rng.lognormal(0, 1, many),
        answers=np.ones(many),
        last_round=rng.integers(0, 100, many),
        round=100,
        accuracy=tuple(np.linspace(0.1, 0.8, 50)),
    )
    chooser = GoalSelector(Goals(accuracy_fair=0.5), rng)
    times = []
    for _ in range(50):
        begin = time.perf_counter()
        chooser.choose(view, 10)
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    report.bar(f"selector: seconds to choose 10 of {many:,}", seconds, CHOICE_BAR_S)


def overhead(report):
    programs = federated_overhead.flower_programs()
    if programs is None:
        tell("overhead: skipped: there is no Flower with its simulation in build/flower")
        return
    ours = statistics.median(federated_overhead.embedded() for _ in range(5))
    theirs = federated_overhead.flower(programs)
    for engine, seconds in (("embedded", [ours]), ("flower", theirs)):
        report.row(
            section="overhead",
            engine=engine,
            rounds=len(seconds),
            seconds_per_round=statistics.median(seconds),
            least=min(seconds),
        )
    ratio = statistics.median(theirs) / ours
    report.bar("overhead: flower / embedded", ratio, 10, at_least=True)


if __name__ == "__main__":
    sys.exit(main())
