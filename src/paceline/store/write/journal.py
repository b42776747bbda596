"""The journal of a running `pack`: which shards are durable so far.

After a kill the next `pack` resumes from the journal.

::

    DST.partial/journal.partial     one JSON object per line; an incomplete last line is ignored
        {"version": 2, "source": resume key, "options": {...}}
        {"samples": count so far, "bytes": ..., "shards": [[length, digest], ...],
         "runs": [[name, checksum], ...], "listing": digest of names, sizes, times, labels so far}

A line is written when a shard is closed between two samples, after the shard and the sorted-run
files of its samples are on storage. The next `pack` reads the source's listing again, and keeps the
shards up to the last line whose digest is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.native import crc32c
from paceline.store.format.layout import shard_name
from paceline.store.write.files import FileDigest
from paceline.store.write.sources.source import SourceBatch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.store.write.columns import SampleColumns
    from paceline.store.write.files import PackFolder
    from paceline.store.write.sources.source import OpenSource

JOURNAL_NAME = "journal.partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedState:
    """How far packing had come when a shard was closed.

    Attributes:
        samples: number of samples packed so far.
        bytes: size of these samples.
        listing: digest of their names, sizes, times and labels.
        sorted_runs: name and checksum of every sorted-run file so far.
    """

    samples: int
    bytes: int
    listing: str
    sorted_runs: list[tuple[str, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class JournalEntry:
    """One line. `shards` and `sorted_runs` hold only what was added since the previous line."""

    samples: int
    bytes: int
    listing: str
    shards: list[FileDigest]
    sorted_runs: list[tuple[str, int]]


class ListingDigest:
    """A digest of the names, sizes, times and labels of samples, however batches divide them.

    Labels are included, because adding or removing a class renumbers the labels of unchanged
    samples.
    """

    def __init__(self) -> None:
        self._columns = [hashlib.blake2b(digest_size=16) for _ in range(5)]

    def update(self, samples: SampleColumns, lengths: NDArray[np.uint64]) -> None:
        """Add the next samples and their lengths."""
        columns = (
            samples.names,
            np.diff(samples.name_offsets),
            lengths,
            samples.mtimes_ns,
            samples.labels,
        )
        for digest, column in zip(self._columns, columns, strict=True):
            digest.update(np.ascontiguousarray(column).view(np.uint8).data)

    def text(self) -> str:
        """Return the digest of all samples so far."""
        return "".join(digest.hexdigest() for digest in self._columns)


class Journal:
    """Appends lines to the journal of a packing; `ShardWriter`'s syncing thread owns it.

    Args:
        folder: the folder for the file; it is `resumable` once a line is durable.
        header: the values that the next `pack` must share with this one.
        entries: lines of the previous journal that are still valid.
    """

    def __init__(
        self, folder: PackFolder, header: dict[str, Any], entries: Sequence[JournalEntry]
    ) -> None:
        self._folder = folder
        self._file = folder.create(JOURNAL_NAME)
        self._shard_count = self._sorted_run_count = 0  # in the lines so far
        self._write(header)
        for entry in entries:
            self._append(entry)

    def append(self, state: PackedState, shards: Sequence[FileDigest]) -> None:
        """Make a line durable.

        Args:
            state: how far packing has come.
            shards: all durable shards.
        """
        self._append(
            JournalEntry(
                samples=state.samples,
                bytes=state.bytes,
                listing=state.listing,
                shards=list(shards[self._shard_count :]),
                sorted_runs=state.sorted_runs[self._sorted_run_count :],
            )
        )

    def _append(self, entry: JournalEntry) -> None:
        self._write(
            {
                "samples": entry.samples,
                "bytes": entry.bytes,
                "listing": entry.listing,
                "shards": [[shard.length, shard.digest.hex()] for shard in entry.shards],
                "runs": entry.sorted_runs,
            }
        )
        self._shard_count += len(entry.shards)
        self._sorted_run_count += len(entry.sorted_runs)
        self._folder.resumable = True

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.sync()


def read_journal(folder: Path, header: dict[str, Any]) -> list[JournalEntry]:
    """Return the lines of a journal with the same header, up to the first with a damaged file."""
    try:
        lines = (
            (folder / JOURNAL_NAME).read_bytes().split(b"\n")[:-1]
        )  # the last is incomplete or empty
        if not lines or json.loads(lines[0]) != header:
            return []
    except (OSError, ValueError):
        return []
    entries: list[JournalEntry] = []
    shard = 0
    for line in lines[1:]:
        try:
            entry = _parse(line)
        except (ValueError, KeyError, TypeError):
            break
        are_complete = all(
            _length(folder / shard_name(shard + k)) == digest.length
            for k, digest in enumerate(entry.shards)
        )
        if not are_complete or not all(
            _is_intact_sorted_run(folder / name, crc) for name, crc in entry.sorted_runs
        ):
            break
        shard += len(entry.shards)
        entries.append(entry)
    return entries


def _parse(line: bytes) -> JournalEntry:
    data = json.loads(line)
    return JournalEntry(
        samples=int(data["samples"]),
        bytes=int(data["bytes"]),
        listing=str(data["listing"]),
        shards=[
            FileDigest(int(length), bytes.fromhex(digest)) for length, digest in data["shards"]
        ],
        sorted_runs=[(str(name), int(checksum)) for name, checksum in data["runs"]],
    )


def _length(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_intact_sorted_run(path: Path, checksum: int) -> bool:
    found = 0
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                found = crc32c(block, found)
    except OSError:
        return False
    return found == checksum


@dataclass(slots=True)
class ResumePoint:
    """Where packing begins.

    That is after the samples that `entries` record as durable, or at the source's start.

    Attributes:
        entries: lines of the journal that are valid for the source as it is now.
        listing: digest of the samples that were passed over.
        batches: the samples that remain to be packed.
    """

    entries: list[JournalEntry]
    batches: Iterator[SourceBatch]
    listing: ListingDigest = field(default_factory=ListingDigest)


def resume(source: OpenSource, entries: list[JournalEntry], large_bytes: int) -> ResumePoint:
    """Pass over the samples that are already packed, as far as the source still has them.

    Args:
        source: the source, which is read again from its start.
        entries: lines of the journal that a killed `pack` left.
        large_bytes: as in `OpenSource.batches`.
    """
    while True:
        point = ResumePoint(entries, source.batches(large_bytes))
        held = _pass_over(point)
        if held == len(entries):
            return point
        entries = entries[:held]  # the source differs from there on: read it from the start


def _pass_over(point: ResumePoint) -> int:
    """Move the point past the samples of its entries; return how many entries match the source."""
    passed = 0
    batch: SourceBatch | None = None
    for number, entry in enumerate(point.entries):
        while passed < entry.samples:
            if batch is None or not len(batch):
                batch = next(point.batches, None)
                if batch is None:
                    return number
            count = min(entry.samples - passed, len(batch))
            point.listing.update(batch.samples[:count], batch.lengths[:count])
            batch = batch.drop(count)
            passed += count
        if point.listing.text() != entry.listing:
            return number
    if batch is not None and len(batch):
        point.batches = chain([batch], point.batches)
    return len(point.entries)
