"""A rank that Slurm or mpirun has started: it meets the others and runs its own worker.

Ranks find each other through the run's folder, which all nodes of a job share anyway: rank 0
writes where it listens, the others read it.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import threading
from typing import TYPE_CHECKING

from paceline.core.config import environment
from paceline.core.errors import DeadlineExceeded, UsageError
from paceline.core.files import commit_text
from paceline.launch.processes import Exit
from paceline.trace.files import read_status, trace_name

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.clock import Clock
    from paceline.launch.allocation import Allocation

_MEET_S = 60.0  # tasks of one step start, and end, within this of each other


def start_task(
    allocation: Allocation, command: list[str], run: Path, clock: Clock
) -> tuple[Exit, ...]:
    """Run this task's rank to its end; return its exit unless it ended well."""
    address, port = _meet(allocation, run, clock)
    environ = {
        **environment(),
        "RANK": str(allocation.rank),
        "WORLD_SIZE": str(allocation.world_size),
        "LOCAL_RANK": str(allocation.local_rank),
        "LOCAL_WORLD_SIZE": str(allocation.local_world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }
    child = subprocess.Popen(command, env=environ)
    try:
        code = child.wait()  # the task's own time limit is the launcher's
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(2.0)
        except subprocess.TimeoutExpired:
            child.kill()
        return (Exit(rank=-1, code=130, signal="SIGINT"),)
    if code == 0:
        return ()
    name = signal.Signals(-code).name if code < 0 else ""
    return (Exit(rank=allocation.rank, code=code, signal=name),)


def _meet(allocation: Allocation, run: Path, clock: Clock) -> tuple[str, int]:
    """Return where ranks find rank 0: it tells the others through the run's folder."""
    path = run / "meeting.json"
    if allocation.rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        address = _address(allocation)
        commit_text(path, json.dumps({"address": address, "port": port}))
        return address, port
    await_path(path, clock)
    where = json.loads(path.read_text(encoding="utf-8"))
    return where["address"], where["port"]


def _address(allocation: Allocation) -> str:
    """Return a name of this host under which the other ranks can reach it."""
    if allocation.local_world_size == allocation.world_size:
        return "127.0.0.1"
    names = [allocation.first_host, socket.gethostname(), socket.getfqdn()]
    for name in filter(None, names):
        try:
            socket.getaddrinfo(name, None)
        except OSError:  # a node's name in Slurm need not be a host's name
            continue
        return name
    raise UsageError(
        "this host has no name that resolves",
        where=f"rank {allocation.rank}",
        why=f"tried {', '.join(filter(None, names))}",
        fix="Give the host a name in DNS or /etc/hosts",
    )


def await_path(path: Path, clock: Clock) -> None:
    """Wait until rank 0 has made `path`.

    Raises:
        DeadlineExceeded: it did not within a minute.
    """
    deadline_s = clock.now_s() + _MEET_S
    never = threading.Event()
    while not path.exists():
        if clock.now_s() > deadline_s:
            raise DeadlineExceeded(
                "rank 0 did not come",
                where=str(path),
                why=f"its file did not appear within {_MEET_S:.0f} s",
                fix="See rank 0's output; the folder must be on a file system that all nodes share",
            )
        clock.wait(never, 0.05)


def await_traces(run: Path, ranks: int, clock: Clock) -> None:
    """Wait until the other tasks have closed their traces; they end with us or shortly after."""
    deadline_s = clock.now_s() + _MEET_S
    never = threading.Event()
    paths = [run / "trace" / trace_name(rank) for rank in range(ranks)]
    while clock.now_s() < deadline_s:
        if all(path.exists() and read_status(path).closed for path in paths):
            return
        clock.wait(never, 0.05)
