"""How many cores other processes use while something is measured.

The kernel counts how long each core was busy with any process, and what this process and its
children used of that; the rest is foreign. Time that a hypervisor took (steal) is foreign as well,
and so are the kernel's own threads and interrupts: a few hundredths of a core on an idle node.

Source: proc_stat(5) for ``cpuN`` lines in units of 1/USER_HZ s, which is also the resolution: a
span of 0.2 s is known to about 0.1 cores.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.affinity import allowed_cores

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path("/")
# Fields of a cpuN line that count time in which the core worked; idle and iowait do not, and guest
# time is in user time already.
_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL = 0, 1, 2, 5, 6, 7
_BUSY = (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ, _STEAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuUse:
    """CPU time since some moment in the past, in seconds.

    Attributes:
        at_s: CLOCK_MONOTONIC.
        busy_s: of all processes on the cores that this process may use, and time stolen from them.
        own_s: of this process and its children.
    """

    at_s: float
    busy_s: float
    own_s: float

    def foreign_cores(self, begin: CpuUse, *, others_s: float = 0.0) -> float:
        """Return the cores that other processes used since `begin`, on average.

        Args:
            begin: an earlier use.
            others_s: CPU time of processes that belong to the measurement but not to this process.
        """
        span_s = self.at_s - begin.at_s
        own_s = self.own_s - begin.own_s + others_s
        return max(0.0, (self.busy_s - begin.busy_s - own_s) / max(span_s, 1e-9))


def cpu_use(*, root: Path = ROOT) -> CpuUse | None:
    """Return the CPU time until now; None where the kernel does not say, as on other systems.

    A child that runs still is counted as foreign: only one that has been waited for is known.
    """
    try:
        text = (root / "proc/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    busy_s = parse_busy_s(text, allowed_cores())
    if busy_s is None:
        return None
    own_s = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    return CpuUse(at_s=time.monotonic(), busy_s=busy_s, own_s=own_s)


def parse_busy_s(text: str, cores: Iterable[int]) -> float | None:
    r"""Return the seconds that `cores` were busy, by /proc/stat's text; None if it has not all.

    >>> parse_busy_s("cpu0 100 0 50 900 10 0 0 25 0 0\ncpu1 7 0 0 0 0 0 0 0 0 0\n", [0])
    1.75
    """
    wanted = {f"cpu{core}" for core in cores}
    lines = [line.split() for line in text.splitlines()]
    counts = [fields[1:] for fields in lines if fields and fields[0] in wanted]
    if len(counts) < len(wanted) or any(len(fields) <= _STEAL for fields in counts):
        return None
    ticks = sum(int(fields[field]) for fields in counts for field in _BUSY)
    return ticks / os.sysconf("SC_CLK_TCK")
