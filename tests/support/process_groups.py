"""Starts the ranks of a process group for a test, as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support import forking

DEADLINE_S = 120
RANK_PROCESS = Path(__file__).parent / "rank_process.py"


def run_ranks(
    script: Path, folder: Path, ranks: int, *args, deadline_s: float = DEADLINE_S, env=None
):
    """Run `script STORE RANK RANKS ARGS...` on each rank; return what each printed as JSON.

    Raises:
        AssertionError: a rank failed, or hangs; the message has what all ranks printed.
    """
    command = [sys.executable, str(RANK_PROCESS), str(script), str(folder / "store")]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(env or {})}
    processes = [
        forking.Popen(
            [*command, str(rank), str(ranks), *map(str, args)],
            modules=forking.TORCH,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(ranks)
    ]
    said, hung = [], False
    for process in processes:
        try:
            said.append(process.communicate(timeout=deadline_s))
        except subprocess.TimeoutExpired:
            hung = True
            process.kill()
            said.append(process.communicate())
    codes = [process.returncode for process in processes]
    everything = "\n".join(f"rank {rank}: {out}\n{err}" for rank, (out, err) in enumerate(said))
    assert not hung, f"a rank hangs; {everything}"
    assert codes == [0] * ranks, f"exit codes {codes}; {everything}"
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def run_mpi_ranks(mpiexec: Path, script: Path, folder: Path, ranks: int, *args, options=()):
    """Run `script STORE mpi RANKS ARGS...` on each rank; return what each printed as JSON.

    Raises:
        AssertionError: a rank failed; the message has what the ranks printed.
    """
    command = [str(mpiexec), "-n", str(ranks), *options, sys.executable, str(script)]
    done = subprocess.run(
        [*command, str(folder / "store"), "mpi", str(ranks), *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return list(_objects_in(done.stdout))


def _objects_in(text: str):
    """Yield the JSON objects in a text: a launcher may join lines of several ranks."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        value, end = decoder.raw_decode(text, at)
        yield value
        at = text.find("{", end)


def lost_peer(folder: Path, ranks: int, how: str, deadline_s: float = DEADLINE_S):
    """Run conformance/scripts/lost_peer.py; return the error of the first rank that got one."""
    script = Path(__file__).parents[1] / "conformance/scripts/lost_peer.py"
    processes = [
        forking.Popen(
            [sys.executable, str(script), str(folder / "store"), str(rank), str(ranks), how],
            modules=forking.TORCH,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=deadline_s)[0] for process in processes]
    return [json.loads(out.splitlines()[-1]) for out in said if out][:1]
