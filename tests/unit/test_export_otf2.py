"""OTF2 archives of hand-made traces, read by the otf2 package and by otf2-print."""

import ctypes
import dataclasses
import importlib
import inspect
import os
import re
import subprocess

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.otf2_archives import check_archive, printed, read
from support.traces import MS, Event, Late, data_parallel, pipelined, set_boot_id, write_run

from paceline.core.errors import Missing, StorageError
from paceline.schedules.pipeline import StageCosts, one_forward_one_backward
from paceline.trace.export import otf2_library
from paceline.trace.export.otf2 import write_otf2
from paceline.trace.export.otf2_events import exchanged
from paceline.trace.export.source import SpooledSource, first_ns
from paceline.trace.format.events import BLOCKING, COMMUNICATION, Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run
from paceline.trace.merge.windows import SpooledRun

BEGIN = 10**12


def export(folder, by_rank, **options):
    trace = load_run(write_run(folder, by_rank))
    return trace, write_otf2(trace, folder / "otf2", **options)


def message(kind, begin, end, peer, sequence=1, *, tag=3, flags=0, **fields):
    name = fields.pop("name", kind.name.lower())
    return Event(
        *(kind, BEGIN + begin, BEGIN + end, name, 0, 64, "world", sequence, peer, tag),
        **{"location": COMMUNICATION, "flags": flags, "members": (0, 1), **fields},
    )


def test_training_is_exported_as_regions_and_collectives(tmp_path):
    late = (Late(1, 5, 3, 9, "not_running"),)
    trace, done = export(tmp_path, data_parallel(3, 20, late=late))
    archive = check_archive(done.path, trace)
    assert (done.ranks, done.cautions) == (3, ())
    assert done.events == sum(len(events) for events in archive.events.values())
    assert set(archive.names.values()) == {"main"}
    assert archive.types == dict.fromkeys(range(3), "CPU_THREAD")
    regions = [e.region.name for e in archive.events[0] if type(e).__name__ == "Enter"]
    assert regions[:4] == ["step", "loader", "forward", "backward"]
    metrics = [event for event in archive.events[1] if type(event).__name__ == "Metric"]
    assert {(event.values[0], event.metric.members[0].unit) for event in metrics} == {
        (5 * MS, "ns")
    }


def test_a_run_that_is_read_rank_by_rank_gives_the_same_archive(tmp_path):
    late = (Late(1, 5, 3, 9, "not_running"),)
    trace, done = export(tmp_path, data_parallel(3, 20, late=late))
    with SpooledRun(tmp_path) as spooled:
        again = write_otf2(SpooledSource(spooled), tmp_path / "again")
        assert first_ns(SpooledSource(spooled)) == first_ns(trace)
    assert printed(again.path) == printed(done.path)
    check_archive(again.path, trace)


def test_counters_can_be_left_out(tmp_path):
    late = (Late(1, 5, 3, 9, "not_running"),)
    trace, done = export(tmp_path, data_parallel(2, 12, late=late), counters=False)
    check_archive(done.path, trace, counters=False)


def test_messages_of_a_pipeline_have_both_sides(tmp_path):
    schedule = one_forward_one_backward(3, 4)
    costs = StageCosts(forward_s=(0.002,) * 3, backward_s=(0.004,) * 3)
    trace, done = export(tmp_path, pipelined(schedule, costs, steps=3))
    archive = check_archive(done.path, trace)
    names = {type(event).__name__ for events in archive.events.values() for event in events}
    assert {"MpiIrecv", "MpiIrecvRequest"} <= names


def test_calls_that_block_are_not_requests(tmp_path):
    first = [
        message(Kind.SEND, 10, 20, 1, flags=BLOCKING),
        message(Kind.SEND, 30, 90, 1, 2),
        message(Kind.COLLECTIVE, 100, 120, -1, tag=0, name="barrier", flags=BLOCKING),
        message(Kind.COLLECTIVE, 130, 150, 1, 2, tag=0, name="broadcast"),
    ]
    second = [
        message(Kind.RECV, 5, 25, 0, flags=BLOCKING),
        message(Kind.RECV, 26, 80, 0, 2),
        message(Kind.COLLECTIVE, 90, 120, -1, tag=0, name="barrier", flags=BLOCKING),
        message(Kind.COLLECTIVE, 121, 150, 1, 2, tag=0, name="broadcast"),
    ]
    trace, done = export(tmp_path, [first, second])
    archive = check_archive(done.path, trace)
    assert [type(event).__name__ for event in archive.events[0]] == [
        *("Enter", "MpiSend", "Leave", "MpiIsend", "MpiIsendComplete"),
        *("Enter", "MpiCollectiveBegin", "MpiCollectiveEnd", "Leave"),
        *("NonBlockingCollectiveRequest", "NonBlockingCollectiveComplete"),
    ]
    assert [type(event).__name__ for event in archive.events[1]] == [
        *("Enter", "MpiRecv", "Leave", "MpiIrecvRequest", "MpiIrecv"),
        *("Enter", "MpiCollectiveBegin", "MpiCollectiveEnd", "Leave"),
        *("NonBlockingCollectiveRequest", "NonBlockingCollectiveComplete"),
    ]
    *_, given, got = (archive.events[rank][-1] for rank in (1, 0))
    assert (given.size_sent, given.size_received, given.root) == (64, 0, 1)
    assert (got.size_sent, got.size_received) == (0, 64)


def test_one_sided_accesses_are_of_a_window(tmp_path):
    fields = {"group": "MPI_COMM_WORLD window 1"}
    accesses = [
        dataclasses.replace(message(kind, at, at + 2, 1, tag=tag, name=name), **fields)
        for kind, at, tag, name in (
            (Kind.SEND, 10, 1, "put"),
            (Kind.RECV, 20, 2, "get"),
            (Kind.SEND, 30, 3, "accumulate"),
        )
    ]
    trace, done = export(tmp_path, [accesses, []])
    archive = check_archive(done.path, trace)
    events = archive.events[0]
    assert [type(event).__name__ for event in events[::2]] == ["RmaPut", "RmaGet", "RmaAtomic"]
    assert {event.win.name for event in events} == {"MPI_COMM_WORLD window 1"}
    assert [event.remote for event in events[::2]] == [1, 1, 1]
    assert (events[0].bytes, events[2].bytes, events[4].bytes_sent) == (64, 64, 64)
    assert [e.matching_id for e in events[::2]] == [e.matching_id for e in events[1::2]]


def test_a_message_whose_other_side_is_not_known_is_left_out_and_said(tmp_path):
    _, done = export(tmp_path, [[message(Kind.RECV, 10, 20, -1)], []])
    assert "1 messages were left out" in done.cautions[0]
    assert not any(read(done.path).events.values())


def test_ranks_without_a_trace_are_locations_without_events(tmp_path):
    run = write_run(tmp_path, data_parallel(3, 6))
    (run / "trace" / trace_name(1)).unlink()
    trace = load_run(run)
    done = write_otf2(trace, tmp_path / "otf2")
    archive = check_archive(done.path, trace)
    assert (done.ranks, archive.names[1], archive.events[1]) == (2, "main (no trace)", [])


def test_ranks_lie_below_their_nodes(tmp_path):
    run = write_run(tmp_path, data_parallel(4, 6))
    for rank in (2, 3):
        set_boot_id(run / "trace" / trace_name(rank), "another")
    trace = load_run(run)
    archive = check_archive(write_otf2(trace, tmp_path / "otf2").path, trace)
    assert archive.nodes == {0: "node 0", 1: "node 0", 2: "node 1", 3: "node 1"}


def test_an_archive_is_replaced_as_a_whole(tmp_path):
    (tmp_path / "otf2").mkdir()
    (tmp_path / "otf2" / "old").touch()
    export(tmp_path, data_parallel(2, 3))
    found = sorted(path.name for path in (tmp_path / "otf2").iterdir())
    assert found == ["traces", "traces.def", "traces.otf2"]
    assert not list(tmp_path.glob(".otf2*"))


def test_a_full_disk_leaves_what_was_there(tmp_path, capfd):
    """Some functions of OTF2 print an error and return none: the archive would lack events."""
    if os.geteuid():
        pytest.skip("mounting a tmpfs needs root")
    trace, _ = export(tmp_path, data_parallel(2, 4000))
    small = tmp_path / "small"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", small], check=False)
    if done.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        few = load_run(write_run(tmp_path / "few", data_parallel(2, 3)))
        write_otf2(few, small / "otf2")
        before = sorted(small.rglob("*"))
        with pytest.raises(StorageError, match="No space left on device") as raised:
            write_otf2(trace, small / "otf2")
        assert raised.value.where == str(small / "otf2")
        assert sorted(small.rglob("*")) == before
        check_archive(small / "otf2" / "traces.otf2", few)
    finally:
        subprocess.run(["umount", small], check=True)
    assert capfd.readouterr().err == ""
    check_archive(write_otf2(few, tmp_path / "after").path, few)  # errors are those of one archive


def test_without_otf2_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(otf2_library, "_packaged", list)
    monkeypatch.setattr(otf2_library, "_SYSTEM_NAMES", ("libnothing.so",))
    with pytest.raises(Missing, match=r"pip install 'paceline\[otf2\]'"):
        export(tmp_path, data_parallel(2, 3))
    monkeypatch.setattr(otf2_library, "_SYSTEM_NAMES", ("libm.so.6",))
    with pytest.raises(Missing, match="not installed"):
        otf2_library.find_otf2()
    assert not list(tmp_path.glob("*otf2*"))


def test_the_library_takes_what_it_is_given():
    """The types of arguments that the package's own bindings declare are those that we do."""
    for what, types in otf2_library._DEFINITIONS.items():
        _check_prototype("GlobalDefWriter", f"Write{what}", types)
    for what, types in otf2_library._ARCHIVE.items():
        _check_prototype("Archive", what, types)


def _check_prototype(module, what, types):
    bindings = importlib.import_module(f"_otf2.{module}")
    found = re.search(rf"c_{what}\.argtypes = \[(.*?)\]", inspect.getsource(bindings))
    if found is None:  # it has an array, of a type that is made when it is called
        assert what in ("WriteMetricClass", "WriteGroup", "SetFlushCallbacks")
        return
    text = found[1].replace("StrParam", "ctypes.c_char_p")
    declared = eval(f"[{text}]", vars(bindings))
    sizes = [ctypes.sizeof(kind) for kind in declared[1:]]
    assert sizes == [ctypes.sizeof(kind) for kind in types], what


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=14))
@settings(max_examples=examples(40), deadline=None)
def test_any_regions_are_written_nested_and_in_order(tmp_path_factory, intervals):
    """Regions that are not nested are cut where the region around them ends."""
    folder = tmp_path_factory.mktemp("otf2")
    events = [
        Event(Kind.HOST, BEGIN + begin, BEGIN + begin + length, f"r{number}")
        for number, (begin, length) in enumerate(intervals)
    ]
    _, done = export(folder, [events])
    found = read(done.path).events[0]
    times = [event.time for event in found]
    assert times == sorted(times)
    stack, spans = [], []
    for event in found:
        if type(event).__name__ == "Enter":
            stack.append((event.region.name, event.time))
        else:
            name, begin = stack.pop()
            assert name == event.region.name
            spans.append((name, begin, event.time))
    assert not stack
    assert sorted(spans) == sorted(_nested(events))
    cut = sum(end - begin < e.end_ns - e.begin_ns for e, (_, begin, end) in _paired(events, spans))
    assert bool(done.cautions) == bool(cut)


def _paired(events, spans):
    by_name = {span[0]: span for span in spans}
    return [(event, by_name[event.name]) for event in events]


def _nested(events):
    """Return the regions with the ends that they have once they are cut: the plain reference."""
    spans, open_ends = [], []
    order = sorted(range(len(events)), key=lambda n: (events[n].begin_ns, -events[n].end_ns, -n))
    for number in order:
        event = events[number]
        while open_ends and open_ends[-1] <= event.begin_ns:
            open_ends.pop()
        end = min([event.end_ns, *open_ends[-1:]])
        open_ends.append(end)
        spans.append((event.name, event.begin_ns, end))
    return spans


def test_bytes_given_and_got():
    given, sizes = np.array([12, 12]), np.array([4, 4])
    is_root = np.array([True, False])
    for operation, sent, received in (
        ("all_reduce", [12, 12], [12, 12]),
        ("all_gather", [12, 12], [48, 48]),
        ("reduce_scatter", [12, 12], [3, 3]),
        ("reduce", [12, 12], [12, 0]),
        ("gather", [12, 12], [48, 0]),
        ("scatter", [48, 0], [12, 12]),
        ("broadcast", [12, 0], [0, 12]),
        ("barrier", [12, 12], [12, 12]),
    ):
        found = exchanged(operation, given, sizes, is_root)
        assert [column.tolist() for column in found] == [sent, received], operation
