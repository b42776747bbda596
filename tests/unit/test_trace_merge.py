"""One clock for ranks of several nodes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import MS, Event, Late, data_parallel, set_boot_id, write_run, write_trace

from paceline.core.errors import CorruptTrace, NotFound, StorageError
from paceline.trace.format.events import COMMUNICATION, Kind
from paceline.trace.format.files import read_trace, trace_name
from paceline.trace.merge import load_run, merge
from paceline.trace.merge.clocks import ClockCorrection, fit_clock


def _shifted(events, shift_ns):
    return [
        Event(
            **{
                **vars(event),
                "begin_ns": event.begin_ns + shift_ns,
                "end_ns": event.end_ns + shift_ns,
            }
        )
        for event in events
    ]


def test_ranks_of_one_node_share_a_clock(tmp_path):
    trace = load_run(write_run(tmp_path, data_parallel(3, 5)))
    assert trace.clocks == (ClockCorrection(),) * 3
    assert trace.world_size == 3


@pytest.mark.parametrize("shift_ns", [-7_000_000_000, 0, 123_456_789])
def test_collectives_give_the_offset_of_another_node(tmp_path, shift_ns):
    by_rank = data_parallel(2, 20)
    run = write_run(tmp_path, [by_rank[0], _shifted(by_rank[1], shift_ns)])
    set_boot_id(run / "trace" / trace_name(1), "another node")
    trace = load_run(run)
    clock = trace.clocks[1]
    assert clock.error_ns <= 1.2 * MS  # what the all-reduce takes, and a drift it leaves open
    assert abs(clock.to_run_ns(10**12 + shift_ns) - 10**12) <= clock.error_ns


@given(st.lists(st.integers(0, 5 * MS), min_size=4, max_size=12), st.integers(-(10**9), 10**9))
def test_the_true_offset_lies_within_the_error_whoever_is_late(tmp_path_factory, waits, shift_ns):
    """Ranks enter at random times; each collective ends 1 ms after the later one."""
    ranks = [[], []]
    at = 10**12
    for i, wait_ns in enumerate(waits):
        enter = [at + wait_ns if i % 2 else at, at if i % 2 else at + wait_ns]
        end = max(enter) + MS
        for rank in (0, 1):
            ranks[rank].append(
                Event(
                    Kind.COLLECTIVE,
                    enter[rank],
                    end,
                    "all_reduce",
                    i,
                    8,
                    "group 0",
                    i + 1,
                    location=COMMUNICATION,
                )
            )
        at = end
    run = write_run(tmp_path_factory.mktemp("run"), [ranks[0], _shifted(ranks[1], shift_ns)])
    set_boot_id(run / "trace" / trace_name(1), "another node")
    trace = load_run(run)
    clock = trace.clocks[1]
    for true_ns in (10**12, at):
        assert abs(clock.to_run_ns(true_ns + shift_ns) - true_ns) <= clock.error_ns


HOUR_NS, START_NS, BOOT_NS = 3600 * 10**9, 10**15, 7 * 10**13


def _hour(drift, seed=0, count=500):
    """Return an hour of all-reduces: bounds, completions on both clocks, the fastest's length."""
    random = np.random.default_rng(seed)
    begin = np.sort(random.integers(0, HOUR_NS, count)) + START_NS
    first, second = begin + random.integers(0, 5 * MS, (2, count))
    done = np.maximum(first, second) + random.integers(MS, 4 * MS, count)

    def there(times):  # what the other node's clock shows
        return np.rint((times - START_NS) / (1 + drift)).astype(np.int64) + BOOT_NS

    below = (there(done), first - there(done))
    above = (there(second), done - there(second))
    fastest = int((done - np.maximum(first, second)).min())
    return below, above, there(done), done, fastest


@pytest.mark.parametrize("drift", [-50e-6, 0, 20e-6, 50e-6])
def test_a_drifting_clock_is_followed_for_an_hour(drift):
    below, above, shown, true, fastest = _hour(drift)
    clock = fit_clock(below, above, (int(shown[0]), int(shown[-1])))
    off = np.abs(clock.to_run_ns(shown) - true)
    assert off.max() < fastest
    assert off.max() <= clock.error_ns <= 2 * fastest
    assert clock.drift == pytest.approx(drift, abs=1e-6)
    assert clock.to_run_ns(int(shown[7])) == clock.to_run_ns(shown)[7]


@given(st.floats(-1e-4, 1e-4), st.integers(0, 1000), st.integers(2, 40))
def test_no_time_is_off_by_more_than_the_error(drift, seed, count):
    below, above, shown, true, _ = _hour(drift, seed, count)
    clock = fit_clock(below, above, (int(shown.min()), int(shown.max())))
    assert (np.abs(clock.to_run_ns(shown) - true) <= clock.error_ns + 1).all()


def test_one_collective_tells_nothing_of_drift():
    below, above, shown, true, _ = _hour(0, count=1)
    clock = fit_clock(below, above, (int(shown[0]), int(shown[0]) + HOUR_NS))
    assert clock.drift == 0
    # 500 parts per million of an hour may have passed unseen.
    assert 1.8e9 <= clock.error_ns < 1.9e9
    assert abs(clock.to_run_ns(int(shown[0])) - int(true[0])) <= 5 * MS


def test_a_clock_that_was_set_has_an_unknown_error():
    below, above, shown, _, _ = _hour(0)
    jump = np.where(shown > np.median(shown), 10**9, 0)
    moved = [(times, offsets + jump) for times, offsets in (below, above)]
    clock = fit_clock(*moved, (int(shown[0]), int(shown[-1])))
    assert clock.error_ns is None
    assert abs(clock.drift) <= 500e-6


def test_ranks_of_one_node_get_one_clock(tmp_path):
    by_rank = data_parallel(3, 20, late=(Late(1, 3, 0, 20),))
    moved = [by_rank[0], *(_shifted(events, 10**9) for events in by_rank[1:])]
    run = write_run(tmp_path, moved)
    for rank in (1, 2):
        set_boot_id(run / "trace" / trace_name(rank), "another node")
    trace = load_run(run)
    assert trace.clocks[1] == trace.clocks[2] != trace.clocks[0]
    assert abs(trace.clocks[2].to_run_ns(10**12 + 10**9) - 10**12) <= trace.clocks[2].error_ns


def test_without_collectives_wall_clocks_must_do(tmp_path):
    run = write_run(tmp_path, [[Event(Kind.FORWARD, 1, 2)], [Event(Kind.FORWARD, 1, 2)]])
    set_boot_id(run / "trace" / trace_name(1), "another node")
    trace = load_run(run)
    assert trace.clocks[1].error_ns is None  # nobody knows
    assert (
        abs(trace.clocks[1].offset_ns) < 10**9
    )  # the same node really, so the clocks nearly agree


def test_one_way_operations_do_not_set_clocks(tmp_path):
    """A broadcast's root leaves before others come: it bounds nothing."""
    events = [
        [Event(Kind.COLLECTIVE, 10, 20, "broadcast", 0, 8, "group 0", 1, 0)],
        [Event(Kind.COLLECTIVE, 5000, 5010, "broadcast", 0, 8, "group 0", 1, 0)],
    ]
    run = write_run(tmp_path, events)
    set_boot_id(run / "trace" / trace_name(1), "another node")
    assert [clock.error_ns for clock in load_run(run).clocks] == [0, None]


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
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot read the run's traces"):
        load_run(tmp_path / "file")
    with pytest.raises(NotFound, match="no traces"):
        load_run(tmp_path)
