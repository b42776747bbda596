"""Builds the index of a pack from sorted runs: one merge, in which every column streams.

Each sorted run (`sorted_runs.py`) is sorted by name; their merge gives the order of the samples. A
block of that order is taken from the sorted runs, column by column, and appended to its section, so
memory is bounded by a block, the folders, and the table of shards.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.native import NameMerger, encoding_of, lower_bounds, name_hashes
from paceline.store.format.header import IndexCounts
from paceline.store.format.layout import DIGEST_BYTES, EXTENT_COLUMNS, Section, joined
from paceline.store.format.sources import Sources
from paceline.store.write.columns import EXTENT_TYPES, SAMPLE_TYPES, spread
from paceline.store.write.index.name_table import TAIL_SLOTS, NameTable, home_count
from paceline.store.write.index.sections import IndexWriter, StoredColumn, index_bytes
from paceline.store.write.index.stored import IndexLayout, stored_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.store.write.files import PackFile, PackFolder
    from paceline.store.write.index.sorted_runs import SortedRun

BLOCK_SAMPLES = 1 << 17

_SAMPLE_SECTIONS = {"labels": Section.LABELS, "modes": Section.MODES, "mtimes_ns": Section.MTIMES}
_EXTENT_SECTIONS = {
    "offsets": Section.OFFSETS,
    "lengths": Section.LENGTHS,
    "shards": Section.SHARDS,
    "checksums": Section.CHECKSUMS,
    "stored_lengths": Section.STORED_LENGTHS,
    "codecs": Section.CODECS,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexMetadata:
    """What an index holds in addition to the columns of its samples.

    Attributes:
        folders: names of the folders, in any order.
        classes: names of the classes, in the order of labels.
        shard_lengths: bytes of each shard file.
        shard_digests: SHA-256 of each shard file.
        parity_group: shards in a group; 0 = no parity.
        parity_lengths: bytes of each parity file.
        parity_digests: SHA-256 of each parity file.
        dictionary: what samples of codec zstd-dict have in common; written if there are such.
        sources: the shards are these files of the user's own, which have no digests.
        has_checksums: whether the extents have; those of data in place may have none yet.
        holders: tells the paths of the sources of two samples that have one name, for a message.
    """

    folders: Sequence[bytes]
    classes: Sequence[bytes]
    shard_lengths: Sequence[int]
    shard_digests: Sequence[bytes]
    parity_group: int = 0
    parity_lengths: Sequence[int] = ()
    parity_digests: Sequence[bytes] = ()
    dictionary: bytes = b""
    sources: Sources | None = None
    has_checksums: bool = True
    holders: Callable[[bytes], Sequence[str]] | None = None


def planned_bytes(layout: IndexLayout, metadata: IndexMetadata) -> int:
    """Return the length of an index; its name table may turn out longer."""
    columns = _stored(layout, metadata)
    return index_bytes(_section_lengths(layout, metadata, columns), has_sums=columns is not None)


def _stored(layout: IndexLayout, metadata: IndexMetadata) -> dict[Section, StoredColumn] | None:
    """Return how narrow columns are stored; None in an index of version 2."""
    if not layout.needs_version_3:
        return None
    return stored_columns(layout, metadata.shard_lengths, len(metadata.classes))


def _section_lengths(
    layout: IndexLayout,
    metadata: IndexMetadata,
    columns: dict[Section, StoredColumn] | None,
) -> dict[Section, int]:
    """Return the bytes of each section but the sums, in the order in which they lie in the file."""
    samples, extents = layout.sample_count, layout.extent_count
    folder_bytes = sum(len(folder) for folder in metadata.folders)
    lengths = {
        Section.OFFSETS: 8 * extents,
        Section.LENGTHS: 8 * extents,
        Section.SHARDS: 4 * extents,
        Section.CHECKSUMS: 4 * extents,
        Section.LABELS: 4 * samples,
        Section.MODES: 4 * samples,
        Section.MTIMES: 8 * samples,
        Section.NAME_OFFSETS: 8 * (samples + 1),
        Section.NAMES: layout.name_bytes,
        Section.FOLDER_OFFSETS: 8 * (len(metadata.folders) + 1),
        Section.FOLDERS: folder_bytes,
        Section.CLASS_OFFSETS: 8 * (len(metadata.classes) + 1),
        Section.CLASSES: sum(len(name) for name in metadata.classes),
        Section.SHARD_LENGTHS: 8 * len(metadata.shard_lengths),
    }
    if layout.is_encoded:
        lengths[Section.STORED_LENGTHS] = 8 * extents
        lengths[Section.CODECS] = extents
    if layout.is_chunked:
        lengths[Section.FIRST_EXTENTS] = 8 * (samples + 1)
    lengths[Section.FOLDER_SAMPLES] = 16 * len(metadata.folders)
    lengths[Section.FOLDER_ENDS] = 8 * len(metadata.folders)
    if not metadata.has_checksums:
        del lengths[Section.CHECKSUMS]
    if metadata.sources is None:
        lengths[Section.SHARD_DIGESTS] = DIGEST_BYTES * len(metadata.shard_lengths)
    else:
        files, states = metadata.sources.pack()
        lengths |= {Section.FILES: len(files), Section.SOURCES: len(states)}
    if metadata.parity_group:
        lengths[Section.PARITY] = 8 * (1 + len(metadata.parity_lengths))
        lengths[Section.PARITY_DIGESTS] = DIGEST_BYTES * len(metadata.parity_lengths)
    if layout.needs_dictionary:
        lengths[Section.DICTIONARY] = len(metadata.dictionary)
    lengths[Section.NAME_TABLE] = 8 * (home_count(samples) + TAIL_SLOTS)
    for section, stored in (columns or {}).items():
        if section in lengths:
            lengths[section] = stored.length(extents if section in EXTENT_COLUMNS else samples)
    return lengths


def layout_of(sorted_runs: Sequence[SortedRun]) -> IndexLayout:
    """Return what the samples in `sorted_runs` decide of their index.

    Cost: reads every column once.
    """
    layout = IndexLayout(
        sample_count=sum(len(sorted_run.samples) for sorted_run in sorted_runs),
        extent_count=sum(len(sorted_run.extents) for sorted_run in sorted_runs),
        name_bytes=sum(len(sorted_run.samples.names) for sorted_run in sorted_runs),
        is_encoded=any(sorted_run.encoded_count for sorted_run in sorted_runs),
        is_chunked=any(_is_chunked(sorted_run) for sorted_run in sorted_runs),
    )
    for sorted_run in sorted_runs:
        layout.note_offsets(sorted_run.extents.offsets)
        layout.needs_dictionary |= needs_dictionary(sorted_run)
        for columns, sections in (
            (sorted_run.samples, _SAMPLE_SECTIONS),
            (sorted_run.extents, _EXTENT_SECTIONS),
        ):
            for name, section in sections.items():
                if section in layout.ranges:
                    layout.ranges[section].add(getattr(columns, name))
        sorted_run.release()
    return layout


def needs_dictionary(sorted_run: SortedRun) -> bool:
    """Return whether a sample is of the codec zstd-dict."""
    if not sorted_run.encoded_count:
        return False
    return any(
        encoding[0] == "zstd-dict"
        for encoding in map(encoding_of, np.unique(sorted_run.extents.codecs).tolist())
        if encoding is not None
    )


def write_index(
    folder: PackFolder, name: str, sorted_runs: Sequence[SortedRun], metadata: IndexMetadata
) -> int:
    """Write the index of the samples in `sorted_runs` and make it durable; return its length.

    Args:
        folder: the folder for the file, and for temporary files of what exceeds memory.
        name: name of the file.
        sorted_runs: the samples; each run is sorted by name.
        metadata: what the index holds in addition to the columns of its samples.

    Raises:
        UsageError: two samples have one name, or a sample is named like a folder.
    Cost: a merge of names; memory for `BLOCK_SAMPLES` samples and `BUCKET_SAMPLES` hashes.
    """
    file = folder.create(name)
    layout = layout_of(sorted_runs)
    if metadata.sources is not None:
        layout.has_small = False  # samples in place begin anywhere, in every version
    columns = _stored(layout, metadata)
    index = IndexWriter(file, _section_lengths(layout, metadata, columns), columns)
    table = NameTable(layout.sample_count, folder)
    _put_columns(sorted_runs, layout, index, table, metadata.holders)
    folders = sorted(metadata.folders, key=lambda folder: folder + b"/")
    folder_offsets, folder_names = joined(folders)
    class_offsets, class_names = joined(metadata.classes)
    index.put(Section.FOLDER_OFFSETS, folder_offsets)
    index.put(Section.FOLDERS, folder_names)
    index.put(Section.CLASS_OFFSETS, class_offsets)
    index.put(Section.CLASSES, class_names)
    index.put(Section.SHARD_LENGTHS, np.array(metadata.shard_lengths, np.uint64))
    index.put(Section.FOLDER_SAMPLES, _folder_samples(file, index, layout, folders))
    index.put(Section.FOLDER_ENDS, folder_ends(folders))
    if metadata.sources is None:
        index.put(Section.SHARD_DIGESTS, b"".join(metadata.shard_digests))
    else:
        files, states = metadata.sources.pack()
        index.put(Section.FILES, files)
        index.put(Section.SOURCES, states)
    if layout.needs_dictionary:
        index.put(Section.DICTIONARY, metadata.dictionary)
    if metadata.parity_group:
        parity = [metadata.parity_group, *metadata.parity_lengths]
        index.put(Section.PARITY, np.array(parity, np.uint64))
        index.put(Section.PARITY_DIGESTS, b"".join(metadata.parity_digests))
    table.write(index)
    index.finish(
        IndexCounts(
            samples=layout.sample_count,
            folders=len(folders),
            shards=len(metadata.shard_lengths),
            classes=len(metadata.classes),
        )
    )
    folder.close(file)
    return file.length


def folder_ends(folders: Sequence[bytes]) -> NDArray[np.uint64]:
    """Return, for folders in depth-first order, the folder that follows those below each.

    >>> folder_ends([b"a", b"a/b", b"c"]).tolist()
    [2, 2, 3]
    """
    ends = np.zeros(len(folders), np.uint64)
    above: list[int] = []
    for k, folder in enumerate(folders):
        while above and not folder.startswith(folders[above[-1]] + b"/"):
            ends[above.pop()] = k
        above.append(k)
    ends[above] = len(folders)
    return ends


def _put_columns(
    sorted_runs: Sequence[SortedRun],
    layout: IndexLayout,
    index: IndexWriter,
    table: NameTable,
    holders: Callable[[bytes], Sequence[str]] | None,
) -> None:
    merger = NameMerger(
        [(sorted_run.samples.name_offsets, sorted_run.samples.names) for sorted_run in sorted_runs]
    )
    samples_done = [0] * len(sorted_runs)
    extents_done = [0] * len(sorted_runs)
    sample_count = extent_count = name_bytes = 0
    index.put(Section.NAME_OFFSETS, np.zeros(1, np.uint64))
    if layout.is_chunked:
        index.put(Section.FIRST_EXTENTS, np.zeros(1, np.uint64))
    while True:
        merged = merger.next(BLOCK_SAMPLES)
        sources, lengths, names = merged.lists, merged.lengths, merged.names
        if merged.ends_in_duplicate:
            name = names[len(names) - int(lengths[-1]) :]
            raise _duplicate(name, holders)
        if not len(sources):
            return
        offsets = np.zeros(len(lengths) + 1, np.uint64)
        np.cumsum(lengths, out=offsets[1:])
        table.add(name_hashes(offsets, np.frombuffer(names, np.uint8)), sample_count)
        index.put(Section.NAMES, names)
        index.put(Section.NAME_OFFSETS, offsets[1:] + np.uint64(name_bytes))
        name_bytes += len(names)
        block = _MergedBlock(sorted_runs, sources, samples_done, extents_done)
        for column, section in _SAMPLE_SECTIONS.items():
            index.put(section, block.sample_columns[column])
        for column, section in _EXTENT_SECTIONS.items():
            if section in index:
                index.put(section, block.extent_columns[column])
        if layout.is_chunked:
            counts = block.sample_columns["extent_counts"]
            index.put(
                Section.FIRST_EXTENTS, np.cumsum(counts, dtype=np.uint64) + np.uint64(extent_count)
            )
        sample_count += len(sources)
        extent_count += len(block.extent_columns["offsets"])
        for sorted_run in sorted_runs:
            sorted_run.release()


class _MergedBlock:
    """The columns of the next samples of a merge, taken from the sorted runs that hold them."""

    def __init__(
        self,
        sorted_runs: Sequence[SortedRun],
        sources: NDArray[np.uint32],
        samples_done: list[int],
        extents_done: list[int],
    ) -> None:
        order = np.argsort(sources, kind="stable")  # from order of sorted runs to order of names
        counts = np.bincount(sources, minlength=len(sorted_runs))
        present = np.flatnonzero(counts).tolist()
        taken = {}
        for k in present:
            taken[k] = slice(samples_done[k], samples_done[k] + int(counts[k]))
            samples_done[k] = taken[k].stop
        self.sample_columns: dict[str, NDArray[Any]] = {}
        for name, dtype in SAMPLE_TYPES.items():
            slices = [_column(sorted_runs[k], name)[taken[k]] for k in present]
            if name == "labels":
                slices = [
                    _mapped(sorted_runs[k], values)
                    for k, values in zip(present, slices, strict=True)
                ]
            column = np.empty(len(order), dtype)
            together = np.concatenate(slices)
            column[order] = together
            self.sample_columns[name] = column
            if name == "extent_counts":
                self._place_extents(
                    sorted_runs, present, taken, together, column, order, extents_done
                )

    def _place_extents(
        self,
        sorted_runs: Sequence[SortedRun],
        present: list[int],
        taken: dict[int, slice],
        counts: NDArray[np.uint32],
        counts_by_name: NDArray[np.uint32],
        order: NDArray[Any],
        extents_done: list[int],
    ) -> None:
        # `counts` is in order of sorted runs, `counts_by_name` in order of names.
        begins = np.cumsum(counts_by_name, dtype=np.int64) - counts_by_name
        places = spread(begins[order], counts)
        ranges = {}
        for k in present:
            total = int(sorted_runs[k].samples.extent_counts[taken[k]].sum())
            ranges[k] = slice(extents_done[k], extents_done[k] + total)
            extents_done[k] = ranges[k].stop
        self.extent_columns: dict[str, NDArray[Any]] = {}
        for name, dtype in EXTENT_TYPES.items():
            column = np.empty(len(places), dtype)
            column[places] = np.concatenate(
                [getattr(sorted_runs[k].extents, name)[ranges[k]] for k in present]
            )
            self.extent_columns[name] = column


def _column(sorted_run: SortedRun, name: str) -> NDArray[Any]:
    column: NDArray[Any] = getattr(sorted_run.samples, name)
    return column


def _mapped(sorted_run: SortedRun, labels: NDArray[np.int32]) -> NDArray[np.int32]:
    return labels if sorted_run.label_map is None else sorted_run.label_map[labels]


def _is_chunked(sorted_run: SortedRun) -> bool:
    return len(sorted_run.extents) != len(sorted_run.samples) or bool(
        (sorted_run.samples.extent_counts != 1).any()
    )


def _folder_samples(
    file: PackFile, index: IndexWriter, layout: IndexLayout, folders: list[bytes]
) -> NDArray[np.uint64]:
    """Return first and end of the samples below each folder, from the names just written."""
    if not folders or not layout.sample_count:
        return np.zeros((len(folders), 2), np.uint64).reshape(-1)
    size = os.fstat(file.descriptor).st_size
    mapping = mmap.mmap(file.descriptor, size, prot=mmap.PROT_READ)
    offsets = np.frombuffer(
        mapping, np.uint64, layout.sample_count + 1, index.offset(Section.NAME_OFFSETS)
    )
    names = np.frombuffer(mapping, np.uint8, layout.name_bytes, index.offset(Section.NAMES))

    def bounds(ending: bytes) -> NDArray[np.uint64]:
        wanted_offsets, wanted = joined(folder + ending for folder in folders)
        return lower_bounds(offsets, names, wanted_offsets, np.frombuffer(wanted, np.uint8))

    for k, sample in enumerate(bounds(b"").tolist()):
        if sample < layout.sample_count:
            begin, end = int(offsets[sample]), int(offsets[sample + 1])
            if names[begin:end].tobytes() == folders[k]:
                raise UsageError(
                    "a sample is named like a folder",
                    where=repr(folders[k])[1:],
                    why="the name of another sample begins with it and a slash",
                    fix="Rename one of the two samples",
                )
    both = np.stack([bounds(b"/"), bounds(b"0")], axis=1)  # "0" is what follows "/"
    return np.ascontiguousarray(both).reshape(-1)


def _duplicate(name: bytes, holders: Callable[[bytes], Sequence[str]] | None) -> UsageError:
    paths = dict.fromkeys(holders(name)) if holders else {}
    within = f", in {' and '.join(paths)}" if paths else ""
    return UsageError(
        "two samples have one name",
        where=repr(name)[1:] + within,
        why="a sample of a pack is found by its name",
        fix="Rename one of the two samples",
    )
