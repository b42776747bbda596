"""What only MPI programs record: calls that block, waits for several requests, no steps."""

import dataclasses

import numpy as np
import pytest
from support.traces import MS, Event, write_run

from paceline.trace.analysis import analyse
from paceline.trace.efficiency import measure_efficiency
from paceline.trace.format.events import (
    BLOCKING,
    BY_PCONTROL,
    BY_RUN,
    COMMUNICATION,
    MAIN,
    RECV,
    SEND,
    WAIT_ALL,
    Kind,
)
from paceline.trace.merge import load_run
from paceline.trace.merge.repetition import find_repetition
from paceline.trace.merge.steps import StepRule

WORLD = "MPI_COMM_WORLD"


def blocking(begin_ms, end_ms, sequence, name="all_reduce", amount=8):
    return Event(
        kind=Kind.COLLECTIVE,
        begin_ns=begin_ms * MS,
        end_ns=end_ms * MS,
        name=name,
        amount=amount,
        group=WORLD,
        members=(0, 1),
        sequence=sequence,
        location=COMMUNICATION,
        flags=BLOCKING,
    )


def message(kind, begin_ms, end_ms, peer):
    return Event(
        kind=kind,
        begin_ns=begin_ms * MS,
        end_ns=end_ms * MS,
        name=SEND if kind is Kind.SEND else RECV,
        amount=64,
        group=WORLD,
        members=(0, 1),
        sequence=1,
        peer=peer,
        tag=7,
        location=COMMUNICATION,
    )


def mark(begin_ms, end_ms, name=BY_RUN, step=0):
    return Event(kind=Kind.STEP, begin_ns=begin_ms * MS, end_ns=end_ms * MS, name=name, step=step)


def loop(enter_ms, rounds):
    """Return a broadcast, then rounds of 10 ms: a barrier, and an all-reduce at `enter_ms`."""
    events = [blocking(1, 2, 1, "broadcast")]
    for i in range(rounds):
        events += [
            blocking(10 * i + 5, 10 * i + 6, 2 * i + 2, "barrier", 0),
            blocking(10 * i + enter_ms, 10 * i + 14, 2 * i + 3),
        ]
    return [*events, mark(0, 10 * rounds + 20)]


def test_a_blocking_call_is_a_wait_of_the_main_thread(tmp_path):
    trace = load_run(write_run(tmp_path, [loop(8, 5), loop(13, 5)]))
    waits = trace.ranks[0].events_of(Kind.WAIT)
    assert len(waits) == 11
    assert set(waits["location"]) == {MAIN}
    analysis = analyse(trace)
    early, late = (rank.breakdown() for rank in analysis.phases)
    assert early.waiting == pytest.approx(5 * 0.005)
    assert late.waiting == pytest.approx(0)


def test_repeated_collectives_are_steps(tmp_path):
    trace = load_run(write_run(tmp_path, [loop(8, 5), loop(13, 5)]))
    assert trace.step_rule == StepRule.REPETITION
    analysis = analyse(trace)
    assert analysis.steps == 5
    assert analysis.phases[0].step_s == pytest.approx([0.012, *[0.010] * 4])
    assert analysis.skew_s[1] == pytest.approx([0.005] * 5)


def test_too_few_repetitions_are_one_step(tmp_path):
    trace = load_run(write_run(tmp_path, [loop(8, 2), loop(13, 2)]))
    assert trace.step_rule == StepRule.RUN
    assert analyse(trace).steps == 1


def test_marks_of_the_program_come_first(tmp_path):
    events = [*loop(8, 5)[:-1], mark(0, 30, BY_PCONTROL), mark(30, 55, BY_PCONTROL, 1)]
    events += [mark(55, 70, BY_RUN, 2)]
    trace = load_run(write_run(tmp_path, [events, events]))
    assert trace.step_rule == StepRule.PCONTROL
    assert analyse(trace).steps == 2


def test_ranks_that_differ_have_no_repetition(tmp_path):
    other = [*loop(8, 5)[:-1], blocking(60, 61, 12, "reduce"), mark(0, 70)]
    changed = [
        blocking(10 * i + 5, 10 * i + 6, i + 1, "barrier" if i % 2 else "all_reduce")
        for i in range(6)
    ]
    trace = load_run(write_run(tmp_path, [other, [*changed, mark(0, 70)]]))
    assert trace.step_rule == StepRule.RUN


def test_a_wait_for_several_ends_waiting_with_the_last_partner(tmp_path):
    def exchange(peer, enter_ms):
        return [
            message(Kind.RECV, enter_ms, 30, peer),
            message(Kind.SEND, enter_ms, 30, peer),
            Event(kind=Kind.WAIT, begin_ns=10 * MS, end_ns=30 * MS, name=WAIT_ALL),
            mark(0, 40),
        ]

    trace = load_run(write_run(tmp_path, [exchange(1, 5), exchange(0, 25)]))
    early, late = (rank.breakdown() for rank in analyse(trace).phases)
    assert early.waiting == pytest.approx(0.015)  # until rank 1 had issued its send
    assert early.transfer == pytest.approx(0.005)
    assert late.waiting == pytest.approx(0)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("abcabcabcabc", (3, 0, 4)),
        ("xxabababababy", (2, 2, 5)),
        ("aaaaaaaab" * 6, (9, 0, 6)),
        ("abcdefgh", (0, 0, 0)),
        ("", (0, 0, 0)),
    ],
)
def test_repetition(text, found):
    assert find_repetition(np.array([ord(letter) for letter in text])) == found


def exchange_by_requests(enter_ms, peer, *, collective=False):
    """Return an exchange by requests, issued at `enter_ms` and waited for from 10 to 30 ms."""
    events = [
        message(Kind.RECV, enter_ms, 30, peer),
        message(Kind.SEND, enter_ms, 30, peer),
        Event(kind=Kind.WAIT, begin_ns=max(10, enter_ms) * MS, end_ns=30 * MS, name=WAIT_ALL),
        mark(0, 40),
    ]
    if collective:
        both = blocking(enter_ms, 30, 1)
        return [dataclasses.replace(both, flags=0), *events[2:]]
    return events


def test_a_wait_for_several_depends_on_a_partner_that_was_there_before(tmp_path):
    """Its time is transfer then, which a free network would not take."""
    ranks = [exchange_by_requests(5, 1), exchange_by_requests(6, 0)]
    found = measure_efficiency(analyse(load_run(write_run(tmp_path, ranks))))
    assert found.metrics.transfer == pytest.approx(20 / 40)
    assert found.metrics.serialisation == pytest.approx(1)
    assert found.waits.seconds == 0


def test_a_wait_for_several_has_the_state_of_a_collective_among_them(tmp_path):
    ranks = [exchange_by_requests(at, 0, collective=True) for at in (5, 25)]
    found = measure_efficiency(analyse(load_run(write_run(tmp_path, ranks))))
    (call,) = found.waits.calls
    assert (call.state, call.operation) == ("wait at NxN", "all_reduce")
    assert call.seconds == pytest.approx(0.015)
    (cost,) = found.waits.delays
    assert (cost.rank, cost.seconds) == (1, pytest.approx(0.015))
    assert found.cut_count == 0


def test_the_late_side_of_requests_is_a_late_sender(tmp_path):
    ranks = [exchange_by_requests(5, 1), exchange_by_requests(25, 0)]
    found = measure_efficiency(analyse(load_run(write_run(tmp_path, ranks))))
    (call,) = found.waits.calls
    assert call.state == "late sender"
    assert call.seconds == pytest.approx(0.015)
    assert found.waits.delays[0].rank == 1


def test_times_outside_of_mpi_say_what_a_rank_did_and_not_that_others_spun(tmp_path):
    """The thread of a rank that waits runs as long as that of the rank that computes."""

    def counter(at_ms, name, ms):
        return Event(Kind.COUNTER, at_ms * MS, at_ms * MS, name, amount=ms * MS)

    def ranks(slept, faults=0):
        return [
            [
                *loop(13 if rank else 8, 40),
                *(counter(10 * i + 13, "main_running_ns", 10) for i in range(40)),
                *(
                    counter(10 * i + 13, "program_running_ns", 2 if slept or not rank else 7)
                    for i in range(40)
                ),
                *(counter(10 * i + 13, "program_not_running_ns", 0) for i in range(40)),
                *(counter(10 * i + 13, "major_faults", faults * rank) for i in range(40)),
            ]
            for rank in range(2)
        ]

    for slept, faults, cause in ((False, 0, "compute"), (True, 0, "blocked"), (True, 3, "data")):
        run = write_run(tmp_path / cause, ranks(slept, faults))
        (late,) = analyse(load_run(run)).stragglers
        assert (late.rank, late.cause) == (1, cause)


def test_calls_for_files_are_input_and_checkpoints(tmp_path):
    def ranks():
        late = [
            Event(kind=Kind.READ, begin_ns=at, end_ns=at + 5 * MS, name="read", amount=64)
            for at in (10 * i * MS + 7 * MS for i in range(1, 40))
        ]
        return [loop(8, 40), [*loop(13, 40), *late]]

    analysis = analyse(load_run(write_run(tmp_path, ranks())))
    (late,) = analysis.stragglers
    assert (late.rank, late.cause) == (1, "data")
    assert analysis.phases[1].breakdown().input == pytest.approx(39 * 0.005)


def test_counters_of_files_add_up(tmp_path):
    def rank(number):
        counters = {"io_open": 2, "io_open_ns": 3 * MS, "io_read": 4, "io_read_ns": MS}
        counters |= {"io_read_bytes": 512 * (number + 1), "io_at_once": number + 1}
        return [
            *loop(8, 5),
            *(
                Event(Kind.COUNTER, 60 * MS, 60 * MS, name, amount=amount, tag_name="/data/a")
                for name, amount in counters.items()
            ),
        ]

    analysis = analyse(load_run(write_run(tmp_path, [rank(0), rank(1)])))
    (use,) = analysis.files
    assert use.ranks == (0, 1)
    assert use.calls == {"open": 4, "read": 8}
    assert use.seconds == pytest.approx({"open": 0.006, "read": 0.002})
    assert (use.read_bytes, use.written_bytes, use.at_once) == (1536, 0, 2)
