"""The memory of this process: its peaks between two moments, and giving it back when it is freed.

Counted is what a control group cannot reclaim: resident memory without the pages of files. The
kernel keeps the most that was resident since a mark (VmHWM), so that peaks between two moments
cost two short system calls, and need no thread that samples.

glibc keeps freed memory for itself: after a step of large tensors the process stays as large as it
ever was, and is killed although most of its memory is free. `give_back_at_once` has it map each
large block from the system, so that memory is what is in use, to the page: steps are recorded so.
It costs a page fault for every 4 KiB that a step touches (a transformer's step took 1.4 times as
long). `give_back_on_trim` keeps freed memory for the next tensors, and `trim` gives back what is
free when the budget asks for it (malloc_trim(3) returns free pages inside the heap as well).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from paceline.core.errors import Missing, reason

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
THRESHOLD_BYTES = 1 << 18
_MOST_MAPPINGS = 1 << 15  # half of what the kernel allows a process (vm.max_map_count)
_NEVER = (1 << 31) - 1
_RESET_PEAK = b"5"  # proc_pid_clear_refs(5)


class ProcessMemory:
    """The resident memory of this process, shared memory too, without pages of files.

    Raises:
        Missing: the kernel does not let this process reset its peak.
    """

    def __init__(self) -> None:
        try:
            self._clear = os.open("/proc/self/clear_refs", os.O_WRONLY)
            self._status = os.open("/proc/self/status", os.O_RDONLY)
        except OSError as problem:
            raise Missing(
                "the peaks of this process's memory cannot be measured",
                where=problem.filename,
                why=reason(problem),
                fix="Train on Linux with a /proc that can be written to, or without a budget",
            ) from problem

    def start(self) -> None:
        """Begin to watch for a peak."""
        os.write(self._clear, _RESET_PEAK)

    def peak_bytes(self) -> int:
        """Return the most memory since `start`."""
        fields = self._fields()
        return fields[b"VmHWM"] - fields[b"RssFile"]

    def now_bytes(self) -> int:
        """Return the memory at this moment."""
        fields = self._fields()  # statm counts shared memory among the files
        return fields[b"RssAnon"] + fields[b"RssShmem"]

    def _fields(self) -> dict[bytes, int]:
        found = {}
        for line in os.pread(self._status, 8192, 0).split(b"\n"):
            name, _, value = line.partition(b":")
            if name in (b"VmHWM", b"RssFile", b"RssAnon", b"RssShmem"):
                found[name] = int(value.split()[0]) * 1024
        return found

    def close(self) -> None:
        """Close the files of /proc."""
        os.close(self._status)
        os.close(self._clear)


class Allocator:
    """The C library's allocator: when freed memory goes back to the system.

    Overrides what the environment says (``MALLOC_MMAP_THRESHOLD_`` and others). On another library
    than glibc nothing happens: musl gives large blocks back at once.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._mallopt: Any = getattr(library, "mallopt", _nothing)
        self._trim: Any = getattr(library, "malloc_trim", _nothing)
        self._mallopt(_M_ARENA_MAX, 1)  # what threads free can be trimmed as well

    def give_back_at_once(self) -> None:
        """Give every large block back when it is freed."""
        self._mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        self._mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES)
        self._mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES)
        self.trim()

    def give_back_on_trim(self) -> None:
        """Keep freed memory until `trim`."""
        self._mallopt(_M_MMAP_MAX, 0)
        self._mallopt(_M_TRIM_THRESHOLD, _NEVER)

    def trim(self) -> None:
        """Give all free pages back."""
        self._trim(0)


def _nothing(*_: object) -> int:
    return 0
