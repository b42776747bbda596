"""What the ranks of a node reach of its memory bandwidth, as the probe has measured it.

The probe measures one process alone and each of two at once. Of more ranks it is not known: they
reach together at least what two reach, and share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.machine import Machine

NOTABLE = 0.8  # of what a process alone reaches: below it ranks wait for memory


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryContention:
    """Bytes per second from and to memory.

    Attributes:
        alone: of a process that has the node to itself.
        each: of each of two processes at once.
    """

    alone: float
    each: float

    @property
    def share(self) -> float:
        """What each of two processes keeps of what it reaches alone, 0 to about 1."""
        return self.each / self.alone

    @property
    def words(self) -> str:
        """The figures, as a sentence without its end."""
        return (
            f"one process reaches {self.alone / 1e9:.1f} GB/s alone, each of two at once "
            f"{self.each / 1e9:.1f} ({self.share:.0%}): together {2 * self.each / 1e9:.1f} GB/s, "
            f"{2 * self.share:.1f} times one"
        )


def memory_contention(machine: Machine | None) -> MemoryContention | None:
    """Return what a probe of this machine has measured; None if none has."""
    for device in machine.devices if machine else ():
        alone, each = device.bandwidth_bytes_per_s, device.bandwidth_shared_bytes_per_s
        if device.kind == "cpu" and alone is not None and each is not None:
            return MemoryContention(alone=alone.value, each=each.value)
    return None
