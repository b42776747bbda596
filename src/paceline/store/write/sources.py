"""Where samples come from: one small protocol for folders, archives and iterators.

A source yields batches. A batch has columns (names, lengths, modes, times, labels) and fills a
buffer with the bytes of its samples on request, so that a packing that resumes can pass over what
it has. A sample that is larger than a batch comes alone and is read in pieces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UsageError
from paceline.native import gather
from paceline.store.format.layout import ALIGNMENT
from paceline.store.write.shards import BATCH_BYTES
from paceline.store.write.sorted_runs import Samples, part_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BATCH_SAMPLES = 4096
MAX_NAME_BYTES = 4095
REGULAR_MODE = 0o100644
# An empty part, "." or "..", a slash at either end, or a NUL.
_BAD_NAME = re.compile(rb"(?:\A|/)\.{0,2}(?:/|\Z)|\0")


class Bodies(Protocol):
    """The bytes of a batch's samples."""

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Write the samples to their places in `target`, zero the rest; return checksums."""
        ...

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Write what comes next of the one large sample; return how many bytes that is."""
        ...

    def drop(self, count: int) -> Bodies:
        """Return the bodies of all but the first `count` samples."""
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples that come together, in the order of the source."""

    samples: Samples
    lengths: NDArray[np.uint64]
    bodies: Bodies

    def __len__(self) -> int:
        return len(self.lengths)

    def begins(self) -> NDArray[np.uint64]:
        """Return where each sample lies when they stand one behind the other, and the end."""
        return aligned_begins(self.lengths)

    def drop(self, count: int) -> Batch:
        """Return all but the first `count` samples."""
        if count == 0:
            return self
        rest = part_of(self.samples, slice(count, None))
        return Batch(rest, self.lengths[count:], self.bodies.drop(count))


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What a source knows before it is read; 0 = unknown."""

    sample_count: int = 0
    byte_count: int = 0
    is_exact: bool = False


class Source(Protocol):
    """Yields samples; afterwards it knows their folders and classes.

    Attributes:
        where: names it in messages and in the summary.
        kind: what it is, for a packing that resumes; empty = it cannot.
    """

    where: str
    kind: str

    def totals(self) -> Totals:
        """Return what is known before reading."""
        ...

    def batches(self, large_bytes: int) -> Iterator[Batch]:
        """Yield all samples from the start; one that is larger than `large_bytes` comes alone."""
        ...

    def folders(self) -> list[bytes]:
        """Return all folders, once the batches are through."""
        ...

    def classes(self) -> tuple[list[bytes], NDArray[np.int32] | None]:
        """Return the classes, and what stands for each label in the batches (index -1: none)."""
        ...


def aligned_begins(lengths: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return where each sample lies when they stand one behind the other, and the end."""
    begins = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum((lengths + np.uint64(ALIGNMENT - 1)) & ~np.uint64(ALIGNMENT - 1), out=begins[1:])
    return begins


class Tree:
    """Learns folders and classes from the names of samples that come in any order."""

    def __init__(self) -> None:
        self._folders: set[bytes] = set()
        self._ids: dict[bytes, int] = {}
        self._folder: bytes | None = None
        self._label = -1

    def label(self, name: bytes) -> int:
        """Return the label of a sample: the number of its top-level folder, as they came."""
        slash = name.rfind(b"/")
        folder = name[:slash] if slash >= 0 else b""
        if folder != self._folder:
            self._folder = folder
            self._label = self.enter(folder) if folder else -1
        return self._label

    def enter(self, folder: bytes) -> int:
        """Note a folder and those above it; return the number of the topmost."""
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

    def classes(self) -> tuple[list[bytes], NDArray[np.int32]]:
        """Return the top-level folders, sorted, and the label for each number."""
        return numbered(list(self._ids), sorted(self._ids))


def numbered(came: list[bytes], ordered: list[bytes]) -> tuple[list[bytes], NDArray[np.int32]]:
    """Return `ordered`, and where in it each of `came` stands; index -1 is -1."""
    place = {name: k for k, name in enumerate(ordered)}
    return ordered, np.array([*(place[name] for name in came), -1], np.int32)


class Batcher:
    """Collects samples that come one by one into batches."""

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
        """Append a sample; return whether the batch is to be taken now."""
        self._names.append(name)
        self._bodies.append(body)
        self._labels.append(label)
        self._modes.append(mode)
        self._mtimes_ns.append(mtime_ns)
        self._bytes += len(body)
        return self._bytes >= BATCH_BYTES // 2 or len(self._names) >= BATCH_SAMPLES

    def take(self) -> Iterator[Batch]:
        """Yield what was collected, if anything."""
        if not self._names:
            return
        count = len(self._names)
        lengths = np.fromiter(map(len, self._bodies), np.uint64, count)
        bodies: Bodies = ByteBodies(self._bodies)
        batch = Batch(self._samples(), lengths, bodies)
        self.__init__()  # type: ignore[misc]  # begins anew
        yield batch

    def _samples(self) -> Samples:
        count = len(self._names)
        offsets = np.zeros(count + 1, np.uint64)
        np.cumsum(np.fromiter(map(len, self._names), np.uint64, count), out=offsets[1:])
        return Samples(
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
        """Write what comes next of the one large sample; return how many bytes that is."""
        piece = np.frombuffer(self.bodies[0], np.uint8)[self.position : self.position + len(target)]
        target[: len(piece)] = piece
        self.position += len(piece)
        return len(piece)

    def drop(self, count: int) -> ByteBodies:
        """Return the bodies of all but the first `count` samples."""
        return ByteBodies(self.bodies[count:])


class SampleSource:
    """Pairs of a name and bytes, from any iterable; it is read once, so packing cannot resume."""

    kind = ""

    def __init__(self, samples: Iterable[tuple[str | bytes, bytes]], where: str = "") -> None:
        self._samples = samples
        self._tree = Tree()
        self.where = where or "samples"

    def totals(self) -> Totals:
        """Return what is known before reading: nothing."""
        return Totals()

    def batches(self, large_bytes: int) -> Iterator[Batch]:
        """Yield all samples; one that is larger than `large_bytes` comes alone."""
        batcher = Batcher()
        label = self._tree.label
        for text, body in self._samples:
            name = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
            check_name(name, self.where)
            if not isinstance(body, bytes):
                raise UsageError(
                    f"sample {name!r} has no bytes",
                    where=self.where,
                    why=f"it is a {type(body).__name__}",
                    fix="Yield pairs of a name and bytes",
                )
            if len(body) > large_bytes:
                yield from batcher.take()
            if batcher.add(name, body, label(name)) or len(body) > large_bytes:
                yield from batcher.take()
        yield from batcher.take()

    def folders(self) -> list[bytes]:
        """Return all folders, once the batches are through."""
        return self._tree.folders()

    def classes(self) -> tuple[list[bytes], NDArray[np.int32] | None]:
        """Return the top-level folders."""
        return self._tree.classes()


def check_name(name: bytes, where: str) -> None:
    """Refuse a name that could not be a path below a folder.

    Raises:
        UsageError: it is absolute, or has empty parts, ``.``, ``..``, NUL, or too many bytes.
    """
    if _BAD_NAME.search(name) or len(name) > MAX_NAME_BYTES:
        raise UsageError(
            f"{name[:200]!r} cannot name a sample",
            where=where,
            why="a name is a relative path without empty parts, '.', '..' and NUL, of at most "
            f"{MAX_NAME_BYTES:,} bytes",
            fix="Rename it",
        )
