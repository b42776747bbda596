"""One clock for ranks of several nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import MS, Event, data_parallel, set_boot_id, write_run, write_trace

from paceline.core.errors import CorruptTrace, NotFound
from paceline.trace.events import Kind, Lane
from paceline.trace.files import read_trace, trace_name
from paceline.trace.merge import load_run, merge


def _shifted(events, shift_ns):
    return [
        Event(**{**vars(one), "begin_ns": one.begin_ns + shift_ns, "end_ns": one.end_ns + shift_ns})
        for one in events
    ]


def test_ranks_of_one_node_share_a_clock(tmp_path):
    trace = load_run(write_run(tmp_path, data_parallel(3, 5)))
    assert trace.offset_ns == (0, 0, 0)
    assert trace.offset_error_ns == (0, 0, 0)
    assert trace.world_size == 3


@pytest.mark.parametrize("shift_ns", [-7_000_000_000, 0, 123_456_789])
def test_collectives_give_the_offset_of_another_node(tmp_path, shift_ns):
    by_rank = data_parallel(2, 20)
    run = write_run(tmp_path, [by_rank[0], _shifted(by_rank[1], shift_ns)])
    set_boot_id(run / "trace" / trace_name(1), "another node")
    trace = load_run(run)
    assert trace.offset_error_ns[1] <= MS  # no more than the all-reduce takes
    assert abs(trace.offset_ns[1] + shift_ns) <= trace.offset_error_ns[1]


@given(st.lists(st.integers(0, 5 * MS), min_size=4, max_size=12), st.integers(-(10**9), 10**9))
def test_the_true_offset_lies_within_the_error_whoever_is_late(tmp_path_factory, waits, shift_ns):
    """Ranks arrive at random times; each collective ends 1 ms after the later one."""
    ranks = [[], []]
    at = 10**12
    for i, wait_ns in enumerate(waits):
        arrive = [at + wait_ns if i % 2 else at, at if i % 2 else at + wait_ns]
        end = max(arrive) + MS
        for rank in (0, 1):
            ranks[rank].append(
                Event(
                    Kind.COLLECTIVE,
                    arrive[rank],
                    end,
                    "all_reduce",
                    i,
                    8,
                    "group 0",
                    i + 1,
                    lane=Lane.COMMUNICATION,
                )
            )
        at = end
    run = write_run(tmp_path_factory.mktemp("run"), [ranks[0], _shifted(ranks[1], shift_ns)])
    set_boot_id(run / "trace" / trace_name(1), "another node")
    trace = load_run(run)
    assert abs(trace.offset_ns[1] + shift_ns) <= trace.offset_error_ns[1] + 1


def test_without_collectives_wall_clocks_must_do(tmp_path):
    run = write_run(tmp_path, [[Event(Kind.FORWARD, 1, 2)], [Event(Kind.FORWARD, 1, 2)]])
    set_boot_id(run / "trace" / trace_name(1), "another node")
    trace = load_run(run)
    assert abs(trace.offset_ns[1]) < 10**9  # the same node really, so the clocks nearly agree


def test_one_way_operations_do_not_set_clocks(tmp_path):
    """A broadcast's root leaves before others come: it bounds nothing."""
    events = [
        [Event(Kind.COLLECTIVE, 10, 20, "broadcast", 0, 8, "group 0", 1, 0)],
        [Event(Kind.COLLECTIVE, 5000, 5010, "broadcast", 0, 8, "group 0", 1, 0)],
    ]
    run = write_run(tmp_path, events)
    set_boot_id(run / "trace" / trace_name(1), "another node")
    assert load_run(run).offset_error_ns == (0, 0)


def test_two_traces_of_one_rank_are_refused(tmp_path):
    events = data_parallel(2, 2)
    one = read_trace(write_trace(tmp_path / "a", 0, 2, events[0]))
    other = read_trace(write_trace(tmp_path / "b", 0, 2, events[1]))
    with pytest.raises(CorruptTrace, match="same rank"):
        merge([one, other])


def test_traces_of_different_runs_are_refused(tmp_path):
    events = data_parallel(2, 2)
    one = read_trace(write_trace(tmp_path / "a", 0, 2, events[0]))
    other = read_trace(write_trace(tmp_path / "b", 1, 3, events[1]))
    with pytest.raises(CorruptTrace, match="different numbers"):
        merge([one, other])


def test_a_folder_without_traces_is_not_found(tmp_path):
    with pytest.raises(NotFound, match="no traces"):
        load_run(tmp_path)
