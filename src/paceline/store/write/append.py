"""Adds samples to a pack: new shards beside the old ones, then a new index in place of the old.

::

    PACK/                  locked; what a killed append left is removed
        shard-*.pace       the next numbers: written, fsync; readers ignore what no index names
        parity-*.partial   of groups that change
        index.pace.partial written, fsync, renamed over index.pace; fsync the folder
        parity-*.pace      renamed: redundancy, so it may come last

Readers that have the pack open keep the index and the shards that they mapped. Samples are numbered
anew by their names; classes keep their labels, and new classes get the next ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import CorruptPack, PacelineError, StorageError
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
from paceline.store.read.pack import open_pack
from paceline.store.write.index import Content
from paceline.store.write.options import (
    PackOptions,
    PackProgress,
    PackSummary,
    check_codec,
    shard_limits,
)
from paceline.store.write.pack import opened_source, write_index
from paceline.store.write.parity import groups, write_parity
from paceline.store.write.partial import PackFolder
from paceline.store.write.pipeline import Packer
from paceline.store.write.shards import Shard
from paceline.store.write.sorted_runs import Extents, Run, Samples, open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from paceline.store.write.sources import Source

_NEW_INDEX = INDEX_NAME + PARTIAL_SUFFIX


def append_pack(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Source,
    pack: str | os.PathLike[str],
    *,
    options: PackOptions | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
    clock: Clock | None = None,
) -> PackSummary:
    """Add the samples of `source` to an existing pack and return what it holds then.

    Killed at any moment, this leaves the pack as it was or with all new samples. Readers that
    have it open go on with the samples that they know.

    Args:
        source: a folder, archives, or any source.
        pack: the pack's folder.
        options: how to pack; the parity of the pack stays as it is.
        on_progress: called after each batch of samples.
        clock: in place of the system's.

    Raises:
        NotFound: there is no pack, or no source.
        UsageError: a name is in the pack already, or comes twice; another run writes to the pack.
        CorruptPack: the index of the pack is damaged, or shards are of which parity or digests are
            to be made.
        StorageError: the disk is full, or the source cannot be read or changed meanwhile.
    """
    options = options or PackOptions()
    clock = clock or SystemClock()
    start_s = clock.now_s()
    check_codec(options)
    target = Path(pack).absolute()
    folder = _AppendFolder(target)
    try:
        with opened_source(source, options) as opened, folder:
            summary = _append(opened, folder, options, on_progress)
    except PacelineError:
        raise
    except OSError as problem:
        if folder.is_committed:
            raise StorageError(
                "the pack has the new samples, but could not be finished",
                where=str(target),
                why=problem.strerror or str(problem),
                fix=f"Do not append again; finish it: paceline store repair {target}",
            ) from problem
        raise StorageError(
            "cannot append to the pack",
            where=str(target),
            why=problem.strerror or str(problem),
            fix="Free space or check the place, and append again; the pack is as it was",
        ) from problem
    return replace(summary, elapsed_s=clock.now_s() - start_s)


def _append(
    source: Source,
    folder: _AppendFolder,
    options: PackOptions,
    on_progress: Callable[[PackProgress], None] | None,
) -> PackSummary:
    old = folder.old
    _refuse_damage(folder)
    first = len(old.content.shard_lengths)
    limits = shard_limits(source, options)
    packer = Packer(source, folder, options, limits, on_progress, first)
    try:
        packer.add_all()
    finally:
        packer.stop()
    classes, label_map = _more_classes(old.content.classes, *source.classes())
    shards = [*old.shards(), *packer.shards]
    parity = _append_parity(folder, first, len(shards))
    content = Content(
        folders=list({*old.content.folders, *source.folders()}),
        classes=classes,
        shard_lengths=[one.length for one in shards],
        shard_digests=[one.digest for one in shards],
        parity_group=old.content.parity_group,
        parity_lengths=[one.length for one in parity],
        parity_digests=[one.digest for one in parity],
    )
    new = [open_run(folder.folder / name, label_map) for name, _ in packer.spool.files]
    runs = [old.run, *new]
    index_length = write_index(folder, _NEW_INDEX, runs, content)
    folder.commit()
    return PackSummary(
        source=source.where,
        destination=str(folder.folder),
        sample_count=len(old.run.samples) + packer.sample_count,
        folder_count=len(content.folders),
        class_count=len(classes),
        shard_count=len(shards),
        sample_bytes=sum(int(run.extents.lengths.sum()) for run in runs),
        stored_bytes=sum(int(run.extents.stored_lengths.sum()) for run in runs),
        pack_bytes=index_length + sum(content.shard_lengths) + sum(content.parity_lengths),
        opens_before=len(old.run.samples) + packer.sample_count,
        opens_after=len(shards) + 1,
        reused_sample_count=len(old.run.samples),
    )


def _refuse_damage(folder: _AppendFolder) -> None:
    """Refuse a pack whose damage would pass for good bytes afterwards.

    The parity of a group that grows is made of its old shards anew, and shards that have no digest
    (version 1) get one: made of damaged bytes, the one could not mend them any more, and the other
    would hide them.

    Raises:
        CorruptPack: a shard, or a sample, is damaged.
    """
    content = folder.old.content
    count = len(content.shard_lengths)
    if len(content.shard_digests) < count:
        with open_pack(folder.folder) as pack:
            damage = next(pack.verify(), None)
        if damage is not None:
            raise damage
        return
    grown = count % content.parity_group if content.parity_group else 0
    for shard in range(count - grown, count):
        try:
            is_whole = folder.digest(shard_name(shard)) == content.shard_digests[shard]
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            raise CorruptPack(
                f"{shard_name(shard)} is damaged",
                where=str(folder.folder / shard_name(shard)),
                why="new parity made of it could never mend it",
                fix=f"Mend it first: paceline store repair {folder.folder}",
            )


def _more_classes(
    old: Sequence[bytes], new: list[bytes], label_map: NDArray[np.int32] | None
) -> tuple[list[bytes], NDArray[np.int32]]:
    """Return all classes, the old ones first, and what stands for the labels of new samples."""
    classes = [*old, *sorted(set(new) - set(old))]
    place = {name: k for k, name in enumerate(classes)}
    moved = np.array([*(place[name] for name in new), -1], np.int32)
    return classes, moved if label_map is None else moved[label_map]


def _append_parity(folder: _AppendFolder, first: int, count: int) -> list[Shard]:
    """Write the parity of the groups that change; return all groups'."""
    content = folder.old.content
    size = content.parity_group
    if not size:
        return []
    parity = []
    for k, shards in enumerate(groups(count, size)):
        if shards.stop <= first and k < len(content.parity_lengths):
            parity.append(Shard(content.parity_lengths[k], content.parity_digests[k]))
        else:
            parity.append(write_parity(folder, k, shards, parity_name(k) + PARTIAL_SUFFIX))
    return parity


class _PackBefore:
    """What a pack holds before samples are appended: a sorted run of samples, and the rest."""

    def __init__(self, folder: Path) -> None:
        index = IndexFile.open(folder)
        self._folder = folder
        self.index = index
        self.content = Content(
            folders=index.folder_names,
            classes=index.class_names,
            shard_lengths=index.shard_lengths.tolist(),
            shard_digests=index.shard_digests,
            parity_group=index.parity_group,
            parity_lengths=index.parity_lengths.tolist(),
            parity_digests=index.parity_digests,
        )
        self.run = _run_of(index, folder)

    def shards(self) -> list[Shard]:
        """Return the shards, with digests taken anew where the index has none (version 1)."""
        lengths, digests = self.content.shard_lengths, list(self.content.shard_digests)
        for k in range(len(digests), len(lengths)):
            with (self._folder / shard_name(k)).open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").digest())
        return [Shard(*pair) for pair in zip(lengths, digests, strict=True)]


def _run_of(index: IndexFile, folder: Path) -> Run:
    """Return the samples of an index as a sorted run."""
    counts: NDArray[Any] = np.broadcast_to(np.uint32(1), index.sample_count)
    if len(index.first_extents):
        counts = np.diff(index.first_extents).astype(np.uint32)
    if len(index.lengths) != int(counts.sum(dtype=np.int64)):
        raise CorruptPack(
            "the pack is damaged",
            where=str(folder / INDEX_NAME),
            why="its samples do not add up to its extents",
            fix="Bring back a good copy of the index",
        )
    samples = Samples(
        names=index.name_bytes,
        name_offsets=index.name_offsets,
        labels=index.labels,
        modes=index.modes,
        mtimes_ns=index.mtimes_ns,
        extent_counts=counts,
    )
    extents = Extents(
        offsets=index.offsets,
        lengths=index.lengths,
        stored_lengths=index.stored_lengths,
        shards=index.shards,
        checksums=index.checksums,
        codecs=index.codecs,
    )
    return Run(
        samples=samples,
        extents=extents,
        encoded_count=int(np.count_nonzero(index.codecs)),
        label_map=None,
        release=index.evict,
    )


class _AppendFolder(PackFolder):
    """The locked folder of a pack; leaving it undoes what is not committed."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder.resolve())
        self.is_committed = False

    def __enter__(self) -> Self:
        open_pack(self.folder, index_only=True).close()  # says what is wrong, in words
        if not self.lock():
            raise FileNotFoundError(2, "the folder has just gone")
        try:
            self.old = _PackBefore(self.folder)
            self._mend()
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
                # An interrupt may strike right behind the rename: what lies there decides.
                with open_pack(self.folder, index_only=True) as pack:
                    self.is_committed = pack.identity != self.old.index.identity
            if not self.is_committed:
                self._mend()
        self.unlock()

    def digest(self, name: str) -> bytes:
        """Return the SHA-256 of a file of the pack."""
        with (self.folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    def commit(self) -> None:
        """Put the new index in place of the old, then the new parity."""
        sync_folder(self.folder)
        self._replace(_NEW_INDEX)
        self.is_committed = True
        sync_folder(self.folder)
        for name in self.names():
            if NUMBERED.fullmatch(name.removesuffix(PARTIAL_SUFFIX)) and name.endswith(
                PARTIAL_SUFFIX
            ):
                self._replace(name)
        self.remove(name for name in self.names() if UNFINISHED.fullmatch(name))
        sync_folder(self.folder)

    def _mend(self) -> None:
        """Finish or undo what a killed append left."""
        content = self.old.content
        shard_count = len(content.shard_lengths)
        for k, digest in enumerate(content.parity_digests):
            waiting = parity_name(k) + PARTIAL_SUFFIX
            if waiting in self.names() and self.digest(waiting) == digest:
                self._replace(waiting)  # its index was committed
        for name in self.names():
            found = NUMBERED.fullmatch(name)
            limit = shard_count if found and found[1] == "shard" else len(content.parity_lengths)
            if UNFINISHED.fullmatch(name) or (found and int(found[2]) >= limit):
                self.remove([name])

    def _replace(self, name: str) -> None:
        final = name.removesuffix(PARTIAL_SUFFIX)
        os.rename(name, final, src_dir_fd=self._lock, dst_dir_fd=self._lock)
