"""Reads tar archives from front to back, compressed or not, and checks all that they say.

Checksums of headers are compared, numbers are bounded, and an archive that ends too early is an
error. GNU and pax names, sizes and times are understood.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import Missing, PacelineError, StorageError, os_errors_as, reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_BYTES = 512
READ_BYTES = 4 << 20
_END = bytes(BLOCK_BYTES)
_MAX_HEADER_BYTES = 1 << 20  # of the extended headers, which hold a name
_COMPRESSED: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": lambda file: gzip.GzipFile(fileobj=file),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ": lzma.LZMAFile,
    b"\x28\xb5\x2f\xfd": lambda file: _open_zstd(file),
}
_CHECKSUM = re.compile(rb"[ \0]*[0-7]+[ \0]*")
_TIME = re.compile(rb"(-?)(\d+)(?:\.(\d*))?")


class TarHeader(NamedTuple):
    """The header of a member; the member's body follows, padded to blocks of 512 bytes.

    `target` is the name that a link leads to, as it stands in the archive.
    """

    name: bytes
    kind: bytes
    length: int
    mode: int
    mtime_ns: int
    target: bytes


def read_headers(  # noqa: C901  # one branch per kind of header
    file: IO[bytes], path: str
) -> Iterator[TarHeader]:
    """Yield the header of each member; the caller reads its body.

    Archives that were joined by `cat` are read to the last member of the last.

    Raises:
        StorageError: the archive is damaged or truncated, or goes on with something else.
    """
    long_name = long_target = b""
    extended: dict[bytes, bytes] = {}
    for block in _header_blocks(file, path):
        kind, length = block[156:157], _length(_number(block[124:136], path), path)
        if kind in b"LKxg":
            if length > _MAX_HEADER_BYTES:
                raise damaged_archive(path, f"an extended header has {length:,} bytes")
            content = read_exactly(file, length, path)
            skip(file, -length % BLOCK_BYTES)
            if kind == b"L":
                long_name = content.rstrip(b"\0")
            elif kind == b"K":
                long_target = content.rstrip(b"\0")
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
            mtime_ns = _pax_time_ns(extended[b"mtime"], path)
        if not -(1 << 63) <= mtime_ns < 1 << 63:
            raise damaged_archive(path, "a header holds an impossible time")
        if kind == b"1" and not extended:
            length = 0  # before pax no body follows a hard link, whatever its size field holds
        name = extended.get(b"path") or long_name or name
        target = extended.get(b"linkpath") or long_target or block[157:257].partition(b"\0")[0]
        if kind in b"0\0" and name.endswith(b"/"):
            kind = b"5"  # how the oldest archives mark folders
        yield TarHeader(name, kind, length, _number(block[100:108], path), mtime_ns, target)
        long_name, long_target, extended = b"", b"", {}


def _header_blocks(file: IO[bytes], path: str) -> Iterator[bytes]:
    """Yield the block at which `file` stands, until it has been read behind an end mark."""
    has_ended = False
    while True:
        block = file.read(BLOCK_BYTES)
        if block == _END or (has_ended and not block.strip(b"\0")):
            if not block:
                return
            has_ended = True
            continue
        if has_ended:
            if len(block) < BLOCK_BYTES or not _CHECKSUM.fullmatch(block[148:156]):
                raise damaged_archive(path, "no archive follows its end mark")
            has_ended = False
        if len(block) < BLOCK_BYTES:
            raise damaged_archive(path, "it is truncated: its end mark is missing")
        if _number(block[148:156], path) != sum(block) - sum(block[148:156]) + 256:
            raise damaged_archive(path, "a header does not match its checksum")
        yield block


def _records(content: bytes, path: str) -> dict[bytes, bytes]:
    """Return the records of a pax header: ``LENGTH KEY=VALUE`` and a newline each."""
    records = {}
    while content:
        size, blank, _ = content.partition(b" ")
        if not blank or not size.isdigit() or not len(size) + 2 < int(size) <= len(content):
            raise damaged_archive(path, "an extended header is malformed")
        key, _, value = content[len(size) + 1 : int(size) - 1].partition(b"=")
        records[key] = value
        content = content[int(size) :]
    return records


def _pax_time_ns(text: bytes, path: str) -> int:
    """Return a pax time in nanoseconds, exactly; digits beyond them are dropped.

    >>> _pax_time_ns(b"1700000000.123456789", ""), _pax_time_ns(b"-1.5", "")
    (1700000000123456789, -1500000000)
    """
    parts = _TIME.fullmatch(text.strip())
    if parts is None:
        raise damaged_archive(path, "an extended header holds a malformed time")
    sign, seconds, fraction = parts.groups()
    magnitude = int(seconds) * 1_000_000_000 + int((fraction or b"")[:9].ljust(9, b"0"))
    return -magnitude if sign else magnitude


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
        raise damaged_archive(path, "a header does not hold a number where it must") from None


def _length(length: int, path: str) -> int:
    """Return `length`; a negative one is refused: `file.read` would read to the end of the file."""
    if length < 0:
        raise damaged_archive(path, "a header holds a negative length")
    return length


def read_exactly(file: IO[bytes], length: int, path: str) -> bytes:
    """Return the next `length` bytes of an archive."""
    data = file.read(length)
    if len(data) < length:
        raise damaged_archive(path, "it is truncated within a member")
    return data


def skip(file: IO[bytes], length: int) -> None:
    """Pass over the next `length` bytes of an archive."""
    while length > 0:
        skipped = file.read(min(length, READ_BYTES))
        if not skipped:
            return  # reading the next header says so
        length -= len(skipped)


def _open_zstd(file: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise Missing(
            "zstandard is not installed, which reads .tar.zst",
            fix="Install it: pip install 'paceline[zstd]'; or decompress the archive: unzstd",
        ) from None
    return zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)


@contextmanager
def open_archive(path: str) -> Iterator[IO[bytes]]:
    """Yield the archive, decompressed."""
    with io.BufferedReader(io.FileIO(path), READ_BYTES) as file:
        start = file.peek(6)[:6]
        for mark, kind in _COMPRESSED.items():
            if start.startswith(mark):
                with io.BufferedReader(kind(file), READ_BYTES) as stream:
                    yield stream
                return
        yield file


def is_compressed(path: str) -> bool:
    """Return whether the archive's members are compressed, so that its size says little of theirs.

    Raises:
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        return file.read(6).startswith(tuple(_COMPRESSED))


@contextmanager
def archive_errors(path: str) -> Iterator[None]:
    """Let errors of reading and decompressing an archive leave the context as a StorageError."""

    def error(problem: OSError) -> StorageError:
        if problem.errno is None:  # of a decompressor, not of the system
            return damaged_archive(path, str(problem))
        return StorageError(
            "cannot read the source", where=path, why=reason(problem), fix="Make it readable"
        )

    try:
        with os_errors_as(error):
            yield
    except PacelineError:
        raise
    except _errors_of_content() as problem:
        raise damaged_archive(path, str(problem)) from problem


def _errors_of_content() -> tuple[type[Exception], ...]:
    zstandard = sys.modules.get("zstandard")  # has been loaded if it raised
    errors = (EOFError, ValueError, OverflowError, zlib.error, lzma.LZMAError)
    return errors if zstandard is None else (*errors, zstandard.ZstdError)


def damaged_archive(path: str, why: str) -> StorageError:
    """Return the error for a damaged archive."""
    return StorageError(
        "the archive is damaged", where=path, why=why, fix="Restore the archive from a copy"
    )
