"""Adds samples to a pack: new shards in the same folder, then a new index replaces the old one.

::

    PACK/                  locked; an append that was killed earlier is finished or undone
        shard-*.pace       the next numbers: written, fsync; ignored by readers of the old index
        parity-*.partial   of groups that change
        index.pace.partial written, fsync, renamed over index.pace; fsync the folder
        parity-*.pace      renamed: redundancy, so it may come last

Readers that have the pack open keep the index and the shards that they mapped. Samples are
renumbered in order of their names; classes keep their labels, and new classes get the next ones.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import (
    CorruptPack,
    PacelineError,
    StorageError,
    UsageError,
    os_errors_as,
    reason,
)
from paceline.core.files import sync_folder
from paceline.store.format.index import IndexFile
from paceline.store.format.layout import (
    INDEX_NAME,
    NUMBERED,
    PARTIAL_SUFFIX,
    UNFINISHED,
    parity_name,
    shard_name,
)
from paceline.store.format.leftovers import file_digest, pending_parity, stale_files
from paceline.store.read.pack import open_packed
from paceline.store.write.encoder import SampleEncoder
from paceline.store.write.files import FileDigest, PackFolder
from paceline.store.write.index.build import IndexMetadata, needs_dictionary, write_index
from paceline.store.write.index.sorted_runs import open_sorted_run, sorted_run_of
from paceline.store.write.options import (
    PackOptions,
    PackProgress,
    PackSummary,
    check_codec,
    shard_limits,
)
from paceline.store.write.parity import groups, write_parity
from paceline.store.write.pipeline import PackedSamples, pack_after_existing
from paceline.store.write.sources.archives import OpenArchives
from paceline.store.write.sources.source import SourceClasses, label_map
from paceline.store.write.space import require_pack_space

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from paceline.store.write.sources.source import OpenSource, PackSource

_NEW_INDEX = INDEX_NAME + PARTIAL_SUFFIX


def append(
    source: PackSource,
    pack: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Add the samples of `source` to an existing pack and return its new summary.

    If killed, the pack either is as it was or has all new samples. Readers that have the pack open
    keep the samples that they see.

    Args:
        source: `Folder`, `Archives` or `Samples`.
        pack: the pack's folder.
        options: how to pack; the parity of the pack stays as it is.
        on_progress: called after each batch of samples.
        clock: the clock for `elapsed_s`; None = the system's.

    Raises:
        NotFound: there is no pack, or no source.
        UsageError: a name is in the pack already, or comes twice; another process writes
            to the pack.
        CorruptPack: the index of the pack is damaged, or shards from which parity or digests are
            to be computed.
        StorageError: the disk is full, the source cannot be read, or the source was changed while
            it was packed.
    """
    options = options or PackOptions()
    clock = clock or SystemClock()
    start_s = clock.now_s()
    check_codec(options)
    folder = _GrowingPack(Path(pack).absolute())
    with (
        os_errors_as(lambda problem: _failed(Path(pack).absolute(), problem, folder)),
        source.open(symlinks=options.symlinks) as opened,
        folder,
    ):
        summary = _append(opened, folder, options, on_progress)
    return replace(summary, elapsed_s=clock.now_s() - start_s)


def _failed(path: Path, problem: OSError, folder: _GrowingPack) -> StorageError:
    if folder.is_committed:
        return StorageError(
            "the pack has the new samples, but its parity files could not be put in place",
            where=str(path),
            why=reason(problem),
            fix=f"Do not append again; finish it: paceline store repair {path}",
        )
    return StorageError(
        "cannot append to the pack",
        where=str(path),
        why=reason(problem),
        fix="Free space or check the permissions, then append again; the pack is unchanged",
    )


def _append(
    source: OpenSource,
    folder: _GrowingPack,
    options: PackOptions,
    on_progress: Callable[[PackProgress], None] | None,
) -> PackSummary:
    before = folder.before
    require_pack_space(
        folder.folder,
        source.totals(),
        replace(options, parity_group=before.index.parity_group),
        beside_bytes=(folder.folder / INDEX_NAME).stat().st_size,
        reused_bytes=0,
    )
    _refuse_damage(folder)
    encoder = SampleEncoder(options, folder, dictionary=before.index.dictionary)
    packed = pack_after_existing(
        source,
        folder,
        encoder,
        shard_limits(source.totals(), options),
        first_shard=len(before.index.shard_lengths),
        on_progress=on_progress,
    )
    classes = _all_classes(before.index.class_names, source.classes(), source.where)
    metadata = _metadata(folder, packed, source, classes, encoder.dictionary)
    sorted_runs = [
        before.sorted_run,
        *(open_sorted_run(folder.folder / name, classes.label_map) for name in packed.sorted_runs),
    ]
    index_length = write_index(folder, _NEW_INDEX, sorted_runs, metadata)
    folder.commit()
    sample_count = before.index.sample_count + packed.sample_count
    return PackSummary(
        source=source.where,
        destination=str(folder.folder),
        sample_count=sample_count,
        folder_count=len(metadata.folders),
        class_count=len(metadata.classes),
        shard_count=len(metadata.shard_lengths),
        sample_bytes=sum(int(sorted_run.extents.lengths.sum()) for sorted_run in sorted_runs),
        stored_bytes=sum(
            int(sorted_run.extents.stored_lengths.sum()) for sorted_run in sorted_runs
        ),
        pack_bytes=index_length + sum(metadata.shard_lengths) + sum(metadata.parity_lengths),
        opens_before=sample_count,
        opens_after=len(metadata.shard_lengths) + 1,
        reused_sample_count=before.index.sample_count,
        dictionary_bytes=len(encoder.dictionary) if any(map(needs_dictionary, sorted_runs)) else 0,
        choice=encoder.choice,
    )


def _metadata(
    folder: _GrowingPack,
    packed: PackedSamples,
    source: OpenSource,
    classes: SourceClasses,
    dictionary: bytes,
) -> IndexMetadata:
    """Write the parity of the groups that change; return what the index says of all files."""
    index = folder.before.index
    shards = [*folder.before.shards(), *packed.shards]
    parity = _append_parity(folder, len(index.shard_lengths), len(shards))
    return IndexMetadata(
        folders=list({*index.folder_names, *source.folders()}),
        classes=classes.names,
        shard_lengths=[shard.length for shard in shards],
        shard_digests=[shard.digest for shard in shards],
        parity_group=index.parity_group,
        parity_lengths=[file.length for file in parity],
        parity_digests=[file.digest for file in parity],
        dictionary=dictionary,
        holders=source.holders if isinstance(source, OpenArchives) else None,
    )


def _refuse_damage(folder: _GrowingPack) -> None:
    """Refuse a pack with damage that the append would make undetectable or unrepairable.

    The parity of a group that grows is computed again from its old shards, and shards without a
    digest (version 1) get one. Computed from damaged bytes, the parity could no longer repair them,
    and the digest would match them.

    Raises:
        CorruptPack: a shard, or a sample, is damaged.
    """
    index = folder.before.index
    count = len(index.shard_lengths)
    if len(index.shard_digests) < count:
        with open_packed(folder.folder) as pack:
            damage = next(pack.verify(), None)
        if damage is not None:
            raise damage
        return
    grown = count % index.parity_group if index.parity_group else 0
    for shard in range(count - grown, count):
        path = folder.folder / shard_name(shard)
        try:
            is_intact = file_digest(path) == index.shard_digests[shard]
        except FileNotFoundError:
            is_intact = False
        if not is_intact:
            raise CorruptPack(
                f"{shard_name(shard)} is damaged",
                where=str(path),
                why="new parity computed from it could never repair it",
                fix=f"Repair it first: paceline store repair {folder.folder}",
            )


def _all_classes(before: Sequence[bytes], new: SourceClasses, where: str) -> SourceClasses:
    """Return all classes, the old ones first, and the labels to write for new samples.

    Raises:
        UsageError: the classes are numbers, and the pack has another label for one of them.
    """
    known = set(before)
    names = [*before, *(name for name in new.names if name not in known)]
    if new.are_numbers and new.names != names[: len(new.names)]:
        moved = next(k for k, name in enumerate(new.names) if names[k] != name)
        raise UsageError(
            "the pack has other labels for the classes of these samples",
            where=where,
            why=f"their .cls members say {moved}, and label {moved} of the pack is "
            f"{os.fsdecode(names[moved])!r}",
            fix="Pack these samples into a pack of their own, or all of them anew",
        )
    moved_labels = label_map(new.names, names)
    return SourceClasses(
        names, moved_labels if new.label_map is None else moved_labels[new.label_map]
    )


def _append_parity(folder: _GrowingPack, first_shard: int, count: int) -> list[FileDigest]:
    """Write the parity of the groups that change; return the parity files of all groups."""
    index = folder.before.index
    if not index.parity_group:
        return []
    parity = []
    for k, shards in enumerate(groups(count, index.parity_group)):
        if shards.stop <= first_shard and k < len(index.parity_lengths):
            parity.append(FileDigest(int(index.parity_lengths[k]), index.parity_digests[k]))
        else:
            parity.append(write_parity(folder, k, shards, parity_name(k) + PARTIAL_SUFFIX))
    return parity


class _PackBefore:
    """The pack before samples are appended: its index, and its samples as a sorted run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.index = IndexFile.open(folder)
        self.sorted_run = sorted_run_of(self.index, folder / INDEX_NAME)

    def shards(self) -> list[FileDigest]:
        """Return the shards; digests that the index lacks (version 1) are computed."""
        lengths, digests = self.index.shard_lengths.tolist(), list(self.index.shard_digests)
        undigested = range(len(digests), len(lengths))
        digests += [file_digest(self._folder / shard_name(k)) for k in undigested]
        return [FileDigest(*pair) for pair in zip(lengths, digests, strict=True)]


class _GrowingPack(PackFolder):
    """The locked folder of a pack; leaving the context undoes an append that is not committed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.resolve())
        self.is_committed = False

    def __enter__(self) -> Self:
        open_packed(self.folder, index_only=True).close()  # raises an error that says what is wrong
        if not self.lock():
            raise FileNotFoundError(2, "the folder has just gone")
        try:
            self.before = _PackBefore(self.folder)
            self._settle()
        except BaseException:
            self.unlock()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError, PacelineError):
            if not self.is_committed:
                # An interrupt may come right after the rename: the index in the folder decides.
                with open_packed(self.folder, index_only=True) as pack:
                    self.is_committed = pack.identity != self.before.index.identity
            if not self.is_committed:
                self._settle()
        self.unlock()

    def commit(self) -> None:
        """Put the new index in place of the old, then the new parity."""
        sync_folder(self.folder)
        self._replace(_NEW_INDEX)
        self.is_committed = True
        sync_folder(self.folder)
        for name in self.names():
            final = name.removesuffix(PARTIAL_SUFFIX)
            if final != name and NUMBERED.fullmatch(final):
                self._replace(name)
        self.remove(name for name in self.names() if UNFINISHED.fullmatch(name))
        sync_folder(self.folder)

    def _settle(self) -> None:
        """Finish or undo what a killed append left."""
        index = self.before.index
        for number in pending_parity(self.folder, index):
            self._replace(parity_name(number) + PARTIAL_SUFFIX)
        self.remove(stale_files(self.names(), index))

    def _replace(self, name: str) -> None:
        final = name.removesuffix(PARTIAL_SUFFIX)
        os.rename(name, final, src_dir_fd=self._lock, dst_dir_fd=self._lock)
