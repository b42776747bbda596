"""Do two characterizations agree, do their profiles feed planner and scheduler, and do predicted
ones show what the published study of a machine found?

- agreement: `paceline characterize` of a small model twice, each in a folder of its own, with real
  ranks; a cell agrees if the difference lies within the two stated intervals.
- planner: the step of the built-in model is predicted before and after `paceline plan --from` the
  first profile, and compared with what the second sweep measured. Needs a probed machine.
- scheduler: jobs of each curve in `paceline queue simulate --rates profile.json`, alone on a
  cluster: a job ends after work / throughput of the profile, and no rate is typed by hand.
- predicted: `--predict` of a transformer on Summitdev (4 P100 with NVLink) and on machines whose
  devices share PCI Express. How much do a larger batch and the place of four devices change the
  throughput, and is 16 devices' scaling below linear?

Source of the finding: J. Han, L. Xu, M. Rafique, A. Butt, S.-H. Lim, A quantitative study of deep
learning training on heterogeneous supercomputers, IEEE CLUSTER 2019.

    python bench/characterize.py --json [--quick]
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell

DEADLINE_S = 1500
MODEL = "layers=12,hidden=768,heads=12,vocab=30522,sequence=128"  # as BERT base
BATCHES, RANKS = (8, 4, 16, 32, 64), (1, 2, 4, 8, 16)  # the first batch is the baseline
LARGER_BATCH, NODE = 32, 4
FAST, SLOW = "summitdev", "gtx1080ti-cluster"
OTHERS = ("p40-cluster", "k80-cluster")
LITTLE, MUCH = 0.10, 0.25  # changes of the throughput


def paceline(*args):
    """Run a verb, and return its standard output."""
    command = [sys.executable, "-m", "paceline", *map(str, args)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S
    )
    return done.stdout


def swept(folder, machine, *, quick):
    """Return the profile of a sweep of the built-in model."""
    from paceline.core.scaling_profile import ScalingProfile

    axes = ["--model", "mlp", "--batch", "32"] if quick else [
        "--model", "cnn", "--batch", "32,64", "--storage", "packed,files"]  # fmt: skip
    tell(f"sweep in {folder.name}")
    text = paceline(
        "characterize", "--json", "--out", folder, "--ranks", "1,2", *axes,
        *("--repeats", 2 if quick else 3, "--epochs", 2 if quick else 4, "--budget", "20m"),
        *(("--machine", machine) if machine else ()),
    )  # fmt: skip
    return ScalingProfile.from_text(text)


def compare(report, first, second):
    """Say for each cell whether two sweeps agree."""
    from paceline.studies.characterize.figures import agree

    differing = 0
    for curve in first.curves:
        for point in curve.points:
            other = second.curve(curve.name).point(point.ranks)
            same = agree(point.throughput, other.throughput)
            differing += not same
            report.row(
                part="agreement", cell=f"{curve.name} on {point.ranks}", agree=same,
                **{f"{name}_{key}": getattr(figure.throughput, key)
                   for name, figure in (("first", point), ("second", other))
                   for key in ("value", "low", "high")},
            )  # fmt: skip
    report.bar("cells whose two sweeps disagree beyond their intervals", differing, 0)


def feed_planner(report, folder, first, second, machine):
    """Predict a step before and after a profile corrects the machine."""
    from paceline.studies.characterize.digits import SCRIPT

    model = first.curves[0].settings["model"]
    target = f"{SCRIPT}:{model}_step"
    common = ("plan", target, "--json", "--compute", "rates", "--threads", 1, "--machine", machine)
    accepted = 0
    for point in second.curves[0].points:
        before = json.loads(paceline(*common, "-n", point.ranks))
        after = json.loads(paceline(*common, "-n", point.ranks, "--from", folder))
        accepted += before["step_time_s"] != after["step_time_s"]
        report.row(
            part="planner", ranks=point.ranks, measured_s=point.step_s,
            before_s=before["step_time_s"], after_s=after["step_time_s"],
            error_before=before["step_time_s"] / point.step_s - 1,
            error_after=after["step_time_s"] / point.step_s - 1,
        )  # fmt: skip
    report.bar("plans that the profile corrects", accepted, len(second.curves[0].points),
               at_least=True)  # fmt: skip


def feed_scheduler(report, folder, profile):
    """Simulate jobs of each curve, and compare their times with the profile's throughput."""
    jobs = folder / "jobs.csv"
    expected = {}
    with jobs.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "submitted_s", "devices", "profile", "work"])
        work = profile.samples * profile.epochs
        for curve in profile.curves:
            for point in curve.points:
                name = f"{curve.name}-on-{point.ranks}"
                expected[name] = work / point.throughput.value
                writer.writerow([name, 0, point.ranks, curve.name, work])
    devices = sum(point.ranks for curve in profile.curves for point in curve.points)
    # One node, on which all of them run at once: none waits, so that a job takes work / rate.
    text = paceline("queue", "simulate", jobs, "--rates", folder, "--json", "--policy", "fifo",
                    "--cluster", f"1x{devices}")  # fmt: skip
    found = json.loads(text)["policies"][0]
    mean = sum(expected.values()) / len(expected)
    error = max(
        abs(found["makespan_s"] / max(expected.values()) - 1), abs(found["jct_mean_s"] / mean - 1)
    )
    report.row(part="scheduler", jobs=len(expected), makespan_s=found["makespan_s"],
               jct_mean_s=found["jct_mean_s"], expected_mean_s=mean, error=error)  # fmt: skip
    report.bar("simulated times of jobs against the profile, relative", error, 1e-6)


def predicted(report, folder, machine):
    """Return how the predicted throughput on a machine changes with batch, place and devices."""
    from paceline.core.scaling_profile import ScalingProfile

    text = paceline(
        "characterize", "--predict", "--json", "--machine", machine, "--model", MODEL,
        *("--out", folder / machine, "--batch", ",".join(map(str, BATCHES))),
        *("--ranks", ",".join(map(str, RANKS))),
    )  # fmt: skip
    profile = ScalingProfile.from_text(text)
    by_batch = {int(curve.settings["batch"]): curve for curve in profile.curves}
    rates = {batch: curve.point(NODE).throughput.value for batch, curve in by_batch.items()}
    base = by_batch[BATCHES[0]]
    found = {
        "batch": rates[LARGER_BATCH] / rates[BATCHES[0]] - 1,
        "place": base.point(NODE).spread - 1,
        "efficiency": base.points[-1].efficiency,
    }
    report.row(
        part="predicted", machine=machine, **found,
        throughput={str(batch): rate for batch, rate in sorted(rates.items())},
        place_by_batch={str(batch): by_batch[batch].point(NODE).spread for batch in sorted(rates)},
        efficiency_by_batch={str(b): by_batch[b].points[-1].efficiency for b in sorted(rates)},
    )  # fmt: skip
    return found


def bars_of_the_study(report, folder):
    """Set the published finding beside predictions of two machines."""
    fast, slow = (predicted(report, folder, machine) for machine in (FAST, SLOW))
    for machine in OTHERS:
        predicted(report, folder, machine)
    batch = f"batch {LARGER_BATCH} in place of {BATCHES[0]}, change of the throughput"
    place = f"{NODE} devices on as many nodes, change of the throughput"
    report.bar(f"{FAST}: {batch}", abs(fast["batch"]), LITTLE)
    report.bar(f"{FAST}: {place}", abs(fast["place"]), LITTLE)
    report.bar(f"{SLOW}: {batch}", abs(slow["batch"]), MUCH, at_least=True)
    report.bar(f"{SLOW}: {place}", abs(slow["place"]), MUCH, at_least=True)
    for machine, found in ((FAST, fast), (SLOW, slow)):
        report.bar(f"{machine}: efficiency of {RANKS[-1]} devices", found["efficiency"], 0.95)


def main():
    asked = options(__doc__)
    report = Report("characterize", asked.json)
    from paceline.core.machine_file import machine_path

    with tempfile.TemporaryDirectory(prefix="characterize-") as name:
        folder = Path(name)
        bars_of_the_study(report, folder)
        machine = machine_path() if machine_path().exists() else None
        if machine is None and not asked.quick:
            machine = folder / "machine.json"
            tell("probe")
            paceline("probe", "--quick", "--out", machine)
        first, second = (
            swept(folder / sweep, machine, quick=asked.quick) for sweep in ("first", "second")
        )
        compare(report, first, second)
        feed_scheduler(report, folder / "first", first)
        if machine is not None:
            feed_planner(report, folder / "first", first, second, machine)
        else:
            tell("planner: not measured, as this host was not probed")
    sys.exit(report.print())


if __name__ == "__main__":
    main()
