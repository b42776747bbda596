"""Where everything in a pack lies, as arrays: for those who look after its files.

Readers of samples use `store/read/pack.py`. `stat`, `verify --shards`, `repair` and the fault
campaigns look at the same index from the other side: which file holds which bytes, and what each
file as a whole must be. docs/reference/pack-format.md has the layout.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from paceline.native import PackReader, crc32c
from paceline.store.format.layout import DIGEST_BYTES, HEADER_BYTES, SECTION_BYTES, Section
from paceline.store.read.pack import open_pack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FILE_HEADER = struct.Struct("<8sII44x")
_TABLE_ENTRY = struct.Struct("<IIQQII")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which bytes of which file belong to what; one entry an extent, a shard or a parity file."""

    version: int
    identity: str
    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    stored_lengths: NDArray[np.uint64]
    shards: NDArray[np.uint32]
    checksums: NDArray[np.uint32]
    codecs: NDArray[np.uint8]
    first_extents: NDArray[np.uint64]  # empty: sample k is extent k
    shard_lengths: NDArray[np.uint64]
    shard_digests: tuple[bytes, ...]  # none in version 1
    parity_group: int  # shards that one parity file covers; 0 = there is none
    parity_lengths: NDArray[np.uint64]
    parity_digests: tuple[bytes, ...]

    def sample_of(self, extent: int) -> int:
        """Return the sample that an extent belongs to."""
        if not len(self.first_extents):
            return extent
        return int(np.searchsorted(self.first_extents, extent, side="right")) - 1

    def position_in_sample(self, extent: int) -> int:
        """Return how many bytes of its sample lie before an extent."""
        if not len(self.first_extents):
            return 0
        first = int(self.first_extents[self.sample_of(extent)])
        return int(self.lengths[first:extent].sum())

    def extents_by_shard(self) -> Iterator[NDArray[np.int64]]:
        """Yield for each shard its extents in the order in which they lie; empty ones left out."""
        order = np.lexsort((self.offsets, self.shards))
        order = order[self.stored_lengths[order] > 0]
        ends = np.searchsorted(self.shards[order], np.arange(len(self.shard_lengths)), side="right")
        first = 0
        for end in ends:
            yield order[first:end]
            first = int(end)

    def group_of(self, shard: int) -> range:
        """Return the shards that share a parity file with `shard`."""
        first = shard // self.parity_group * self.parity_group
        return range(first, min(first + self.parity_group, len(self.shard_lengths)))


def read_layout(path: Path) -> Layout:
    """Return the layout of the pack at `path`; its shards need not be there.

    Raises:
        PacelineError: what `open_pack` raises for an index.
    """
    open_pack(path, index_only=True).close()
    reader = PackReader(os.fsencode(path), index_only=True)

    def array(section: Section, kind: str) -> NDArray[Any]:
        return np.frombuffer(reader.section(section), kind)

    lengths = array(Section.LENGTHS, "<u8")
    stored_lengths, codecs = lengths, np.zeros(len(lengths), np.uint8)
    if reader.section(Section.CODECS):
        stored_lengths, codecs = array(Section.STORED_LENGTHS, "<u8"), array(Section.CODECS, "u1")
    parity = array(Section.PARITY, "<u8")
    return Layout(
        version=reader.version,
        identity=hashlib.sha256(reader.head).hexdigest()[:32],
        offsets=array(Section.OFFSETS, "<u8"),
        lengths=lengths,
        stored_lengths=stored_lengths,
        shards=array(Section.SHARDS, "<u4"),
        checksums=array(Section.CHECKSUMS, "<u4"),
        codecs=codecs,
        first_extents=reader.first_extents,
        shard_lengths=reader.shard_lengths,
        shard_digests=_digests(reader.section(Section.SHARD_DIGESTS)),
        parity_group=int(parity[0]) if len(parity) > 1 else 0,
        parity_lengths=parity[1:],
        parity_digests=_digests(reader.section(Section.PARITY_DIGESTS)),
    )


def file_header(magic: bytes, version: int, number: int) -> bytes:
    """Return the first 64 bytes of a shard (``PACESHRD``) or a parity file (``PACEPRTY``)."""
    head = _FILE_HEADER.pack(magic, version, number)
    return head + struct.pack("<I", crc32c(head))


def is_header(head: bytes, magic: bytes, number: int) -> bool:
    """Return whether `head` is the header of that file, in any version."""
    if len(head) != HEADER_BYTES or struct.unpack("<I", head[60:])[0] != crc32c(head[:60]):
        return False
    return head[:8] == magic and struct.unpack_from("<I", head, 12)[0] == number


def resealed(index: bytes) -> bytes:
    """Return an index whose content was changed with all its checksums in order again.

    For tests and fault campaigns: so a reader meets what no flipped bit can bring about.
    """
    content = bytearray(index)
    count = struct.unpack_from("<I", content, 12)[0]
    for k in range(count):
        at = HEADER_BYTES + k * SECTION_BYTES
        _, _, offset, length, _, _ = _TABLE_ENTRY.unpack_from(content, at)
        struct.pack_into("<I", content, at + 24, crc32c(content[offset : offset + length]))
    table = content[HEADER_BYTES : HEADER_BYTES + count * SECTION_BYTES]
    struct.pack_into("<I", content, 56, crc32c(table))
    struct.pack_into("<I", content, 60, crc32c(content[:60]))
    return bytes(content)


def sections(index: bytes) -> dict[int, tuple[int, int]]:
    """Return where each section of a whole index begins, and its length."""
    count = struct.unpack_from("<I", index, 12)[0]
    table = (
        _TABLE_ENTRY.unpack_from(index, HEADER_BYTES + k * SECTION_BYTES) for k in range(count)
    )
    return {number: (offset, length) for number, _, offset, length, _, _ in table}


def _digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[k : k + DIGEST_BYTES] for k in range(0, len(joined), DIGEST_BYTES))
