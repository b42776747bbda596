"""Samples from tar archives, and from WebDataset shards, which are tar archives too.

Archives are read from front to back, once, compressed or not. In a WebDataset shard the members of
one sample follow each other and share their name up to the first dot of its last part; the member
``.cls`` names the class of the others and is no sample itself.

Nothing in an archive is believed: names are checked, checksums of headers compared, and an archive
that ends too early is an error. Links, devices and sparse files are refused.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import re
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import NotFound, StorageError, UsageError
from paceline.store.write.folder import unreadable
from paceline.store.write.shards import BATCH_BYTES
from paceline.store.write.sources import Batch, Batcher, Totals, Tree, check_name, numbered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

_BLOCK = 512
_END = bytes(_BLOCK)
_READ_BYTES = 4 << 20
_MAX_HEADER_BYTES = 1 << 20  # of the extended headers, which hold a name
_MAX_CLASS_BYTES = 255
_MAX_GROUP_BYTES = 512 << 20  # of members that wait in memory for the class of their group
_MEMBER_BYTES = 512  # that a member takes beside its body
_SPOOL_BYTES = 8 * BATCH_BYTES  # of a body that waits in memory; a larger one waits in a file
_FILES = b"0\0" + b"7"
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"6": "a named pipe",
    b"S": "a sparse file",
}
_SUFFIX = re.compile(r"\.(tar(\.(gz|bz2|xz))?|tgz)$", re.IGNORECASE)
_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
}
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_archive(path: str) -> bool:
    """Return whether a path is named like a tar archive."""
    return _SUFFIX.search(path) is not None


def find_archives(paths: Sequence[str]) -> list[str]:
    """Return the archives that `paths` name; an empty list when one of them is something else.

    A path may be an archive, a pattern with braces (``train-{000..147}.tar``) or with ``*``, or a
    folder in which only archives lie.

    Raises:
        NotFound: nothing matches a pattern.
    """
    found: list[str] = []
    for path in paths:
        names = _listed(path)
        if names is not None:
            if not names or not all(is_archive(name) for name in names):
                return []
            found += [str(Path(path) / name) for name in names]
            continue
        for one in _expand(path):
            matches = _matches(one)
            if not all(is_archive(match) for match in matches):
                return []
            found += matches
    return found


def _listed(path: str) -> list[str] | None:
    """Return what lies in a folder, sorted; None if it is none."""
    try:
        return sorted(one.name for one in Path(path).iterdir())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # who packs it says so
        return None
    except OSError as problem:
        # Not passed over: read a moment later, its archives would be packed as samples.
        raise unreadable(os.fsencode(path), problem) from problem


def _matches(pattern: str) -> list[str]:
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return [pattern]
    matches = sorted(glob.glob(pattern))  # noqa: PTH207  # a pattern
    if not matches:
        raise NotFound("nothing matches the pattern", where=pattern, fix="Check the pattern")
    return matches


def _expand(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for.

    >>> _expand("a-{08..10}.tar"), _expand("{x,y}.tar")
    (['a-08.tar', 'a-09.tar', 'a-10.tar'], ['x.tar', 'y.tar'])
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    inside = braces[1]
    if span := _RANGE.fullmatch(inside):
        low, high = span.groups()
        choices = [str(k).zfill(len(low)) for k in range(int(low), int(high) + 1)]
    else:
        choices = inside.split(",")
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [one for choice in choices for one in _expand(before + choice + after)]


@dataclass(frozen=True, slots=True)
class _Member:
    """A file of an archive; `body` is a file when it is large."""

    name: bytes
    body: bytes | IO[bytes]
    length: int
    mode: int
    mtime_ns: int


class ArchiveSource:
    """The files in tar archives, in the order in which they lie there.

    Raises:
        NotFound: there is no such archive.
        UsageError: a member has a name that leads out of a folder, or is neither file nor folder.
        StorageError: an archive cannot be read, or is damaged or cut off.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)
        self._tree = Tree()
        self._class_ids: dict[bytes, int] = {}
        self.where = self._paths[0] + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        states = []
        for path in self._paths:
            try:
                status = Path(path).stat()
            except OSError as problem:
                if isinstance(problem, FileNotFoundError):
                    raise NotFound("no such archive", where=path, fix="Check the path") from None
                raise _unreadable(path, problem) from problem
            states.append((os.path.realpath(path), status.st_size, status.st_mtime_ns))
        self.kind = repr(states)  # another archive, or a changed one, is packed from the start

    def totals(self) -> Totals:
        """Return nothing: what archives hold is seen when they are read."""
        return Totals()

    def folders(self) -> list[bytes]:
        """Return all folders, once the batches are through."""
        return self._tree.folders()

    def classes(self) -> tuple[list[bytes], NDArray[np.int32] | None]:
        """Return the classes that ``.cls`` members name, or else the top-level folders."""
        if not self._class_ids:
            classes, label_map = self._tree.classes()
            return classes, label_map
        # Labels of these count down from -2: they come before it is known which kind there is.
        came = list(self._class_ids)
        numbers = all(name.isdigit() for name in came)
        ordered = sorted(came, key=lambda name: (int(name), name) if numbers else (0, name))
        classes, of_class = numbered(came, ordered)
        none = np.full(self._tree.count() + 1, -1, np.int32)
        return classes, np.concatenate([none[:-1], of_class[-2::-1], none[:1]])

    def batches(self, large_bytes: int) -> Iterator[Batch]:
        """Yield all samples; one that is larger than `large_bytes` comes alone."""
        self._tree = Tree()
        self._class_ids = {}
        batcher = Batcher()
        for member, label in self._labelled(large_bytes):
            if isinstance(member.body, bytes):
                body, is_large = member.body, member.length > large_bytes
                if is_large:
                    yield from batcher.take()
                if batcher.add(member.name, body, label, member.mode, member.mtime_ns) or is_large:
                    yield from batcher.take()
                continue
            yield from batcher.take()
            batcher.add(member.name, b"", label, member.mode, member.mtime_ns)
            for batch in batcher.take():
                with member.body as file:
                    yield Batch(
                        batch.samples, np.array([member.length], np.uint64), _FileBody(file)
                    )

        yield from batcher.take()

    def _labelled(self, large_bytes: int) -> Iterator[tuple[_Member, int]]:
        group: list[_Member] = []
        key, held_bytes = b"", 0
        for member in self._members(large_bytes):
            own_key = _group_key(member.name)
            if own_key != key or not own_key:
                yield from self._take_group(group)
                group, key, held_bytes = [], own_key, 0
            group.append(member)
            held_bytes += _MEMBER_BYTES + (member.length if member.length <= _SPOOL_BYTES else 0)
            if held_bytes > _MAX_GROUP_BYTES:  # numbered frames, say: no sample of a WebDataset
                self._refuse_class(group)
                for one in group:
                    yield one, self._tree.label(one.name)
                group = []
        yield from self._take_group(group)

    def _refuse_class(self, group: list[_Member]) -> None:
        """Refuse a class that comes when members of its group have gone by without one."""
        for one in group:
            if one.name.endswith(b".cls"):
                raise UsageError(
                    f"{one.name!r} names the class of too large a group",
                    where=self.where,
                    why="members that are named alike up to the first dot wait in memory for their "
                    f"class, up to {_MAX_GROUP_BYTES >> 20} MiB of them",
                    fix="Give fewer members one name up to the first dot",
                )

    def _take_group(self, group: list[_Member]) -> Iterator[tuple[_Member, int]]:
        """Yield the members of a group with their labels."""
        named = [one for one in group if one.name.endswith(b".cls")] if len(group) > 1 else []
        if not named:
            for member in group:
                yield member, self._tree.label(member.name)
            return
        body = named[0].body
        name = body.strip() if isinstance(body, bytes) else b""
        if len(named) > 1 or not 0 < len(name) <= _MAX_CLASS_BYTES or b"\0" in name:
            raise UsageError(
                f"{named[0].name!r} names no class",
                where=self.where,
                why=f"a .cls member holds one class in at most {_MAX_CLASS_BYTES} bytes",
                fix="Mend the archive",
            )
        number = self._class_ids.setdefault(name, len(self._class_ids))
        for member in group:
            if member is not named[0]:
                self._tree.label(member.name)
                yield member, -2 - number

    def _members(self, large_bytes: int) -> Iterator[_Member]:
        for path in self._paths:
            with _reading(path), _opened(path) as file:
                for name, kind, length, mode, mtime_ns in _headers(file, path):
                    if kind == b"5":
                        folder = _normalised(name)
                        if folder:
                            check_name(folder, path)
                            self._tree.enter(folder)
                        _skip(file, length)
                        continue
                    if kind not in _FILES:
                        raise _refused(name, kind, path)
                    name = _normalised(name)
                    check_name(name, path)
                    yield _Member(
                        name, _body(file, length, path), length, 0o100000 | mode & 0o7777, mtime_ns
                    )
                    _skip(file, -length % _BLOCK)
                while file.read(_READ_BYTES):
                    pass  # a compressed stream compares its checksum only at its very end


@dataclass(slots=True)
class _FileBody:
    """One large sample, in a temporary file."""

    file: IO[bytes]

    def fill(self, target: NDArray[np.uint8], begins: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Never called: a large sample is read in pieces."""
        raise AssertionError

    def read_into(self, target: NDArray[np.uint8]) -> int:
        """Write what comes next of the sample; return how many bytes that is."""
        piece = self.file.read(len(target))
        target[: len(piece)] = np.frombuffer(piece, np.uint8)
        return len(piece)

    def drop(self, count: int) -> _FileBody:
        """Return the sample itself: it is dropped whole or not at all."""
        return self


def _group_key(name: bytes) -> bytes:
    """Return the name up to the first dot of its last part; empty when there is none."""
    begin = name.rfind(b"/") + 1
    dot = name.find(b".", begin + 1)
    return name[:dot] if dot >= 0 else b""


def _normalised(name: bytes) -> bytes:
    """Return a name without leading ``./``, doubled slashes and a slash at the end."""
    if name.startswith(b"/"):
        return name  # refused later, not made relative
    if b"//" in name or b"./" in name or name.endswith((b"/", b"/.")) or name == b".":
        parts = [part for part in name.split(b"/") if part not in (b"", b".")]
        return b"/".join(parts)
    return name


def _headers(  # noqa: C901  # one branch a kind of header
    file: IO[bytes], path: str
) -> Iterator[tuple[bytes, bytes, int, int, int]]:
    """Yield name, kind, length, mode and mtime of each member; the caller reads its body."""
    long_name = b""
    extended: dict[bytes, bytes] = {}
    while True:
        block = file.read(_BLOCK)
        if block == _END:
            return
        if len(block) < _BLOCK:
            raise _damaged(path, "it ends without its end mark")
        if _number(block[148:156], path) != sum(block) - sum(block[148:156]) + 256:
            raise _damaged(path, "a header does not match its checksum")
        kind, length = block[156:157], _length(_number(block[124:136], path), path)
        if kind in b"LKxg":
            if length > _MAX_HEADER_BYTES:
                raise _damaged(path, f"an extended header has {length:,} bytes")
            content = _read(file, length, path)
            _skip(file, -length % _BLOCK)
            if kind == b"L":
                long_name = content.rstrip(b"\0")
            elif kind == b"x":
                extended = _records(content, path)
            continue
        name = block[:100].partition(b"\0")[0]
        prefix = block[345:500].partition(b"\0")[0]
        if prefix and block[257:263] == b"ustar\0":
            name = prefix + b"/" + name
        mtime_ns = _number(block[136:148], path) * 1_000_000_000
        if any(key.startswith(b"GNU.sparse.") for key in extended):
            kind = b"S"
        length = _length(int(extended.get(b"size", length)), path)
        if b"mtime" in extended:
            mtime_ns = round(float(extended[b"mtime"]) * 1e9)
        if not -(1 << 63) <= mtime_ns < 1 << 63:
            raise _damaged(path, "a header holds an impossible time")
        name = extended.get(b"path") or long_name or name
        if kind in b"0\0" and name.endswith(b"/"):
            kind = b"5"  # how the oldest archives mark folders
        yield name, kind, length, _number(block[100:108], path), mtime_ns
        long_name, extended = b"", {}


def _records(content: bytes, path: str) -> dict[bytes, bytes]:
    """Return the records of a pax header: ``LENGTH KEY=VALUE`` and a newline each."""
    records = {}
    while content:
        size, blank, _ = content.partition(b" ")
        if not blank or not size.isdigit() or not len(size) + 2 < int(size) <= len(content):
            raise _damaged(path, "an extended header is malformed")
        key, _, value = content[len(size) + 1 : int(size) - 1].partition(b"=")
        records[key] = value
        content = content[int(size) :]
    return records


def _number(field: bytes, path: str) -> int:
    """Return the number in a header: octal digits, or binary when the top bit is set."""
    if field[0] == 0xFF:  # a time before 1970
        return int.from_bytes(field, "big", signed=True)
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.strip(b" \0")
    try:
        return int(text, 8) if text else 0
    except ValueError:
        raise _damaged(path, "a header holds no number where one should be") from None


def _length(length: int, path: str) -> int:
    """Return `length`, which is no negative one: to a file, that would mean all that is left."""
    if length < 0:
        raise _damaged(path, "a header holds a negative length")
    return length


def _body(file: IO[bytes], length: int, path: str) -> bytes | IO[bytes]:
    if length <= BATCH_BYTES:
        return _read(file, length, path)
    held: IO[bytes] = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115  # its reader closes it
    left = length
    while left:
        piece = _read(file, min(left, BATCH_BYTES), path)
        held.write(piece)
        left -= len(piece)
    held.seek(0)
    return held


def _read(file: IO[bytes], length: int, path: str) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise _damaged(path, "it is cut off amid a member")
    return data


def _skip(file: IO[bytes], length: int) -> None:
    while length > 0:
        piece = file.read(min(length, _READ_BYTES))
        if not piece:
            return  # the next header says so
        length -= len(piece)


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    with io.BufferedReader(io.FileIO(path), _READ_BYTES) as file:
        start = file.peek(6)[:6]
        for mark, kind in _COMPRESSED.items():
            if start.startswith(mark):
                with io.BufferedReader(kind(file), _READ_BYTES) as stream:
                    yield stream
                return
        yield file


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except (StorageError, UsageError):
        raise
    except (
        EOFError,
        ValueError,
        OverflowError,
        zlib.error,
        lzma.LZMAError,
        gzip.BadGzipFile,
    ) as problem:
        raise _damaged(path, str(problem)) from problem
    except OSError as problem:
        raise _unreadable(path, problem) from problem


def _damaged(path: str, why: str) -> StorageError:
    return StorageError(
        "the archive is damaged", where=path, why=why, fix="Bring back a good copy of it"
    )


def _unreadable(path: str, problem: OSError) -> StorageError:
    return StorageError(
        "cannot read the source",
        where=path,
        why=problem.strerror or str(problem),
        fix="Make it readable",
    )


def _refused(name: bytes, kind: bytes, path: str) -> UsageError:
    return UsageError(
        "the archive holds something that is neither a file nor a folder",
        where=f"{path}: {os.fsdecode(name)[:200]!a}",
        why=f"it is {_KINDS.get(kind, f'of the unknown kind {kind!r}')}",
        fix="Make the archive without it (tar --hard-dereference -h stores what links lead to)",
    )
