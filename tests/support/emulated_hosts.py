"""Runs the ranks of a job on emulated hosts: each host is a namespace of process ids.

Ranks of two namespaces cannot open each other's memory through /proc, as those of two hosts cannot.

    python tests/support/emulated_hosts.py FIRST_RANK HOST_RANKS RANKS COMMAND...    one host
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.core.processes import die_with_parent

DEADLINE_S = 120
_NEW_MOUNTS, _NEW_PROCESS_IDS = 0x00020000, 0x20000000  # CLONE_NEWNS, CLONE_NEWPID
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18  # MS_REC, MS_PRIVATE


def require_namespaces():
    """Skip the test where namespaces cannot be made."""
    import pytest  # which a host does not need

    command = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no namespaces of process ids here: they need root")


def run_on_hosts(host_ranks, command, *, env=None, cwd=None):
    """Run a command as the ranks of a job, `host_ranks` of them on each host.

    ``$RANK`` and ``$WORLD_SIZE`` in its words are replaced; they are variables of a rank too.

    Returns the exit code of each host (the largest of its ranks), and what all wrote to stdout and
    to stderr, by host.
    """
    from support import forking  # a host, which is this file as a program, has no such package

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables, **(env or {})}
    own = [sys.executable, str(Path(__file__).resolve())]
    started = []
    for host, count in enumerate(host_ranks):
        place = map(str, (sum(host_ranks[:host]), count, sum(host_ranks)))
        started.append(
            forking.Popen(
                [*own, *place, *map(str, command)],
                modules=forking.TORCH,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
                cwd=cwd,
            )
        )
    try:
        said = [process.communicate(timeout=DEADLINE_S) for process in started]
    finally:
        for process in started:  # its namespace ends with it
            process.kill()
    return [process.returncode for process in started], *map(list, zip(*said, strict=True))


def _with_rank(command, rank, ranks):
    return [word.replace("$RANK", rank).replace("$WORLD_SIZE", ranks) for word in command]


def _become_a_host() -> None:
    """Go on as the first process of new namespaces, as ``unshare --pid --mount-proc`` has one."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function, *args):
        if getattr(libc, function)(*args) != 0:
            raise OSError(ctypes.get_errno(), f"{function} failed")

    call("unshare", _NEW_MOUNTS | _NEW_PROCESS_IDS)
    host = os.fork()
    if host:
        _, status = os.waitpid(host, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent(0)  # who is outside the namespace
    call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    call("mount", b"proc", b"/proc", b"proc", 0, None)


def main(first, count, ranks, *command):
    _become_a_host()
    # Each rank has a file of its own: where PYTHONUNBUFFERED is set, a rank's line reaches a shared
    # pipe in two writes, and another rank's line may come between them.
    with contextlib.ExitStack() as files:
        started = [
            (
                written := files.enter_context(tempfile.TemporaryFile("w+")),
                subprocess.Popen(  # a fork of this process
                    _with_rank(command, str(int(first) + local_rank), ranks),
                    stdout=written,
                    env={
                        **os.environ,
                        "RANK": str(int(first) + local_rank),
                        "WORLD_SIZE": ranks,
                        "LOCAL_RANK": str(local_rank),
                        "LOCAL_WORLD_SIZE": count,
                    },
                ),
            )
            for local_rank in range(int(count))
        ]
        code = max(process.wait() for _, process in started)
        for written, _ in started:
            written.seek(0)
            sys.stdout.write(written.read())
        return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
