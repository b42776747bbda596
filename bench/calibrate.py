"""Does a calibrated machine predict the next run better? Error of the step time, before and after.

Each repeat probes this machine, plans and runs the demo's training, calibrates the machine by that
run, and runs the training again. Both machines, the probed and the calibrated one, then predict the
second run, which neither has seen.

    python bench/calibrate.py --json [--quick]

The bar is on all rows. Rows whose two runs lie further apart than `QUIET` were disturbed by
something that no description of a machine can foresee; the medians without them stand beside it.

What bounds the gain is the machine: `drift` is how far the two runs of one repeat lie apart,
|second / first - 1|, with nothing changed between them but the time. A prediction that met the
first run exactly would miss the second one by that much.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

BAR = 0.5
QUIET = 0.25  # of drift; the estimate's own interval
RANKS = 2
REPEATS, QUICK_REPEATS = 6, 2
EPOCHS, QUICK_EPOCHS = 30, 8


def train(run, plan, machine, epochs):
    """Run the demo's training without a straggler under `plan`; return its undisturbed step."""
    from paceline.core.clock import SystemClock
    from paceline.core.config import resolve
    from paceline.launch.options import RunConfig
    from paceline.launch.prepare import claim_folder, prepare
    from paceline.launch.program import Program, ProgramKind
    from paceline.launch.run import execute
    from paceline.report.model import gather
    from paceline.studies.demo import SCRIPT

    clock = SystemClock()
    args = ["--result", f"{run}.json", "--epochs", str(epochs)]
    resolved = resolve(RunConfig, environ={})
    program = Program(ProgramKind.SCRIPT, str(SCRIPT))
    job = prepare(program, args, resolved, run, clock, plan=plan)
    execute(claim_folder(job), machine=machine, clock=clock)
    comparison = gather(run).comparison
    assert not comparison.not_compared, comparison.not_compared
    return comparison.measured_step_s


def plan_on(path):
    from paceline.studies.demo import SCRIPT
    from paceline.studies.predict import predict

    return predict(f"{SCRIPT}:training_step", ranks=RANKS, machine_path=path)


def repeat(folder, epochs):
    """Return one row: how far each machine is from the run that came after the calibration."""
    from paceline.perf import estimate
    from paceline.probe.measure import measure
    from paceline.studies.calibrate import calibrate_by_run

    probed = measure(folder, quick=True, on_progress=lambda _: None)
    (folder / "probed.json").write_text(probed.to_text())
    first_plan = plan_on(folder / "probed.json")
    first_s = train(folder / "first", first_plan, probed, epochs)
    better, fit = calibrate_by_run(probed, folder / "first")
    (folder / "better.json").write_text(better.to_text())
    second_plan = plan_on(folder / "better.json")
    second_s = train(folder / "second", second_plan, better, epochs)
    before_s = estimate(probed, second_plan.workload, second_plan.plan).step_time_s
    after_s = second_plan.estimate.step_time_s
    return {
        "first_s": first_s,
        "second_s": second_s,
        "probed_s": before_s,
        "calibrated_s": after_s,
        "error_before": abs(before_s / second_s - 1),
        "error_after": abs(after_s / second_s - 1),
        "drift": abs(second_s / first_s - 1),
        "fitted_s": fit.fitted_step_s,
        "weights": {phase.name: phase.weight for phase in fit.phases},
    }


def main():
    flags = options(__doc__)
    from paceline import store
    from paceline.studies.demo_files import IMAGES, PACK, make_folder, write_images

    report = Report("calibrate", flags.json)
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)  # the demo's script finds its pack below the working directory
        make_folder()
        write_images()
        store.pack(store.Folder(IMAGES), PACK)
        for i in range(QUICK_REPEATS if flags.quick else REPEATS):
            tell(f"repeat {i}")
            folder = Path(name) / f"repeat-{i}"
            folder.mkdir()
            epochs = QUICK_EPOCHS if flags.quick else EPOCHS
            report.row(**repeat(folder, epochs))
        os.chdir("/")
    rows = list(report.rows)
    quiet = [row for row in rows if row["drift"] <= QUIET]
    before, after, drift = summarize(report, "all", rows)
    reason = f"medians {after:.3f} / {before:.3f}; two runs of one row differ by {drift:.3f}"
    if quiet:
        quiet_before, quiet_after, _ = summarize(report, "quiet", quiet)
        reason += f"; of the {len(quiet)} quiet rows {quiet_after:.3f} / {quiet_before:.3f}"
    name = "error of the next run's step time, calibrated over probed"
    report.bar(name, after / before, BAR, reason=reason)
    return report.print()


def summarize(report, name, rows):
    """Add a row with the medians of `rows`, and return them."""
    keys = ("error_before", "error_after", "drift")
    medians = [statistics.median(row[key] for row in rows) for key in keys]
    logs = [math.log(row["second_s"] / row["first_s"]) for row in rows]
    # Of a single run: the difference of two has twice the variance.
    drift_log_sd = math.sqrt(sum(log**2 for log in logs) / len(logs) / 2)
    report.row(
        rows=name,
        count=len(rows),
        drift_log_sd=drift_log_sd,
        **dict(zip(keys, medians, strict=True)),
    )
    return medians


if __name__ == "__main__":
    sys.exit(main())
