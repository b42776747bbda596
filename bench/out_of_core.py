"""Training in less memory than a step needs: plans against the ways that people have today.

A transformer (2,048 tokens a step) and a CNN train with Adam, each process in a memory cgroup of
its own. The peak of plain training without a limit is measured first; then the limits are 60 % and
30 % of it. Modes:

- plain: in core. Under a limit it is killed.
- planned: `paceline.training.OutOfCore`; the budget is what it finds as the cgroup's limit.
- checkpointing: every block is computed again (torch.utils.checkpoint).
- mapped: saved tensors are copied to a mapped file and come back by page faults: the naive way.

Processes of the modes take turns for some rounds; ratios are of the median times of steps, and
their median over the rounds. Gradients of all steps are compared by digest with those of plain
training. A plan's predictions are compared with what was measured: the slow-down against the
recorded step, the process's peak against the budget.

    python bench/out_of_core.py --json [--quick] [--only MODEL ...] [--rounds N] [--folder FOLDER]

Needs root (a memory cgroup of version 1) and a local disk.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from harness import Report, options, run_sections, tell
from memory_cgroup import MemoryCgroup

HERE = Path(__file__).parent
MODELS = ("transformer", "cnn")
DEADLINE_S = 600
RECORDED = 2  # steps of a planned training before its plan
TIMED = 4
SLOWER_BAR, NAIVE_BAR, FITS_BAR = 1.3, 1.9, 1.02
PEAK_ERROR_BAR, SLOWDOWN_ERROR_BAR = 0.05, 0.15


class Killed(Exception):
    """The kernel killed a process that needed more memory than its cgroup has."""


def run(mode, model, limit_bytes, flags, **more):
    """Train in a process in a cgroup; return what it printed, and its peak.

    Raises:
        Killed: it needed more memory.
    """
    folder = Path(flags.folder[0] if flags.folder else HERE.parent / "build").absolute()
    asked = {"mode": mode, "model": model, "folder": str(folder), "steps": RECORDED + TIMED, **more}
    with MemoryCgroup(limit_bytes) as group:
        command = [sys.executable, str(HERE / "out_of_core_ranks.py"), json.dumps(asked)]
        done = subprocess.run(
            group.command(command), stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S
        )
        if done.returncode == -signal.SIGKILL:
            raise Killed(f"{mode} was killed under {limit_bytes / 1e6:,.0f} MB")
        if done.returncode:
            sys.exit(f"{mode} ended with {done.returncode}")
        return {**json.loads(done.stdout), "group_peak_bytes": group.peak_bytes()}


def step_s(outcome):
    return statistics.median(outcome["step_s"][RECORDED:])


def measure(report, model, flags):
    rounds = int(flags.rounds[0]) if flags.rounds else (1 if flags.quick else 3)
    plain = run("plain", model, None, flags)
    peak = plain["group_peak_bytes"]
    report.row(model=model, mode="plain", limit="none", step_s=step_s(plain), peak_bytes=peak)
    fits(report, model, flags, rounds)
    for part in (0.6, 0.3):
        limit = int(part * peak)
        under(report, model, part, limit, flags, plain, rounds if part > 0.5 else 1)


def fits(report, model, flags, rounds):
    """Compare with plain training where all fits."""
    ratios = []
    for _ in range(rounds):
        plain = run("plain", model, None, flags)
        ratios.append(step_s(run("planned", model, None, flags, budget=1 << 40)) / step_s(plain))
    report.row(model=model, mode="planned", limit="none", over_plain=ratios)
    report.bar(f"{model}, all fits: time / plain", statistics.median(ratios), FITS_BAR)


def under(report, model, part, limit, flags, plain, rounds):
    """Compare the modes under a limit."""
    name = f"{model} at {part:.0%}"
    try:
        run("plain", model, limit, flags)
        was_killed = 0
    except Killed as problem:
        was_killed = 1
        tell(f"  {problem}")
    report.bar(f"{name}: plain training is killed", was_killed, 1, at_least=True)
    ratios = {mode: [] for mode in ("planned", "checkpointing", "mapped")}
    planned = []
    for _ in range(rounds):
        now = step_s(run("plain", model, None, flags))
        for mode, found in ratios.items():
            try:
                outcome = run(mode, model, limit, flags)
            except Killed as problem:
                tell(f"  {problem}")
                continue
            found.append(step_s(outcome) / now)
            same = outcome["digests"] == plain["digests"]
            if mode == "planned":
                planned.append(outcome)
                report.bar(f"{name}: gradients equal to the bit", int(same), 1, at_least=True)
            report.row(
                model=model, mode=mode, limit=part, over_plain=found[-1], step_s=step_s(outcome),
                bits_equal=same, group_peak_bytes=outcome["group_peak_bytes"], limit_bytes=limit,
                **outcome.get("out_of_core", {}),
            )  # fmt: skip
    report.bar(f"{name}: planned training completes", len(planned), 1, at_least=True)
    if not planned:
        return
    over = {mode: statistics.median(found) for mode, found in ratios.items() if found}
    if part > 0.5:
        report.bar(f"{name}: time / plain", over["planned"], SLOWER_BAR)
        if "mapped" in over:
            gain = over["mapped"] / over["planned"]
            report.bar(f"{name}: naive time / planned", gain, NAIVE_BAR, at_least=True)
    predictions(report, name, planned)


def predictions(report, name, planned):
    """Compare what plans said with what happened."""
    budget = planned[0]["out_of_core"]["budget_bytes"]
    peaks = [max(filter(None, outcome["peaks"])) for outcome in planned]
    report.bar(f"{name}: peak / budget", max(peaks) / budget, 1)
    errors, slow = [], []
    for outcome, peak in zip(planned, peaks, strict=True):
        said = outcome["out_of_core"]
        errors.append(abs(said["predicted_peak_bytes"] / peak - 1))
        slow.append(abs(said["plan"]["step_s"] / step_s(outcome) - 1))
    report.bar(f"{name}: error of the predicted peak", statistics.median(errors), PEAK_ERROR_BAR)
    report.bar(f"{name}: error of the predicted step", statistics.median(slow), SLOWDOWN_ERROR_BAR)


def main():
    flags = options(__doc__, "--only", "--rounds", "--folder")
    report = Report("out_of_core", flags.json)
    run_sections(flags.only or MODELS, lambda model: measure(report, model, flags), report)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
