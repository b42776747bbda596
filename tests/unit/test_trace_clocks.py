"""Clocks of nodes that are off and drift: corrected within what messages allow, and causal."""

import dataclasses
import random

import numpy as np
import pytest
from support.exchanges import START_NS, Collective, EndOfStep, Message, Work, play
from support.traces import MS, set_boot_id, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.stats import summarize_trace
from paceline.trace.format.events import Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run
from paceline.trace.merge.clock_bounds import _thinned
from paceline.trace.merge.clock_pieces import fit_pieces
from paceline.trace.merge.clocks import fit_clock
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


def kinked(before, after, change_ns, step_ns=0):
    """Return a clock of a node: its drift, after `change_ns` another one, and a step forward."""

    def moved(ns):
        first = min(ns, change_ns) - START_NS
        later = max(0, ns - change_ns)
        own = ns + OFFSET_NS + round(before * first) + round(after * later)
        return own + (step_ns if ns >= change_ns else 0)

    return moved


def on_clock(events, moved):
    return [
        dataclasses.replace(event, begin_ns=moved(event.begin_ns), end_ns=moved(event.end_ns))
        for event in events
    ]


CHANGES = {
    "drift": (-DRIFT, DRIFT, 0),
    "step": (DRIFT, DRIFT, 2 * 10**9),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("change", ["drift", "step"])
def test_a_clock_that_changes_amid_a_run_is_followed_to_three_latencies(tmp_path, seed, change):
    draw, latency_ns = random.Random(seed), 30 * US
    by_rank, _ = play(2, round_trips(draw, 2, 300, latency_ns))
    ends = sorted(event.end_ns for event in by_rank[1])
    before, after, step_ns = CHANGES[change]
    own = on_clock(by_rank[1], kinked(before, after, ends[len(ends) // 2], step_ns))
    run = write_run(tmp_path, [by_rank[0], own])
    set_boot_id(run / "trace" / trace_name(1), "node 1")
    trace = load_run(run)
    clock = trace.clocks[1]
    assert len(clock.later) == 1
    assert clock.error_ns is not None
    events = trace.ranks[1].events
    true_ns = dict(
        zip((event.end_ns for event in own), (e.end_ns for e in by_rank[1]), strict=True)
    )
    shown = [time for time in events["end_ns"].tolist() if time in true_ns]
    found_ns = clock.to_run_ns(np.array(shown))
    assert found_ns.tolist() == [clock.to_run_ns(time) for time in shown]
    errors_ns = abs(found_ns - np.array([true_ns[time] for time in shown]))
    assert int(errors_ns.max()) <= min(3 * latency_ns, clock.error_ns)
    assert (np.diff(found_ns[np.argsort(shown)]) >= 0).all()
    assert_causal(trace.matches)
    (stats,) = summarize_trace(analyse(trace)).ranks[1:]
    assert stats.clock_changes == 1
    with SpooledRun(run) as spooled:
        assert len(spooled.clocks[1].later) == 1


def test_drift_that_changes_all_the_time_takes_as_many_pieces_as_it_needs():
    """Offsets follow a parabola: 40 ppm more after an hour, of exchanges within 100 us."""
    draw = np.random.default_rng(3)
    times = np.sort(draw.integers(0, 3600 * 10**9, 4000))
    true = np.rint(40e-6 * times.astype(float) ** 2 / (2 * 3600e9)).astype(np.int64)
    late, early = (50 * US + draw.exponential(20 * US, (2, 4000))).astype(np.int64)
    below = np.stack([times, true - late], axis=1)
    above = np.stack([times, true + early], axis=1)
    clock = fit_pieces(below, above, (int(times[0]), int(times[-1])))
    assert 5 < len(clock.later) < 60
    errors_ns = abs(clock.to_run_ns(times) - times - true)
    assert errors_ns.max() <= clock.error_ns
    assert errors_ns.max() <= 150 * US
    assert (np.diff(clock.to_run_ns(np.arange(0, 3600 * 10**9, 10**8))) >= 0).all()


def test_one_exchange_that_contradicts_all_others_is_no_change_of_the_clock():
    times = np.arange(200) * 10**8
    below = np.stack([times, np.full(200, -50 * US)], axis=1)
    above = np.stack([times, np.full(200, 50 * US)], axis=1)
    below[100, 1] = MS
    clock = fit_pieces(below, above, (0, int(times[-1])))
    assert (clock.error_ns, clock.later) == (None, ())


def test_of_many_exchanges_those_are_kept_that_bound_the_clock(monkeypatch):
    monkeypatch.setattr("paceline.trace.merge.clock_bounds._MOST_POINTS", 512)
    draw = np.random.default_rng(3)
    times = np.sort(draw.integers(0, 10**12, 5000))
    points = np.stack([times, -draw.exponential(50 * US, 5000).astype(np.int64)], axis=1)
    kept = _thinned(points, 1)
    assert len(kept) < 600
    of_all = fit_clock((points[:, 0], points[:, 1]), (times, points[:, 1] + MS), (0, 10**12))
    of_kept = fit_clock((kept[:, 0], kept[:, 1]), (times, points[:, 1] + MS), (0, 10**12))
    assert of_all == of_kept
