"""Mends a pack: wrong bytes, shards that are missing or cut off, parity files, the index, litter.

What a place must hold is known from the index: every sample's checksum, every file's digest. So
bytes may come from anywhere (the folder that was packed, a copy of the pack, the parity files),
and nothing is written before it fits. ::

    wrong bytes in a shard       written over in place, fsync; again after a kill: the same bytes
    shard missing or cut off     shard-NNNNN.pace.partial, fsync, rename, fsync of the folder
    parity file                  likewise, from the shards, once these are whole
    index.pace                   likewise, from a copy of the pack that fits every shard here
    what no index names          removed: shards and parity files beyond the count, *.partial

A pack that is open elsewhere may be mended: readers notice and verify again. The lock is the one
that appending takes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptPack, NotFound, PacelineError, StorageError, UsageError
from paceline.core.files import LockOutcome, sync_folder, try_lock
from paceline.core.record import Record
from paceline.store.care.damage import OpenFile, ShardState, examine_shard, fits
from paceline.store.care.repair_sources import Origins
from paceline.store.format.index import IndexFile
from paceline.store.format.layout import (
    HEADER_BYTES,
    INDEX_NAME,
    NUMBERED,
    PARTIAL_SUFFIX,
    UNFINISHED,
    FileMagic,
    file_header,
    is_file_header,
    parity_name,
    shard_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray


_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding(Record):
    """One thing that was wrong: what, in which file, and whence it was mended ("" = it was not)."""

    what: str
    file: str
    why: str
    mended_from: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport(Record):
    """What `repair_pack` found and did, or with `dry_run` would do."""

    path: str
    identity: str
    dry_run: bool
    mended: tuple[Finding, ...]
    lost: tuple[Finding, ...]
    litter: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the pack is whole afterwards."""
        return not self.lost


def repair_pack(
    path: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    replica: str | os.PathLike[str] | None = None,
    dry_run: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> RepairReport:
    """Mend the pack at `path` and return what was found.

    Args:
        path: the pack; it may be open elsewhere.
        source: the folder that was packed.
        replica: a copy of the pack, which may be damaged in other places.
        dry_run: write nothing.
        on_progress: is given the shards examined so far and their total.

    Raises:
        NotFound: there is no pack, source or replica at these places.
        UsageError: the replica is of another pack; or somebody appends to or repairs this one.
        CorruptPack: the index is damaged and no replica fits.
        StorageError: a file cannot be written.

    Cost: reads the whole pack once; damaged shards twice.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100  # keeps links as the user wrote them
    copy = None if replica is None else Path(replica)
    folder = None if source is None else Path(source)
    if folder is not None and not folder.is_dir():
        raise NotFound("no such source", where=str(folder), fix="Give the folder that was packed")
    with _locked(path):
        try:
            repair = _Repair(path, folder, copy, dry_run=dry_run)
            with repair.origins:
                repair.run(on_progress)
        except PacelineError:
            raise
        except OSError as problem:
            raise StorageError(
                "cannot mend the pack",
                where=str(problem.filename or path),
                why=problem.strerror or str(problem),
                fix="Check space and rights, then run it again: what was mended stays mended",
            ) from problem
    return repair.report()


class _Repair:
    def __init__(
        self, path: Path, source: Path | None, replica: Path | None, *, dry_run: bool
    ) -> None:
        self.path = path
        self.dry_run = dry_run
        self.mended: list[Finding] = []
        self.lost: list[Finding] = []
        self.litter: list[str] = []
        self.index = self._index(replica)
        self.origins = Origins(path, self.index, source=source, replica=replica)

    def report(self) -> RepairReport:
        """Return what was found and done."""
        return RepairReport(
            path=str(self.path),
            identity=self.index.identity,
            dry_run=self.dry_run,
            mended=tuple(self.mended),
            lost=tuple(self.lost),
            litter=tuple(self.litter),
        )

    def run(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Look at every file of the pack and mend what can be mended."""
        extents_of = list(self.index.extents_by_shard())
        total = len(extents_of)
        damaged = []
        for shard, extents in enumerate(extents_of):
            state = examine_shard(self.path, self.index, shard, extents)
            if not state.whole:
                damaged.append(state)
            if on_progress is not None:
                on_progress(shard + 1, total)
        # What is mended may be what the parity of another shard was missing: until nothing changes.
        while damaged:
            left = [one for one in damaged if not self._mend(one, extents_of[one.shard])]
            if self.dry_run or len(left) == len(damaged):
                break
            damaged = [
                examine_shard(self.path, self.index, one.shard, extents_of[one.shard])
                for one in left
            ]
            self.lost.clear()
        self._parity()
        self._remove_litter()

    # The index

    def _index(self, replica: Path | None) -> IndexFile:
        """Return the index, from the replica's index when this pack has none that can be read."""
        try:
            index = IndexFile.open(self.path)
        except UsageError as problem:
            if not isinstance(problem, NotFound) or not _has_shards(self.path):
                raise
            found: PacelineError = problem
        except CorruptPack as problem:
            if self.path.resolve().name.endswith(PARTIAL_SUFFIX):
                raise
            found = problem
        else:
            if replica is not None and IndexFile.open(replica).identity != index.identity:
                raise UsageError(
                    "the replica is of another pack",
                    where=str(replica),
                    why="their identities differ: see paceline store stat",
                    fix="Give a copy of this very pack",
                )
            return index
        if replica is None:
            raise CorruptPack(
                "the index is damaged, and only a copy of the pack can replace it",
                where=str(self.path / INDEX_NAME),
                why=found.why or found.what,
                fix=f"paceline store repair {self.path} --replica COPY, or pack anew",
            )
        index = IndexFile.open(replica)
        if not self._is_of_this_pack(index):
            raise CorruptPack(
                "the index is damaged, and the replica's does not fit the shards here",
                where=str(self.path / INDEX_NAME),
                why="it is of another pack, or shards are damaged as well",
                fix=f"If it is a copy of this pack, use it: cp -r {replica} elsewhere",
            )
        if not self.dry_run:
            content = (replica / INDEX_NAME).read_bytes()
            self._replace(INDEX_NAME, lambda descriptor: _write_all(descriptor, content))
        why = found.why or found.what
        self.mended.append(
            Finding(what="the index", file=INDEX_NAME, why=why, mended_from="replica")
        )
        return index

    def _is_of_this_pack(self, index: IndexFile) -> bool:
        every = enumerate(index.extents_by_shard())
        return all(examine_shard(self.path, index, shard, one).whole for shard, one in every)

    # Shards

    def _mend(self, state: ShardState, extents: NDArray[np.int64]) -> bool:
        """Mend a shard as far as that goes; return whether it is whole then."""
        before = len(self.lost)
        if state.wrong_length:
            self._rebuild(state, extents)
        else:
            self._mend_in_place(state)
        if state.bad_digest and len(self.lost) == before:
            self._note(state, None, "", "all samples fit, but the file does not match its digest")
        return len(self.lost) == before

    def _mend_in_place(self, state: ShardState) -> None:
        name = shard_name(state.shard)
        descriptor = -1
        if not self.dry_run:
            descriptor = os.open(self.path / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for begin, content, extent, origin in self._patches(state):
                if content is not None and descriptor >= 0:
                    _write_at(descriptor, content, begin)
                why = "its bytes do not match their checksum"
                if extent is None:
                    why = "bytes beside the samples are wrong"
                self._note(state, extent, origin, why)
            if descriptor >= 0:
                os.fsync(descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _patches(self, state: ShardState) -> Iterator[tuple[int, bytes | None, int | None, str]]:
        """Yield where to write what, for which extent (None: beside them), and whence it comes."""
        if state.bad_header:
            yield 0, self._header(state.shard), None, "index"
        for extent in state.bad_extents:
            stored, origin = self.origins.stored(extent)
            yield int(self.index.offsets[extent]), stored, extent, origin
        for begin, length in state.bad_gaps:
            yield begin, bytes(length), None, "index"

    def _rebuild(self, state: ShardState, extents: NDArray[np.int64]) -> None:
        """Make a missing or cut-off shard anew, of what is left of it and what is found for it."""
        found = 0
        origins: set[str] = set()
        lost: list[int] = []
        bad = set(state.bad_extents)

        def write(descriptor: int, content: bytes, begin: int) -> None:
            if not self.dry_run:
                _write_at(descriptor, content, begin)

        def fill(descriptor: int) -> None:
            nonlocal found
            write(descriptor, self._header(state.shard), 0)
            with OpenFile(self.path / shard_name(state.shard)) as old:
                for extent in extents.tolist():
                    begin = int(self.index.offsets[extent])
                    stored: bytes | None = None
                    if extent not in bad:
                        stored = old.read(begin, int(self.index.stored_lengths[extent]))
                    if stored is None or not fits(self.index, extent, stored):
                        stored, origin = self.origins.stored(extent)
                        origins.add(origin)
                    if stored is None:
                        lost.append(extent)
                    else:
                        write(descriptor, stored, begin)
                        found += 1
            if not self.dry_run:
                os.ftruncate(descriptor, state.expected_length)

        if self.dry_run:
            fill(-1)
        else:
            self._replace(shard_name(state.shard), fill, lambda: found > 0 or not len(extents))
        if found or not len(extents):
            # Some samples may be lost; with the others the pack can be opened again.
            names = "+".join(sorted(origins - {""})) or "what was left"
            self._note(state, None, names)
            for extent in lost:
                self._note(state, extent, "", "its bytes are gone")
        else:
            self._note(state, None, "")

    def _header(self, shard: int) -> bytes:
        """Return a shard's header: the copy's, which may be of an older version, or a new one."""
        for head in self.origins.copied(shard, 0, HEADER_BYTES):
            if is_file_header(head, FileMagic.SHARD, shard):
                return head
        return file_header(FileMagic.SHARD, shard, self.index.version)

    def _note(self, state: ShardState, extent: int | None, origin: str, why: str = "") -> None:
        what = f"shard {state.shard}"
        if extent is not None:
            sample = self.index.sample_of(extent)
            what = f"sample {sample} {self.origins.name(sample)!a}"
            if len(self.index.first_extents):
                what += f", extent {extent}"
        finding = Finding(
            what=what, file=shard_name(state.shard), why=why or state.why(), mended_from=origin
        )
        (self.mended if origin else self.lost).append(finding)

    # Parity files and litter

    def _parity(self) -> None:
        for number, expected in enumerate(self.index.parity_digests):
            name = parity_name(number)
            with OpenFile(self.path / name) as file:
                if file.length is not None and file.digest() == expected:
                    continue
                why = "the file is missing" if file.length is None else "its digest differs"
            whole = not self.lost if self.dry_run else self._write_parity(number, expected)
            finding = Finding(
                what=f"parity file {number}",
                file=name,
                why=why,
                mended_from="shards" if whole else "",
            )
            (self.mended if whole else self.lost).append(finding)

    def _write_parity(self, number: int, expected: bytes) -> bool:
        def fill(descriptor: int) -> None:
            _write_at(descriptor, file_header(FileMagic.PARITY, number, self.index.version), 0)
            length = int(self.index.parity_lengths[number]) - HEADER_BYTES
            group = self.index.parity_group_of(number * self.index.parity_group)
            for begin in range(0, length, _BLOCK_BYTES):
                count = min(_BLOCK_BYTES, length - begin)
                block = self.origins.sum_of(group, begin, count)
                if block is None:
                    return
                _write_at(descriptor, block, HEADER_BYTES + begin)

        def is_whole() -> bool:
            with OpenFile(self.path / (parity_name(number) + PARTIAL_SUFFIX)) as file:
                return file.digest() == expected

        return self._replace(parity_name(number), fill, is_whole)

    def _remove_litter(self) -> None:
        counts = {
            "shard": len(self.index.shard_lengths),
            "parity": len(self.index.parity_lengths),
        }
        for name in sorted(os.listdir(self.path)):  # noqa: PTH208  # names, not paths
            numbered = NUMBERED.fullmatch(name)
            is_beyond = numbered is not None and int(numbered[2]) >= counts[numbered[1]]
            if not is_beyond and not UNFINISHED.fullmatch(name):
                continue
            self.litter.append(name)
            if not self.dry_run:
                (self.path / name).unlink()
        if self.litter and not self.dry_run:
            sync_folder(self.path)

    def _replace(
        self,
        name: str,
        fill: Callable[[int], None],
        keep: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Write a file of the pack anew with `fill` and put it in place if `keep` says so."""
        partial = self.path / (name + PARTIAL_SUFFIX)
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(partial, flags, 0o644)
            try:
                fill(descriptor)
                if not keep():
                    return False
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.rename(partial, self.path / name)  # noqa: PTH104  # one call, where faults are injected
            sync_folder(self.path)
        finally:  # after the rename there is nothing left
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the pack's lock: nobody appends to it or repairs it meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as problem:
        raise NotFound(
            "no pack here", where=str(path), why=problem.strerror or "", fix="Check the path"
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


def _write_all(descriptor: int, content: bytes) -> None:
    _write_at(descriptor, content, 0)


def _write_at(descriptor: int, content: bytes, begin: int) -> None:
    with memoryview(content) as left:
        done = 0
        while done < len(left):
            done += os.pwrite(descriptor, left[done:], begin + done)
