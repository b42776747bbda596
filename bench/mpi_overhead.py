"""What does recording cost a call of MPI? A ping-pong of 1 KiB, recorded and not, in turn.

    python bench/mpi_overhead.py --json [--quick]

The program (mpi_pingpong.c) is built with the mpicc of each MPI that is here: the `mpich` wheel of
the environment, and Open MPI where OPENMPI_MPIRUN names its mpirun. Jobs with and without the
preloaded library take turns, in an order drawn for each pair; each job measures blocks of round
trips, and neighbouring jobs are a pair. The estimate is the median over pairs of the difference of
the jobs' medians, with its bootstrapped 95 % interval:

    ping-pong    by half a round trip: each rank makes two calls, a send and a receive. Part of what
                 a call costs is hidden while the message travels
    to itself    by a call, of messages of each rank to itself: nothing is hidden

The control pairs jobs of which neither is recorded. The ranks stay on cores of their own. What the
writer thread costs is in it where it shares a core with a rank, as with two ranks on two cores.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, median_interval, options, tell

from paceline.launch.mpi import mpi_of_command

BIN = Path(sys.executable).parent
SOURCE = Path(__file__).parent / "mpi_pingpong.c"
BAR_S = 0.5e-6
AS_ROOT = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for prefix in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
}
BIND = {"mpich": ["-bind-to", "core"], "openmpi": ["--bind-to", "core"]}
DEADLINE_S = 120


def job_s(command, mpi, folder, arguments, *, recorded):
    """Run one job; return its medians: seconds of half a round trip, and of a call to itself."""
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
    found = {"trip": [], "self": []}
    for line in done.stdout.splitlines():
        word, _, seconds = line.partition(" ")
        if word in found:
            found[word].append(float(seconds))
    events = sum(path.stat().st_size for path in (run / "trace").iterdir()) // 48
    if recorded and not events:
        sys.exit("nothing was recorded")
    return statistics.median(found["trip"]) / 2, statistics.median(found["self"]), events


def pairs_of(command, mpi, folder, arguments, count, rng, *, control):
    """Return the differences of `count` pairs of jobs, shape (pairs, 2), and plain times."""
    differences, plain = [], []
    for _ in range(count):
        order = rng.permutation([False, True])
        times = {
            bool(second): job_s(
                command, mpi, folder, arguments, recorded=bool(second) and not control
            )
            for second in order
        }
        differences.append([times[True][i] - times[False][i] for i in range(2)])
        plain.append(times[False][:2])
    return np.array(differences), np.array(plain)


def measure(report, family, bin_folder, folder, *, quick):
    program = Path(folder) / f"pingpong-{family}"
    build = [bin_folder / "mpicc", "-O2", SOURCE, "-o", program]
    subprocess.run(build, check=True, timeout=DEADLINE_S)
    mpi = mpi_of_command([str(program)], required=True)
    command = [str(bin_folder / "mpirun"), "-n", "2", *BIND[family], str(program)]
    arguments, count = ((20, 2000), 5) if quick else ((40, 5000), 15)
    rng = np.random.default_rng(0)
    added, plain = pairs_of(command, mpi, folder, arguments, count, rng, control=False)
    control, _ = pairs_of(command, mpi, folder, arguments, count, rng, control=True)
    for column, name in enumerate(("ping-pong", "to itself")):
        median, low, high = median_interval([[value] for value in added[:, column]])
        _, control_low, control_high = median_interval([[value] for value in control[:, column]])
        report.row(
            mpi=family,
            what=name,
            plain_call_us=1e6 * float(np.median(plain[:, column])),
            added_us=1e6 * median,
            low_us=1e6 * low,
            high_us=1e6 * high,
            control_low_us=1e6 * control_low,
            control_high_us=1e6 * control_high,
        )
        reason = ""
        if max(-control_low, control_high) > BAR_S:
            reason = "this machine cannot tell: nothing against nothing differs by more"
        report.bar(f"{family}, {name}: seconds added to a call", median, BAR_S, reason=reason)


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
