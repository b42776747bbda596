"""What is known of the samples packed so far, on disk: runs of columns, each sorted by name.

A pack may hold 100 million samples, and they may come in any order. So their columns are never all
in memory: up to half a million samples are collected, sorted, and written as one run. The index is
a merge of the runs (`write/index.py`), and a run that was closed with its shard is also what a
killed packing resumes from (`write/journal.py`).

::

    run-00000.partial
        header     magic | samples | extents | encoded extents | bytes of names
        columns    name offsets | names | labels | modes | mtimes | extents of each sample
                   offsets | lengths | stored lengths | shards | checksums | codecs (of extents)
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.native import crc32c, sorted_order

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.store.write.partial import PackFile

_HEADER = struct.Struct("<8sQQQQ")
_MAGIC = b"PACERUN1"
RUN_SAMPLES = 1 << 19
_RUN_NAME_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Samples:
    """Columns with one entry a sample; names end to end."""

    names: NDArray[np.uint8]
    name_offsets: NDArray[np.uint64]
    labels: NDArray[np.int32]
    modes: NDArray[np.uint32]
    mtimes_ns: NDArray[np.int64]
    extent_counts: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Extents:
    """Columns with one entry an extent."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    stored_lengths: NDArray[np.uint64]
    shards: NDArray[np.uint32]
    checksums: NDArray[np.uint32]
    codecs: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets)


SAMPLE_TYPES = {
    "labels": "<i4",
    "modes": "<u4",
    "mtimes_ns": "<i8",
    "extent_counts": "<u4",
}
EXTENT_TYPES = {
    "offsets": "<u8",
    "lengths": "<u8",
    "stored_lengths": "<u8",
    "shards": "<u4",
    "checksums": "<u4",
    "codecs": "u1",
}


@dataclass(slots=True)
class Run:
    """Columns of samples that are sorted by name, mapped from a file.

    Attributes:
        samples: columns of samples.
        extents: columns of extents, those of one sample in a row.
        encoded_count: how many extents are encoded.
        label_map: what to write for each label; index -1 is what stands for none.
        release: drops the pages that were read from this process.
    """

    samples: Samples
    extents: Extents
    encoded_count: int
    label_map: NDArray[np.int32] | None
    release: Callable[[], None]


class Spool:
    """Collects samples in the order in which they come, and writes them as sorted runs."""

    def __init__(self, create: Callable[[str], PackFile], close: Callable[[PackFile], Any]) -> None:
        self._create = create
        self._close = close
        self._samples: list[Samples] = []
        self._extents: list[Extents] = []
        self._count = 0
        self._name_bytes = 0
        self.files: list[tuple[str, int]] = []  # name and checksum of each run

    def add(self, samples: Samples, extents: Extents) -> None:
        """Append samples with their extents."""
        self._samples.append(samples)
        self._extents.append(extents)
        self._count += len(samples)
        self._name_bytes += len(samples.names)
        if self._count >= RUN_SAMPLES or self._name_bytes >= _RUN_NAME_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as a durable run."""
        if not self._count:
            return
        samples, extents = _sorted(joined_samples(self._samples), _joined(Extents, self._extents))
        self._samples.clear()
        self._extents.clear()
        self._count = self._name_bytes = 0
        name = run_name(len(self.files))
        file = self._create(name)
        checksum = 0
        encoded_count = np.count_nonzero(extents.codecs)
        head = _HEADER.pack(_MAGIC, len(samples), len(extents), encoded_count, len(samples.names))
        for piece in (np.frombuffer(head, np.uint8), *_columns(samples, extents)):
            file.write(piece.data)
            checksum = crc32c(piece.data, checksum)
        self._close(file)
        self.files.append((name, checksum))


def run_name(number: int) -> str:
    """Return the file name of a run.

    >>> run_name(3)
    'run-00003.partial'
    """
    return f"run-{number:05d}.partial"


def open_run(path: Path, label_map: NDArray[np.int32] | None = None) -> Run:
    """Map the run at `path`, which this process or one before it wrote whole."""
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    magic, sample_count, extent_count, encoded_count, name_bytes = _HEADER.unpack_from(mapping)
    assert magic == _MAGIC
    position = _HEADER.size

    def column(dtype: str, count: int) -> NDArray[Any]:
        nonlocal position
        array = np.frombuffer(mapping, dtype, count, position)
        position += array.nbytes + -array.nbytes % 8
        return array

    name_offsets = column("<u8", sample_count + 1)
    names = column("u1", name_bytes)
    rest = {name: column(dtype, sample_count) for name, dtype in SAMPLE_TYPES.items()}
    samples = Samples(names=names, name_offsets=name_offsets, **rest)
    extents = Extents(**{name: column(dtype, extent_count) for name, dtype in EXTENT_TYPES.items()})
    return Run(
        samples=samples,
        extents=extents,
        encoded_count=encoded_count,
        label_map=label_map,
        release=lambda: mapping.madvise(mmap.MADV_DONTNEED),
    )


def take_names(
    names: NDArray[np.uint8], offsets: NDArray[np.uint64], order: NDArray[Any]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return the names in another order."""
    lengths = np.diff(offsets)[order]
    taken = np.zeros(len(order) + 1, np.uint64)
    np.cumsum(lengths, out=taken[1:])
    return names[spread(offsets[:-1][order], lengths)], taken


def spread(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the indices of ranges, one behind the other.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    indices: NDArray[np.int64] = np.arange(total)
    indices += np.repeat(starts.astype(np.int64) - (ends - counts), counts)
    return indices


def part_of(samples: Samples, part: slice) -> Samples:
    """Return some samples that follow each other."""
    first, end, _ = part.indices(len(samples))
    offsets = samples.name_offsets[first : end + 1]
    return Samples(
        names=samples.names[int(offsets[0]) : int(offsets[-1])],
        name_offsets=offsets - offsets[0],
        labels=samples.labels[part],
        modes=samples.modes[part],
        mtimes_ns=samples.mtimes_ns[part],
        extent_counts=samples.extent_counts[part],
    )


def _sorted(samples: Samples, extents: Extents) -> tuple[Samples, Extents]:
    order = sorted_order(samples.name_offsets, samples.names)
    if not len(order):
        return samples, extents
    names, name_offsets = take_names(samples.names, samples.name_offsets, order)
    counts = samples.extent_counts
    if len(extents) == len(samples):
        which: NDArray[Any] = order
    else:
        which = spread((np.cumsum(counts) - counts)[order], counts[order])
    rest = {name: getattr(samples, name)[order] for name in SAMPLE_TYPES}
    moved = Extents(**{name: getattr(extents, name)[which] for name in EXTENT_TYPES})
    return Samples(names=names, name_offsets=name_offsets, **rest), moved


def joined_samples(parts: list[Samples]) -> Samples:
    """Return the samples of all parts."""
    names = np.concatenate([one.names for one in parts])
    lengths = np.concatenate([np.diff(one.name_offsets) for one in parts])
    offsets = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum(lengths, out=offsets[1:])
    rest = {name: np.concatenate([getattr(one, name) for one in parts]) for name in SAMPLE_TYPES}
    return Samples(names=names, name_offsets=offsets, **rest)


def _joined(kind: type[Extents], parts: list[Extents]) -> Extents:
    names = [one.name for one in fields(kind)]
    return kind(*(np.concatenate([getattr(one, name) for one in parts]) for name in names))


def _columns(samples: Samples, extents: Extents) -> list[NDArray[np.uint8]]:
    columns = [
        np.ascontiguousarray(samples.name_offsets, "<u8"),
        np.ascontiguousarray(samples.names),
        *(np.ascontiguousarray(getattr(samples, k), t) for k, t in SAMPLE_TYPES.items()),
        *(np.ascontiguousarray(getattr(extents, k), t) for k, t in EXTENT_TYPES.items()),
    ]
    pieces = []
    for column in columns:
        raw = column.view(np.uint8)
        pieces += [raw, np.zeros(-raw.nbytes % 8, np.uint8)]
    return [piece for piece in pieces if piece.nbytes]
