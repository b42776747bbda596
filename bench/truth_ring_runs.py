"""Starts the ring programs of `truth_ring.py`: by mpirun, and as ranks on torch/gloo."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path

import truth_ranks
import truth_ring_ranks
from truth_ring import BUSY_S

DEADLINE_S = 60.0
HERE = Path(__file__).parent


class RingStage:
    """Starts the programs of cases, and their helpers; how, a subclass says."""

    def __init__(self, slow_files):
        self.helpers = multiprocessing.get_context("fork")
        self.cores = sorted(os.sched_getaffinity(0))
        self.slow_files = slow_files
        self.unit_s = truth_ring_ranks.unit_s()

    def run(self, case, folder):
        """Run a case; leave its traces, and what its ranks noted, in `folder`.

        Raises:
            RuntimeError: a rank failed, or did not end.
        """
        (folder / "trace").mkdir(parents=True)
        # Not in `folder`: as by `paceline run`, calls for files of the run itself do not count.
        with tempfile.TemporaryDirectory(prefix="paceline-truth-files-") as files:
            (Path(files) / "batch").write_bytes(bytes(truth_ring_ranks.BATCH_BYTES))
            plan = self._plan(case, folder, files)
            (folder / "plan.json").write_text(json.dumps(plan))
            helper = self._helper(case, plan)
            try:
                self._start(case, folder, plan)
            finally:
                if helper is not None:
                    helper.kill()
                    helper.join()

    def _plan(self, case, folder, files):
        return {
            "folder": str(folder),
            "files": files,
            "slow_files": str(self.slow_files),
            "steps": case.steps,
            "culprit": case.culprit,
            "pattern": case.pattern,
            "blocking": case.blocking,
            "marks": case.marks,
            "unit_s": self.unit_s,
            "units": round(BUSY_S / self.unit_s),
            "device_s": max(0.0, case.base_s - BUSY_S),
            "seconds": case.seconds().tolist(),
            "cores": [sorted(self._cores(case, rank)) for rank in range(case.ranks)],
            "helper": str(Path(files) / "helper"),
        }

    def _cores(self, case, rank):
        """Return a rank's cores: one each if there are enough."""
        return {self.cores[rank]} if case.ranks <= len(self.cores) else set(self.cores)

    def _helper(self, case, plan):
        if case.pattern not in ("stopped", "hog"):
            return None
        ready, started = self.helpers.Pipe(duplex=False)
        cores = plan["cores"][case.culprit]
        arguments = (plan["helper"], case.pattern, cores, started)
        process = self.helpers.Process(target=serve_helper, args=arguments, daemon=True)
        process.start()
        ready.recv_bytes()
        return process

    def _start(self, case, folder, plan):
        """Start the ranks, and wait for their end."""
        raise NotImplementedError


class MpiStage(RingStage):
    """Starts each program by mpirun, recorded as by `paceline run --mpi`."""

    def _start(self, case, folder, plan):
        from paceline.launch.file_calls import file_call_variables
        from paceline.launch.mpi import ProgramMpi

        environ = {**os.environ, "LD_PRELOAD": str(self.slow_files), "OMP_NUM_THREADS": "1"}
        environ |= ProgramMpi(interface="mpich").variables(folder, environ)
        environ |= file_call_variables(folder, environ)
        mpirun = Path(sys.executable).parent / "mpirun"
        script = HERE / "truth_ring_ranks.py"
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


class GlooStage(RingStage):
    """Forks the ranks of each program from a server that has torch imported (`truth_server.py`)."""

    def __init__(self, slow_files, server):
        super().__init__(slow_files)
        self.server = server

    def _start(self, case, folder, plan):
        ranks = [
            self.server.Process(target=truth_ring_ranks.run_on_gloo, args=(plan, rank), daemon=True)
            for rank in range(case.ranks)
        ]
        truth_ranks.run_to_the_end(f"gloo case {case.number}", ranks)


def serve_helper(address, pattern, cores, started):
    """Be the process that stops the culprit, or takes its core, when the culprit asks for it."""
    with Listener(address, "AF_UNIX") as listener:
        started.send_bytes(b"ready")
        with listener.accept() as channel:
            if pattern == "stopped":
                truth_ranks.stop_on_demand(channel)
            else:
                truth_ranks.compute_on_demand(channel, set(cores), real_time=True)
