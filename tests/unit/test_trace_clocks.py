"""Clocks of nodes that are off and drift: corrected within what messages allow, and causal."""

import dataclasses
import random

import numpy as np
import pytest
from exchanges import START_NS, Collective, EndOfStep, Message, Work, play
from traces import MS, set_boot_id, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.stats import summarize_trace
from paceline.trace.format.events import Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run
from paceline.trace.merge.windows import SpooledRun

US = 1_000
OFFSET_NS, DRIFT = 2 * 10**9, 50e-6


def shifted(events, offset_ns, drift):
    """Return the events on a clock that is off by `offset_ns` at the start, and drifts."""

    def moved(ns):
        return ns + offset_ns + round(drift * (ns - START_NS))

    return [
        dataclasses.replace(event, begin_ns=moved(event.begin_ns), end_ns=moved(event.end_ns))
        for event in events
    ]


def run_on_nodes(folder, by_rank, clocks):
    """Write a run of which each rank is on a node with a clock of its own; the first is right."""
    own = [shifted(events, *clocks[rank]) for rank, events in enumerate(by_rank)]
    run = write_run(folder, own)
    for rank in range(1, len(by_rank)):
        set_boot_id(run / "trace" / trace_name(rank), f"node {rank}")
    return run


def round_trips(draw, ranks, rounds, latency_ns):
    """Return actions in which the first rank and each other one exchange messages, and compute."""
    actions = []
    for _ in range(rounds):
        for other in range(1, ranks):
            there, back = (latency_ns + draw.randint(0, 4 * latency_ns) for _ in range(2))
            actions += [Message(0, other, there), Message(other, 0, back)]
        actions += [Work(rank, draw.randint(MS, 400 * MS)) for rank in range(ranks)]
        actions.append(EndOfStep())
    return actions


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("barrier", [False, True])
def test_offset_and_drift_are_corrected_to_three_latencies(tmp_path, seed, barrier):
    draw, latency_ns = random.Random(seed), 30 * US
    actions = round_trips(draw, 3, 200, latency_ns)
    if barrier:  # collectives are much slower than messages: they must not spoil the clock
        actions = [Collective("barrier", 5 * MS), *actions, Collective("barrier", 5 * MS)]
        actions.append(EndOfStep())
    by_rank, _ = play(3, actions)
    clocks = [(0, 0.0), (OFFSET_NS, -DRIFT), (-OFFSET_NS, DRIFT)]
    run = run_on_nodes(tmp_path, by_rank, clocks)
    trace = load_run(run)
    for rank, clock in enumerate(trace.clocks):
        true_ns = np.array([event.end_ns for event in by_rank[rank]])
        found_ns = clock.to_run_ns(trace.ranks[rank].events["end_ns"])
        error_ns = int(abs(found_ns - true_ns).max())
        assert error_ns <= 3 * latency_ns
        assert clock.error_ns is not None
        assert error_ns <= clock.error_ns
    assert_causal(trace.matches)
    with SpooledRun(run) as spooled:
        for clock, other in zip(spooled.clocks, trace.clocks, strict=True):
            assert clock.offset_ns == pytest.approx(other.offset_ns, abs=2)
            assert clock.drift == pytest.approx(other.drift, abs=1e-12)


def assert_causal(matches):
    messages = matches.messages
    received = messages[~messages["sends"]]
    assert (received["partner"] >= 0).all()
    assert (received["exit_ns"] >= messages["enter_ns"][received["partner"]]).all()
    calls = matches.calls[matches.synchronising()]
    assert (calls["exit_ns"] >= matches.instances["last_ns"][calls["instance"]]).all()


def test_a_receive_before_its_send_is_counted_and_moved(tmp_path):
    """Two nodes exchange faster with each other than with the first one, whose paths mislead."""
    actions = []
    for _ in range(20):
        actions += [Message(0, 1, 10 * US), Message(1, 0, 2 * MS)]
        actions += [Message(0, 2, 2 * MS), Message(2, 0, 10 * US)]
        actions += [Work(1, 20 * MS), Message(1, 2, 10 * US)]
        actions += [Work(2, 20 * MS), Message(2, 1, 10 * US)]
        actions += [*(Work(rank, 3 * MS) for rank in range(3)), EndOfStep()]
    by_rank, _ = play(3, actions)
    trace = load_run(run_on_nodes(tmp_path, by_rank, [(0, 0.0), (OFFSET_NS, 0), (7, 0)]))
    assert trace.violations.messages > 0
    assert 0 < trace.violations.largest_ns <= sum(clock.error_ns or 0 for clock in trace.clocks)
    assert_causal(trace.matches)
    stats = summarize_trace(analyse(trace))
    assert stats.violations == trace.violations


def test_ranks_of_one_node_have_nothing_to_repair(tmp_path):
    by_rank, _ = play(2, round_trips(random.Random(1), 2, 10, 30 * US))
    trace = load_run(write_run(tmp_path, by_rank))
    assert trace.violations == type(trace.violations)()
    assert all(clock.is_identity for clock in trace.clocks)
    assert trace.ranks[0].events_of(Kind.STEP)["step"].tolist() == list(range(10))
