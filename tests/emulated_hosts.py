"""Runs the ranks of a job on emulated hosts: each host is a namespace of process ids.

Ranks of two namespaces cannot open each other's memory through /proc, as those of two hosts cannot.

    python tests/emulated_hosts.py FIRST_RANK HOST_RANKS RANKS COMMAND...    one host, from inside
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import forking
import pytest

_UNSHARE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
DEADLINE_S = 120


def require_namespaces():
    """Skip the test where namespaces cannot be made."""
    done = subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no namespaces of process ids here: they need root")


def run_on_hosts(host_ranks, command, *, env=None, cwd=None):
    """Run a command as the ranks of a job, `host_ranks` of them on each host.

    ``$RANK`` and ``$WORLD_SIZE`` in its words are replaced; they are variables of a rank too.

    Returns the exit code of each host (the largest of its ranks), and what all wrote to stdout and
    to stderr, by host.
    """
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
            subprocess.Popen(
                [*_UNSHARE, *own, *place, *map(str, command)],
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
        for process in started:  # unshare takes its namespace with it
            process.kill()
    return [process.returncode for process in started], *map(list, zip(*said, strict=True))


def _with_rank(command, rank, ranks):
    return [word.replace("$RANK", rank).replace("$WORLD_SIZE", ranks) for word in command]


def main(first, count, ranks, *command):
    start = subprocess.Popen
    if int(count) > 1:
        start = functools.partial(forking.Popen, modules=forking.TORCH)
    # Each rank has a file of its own: where PYTHONUNBUFFERED is set, a rank's line reaches a shared
    # pipe in two writes, and another rank's line may come between them.
    with contextlib.ExitStack() as files:
        started = [
            (
                written := files.enter_context(tempfile.TemporaryFile("w+")),
                start(
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
