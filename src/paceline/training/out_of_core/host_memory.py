"""The memory of the host, where tensors of a GPU go that are away.

Parts are blocks that are kept until the end, so that each is pinned once: pinning costs more than a
copy. A step asks for the same sizes again and again.

On a CPU the host's memory is that of the process, so that nothing is gained. The same code runs
there all the same, with threads in place of streams: so it is tested where there is no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline.core.errors import StorageError
from paceline.training.out_of_core.spill_target import SpillTarget
from paceline.training.out_of_core.transfers import Copy, ThreadLane, aligned, aligned_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.training.out_of_core.transfers import Lane, SpillTransfer


class HostMemory(SpillTarget):
    """Blocks of the host's memory; a part is a number.

    Args:
        device: that tensors come from and go back to.
        lanes: that write and read: of a GPU `device.StreamLane`; None: two threads, of a CPU.
    """

    def __init__(self, device: torch.device, lanes: tuple[Lane, Lane] | None = None) -> None:
        self._device = device
        self._is_pinned = device.type != "cpu"
        self._blocks: list[torch.Tensor] = []
        lanes = lanes or (ThreadLane("offload-write"), ThreadLane("offload-read"))
        super().__init__("host memory", "the memory of the host", *lanes)

    @property
    def size_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(block.nbytes for block in self._blocks)

    def write(
        self, pieces: Sequence[torch.Tensor], part: int, finish: Callable[[], None]
    ) -> SpillTransfer:
        """Write pieces one after the other, each on a multiple of the alignment."""
        self._require_open()
        sources, block = list(pieces), self._blocks[part]

        def run(_memory: torch.Tensor | None) -> None:
            at = 0
            for source in sources:
                block[at : at + source.numel()].copy_(source, non_blocking=True)
                at += aligned(source.numel())

        def end() -> None:
            sources.clear()
            finish()

        size = sum(source.nbytes for source in sources)
        return self._writes.start(Copy(size, run, finish=end))

    def read(self, part: int, size_bytes: int, after: SpillTransfer | None = None) -> SpillTransfer:
        """Read a part into new memory of the device, which the transfer has when it is done."""
        self._require_open()
        block = self._blocks[part]

        def run(memory: torch.Tensor | None) -> None:
            assert memory is not None
            memory.copy_(block, non_blocking=True)

        def allocate() -> torch.Tensor:
            if self._device.type == "cpu":
                return aligned_memory(size_bytes)
            return torch.empty(aligned(size_bytes), dtype=torch.uint8, device=self._device)

        return self._reads.start(Copy(size_bytes, run, allocate=allocate, after=after))

    def to_json(self) -> dict[str, Any]:
        """Return the bytes of all blocks."""
        return {"host_bytes": self.size_bytes}

    def _new_part(self, size_bytes: int) -> int:
        try:
            block = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=self._is_pinned)
        except RuntimeError as problem:
            raise StorageError(
                "cannot offload tensors",
                where=self.place,
                why=f"{size_bytes:,} more bytes than {self.size_bytes:,} cannot be had: {problem}",
                fix="Give a larger memory budget, or a node with more memory",
            ) from problem
        self._blocks.append(block)
        return len(self._blocks) - 1

    def _free_space(self) -> None:
        self._blocks.clear()
