"""What traces say of a rank's main thread in each step, and what blame makes of it."""

import pytest
from support.traces import MS, Event, Late, data_parallel, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.counters import step_counters
from paceline.trace.analysis.waits import wait_intervals
from paceline.trace.format.events import (
    COMMUNICATION,
    GARBAGE_COLLECTION,
    MAIN_NOT_RUNNING,
    MAIN_RUNNING,
    STOPPED,
    TRAINED_BYTES,
    Kind,
)
from paceline.trace.merge import load_run

STEPS, SLOW_MS = 60, 6


def _with_counters(by_rank, ran_ms=lambda rank, step: 3.0, starved_ms=lambda rank, step: 0.0):
    """Add the counters of the main thread to each step of each rank."""
    for rank, events in enumerate(by_rank):
        steps = [event for event in events if event.kind is Kind.STEP]
        for step in steps:
            for name, value_ms in (
                (MAIN_RUNNING, ran_ms(rank, step.step)),
                (MAIN_NOT_RUNNING, starved_ms(rank, step.step)),
            ):
                amount = round(value_ms * MS)
                events.append(
                    Event(Kind.COUNTER, step.end_ns, step.end_ns, name, step.step, amount)
                )
    return by_rank


def _slowed(cause="compute", first=0, last=STEPS):
    return data_parallel(2, STEPS, late=(Late(1, SLOW_MS, first, last, cause),))


def _only(run, by_rank):
    (found,) = analyse(load_run(write_run(run, by_rank))).stragglers
    return found


def _extra_ms(rank, step):
    return 3.0 + SLOW_MS * rank


def test_counters_are_summed_by_step_and_the_first_step_has_none(tmp_path):
    by_rank = _with_counters(_slowed(), starved_ms=lambda rank, step: 0.5)
    by_rank[0] += [
        Event(Kind.COUNTER, 1, 1, STOPPED, 7, 1),
        Event(Kind.COUNTER, 2, 2, STOPPED, 7, 1),
        Event(Kind.HOST, 10, 10 + 4 * MS, GARBAGE_COLLECTION, 9),
        Event(Kind.HOST, 10, 10 + 4 * MS, GARBAGE_COLLECTION, 9, location=COMMUNICATION),
        Event(Kind.HOST, 10, 10 + 4 * MS, "logging", 9),
    ]
    trace = load_run(write_run(tmp_path, by_rank))
    counters = step_counters(trace.ranks[0], wait_intervals(trace)[0], STEPS)
    assert counters.known
    assert counters.running_s[:3].tolist() == pytest.approx([0, 0.003, 0.003])
    assert counters.not_running_s[:2].tolist() == pytest.approx([0, 0.0005])
    assert (counters.stop_count[7], counters.stop_count.sum()) == (2, 2)
    assert (counters.gc_s[9], counters.gc_s.sum()) == pytest.approx((0.004, 0.004))


def test_a_trace_without_the_main_threads_counters_says_so(tmp_path):
    trace = load_run(write_run(tmp_path, _slowed()))
    assert not step_counters(trace.ranks[0], wait_intervals(trace)[0], STEPS).known


def test_time_without_a_core_in_a_wait_delays_nobody(tmp_path):
    by_rank = _with_counters(_slowed(), starved_ms=lambda rank, step: 2.0)
    by_rank[0] = [
        Event(**{**_fields(event), "amount": 3 * MS // 2}) if event.kind is Kind.WAIT else event
        for event in by_rank[0]
    ]
    trace = load_run(write_run(tmp_path, by_rank))
    counters = step_counters(trace.ranks[0], wait_intervals(trace)[0], STEPS)
    assert counters.not_running_s[1:].tolist() == pytest.approx([0.0005] * (STEPS - 1))


def test_equal_time_on_a_core_is_never_computing(tmp_path):
    found = _only(tmp_path, _with_counters(_slowed()))
    assert (found.rank, found.cause, found.shape) == (1, "blocked", "persistent")


def test_longer_on_a_core_is_computing(tmp_path):
    found = _only(tmp_path, _with_counters(_slowed(), _extra_ms))
    assert (found.rank, found.cause) == (1, "compute")


@pytest.mark.parametrize(
    ("trained", "cause"),
    [((4096, 4096), "slow_core"), ((4096, 8192), "compute"), ((4096, 0), "compute")],
)
def test_longer_in_the_optimizer_as_well_is_a_slow_core(tmp_path, trained, cause):
    """Rank 0's optimizer takes half as long, with the same work if ranks train as many bytes."""
    by_rank = _with_counters(_slowed(), _extra_ms)
    by_rank[0] = [
        Event(**{**_fields(event), "end_ns": (event.begin_ns + event.end_ns) // 2})
        if event.kind is Kind.OPTIMIZER
        else event
        for event in by_rank[0]
    ]
    for events, amount in zip(by_rank, trained, strict=True):
        # An optimizer that joins later raises the count; traces of earlier versions have none.
        events += [
            Event(Kind.COUNTER, 1, 1, TRAINED_BYTES, 0, amount // n) for n in (2, 1) if amount
        ]
    found = _only(tmp_path, by_rank)
    assert (found.rank, found.cause) == (1, cause)


def test_without_a_core_is_not_running(tmp_path):
    by_rank = _with_counters(_slowed(), starved_ms=lambda rank, step: 0.1 + SLOW_MS * rank)
    assert _only(tmp_path, by_rank).cause == "not_running"


def test_time_in_the_loader_is_data_whatever_the_thread_did(tmp_path):
    asleep = _only(tmp_path / "asleep", _with_counters(_slowed("data")))
    computing = _only(tmp_path / "computing", _with_counters(_slowed("data"), _extra_ms))
    assert (asleep.cause, computing.cause) == ("data", "data")


def test_asleep_while_the_process_was_stopped_is_stopped(tmp_path):
    by_rank = _with_counters(_slowed())
    by_rank[1] += [Event(Kind.COUNTER, 1, 1, STOPPED, step, 1) for step in range(STEPS)]
    assert _only(tmp_path, by_rank).cause == "stopped"


def test_what_a_rank_does_after_the_sync_of_a_step_delays_the_next_one(tmp_path):
    """The optimizer comes after the sync: its time is of this step, the skew of the next one."""
    shift_ns = [0, 0]
    by_rank = data_parallel(2, STEPS)
    slow = range(4, STEPS, 5)
    for rank, events in enumerate(by_rank):
        moved = []
        for event in events:
            begin_ns = event.begin_ns + shift_ns[rank]
            if rank == 1 and event.kind is Kind.OPTIMIZER and event.step in slow:
                shift_ns[1] += SLOW_MS * MS
            moved.append((event, begin_ns, event.end_ns + shift_ns[rank]))
        by_rank[rank] = [
            Event(**{**_fields(event), "begin_ns": begin_ns, "end_ns": end_ns})
            for event, begin_ns, end_ns in moved
        ]
    # Rank 0 waits in the next all-reduce until rank 1 enters it.
    by_rank[0] = _waiting_for(by_rank[0], by_rank[1])
    found = _only(
        tmp_path,
        _with_counters(by_rank, lambda rank, step: 3.0 + SLOW_MS * (rank and step in slow)),
    )
    assert (found.rank, found.cause, found.shape, found.period_steps) == (
        1,
        "compute",
        "periodic",
        5,
    )


def _fields(event):
    return {name: getattr(event, name) for name in event.__dataclass_fields__}


def _waiting_for(events, others):
    """Move a rank's events so that its all-reduce of each step ends with the other rank's."""
    done = {event.step: event.end_ns for event in others if event.kind is Kind.COLLECTIVE}
    shift_ns, result = 0, []
    for event in events:
        begin_ns = event.begin_ns + shift_ns
        if event.kind is Kind.COLLECTIVE:
            shift_ns = done[event.step] - event.end_ns
        result.append(
            Event(**{**_fields(event), "begin_ns": begin_ns, "end_ns": event.end_ns + shift_ns})
        )
    return result
