"""A file that tensors are spilled to, past the page cache, with a thread that writes and a reader.

The file has no name: nothing is left when the process ends, however it ends. It is opened with
O_DIRECT, because pages of a file count as memory of the job's control group. Direct transfers need
aligned memory: what is read goes to aligned buffers, which become tensors; what is written is
copied to an aligned buffer first, unless it is aligned already.

    step's thread                      writer, reader
    write(pieces) -> SpillTransfer  ----->  copy, pwritev
    transfer.wait()            <-----  done, or the error
"""

from __future__ import annotations

import collections
import contextlib
import errno
import os
import queue
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from paceline.core.errors import DeadlineExceeded, StorageError, UsageError, reason
from paceline.core.node import mount_of, read_mounts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MEMORY_FILE_SYSTEMS = ("ramfs", "tmpfs")
ALIGNMENT = 4096  # of memory, offsets and lengths: at least what any block device asks for
CHUNK_BYTES = 4 << 20
JOINED_PIECES = 64  # in one system call, which takes 1,024 at most (IOV_MAX)
DEADLINE_S = 300.0  # of one transfer; a disk that takes longer does not answer


def aligned(size_bytes: int) -> int:
    """Return a size rounded up to the alignment.

    >>> aligned(1), aligned(4096)
    (4096, 4096)
    """
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def aligned_memory(size_bytes: int) -> torch.Tensor:
    """Return memory for direct transfers, shape (aligned size,), uint8.

    Blocks of the pool of tensors are aligned already.
    """
    size = aligned(size_bytes)
    memory = torch.empty(size, dtype=torch.uint8)
    if memory.data_ptr() % ALIGNMENT:
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        memory = memory.narrow(0, -memory.data_ptr() % ALIGNMENT, size)
    return memory


class SpillTransfer:
    """One write or read that is under way. The step's thread waits; an I/O thread finishes it."""

    __slots__ = ("_done", "_run", "bytes", "problem")

    def __init__(self, run: Callable[[SpillTransfer], None]) -> None:
        self._run = run
        self._done = threading.Event()
        self.bytes: torch.Tensor | None = None  # what was read, shape (aligned size,)
        self.problem: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def run(self) -> None:
        """Do it, in an I/O thread; an error is kept for the thread that waits."""
        try:
            self._run(self)
        except BaseException as problem:  # noqa: BLE001  # raised by `wait`
            self.problem = problem
        finally:
            self._run = _nothing  # what it holds is memory
            self._done.set()

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            StorageError: the disk is full or failed.
            DeadlineExceeded: the disk does not answer.
        """
        if not self._done.wait(DEADLINE_S):
            raise DeadlineExceeded(
                f"a transfer took more than {DEADLINE_S:g} s",
                where="spill file",
                why="the disk does not answer",
                fix="Choose another folder with spill_folder",
            )
        if self.problem is not None:
            raise self.problem


def _nothing(_transfer: SpillTransfer) -> None:
    return None


class SpillFile:
    """The file, its two threads, and the parts of it that are in use.

    Only one thread at a time may call it (the step's). `written_bytes`, `write_s`, `read_bytes`,
    `read_s` and `cpu_s` are what the threads have done so far.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_direct, self._descriptor = _open(folder)
        self.written_bytes = self.read_bytes = 0
        self.write_s = self.read_s = self.cpu_s = 0.0
        self._is_closed = False
        self._end = 0
        self._free: dict[int, list[int]] = {}
        self._released: collections.deque[tuple[int, int, SpillTransfer | None]] = (
            collections.deque()
        )
        self._bounce = aligned_memory(CHUNK_BYTES).numpy()
        self._writes: queue.SimpleQueue[SpillTransfer | None] = queue.SimpleQueue()
        self._reads: queue.SimpleQueue[SpillTransfer | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_serve, args=(transfers,), name=f"spill-{name}", daemon=True)
            for name, transfers in (("write", self._writes), ("read", self._reads))
        ]
        for thread in self._threads:
            thread.start()

    def allocate(self, size_bytes: int) -> int:
        """Return the offset of a free part of the file."""
        size = aligned(size_bytes)
        self._sweep()
        free = self._free.get(size)
        if free:
            return free.pop()
        self._end += size
        return self._end - size

    def release(self, offset: int, size_bytes: int, after: SpillTransfer | None) -> None:
        """Give a part back as soon as the transfer `after` is done. Any thread may call it."""
        self._released.append((offset, aligned(size_bytes), after))

    def _sweep(self) -> None:
        for _ in range(len(self._released)):
            offset, size, after = self._released.popleft()
            if after is None or after.is_done:
                self._free.setdefault(size, []).append(offset)
            else:
                self._released.append((offset, size, after))

    def write(
        self, pieces: Sequence[np.ndarray], offset: int, finish: Callable[[], None]
    ) -> SpillTransfer:
        """Write arrays of bytes one after the other, each on a multiple of the alignment.

        Args:
            pieces: not to be changed until it is done.
            offset: of an allocated part of the file.
            finish: called by the I/O thread when all is written; not where that failed, since what
                is not in the file is nowhere else.
        """
        self._require_open()
        pieces = list(pieces)

        def run(_transfer: SpillTransfer) -> None:
            begin, begin_cpu = time.monotonic(), time.thread_time()
            try:
                self._write_pieces(pieces, offset)
                self.written_bytes += sum(piece.nbytes for piece in pieces)
                pieces.clear()
                finish()  # frees the memory, before the step goes on
            finally:
                pieces.clear()
                self.write_s += time.monotonic() - begin
                self.cpu_s += time.thread_time() - begin_cpu

        transfer = SpillTransfer(run)
        self._writes.put(transfer)
        return transfer

    def read(
        self, offset: int, size_bytes: int, after: SpillTransfer | None = None
    ) -> SpillTransfer:
        """Read into aligned memory, which the transfer has as a tensor when it is done.

        Args:
            offset: of the part.
            size_bytes: of it.
            after: the write that must be done before.
        """
        self._require_open()

        def run(transfer: SpillTransfer) -> None:
            if after is not None:
                after.wait()
            begin, begin_cpu = time.monotonic(), time.thread_time()
            memory = aligned_memory(size_bytes)
            self._read_all(memory.numpy(), offset)
            transfer.bytes = memory
            self.read_bytes += size_bytes
            self.read_s += time.monotonic() - begin
            self.cpu_s += time.thread_time() - begin_cpu

        transfer = SpillTransfer(run)
        self._reads.put(transfer)
        return transfer

    @property
    def size_bytes(self) -> int:
        """How large the file is; parts that are free again are used before it grows."""
        return self._end

    def close(self) -> None:
        """End both threads after what they still have to do, and free the file."""
        if self._is_closed:
            return
        self._is_closed = True
        self._writes.put(None)
        self._reads.put(None)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._descriptor)  # else a later file of this number would be written to

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsageError(
                "a spilled tensor is used after its memory budget was closed",
                where=str(self.folder),
                fix="Run the backward pass before close",
            )

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

    def _write_all(self, chunks: Sequence[np.ndarray], begin: int) -> None:
        if not chunks:
            return
        views = [memoryview(chunk) for chunk in chunks]  # type: ignore[arg-type]  # arrays of bytes are buffers
        offset = begin
        try:
            while views:
                count = os.pwritev(self._descriptor, views, offset)
                offset += count
                while views and count >= len(views[0]):
                    count -= len(views.pop(0))
                if count:
                    views[0] = views[0][count:]
        except OSError as problem:
            fix = "Free space" if problem.errno == errno.ENOSPC else "Check the disk"
            raise StorageError(
                "cannot spill tensors",
                where=str(self.folder),
                why=reason(problem),
                fix=f"{fix}, or choose another folder with spill_folder",
            ) from problem
        self._drop_pages(begin, offset - begin)

    def _read_all(self, into: np.ndarray, offset: int) -> None:
        begin, view = offset, memoryview(into)  # type: ignore[arg-type]  # as above
        try:
            while view:
                count = os.preadv(self._descriptor, [view], offset)
                if not count:
                    raise OSError(errno.EIO, "the spill file is shorter than what was written")
                view, offset = view[count:], offset + count
        except OSError as problem:
            raise StorageError(
                "cannot read spilled tensors",
                where=str(self.folder),
                why=reason(problem),
                fix="Check the disk, or choose another folder with spill_folder",
            ) from problem
        self._drop_pages(begin, into.nbytes)

    def _drop_pages(self, offset: int, count: int) -> None:
        """Keep the page cache from growing on a file system without direct transfers."""
        if not self.is_direct:
            os.fdatasync(self._descriptor)  # pages that are not written yet cannot be dropped
            os.posix_fadvise(self._descriptor, offset, count, os.POSIX_FADV_DONTNEED)


def _is_whole(piece: np.ndarray) -> bool:
    """Whether a piece is whole pages, which need no copy to be written."""
    return piece.ctypes.data % ALIGNMENT == 0 and piece.nbytes % ALIGNMENT == 0


def _serve(transfers: queue.SimpleQueue[SpillTransfer | None]) -> None:
    while (transfer := transfers.get()) is not None:
        transfer.run()
        del transfer  # not held while waiting for the next


def _open(folder: Path) -> tuple[bool, int]:
    """Open a file without a name; return whether transfers go past the page cache."""
    mount = mount_of(str(folder.resolve()), read_mounts())
    if mount is not None and mount.kind in MEMORY_FILE_SYSTEMS:
        raise StorageError(
            "cannot make a spill file",
            where=str(folder),
            why=f"{mount.point} is a {mount.kind}: its files are memory themselves",
            fix="Choose a folder on a disk with spill_folder",
        )
    try:
        descriptor, path = tempfile.mkstemp(prefix="paceline-spill-", dir=folder)
        name = Path(path)
        try:
            os.fchmod(descriptor, 0o600)
            with contextlib.suppress(OSError):  # EINVAL: a file system without direct transfers
                direct = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
                os.close(descriptor)
                return True, direct
        finally:
            name.unlink()
    except OSError as problem:
        raise StorageError(
            "cannot make a spill file",
            where=str(folder),
            why=reason(problem),
            fix="Choose another folder with spill_folder",
        ) from problem
    return False, descriptor
