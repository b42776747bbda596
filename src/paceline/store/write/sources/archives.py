"""Tar archives as a source, and WebDataset shards, which are tar archives too.

Archives are read from front to back, once (`tar.py`). In a WebDataset shard the members of one
sample follow each other and share their name up to the first dot of its last component; the member
``.cls`` names the class of the others and is no sample itself.

Names are checked; a hard link stands for the bytes of the file that it leads to (`hard_links.py`);
symbolic links, devices and sparse files are refused.
"""

from __future__ import annotations

import io
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
from paceline.store.write.sources.hard_links import FILES, HARD_LINK, HardLinks
from paceline.store.write.sources.source import (
    BATCH_BYTES,
    FolderTree,
    SampleCollector,
    SourceBatch,
    SourceClasses,
    SourceTotals,
    check_name,
    label_map,
)
from paceline.store.write.sources.tar import (
    BLOCK_BYTES,
    READ_BYTES,
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

    from paceline.store.write.sources.source import OpenSource

_LOG = logging.getLogger(__name__)

_MAX_CLASS_BYTES = 255
_MAX_GROUP_BYTES = 512 << 20  # of members that are held until their group has been read
_MEMBER_BYTES = 512  # bytes that a member takes in addition to its body
_LOCATING_BYTES = 16 << 10  # read at a header: a few more headers, where members are small
_HELD_BYTES = 8 * BATCH_BYTES  # of a body that waits in memory; a larger one waits in a file
_KINDS = {
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a named pipe",
    b"S": "a sparse file",
}


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file of an archive; `body` is a file when it is large.

    Of a member that is only located, `body` is that of a class and otherwise empty, and `archive`
    and `offset` say where its bytes lie.
    """

    name: bytes
    body: bytes | IO[bytes]
    length: int
    mode: int
    mtime_ns: int
    archive: int = 0
    offset: int = 0

    @property
    def held_bytes(self) -> int:
        """How much memory the member takes."""
        if isinstance(self.body, bytes):
            return _MEMBER_BYTES + len(self.body)
        return _MEMBER_BYTES + (self.length if self.length <= _HELD_BYTES else 0)


@dataclass(frozen=True, slots=True)
class Archives:
    """The files in tar archives, or in WebDataset shards, in the order of the archives.

    Attributes:
        paths: archives (.tar, .tar.gz, .tgz, .tar.bz2, .tar.xz), patterns of them with braces, or a
            folder with archives only; a list of one or more of these.
    """

    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

    @property
    def root(self) -> None:
        """Return nothing: archives do not grow while they are packed."""
        return None

    def open(self, *, follow_symlinks: bool) -> AbstractContextManager[OpenSource]:
        """Find the archives.

        Raises:
            NotFound: there is no such archive.
            UsageError: a path names something else.
        """
        del follow_symlinks  # symbolic links in archives are refused
        named = [self.paths] if isinstance(self.paths, str | os.PathLike) else list(self.paths)
        found = find_archives([os.fspath(path) for path in named])
        if not found:
            raise UsageError(
                "not a tar archive",
                where=", ".join(str(path) for path in named)[:500],
                fix="Give .tar files, patterns of them, or a folder with only .tar files",
            )
        return nullcontext(OpenArchives(found))


class OpenArchives:
    """Reads the members of tar archives.

    Raises:
        NotFound: there is no such archive.
        UsageError: a member has a name that leads out of a folder, or is neither file nor folder.
        StorageError: an archive cannot be read, or is damaged or truncated.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._tree = FolderTree()
        self._class_ids: dict[bytes, int] = {}
        self._has_groups = False
        self.where = self._paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
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
        if not self._class_ids:
            return self._tree.classes()
        # Labels of these count down from -2: they are given before it is known which kind there is.
        first_seen = list(self._class_ids)
        numbers = all(name.isdigit() for name in first_seen)
        ordered = sorted(first_seen, key=lambda name: (int(name), name) if numbers else (0, name))
        of_class = label_map(first_seen, ordered)
        none = np.full(self._tree.count() + 1, -1, np.int32)
        return SourceClasses(ordered, np.concatenate([none[:-1], of_class[-2::-1], none[:1]]))

    def batches(self, large_bytes: int) -> Iterator[SourceBatch]:
        """Yield all samples; one larger than `large_bytes` is a batch of its own."""
        self._tree = FolderTree()
        self._class_ids = {}
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
        self._tree = FolderTree()
        self._class_ids = {}
        return self._labelled(self._located_members())

    def _labelled(self, members: Iterator[ArchiveMember]) -> Iterator[tuple[ArchiveMember, int]]:
        group: list[ArchiveMember] = []
        key, held_bytes = b"", 0
        for member in members:
            own_key = _group_key(member.name)
            if own_key != key or not own_key:
                yield from self._take_group(group)
                group, key, held_bytes = [], own_key, 0
            group.append(member)
            held_bytes += member.held_bytes
            if held_bytes > _MAX_GROUP_BYTES:  # numbered frames, for example, not one sample
                self._refuse_class(group)
                for earlier in group:
                    yield earlier, self._tree.label(earlier.name)
                group = []
        yield from self._take_group(group)

    def _refuse_class(self, group: list[ArchiveMember]) -> None:
        """Refuse a class of a group that is too large to be held until all of it has been read.

        So the class is refused wherever it stands: members before it would have been passed on
        without a class, and members after it would not get one.
        """
        for member in group:
            if member.name.endswith(b".cls"):
                raise UsageError(
                    f"{os.fsdecode(member.name)!a} names the class of too large a group",
                    where=self.where,
                    why="a class applies to all members that share its name up to the first dot; "
                    f"they are held in memory, at most {_MAX_GROUP_BYTES >> 20} MiB of them, and "
                    "these are larger",
                    fix="Split the group: give fewer members the same name up to the first dot, "
                    "each group with its own .cls member",
                )

    def _take_group(self, group: list[ArchiveMember]) -> Iterator[tuple[ArchiveMember, int]]:
        """Yield the members of a group with their labels."""
        self._say_that_groups_are_split(group)
        named = [member for member in group if member.name.endswith(b".cls")]
        if len(group) == 1:
            named = []
        if not named:
            for member in group:
                yield member, self._tree.label(member.name)
            return
        body = named[0].body
        name = body.strip() if isinstance(body, bytes) else b""
        if len(named) > 1 or not 0 < len(name) <= _MAX_CLASS_BYTES or b"\0" in name:
            raise UsageError(
                f"{os.fsdecode(named[0].name)!a} names no class",
                where=self.where,
                why=f"a .cls member holds one class in at most {_MAX_CLASS_BYTES} bytes",
                fix="Correct the archive",
            )
        number = self._class_ids.setdefault(name, len(self._class_ids))
        for member in group:
            if member is not named[0]:
                self._tree.label(member.name)
                yield member, -2 - number

    def _say_that_groups_are_split(self, group: list[ArchiveMember]) -> None:
        """Say once that members of one key, as WebDataset has them, become several samples."""
        endings = {member.name.rpartition(b".")[2] for member in group} - {b"cls"}
        if self._has_groups or len(endings) < 2:
            return
        self._has_groups = True
        _LOG.warning(
            "%s looks like a WebDataset: each member becomes a sample of its own (%s)",
            self.where,
            ", ".join(os.fsdecode(member.name) for member in group[:4]),
        )

    def _members(self) -> Iterator[ArchiveMember]:
        for path in self._paths:
            with (
                archive_errors(path),
                open_archive(path) as file,
                HardLinks(path, _normalised) as links,
            ):
                for header in read_headers(file, path):
                    name = self._file_name(header, path)
                    if name is None:
                        skip(file, header.length)
                        continue
                    if header.kind == HARD_LINK:
                        skip(file, header.length + -header.length % BLOCK_BYTES)
                        source, size = links.open(name)
                    else:
                        source, size = file, header.length
                    yield ArchiveMember(
                        name, _body(source, size, path), size, _mode(header), header.mtime_ns
                    )
                    if header.kind != HARD_LINK:
                        skip(file, -header.length % BLOCK_BYTES)
                while file.read(READ_BYTES):
                    pass  # a compressed stream compares its checksum only at its end

    def _located_members(self) -> Iterator[ArchiveMember]:
        for archive, path in enumerate(self._paths):
            with (
                archive_errors(path),
                io.BufferedReader(io.FileIO(path), _LOCATING_BYTES) as file,
                HardLinks(path, _normalised) as links,
            ):
                for header in read_headers(file, path):
                    name, offset, size = self._file_name(header, path), file.tell(), header.length
                    begin, body = offset, b""
                    if header.kind == HARD_LINK and name is not None:
                        offset, size = links.locate(name)
                    if name is not None and name.endswith(b".cls"):
                        file.seek(offset)
                        body = file.read(min(size, _MAX_CLASS_BYTES + 1))
                    file.seek(begin + header.length + -header.length % BLOCK_BYTES)
                    if name is not None:
                        mode, mtime_ns = _mode(header), header.mtime_ns
                        yield ArchiveMember(name, body, size, mode, mtime_ns, archive, offset)

    def _file_name(self, header: TarHeader, path: str) -> bytes | None:
        """Return the name of a file or hard link; None for a folder, which is noted.

        Raises:
            UsageError: it is something else, or has a name that leads out of a folder.
        """
        name = _normalised(header.name)
        if header.kind == b"5":
            if name:
                check_name(name, path)
                self._tree.add(name)
            return None
        if header.kind not in FILES and header.kind != HARD_LINK:
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
    return UsageError(
        "the archive holds an entry of a kind that cannot be packed",
        where=f"{path}: {os.fsdecode(name)[:200]!a}",
        why=f"it is {_KINDS.get(kind, f'of the unknown kind {kind!r}')}",
        fix="Make the archive without it (tar --hard-dereference -h stores what links lead to)",
    )
