"""A memory cgroup of version 1 below this process's own, for processes with a limit. Needs root."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_NUMBERS = itertools.count()


class MemoryCgroup:
    """A group with a limit; None: without one. It is removed at the end of the context."""

    def __init__(self, limit_bytes):
        own = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if "memory" in line.split(":")[1].split(",")
        )
        name = f"bench-{os.getpid()}-{next(_NUMBERS)}"
        self._folder = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / name
        self._folder.mkdir()
        if limit_bytes:
            (self._folder / "memory.limit_in_bytes").write_text(str(limit_bytes))

    def command(self, command):
        """Return the command that starts in the group."""
        return [
            "sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(self._folder / "cgroup.procs"),
            *command,
        ]

    def peak_bytes(self):
        """Return the most memory that the group had."""
        return int((self._folder / "memory.max_usage_in_bytes").read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for _attempt in range(100):  # a process that was killed leaves it some time later
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)
