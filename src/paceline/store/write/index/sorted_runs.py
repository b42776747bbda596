"""Sorted-run files: the columns of the samples packed so far, each file sorted by name.

A pack may hold 100 million samples, and they may come in any order. So their columns are never all
in memory: up to half a million samples are collected, sorted, and written as one file, as an
external merge sort does. The index is a merge of these files (`write/index.py`), and a killed
packing resumes from those that were durable (`write/journal.py`).

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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import CorruptPack
from paceline.native import crc32c, sorted_order
from paceline.store.format.layout import Section
from paceline.store.write.columns import (
    EXTENT_TYPES,
    SAMPLE_TYPES,
    ExtentColumns,
    SampleColumns,
    concatenate_extents,
    concatenate_samples,
    spread,
    take_names,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.store.format.index import IndexFile
    from paceline.store.write.files import PackFolder

_HEADER = struct.Struct("<8sQQQQ")
_MAGIC = b"PACERUN1"
SORTED_RUN_SAMPLES = 1 << 19
_SORTED_RUN_NAME_BYTES = 64 << 20


@dataclass(slots=True)
class SortedRun:
    """Columns of samples that are sorted by name, mapped from a file.

    Attributes:
        samples: columns of the samples, sorted by name.
        extents: columns of the extents; extents of one sample are consecutive.
        encoded_count: number of encoded extents.
        label_map: array indexed by a label of the samples (negative labels index from its end, as
            in NumPy); the value is the label to write. None: labels are written unchanged.
        release: drops the file's pages that this process has read.
    """

    samples: SampleColumns
    extents: ExtentColumns
    encoded_count: int
    label_map: NDArray[np.int32] | None
    release: Callable[[], None]


class SortedRunWriter:
    """Collects samples in the order in which they come, and writes them as sorted-run files.

    The packing thread owns it.

    Args:
        folder: the folder for the files.
        files: name and checksum of each file that a killed packing has completed.

    Attributes:
        files: name and checksum of each file that is durable.
    """

    def __init__(self, folder: PackFolder, files: Sequence[tuple[str, int]] = ()) -> None:
        self._folder = folder
        self._samples: list[SampleColumns] = []
        self._extents: list[ExtentColumns] = []
        self._count = 0
        self._name_bytes = 0
        self.files = list(files)

    def add(self, samples: SampleColumns, extents: ExtentColumns) -> None:
        """Append samples with their extents."""
        self._samples.append(samples)
        self._extents.append(extents)
        self._count += len(samples)
        self._name_bytes += len(samples.names)
        if self._count >= SORTED_RUN_SAMPLES or self._name_bytes >= _SORTED_RUN_NAME_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as a durable file."""
        if not self._count:
            return
        samples, extents = _sorted(
            concatenate_samples(self._samples), concatenate_extents(self._extents)
        )
        self._samples.clear()
        self._extents.clear()
        self._count = self._name_bytes = 0
        name = sorted_run_name(len(self.files))
        file = self._folder.create(name)
        checksum = 0
        encoded_count = np.count_nonzero(extents.codecs)
        head = _HEADER.pack(_MAGIC, len(samples), len(extents), encoded_count, len(samples.names))
        for column in (np.frombuffer(head, np.uint8), *_columns(samples, extents)):
            file.write(column.data)
            checksum = crc32c(column.data, checksum)
        self._folder.close(file)
        self.files.append((name, checksum))


def sorted_run_name(number: int) -> str:
    """Return the file name of a sorted run.

    >>> sorted_run_name(3)
    'run-00003.partial'
    """
    return f"run-{number:05d}.partial"


def open_sorted_run(path: Path, label_map: NDArray[np.int32] | None = None) -> SortedRun:
    """Map the sorted run at `path`, which this process or an earlier one has completed.

    Args:
        path: path of the file.
        label_map: as in `SortedRun`.
    """
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
    samples = SampleColumns(names=names, name_offsets=name_offsets, **rest)
    extents = ExtentColumns(
        **{name: column(dtype, extent_count) for name, dtype in EXTENT_TYPES.items()}
    )
    return SortedRun(
        samples=samples,
        extents=extents,
        encoded_count=encoded_count,
        label_map=label_map,
        release=lambda: mapping.madvise(mmap.MADV_DONTNEED),
    )


def sorted_run_of(index: IndexFile, path: Path) -> SortedRun:
    """Return the samples of an index as a sorted run.

    Args:
        index: the index.
        path: where it lies, for messages.

    Raises:
        CorruptPack: its columns contradict each other.
    """
    counts: NDArray[Any] = np.broadcast_to(np.uint32(1), index.sample_count)
    if len(index.first_extents):
        counts = np.diff(index.first_extents).astype(np.uint32)
    if index.extent_count != int(counts.sum(dtype=np.int64)):
        raise CorruptPack(
            "the pack is damaged",
            where=str(path),
            why="the index contradicts itself: its samples need another number of extents than it "
            "lists",
            fix="Restore the index from a copy of the pack",
        )
    samples = SampleColumns(
        names=index.name_bytes,
        name_offsets=index.name_offsets,
        labels=index.column(Section.LABELS),
        modes=index.column(Section.MODES),
        mtimes_ns=index.column(Section.MTIMES),
        extent_counts=counts,
    )
    extents = ExtentColumns(
        offsets=index.column(Section.OFFSETS),
        lengths=index.column(Section.LENGTHS),
        stored_lengths=index.column(index.stored_lengths_section),
        shards=index.column(Section.SHARDS),
        checksums=index.checksums
        if index.has_checksums
        else np.broadcast_to(np.uint32(0), index.extent_count),
        codecs=index.codecs,
    )
    return SortedRun(
        samples=samples,
        extents=extents,
        encoded_count=int(np.count_nonzero(index.codecs)),
        label_map=None,
        release=index.evict,
    )


def _sorted(samples: SampleColumns, extents: ExtentColumns) -> tuple[SampleColumns, ExtentColumns]:
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
    moved = ExtentColumns(**{name: getattr(extents, name)[which] for name in EXTENT_TYPES})
    return SampleColumns(names=names, name_offsets=name_offsets, **rest), moved


def _columns(samples: SampleColumns, extents: ExtentColumns) -> list[NDArray[np.uint8]]:
    columns = [
        np.ascontiguousarray(samples.name_offsets, "<u8"),
        np.ascontiguousarray(samples.names),
        *(np.ascontiguousarray(getattr(samples, k), t) for k, t in SAMPLE_TYPES.items()),
        *(np.ascontiguousarray(getattr(extents, k), t) for k, t in EXTENT_TYPES.items()),
    ]
    padded = []
    for column in columns:
        raw = column.view(np.uint8)
        padded += [raw, np.zeros(-raw.nbytes % 8, np.uint8)]
    return [column for column in padded if column.nbytes]
