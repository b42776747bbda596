"""What only MPI programs record: calls that block, waits for several requests, no steps."""

import numpy as np
import pytest
from traces import MS, Event, write_run

from paceline.trace.analysis import analyse
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
