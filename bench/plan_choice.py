"""Does the planner choose the plan that is fastest when it runs, or one within 5 % of it?

Twenty models and batches (models of `unseen_models.py`), for each 12 plans of 2 and 4 ranks on this
machine: the default (2 ranks, torch's collectives and buckets), and others drawn at random from
the space that ``paceline plan --search`` searches: ranks, threads, passes before an update, layers
computed again, collectives, buckets. All train on the same samples in a step. The planner predicts
each plan first (capture, probe, steps without communication); then all plans run, in turn, round
by round, in ranks that are started once for each number of ranks.

    python bench/plan_choice.py --json [--quick] [--resume]

Of each model: the plans in predicted order, with predicted and measured seconds; the choice and
the best; `loss`, by which the choice is slower than the best; beside it what the default and the
mean of all 12 would lose, and the worst (`spread`); `ordered`: of the pairs of plans that differ by
more than 5 %, the part whose order is predicted. Rows are kept: ``--resume`` goes on after them,
with the machine that was probed first. Rows beside which other processes used more than 0.25 cores
are marked (`foreign_cores`), and counted all the same.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Report, options
from predict_unseen import begin

from paceline.core.allocator import KEEP
from paceline.core.config import cache_folder
from paceline.core.foreign_cpu import cpu_use

HERE = Path(__file__).parent
# How many plans of so many ranks, with more threads than their share of the cores or not: one of
# the former is enough to see whether the planner knows.
PLANS = {(2, False): 6, (2, True): 1, (4, False): 5}
ROUNDS, ROUND_S = 4, 0.3
QUICK_ROUNDS, QUICK_ROUND_S = 3, 0.2
WARM, LEAST_STEPS, MOST_STEPS = 2, 3, 60
SLOW = 4.0  # times the fastest plan's first step: a plan that runs one more step, and no rounds
DEADLINE_S = 120
WITHIN = 0.05
ROWS = (
    *(("lstm", 16), ("lstm", 48), ("gru", 32), ("depthwise", 32), ("depthwise", 64)),
    *(("unet", 16), ("vit", 16), ("vit", 48), ("gpt", 16), ("gpt", 32), ("gpt_bf16", 16)),
    *(("conv1d", 32), ("transposed", 32), ("transposed", 64), ("mixer", 16), ("mixer", 64)),
    *(("mlp_fused", 64), ("mlp_foreach", 256), ("resnet_accumulation", 16)),
    ("resnet_accumulation", 64),
)
QUICK = (("gru", 32),)
QUICK_PLANS = {(2, False): 6}


class Job:
    """Ranks of one number that train by several plans in turn."""

    def __init__(self, target, batch, ranks, plans, folder):
        file = Path(folder) / f"plans-{ranks}.json"
        file.write_text(json.dumps([plan.to_json() for plan in plans]))
        command = [sys.executable, str(HERE / "plan_choice_ranks.py"), target, str(batch)]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), f"{folder}/store-{ranks}", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, **KEEP},  # as the plans have it
            )
            for rank in range(ranks)
        ]

    def answers(self):
        """Return what each rank printed."""
        return [self._answer(process) for process in self.processes]

    def _answer(self, process):
        if not select.select([process.stdout], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"a rank has said nothing for {DEADLINE_S} s")
        return json.loads(process.stdout.readline())

    def run(self, number, warm, steps):
        """Run steps of a plan; return the seconds of each, which end with the slowest rank."""
        for process in self.processes:
            process.stdin.write(f"{number} {warm} {steps}\n")
            process.stdin.flush()
        return [max(step) for step in zip(*self.answers(), strict=True)]

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


def drawn(space, seed, counts):
    """Return the default plan, and others at random: so many of each kind, as in `PLANS`."""
    draw = random.Random(seed)
    plans = space.plans()
    chosen = []
    for (ranks, crowded), count in counts.items():
        share = max(1, space.cores // ranks)
        own = [plan for plan in plans if plan.mesh.data == ranks]
        own = [plan for plan in own if (plan.threads > share) == crowded]
        kept = own[: not chosen]  # a space begins with the default
        chosen += kept + draw.sample([plan for plan in own if plan not in kept], count - len(kept))
    return chosen


def measured(target, batch, plans, *, quick):
    """Return the median seconds of a step under each plan, and what others used meanwhile."""
    rounds, round_s = (QUICK_ROUNDS, QUICK_ROUND_S) if quick else (ROUNDS, ROUND_S)
    start = cpu_use()
    with tempfile.TemporaryDirectory() as folder:
        jobs, places = {}, {}
        try:
            for ranks in sorted({plan.mesh.data for plan in plans}):
                own = [plan for plan in plans if plan.mesh.data == ranks]
                jobs[ranks] = Job(target, batch, ranks, own, folder)
                jobs[ranks].answers()
                places |= {plan: (jobs[ranks], number) for number, plan in enumerate(own)}
            first_s = {plan: job.run(number, 1, 1)[0] for plan, (job, number) in places.items()}
            slow = {plan for plan in plans if first_s[plan] > SLOW * min(first_s.values())}
            found = {plan: [] for plan in plans}
            order = random.Random(0)
            for turn in range(rounds):
                for plan in order.sample(plans, len(plans)):
                    job, number = places[plan]
                    if plan in slow:
                        if turn == 0:
                            found[plan] += job.run(number, 0, 1)
                        continue
                    count = max(LEAST_STEPS, min(MOST_STEPS, int(round_s / first_s[plan])))
                    found[plan].append(statistics.median(job.run(number, WARM, count)))
        finally:
            for job in jobs.values():
                job.end()
    return [statistics.median(found[plan]) for plan in plans], cpu_use().foreign_cores(start)


def row_of(name, batch, machine, *, quick):
    """Return one row: predictions, then measurements."""
    from paceline.report.plan_search import plan_in_words
    from paceline.studies.plan_search import capture_target

    began = time.monotonic()
    target = f"{HERE / 'unseen_models.py'}:{name}"
    counts = QUICK_PLANS if quick else PLANS
    ranks = sorted({ranks for ranks, _ in counts})
    all_plans = capture_target(machine, target, batch=batch, ranks=ranks)
    plans = drawn(all_plans.space(), f"{name} {batch}", counts)
    estimates = all_plans.estimates(plans)
    planned = time.monotonic()
    seconds, foreign = measured(target, batch, plans, quick=quick)
    predicted = [each.step_time_s for each in estimates]
    order = sorted(range(len(plans)), key=predicted.__getitem__)
    best_s = min(seconds)
    losses = [step_s / best_s - 1 for step_s in seconds]
    pairs = [
        (predicted[i] < predicted[j]) == (seconds[i] < seconds[j])
        for i, j in itertools.combinations(range(len(plans)), 2)
        if abs(seconds[i] / seconds[j] - 1) > WITHIN
    ]
    words = [plan_in_words(plan) for plan in plans]
    return {
        "model": name,
        "batch": batch,
        "choice": words[order[0]],
        "best": words[seconds.index(best_s)],
        "loss": losses[order[0]],
        "default_loss": losses[0],
        "random_loss": statistics.fmean(losses),
        "random_within": sum(loss <= WITHIN for loss in losses) / len(losses),
        "spread": max(losses),
        "ordered": sum(pairs) / len(pairs) if pairs else 1.0,
        "foreign_cores": foreign,
        "plan_s": planned - began,
        "measure_s": time.monotonic() - planned,
        "plans": [
            {
                "plan": words[i],
                "predicted_s": predicted[i],
                "measured_s": seconds[i],
                "phases_s": dict(estimates[i].breakdown.items()),
                "ran": estimates[i].sources["forward"].startswith("measured"),
            }
            for i in order
        ],
    }


def bars(report, rows):
    quiet = [row for row in rows if row["foreign_cores"] <= 0.25]
    report.bar(
        f"models and batches whose choice is within {WITHIN:.0%} of the best plan",
        sum(row["loss"] <= WITHIN for row in rows) / len(rows) if rows else None,
        0.9,
        at_least=True,
        reason=f"{len(rows)} models and batches, {len(quiet)} undisturbed; "
        f"mean loss {_mean(rows, 'loss'):.1%}, of the default {_mean(rows, 'default_loss'):.1%}, "
        f"of a plan at random {_mean(rows, 'random_loss'):.1%}, "
        f"which is within {WITHIN:.0%} in {_mean(rows, 'random_within'):.0%}; "
        f"worst over best {_mean(rows, 'spread'):.0%}",
    )


def _mean(rows, field):
    return statistics.fmean(row[field] for row in rows)


def main():
    switches = {"--resume": "go on after the rows that are done"}
    flags = options(__doc__, "--only", switches=switches)
    report = Report("plan_choice", flags.json)
    folder = cache_folder() / "bench-plan-choice"
    done = begin(report, folder, resume=flags.resume, quick=flags.quick)
    known = {(row["model"], row["batch"]) for row in done}
    rows = QUICK if flags.quick else ROWS
    if flags.only:  # as MODEL:BATCH
        rows = [row for row in ROWS if f"{row[0]}:{row[1]}" in flags.only]
    for name, batch in rows:
        if (name, batch) in known:
            continue
        row = row_of(name, batch, report.machine, quick=flags.quick)
        report.row(**{key: value for key, value in row.items() if key != "plans"})
        report.rows[-1] = row
        with (folder / "rows.jsonl").open("a") as kept:
            kept.write(json.dumps(row) + "\n")
    bars(report, report.rows)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
