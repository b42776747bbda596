"""Repairs a pack: wrong bytes, missing or truncated shards, parity files, the index, stale files.

The index holds the checksum of every sample and the digest of every file. So bytes may come from
any source (the folder that was packed, a copy of the pack, the parity files), and no bytes are
written that do not match. ::

    wrong bytes in a shard       overwritten in place, fsync; again after a kill: the same bytes
    shard missing or truncated   shard-NNNNN.pace.partial, fsync, rename, fsync of the folder
    parity file                  put in place if an append left it pending, else from the shards
    index.pace                   replaced likewise, from a copy of the pack that fits every shard
    files that no index names    removed: shards and parity files beyond the count, *.partial

A pack that is open elsewhere may be repaired: readers notice and verify again. The lock is the one
that appending takes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import (
    CorruptPack,
    NotFound,
    PacelineError,
    StorageError,
    UsageError,
    os_errors_as,
    reason,
)
from paceline.core.files import (
    LockOutcome,
    require_space,
    sync_folder,
    try_lock,
    write_all,
    write_all_at,
)
from paceline.store.care.damage import OpenFile, examine_shard
from paceline.store.care.findings import Findings, RepairReport
from paceline.store.care.repair_sources import RepairSources
from paceline.store.care.replace_file import replace_file
from paceline.store.care.shard_repair import ShardRepair
from paceline.store.format.index import IndexFile
from paceline.store.format.layout import (
    HEADER_BYTES,
    INDEX_NAME,
    PARTIAL_SUFFIX,
    FileMagic,
    file_header,
    parity_name,
)
from paceline.store.format.leftovers import pending_parity, stale_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOCK_BYTES = 4 << 20


def repair_pack(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    replica: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Repair the pack at `path` and return what was found.

    Args:
        path: the pack; it may be open elsewhere.
        source: the folder that was packed.
        replica: a copy of the pack, which may be damaged in other places.
        dry_run: write nothing.
        on_progress: called with the shards examined so far and their total.

    Raises:
        NotFound: the pack, the source or the replica does not exist.
        UsageError: the replica is of another pack; or another process appends to this pack, or
            repairs it.
        CorruptPack: the index is damaged and no replica fits.
        StorageError: a file cannot be written.

    Cost: reads the whole pack once; damaged shards twice.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  # keeps links as the user wrote them
    folder = None if source is None else Path(source)
    if folder is not None and not folder.is_dir():
        raise NotFound("no such source", where=str(folder), fix="Give the folder that was packed")
    with _locked(path), os_errors_as(lambda problem: _unwritable(path, problem)):
        repair = _Repair(path, None if replica is None else Path(replica), dry_run=dry_run)
        return repair.run(folder, on_progress)


def _unwritable(path: Path, problem: OSError) -> StorageError:
    return StorageError(
        "cannot repair the pack",
        where=str(problem.filename or path),
        why=reason(problem),
        fix="Check space and permissions, then repair again: finished repairs are kept",
    )


class _Repair:
    """One call of `repair_pack`."""

    def __init__(self, path: Path, replica: Path | None, *, dry_run: bool) -> None:
        self._path = path
        self._replica = replica
        self._dry_run = dry_run
        self._findings = Findings()
        self._index = self._find_index()

    def run(
        self, source: Path | None, on_progress: Callable[[int, int], None] | None
    ) -> RepairReport:
        """Examine every file of the pack and repair what can be repaired."""
        pending = self._place_pending_parity()
        with RepairSources(
            self._path,
            self._index,
            source=source,
            replica=self._replica,
            pending_parity=pending,
        ) as sources:
            self._repair_shards(sources, on_progress)
            self._repair_parity(sources, set(pending))
        return RepairReport(
            path=str(self._path),
            identity=self._index.identity,
            dry_run=self._dry_run,
            repaired=tuple(self._findings.repaired),
            lost=tuple(self._findings.lost),
            stale_files=self._remove_stale(pending),
        )

    # The index

    def _find_index(self) -> IndexFile:
        """Return the index, from the replica when this pack has none that can be read."""
        try:
            index = IndexFile.open(self._path)
        except UsageError as problem:
            if not isinstance(problem, NotFound) or not _has_shards(self._path):
                raise
            damage: PacelineError = problem
        except CorruptPack as problem:
            if self._path.resolve().name.endswith(PARTIAL_SUFFIX):
                raise
            damage = problem
        else:
            if (
                self._replica is not None
                and IndexFile.open(self._replica).identity != index.identity
            ):
                raise UsageError(
                    "the replica is of another pack",
                    where=str(self._replica),
                    why="their identities differ: see paceline store stat",
                    fix="Give a copy of this very pack",
                )
            return index
        return self._index_of_replica(damage)

    def _index_of_replica(self, damage: PacelineError) -> IndexFile:
        why = damage.why or damage.what
        if self._replica is None:
            raise CorruptPack(
                "the index is damaged, and only a copy of the pack can replace it",
                where=str(self._path / INDEX_NAME),
                why=why,
                fix=f"paceline store repair {self._path} --replica COPY, or pack the source again",
            )
        index = IndexFile.open(self._replica)
        if not self._is_of_this_pack(index):
            raise CorruptPack(
                "the index is damaged, and the replica's does not fit this pack's shards",
                where=str(self._path / INDEX_NAME),
                why="the replica is of another pack, or the shards are damaged as well",
                fix=f"If {self._replica} is a copy of this pack, use it in place of this pack, or "
                "copy it to a new folder",
            )
        if not self._dry_run:
            content = (self._replica / INDEX_NAME).read_bytes()
            replace_file(
                self._path / INDEX_NAME,
                lambda descriptor: write_all(descriptor, content) == len(content),
            )
        self._findings.note("the index", INDEX_NAME, why, "replica")
        return index

    def _is_of_this_pack(self, index: IndexFile) -> bool:
        return all(
            examine_shard(self._path, index, shard, extents).is_intact
            for shard, extents in enumerate(index.extents_by_shard())
        )

    # Shards

    def _repair_shards(
        self, sources: RepairSources, on_progress: Callable[[int, int], None] | None
    ) -> None:
        extents_of = list(self._index.extents_by_shard())
        damaged = []
        for shard, extents in enumerate(extents_of):
            state = examine_shard(self._path, self._index, shard, extents)
            if not state.is_intact:
                damaged.append(state)
            if on_progress is not None:
                on_progress(shard + 1, len(extents_of))
        repair = ShardRepair(
            self._path, self._index, sources, self._findings, dry_run=self._dry_run
        )
        # A repaired shard may allow to repair another one by parity: repeat until nothing changes.
        while damaged:
            left = [state for state in damaged if not repair.repair(state, extents_of[state.shard])]
            if self._dry_run or len(left) == len(damaged):
                break
            damaged = [
                examine_shard(self._path, self._index, state.shard, extents_of[state.shard])
                for state in left
            ]
            self._findings.lost.clear()

    # Parity files and stale files

    def _place_pending_parity(self) -> dict[int, Path]:
        """Rename parity files that a killed append left pending: with `dry_run`, where they lie.

        They come first: a shard may need them, and from damaged shards they could not be rebuilt.
        """
        pending = {}
        for number in pending_parity(self._path, self._index):
            final = self._path / parity_name(number)
            waiting = final.with_name(final.name + PARTIAL_SUFFIX)
            if self._dry_run:
                pending[number] = waiting
            else:
                os.rename(waiting, final)  # noqa: PTH104  # one call, where faults are injected
            why = "an append was killed before it put the file in place"
            self._findings.note(f"parity file {number}", final.name, why, "append")
        if self._findings.repaired and not self._dry_run:
            sync_folder(self._path)
        return pending

    def _repair_parity(self, sources: RepairSources, pending: set[int]) -> None:
        for number, expected in enumerate(self._index.parity_digests):
            name = parity_name(number)
            with OpenFile(self._path / name) as file:
                if file.length is not None and file.digest() == expected:
                    continue
                why = "the file is missing" if file.length is None else "its digest differs"
            if number in pending:
                continue
            is_repaired = not self._findings.lost
            if not self._dry_run:
                is_repaired = self._rebuild_parity(sources, number, expected)
            self._findings.note(f"parity file {number}", name, why, "shards" * is_repaired)

    def _rebuild_parity(self, sources: RepairSources, number: int, expected: bytes) -> bool:
        path = self._path / parity_name(number)
        byte_count = int(self._index.parity_lengths[number])
        fix = "what was repaired before stays repaired"
        require_space(path, byte_count, byte_count, what="the parity file", fix=fix)

        def fill(descriptor: int) -> bool:
            header = file_header(FileMagic.PARITY, number)
            write_all_at(descriptor, header, 0)
            length = int(self._index.parity_lengths[number]) - HEADER_BYTES
            group = self._index.parity_group_of(number * self._index.parity_group)
            for begin in range(0, length, _BLOCK_BYTES):
                block = sources.xor_of(group, begin, min(_BLOCK_BYTES, length - begin))
                if block is None:
                    return False
                write_all_at(descriptor, block, HEADER_BYTES + begin)
            with OpenFile(path.with_name(path.name + PARTIAL_SUFFIX)) as file:
                return file.digest() == expected

        return replace_file(path, fill)

    def _remove_stale(self, pending: dict[int, Path]) -> tuple[str, ...]:
        kept = {path.name for path in pending.values()}
        names = os.listdir(self._path)  # noqa: PTH208  # names, not paths
        stale = [name for name in stale_files(names, self._index) if name not in kept]
        if stale and not self._dry_run:
            for name in stale:
                (self._path / name).unlink()
            sync_folder(self._path)
        return tuple(stale)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the pack's lock: no other process can append to it or repair it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise NotFound(
            "no pack here", where=str(path), why=reason(problem), fix="Check the path"
        ) from None
    try:
        if try_lock(descriptor) is LockOutcome.HELD:
            raise UsageError(
                "the pack is being appended to or repaired",
                where=str(path),
                fix="Wait until that is done",
            )
        yield
    finally:
        os.close(descriptor)


def _has_shards(path: Path) -> bool:
    return path.is_dir() and any(path.glob("shard-*.pace"))
