"""Where lost bytes of a pack can be had again: its source, a copy of it, its parity files.

Nobody is believed: a piece is handed out only when it matches the checksum in the index. So the
source may have changed, the copy and the parity may be damaged too, and each is asked in turn.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Self

import numpy as np

from paceline.native import zstd_available, zstd_compress
from paceline.store.care.damage import OpenFile, fits
from paceline.store.format.layout import HEADER_BYTES, parity_name, shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from paceline.store.format.index import IndexFile


_LEVELS = (3, 1, 2, 4, 5, 6, 7, 8, 9)  # of zstd, the default first


class Origins:
    """Finds the stored bytes of extents; use it as a context, it keeps files open."""

    def __init__(
        self,
        path: Path,
        index: IndexFile,
        *,
        source: Path | None,
        replica: Path | None,
    ) -> None:
        self._path = path
        self._index = index
        self._source = source
        self._replica = replica
        self._open_path: Path | None = None
        self._open_file: OpenFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._forget()

    def name(self, sample: int) -> str:
        """Return a sample's name."""
        return os.fsdecode(self._index.name(sample))

    def stored(self, extent: int) -> tuple[bytes | None, str]:
        """Return an extent's stored bytes and whence they are; None and "" if nobody has them."""
        for origin, stored in self._candidates(extent):
            if fits(self._index, extent, stored):
                return stored, origin
        return None, ""

    def copied(self, shard: int, offset: int, length: int) -> Iterator[bytes]:
        """Yield what the copy and the parity have for these bytes of a shard, unchecked."""
        if self._replica is not None:
            found = self._read(self._replica / shard_name(shard), offset, length)
            if found is not None:
                yield found
        if self._index.parity_group:
            found = self._from_parity(shard, offset, length)
            if found is not None:
                yield found

    def sum_of(self, shards: range, offset: int, length: int) -> bytes | None:
        """Return the XOR of these bytes of several shards, each as if followed by zeros."""
        total = np.zeros(length, np.uint8)
        for shard in shards:
            room = int(self._index.shard_lengths[shard]) - offset
            if room <= 0:
                continue
            # Opened anew each time: a shard may have been put in place meanwhile.
            with OpenFile(self._path / shard_name(shard)) as file:
                piece = file.read(offset, min(room, length))
            if piece is None:
                return None
            part = total[: len(piece)]
            part ^= np.frombuffer(piece, np.uint8)
        return total.tobytes()

    def _candidates(self, extent: int) -> Iterator[tuple[str, bytes]]:
        index = self._index
        shard, offset = int(index.shards[extent]), int(index.offsets[extent])
        length = int(index.stored_lengths[extent])
        if self._source is not None:
            for stored in self._from_source(extent):
                yield "source", stored
        if self._replica is not None:
            found = self._read(self._replica / shard_name(shard), offset, length)
            if found is not None:
                yield "replica", found
        if index.parity_group:
            found = self._from_parity(shard, offset, length)
            if found is not None:
                yield "parity", found

    def _from_source(self, extent: int) -> Iterator[bytes]:
        assert self._source is not None
        name = self.name(self._index.sample_of(extent))
        parts = name.split("/")
        if name.startswith("/") or ".." in parts or "\0" in name:
            return
        begin, length = (
            self._index.position_in_sample(extent),
            int(self._index.lengths[extent]),
        )
        body = self._read(self._source / name, begin, length)
        if body is None:
            return
        if not self._index.codecs[extent]:
            yield body
            return
        for level in _LEVELS if zstd_available() else ():
            stored = zstd_compress(np.frombuffer(body, np.uint8), level)
            if len(stored) == int(self._index.stored_lengths[extent]):
                yield stored

    def _from_parity(self, shard: int, offset: int, length: int) -> bytes | None:
        group = self._index.parity_group_of(shard)
        path = self._path / parity_name(shard // self._index.parity_group)
        with OpenFile(path) as file:
            parity = file.read(HEADER_BYTES + offset, length)
        if parity is None:
            return None
        others = np.frombuffer(parity, np.uint8).copy()
        for part in (range(group.start, shard), range(shard + 1, group.stop)):
            found = self.sum_of(part, offset, length)
            if found is None:
                return None
            others ^= np.frombuffer(found, np.uint8)
        return others.tobytes()

    def _read(self, path: Path, offset: int, length: int) -> bytes | None:
        """Read from the source or the copy; the file stays open for its neighbours' sake."""
        if path != self._open_path:
            self._forget()
            with contextlib.suppress(OSError):  # not readable: then it has nothing for us
                self._open_file = OpenFile(path)
            self._open_path = path
        return self._open_file.read(offset, length) if self._open_file is not None else None

    def _forget(self) -> None:
        if self._open_file is not None:
            self._open_file.close()
        self._open_file = self._open_path = None
