"""Tar archives as a source, and WebDataset shards, which are tar archives too.

Archives are read from front to back, once (`tar.py`). In a WebDataset shard the member ``.cls`` of
a sample names the class of its other members and is no sample itself (`member_classes.py`).

Names are checked; a hard link, and a symbolic link that is followed, stands for the bytes of the
file that it leads to (`links.py`); devices and sparse files are refused.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from paceline.core.errors import NotFound, StorageError, UsageError
from paceline.store.write.sources.archive_paths import find_archives
from paceline.store.write.sources.links import FILES, HARD_LINK, LINKS, Links
from paceline.store.write.sources.member_classes import (
    MAX_CLASS_BYTES,
    ArchiveMember,
    MemberClasses,
)
from paceline.store.write.sources.source import (
    BATCH_BYTES,
    FolderTree,
    SampleCollector,
    Skipped,
    SourceBatch,
    SourceClasses,
    SourceTotals,
    check_name,
)
from paceline.store.write.sources.tar import (
    BLOCK_BYTES,
    TarHeader,
    archive_errors,
    is_compressed,
    open_archive,
    read_exactly,
    read_headers,
    skip,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray

    from paceline.store.write.sources.source import OpenSource, Symlinks

_LOG = logging.getLogger(__name__)

_LOCATING_BYTES = 16 << 10  # read at a header: a few more headers, where members are small
_HELD_BYTES = 8 * BATCH_BYTES  # of a body that waits in memory; a larger one waits in a file
FOLDERS = b"5D"  # D: with a list of its files, in incremental archives
VOLUME_LABEL = b"V"
_SKIPPED = b"2346"
_KINDS = {
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a named pipe",
    b"S": "a sparse file",
}


@dataclass(frozen=True, slots=True)
class Archives:
    """The files in tar archives, or in WebDataset shards, in the order of the archives.

    Attributes:
        paths: archives (.tar, .tar.gz, .tgz, .tar.bz2, .tar.xz, .tar.zst), patterns of them with
            braces, or a folder with archives only; a list of one or more of these.
    """

    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

    @property
    def root(self) -> None:
        """Return nothing: archives do not grow while they are packed."""
        return None

    def open(self, *, symlinks: Symlinks) -> AbstractContextManager[OpenSource]:
        """Find the archives.

        Raises:
            NotFound: there is no such archive.
            UsageError: a path names something else.
        """
        named = [self.paths] if isinstance(self.paths, str | os.PathLike) else list(self.paths)
        found = find_archives([os.fspath(path) for path in named])
        if not found:
            raise UsageError(
                "not a tar archive",
                where=", ".join(str(path) for path in named)[:500],
                fix="Give .tar files, patterns of them, or a folder with only .tar files",
            )
        return nullcontext(OpenArchives(found, symlinks))


class OpenArchives:
    """Reads the members of tar archives.

    Args:
        paths: of the archives.
        symlinks: refuse symbolic links, follow them within the archive, or skip them with all that
            is neither file nor folder.

    Raises:
        NotFound: there is no such archive.
        UsageError: a member has a name that leads out of a folder, or is neither file nor folder.
        StorageError: an archive cannot be read, or is damaged or truncated.
    """

    def __init__(self, paths: Sequence[str], symlinks: Symlinks) -> None:
        self._paths = list(paths)
        self._symlinks = symlinks
        self._link_kinds = LINKS if symlinks == "follow" else HARD_LINK
        self._has_groups = False
        self.where = self._paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        self._skipped = Skipped(self.where)
        self._begin()
        states = []
        self._is_compressed = False
        for path in self._paths:
            try:
                with archive_errors(path):
                    status = Path(path).stat()
                    self._is_compressed |= is_compressed(path)
            except StorageError as problem:
                if isinstance(problem.__cause__, FileNotFoundError):
                    raise NotFound("no such archive", where=path, fix="Check the path") from None
                raise
            states.append((os.path.realpath(path), status.st_size, status.st_mtime_ns))
        self._archive_bytes = sum(size for _, size, _ in states)
        # Another archive, or a changed one, is packed from the start.
        self.resume_key = repr(states)

    def totals(self) -> SourceTotals:
        """Return the size of the archives: their content is only known when they are read."""
        return SourceTotals(archive_bytes=self._archive_bytes, is_compressed=self._is_compressed)

    def folders(self) -> list[bytes]:
        """Return all folders, once all batches have been read."""
        return self._tree.folders()

    def classes(self) -> SourceClasses:
        """Return the classes that ``.cls`` members name, or else the top-level folders."""
        return self._classes.classes()

    def holders(self, name: bytes) -> list[str]:
        """Return the archives of the first two samples of a name; reads them once more."""
        members = self._members() if self._is_compressed else self._located_members()
        found = (self._paths[member.archive] for member in members if member.name == name)
        return list(itertools.islice(found, 2))

    def batches(self, large_bytes: int) -> Iterator[SourceBatch]:
        """Yield all samples; one larger than `large_bytes` is a batch of its own."""
        self._begin()
        collector = SampleCollector()
        for member, label in self._labelled(self._members()):
            if isinstance(member.body, bytes):
                body, is_large = member.body, member.length > large_bytes
                if is_large:
                    yield from collector.take()
                is_full = collector.add(member.name, body, label, member.mode, member.mtime_ns)
                if is_full or is_large:
                    yield from collector.take()
                continue
            yield from collector.take()
            collector.add(member.name, b"", label, member.mode, member.mtime_ns)
            for batch in collector.take():
                with member.body as file:
                    yield SourceBatch(
                        batch.samples, np.array([member.length], np.uint64), _LargeMember(file)
                    )

        yield from collector.take()

    def located(self) -> Iterator[tuple[ArchiveMember, int]]:
        """Yield all samples of archives that are not compressed, each with its label."""
        self._begin()
        return self._labelled(self._located_members())

    def _begin(self) -> None:
        self._tree = FolderTree()
        self._classes = MemberClasses(self.where, self._tree)

    def _labelled(self, members: Iterator[ArchiveMember]) -> Iterator[tuple[ArchiveMember, int]]:
        """Yield the members that are samples, each with its label."""
        archive, before = 0, b""
        for member in members:
            if member.archive != archive:
                yield from self._end_archive(archive)
                archive, before = member.archive, b""
            key = _group_key(member.name)
            if key and member.name.endswith(b".cls"):
                self._classes.name(key, member)
                continue
            self._say_that_groups_are_split(before, member.name, key)
            before = member.name
            yield member, self._classes.label(key, member.name)
        yield from self._end_archive(archive)
        self._skipped.tell()

    def _end_archive(self, archive: int) -> Iterator[tuple[ArchiveMember, int]]:
        for member in self._classes.end(self._paths[archive]):
            yield member, self._tree.label(member.name)

    def _say_that_groups_are_split(self, before: bytes, name: bytes, key: bytes) -> None:
        """Say once that members of one key, as WebDataset has them, become several samples."""
        if self._has_groups or not key or _group_key(before) != key:
            return
        if before.rpartition(b".")[2] == name.rpartition(b".")[2]:
            return  # numbered frames, for example
        self._has_groups = True
        _LOG.warning(
            "%s looks like a WebDataset: each member becomes a sample of its own (%s, %s)",
            self.where,
            os.fsdecode(before),
            os.fsdecode(name),
        )

    def _members(self) -> Iterator[ArchiveMember]:
        for archive, path in enumerate(self._paths):
            with (
                archive_errors(path),
                open_archive(path) as file,
                Links(path, _normalised, self._link_kinds) as links,
            ):
                for header in read_headers(file, path):
                    name = self._file_name(header, path)
                    if name is None:
                        skip(file, header.length + -header.length % BLOCK_BYTES)
                        continue
                    if header.kind in self._link_kinds:
                        skip(file, header.length + -header.length % BLOCK_BYTES)
                        source, size = links.open(name)
                    else:
                        source, size = file, header.length
                    body = _body(source, size, path)
                    mode, mtime_ns = _mode(header), header.mtime_ns
                    yield ArchiveMember(name, body, size, mode, mtime_ns, archive)
                    if header.kind not in self._link_kinds:
                        skip(file, -header.length % BLOCK_BYTES)

    def _located_members(self) -> Iterator[ArchiveMember]:
        for archive, path in enumerate(self._paths):
            with (
                archive_errors(path),
                io.BufferedReader(io.FileIO(path), _LOCATING_BYTES) as file,
                Links(path, _normalised, self._link_kinds) as links,
            ):
                for header in read_headers(file, path):
                    name, offset, size = self._file_name(header, path), file.tell(), header.length
                    begin, body = offset, b""
                    if header.kind in self._link_kinds and name is not None:
                        offset, size = links.locate(name)
                    if name is not None and name.endswith(b".cls"):
                        file.seek(offset)
                        body = file.read(min(size, MAX_CLASS_BYTES + 1))
                    file.seek(begin + header.length + -header.length % BLOCK_BYTES)
                    if name is not None:
                        mode, mtime_ns = _mode(header), header.mtime_ns
                        yield ArchiveMember(name, body, size, mode, mtime_ns, archive, offset)

    def _file_name(self, header: TarHeader, path: str) -> bytes | None:
        """Return the name of a file or link; None for a folder, and for what is left out.

        Raises:
            UsageError: it is something else, or has a name that leads out of a folder.
        """
        name = _normalised(header.name)
        if header.kind == VOLUME_LABEL:
            return None
        if header.kind in FOLDERS:
            if name:
                check_name(name, path)
                self._tree.add(name)
            return None
        if header.kind not in FILES and header.kind not in self._link_kinds:
            if self._symlinks == "skip" and header.kind in _SKIPPED:
                self._skipped.add(header.name)
                return None
            raise _refused(header.name, header.kind, path)
        check_name(name, path)
        return name


@dataclass(slots=True)
class _LargeMember:
    """One large sample, in a temporary file."""

    file: IO[bytes]

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Never called: a large sample is read in chunks."""
        raise AssertionError

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Write the next bytes of the sample; return their number."""
        chunk = self.file.read(len(target))
        target[: len(chunk)] = np.frombuffer(chunk, np.uint8)
        return len(chunk)

    def drop(self, count: int) -> _LargeMember:
        """Return the sample itself: all of it is dropped, or nothing."""
        return self


def _group_key(name: bytes) -> bytes:
    """Return the name up to the first dot of its last component; empty when there is none."""
    begin = name.rfind(b"/") + 1
    dot = name.find(b".", begin + 1)
    return name[:dot] if dot >= 0 else b""


def _normalised(name: bytes) -> bytes:
    """Return a name without leading ``./``, doubled slashes and a slash at the end."""
    if name.startswith(b"/"):
        return name  # refused later, not made relative
    if b"//" in name or b"./" in name or name.endswith((b"/", b"/.")) or name == b".":
        components = [part for part in name.split(b"/") if part not in (b"", b".")]
        return b"/".join(components)
    return name


def _body(file: IO[bytes], length: int, path: str) -> bytes | IO[bytes]:
    if length <= BATCH_BYTES:
        return read_exactly(file, length, path)
    held: IO[bytes] = tempfile.SpooledTemporaryFile(_HELD_BYTES)  # noqa: SIM115  # _LargeMember's reader closes it
    left = length
    while left:
        chunk = read_exactly(file, min(left, BATCH_BYTES), path)
        held.write(chunk)
        left -= len(chunk)
    held.seek(0)
    return held


def _mode(header: TarHeader) -> int:
    """Return ``st_mode`` of a member."""
    return 0o100000 | header.mode & 0o7777


def _refused(name: bytes, kind: bytes, path: str) -> UsageError:
    fix = "Make the archive without it"
    if kind == b"S":
        fix = "Make the archive without tar's --sparse (-S)"
    elif kind in _SKIPPED:
        fix = "Pack with --symlinks skip" + (", or --symlinks follow" if kind == b"2" else "")
    return UsageError(
        "the archive holds an entry of a kind that cannot be packed",
        where=f"{path}: {os.fsdecode(name)[:200]!a}",
        why=f"it is {_KINDS.get(kind, f'of the unknown kind {kind!r}')}",
        fix=fix,
    )
