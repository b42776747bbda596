"""Writes a run as one flat table, Parquet or CSV: a row per event, for data frames and databases.

    rank, location, kind, name     who, where, what
    begin_ns, end_ns               on the run's clock, from the run's first event
    step, amount, flags            as the trace has them (docs/reference/trace-format.md)
    group, sequence, peer, tag     of collectives, messages and waits; no peer is empty

A rank's events are written in pieces, so that neither the run nor a rank need be held as a table.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import Missing, storage_errors
from paceline.core.files import commit_chunks, sync_folder
from paceline.trace.export.source import ExportSummary, first_ns, times_of
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.trace.export.source import TraceSource
    from paceline.trace.format.files import RankTrace

COLUMNS = (
    *("rank", "location", "kind", "name", "begin_ns", "end_ns", "step", "amount"),
    *("group", "sequence", "peer", "tag", "flags"),
)
_WORDS = ("location", "kind", "name", "group")  # columns of text
_GROUP_ROWS = 1 << 18  # of a row group, and of a piece of CSV
_KINDS = ["", *(kind.name.lower() for kind in Kind)]


def write_parquet(
    trace: TraceSource,
    path: Path,
    *,
    counters: bool = True,
    on_rank: Callable[[int], None] | None = None,
) -> ExportSummary:
    """Write a run as a Parquet file.

    Args:
        trace: the run's ranks.
        path: of the file; one that is there is replaced.
        counters: whether they are written.
        on_rank: is called with the number of ranks that are written, after each.

    Raises:
        Missing: pyarrow is not installed.
        StorageError: the file cannot be written; what was there before is unchanged.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as problem:
        raise Missing(
            "pyarrow is not installed, by which Parquet is written",
            fix="pip install 'paceline[parquet]', or export as csv",
        ) from problem
    word = pa.dictionary(pa.int32(), pa.string())
    types = dict.fromkeys(_WORDS, word) | {"begin_ns": pa.int64(), "end_ns": pa.int64()}
    types |= {"amount": pa.uint64(), "rank": pa.int32(), "peer": pa.int32(), "tag": pa.int32()}
    types |= {"step": pa.uint32(), "sequence": pa.uint32(), "flags": pa.uint8()}
    schema = pa.schema([(name, types[name]) for name in COLUMNS])

    def column(name: str, piece: _TablePart) -> Any:
        if name in _WORDS:
            numbers, words = piece.words[name]
            return pa.DictionaryArray.from_arrays(pa.array(numbers, pa.int32()), words)
        empty = piece.numbers["peer"] < 0 if name == "peer" else None
        return pa.array(piece.numbers[name], types[name], mask=empty)

    partial = path.with_name(f".{path.name}.{os.getpid()}")
    fix = "Free space or choose another path; the old content is unchanged"
    count = ranks = 0
    try:
        with storage_errors("cannot write", where=path, fix=fix):
            with parquet.ParquetWriter(partial, schema, compression="zstd") as writer:
                for ranks, pieces in enumerate(_pieces(trace, counters=counters), start=1):
                    for piece in pieces:
                        columns = [column(name, piece) for name in COLUMNS]
                        writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                        count += piece.count
                    if on_rank is not None:
                        on_rank(ranks)
            partial.replace(path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return ExportSummary(path=path, ranks=ranks, events=count)


def write_csv(
    trace: TraceSource,
    path: Path,
    *,
    counters: bool = True,
    on_rank: Callable[[int], None] | None = None,
) -> ExportSummary:
    """Write a run as a CSV file with a header; its arguments are those of `write_parquet`."""
    count = ranks = 0

    def chunks() -> Iterator[bytes]:
        nonlocal count, ranks
        yield (",".join(COLUMNS) + "\n").encode()
        for ranks, pieces in enumerate(_pieces(trace, counters=counters), start=1):
            for piece in pieces:
                count += piece.count
                yield _csv_rows(piece)
            if on_rank is not None:
                on_rank(ranks)

    commit_chunks(path, chunks())
    return ExportSummary(path=path, ranks=ranks, events=count)


def _csv_rows(piece: _TablePart) -> bytes:
    columns: list[list[Any]] = []
    for name in COLUMNS:
        if name in _WORDS:
            numbers, words = piece.words[name]
            columns.append([words[number] for number in numbers.tolist()])
        else:
            columns.append(piece.numbers[name].tolist())
    peers = COLUMNS.index("peer")
    columns[peers] = [peer if peer >= 0 else "" for peer in columns[peers]]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(zip(*columns, strict=True))
    return text.getvalue().encode("utf-8", "replace")


class _TablePart:
    """Some events of a rank, by column.

    Attributes:
        count: number of events.
        numbers: columns of numbers.
        words: columns of text: a number for each event, and the text of each number.
    """

    def __init__(
        self, rank: RankTrace, rows: np.ndarray, begin_ns: np.ndarray, end_ns: np.ndarray
    ) -> None:
        events = rank.events[rows]
        self.count = len(rows)
        same = ("step", "amount", "sequence", "peer", "tag", "flags")
        self.numbers = {name: np.ascontiguousarray(events[name]) for name in same}
        self.numbers["rank"] = np.full(len(rows), rank.rank, dtype=np.int32)
        self.numbers["begin_ns"], self.numbers["end_ns"] = begin_ns[rows], end_ns[rows]
        self.words = {
            "location": (events["location"], [place.name for place in rank.locations] or [""]),
            "kind": (events["kind"], _KINDS),
            "name": (events["name"], list(rank.names) or [""]),
            "group": (events["group"], [group.name for group in rank.groups] or [""]),
        }


def _pieces(trace: TraceSource, *, counters: bool) -> Iterator[Iterator[_TablePart]]:
    """Yield the pieces of each rank, in order of begin."""
    start_ns = first_ns(trace)
    for rank, clock in zip(trace.ranks, trace.clocks, strict=True):
        begin_ns, end_ns = (times - start_ns for times in times_of(rank, clock))
        rows = np.argsort(begin_ns, kind="stable")
        if not counters:
            rows = rows[rank.events["kind"][rows] != Kind.COUNTER]
        starts = range(0, len(rows), _GROUP_ROWS)
        yield (
            _TablePart(rank, rows[start : start + _GROUP_ROWS], begin_ns, end_ns)
            for start in starts
        )
