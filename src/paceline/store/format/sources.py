"""What an index of data in place says of the user's own files, which are its shards.

::

    section 24  where the name of each file begins, and the end | names, end to end
    section 25  kind | names of keys | transaction | page size | meta page | last page   (32 bytes)
                size | time of the last write | inode                            (24 bytes each)

A name is relative to the folder of the index, or absolute. An index is of use only while the files
are what section 25 says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.store.format.layout import joined

_HEADER = struct.Struct("<IIQIIQ")
STATE_TYPE = np.dtype([("size", "<u8"), ("mtime_ns", "<i8"), ("inode", "<u8")])
SETTLING_NS = 20_000_000  # file times advance in steps of a few milliseconds


class SourceKind(IntEnum):
    """What data in place is."""

    FILES = 1
    LMDB = 3
    TFRECORD = 4
    TAR = 5  # 2 had other labels for numbered classes


class KeyNames(IntEnum):
    """How keys of an LMDB database became names; `paceline.store.Pack.key` reverses it."""

    PLAIN = 0
    HEX = 1
    REVERSED_HEX = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """The files of data in place, and what they were at one time.

    Attributes:
        kind: what they are.
        files: their paths, as the index has them.
        states: size, time of the last write and inode of each (0 = not known), of `STATE_TYPE`.
        key_names: of LMDB; chosen when it is indexed.
        transaction: of LMDB.
        page_bytes: of LMDB.
        cut_files: of TFRecord, files that end amid a record; of files as they are now, how many
            may. Stored as `page_bytes`.
        last_page: of LMDB.
        meta_checksum: CRC-32C of what its meta page says of the records; 0 = not known.
    """

    kind: SourceKind
    files: Sequence[bytes]
    states: NDArray[Any]
    key_names: KeyNames = KeyNames.PLAIN
    transaction: int = 0
    page_bytes: int = 0
    cut_files: int = 0
    last_page: int = 0
    meta_checksum: int = 0

    def pack(self) -> tuple[bytes, bytes]:
        """Return the sections 24 and 25."""
        offsets, names = joined(self.files)
        head = _HEADER.pack(
            self.kind,
            self.key_names,
            self.transaction,
            self.page_bytes or self.cut_files,
            self.meta_checksum,
            self.last_page,
        )
        return offsets.tobytes() + names, head + self.states.tobytes()

    @property
    def sizes(self) -> list[int]:
        """Bytes of each file."""
        sizes: list[int] = self.states["size"].tolist()
        return sizes

    def is_settled(self, now_ns: int) -> bool:
        """Return whether a write from `now_ns` on would change the time of every file."""
        ages_ns = now_ns - self.states["mtime_ns"]
        return not bool((np.abs(ages_ns) <= SETTLING_NS).any())

    def difference(self, now: Sources) -> str:
        """Return in words what is different `now`; empty if nothing is."""
        if self.kind != now.kind:
            return "it is of another kind"
        if list(self.files) != list(now.files):
            return f"it had {len(self.files):,} files, now there are {len(now.files):,}, or others"
        if self.transaction != now.transaction:
            return f"its last transaction was {self.transaction:,}, now it is {now.transaction:,}"
        if self.meta_checksum not in (0, now.meta_checksum):
            return "another database is at its path now"
        if self.cut_files > now.cut_files:
            return f"{self.cut_files:,} of its files end amid a record, which is not allowed now"
        changed = np.flatnonzero(self.states != now.states)
        if not len(changed):
            return ""
        first = int(changed[0])
        what = "was written to, or replaced"
        if self.states["size"][first] != now.states["size"][first]:
            what = f"had {self.states['size'][first]:,} bytes, now {now.states['size'][first]:,}"
        return f"{now.files[first].decode(errors='backslashreplace')} {what}"


def parse_sources(files: bytes, sources: bytes) -> Sources:
    """Return what the sections 24 and 25 of an index say, of which the reader checked the lengths.

    Raises:
        ValueError: they contradict themselves.
    """
    kind, key_names, transaction, page_bytes, meta_checksum, last_page = _HEADER.unpack_from(
        sources
    )
    states = np.frombuffer(sources, STATE_TYPE, offset=_HEADER.size)
    offsets = np.frombuffer(files, "<u8", len(states) + 1)
    names = files[offsets.nbytes :]
    bounds = offsets.tolist()
    return Sources(
        kind=SourceKind(kind),
        files=[names[begin:end] for begin, end in pairwise(bounds)],
        states=states,
        key_names=KeyNames(key_names),
        transaction=transaction,
        page_bytes=page_bytes if kind == SourceKind.LMDB else 0,
        cut_files=page_bytes if kind == SourceKind.TFRECORD else 0,
        last_page=last_page,
        meta_checksum=meta_checksum,
    )
