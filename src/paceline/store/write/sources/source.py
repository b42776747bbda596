"""Sources of samples: values that name a source, and the readers that opening them returns.

An open source yields batches. A batch has columns (names, lengths, modes, times, labels) and fills
a buffer with the bytes of its samples on request, so that a resumed `pack` can pass over the
samples that are already packed. A sample that is larger than a batch forms one of its own
and is read in chunks.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UsageError
from paceline.native import gather
from paceline.store.write.columns import SampleColumns

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

Symlinks = Literal["error", "follow", "skip"]

_LOG = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20
BATCH_SAMPLES = 4096
MAX_NAME_BYTES = 4095
REGULAR_MODE = 0o100644
# An empty component, "." or "..", a slash at either end, or a NUL.
_BAD_NAME = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|\0")


class Bodies(Protocol):
    """The bytes of a batch's samples."""

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Write the samples to their places in `target`, zero the rest; return checksums."""
        ...

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Write the next bytes of the one large sample; return their number."""
        ...

    def drop(self, count: int) -> Bodies:
        """Return the bodies of all but the first `count` samples."""
        ...


@dataclass(frozen=True, slots=True)
class SourceBatch:
    """Samples that come together, in the order of the source."""

    samples: SampleColumns
    lengths: NDArray[np.uint64]
    bodies: Bodies

    def __len__(self) -> int:
        return len(self.lengths)

    def drop(self, count: int) -> SourceBatch:
        """Return all but the first `count` samples."""
        if count == 0:
            return self
        rest = self.samples[count:]
        return SourceBatch(rest, self.lengths[count:], self.bodies.drop(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTotals:
    """Totals of a source that are known before it is read; 0 = unknown.

    `archive_bytes` is the size of the archives that hold the samples, and
    `is_compressed` says that these are compressed there: they may take many times as much.
    """

    sample_count: int = 0
    byte_count: int = 0
    archive_bytes: int = 0
    is_exact: bool = False
    is_compressed: bool = False


class SourceClasses(NamedTuple):
    """The classes of a source in the order of their labels.

    Attributes:
        names: names of the classes.
        label_map: array indexed by a label of the batches (negative labels index from its end, as
            in NumPy); the value is the label to write. None: labels are written unchanged.
        are_numbers: whether the names are the labels, in decimal.
    """

    names: list[bytes]
    label_map: NDArray[np.int32] | None
    are_numbers: bool = False


class OpenSource(Protocol):
    """Yields the samples of a source; afterwards it knows their folders and classes.

    Attributes:
        where: name of the source in messages and in the summary.
        resume_key: packing resumes only if the journal holds an equal value; empty = the source
            cannot be read twice.
    """

    where: str
    resume_key: str

    def totals(self) -> SourceTotals:
        """Return what is known before reading."""
        ...

    def batches(self, large_bytes: int) -> Iterator[SourceBatch]:
        """Yield all samples from the start; one larger than `large_bytes` is a batch of its own."""
        ...

    def folders(self) -> list[bytes]:
        """Return all folders, once all batches have been read."""
        ...

    def classes(self) -> SourceClasses:
        """Return the classes, once all batches have been read."""
        ...


class PackSource(Protocol):
    """Names what to pack: `Folder`, `Archives`, `Samples`."""

    @property
    def root(self) -> Path | None:
        """The folder in which the pack must not lie, if the source is one."""
        ...

    def open(self, *, symlinks: Symlinks) -> AbstractContextManager[OpenSource]:
        """Open it for one packing."""
        ...


class FolderTree:
    """Learns folders and classes from the names of samples that come in any order."""

    def __init__(self) -> None:
        self._folders: set[bytes] = set()
        self._ids: dict[bytes, int] = {}
        self._folder: bytes | None = None
        self._label = -1

    def label(self, name: bytes) -> int:
        """Return the label of a sample: its top-level folder, numbered as first seen."""
        slash = name.rfind(b"/")
        folder = name[:slash] if slash >= 0 else b""
        if folder != self._folder:
            self._folder = folder
            self._label = self.add(folder) if folder else -1
        return self._label

    def add(self, folder: bytes) -> int:
        """Record a folder and its parent folders; return the number of the top-level folder."""
        above = folder
        while above and above not in self._folders:
            self._folders.add(above)
            above = above.rpartition(b"/")[0]
        return self._ids.setdefault(folder.partition(b"/")[0], len(self._ids))

    def count(self) -> int:
        """Return how many top-level folders there are."""
        return len(self._ids)

    def folders(self) -> list[bytes]:
        """Return all folders."""
        return list(self._folders)

    def classes(self) -> SourceClasses:
        """Return the top-level folders, sorted."""
        return SourceClasses(sorted(self._ids), label_map(list(self._ids), sorted(self._ids)))


def label_map(first_seen: list[bytes], ordered: list[bytes]) -> NDArray[np.int32]:
    """Return the index in `ordered` of each name of `first_seen`; the label -1 stays -1."""
    place = {name: k for k, name in enumerate(ordered)}
    return np.array([*(place[name] for name in first_seen), -1], np.int32)


@dataclass(slots=True)
class Skipped:
    """Counts what is left out of a source, to say so once."""

    where: str
    count: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: bytes) -> None:
        """Note an entry."""
        self.count += 1
        if len(self.names) < 3:
            self.names.append(repr(os.fsdecode(name)[:200]))

    def tell(self) -> None:
        """Log what was noted, and begin anew."""
        if self.count:
            _LOG.warning(
                "%s: left out %s symbolic link(s) and special file(s) (%s)",
                self.where,
                f"{self.count:,}",
                ", ".join(self.names),
            )
        self.count, self.names = 0, []


class SampleCollector:
    """Collects single samples into batches."""

    def __init__(self) -> None:
        self._names: list[bytes] = []
        self._bodies: list[bytes] = []
        self._labels: list[int] = []
        self._modes: list[int] = []
        self._mtimes_ns: list[int] = []
        self._bytes = 0

    def add(
        self, name: bytes, body: bytes, label: int, mode: int = REGULAR_MODE, mtime_ns: int = 0
    ) -> bool:
        """Append a sample; return whether the batch is full."""
        self._names.append(name)
        self._bodies.append(body)
        self._labels.append(label)
        self._modes.append(mode)
        self._mtimes_ns.append(mtime_ns)
        self._bytes += len(body)
        return self._bytes >= BATCH_BYTES // 2 or len(self._names) >= BATCH_SAMPLES

    def take(self) -> Iterator[SourceBatch]:
        """Yield what was collected, if anything."""
        if not self._names:
            return
        count = len(self._names)
        lengths = np.fromiter(map(len, self._bodies), np.uint64, count)
        bodies: Bodies = ByteBodies(self._bodies)
        batch = SourceBatch(self._samples(), lengths, bodies)
        self.__init__()  # type: ignore[misc]  # empties it
        yield batch

    def _samples(self) -> SampleColumns:
        count = len(self._names)
        offsets = np.zeros(count + 1, np.uint64)
        np.cumsum(np.fromiter(map(len, self._names), np.uint64, count), out=offsets[1:])
        return SampleColumns(
            names=np.frombuffer(b"".join(self._names), np.uint8),
            name_offsets=offsets,
            labels=np.array(self._labels, np.int32),
            modes=np.array(self._modes, np.uint32),
            mtimes_ns=np.array(self._mtimes_ns, np.int64),
            extent_counts=np.ones(count, np.uint32),
        )


@dataclass(slots=True)
class ByteBodies:
    """Samples that are in memory."""

    bodies: list[bytes]
    position: int = 0

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Write the samples to their places in `target`, zero the rest; return checksums."""
        return gather(self.bodies, begins[:-1], target)

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Write the next bytes of the one large sample; return their number."""
        body = np.frombuffer(self.bodies[0], np.uint8)
        chunk = body[self.position : self.position + len(target)]
        target[: len(chunk)] = chunk
        self.position += len(chunk)
        return len(chunk)

    def drop(self, count: int) -> ByteBodies:
        """Return the bodies of all but the first `count` samples."""
        return ByteBodies(self.bodies[count:])


def check_name(name: bytes, where: str) -> None:
    """Refuse a name that could not be a path below a folder.

    Raises:
        UsageError: it is absolute, or has empty components, ``.``, ``..``, NUL, or too many bytes.
    """
    if _BAD_NAME.search(name) or len(name) > MAX_NAME_BYTES:
        raise UsageError(
            f"{name[:200]!r} cannot name a sample",
            where=where,
            why="a name is a relative path without empty components, '.', '..' and NUL, of at most "
            f"{MAX_NAME_BYTES:,} bytes",
            fix="Rename it",
        )
