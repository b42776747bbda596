"""A file that tensors are spilled to, with a thread that writes and one that reads.

Direct transfers (`uncached_file`) need aligned memory: what is read goes to aligned memory, which
becomes tensors; what is written is copied to an aligned buffer first, unless it is aligned already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.training.out_of_core.spill_target import SpillTarget
from paceline.training.out_of_core.transfers import (
    ALIGNMENT,
    Copy,
    ThreadLane,
    aligned,
    aligned_memory,
)
from paceline.training.out_of_core.uncached_file import CHUNK_BYTES, UncachedFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from paceline.training.out_of_core.transfers import SpillTransfer

JOINED_PIECES = 64  # in one system call, which takes 1,024 at most (IOV_MAX)


class SpillFile(SpillTarget):
    """The file, its two threads, and the parts of it that are in use: a part is an offset.

    Args:
        folder: that has it, on a local disk.

    Raises:
        StorageError: no file can be made there, or its files are memory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = UncachedFile(folder)
        self._end = 0
        self._bounce = aligned_memory(CHUNK_BYTES).numpy()
        lanes = ThreadLane("spill-write"), ThreadLane("spill-read")
        super().__init__("disk", f"the disk of {folder}", *lanes)

    @property
    def size_bytes(self) -> int:
        """How large the file is; parts that are free again are used before it grows."""
        return self._end

    def write(
        self, pieces: Sequence[torch.Tensor], part: int, finish: Callable[[], None]
    ) -> SpillTransfer:
        """Write pieces one after the other, each on a multiple of the alignment."""
        self._require_open()
        arrays = [piece.numpy() for piece in pieces]

        def run(_memory: torch.Tensor | None) -> None:
            try:
                self._write_pieces(arrays, part)
            finally:
                arrays.clear()  # before `finish`, which frees them

        size = sum(array.nbytes for array in arrays)
        return self._writes.start(Copy(size, run, finish=finish))

    def read(self, part: int, size_bytes: int, after: SpillTransfer | None = None) -> SpillTransfer:
        """Read a part into aligned memory, which the transfer has when it is done."""
        self._require_open()

        def run(memory: torch.Tensor | None) -> None:
            assert memory is not None
            self.disk.read(memory.numpy(), part)

        return self._reads.start(
            Copy(size_bytes, run, allocate=lambda: aligned_memory(size_bytes), after=after)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the folder, and whether transfers go past the page cache."""
        return {"spill_folder": str(self.folder), "is_direct": self.disk.is_direct}

    def _new_part(self, size_bytes: int) -> int:
        self._end += size_bytes
        return self._end - size_bytes

    def _free_space(self) -> None:
        self.disk.close()  # not while a thread uses it: a later file may get its number

    def _write_pieces(self, pieces: Sequence[np.ndarray], offset: int) -> None:
        """Write pieces that lie one after the other in the file; whole pages of many at once."""
        joined: list[np.ndarray] = []
        begin = at = offset
        for piece in pieces:
            if _is_whole(piece) and len(joined) < JOINED_PIECES:
                joined.append(piece)
            else:
                self._write_all(joined, begin)
                self._write_piece(piece, at)
                joined, begin = [], at + aligned(piece.nbytes)
            at += aligned(piece.nbytes)
        self._write_all(joined, begin)

    def _write_piece(self, piece: np.ndarray, offset: int) -> None:
        is_aligned = piece.ctypes.data % ALIGNMENT == 0
        whole = piece.nbytes // ALIGNMENT * ALIGNMENT if is_aligned else 0
        if whole:
            self._write_all([piece[:whole]], offset)
        for begin in range(whole, piece.nbytes, CHUNK_BYTES):
            chunk = piece[begin : begin + CHUNK_BYTES]
            np.copyto(self._bounce[: chunk.nbytes], chunk)
            self._write_all([self._bounce[: aligned(chunk.nbytes)]], offset + begin)

    def _write_all(self, chunks: Sequence[np.ndarray], offset: int) -> None:
        if chunks:
            self.disk.write(chunks, offset)


def _is_whole(piece: np.ndarray) -> bool:
    """Whether a piece is whole pages, which need no copy to be written."""
    return piece.ctypes.data % ALIGNMENT == 0 and piece.nbytes % ALIGNMENT == 0
