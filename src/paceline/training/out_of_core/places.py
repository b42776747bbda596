"""Where a session trains, and where its tensors go: what differs between a CPU and a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from paceline.training.out_of_core.device import CachingAllocator, DeviceMemory, StreamLane
from paceline.training.out_of_core.host_memory import HostMemory
from paceline.training.out_of_core.process_memory import Allocator, ProcessMemory
from paceline.training.out_of_core.spill_file import SpillFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.training.out_of_core.process_memory import Memory
    from paceline.training.out_of_core.spill_target import SpillTarget


class TensorAllocator(Protocol):
    """Where tensors get their memory; `process_memory.Allocator` says what each method does."""

    @property
    def is_pooled(self) -> bool:
        """Whether freed memory serves the next tensors."""

    def begin(self) -> None:
        """Begin a session."""

    def end(self) -> None:
        """End it."""

    def keep_nothing(self) -> None:
        """Give freed memory back."""

    def begin_interval(self, now_bytes: Callable[[], int]) -> None:
        """Begin an interval that is recorded."""

    def end_interval(self, peak_bytes: Callable[[], int]) -> None:
        """Note what the process took for a while in it."""

    def keep_within(self, budget_bytes: int, now_bytes: Callable[[], int]) -> None:
        """Keep freed memory while all stays below the budget."""

    def end_step(self) -> int:
        """Learn that a step is over; return the most bytes in use in it, 0 if not known."""

    def page_fault_s(self) -> float:
        """Return the time of a page that comes from the system."""


class Place(NamedTuple):
    """A device, and what a session there works with; the session closes it.

    Attributes:
        device: that the tensors are on which may be away.
        target: where they go.
        memory: that the budget is for.
        allocator: of the tensors.
    """

    device: torch.device
    target: SpillTarget
    memory: Memory
    allocator: TensorAllocator


def spill_to_file(folder: Path) -> Place:
    """Return a CPU's: tensors go to a file in a folder on a disk.

    Raises:
        StorageError: no file can be made there, or its files are memory (tmpfs).
        Missing: the kernel does not let this process measure its memory.
    """
    memory = ProcessMemory()
    try:
        target = SpillFile(folder)
    except BaseException:
        memory.close()
        raise
    return Place(torch.device("cpu"), target, memory, Allocator())


def offload_to_host(device: torch.device) -> Place:
    """Return a GPU's: tensors go to pinned memory of the host."""
    target = HostMemory(device, (StreamLane(device), StreamLane(device)))
    return Place(device, target, DeviceMemory(device), CachingAllocator())
