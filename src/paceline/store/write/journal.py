"""What is durable of a packing under way, so that a killed one goes on from its closed shards.

::

    DST.partial/journal.partial     one JSON object a line, which counts once it is whole
        {"version": 2, "source": kind, "options": {...}}
        {"samples": all so far, "bytes": ..., "shards": [[length, digest], ...],
         "runs": [[name, checksum], ...], "listing": digest of names, sizes, times, labels so far}

A line is written when a shard is closed between two samples, after the shard and the runs of
its samples are on storage. The next packing reads the source's listing again, and keeps the shards
up to the last line whose digest it comes by as well.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import crc32c
from paceline.store.format.layout import shard_name
from paceline.store.write.shards import Shard

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.store.write.partial import PackFile
    from paceline.store.write.sorted_runs import Samples

JOURNAL_NAME = "journal.partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What one line says: all that is whole once its shards are."""

    samples: int
    bytes: int
    listing: str
    shards: list[Shard]
    runs: list[tuple[str, int]]


class ListingDigest:
    """A digest of the names, sizes, times and labels of samples, however they are cut in batches.

    Of labels too, because a class that comes or goes moves those of samples that stayed.
    """

    def __init__(self) -> None:
        self._columns = [hashlib.blake2b(digest_size=16) for _ in range(5)]

    def update(self, samples: Samples, lengths: NDArray[np.uint64], part: slice) -> None:
        """Take some samples that follow those before."""
        first, end, _ = part.indices(len(lengths))
        offsets = samples.name_offsets[first : end + 1]
        columns = (
            samples.names[int(offsets[0]) : int(offsets[-1])],
            np.diff(offsets),
            lengths[part],
            samples.mtimes_ns[part],
            samples.labels[part],
        )
        for digest, column in zip(self._columns, columns, strict=True):
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)

    def text(self) -> str:
        """Return the digest of all so far."""
        return "".join(one.hexdigest() for one in self._columns)


class Journal:
    """Appends lines to the journal of a packing."""

    def __init__(self, file: PackFile, header: dict[str, Any], entries: list[Entry]) -> None:
        self._file = file
        self._write(header)
        for entry in entries:
            self.append(entry)

    def append(self, entry: Entry) -> None:
        """Make an entry durable."""
        self._write(
            {
                "samples": entry.samples,
                "bytes": entry.bytes,
                "listing": entry.listing,
                "shards": [[one.length, one.digest.hex()] for one in entry.shards],
                "runs": entry.runs,
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.sync()


def read_journal(folder: Path, header: dict[str, Any]) -> list[Entry]:
    """Return what a packing with the same header left in `folder` and what is still there."""
    try:
        lines = (folder / JOURNAL_NAME).read_bytes().split(b"\n")[:-1]  # the last is torn or empty
        if not lines or json.loads(lines[0]) != header:
            return []
    except (OSError, ValueError):
        return []
    entries: list[Entry] = []
    shard = 0
    for line in lines[1:]:
        try:
            entry = _parse(line)
        except (ValueError, KeyError, TypeError):
            break
        is_whole = all(
            _length(folder / shard_name(shard + k)) == one.length
            for k, one in enumerate(entry.shards)
        )
        if not is_whole or not all(_is_run(folder / name, crc) for name, crc in entry.runs):
            break
        shard += len(entry.shards)
        entries.append(entry)
    return entries


def _parse(line: bytes) -> Entry:
    data = json.loads(line)
    return Entry(
        samples=int(data["samples"]),
        bytes=int(data["bytes"]),
        listing=str(data["listing"]),
        shards=[Shard(int(length), bytes.fromhex(digest)) for length, digest in data["shards"]],
        runs=[(str(name), int(checksum)) for name, checksum in data["runs"]],
    )


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_run(path: Path, checksum: int) -> bool:
    found = 0
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                found = crc32c(piece, found)
    except OSError:
        return False
    return found == checksum
