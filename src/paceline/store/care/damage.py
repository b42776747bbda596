"""Finds damage in the files of a pack, byte by byte, without opening the pack.

A reader refuses a pack with a missing or truncated shard, but repair must examine such files. Here
a shard is read as a plain file: its bytes are compared with its digest, which covers every byte,
and if that differs, each extent is compared with its checksum.
"""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.core.errors import CorruptPack
from paceline.native import crc32c
from paceline.store.format.index import IndexFile
from paceline.store.format.layout import (
    HEADER_BYTES,
    FileMagic,
    is_file_header,
    parity_name,
    shard_name,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

_BLOCK_BYTES = 4 << 20


class OpenFile:
    """A file of a pack, read by position; it may be missing, short or unreadable.

    Attributes:
        length: length in bytes; None = there is no file that can be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self.length: int | None = None
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            self.length = os.fstat(self.descriptor).st_size
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.EIO, errno.ELOOP):
                raise

    def close(self) -> None:
        """Close the file."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def read(self, offset: int, length: int) -> bytes | None:
        """Return exactly these bytes; None when they are not there or cannot be read."""
        if self.length is None or offset + length > self.length:
            return None
        blocks = []
        try:
            while length > 0:
                block = os.pread(self.descriptor, length, offset)
                if not block:
                    return None
                blocks.append(block)
                offset += len(block)
                length -= len(block)
        except OSError as problem:
            if problem.errno != errno.EIO:
                raise
            return None
        return b"".join(blocks)

    def digest(self) -> bytes | None:
        """Return the SHA-256 of the file; None when it cannot be read."""
        total = hashlib.sha256()
        for block in self.blocks(0, self.length or 0):
            if block is None:
                return None
            total.update(block)
        return total.digest()

    def blocks(self, offset: int, length: int) -> Iterator[bytes | None]:
        """Yield these bytes in blocks; a final None if they cannot be read."""
        end = offset + length
        while offset < end:
            block = self.read(offset, min(_BLOCK_BYTES, end - offset))
            yield block
            if block is None:
                return
            offset += len(block)


@dataclass(slots=True)
class ShardState:
    """The damage of a shard, if any.

    Attributes:
        shard: number of the shard.
        found_length: length of the file; None = it is missing or cannot be opened.
        expected_length: length of the file according to the index.
        bad_header: whether its first 64 bytes are wrong.
        bad_extents: numbers of the extents that do not match their checksums.
        bad_gaps: begin and length of what should be zeros between samples and is not.
        bad_digest: whether the file differs from its digest although every sample matches.
    """

    shard: int
    found_length: int | None
    expected_length: int
    bad_header: bool = False
    bad_extents: list[int] = field(default_factory=list)
    bad_gaps: list[tuple[int, int]] = field(default_factory=list)
    bad_digest: bool = False

    @property
    def is_intact(self) -> bool:
        """Whether nothing is wrong."""
        return not (
            self.must_rebuild
            or self.bad_header
            or self.bad_extents
            or self.bad_gaps
            or self.bad_digest
        )

    @property
    def must_rebuild(self) -> bool:
        """Whether the file is missing or has the wrong length, and cannot be repaired in place."""
        return self.found_length != self.expected_length

    def why(self) -> str:
        """Say it in words."""
        if self.found_length is None:
            return "the file is missing or cannot be opened"
        if self.must_rebuild:
            return f"{self.expected_length} bytes expected, {self.found_length} found"
        if self.bad_header:
            return "its header is damaged"
        if self.bad_extents:
            return f"{len(self.bad_extents)} extents do not match their checksums"
        return "its bytes between the samples do not match the digest"


def fits(index: IndexFile, extent: int, stored: bytes) -> bool:
    """Return whether `stored` has the length and checksum of `extent`."""
    if len(stored) != int(index.stored_lengths[extent]):
        return False
    body: bytes | None = stored
    if index.codecs[extent]:
        body = index.decode(extent, stored)
    return body is not None and crc32c(body) == int(index.checksums[extent])


def examine_shard(
    path: Path, index: IndexFile, shard: int, extents: NDArray[np.int64]
) -> ShardState:
    """Return the damage of a shard; reads all of the shard, damaged parts twice.

    Args:
        path: the pack.
        index: index of the pack.
        shard: number of the shard.
        extents: extents of this shard, in the order in which they lie in it.
    """
    expected = int(index.shard_lengths[shard])
    with OpenFile(path / shard_name(shard)) as file:
        state = ShardState(shard=shard, found_length=file.length, expected_length=expected)
        digest = index.shard_digests[shard] if index.shard_digests else None
        if not state.must_rebuild and digest is not None and file.digest() == digest:
            return state
        head = file.read(0, HEADER_BYTES)
        state.bad_header = head is None or not is_file_header(head, FileMagic.SHARD, shard)
        end = HEADER_BYTES
        for extent in extents.tolist():
            begin = int(index.offsets[extent])
            _examine_gap(file, state, end, begin)
            end = max(end, begin + int(index.stored_lengths[extent]))
            if not _extent_fits(file, index, extent):
                state.bad_extents.append(extent)
        _examine_gap(file, state, end, expected)
    state.bad_digest = digest is not None and state.is_intact
    return state


def verify_files(
    path: str | os.PathLike[str], on_progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[CorruptPack]]:
    """Compare the SHA-256 of each shard and parity file with the digest in the index.

    Args:
        path: the pack.
        on_progress: called with the files compared so far and their total.

    Returns:
        How many files there are to compare (none in a pack of version 1), and an error for each
        that differs.

    Cost: reads every file to its end.
    """
    path = Path(path)
    index = IndexFile.open(path)
    digests = {shard_name(k): digest for k, digest in enumerate(index.shard_digests)}
    digests |= {parity_name(k): digest for k, digest in enumerate(index.parity_digests)}
    damaged = []
    for done, (name, expected) in enumerate(digests.items(), 1):
        with OpenFile(path / name) as file:
            found = file.digest() if file.length is not None else None
        if found != expected:
            shown = "nothing that can be read" if found is None else f"{found.hex()[:16]}..."
            damaged.append(
                CorruptPack(
                    f"{name} is damaged",
                    where=str(path / name),
                    why=f"digest {expected.hex()[:16]}... expected, {shown} found",
                    fix=f"Repair it: paceline store repair {path} --source FOLDER, "
                    "or --replica COPY",
                )
            )
        if on_progress is not None:
            on_progress(done, len(digests))
    return len(digests), damaged


def _extent_fits(file: OpenFile, index: IndexFile, extent: int) -> bool:
    begin, length = int(index.offsets[extent]), int(index.stored_lengths[extent])
    if index.codecs[extent]:
        stored = file.read(begin, length)
        return stored is not None and fits(index, extent, stored)
    checksum = 0
    for block in file.blocks(begin, length):
        if block is None:
            return False
        checksum = crc32c(block, checksum)
    return checksum == int(index.checksums[extent])


def _examine_gap(file: OpenFile, state: ShardState, begin: int, end: int) -> None:
    """Record the bytes between two samples if they are not all zeros."""
    for block in file.blocks(begin, end - begin):
        if block is None or block.strip(b"\0"):
            state.bad_gaps.append((begin, end - begin))
            return
