"""Trace files: complete, cut short by a crash, damaged."""

import os
import struct

import numpy as np
import pytest
from support.traces import MS, Event, with_checksums, write_trace

from paceline.core.errors import CorruptTrace, NotFound
from paceline.native import Recorder, crc32c
from paceline.trace.format.events import EVENT_DTYPE, Group, Kind, Location, LocationType
from paceline.trace.format.files import read_status, read_trace, trace_name
from paceline.trace.format.header import FIXED_END, HEADER_BYTES, LIVE_END

FIRST = [Event(Kind.FORWARD, i * MS, i * MS + 5, f"name {i}", step=i) for i in range(4)]


def _write_blocks(path):
    """Return a trace's bytes after its first flush and after its second one, never closed."""
    recorder = Recorder(str(path), 3, 8, flush_interval_s=60.0)
    name = recorder.intern("first")
    recorder.record(int(Kind.FORWARD), 0, name, 1, 2, step=0)
    recorder.flush()
    first = path.read_bytes()
    name = recorder.intern("second")
    recorder.record(int(Kind.BACKWARD), 0, name, 2, 3, step=0)
    recorder.record(int(Kind.OPTIMIZER), 0, name, 3, 4, step=0)
    recorder.flush()
    second = path.read_bytes()
    recorder.close()
    return first, second


def test_events_and_names_come_back(tmp_path):
    path = write_trace(tmp_path / trace_name(2), 2, 4, FIRST)
    trace = read_trace(path)
    assert (trace.rank, trace.status.world_size, trace.complete) == (2, 4, True)
    assert [trace.names[i] for i in trace.events["name"]] == [event.name for event in FIRST]
    assert trace.events["begin_ns"].tolist() == [event.begin_ns for event in FIRST]
    assert trace.events["step"].tolist() == [0, 1, 2, 3]
    assert trace.status.recorded_count == 4
    assert trace.status.peak_memory_bytes > 0


def test_status_names_the_phase(tmp_path):
    recorder = Recorder(str(tmp_path / "one"), 0, 1)
    assert read_status(tmp_path / "one").phase_name == "other"
    recorder.begin(int(Kind.BACKWARD))
    status = read_status(tmp_path / "one")
    assert (status.phase_name, status.closed) == ("backward", False)
    recorder.close()
    assert read_status(tmp_path / "one").closed


def test_an_unclosed_trace_is_read_up_to_its_last_whole_block_wherever_it_ends(tmp_path):
    first, second = _write_blocks(tmp_path / "whole")
    path = tmp_path / "cut"
    for end in range(HEADER_BYTES, len(second) + 1):
        path.write_bytes(second[:end])
        trace = read_trace(path)
        found = len(trace.events)
        assert not trace.complete
        if end == len(second):
            assert found == 3
        elif end >= len(first):
            assert found == 1
        else:
            assert found == 0


def test_a_header_that_ends_early_is_no_trace(tmp_path):
    _, second = _write_blocks(tmp_path / "whole")
    path = tmp_path / "cut"
    for end in (0, 7, 8, 100, HEADER_BYTES - 1):
        path.write_bytes(second[:end])
        with pytest.raises(CorruptTrace, match="not a Paceline trace"):
            read_trace(path)


def test_a_closed_trace_that_ends_early_is_damaged_wherever_it_ends(tmp_path):
    path = write_trace(tmp_path / "one", 5, 8, FIRST)
    whole = path.read_bytes()
    for end in range(HEADER_BYTES, len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(CorruptTrace, match="rank 5"):
            read_trace(path)


def test_any_flipped_byte_of_a_block_is_noticed_and_its_rank_named(tmp_path):
    path = write_trace(tmp_path / "one", 5, 8, FIRST)
    whole = path.read_bytes()
    for at in range(HEADER_BYTES, len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(bytes(data))
        with pytest.raises(CorruptTrace, match="rank 5") as caught:
            read_trace(path)
        assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("at", "value", "match"),
    [
        (0, 0, "not a Paceline trace"),
        (8, 99, "format version 99"),
        (8, 0, "format version 0"),
        (84, 77, "phase 77"),
    ],
)
def test_headers_of_other_kinds_are_refused(tmp_path, at, value, match):
    path = write_trace(tmp_path / "one", 0, 1, FIRST)
    data = bytearray(path.read_bytes())
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(with_checksums(data))
    with pytest.raises(CorruptTrace, match=match):
        read_trace(path)


def test_any_flipped_byte_of_a_closed_header_is_noticed(tmp_path):
    path = write_trace(tmp_path / "one", 5, 8, FIRST)
    whole = path.read_bytes()
    for at in range(LIVE_END + 4):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(bytes(data))
        with pytest.raises(CorruptTrace):
            read_status(path)


def test_the_fixed_part_of_an_open_header_is_checked_and_its_live_part_taken_as_it_is(tmp_path):
    path = write_trace(tmp_path / "one", 5, 8, FIRST, close=False)
    whole = path.read_bytes()
    for at, value in ((FIXED_END, 7), (LIVE_END, 7)):  # the step, and a checksum not yet written
        data = bytearray(whole)
        data[at] = value
        path.write_bytes(bytes(data))
        assert not read_status(path).closed
    data = bytearray(whole)
    data[12] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CorruptTrace, match="fixed part"):
        read_status(path)


def test_groups_and_locations_come_back(tmp_path):
    recorder = Recorder(str(tmp_path / "one"), 0, 4)
    group = recorder.define_group("group 1", [2, 0, 3])
    stream = recorder.define_location(int(LocationType.STREAM), "copies", 11, 7)
    recorder.record(int(Kind.COPY), stream, 0, 1, 2, group=group)
    recorder.close()
    trace = read_trace(tmp_path / "one")
    assert trace.groups == (Group(name=""), Group(name="group 1", members=(2, 0, 3)))
    main, lane, copies = trace.locations
    assert (main.type, main.name) == (LocationType.THREAD, "main")
    assert main.process == os.getpid()
    assert lane.type == LocationType.COMMUNICATION
    assert copies == Location(type=LocationType.STREAM, name="copies", process=11, number=7)
    assert trace.events["location"].tolist() == [2]
    assert trace.groups[trace.events["group"][0]].members == (2, 0, 3)


def _with_block(path, kind, count, payload):
    """Append a block whose checksum is right, whatever it holds, to a closed trace."""
    data = path.read_bytes()
    head = struct.pack("<III", kind, count, len(payload))
    block = head + struct.pack("<I", crc32c(payload, crc32c(head))) + payload
    path.write_bytes(data + block)


def _event(**fields):
    event = np.zeros(1, EVENT_DTYPE)
    event["kind"] = Kind.FORWARD
    for field, value in fields.items():
        event[field] = value
    return event.tobytes()


@pytest.mark.parametrize(
    ("kind", "count", "payload", "match"),
    [
        (1, 2, b"\0" * 48, "length does not fit"),
        (2, 1, b"\1", "name block is too short"),
        (1, 1, _event(name=99), "refers to a name"),
        (1, 1, _event(group=9), "refers to a group"),
        (1, 1, _event(location=9), "refers to a location"),
        (1, 1, _event(begin_ns=9, end_ns=2), "ends before"),
        (1, 1, _event(kind=50), "unknown kind"),
        (1, 1, _event(kind=0), "unknown kind"),
        (3, 1, struct.pack("<II", 0, 5), "group block is too short"),
        (3, 1, struct.pack("<II", 99, 0), "definition refers to a name"),
        (4, 2, b"\0" * 16, "location block's length"),
        (4, 1, struct.pack("<IIII", 9, 0, 0, 0), "location type 9"),
    ],
)
def test_what_is_whole_but_makes_no_sense_is_refused(tmp_path, kind, count, payload, match):
    path = write_trace(tmp_path / "one", 1, 2, FIRST)
    _with_block(path, kind, count, payload)
    with pytest.raises(CorruptTrace, match=match):
        read_trace(path)


def test_blocks_of_later_kinds_are_passed_over(tmp_path):
    path = write_trace(tmp_path / "one", 1, 2, FIRST)
    _with_block(path, 7, 1, b"from the future")
    assert len(read_trace(path).events) == len(FIRST)


def test_a_missing_trace_is_not_found(tmp_path):
    with pytest.raises(NotFound):
        read_trace(tmp_path / "nothing")


def test_a_folder_is_no_trace(tmp_path):
    with pytest.raises(OSError, match="cannot read trace"):
        read_trace(tmp_path)
