"""Where bytes go that are away: a file (`spill_file`) or the memory of the host (`host_memory`)."""

from __future__ import annotations

import abc
import collections
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import UsageError
from paceline.training.out_of_core.transfers import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from paceline.training.out_of_core.transfers import Lane, SpillTransfer


class Moved(NamedTuple):
    """What a target has done; bytes and seconds."""

    written_bytes: int = 0
    write_s: float = 0.0
    read_bytes: int = 0
    read_s: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0  # of the step, for transfers

    @property
    def busy_s(self) -> float:
        """Seconds in which it wrote, and in which it read."""
        return self.write_s + self.read_s

    @property
    def write_bytes_per_s(self) -> float | None:
        """While it wrote; None where it did not."""
        return self.written_bytes / self.write_s if self.write_s else None

    @property
    def read_bytes_per_s(self) -> float | None:
        """While it read; None where it did not."""
        return self.read_bytes / self.read_s if self.read_s else None

    def since(self, before: Moved) -> Moved:
        """Return what was done after an earlier moment."""
        return Moved(*(now - then for now, then in zip(self, before, strict=True)))  # type: ignore[arg-type]  # whole bytes stay whole


class SpillTarget(abc.ABC):
    """Parts of some space, each of which is written and then read.

    Only one thread at a time may call it (the step's), but for `release`.

    Args:
        name: in lines for people: "disk".
        place: in such lines too, more exactly: "the disk of /scratch".
        writes: lane that writes.
        reads: lane that reads.
    """

    def __init__(self, name: str, place: str, writes: Lane, reads: Lane) -> None:
        self.name, self.place = name, place
        self._writes, self._reads = writes, reads
        self._free: dict[int, list[int]] = {}  # parts by size
        self._released: collections.deque[tuple[int, int, SpillTransfer | None]] = (
            collections.deque()
        )
        self._is_closed = False

    def allocate(self, size_bytes: int) -> int:
        """Return a free part, by which it is written and read."""
        size = aligned(size_bytes)
        self._sweep()
        free = self._free.get(size)
        return free.pop() if free else self._new_part(size)

    def release(self, part: int, size_bytes: int, after: SpillTransfer | None) -> None:
        """Give a part back as soon as the transfer `after` is done. Any thread may call it."""
        self._released.append((part, aligned(size_bytes), after))

    def _sweep(self) -> None:
        for _ in range(len(self._released)):
            part, size, after = self._released.popleft()
            if after is None or after.is_done:
                self._free.setdefault(size, []).append(part)
            else:
                self._released.append((part, size, after))

    @abc.abstractmethod
    def write(
        self, pieces: Sequence[torch.Tensor], part: int, finish: Callable[[], None]
    ) -> SpillTransfer:
        """Write pieces one after the other, each on a multiple of the alignment.

        Args:
            pieces: each of shape (bytes,), uint8; not to be changed until it is done.
            part: that was allocated.
            finish: called when all is written, by the thread that writes or waits; not where that
                failed.
        """

    @abc.abstractmethod
    def read(self, part: int, size_bytes: int, after: SpillTransfer | None = None) -> SpillTransfer:
        """Read a part into new memory, which the transfer has when it is done.

        Args:
            part: that was written.
            size_bytes: of it.
            after: the write that must be done before.
        """

    def moved(self) -> Moved:
        """Return what was done so far."""
        writes, reads = self._writes, self._reads
        return Moved(
            writes.moved_bytes,
            writes.busy_s,
            reads.moved_bytes,
            reads.busy_s,
            writes.cpu_s + reads.cpu_s,
            writes.waited_s + reads.waited_s,
        )

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return what a result says of the place."""

    def close(self) -> None:
        """End both lanes after what they still have to do, and free the space."""
        if self._is_closed:
            return
        self._is_closed = True
        is_over = [lane.close() for lane in (self._writes, self._reads)]
        if all(is_over):
            self._free_space()

    @abc.abstractmethod
    def _new_part(self, size_bytes: int) -> int: ...

    @abc.abstractmethod
    def _free_space(self) -> None: ...

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError(
                "a spilled tensor is used after its memory budget was closed",
                where=self.place,
                fix="Run the backward pass before close",
            )
