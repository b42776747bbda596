"""Chrome JSON: what Perfetto opens, pinned by a golden file and by the format's rules."""

import json
from pathlib import Path

import pytest
from support.traces import MS, Event, Late, data_parallel, write_run

from paceline.trace.export.chrome import chrome_json
from paceline.trace.format.events import BY_RUN, COMMUNICATION, DRAIN, NOT_RUNNING, Kind
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
        assert event["ph"] in {"X", "M", "C", "s", "f"}
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


def _messages():
    """Two messages from rank 0 to rank 1: the receive of the first is issued before its send."""
    fields = {"location": COMMUNICATION, "group": "world", "members": (0, 1), "amount": 8, "tag": 4}

    def message(kind, begin_ms, end_ms, peer, sequence):
        span = begin_ms * MS, end_ms * MS
        return Event(kind, *span, kind.name.lower(), 0, peer=peer, sequence=sequence, **fields)

    return [
        [message(Kind.SEND, 10, 11, 1, 1), message(Kind.SEND, 12, 13, 1, 2)],
        [message(Kind.RECV, 5, 12, 0, 1), message(Kind.RECV, 15, 16, 0, 2)],
    ]


def test_an_arrow_leads_from_a_send_to_its_receive(tmp_path):
    lost = Event(Kind.RECV, 20 * MS, 21 * MS, "recv", group="world", peer=0, sequence=3)
    sends, receives = _messages()
    events = json.loads(_export(tmp_path, [sends, [*receives, lost]]))["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    arrows = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in arrows:
            assert event["id"] not in arrows[event["ph"]]
            arrows[event["ph"]][event["id"]] = event
    assert arrows["s"].keys() == arrows["f"].keys()
    assert len(arrows["s"]) == 2  # the receive without a send has none
    for number, begin in arrows["s"].items():
        end = arrows["f"][number]
        assert (begin["pid"], end["pid"]) == (0, 1)
        assert (begin["name"], begin["cat"]) == (end["name"], end["cat"])  # or they do not join
        assert begin["ts"] <= end["ts"]
        assert end["bp"] == "e"  # of the slice around it
        for event in (begin, end):
            around = [
                s
                for s in slices
                if (s["pid"], s["tid"]) == (event["pid"], event["tid"])
                and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]
            assert len(around) == 1
    assert sorted(event["ts"] for event in arrows["f"].values()) == [5000, 10000]


def test_what_ran_is_told(tmp_path):
    information = json.loads(_export(tmp_path, _small_run()))["distributedInfo"]
    assert information == {"rank": 0, "world_size": 2, "ranks": [0, 1]}
    end = Event(Kind.STEP, 5 * MS, 20 * MS, BY_RUN)
    information = json.loads(_export(tmp_path / "mpi", [[end], [end]]))["distributedInfo"]
    assert information["backend"] == "mpi"


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
