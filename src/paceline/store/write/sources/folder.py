"""A folder of files as a source.

Its listing goes to a temporary file as columns, so its length does not matter; files are read
later, in batches, and must then be what the listing says.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import StorageError, os_errors_as
from paceline.native import read_files
from paceline.store.format.layout import aligned_begins
from paceline.store.write.columns import SAMPLE_TYPES, SampleColumns, concatenate_samples
from paceline.store.write.sources.folder_scan import FolderScan, open_root, unreadable
from paceline.store.write.sources.source import (
    BATCH_BYTES,
    BATCH_SAMPLES,
    SourceBatch,
    SourceClasses,
    SourceTotals,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from paceline.store.write.sources.source import OpenSource, Symlinks

_MEMORY_BYTES = 64 << 20  # of a listing; a longer one waits in a file
_BLOCK_SAMPLES = 1 << 16  # of a listing, that are in memory at a time
_READERS = 4  # threads: a remote file system answers several requests at a time


@dataclass(frozen=True, slots=True)
class Folder:
    """The files below a folder, in bytewise order of their relative paths.

    Its top-level folders are the classes, and a file at the root has label -1.

    Attributes:
        path: only files and folders may lie in it, or what `PackOptions.symlinks` allows.
    """

    path: str | os.PathLike[str]

    @property
    def root(self) -> Path:
        """The folder in which the pack must not lie."""
        return Path(self.path)

    def open(self, *, symlinks: Symlinks) -> AbstractContextManager[OpenSource]:
        """List the folder.

        Raises:
            NotFound: there is no such folder.
            UsageError: it is no folder, or something below is neither file nor folder.
            StorageError: a folder cannot be read.
        """
        return closing(OpenFolder(os.fsencode(self.path), symlinks))


class OpenFolder:
    """The listed files and folders below `root`; closing it lets go of the folder."""

    resume_key = "folder"

    def __init__(self, root: bytes, symlinks: Symlinks) -> None:
        self.where = os.fsdecode(root)
        self.root = root
        self.follow = symlinks == "follow"
        self.descriptor = open_root(root)
        self._listing: IO[bytes] = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115
        self._blocks: list[tuple[int, int]] = []  # samples and bytes of names of each block
        self._scan = FolderScan(root, self.descriptor, symlinks)
        try:
            self._totals = self._write_listing()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder and delete the listing."""
        self._listing.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def totals(self) -> SourceTotals:
        """Return how many files there are, and their bytes."""
        return self._totals

    def folders(self) -> list[bytes]:
        """Return the relative paths of all folders, also of empty ones."""
        return self._scan.folders

    def classes(self) -> SourceClasses:
        """Return the top-level folders, sorted; labels count them."""
        return SourceClasses(self._scan.classes, None)

    def batches(self, large_bytes: int) -> Iterator[SourceBatch]:
        """Yield all files, in order; one larger than `large_bytes` is a batch of its own."""
        for samples, lengths in self._listed():
            ends = aligned_begins(lengths)[1:]
            alone = np.append(np.flatnonzero(lengths > large_bytes), len(lengths))
            first = 0
            while first < len(lengths):
                before = int(ends[first - 1]) if first else 0
                end = int(np.searchsorted(ends, before + BATCH_BYTES, side="right"))
                next_alone = int(alone[np.searchsorted(alone, first)])
                end = max(min(end, first + BATCH_SAMPLES, next_alone), first + 1)
                columns, sizes = samples[first:end], lengths[first:end]
                yield SourceBatch(columns, sizes, _FolderFiles(self, columns, sizes))
                first = end

    def _write_listing(self) -> SourceTotals:
        """Write the listing in blocks; return its totals."""
        waiting: list[tuple[SampleColumns, NDArray[np.uint64]]] = []
        waiting_count = sample_count = byte_count = 0
        for samples, lengths in self._scan.files():
            waiting.append((samples, lengths))
            waiting_count += len(samples)
            sample_count += len(samples)
            byte_count += int(lengths.sum())
            if waiting_count >= _BLOCK_SAMPLES:
                self._write_block(waiting)
                waiting, waiting_count = [], 0
        if waiting:
            self._write_block(waiting)
        return SourceTotals(sample_count=sample_count, byte_count=byte_count, is_exact=True)

    def _write_block(self, listed: list[tuple[SampleColumns, NDArray[np.uint64]]]) -> None:
        samples = concatenate_samples([columns for columns, _ in listed])
        lengths = np.concatenate([sizes for _, sizes in listed])
        columns = [samples.name_offsets, samples.names, lengths]
        for column in (*columns, *(getattr(samples, name) for name in SAMPLE_TYPES)):
            self._listing.write(column.tobytes())
        self._blocks.append((len(samples), len(samples.names)))

    def _listed(self) -> Iterator[tuple[SampleColumns, NDArray[np.uint64]]]:
        position = 0
        for count, name_bytes in self._blocks:
            self._listing.seek(position)
            offsets = self._read_column("<u8", count + 1)
            names = self._read_column("u1", name_bytes)
            lengths = self._read_column("<u8", count)
            rest = {name: self._read_column(dtype, count) for name, dtype in SAMPLE_TYPES.items()}
            position = self._listing.tell()
            yield SampleColumns(names=names, name_offsets=offsets, **rest), lengths

    def _read_column(self, dtype: str, count: int) -> NDArray[Any]:
        return np.frombuffer(self._listing.read(count * np.dtype(dtype).itemsize), dtype)


@dataclass(slots=True)
class _FolderFiles:
    """The bytes of files of a folder."""

    source: OpenFolder
    samples: SampleColumns
    lengths: NDArray[np.uint64]
    descriptor: int = -1
    position: int = 0

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Read the files to their places in `target`, zero the rest; return checksums."""
        source, samples = self.source, self.samples
        read = read_files(
            source.descriptor,
            (samples.name_offsets, samples.names),
            self.lengths,
            samples.mtimes_ns,
            begins[:-1],
            target,
            follow=source.follow,
            threads=_READERS,
        )
        if read.problem is not None:
            problem = read.problem
            sizes = (int(self.lengths[problem.number]), problem.size)
            raise self._problem(self._path(problem.number), problem.outcome, problem.error, sizes)
        return read.checksums

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Read the next bytes of the one large file; return their number."""
        path = self._path(0)
        try:
            with os_errors_as(lambda problem: unreadable(path, problem)):
                return self._read_next(path, target)
        except StorageError:
            self.close()
            raise

    def _read_next(self, path: bytes, target: NDArray[np.uint8]) -> int:
        length = int(self.lengths[0])
        if self.descriptor < 0:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
            if not self.source.follow:
                flags |= os.O_NOFOLLOW
            self.descriptor = os.open(path, flags)
            self._check(path)
        count = os.readv(self.descriptor, [target.data])
        if count == 0:
            raise self._problem(path, "resized", 0, (length, self.position))
        self.position += count
        if self.position == length:
            self._check(path)
            self.close()
        return count

    def drop(self, count: int) -> _FolderFiles:
        """Return all but the first `count` files."""
        return _FolderFiles(self.source, self.samples[count:], self.lengths[count:])

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            os.close(descriptor)

    def _check(self, path: bytes) -> None:
        status = os.fstat(self.descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise self._problem(path, "no_file", 0, (0, 0))
        if status.st_size != int(self.lengths[0]):
            raise self._problem(path, "resized", 0, (self.lengths[0], status.st_size))
        if status.st_mtime_ns != int(self.samples.mtimes_ns[0]):
            raise self._problem(path, "touched", 0, (0, 0))

    def _path(self, sample: int) -> bytes:
        begin, end = self.samples.name_offsets[sample : sample + 2].tolist()
        return self.source.root + b"/" + self.samples.names[begin:end].tobytes()

    def _problem(
        self, path: bytes, outcome: str, error: int, sizes: tuple[int, int]
    ) -> StorageError:
        if outcome == "unreadable":
            return unreadable(path, OSError(error, os.strerror(error)))
        why = {
            "gone": "it is gone",
            "no_file": "it is not a regular file any more",
            "resized": f"it had {sizes[0]} bytes, then {sizes[1]}",
            "touched": "it was written to",
        }[outcome]
        return StorageError(
            "a source file changed while it was packed",
            where=os.fsdecode(path),
            why=why,
            fix="Pack again when no other program writes to the source",
        )
