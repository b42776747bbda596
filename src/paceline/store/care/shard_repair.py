"""Repairs one shard: in place where its length is right, or rebuilt where it is not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.files import require_space, write_all_at
from paceline.store.care.damage import OpenFile, ShardState, fits
from paceline.store.care.replace_file import replace_file
from paceline.store.format.layout import (
    FILE_VERSION,
    HEADER_BYTES,
    FileMagic,
    file_header,
    is_file_header,
    shard_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from paceline.store.care.findings import Findings
    from paceline.store.care.repair_sources import RepairSources
    from paceline.store.format.index import IndexFile


@dataclass(frozen=True, slots=True)
class _Patch:
    """Bytes to write to a shard: those of an extent, or (None) those between extents."""

    begin: int
    content: bytes | None  # None: no source has it
    extent: int | None
    recovered_from: str


class ShardRepair:
    """Repairs shards of a pack, and records what it did.

    Args:
        path: the pack.
        index: index of the pack.
        sources: where lost bytes can be found.
        findings: collects what was repaired and what was not.
        dry_run: write nothing.
    """

    def __init__(
        self,
        path: Path,
        index: IndexFile,
        sources: RepairSources,
        findings: Findings,
        *,
        dry_run: bool,
    ) -> None:
        self._path = path
        self._index = index
        self._sources = sources
        self._findings = findings
        self._dry_run = dry_run

    def repair(self, state: ShardState, extents: NDArray[np.int64]) -> bool:
        """Repair a shard as far as possible; return whether it is intact then."""
        lost_before = len(self._findings.lost)
        if state.must_rebuild:
            self._rebuild(state, extents)
        else:
            self._repair_in_place(state)
        if state.bad_digest and len(self._findings.lost) == lost_before:
            why = "all samples match, but the file does not match its digest"
            self._note(state, None, "", why)
        return len(self._findings.lost) == lost_before

    def _repair_in_place(self, state: ShardState) -> None:
        descriptor = -1
        if not self._dry_run:
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(self._path / shard_name(state.shard), flags)
        try:
            for patch in self._patches(state):
                if patch.content is not None and descriptor >= 0:
                    write_all_at(descriptor, patch.content, patch.begin)
                why = "its bytes do not match their checksum"
                if patch.extent is None:
                    why = "bytes between the samples are wrong"
                self._note(state, patch.extent, patch.recovered_from, why)
            if descriptor >= 0:
                os.fsync(descriptor)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _patches(self, state: ShardState) -> Iterator[_Patch]:
        if state.bad_header:
            yield _Patch(0, self._header(state.shard), None, "index")
        for extent in state.bad_extents:
            recovered = self._sources.recover(extent)
            begin = int(self._index.offsets[extent])
            yield _Patch(begin, recovered.content, extent, recovered.source)
        for begin, length in state.bad_gaps:
            yield _Patch(begin, bytes(length), None, "index")

    def _rebuild(self, state: ShardState, extents: NDArray[np.int64]) -> None:
        """Rebuild a missing or truncated shard from what is left of it and from other sources."""
        lost: list[int] = []
        used: set[str] = set()

        def fill(descriptor: int) -> bool:
            self._write(descriptor, self._header(state.shard), 0)
            for extent, stored, source in self._collect(state, extents):
                if stored is None:
                    lost.append(extent)
                    continue
                used.add(source)
                self._write(descriptor, stored, int(self._index.offsets[extent]))
            if not self._dry_run:
                os.ftruncate(descriptor, state.expected_length)
            return len(lost) < len(extents) or not len(extents)

        path = self._path / shard_name(state.shard)
        # The file as it is stays until the new one takes its place.
        stored_bytes = int(self._index.stored_lengths[extents].sum())
        fix = "what was repaired before stays repaired"
        if not self._dry_run:
            require_space(path, stored_bytes, stored_bytes, what="the rebuilt shard", fix=fix)
        is_rebuilt = fill(-1) if self._dry_run else replace_file(path, fill)
        if not is_rebuilt:
            self._note(state, None, "")
            return
        # Some samples may be lost; with the others the pack can be opened again.
        self._note(state, None, "+".join(sorted(used - {""})) or "what was left")
        for extent in lost:
            self._note(state, extent, "", "its bytes are gone")

    def _collect(
        self, state: ShardState, extents: NDArray[np.int64]
    ) -> Iterator[tuple[int, bytes | None, str]]:
        """Yield each extent with its bytes and their source ("" = what is left of the shard)."""
        bad = set(state.bad_extents)
        with OpenFile(self._path / shard_name(state.shard)) as left:
            for extent in extents.tolist():
                if extent not in bad:
                    begin = int(self._index.offsets[extent])
                    stored = left.read(begin, int(self._index.stored_lengths[extent]))
                    if stored is not None and fits(self._index, extent, stored):
                        yield extent, stored, ""
                        continue
                recovered = self._sources.recover(extent)
                yield extent, recovered.content, recovered.source

    def _write(self, descriptor: int, content: bytes, begin: int) -> None:
        if not self._dry_run:
            write_all_at(descriptor, content, begin)

    def _header(self, shard: int) -> bytes:
        """Return a shard's header: the copy's, which may be of an older version, or a new one."""
        for head in self._sources.unchecked(shard, 0, HEADER_BYTES):
            if is_file_header(head, FileMagic.SHARD, shard):
                return head
        return file_header(FileMagic.SHARD, shard, min(self._index.version, FILE_VERSION))

    def _note(
        self, state: ShardState, extent: int | None, recovered_from: str, why: str = ""
    ) -> None:
        what = f"shard {state.shard}"
        if extent is not None:
            sample = self._index.sample_of(extent)
            what = f"sample {sample} {os.fsdecode(self._index.name(sample))!a}"
            if len(self._index.first_extents):
                what += f", extent {extent}"
        self._findings.note(what, shard_name(state.shard), why or state.why(), recovered_from)
