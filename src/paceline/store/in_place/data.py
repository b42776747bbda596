"""What the kinds of data in place have in common."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Protocol

import numpy as np

from paceline.core.errors import StorageError, os_errors_as, reason
from paceline.store.format.sources import STATE_TYPE, SourceKind, Sources
from paceline.store.write.columns import ExtentColumns, SampleColumns
from paceline.store.write.sources.source import REGULAR_MODE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.core.files import Access
    from paceline.store.write.sources.source import SourceClasses

BLOCK_SAMPLES = 1 << 16

Block = tuple[SampleColumns, ExtentColumns]


class DataInPlace(Protocol):
    """A data set of the user's: its files, and where in them each sample lies.

    Attributes:
        where: what the user named, for messages.
        side_file: where its index lies if that folder can be written to.
        has_checksums: whether the format has checksums of samples that are CRC-32C.
    """

    where: str
    side_file: Path
    has_checksums: bool

    def sources(self, folder: Path) -> Sources:
        """Return what the files are now, named as an index in `folder` names them.

        Raises:
            PacelineError: they cannot be read, or are not read in place.
        """
        ...

    def blocks(self) -> Iterator[Block]:
        """Yield all samples, with one extent each, in any order."""
        ...

    def as_read(self, sources: Sources) -> Sources:
        """Return `sources` with what was learned of them, once all blocks were yielded."""
        ...

    def access(self, folders: Sequence[bytes]) -> Access:
        """Return who may read the data, in which these folders are."""
        ...

    def folders(self) -> list[bytes]:
        """Return all folders, once all blocks were yielded."""
        ...

    def classes(self) -> SourceClasses:
        """Return the classes, once all blocks were yielded."""
        ...


def sources_of(kind: SourceKind, paths: Sequence[Path], folder: Path) -> Sources:
    """Return what the files at `paths` are now, named as an index in `folder` names them.

    Raises:
        StorageError: a file is gone or cannot be read.
    """
    states = np.zeros(len(paths), STATE_TYPE)
    for k, path in enumerate(paths):
        with os_errors_as(lambda problem, path=path: unreadable(path, problem)):  # type: ignore[misc]  # a default argument
            status = path.stat()
        states[k] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return Sources(kind=kind, files=[name_from(folder, path) for path in paths], states=states)


def name_from(folder: Path, path: Path) -> bytes:
    """Return how an index in `folder` names the file `path`: relative, if it lies below."""
    named = path.relative_to(folder) if path.is_relative_to(folder) else path
    return os.fsencode(named)


def unreadable(path: Path, problem: OSError) -> StorageError:
    """Return the error for data that the system refuses to read."""
    return StorageError(
        "cannot read the data",
        where=str(path),
        why=reason(problem),
        fix="Check the path, and that you may read it",
    )


def sample_columns(
    names: bytes,
    name_offsets: NDArray[np.uint64],
    labels: NDArray[np.int32] | None = None,
    mtime_ns: int = 0,
) -> SampleColumns:
    """Return the columns of samples that differ in name and label only."""
    count = len(name_offsets) - 1
    return SampleColumns(
        names=np.frombuffer(names, np.uint8),
        name_offsets=name_offsets,
        labels=np.full(count, -1, np.int32) if labels is None else labels,
        modes=np.full(count, REGULAR_MODE, np.uint32),
        mtimes_ns=np.full(count, mtime_ns, np.int64),
        extent_counts=np.ones(count, np.uint32),
    )


def extent_columns(
    offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    shards: NDArray[np.uint32],
    checksums: NDArray[np.uint32] | None = None,
) -> ExtentColumns:
    """Return the columns of extents that are stored as they are."""
    count = len(offsets)
    return ExtentColumns(
        offsets=offsets,
        lengths=lengths,
        stored_lengths=lengths,
        shards=shards,
        checksums=np.zeros(count, np.uint32) if checksums is None else checksums,
        codecs=np.zeros(count, np.uint8),
    )
