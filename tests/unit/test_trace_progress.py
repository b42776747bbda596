"""What a trace's header says of the collectives that a rank has entered and left."""

from pathlib import Path

from paceline.native import Recorder
from paceline.trace.format.events import COMMUNICATION, COMPLETION_UNKNOWN, RECV, Kind
from paceline.trace.format.files import read_tables
from paceline.trace.format.progress import PROGRESS, PROGRESS_AT, read_live_header

COLLECTIVE = int(Kind.COLLECTIVE)


def recorder_in(folder: Path):
    path = folder / "rank-00000.trace"
    return path, Recorder(str(path), 0, 2)


def leave(recorder, group, sequence, flags=0):
    recorder.record(COLLECTIVE, COMMUNICATION, 0, 1, 2, 0, group, sequence, flags=flags)


def test_a_collective_is_open_from_its_entry_to_its_record(tmp_path):
    path, recorder = recorder_in(tmp_path)
    name, group = recorder.intern("all_reduce"), recorder.define_group("group 0", [0, 1])
    for sequence in (1, 2, 3):
        recorder.enter(COLLECTIVE, name, group, sequence)
        leave(recorder, group, min(sequence, 2)) if sequence < 3 else None
    (entry,) = read_live_header(path).groups
    assert (entry.group, entry.name, entry.entered, entry.left) == (group, name, 3, 2)
    assert entry.names[3] == name
    leave(recorder, group, 3, COMPLETION_UNKNOWN)
    (entry,) = read_live_header(path).groups
    assert (entry.left, entry.unseen) == (3, 3)


def test_collectives_that_were_not_entered_count_as_left(tmp_path):
    path, recorder = recorder_in(tmp_path)
    group = recorder.define_group("group 0", [0, 1])
    recorder.enter(COLLECTIVE, 0, group, 1)
    leave(recorder, group, 1)
    leave(recorder, group, 2)
    recorder.enter(COLLECTIVE, 0, group, 3)
    leave(recorder, group, 3)
    (entry,) = read_live_header(path).groups
    assert entry.left == entry.entered == 3


def test_a_message_is_waited_for_until_it_is_left(tmp_path):
    path, recorder = recorder_in(tmp_path)
    recorder.enter(int(Kind.RECV), recorder.intern(RECV), 0, 7, 1)
    message = read_live_header(path).message
    assert (message.entered, message.left, message.peer) == (1, 0, 1)
    recorder.leave()
    message = read_live_header(path).message
    assert message.left == message.entered


def test_more_groups_than_there_is_room_for_leave_out_the_oldest(tmp_path):
    path, recorder = recorder_in(tmp_path)
    groups = [recorder.define_group(f"group {number}", [0, 1]) for number in range(60)]
    for group in groups:
        recorder.enter(COLLECTIVE, 0, group, 1)
        leave(recorder, group, 1)
    header = read_live_header(path)
    assert not header.group_room
    assert groups[-1] in {entry.group for entry in header.groups}


def test_tables_are_read_without_events(tmp_path):
    path, recorder = recorder_in(tmp_path)
    recorder.define_group("group 0", [0, 1])
    recorder.flush()
    leave(recorder, 1, 1)
    recorder.define_group("group 1", [1])
    recorder.flush()
    tables = read_tables(path)
    assert [group.name for group in tables.groups] == ["", "group 0", "group 1"]
    assert len(tables.events) == 0


def test_an_entry_that_is_changing_is_left_out(tmp_path):
    path, recorder = recorder_in(tmp_path)
    group = recorder.define_group("group 0", [0, 1])
    recorder.enter(COLLECTIVE, 0, group, 1)
    recorder.close()
    data = bytearray(path.read_bytes())
    data[PROGRESS_AT + PROGRESS.size] |= 1
    path.write_bytes(data)
    assert read_live_header(path).groups == ()
