"""The memory of this process: its peaks between two moments, and giving it back when it is freed.

Counted is what a control group cannot reclaim: resident memory without the pages of files. The
kernel keeps the most that was resident since a mark (VmHWM), so that peaks between two moments
cost two short system calls, and need no thread that samples.

glibc keeps freed memory for itself: after a step of large tensors the process stays as large as it
ever was, and is killed although most of its memory is free. Mapping each large block from the
system instead costs a page fault for every 4 KiB that a step touches (a transformer's step took 1.4
times as long). So torch's tensors come from a pool of our own (`native/include/paceline/
tensor_pool.hpp`), which keeps freed pages for the next tensors, of whatever size, up to a cap: none
while steps are recorded, so that memory is what is in use, to the page; under a plan all that the
budget leaves.
"""

from __future__ import annotations

import ctypes
import os
import resource
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from paceline.core.errors import Missing, reason
from paceline.native import redirect_allocations, use_pool

if TYPE_CHECKING:
    from collections.abc import Callable

_END_THRESHOLD_BYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8  # malloc.h
_TORCH_LIBRARY = "libc10.so"  # has torch's allocator for the CPU
THRESHOLD_BYTES = 1 << 18
_MOST_MAPPINGS = 1 << 15  # half of what the kernel allows a process (vm.max_map_count)
_FAULT_PROBES, _FAULT_PROBE_BYTES = 5, 4 << 20
_RESET_PEAK = b"5"  # proc_pid_clear_refs(5)


class Memory(Protocol):
    """Memory that a budget is for."""

    def start(self) -> None:
        """Begin to watch for a peak."""

    def settle(self) -> None:
        """Wait until what was asked for is done: an interval that is timed ends."""

    def peak_bytes(self) -> int:
        """Return the most memory since `start`."""

    def now_bytes(self) -> int:
        """Return the memory at this moment."""

    def close(self) -> None:
        """End."""


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

    def settle(self) -> None:
        """Do nothing: a CPU's operators are done when they return."""

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


def page_faults() -> int:
    """Return how many pages this process has taken from the system so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class PoolCounts(NamedTuple):
    """Bytes of the pool of tensors; see `native/include/paceline/tensor_pool.hpp`."""

    used_bytes: int
    resident_bytes: int
    cap_bytes: int
    fresh_bytes: int
    evicted_bytes: int
    peak_used_bytes: int


class Allocator:
    """Where tensors get their memory, and when freed memory goes back to the system.

    Overrides what the environment says (``MALLOC_MMAP_THRESHOLD_`` and others) for what is not
    pooled. Where torch's allocations cannot be redirected (`is_pooled`), every large block goes
    back when it is freed, which is right, and slow.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        self._mallopt: Any = getattr(library, "mallopt", _nothing)
        self._trim: Any = getattr(library, "malloc_trim", _nothing)
        self._pool = redirect_allocations(_TORCH_LIBRARY)
        # The most that the process had beside the pool, in this step and in the one before.
        self._others_bytes = self._others_before_bytes = 0
        # Of the recorded step: the most that it had at events, and at any time; and the difference.
        self._at_events_bytes = self._between_bytes = self._passing_bytes = 0

    @property
    def is_pooled(self) -> bool:
        """Whether tensors come from the pool."""
        return self._pool is not None

    def begin(self) -> None:
        """Have tensors come from the pool, which keeps nothing, and give back what is free."""
        self._mallopt(_M_ARENA_MAX, 1)  # what threads free can be trimmed as well
        self._mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
        self._mallopt(_M_MMAP_THRESHOLD, THRESHOLD_BYTES)
        self._mallopt(_M_TRIM_THRESHOLD, THRESHOLD_BYTES)
        self._trim(0)
        self.keep_nothing()
        use_pool(is_used=True)

    def end(self) -> None:
        """Have new tensors come from the C library again."""
        use_pool(is_used=False)
        self.keep_nothing()
        # To what glibc's own rule comes to in a process with large tensors (mallopt(3)).
        self._mallopt(_M_MMAP_THRESHOLD, _END_THRESHOLD_BYTES)
        self._mallopt(_M_TRIM_THRESHOLD, 2 * _END_THRESHOLD_BYTES)

    def keep_nothing(self) -> None:
        """Give every large block back when it is freed."""
        self._others_bytes = self._others_before_bytes = 0
        self._at_events_bytes = self._between_bytes = self._passing_bytes = 0
        if self._pool is not None:
            self._pool.set_cap(0)

    def begin_interval(self, now_bytes: Callable[[], int]) -> None:
        """Begin an interval that is recorded: the pool keeps nothing meanwhile."""
        if self._pool is not None:
            self._pool.restart_peak()
            others = now_bytes() - self.counts().resident_bytes
            self._at_events_bytes = max(self._at_events_bytes, others)

    def end_interval(self, peak_bytes: Callable[[], int]) -> None:
        """Note the most that the process had beside the pool in a recorded interval.

        An operator's own workspace is gone at the next event, where `keep_within` looks. A block
        without pages makes it look smaller, as there: the most of all intervals counts.
        """
        if self._pool is not None:
            others = peak_bytes() - self.counts().peak_used_bytes
            self._between_bytes = max(self._between_bytes, others)

    def end_step(self) -> int:
        """Return the most bytes that were in use in the step; 0 where that is not known.

        Freed memory that is kept for the next tensors is not in use. What others of the process had
        counts for this step and the next one: they may have freed it by then.
        """
        others = max(self._others_bytes, self._others_before_bytes)
        self._others_before_bytes, self._others_bytes = self._others_bytes, 0
        if self._between_bytes:  # it was recorded
            self._passing_bytes = max(self._between_bytes - self._at_events_bytes, 0)
            self._at_events_bytes = self._between_bytes = 0
        if self._pool is None:
            return 0
        peak = self.counts().peak_used_bytes
        self._pool.restart_peak()
        return others + peak

    def keep_within(self, budget_bytes: int, now_bytes: Callable[[], int]) -> None:
        """Keep freed memory for the next tensors while the process stays below its budget.

        Args:
            budget_bytes: of the process.
            now_bytes: returns the memory of the process at this moment.
        """
        if self._pool is None:
            return
        counts = self.counts()
        # A block that nobody has touched yet has no pages: the rest looks smaller for a while. So
        # the most of some time counts, which a whole step is in.
        self._others_bytes = max(self._others_bytes, now_bytes() - counts.resident_bytes)
        others = max(self._others_bytes, self._others_before_bytes) + self._passing_bytes
        cap = max(budget_bytes - others, 0)
        if cap != counts.cap_bytes:
            self._pool.set_cap(cap)

    def page_fault_s(self) -> float:
        """Return the processor time of a page that comes from the system, as measured now.

        Of blocks that are filled when their pages are new, and filled again; the median of some.
        """
        found = []
        for _ in range(_FAULT_PROBES):
            block = torch.empty(_FAULT_PROBE_BYTES, dtype=torch.uint8)
            begin, faults = time.thread_time(), page_faults()
            _fill(block)
            middle, faults = time.thread_time(), page_faults() - faults
            _fill(block)
            if faults:
                found.append((2 * middle - begin - time.thread_time()) / faults)
        return max(statistics.median(found), 0.0) if found else 0.0

    def counts(self) -> PoolCounts:
        """Return what the pool has and has done."""
        return PoolCounts(*self._pool.counts()) if self._pool is not None else PoolCounts(*[0] * 6)


def _fill(block: torch.Tensor) -> None:
    ctypes.memset(block.data_ptr(), 1, block.numel())  # in this thread alone


def _nothing(*_: object) -> int:
    return 0
