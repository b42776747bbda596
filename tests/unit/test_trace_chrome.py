"""Chrome JSON: what Perfetto opens, pinned by a golden file and by the format's rules."""

import json
from pathlib import Path

import pytest
from traces import MS, Event, Late, data_parallel, write_run

from paceline.trace.export.chrome import chrome_json
from paceline.trace.format.events import COMMUNICATION, DRAIN, NOT_RUNNING, Kind
from paceline.trace.merge import load_run

GOLDEN = Path(__file__).parent.parent / "golden" / "chrome.json"


def _collective(begin_ms, end_ms, sequence, name="all_reduce", peer=-1):
    return Event(
        Kind.COLLECTIVE,
        begin_ms * MS,
        end_ms * MS,
        name,
        0,
        4096,
        "group 0",
        sequence,
        peer,
        location=COMMUNICATION,
    )


def _small_run():
    """Two overlapping all-reduces, a broadcast, a counter, nested phases; names that need care."""
    main = [
        Event(Kind.STEP, 5 * MS, 20 * MS, "step"),
        Event(Kind.INPUT, 5 * MS, 6 * MS, 'a "loader" \\ </script>\n'),
        Event(Kind.BACKWARD, 6 * MS, 18 * MS + 1, "backward"),
        Event(Kind.WAIT, 12 * MS, 17 * MS, DRAIN),
        Event(Kind.COUNTER, 5 * MS, 20 * MS, NOT_RUNNING, 0, 1234),
        Event(Kind.OPTIMIZER, 18 * MS + 1, 20 * MS),
    ]
    first = [_collective(7, 15, 1), _collective(9, 17, 2), _collective(18, 19, 3, "broadcast", 1)]
    return [main + first, [*main, _collective(8, 15, 1)]]


def _export(run, by_rank):
    return "".join(chrome_json(load_run(write_run(run, by_rank))))


def test_a_small_trace_is_exported_as_ever(tmp_path):
    assert _export(tmp_path, _small_run()) == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize("by_rank", [_small_run(), data_parallel(3, 20, late=(Late(1, 5, 3, 9),))])
def test_what_is_exported_follows_the_format(tmp_path, by_rank):
    data = json.loads(_export(tmp_path, by_rank))
    assert data["distributedInfo"]["world_size"] == len(by_rank)
    named = set()
    stacks = {}
    begins = []
    for event in data["traceEvents"]:
        assert {"ph", "pid", "tid", "ts", "name", "args"} <= event.keys()
        assert event["ph"] in {"X", "M", "C"}
        assert event["pid"] in range(len(by_rank))
        assert isinstance(event["name"], str)
        track = (event["pid"], event["tid"])
        if event["ph"] == "M" and event["name"] == "thread_name":
            named.add(track)
        if event["ph"] != "X":
            continue
        assert track in named
        assert event["dur"] >= 0
        assert event["ts"] >= 0
        begins.append(event["ts"])
        stack = stacks.setdefault(track, [])
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        assert not stack or event["ts"] + event["dur"] <= stack[-1] + 1e-3, "not nested"
        stack.append(event["ts"] + event["dur"])
    assert min(begins) == 0
    count = sum(event.kind is not Kind.COUNTER for events in by_rank for event in events)
    assert len(begins) == count


def test_collectives_carry_what_they_moved(tmp_path):
    events = json.loads(_export(tmp_path, _small_run()))["traceEvents"]
    first, second, third = (
        event for event in events if event.get("cat") == "collective" and event["pid"] == 0
    )
    assert first["args"] == {"step": 0, "bytes": 4096, "group": "group 0", "sequence": 1}
    assert third["args"]["peer"] == 1
    assert first["tid"] != second["tid"]  # they overlap
    assert third["tid"] == first["tid"]
    assert (second["ts"], second["dur"]) == (4000, 8000)


def test_an_empty_trace_is_valid_json(tmp_path):
    events = json.loads(_export(tmp_path, [[]]))["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}
