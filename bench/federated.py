"""Federations: how soon which strategy reaches an accuracy, and at what cost to whom.

100 clients share Fashion-MNIST (Dirichlet 0.3 and 0.1, and 0.3 with classes 6 and 8 on the slowest
devices) on phones with the scores of an AI benchmark; one local epoch, a cohort of 10. All
strategies see the same clients, sessions, devices and first models; times are simulated seconds.
Sections:

- a split each: every strategy with every seed; medians over the seeds, ratios within a seed.
- knobs: each goal raised alone; its own metric must move, by a paired sign test over the seeds.
- selector: seconds to choose 10 of 10,000 clients.

    python bench/federated.py --json [--quick] [--data DIR] [--only SECTION ...] [--seeds N]

DIR holds `fashion-mnist/` and `devices/phone_ai_benchmark.json`; without it the digits of
scikit-learn and log-normal devices stand in, and no figure is compared with a bar. `--quick` is one
seed of the first split. Two processes; the results do not depend on how busy the machine is.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from harness import Report, options, run_sections, tell

from paceline.federated.config import DataOptions, FederationConfig
from paceline.federated.selection import ClientsView, Goals, GoalSelector
from paceline.federated.strategies import STRATEGIES
from paceline.federated.study import read_data, simulate

SPLITS = {"dirichlet 0.3": (0.3, ()), "dirichlet 0.1": (0.1, ()), "correlated": (0.3, (6, 8))}
SEEDS = 5
ROUNDS = 5000  # more than any strategy makes within the budget
PROCESSES = 2
# least ratio of the baseline's seconds to 80 % over ours
SPEED_BARS = {"random": 4.0, "over-selected": 1.7, "oort": 1.2, "fedbuff": 1.1}
# goal, the metric that it is for, and whether that rises
KNOBS = {
    "fast": ("to_target_s", False),
    "resource_fair": ("fairness", True),
    "accuracy_fair": ("worst_class", True),
    "quality": ("final", True),
}
FIELDS = (*("final", "worst_class", "fairness", "never_used", "never_online", "waste", "rounds"),)
MANY_CLIENTS, CHOICE_BAR_S = 10_000, 0.05


def main():
    given = options(__doc__, "--data", "--only", "--seeds")
    folder = Path(given.data[0]) if given.data else None
    seeds = int(given.seeds[0]) if given.seeds else 1 if given.quick else SEEDS
    report = Report("federated", given.json)
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the processes that simulate
    sections = (*SPLITS, "knobs", "selector")
    names = given.only or (("dirichlet 0.3", "selector") if given.quick else sections)
    others = {"knobs": lambda: knobs(report, folder, seeds), "selector": lambda: selector(report)}
    run_sections(
        names,
        lambda name: others[name]() if name in others else compare(report, name, folder, seeds),
        report,
    )
    return report.print()


def config_of(split, folder):
    alpha, slow = SPLITS[split]
    data = str(folder / "fashion-mnist") if folder else ""
    scores = str(folder / "devices/phone_ai_benchmark.json") if folder else ""
    return FederationConfig(
        rounds=ROUNDS, data=DataOptions(folder=data, alpha=alpha, slow_classes=slow), scores=scores
    )


def run_all(config, names, seeds):
    """Return the results of each strategy, by its name, in the order of the seeds."""
    jobs = list(itertools.product(range(seeds), names))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool:
        results = list(pool.map(_run, [(config, name, seed) for seed, name in jobs]))
    found = {name: [] for name in names}
    for (_, name), result in zip(jobs, results, strict=True):
        found[name].append(result)
    return found


def _run(job):
    config, name, seed = job
    data, scores = read_data(config)
    result = simulate(config, data, scores, name, seed)
    tell(f"  {name}, seed {seed}: {result.to_target_s and round(result.to_target_s)} s")
    return result


def compare(report, split, folder, seeds):
    found = run_all(config_of(split, folder), STRATEGIES, seeds)
    for name, results in found.items():
        reached = [r.to_target_s for r in results if r.to_target_s is not None]
        report.row(
            section=split,
            strategy=name,
            seeds=seeds,
            reached=len(reached),
            to_80_s=statistics.median(reached) if reached else None,
            **{
                field: statistics.median(getattr(result, field) for result in results)
                for field in FIELDS
            },
        )
    if folder is None:
        tell(f"{split}: no bars: the data are not those of the issue (--data)")
        return
    ours = found["paceline"]
    for name, least in SPEED_BARS.items():
        ratios = [_seconds(a) / _seconds(b) for a, b in zip(found[name], ours, strict=True)]
        report.bar(
            f"{split}: seconds to 80 %, {name} / paceline",
            statistics.median(ratios),
            least,
            at_least=True,
        )

    def median(name, field):
        return statistics.median(getattr(result, field) for result in found[name])

    best = max(median(name, "final") for name in STRATEGIES)
    report.bar(f"{split}: final accuracy below the best", best - median("paceline", "final"), 0.005)
    worst = median("paceline", "worst_class") - median("over-selected", "worst_class")
    report.bar(f"{split}: worst class, paceline - over-selected", worst, 0.0, at_least=True)
    fairness = median("paceline", "fairness")
    report.bar(f"{split}: fairness (Jain)", fairness, 0.6, at_least=True)
    report.bar(f"{split}: clients never used", median("paceline", "never_used"), 0.05)
    report.bar(f"{split}: wasted work", median("paceline", "waste"), 0.1)


def _seconds(result):
    """Return the seconds to the target; the whole budget at least where it was not reached."""
    return result.seconds if result.to_target_s is None else result.to_target_s


def knobs(report, folder, seeds):
    """Raise each goal alone; count in how many seeds its metric moves its way."""
    neutral = Goals(fast=0.0, resource_fair=0.0, accuracy_fair=0.0, quality=0.0)
    config = replace(config_of("correlated", folder), goals=neutral)
    before = run_all(config, ["paceline"], seeds)["paceline"]
    for goal, (field, rises) in KNOBS.items():
        raised = replace(config, goals=replace(neutral, **{goal: 2.0}))
        after = run_all(raised, ["paceline"], seeds)["paceline"]
        moves = [_metric(b, field) - _metric(a, field) for a, b in zip(before, after, strict=True)]
        right = sum((move > 0) == rises and move != 0 for move in moves)
        p_value = sum(math.comb(seeds, k) for k in range(right, seeds + 1)) / 2**seeds
        report.row(section="knobs", goal=goal, metric=field, moves=moves, p_value=p_value)
        if folder is not None:
            report.bar(f"knobs: {goal} moves {field}, p", p_value, 0.05)


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


if __name__ == "__main__":
    sys.exit(main())
