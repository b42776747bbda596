"""Recovers lost bytes of a pack: from the packed folder, a copy of the pack, or its parity files.

No source is trusted: bytes are returned only when they match the checksum in the index. So the
source may have changed, the copy and the parity may be damaged too, and each is tried in turn.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from paceline.native import SampleEncoding, codec_available, encode, encoding_of
from paceline.store.care.damage import OpenFile, fits
from paceline.store.format.layout import HEADER_BYTES, parity_name, shard_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from paceline.store.format.index import IndexFile

_LEVELS = (3, 1, 2, 4, 5, 6, 7, 8, 9)  # the default first


class RecoveredBytes(NamedTuple):
    """The stored bytes of an extent and the source that had them; None and "" if none has."""

    content: bytes | None
    source: str


class RepairSources:
    """Finds the stored bytes of extents; a context, because it keeps files open.

    Args:
        path: the pack.
        index: index of the pack.
        source: the folder that was packed.
        replica: a copy of the pack.
        pending_parity: paths of parity files that are not in place yet, by their numbers.
    """

    def __init__(
        self,
        path: Path,
        index: IndexFile,
        *,
        source: Path | None,
        replica: Path | None,
        pending_parity: Mapping[int, Path],
    ) -> None:
        self._path = path
        self._index = index
        self._source = source
        self._replica = replica
        self._pending_parity = pending_parity
        self._open_path: Path | None = None
        self._open_file: OpenFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._close_file()

    def recover(self, extent: int) -> RecoveredBytes:
        """Return an extent's stored bytes, from the first source that has them."""
        for source, stored in self._candidates(extent):
            if fits(self._index, extent, stored):
                return RecoveredBytes(stored, source)
        return RecoveredBytes(None, "")

    def unchecked(self, shard: int, offset: int, length: int) -> Iterator[bytes]:
        """Yield what the copy and the parity have for these bytes of a shard."""
        for content in (
            self._from_replica(shard, offset, length),
            self._from_parity(shard, offset, length),
        ):
            if content is not None:
                yield content

    def xor_of(self, shards: range, offset: int, length: int) -> bytes | None:
        """Return the exclusive or of these bytes of several shards, each padded with zeros."""
        total = np.zeros(length, np.uint8)
        for shard in shards:
            room = int(self._index.shard_lengths[shard]) - offset
            if room <= 0:
                continue
            # Opened again each time: a shard may have been put in place since the last time.
            with OpenFile(self._path / shard_name(shard)) as file:
                content = file.read(offset, min(room, length))
            if content is None:
                return None
            common = total[: len(content)]
            common ^= np.frombuffer(content, np.uint8)
        return total.tobytes()

    def _candidates(self, extent: int) -> Iterator[tuple[str, bytes]]:
        index = self._index
        shard, offset = int(index.shards[extent]), int(index.offsets[extent])
        length = int(index.stored_lengths[extent])
        for stored in self._from_source(extent):
            yield "source", stored
        from_replica = self._from_replica(shard, offset, length)
        if from_replica is not None:
            yield "replica", from_replica
        from_parity = self._from_parity(shard, offset, length)
        if from_parity is not None:
            yield "parity", from_parity

    def _from_source(self, extent: int) -> Iterator[bytes]:
        name = os.fsdecode(self._index.name(self._index.sample_of(extent)))
        leads_out = name.startswith("/") or ".." in name.split("/") or "\0" in name
        if self._source is None or leads_out:
            return
        begin, length = self._index.position_in_sample(extent), int(self._index.lengths[extent])
        body = self._read(self._source / name, begin, length)
        if body is None:
            return
        code = int(self._index.codecs[extent])
        if not code:
            yield body
            return
        encoding = encoding_of(code)
        if encoding is None or not codec_available(encoding[0]):
            return
        for level in _LEVELS:
            stored = encode(
                np.frombuffer(body, np.uint8),
                np.zeros(1, np.uint64),
                np.array([len(body)], np.uint64),
                SampleEncoding(
                    codec=encoding[0],
                    level=level,
                    element_bits=encoding[1],
                    dictionary=self._index.dictionary,
                ),
            )
            length = int(stored.lengths[0])
            if stored.codecs[0] == code and length == int(self._index.stored_lengths[extent]):
                yield stored.data[:length].tobytes()

    def _from_replica(self, shard: int, offset: int, length: int) -> bytes | None:
        if self._replica is None:
            return None
        return self._read(self._replica / shard_name(shard), offset, length)

    def _from_parity(self, shard: int, offset: int, length: int) -> bytes | None:
        if not self._index.parity_group:
            return None
        group = self._index.parity_group_of(shard)
        number = shard // self._index.parity_group
        path = self._pending_parity.get(number, self._path / parity_name(number))
        with OpenFile(path) as file:
            parity = file.read(HEADER_BYTES + offset, length)
        if parity is None:
            return None
        content = np.frombuffer(parity, np.uint8).copy()
        for others in (range(group.start, shard), range(shard + 1, group.stop)):
            xor = self.xor_of(others, offset, length)
            if xor is None:
                return None
            content ^= np.frombuffer(xor, np.uint8)
        return content.tobytes()

    def _read(self, path: Path, offset: int, length: int) -> bytes | None:
        """Read from the source or the copy; the file stays open for its other extents."""
        if path != self._open_path:
            self._close_file()
            with contextlib.suppress(OSError):  # not readable: then it has nothing to recover
                self._open_file = OpenFile(path)
            self._open_path = path
        return self._open_file.read(offset, length) if self._open_file is not None else None

    def _close_file(self) -> None:
        if self._open_file is not None:
            self._open_file.close()
        self._open_file = self._open_path = None
