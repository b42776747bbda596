"""Seconds by phase, on hand-made traces whose answer is known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.traces import MS, Event, Late, data_parallel, set_dropped_count, write_run

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.errors import CorruptTrace
from paceline.report.compare import compare
from paceline.trace.analysis import analyse
from paceline.trace.analysis.phases import step_time_s
from paceline.trace.format.events import COMMUNICATION, DRAIN, NOT_RUNNING, Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run


def _phases(tmp_path, by_rank):
    return analyse(load_run(write_run(tmp_path, by_rank))).phases


def _step(end_ms, begin_ms=0, step=0):
    return Event(Kind.STEP, begin_ms * MS, end_ms * MS, "step", step)


def _collective(name, issue_ms, complete_ms, sequence=1, peer=-1, step=0):
    return Event(
        Kind.COLLECTIVE,
        round(issue_ms * MS),
        round(complete_ms * MS),
        name,
        step,
        64,
        "group 0",
        sequence,
        peer,
        location=COMMUNICATION,
    )


def _wait(begin_ms, end_ms, name, sequence=1, peer=-1):
    return Event(
        Kind.WAIT,
        round(begin_ms * MS),
        round(end_ms * MS),
        name,
        0,
        0,
        "group 0" if sequence else "",
        sequence,
        peer,
    )


def _close(found: Breakdown, **expected_ms):
    for name in PHASES:
        assert getattr(found, name) == pytest.approx(expected_ms.get(name, 0) / 1e3, abs=1e-9), name


def test_nested_phases_are_counted_once(tmp_path):
    events = [
        Event(Kind.FORWARD, 0, 10 * MS, "outer"),
        Event(Kind.COPY, 2 * MS, 5 * MS, "copy"),
        Event(Kind.FORWARD, 3 * MS, 4 * MS, "inner"),
        Event(Kind.BACKWARD, 10 * MS, 18 * MS, "backward"),
        Event(Kind.CHECKPOINT, 12 * MS, 13 * MS, "checkpoint"),
        _step(20),
    ]
    (rank,) = _phases(tmp_path, [events])
    _close(rank.breakdown(), forward=8, copy=2, backward=7, checkpoint=1, other=2)
    assert rank.loop_wall_s == pytest.approx(0.020)


def test_waiting_ends_where_the_last_rank_comes(tmp_path):
    def rank(issue_ms):
        return [
            _collective("all_reduce", issue_ms, 10),
            _wait(issue_ms, 10, "all_reduce"),
            Event(Kind.BACKWARD, 0, 10 * MS, "backward"),
            _step(10),
        ]

    early, late = _phases(tmp_path, [rank(2), rank(8)])
    _close(early.breakdown(), backward=2, waiting=6, transfer=2)
    _close(late.breakdown(), backward=8, transfer=2)


def test_what_runs_behind_compute_is_not_counted(tmp_path):
    """Issued at 1 ms, computing until 9 ms, waited for from 9 to 10 ms: 1 ms is exposed."""

    def rank():
        return [
            _collective("all_reduce", 1, 10),
            _wait(9, 10, "all_reduce"),
            Event(Kind.BACKWARD, 0, 10 * MS, "backward"),
            _step(10),
        ]

    for phases in _phases(tmp_path, [rank(), rank()]):
        _close(phases.breakdown(), backward=9, transfer=1)


def test_a_drain_waits_for_all_collectives_of_its_backward_and_no_longer(tmp_path):
    """Two buckets; the data is there at 9 ms, what DDP does until 10 ms is its own work."""

    def rank(second_ms):
        return [
            _collective("all_reduce", 1, 8, 1),
            _collective("all_reduce", second_ms, 9, 2),
            _wait(4, 10, DRAIN, 0),
            Event(Kind.BACKWARD, 0, 10 * MS, "backward"),
            _step(10),
        ]

    early, late = _phases(tmp_path, [rank(3), rank(7)])
    _close(early.breakdown(), backward=5, waiting=3, transfer=2)
    # The late rank issued at 7 ms what it drains from 4 ms on: it waited for itself.
    assert late.breakdown().waiting == pytest.approx(0.003)


def test_a_drain_without_collectives_blocks_nobody(tmp_path):
    events = [
        _wait(4, 10, DRAIN, 0),
        Event(Kind.BACKWARD, 0, 10 * MS, "backward"),
        _step(10),
    ]
    (rank,) = _phases(tmp_path, [events])
    _close(rank.breakdown(), backward=10)


def test_receivers_of_a_broadcast_wait_for_its_root_alone(tmp_path):
    def rank(issue_ms, end_ms):
        return [
            Event(Kind.FORWARD, 0, round(issue_ms * MS), "forward"),
            _collective("broadcast", issue_ms, end_ms, peer=0),
            _wait(issue_ms, end_ms, "broadcast", peer=0),
            _step(12),
        ]

    root, early, late = _phases(tmp_path, [rank(5, 5.5), rank(1, 6), rank(10, 11)])
    _close(root.breakdown(), forward=5, transfer=0.5, other=6.5)
    _close(early.breakdown(), forward=1, waiting=4, transfer=1, other=6)
    _close(late.breakdown(), forward=10, transfer=1, other=1)


def test_the_root_of_a_reduce_waits_for_the_last_one(tmp_path):
    def rank(issue_ms, end_ms):
        return [
            _collective("reduce", issue_ms, end_ms, peer=0),
            _wait(issue_ms, end_ms, "reduce", peer=0),
            _step(12),
        ]

    root, sender = _phases(tmp_path, [rank(1, 9), rank(8, 8.5)])
    _close(root.breakdown(), waiting=7, transfer=1, other=4)
    _close(sender.breakdown(), transfer=0.5, other=11.5)


def test_a_wait_for_something_unseen_is_transfer(tmp_path):
    events = [_wait(2, 6, "", 0), _step(10)]
    (rank,) = _phases(tmp_path, [events])
    _close(rank.breakdown(), transfer=4, other=6)


def test_what_was_before_the_loop_is_left_out(tmp_path):
    events = [
        Event(Kind.COPY, 0, 4 * MS, "set-up"),
        Event(Kind.FORWARD, 5 * MS, 9 * MS, "forward"),
        _step(10, 5),
    ]
    (rank,) = _phases(tmp_path, [events])
    _close(rank.breakdown(), forward=4, other=1)


def test_time_without_a_core_is_read_from_the_counters(tmp_path):
    events = []
    for step in range(3):
        counter = Event(Kind.COUNTER, 0, 0, NOT_RUNNING, step, 2 * MS)
        events += [_step(10 * step + 10, 10 * step, step), counter]
    (rank,) = _phases(tmp_path, [events])
    assert rank.not_running_s.tolist() == pytest.approx([0, 0.002, 0.002])


def test_steps_out_of_order_are_refused(tmp_path):
    with pytest.raises(CorruptTrace, match="steps are not numbered"):
        _phases(tmp_path, [[_step(10, 0, 0), _step(20, 10, 2)]])


@pytest.mark.parametrize("lost", [(5,), (5, 6, 7), (0, 1), (3, 9)])
def test_steps_that_a_full_buffer_lost_keep_totals_and_medians(tmp_path, lost):
    events = data_parallel(2, 20)
    (whole, _) = _phases(tmp_path / "whole", events)
    events[1] = [event for event in events[1] if event.kind != Kind.STEP or event.step not in lost]
    run = write_run(tmp_path / "run", events)
    set_dropped_count(run / "trace" / trace_name(1), len(lost))
    first, second = analyse(load_run(run)).phases
    assert first.recorded.all()
    assert np.flatnonzero(~second.recorded).tolist() == list(lost)
    assert second.steps == 20
    assert second.loop_wall_s == pytest.approx(whole.loop_wall_s)
    assert second.step_s == pytest.approx(whole.step_s)  # all steps are equally long here
    assert step_time_s((first, second)) == pytest.approx(step_time_s((whole,)))


def test_time_of_lost_steps_is_no_median(tmp_path):
    """Steps 1 and 2 are lost, and took 5 and 85 ms: nobody knows, so no median has them."""
    events = [_step(10, 0, 0), _step(110, 100, 3)]
    run = write_run(tmp_path, [events])
    set_dropped_count(run / "trace" / trace_name(0), 2)
    (rank,) = analyse(load_run(run)).phases
    assert rank.step_s.tolist() == pytest.approx([0.010, 0.045, 0.045, 0.010])
    assert step_time_s((rank,)) == pytest.approx(0.010)
    found = compare((rank,), ())
    assert found.measured_step_s == pytest.approx(0.010)
    assert found.undisturbed_steps == 1


def test_more_steps_lost_than_events_dropped_is_damage(tmp_path):
    run = write_run(tmp_path, [[_step(10, 0, 0), _step(50, 40, 4)]])
    set_dropped_count(run / "trace" / trace_name(0), 2)
    with pytest.raises(CorruptTrace, match="3 of 5 are not there, 2 events dropped"):
        analyse(load_run(run))


def test_a_root_of_a_smaller_group_is_known_too(tmp_path):
    """Ranks 1 and 2 of 3 broadcast from rank 2."""

    def rank(issue_ms, end_ms):
        return [
            _collective("broadcast", issue_ms, end_ms, peer=2),
            _wait(issue_ms, end_ms, "broadcast", peer=2),
            _step(12),
        ]

    _, early, _ = _phases(tmp_path, [[_step(12)], rank(1, 10), rank(9, 10)])
    _close(early.breakdown(), waiting=8, transfer=1, other=3)


def test_a_root_whose_trace_is_missing_is_nobody_else(tmp_path):
    def rank(issue_ms):
        return [
            _collective("broadcast", issue_ms, 10, peer=0),
            _wait(issue_ms, 10, "broadcast", peer=0),
            _step(12),
        ]

    run = write_run(tmp_path, [rank(5), rank(8), rank(1)])
    (run / "trace" / trace_name(0)).unlink()
    late, early = analyse(load_run(run)).phases
    _close(late.breakdown(), transfer=2, other=10)
    _close(early.breakdown(), transfer=9, other=3)


def test_a_drain_does_not_wait_for_what_the_script_waits_for_later(tmp_path):
    """An all-reduce issued in backward at 2 ms, still held, is waited for by name at 14 ms."""
    events = [
        _collective("all_reduce", 2, 16),
        _wait(4, 6, DRAIN, 0),
        Event(Kind.BACKWARD, 0, 6 * MS, "backward"),
        Event(Kind.FORWARD, 6 * MS, 14 * MS, "forward"),
        _wait(14, 16, "all_reduce"),
        _step(20),
    ]
    trace = load_run(write_run(tmp_path, [events, events]))
    analysis = analyse(trace)
    drain, named = analysis.waits[0]
    assert (drain["synchronises"], named["synchronises"]) == (False, True)
    assert drain["begin_ns"] == drain["end_ns"]
    _close(analysis.phases[0].breakdown(), backward=6, forward=8, transfer=2, other=4)


def test_a_rank_without_steps_has_no_time(tmp_path):
    (rank,) = _phases(tmp_path, [[Event(Kind.FORWARD, 0, MS, "forward")]])
    assert (rank.steps, rank.loop_wall_s) == (0, 0)
    assert rank.breakdown() == Breakdown()
    assert step_time_s((rank,)) == 0


@given(
    world_size=st.integers(1, 4),
    steps=st.integers(1, 8),
    late=st.builds(
        Late,
        rank=st.integers(0, 3),
        ms=st.floats(0, 40),
        first=st.integers(0, 3),
        last=st.integers(4, 8),
        cause=st.sampled_from(["data", "compute", "not_running"]),
    ),
)
def test_phases_add_up_to_wall_time(tmp_path_factory, world_size, steps, late):
    run = tmp_path_factory.mktemp("run")
    parts = _phases(run, data_parallel(world_size, steps, late=(late,)))
    assert len(parts) == world_size
    for rank in parts:
        assert rank.seconds.sum(axis=1) == pytest.approx(rank.step_s, abs=1e-9)
        assert (rank.seconds >= 0).all()
        assert rank.breakdown().other == pytest.approx(0, abs=1e-9)
    assert step_time_s(parts) >= 0.01
