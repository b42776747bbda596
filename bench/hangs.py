"""Does a run that hangs name the rank for which the others wait? And is a slow one left alone?

    python bench/hangs.py --json [--quick]

Each planted run has a fault of one rank, drawn with its rank and step from a seed: it skips a
collective, leaves without a word, is stopped (SIGSTOP), dead-locks on a lock, reads a FIFO that
nobody writes, calls a collective that the others do not, or waits for a message that nobody sends
(MPI). The programs (hangs_programs) are DistributedDataParallel and plain torch.distributed on
gloo and on Paceline's backend, mpi4py, and C. Right is the rank in result.json; its stack must be
in hang.json, unless it has ended. Seconds count from the fault to the verdict.

Slow runs have a rank that for several deadlines writes a checkpoint, computes as a compiler does,
waits for many small samples, or for a child that works; or they share the cores with others: none
may be accused.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, options, tell

PROGRAMS = Path(__file__).parent / "hangs_programs"
BIN = Path(sys.executable).parent
DEADLINE_S = 4
SLACK_S = 5
RUN_S = 120
AT_FAULT = re.compile(r"FAULT ([0-9.]+)")
TORCH = ("lock", "fifo", "stop", "die", "skip", "order")
MPI = (*TORCH, "message")
PLANTED = [
    *(("training.py", backend, fault) for backend in ("gloo", "paceline") for fault in TORCH),
    *(("collectives.py", backend, fault) for backend in ("gloo", "paceline") for fault in TORCH),
    *((program, "mpi", fault) for program in ("mpi.py", "mpi.c") for fault in MPI),
]
SLOW = [
    *(("training.py", "gloo", f"slow-{what}-12") for what in ("checkpoint", "compile", "loader")),
    ("collectives.py", "paceline", "slow-checkpoint-12"),
    ("collectives.py", "gloo", "slow-child-12"),
    ("training.py", "paceline", "slow-compile-12"),
    ("mpi.py", "mpi", "slow-checkpoint-12"),
    ("mpi.py", "mpi", "slow-loader-12"),
    ("mpi.c", "mpi", "slow-compile-12"),
    ("training.py", "gloo", "busy-machine"),
]
QUICK = [("collectives.py", "gloo", "lock"), ("mpi.c", "mpi", "stop"), ("mpi.py", "mpi", "order")]


def command(program, backend, fault, culprit, at, folder):
    """Return the words that run a program, and what its ranks need to know."""
    words = [BIN / "paceline", "run", "--out", folder / "RUN", "--hang-timeout", str(DEADLINE_S)]
    place = (fault, str(culprit), str(at))
    if backend != "mpi":
        return [*words, "-n", "2", PROGRAMS / program, backend, *place]
    path = PROGRAMS / program
    if program.endswith(".c"):
        path = folder / "program"
        build = [BIN / "mpicc", "-O1", "-g", PROGRAMS / program, "-o", path, "-lpthread"]
        subprocess.run(build, check=True, timeout=RUN_S)
    return [*words, "-n", "3", "--mpi", "--", path, *place]


def outcome(case, culprit, at):
    """Run a case; return what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        busy = [
            subprocess.Popen([sys.executable, "-c", "while True: pass"])
            for _ in range(4 if case[2] == "busy-machine" else 0)
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": name}
        process = subprocess.Popen(
            command(*case, culprit, at, folder),
            env=environ,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            text, _ = process.communicate(timeout=30)
        finally:
            for hog in busy:
                hog.kill()
                hog.wait()
        return process.returncode, text, *read(folder / "RUN")


def read(run):
    """Return a run's failure, its hang, and when that was found."""
    failure, hang, at_s = None, None, 0.0
    if (run / "result.json").exists():
        failure = json.loads((run / "result.json").read_text())["failure"]
    if (run / "hang.json").exists():
        hang = json.loads((run / "hang.json").read_text())
        at_s = (run / "hang.json").stat().st_mtime
    if failure is not None and hang is None:  # Paceline's backend has raised by itself
        report = run / "trace" / f"rank-{failure['rank']:05}.failure"
        traceback = json.loads(report.read_text())["traceback"] if report.exists() else ""
        hang = {"rank": failure["rank"], "kind": "raised", "detail": failure["error"]}
        hang["ranks"] = [{"rank": failure["rank"], "stack": traceback.splitlines()}]
        at_s = report.stat().st_mtime if report.exists() else 0.0
    return failure, hang, at_s


def judge(report, case, culprit, at):
    """Run a planted case, and note whether its rank was named."""
    code, text, failure, hang, at_s = outcome(case, culprit, at)
    begun = AT_FAULT.search(text)
    stack = []
    if hang is not None:
        stack = next((rank["stack"] for rank in hang["ranks"] if rank["rank"] == hang["rank"]), [])
    seconds = at_s - float(begun[1]) if begun and at_s else 0.0
    report.row(
        program=case[0],
        backend=case[1],
        fault=case[2],
        culprit=culprit,
        exit_code=code,
        named=failure["rank"] if failure else None,
        kind=hang["kind"] if hang else "",
        rank_right=failure is not None and failure["rank"] == culprit,
        has_stack=bool(stack) or case[2] == "die",
        verdict_s=seconds,
        detail=hang["detail"] if hang else (failure or {}).get("error", text[-300:]),
    )


def main():
    flags = options(__doc__)
    report = Report("hangs", flags.json)
    rng = np.random.default_rng(0)
    planted, slow = QUICK, SLOW[6:7]
    if not flags.quick:
        planted = [PLANTED[i % len(PLANTED)] for i in range(50)]
        slow = SLOW * 2
    for number, case in enumerate(planted):
        ranks = 3 if case[1] == "mpi" else 2
        culprit, at = int(rng.integers(ranks)), int(rng.integers(3, 9))
        # In DDP with two ranks nothing but the order so far tells which of them is wrong.
        tell(f"{number + 1} of {len(planted)}: {' '.join(case)}, rank {culprit}, step {at}")
        judge(report, case, culprit, at)
    count = len(report.rows)
    right = sum(row["rank_right"] for row in report.rows)
    stacks = sum(row["has_stack"] for row in report.rows)
    longest = max(row["verdict_s"] for row in report.rows)
    alarms = 0
    for number, case in enumerate(slow):
        tell(f"slow {number + 1} of {len(slow)}: {' '.join(case)}")
        code, _, _, hang, _ = outcome(case, number % 2, 5)
        alarms += hang is not None
        report.row(program=case[0], backend=case[1], slow=case[2], exit_code=code, hang=hang)
    report.bar("planted hangs whose rank was named", right, count, at_least=True)
    report.bar("planted hangs with the rank's stack", stacks, count, at_least=True)
    report.bar("seconds to the verdict", longest, DEADLINE_S + SLACK_S)
    report.bar(f"alarms in {len(slow)} slow runs", alarms, 0)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
