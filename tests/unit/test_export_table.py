"""Parquet and CSV: a row per event, as the trace has it."""

import csv

import pytest
from support.traces import Late, data_parallel, set_boot_id, write_run

from paceline.core.errors import Missing
from paceline.trace.export import table
from paceline.trace.export.source import first_ns
from paceline.trace.format.events import Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run

RANKS = data_parallel(3, 12, late=(Late(1, 5, 3, 9, "not_running"),))


def expected(trace, *, counters=True):
    """Return the rows, made one by one."""
    rows = []
    start_ns = first_ns(trace)
    for rank, clock in zip(trace.ranks, trace.clocks, strict=True):
        for event in sorted(rank.events, key=lambda event: int(event["begin_ns"])):
            if not counters and event["kind"] == Kind.COUNTER:
                continue
            begin, end = (clock.to_run_ns(int(event[key])) for key in ("begin_ns", "end_ns"))
            rows.append(
                {
                    "rank": rank.rank,
                    "location": rank.locations[event["location"]].name,
                    "kind": Kind(event["kind"]).name.lower(),
                    "name": rank.names[event["name"]],
                    "begin_ns": begin - start_ns,
                    "end_ns": end - start_ns,
                    "step": int(event["step"]),
                    "amount": int(event["amount"]),
                    "group": rank.groups[event["group"]].name,
                    "sequence": int(event["sequence"]),
                    "peer": int(event["peer"]) if event["peer"] >= 0 else None,
                    "tag": int(event["tag"]),
                    "flags": int(event["flags"]),
                }
            )
    return rows


@pytest.fixture
def trace(tmp_path):
    run = write_run(tmp_path, RANKS)
    set_boot_id(run / "trace" / trace_name(2), "another")
    return load_run(run)


@pytest.mark.parametrize("counters", [True, False])
def test_parquet_has_the_rows(tmp_path, trace, monkeypatch, counters):
    from pyarrow import parquet

    monkeypatch.setattr(table, "_GROUP_ROWS", 10)
    seen = []
    done = table.write_parquet(
        trace, tmp_path / "t.parquet", counters=counters, on_rank=seen.append
    )
    file = parquet.ParquetFile(done.path)
    rows = expected(trace, counters=counters)
    assert file.read().to_pylist() == rows
    assert (done.ranks, done.events, seen) == (3, len(rows), [1, 2, 3])
    assert file.num_row_groups >= len(rows) / 10  # in pieces
    assert not list(tmp_path.glob(".t*"))


def test_csv_has_the_rows(tmp_path, trace, monkeypatch):
    monkeypatch.setattr(table, "_GROUP_ROWS", 10)
    done = table.write_csv(trace, tmp_path / "t.csv")
    with done.path.open(newline="") as file:
        found = list(csv.DictReader(file))
    rows = [
        {key: "" if value is None else str(value) for key, value in row.items()}
        for row in expected(trace)
    ]
    assert found == rows
    assert done.events == len(rows)


def test_a_run_without_events_is_a_table_without_rows(tmp_path):
    from pyarrow import parquet

    trace = load_run(write_run(tmp_path, [[]]))
    assert parquet.read_table(table.write_parquet(trace, tmp_path / "x").path).num_rows == 0
    assert table.write_csv(trace, tmp_path / "y").events == 0


def test_without_pyarrow_it_says_what_to_install(tmp_path, trace, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(Missing, match=r"paceline\[parquet\].*csv"):
        table.write_parquet(trace, tmp_path / "t.parquet")
    assert not (tmp_path / "t.parquet").exists()
