"""What do remedies against imbalance gain: each alone, and together?

budget: a CNN, an LSTM and a transformer under DDP, 2 ranks on 2 cores, each with 2 workers of a
DataLoader that transform samples on the CPU (`imbalance_ranks.py`). Jobs take turns, each in
processes of its own:

- unset       torch.multiprocessing.spawn, OMP_NUM_THREADS unset: torch takes a thread per core
- torchrun    sets OMP_NUM_THREADS=1
- lightning   mp.spawn with Lightning's cap: cores // processes threads
- budget      paceline run --pace off --allocator system: the CPU budget alone, recorded as all runs
- allocator   paceline run --pace off --budget off, with OMP_NUM_THREADS=1: the allocator alone
- paceline    paceline run: its defaults, both and paced input

The step time is that of the slower rank, with its wait for data; context switches are those of both
ranks and their workers, all threads, per step.

pacing, rebalancing and simulated: see `imbalance_pacing.py`, `imbalance_rebalance.py` and
`imbalance_simulated.py`, which can be run alone, too. `--quick` measures the budget on one model.

    python bench/imbalance.py --json [--quick] [--parts budget pacing rebalancing simulated]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, options, run_sections
from imbalance_pacing import PacingFailed, pacing_part
from imbalance_rebalance import rebalancing_part
from imbalance_simulated import simulated_part

HERE = Path(__file__).parent
RANKS = 2
STEPS, ROUNDS = 60, 3
QUICK_STEPS, QUICK_ROUNDS = 40, 1
DEADLINE_S = 600
MODELS = ("cnn", "lstm", "transformer")
PACELINE = (sys.executable, "-m", "paceline")
RUN = (*PACELINE, "run", "-n", str(RANKS))
# Of each contender: the command before the script, variables, and words after its arguments.
CONTENDERS = {
    "unset": ((sys.executable,), {}, ("--spawn", str(RANKS))),
    "torchrun": (
        (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
        {},
        (),
    ),
    "lightning": ((sys.executable,), {}, ("--spawn", str(RANKS), "--caps")),
    "budget": ((*RUN, "--pace", "off", "--allocator", "system"), {}, ()),
    "allocator": ((*RUN, "--pace", "off", "--budget", "off"), {"OMP_NUM_THREADS": "1"}, ()),
    "paceline": (RUN, {}, ()),
}
QUICK = ("unset", "torchrun", "lightning", "paceline")  # and one model
SWITCHES = "nonvoluntary_ctxt_switches"


class JobFailed(Exception):
    """A job that ended badly: its part has no figures."""


def measure(contender, model, steps, folder):
    """Run a job; return its step times and, per step, what its processes counted together."""
    before, variables, after = CONTENDERS[contender]
    out = Path(tempfile.mkdtemp(prefix=f"{contender}-", dir=folder))
    command = [*before, *(("--out", out / "run") if "run" in before else ()),
               HERE / "imbalance_ranks.py", model, steps, out, *after]  # fmt: skip
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        list(map(str, command)),
        env={**environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        raise JobFailed(f"{contender}, {model}: {done.stderr[-400:]}")
    ranks = [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]
    shutil.rmtree(out)
    counted = {
        name: sum(rank[name] for rank in ranks)
        for name in ranks[0]
        if name not in ("step_s", "wait_s", "losses")
    }
    return {
        "step_s": np.max([rank["step_s"] for rank in ranks], axis=0),
        "wait_s": float(np.mean([rank["wait_s"] for rank in ranks])),
        "losses": ranks[0]["losses"],
        **counted,
    }


def summary(jobs):
    """Return the median over jobs of each figure of a job."""
    figures = {
        "median_s": [float(np.median(job["step_s"])) for job in jobs],
        "p95_s": [float(np.quantile(job["step_s"], 0.95)) for job in jobs],
        "mean_s": [float(np.mean(job["step_s"])) for job in jobs],
        "wait_s": [job["wait_s"] for job in jobs],
        "involuntary_switches": [job[SWITCHES] for job in jobs],
        "of_main_threads": [job["main_nonvoluntary"] for job in jobs],
        "page_faults": [job["minor_faults"] for job in jobs],
        "cpu_s": [job["cpu_ticks"] / os.sysconf("SC_CLK_TCK") for job in jobs],
    }
    return {name: statistics.median(values) for name, values in figures.items()}


def budget_part(report, quick):
    steps, rounds = (QUICK_STEPS, QUICK_ROUNDS) if quick else (STEPS, ROUNDS)
    contenders = QUICK if quick else tuple(CONTENDERS)
    with tempfile.TemporaryDirectory(prefix="imbalance-") as folder:
        for model in MODELS[:1] if quick else MODELS:
            jobs = {contender: [] for contender in contenders}
            for turn in range(rounds):
                order = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
                for contender in order:
                    jobs[contender].append(measure(contender, model, steps, folder))
            found = {contender: summary(made) for contender, made in jobs.items()}
            for contender, figures in found.items():
                report.row(part="budget", model=model, contender=contender, jobs=rounds, **figures)
            budget_bars(report, model, found)
            # With two threads sums are rounded in another order, which training amplifies.
            losses = [job["losses"] for contender, made in jobs.items()
                      for job in made if contender != "unset"]  # fmt: skip
            apart = max(float(np.max(np.abs(np.subtract(losses[0], own)))) for own in losses)
            report.bar(f"{model}: losses of all jobs of one thread differ at most by", apart, 0.0)


def budget_bars(report, model, found):
    unset, ours = found["unset"], found["paceline"]
    better = min(found["torchrun"]["median_s"], found["lightning"]["median_s"])
    report.bar(f"{model}: median step, unset / paceline",
               unset["median_s"] / ours["median_s"], 1.35, at_least=True)  # fmt: skip
    report.bar(f"{model}: p95 of a step, unset / paceline",
               unset["p95_s"] / ours["p95_s"], 1.5, at_least=True)  # fmt: skip
    report.bar(f"{model}: involuntary context switches, paceline / unset",
               ours["involuntary_switches"] / unset["involuntary_switches"], 0.5)  # fmt: skip
    report.bar(f"{model}: median step, the better of torchrun and lightning / paceline",
               better / ours["median_s"], 1.05, at_least=True)  # fmt: skip


PARTS = {
    "budget": budget_part,
    "rebalancing": rebalancing_part,
    "pacing": pacing_part,
    "simulated": simulated_part,
}
QUICK_PARTS = ("budget",)
FAILURES = (JobFailed, PacingFailed, subprocess.TimeoutExpired, subprocess.CalledProcessError)


def main():
    asked = options(__doc__, "--parts")
    report = Report("imbalance", asked.json)
    parts = asked.parts or (QUICK_PARTS if asked.quick else tuple(PARTS))
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if len(os.sched_getaffinity(0)) != RANKS:
        first = sorted(os.sched_getaffinity(0))[:RANKS]
        if len(first) < RANKS:
            sys.exit("two cores are needed")
        os.sched_setaffinity(0, first)
    run_sections(parts, lambda name: PARTS[name](report, asked.quick), report,
                 failures=FAILURES)  # fmt: skip
    sys.exit(report.print())


if __name__ == "__main__":
    main()
