"""What does recording cost a call of MPI? A ping-pong of 1 KiB, recorded and not, in turn.

    python bench/mpi_overhead.py --json [--quick]

The program (mpi_pingpong.c) is built with the mpicc of each MPI that is here: the `mpich` wheel of
the environment, and Open MPI where OPENMPI_MPIRUN names its mpirun. Jobs with and without the
preloaded library take turns, in an order drawn for each pair; each job measures blocks of round
calls, and neighbouring jobs are a pair. The estimate is the median over pairs of the difference of
the jobs' medians, with its bootstrapped 95 % interval:

    ping-pong    wall time of half a round trip: each rank makes two calls, a send and a receive.
                 Part of what a call costs is hidden while the message travels
    to itself    CPU time of a call, of a rank that sends to itself: nothing is hidden, and what
                 else runs on the machine changes little

The control pairs jobs of which neither is recorded. The ranks stay on cores of their own. What the
writer thread costs is in it where it shares a core with a rank, as with two ranks on two cores.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, median_interval, options, tell

from paceline.launch.mpi import mpi_of_command
from paceline.launch.summary import trace_statuses

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parent / "mpi_pingpong.c"
BAR_S = 0.5e-6
AS_ROOT = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for prefix in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}
BIND = {"mpich": ["-bind-to", "core"], "openmpi": ["--bind-to", "core"]}
DEADLINE_S = 30


def job_s(command, mpi, folder, arguments, *, recorded):
    """Run one job; return the median over its blocks of the seconds of a call."""
    run = Path(tempfile.mkdtemp(dir=folder))
    (run / "trace").mkdir()
    environ = {**os.environ, **AS_ROOT, **(mpi.variables(run, os.environ) if recorded else {})}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}: {done.stderr}")
    if recorded:
        statuses = trace_statuses(run)
        counts = [status.recorded_count for status in statuses]
        if not counts or min(counts) < 2 * arguments[0] * arguments[1]:
            sys.exit(f"not all calls were recorded: {counts} events")
        if any(status.dropped_count for status in statuses):
            tell("  events were dropped, as the writer got no core in time")
    lines = [line.split() for line in done.stdout.splitlines()]
    calls = [float(words[1]) for words in lines if words and words[0] == "call"]
    shutil.rmtree(run)
    return statistics.median(calls)


def pairs_of(command, mpi, folder, arguments, count, rng, *, control):
    """Return the differences of `count` pairs of jobs, and the times of the unrecorded ones."""
    differences, plain = [], []
    for _ in range(count):
        times = {
            second: job_s(command, mpi, folder, arguments, recorded=second and not control)
            for second in rng.permutation([False, True]).tolist()
        }
        differences.append(times[True] - times[False])
        plain.append(times[False])
    return differences, plain


def measure(report, family, bin_folder, folder, *, quick):
    program = Path(folder) / f"pingpong-{family}"
    build = [bin_folder / "mpicc", "-O2", SOURCE, "-o", program]
    subprocess.run(build, check=True, timeout=DEADLINE_S)
    mpi = mpi_of_command([str(program)], required=True)
    arguments, count = ((20, 2000), 5) if quick else ((40, 5000), 15)
    rng = np.random.default_rng(0)
    for name, ranks in (("to itself", 1), ("ping-pong", 2)):
        mpirun = [str(bin_folder / "mpirun"), "-n", str(ranks), *BIND[family], str(program)]
        bar = f"{family}, {name}: seconds added to a call"
        try:
            added, plain = pairs_of(mpirun, mpi, folder, arguments, count, rng, control=False)
            control, _ = pairs_of(mpirun, mpi, folder, arguments, count, rng, control=True)
        except subprocess.TimeoutExpired:  # each message then waits for a core
            reason = f"a job took more than {DEADLINE_S} s: too much else runs here"
            report.bar(bar, None, BAR_S, reason=reason)
            continue
        median, low, high = median_interval([[value] for value in added])
        _, control_low, control_high = median_interval([[value] for value in control])
        report.row(
            mpi=family,
            what=name,
            plain_call_us=1e6 * statistics.median(plain),
            added_us=1e6 * median,
            low_us=1e6 * low,
            high_us=1e6 * high,
            control_low_us=1e6 * control_low,
            control_high_us=1e6 * control_high,
        )
        reason = ""
        if max(-control_low, control_high) > BAR_S:
            reason = "this machine cannot tell: nothing against nothing differs by more"
        report.bar(bar, median, BAR_S, reason=reason)


def main():
    flags = options(__doc__)
    report = Report("mpi_overhead", flags.json)
    families = {"mpich": BIN}
    if "OPENMPI_MPIRUN" in os.environ:
        families["openmpi"] = Path(os.environ["OPENMPI_MPIRUN"]).parent
    else:
        tell("Open MPI is left out: OPENMPI_MPIRUN does not name its mpirun")
    with tempfile.TemporaryDirectory() as folder:
        for family, bin_folder in families.items():
            measure(report, family, bin_folder, folder, quick=flags.quick)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
