"""The cases of `truth.py` on MPI: mpi4py programs with one planted pattern each, and clean ones.

    late sender   a rank computes 20 ms longer before it sends
    imbalance     a rank computes longer before the all-reduce
    slow loader   opening the file of a batch takes a rank longer
    slow disk     reading it takes a rank longer
    hog           another process computes on a rank's core
    stopped       a rank is stopped and continued (SIGSTOP)
    checkpoint    every few steps a rank writes a file

The step grows by 20 to 100 %, for all of the run or for the middle of it; beside a hog, which
shares the core, by what the kernel makes of it: there ranks compute for 80 % of a step. Half of the
programs send and receive by calls that block, half by requests and MPI_Waitall; half mark their
steps by MPI_Pcontrol. Each is started by mpirun and recorded as by `paceline run --mpi`.

From the times that the ranks note by themselves follows how long each waited in its calls: by MPI's
rules, and by what the guide of wait states says of a send that is over before its receiver comes.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from multiprocessing.connection import Listener
from pathlib import Path

import numpy as np
import truth_mpi_ranks
import truth_ranks

PATTERNS = {  # and the cause that the analysis should name
    "late sender": "compute",
    "imbalance": "compute",
    "slow loader": "data",
    "slow disk": "data",
    "hog": "not_running",
    "stopped": "stopped",
    "checkpoint": "checkpoint",
}
STATES = {"late sender": "late sender", "imbalance": "wait at NxN"}
STEPS, STEPS_OF_LATE_SENDER = 120, 60
BASE_S, BUSY_S, BUSY_BESIDE_HOG_S = 0.010, 0.003, 0.008
LATE_SENDER_S = 0.020
PERIODS = (3, 4, 5)  # of checkpoints
LEAST_WAITING_S = 0.05  # of a case, for its error to say something
DEADLINE_S = 60.0
HERE = Path(__file__).parent


@dataclass(frozen=True)
class MpiCase:
    """One run: which rank is slowed, by which pattern, and how the program communicates."""

    number: int
    seed: int
    ranks: int
    blocking: bool
    marks: bool
    culprit: int | None = None
    pattern: str = ""
    window: bool = False
    slow: float = 0.0
    period: int = 1
    framework: str = "mpi"

    @property
    def steps(self):
        return STEPS_OF_LATE_SENDER if self.pattern == "late sender" else STEPS

    @property
    def base_s(self):
        """Seconds of a step that nobody slows."""
        return LATE_SENDER_S / self.slow if self.pattern == "late sender" else BASE_S

    @property
    def busy_s(self):
        """Seconds of a step in which a rank computes."""
        return BUSY_BESIDE_HOG_S if self.pattern == "hog" else BUSY_S

    def seconds(self):
        """Return the seconds by which each step of the culprit is slowed."""
        extra = np.full(self.steps, self.slow * self.base_s * self.period)
        extra[np.arange(self.steps) % self.period != self.period - 1] = 0
        if self.window:
            extra[: self.steps // 4] = extra[-self.steps // 4 :] = 0
        return extra


def make_mpi_cases(seed, culprits, clean):
    """Return the cases of a seed: each pattern in turn, then clean runs."""
    random = np.random.default_rng([seed, 2])
    cores = len(os.sched_getaffinity(0))
    cases = []
    for number in range(culprits + clean):
        case = {
            "number": number,
            "seed": seed,
            "ranks": 2 + (number // 2 % 2 if cores > 2 else 0),
            "blocking": bool(number // len(PATTERNS) % 2),
            "marks": bool(number // (2 * len(PATTERNS)) % 2),
        }
        if number < culprits:
            pattern = list(PATTERNS)[number % len(PATTERNS)]
            case |= {
                "culprit": int(random.integers(case["ranks"])),
                "pattern": pattern,
                "window": bool(random.integers(2)) and pattern != "checkpoint",
                "slow": float(random.uniform(0.2, 1.0)),
                "period": int(random.choice(PERIODS)) if pattern == "checkpoint" else 1,
            }
        cases.append(MpiCase(**case))
    return cases


# --- a run ----------------------------------------------------------------------------------------


class MpiStage:
    """Starts the programs of cases, and their helpers."""

    def __init__(self, folder):
        self.context = multiprocessing.get_context("fork")
        self.cores = sorted(os.sched_getaffinity(0))
        self.slow_files = Path(folder) / "slow_files.so"
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise RuntimeError("there is no C compiler for the library that slows files down")
        source = HERE / "slow_files.c"
        command = [compiler, "-O2", "-shared", "-fPIC", source, "-o", self.slow_files, "-ldl"]
        subprocess.run(command, check=True, timeout=DEADLINE_S)
        self.unit_s = truth_mpi_ranks.unit_s()

    def run(self, case, folder):
        """Run a case; leave its traces, and what its ranks noted, in `folder`.

        Raises:
            RuntimeError: a rank failed, or did not end.
        """
        (folder / "trace").mkdir(parents=True)
        (folder / "batch").write_bytes(bytes(truth_mpi_ranks.BATCH_BYTES))
        plan = {
            "folder": str(folder),
            "slow_files": str(self.slow_files),
            "steps": case.steps,
            "culprit": case.culprit,
            "pattern": case.pattern,
            "blocking": case.blocking,
            "marks": case.marks,
            "unit_s": self.unit_s,
            "units": round(case.busy_s / self.unit_s),
            "device_s": max(0.0, case.base_s - case.busy_s),
            "seconds": case.seconds().tolist(),
            "cores": [sorted(self._cores(case, rank)) for rank in range(case.ranks)],
            "helper": str(folder / "helper"),
        }
        (folder / "plan.json").write_text(json.dumps(plan))
        helper = self._helper(case, plan)
        try:
            self._mpirun(case, folder)
        finally:
            if helper is not None:
                helper.kill()
                helper.join()

    def _cores(self, case, rank):
        """Return a rank's cores: one each if there are enough."""
        return {self.cores[rank]} if case.ranks <= len(self.cores) else set(self.cores)

    def _helper(self, case, plan):
        if case.pattern not in ("stopped", "hog"):
            return None
        ready, started = self.context.Pipe(duplex=False)
        cores = plan["cores"][case.culprit]
        arguments = (plan["helper"], case.pattern, cores, started)
        process = self.context.Process(target=serve_helper, args=arguments, daemon=True)
        process.start()
        ready.recv_bytes()
        return process

    def _mpirun(self, case, folder):
        from paceline.launch.file_calls import file_call_variables
        from paceline.launch.mpi import ProgramMpi

        environ = {**os.environ, "LD_PRELOAD": str(self.slow_files), "OMP_NUM_THREADS": "1"}
        environ |= ProgramMpi(interface="mpich").variables(folder, environ)
        environ |= file_call_variables(folder / "trace", environ)
        mpirun = Path(sys.executable).parent / "mpirun"
        script = HERE / "truth_mpi_ranks.py"
        command = [mpirun, "-n", str(case.ranks), sys.executable, script, folder / "plan.json"]
        with (folder / "output").open("w") as output:
            job = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = job.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                code = "no end"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        if code:
            tail = (folder / "output").read_text()[-2000:]
            raise RuntimeError(f"MPI case {case.number}: mpirun ended with {code}: {tail}")


def serve_helper(address, pattern, cores, started):
    """Be the process that stops the culprit, or takes its core, when the culprit asks for it."""
    with Listener(address, "AF_UNIX") as listener:
        started.send_bytes(b"ready")
        with listener.accept() as channel:
            if pattern == "stopped":
                truth_ranks.stop_on_demand(channel)
            else:
                compute_beside(channel, set(cores))


def compute_beside(channel, cores):
    """Compute on the cores of a rank while its last message was above 0."""
    os.sched_setaffinity(0, cores)
    channel.recv_bytes()  # the rank's process id
    with contextlib.suppress(EOFError):
        while True:
            (seconds,) = truth_ranks.CHANNEL.unpack(channel.recv_bytes())
            while seconds > 0 and not channel.poll():
                truth_mpi_ranks.work(10)


# --- the judgement --------------------------------------------------------------------------------


def judge_mpi(case, folder):
    """Return what the analysis of a case's traces found beside what was planted, as a row."""
    from paceline.trace.analysis import analyse
    from paceline.trace.efficiency import measure_efficiency
    from paceline.trace.merge import load_run

    analysis = analyse(load_run(folder))
    stragglers = analysis.stragglers
    found = [late.to_json() for late in stragglers]
    row = {**asdict(case), "steps": analysis.steps, "rule": analysis.step_rule, "found": found}
    row["bytes_right"] = bytes_by_pair(analysis) == expected_bytes(case)
    row["waiting_error"] = waiting_error(case, folder, analysis)
    if case.culprit is None:
        no_accusation = {"slow_core", "not_running"}  # other programs, as in truth.py
        row["accused"] = any(late.cause not in no_accusation for late in stragglers)
        return row
    main = stragglers[0] if stragglers else None
    row["rank_right"] = main is not None and main.rank == case.culprit
    row["cause_right"] = row["rank_right"] and main.cause == PATTERNS[case.pattern]
    if case.pattern in STATES:
        waits = measure_efficiency(analysis).waits
        caused = waits.delays[0].rank if waits.delays else None
        state = waits.calls[0].state if waits.calls else ""
        row["state_right"] = caused == case.culprit and state == STATES[case.pattern]
    return row


def bytes_by_pair(analysis):
    """Return the bytes of messages by (source, destination), as they were recorded."""
    pairs = Counter()
    matches = analysis.matches
    for message in matches.messages[matches.messages["sends"]]:
        source = int(matches.ranks[message["trace"]])
        pairs[source, int(message["peer"])] += int(message["amount"])
    return dict(pairs)


def expected_bytes(case):
    return {
        (rank, (rank + 1) % case.ranks): truth_mpi_ranks.message_bytes(rank) * case.steps
        for rank in range(case.ranks)
    }


def waiting_error(case, folder, analysis):
    """Return by how much the waiting of all ranks is off, as a share; None if there is little."""
    true_s = true_waiting_s(case, folder)
    if true_s < LEAST_WAITING_S:
        return None
    found_s = sum(float((own["ready_ns"] - own["begin_ns"]).sum()) for own in analysis.waits) / 1e9
    return found_s / true_s - 1


def true_waiting_s(case, folder):
    """Return the seconds that ranks waited for others, from the times that they noted."""
    noted = [json.loads((folder / f"calls-{rank}.json").read_text()) for rank in range(case.ranks)]
    calls = [
        {name: np.array([row[1:] for row in own if row[0] == name]) for name in {r[0] for r in own}}
        for own in noted
    ]
    waited_ns = 0
    for name in ("barrier", "all_reduce"):
        entered = np.array([own[name][:, 0] for own in calls])
        waited_ns += (entered.max(axis=0) - entered).sum()
    for rank, own in enumerate(calls):
        previous, following = calls[rank - 1], calls[(rank + 1) % case.ranks]
        if case.blocking:
            waited_ns += _until(own["recv"], previous["send"][:, 0]).sum()
            waited_ns += _until(own["send"], following["recv"][:, 0], if_within=True).sum()
        else:
            sent = _until(own["wait_all"], previous["isend"][:, 0])
            taken = _until(own["wait_all"], following["irecv"][:, 0], if_within=True)
            waited_ns += np.maximum(sent, taken).sum()
    return float(waited_ns) / 1e9


def _until(calls, others_ns, *, if_within=False):
    """Return how long each call waited for the other side; of sends only if that came within."""
    waited = np.clip(others_ns - calls[:, 0], 0, calls[:, 1] - calls[:, 0])
    return np.where(others_ns <= calls[:, 1], waited, 0) if if_within else waited
