"""Replays, efficiencies and costs hold for any exchange of ranks, against ranks played again."""

import dataclasses
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.exchanges import Collective, EndOfStep, Message, Work, play
from support.traces import MS, Event, write_run

from paceline.trace.analysis import analyse
from paceline.trace.efficiency import measure_efficiency
from paceline.trace.efficiency.measure import _measured
from paceline.trace.efficiency.window import StreamedRun
from paceline.trace.format.events import BLOCKING, BY_RUN, Kind
from paceline.trace.merge import load_run
from paceline.trace.merge.windows import SpooledRun

NS = st.integers(1_000, 9_000_000)
KINDS = st.sampled_from([Kind.INPUT, Kind.FORWARD, Kind.BACKWARD, Kind.CHECKPOINT])


@st.composite
def programs(draw, rooted=True):
    ranks = draw(st.integers(2, 4))
    rank = st.integers(0, ranks - 1)
    pairs = st.tuples(rank, rank).filter(lambda pair: pair[0] != pair[1])
    symmetric, one_way = (
        st.sampled_from(names) for names in (["all_reduce", "barrier"], ["broadcast", "reduce"])
    )
    actions = [
        st.tuples(rank, NS, KINDS).map(lambda fields: Work(*fields)),
        st.tuples(pairs, NS).map(lambda fields: Message(*fields[0], fields[1])),
        st.tuples(symmetric, NS).map(lambda fields: Collective(*fields)),
        st.just(EndOfStep()),
    ]
    if rooted:
        actions.append(st.tuples(one_way, NS, rank).map(lambda fields: Collective(*fields)))
    action = st.one_of(actions)
    begin = [Work(number, draw(NS)) for number in range(ranks)]
    return ranks, [*begin, *draw(st.lists(action, max_size=40)), EndOfStep()]


def measured(by_rank):
    with tempfile.TemporaryDirectory() as folder:
        return measure_efficiency(analyse(load_run(write_run(Path(folder), by_rank))))


@settings(max_examples=examples(60), deadline=None)
@given(programs())
def test_factors_paths_and_costs_add_up(program):
    by_rank, _ = play(*program)
    found = measured(by_rank)
    metrics = found.metrics
    for factor in (metrics.load_balance, metrics.serialisation, metrics.transfer, metrics.io):
        assert 0 <= factor <= 1 + 1e-12
    outside_s = found.metrics.parallel * found.seconds * len(by_rank)
    waited_s = sum(event.end_ns - event.begin_ns for events in by_rank for event in events
                   if event.kind == Kind.WAIT and event.step >= found.first_step) / 1e9  # fmt: skip
    assert metrics.communication == pytest.approx(metrics.serialisation * metrics.transfer)
    assert metrics.parallel == pytest.approx(metrics.load_balance * metrics.communication)
    assert metrics.overall == pytest.approx(metrics.parallel * metrics.io)
    assert outside_s + waited_s <= found.seconds * len(by_rank) * (1 + 1e-9)
    assert found.replay_error == pytest.approx(0, abs=1e-6)
    assert found.path.seconds == pytest.approx(found.seconds, rel=1e-6)
    assert sum(part.seconds for part in found.path.parts) == pytest.approx(found.path.seconds)
    costs = sum(cost.seconds for cost in found.waits.delays)
    assert costs == pytest.approx(found.waits.seconds, rel=1e-4)
    assert sum(call.seconds for call in found.waits.calls) == pytest.approx(found.waits.seconds)
    assert all(item.shorter >= -1e-9 for item in found.what_ifs if "balanced" not in item.scenario)
    assert found.cut_count == 0


@settings(max_examples=examples(60), deadline=None)
@given(programs(rooted=False))
def test_free_communication_is_what_ranks_do_when_data_move_in_no_time(program):
    ranks, actions = program
    one_step = [action for action in actions if not isinstance(action, EndOfStep)] + [EndOfStep()]
    recorded, _ = play(ranks, one_step)
    _, free_ns = play(ranks, one_step, moves=0.0)
    found = measured(recorded)
    assert found.what_ifs[1].step_s == pytest.approx(free_ns / 1e9, abs=1e-9)


def assert_same(found, expected, where=""):
    """Compare what JSON has of two results, numbers to rounding; order counts but for equals."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        assert len(found) == len(expected), where
        for one, other in zip(_sorted(found), _sorted(expected), strict=True):
            assert_same(one, other, f"{where}[]")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, f"{where}[]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-9), where
    else:
        assert found == expected, where


def _sorted(rows):
    """Order rows by what is text or a whole number: rounding may swap equal figures."""
    return sorted(rows, key=lambda row: [str(v) for v in row.values() if not isinstance(v, float)])


def long_program(seed):
    """Return ranks and actions of some hundred exchanges in many steps, none of which is empty."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 5)
    ends, collectives = draw.choice([0.05, 0.2]), draw.choice([0.0, 0.05, 0.3])
    actions = []
    for _ in range(300):
        kind = draw.random()
        if kind < ends:
            actions += [*(Work(rank, draw.randint(1_000, 90_000)) for rank in range(ranks))]
            actions.append(EndOfStep())
        elif kind < ends + collectives:
            operation = draw.choice(["all_reduce", "barrier", "broadcast", "reduce"])
            root = draw.randrange(ranks) if operation in ("broadcast", "reduce") else -1
            actions.append(Collective(operation, draw.randint(1_000, 9_000_000), root))
        elif kind < 0.7:
            phase = draw.choice([Kind.INPUT, Kind.FORWARD, Kind.BACKWARD, Kind.CHECKPOINT])
            actions.append(Work(draw.randrange(ranks), draw.randint(1_000, 9_000_000), phase))
        else:
            pair = draw.sample(range(ranks), 2)
            actions.append(Message(*pair, draw.randint(1_000, 9_000_000)))
    actions += [*(Work(rank, draw.randint(1_000, 90_000)) for rank in range(ranks)), EndOfStep()]
    return ranks, actions


@pytest.mark.parametrize("seed", range(8))
def test_a_run_read_window_by_window_is_measured_as_one_in_memory(seed, tmp_path):
    by_rank, _ = play(*long_program(seed))
    run = write_run(tmp_path, by_rank)
    expected = measure_efficiency(analyse(load_run(run)))
    with SpooledRun(run) as spooled:
        windows = spooled.windows(1, spooled.steps, 1)
        found = _measured(StreamedRun(spooled, window_events=1), None)
    assert len(windows) >= spooled.steps // 8
    assert_same(found.to_json(), expected.to_json())


def as_mpi(events):
    """Return a rank's events as an MPI program has them: calls block, and nothing marks a step."""
    calls = [
        dataclasses.replace(event, flags=BLOCKING)
        if event.kind in (Kind.COLLECTIVE, Kind.RECV)
        else event
        for event in events
        if event.kind not in (Kind.WAIT, Kind.STEP)
    ]
    end_ns = max(event.end_ns for event in events)
    begin_ns = min(event.begin_ns for event in events)
    return [*calls, Event(Kind.STEP, begin_ns, end_ns, BY_RUN)]


@pytest.mark.parametrize("seed", range(4))
def test_an_mpi_program_read_window_by_window_is_measured_as_one_in_memory(seed, tmp_path):
    draw = random.Random(seed)
    actions = [Collective("broadcast", 10_000, 0)]
    for _ in range(30):
        actions += [Work(rank, draw.randint(MS, 9 * MS)) for rank in range(3)]
        actions += [Message(rank, (rank + 1) % 3, draw.randint(1_000, MS)) for rank in range(3)]
        actions += [Work(draw.randrange(3), draw.randint(1_000, 9 * MS), Kind.INPUT)]
        actions += [Collective("all_reduce", draw.randint(1_000, MS)), Work(1, MS)]
        actions += [Collective("barrier", draw.randint(1_000, MS))]
    by_rank, _ = play(3, actions)
    run = write_run(tmp_path, [as_mpi(events) for events in by_rank])
    expected = measure_efficiency(analyse(load_run(run)))
    with SpooledRun(run) as spooled:
        assert spooled.steps == 30
        found = _measured(StreamedRun(spooled, window_events=1), None)
    assert found.waits.seconds > 0
    assert_same(found.to_json(), expected.to_json())
