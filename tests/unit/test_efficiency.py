"""What a run waited for, who caused it, and what would make its steps shorter."""

import pytest
from support.exchanges import Collective, EndOfStep, Message, Work, play
from support.traces import MS, Event, Late, data_parallel, set_boot_id, set_dropped_count, write_run

from paceline.core.errors import NotFound, UsageError
from paceline.trace.analysis import analyse
from paceline.trace.efficiency import measure_efficiency
from paceline.trace.efficiency.matrix import PairTraffic
from paceline.trace.format.events import COMMUNICATION, Kind
from paceline.trace.merge import load_run

STEPS = 12


def measured(folder, by_rank, step=None):
    return measure_efficiency(analyse(load_run(write_run(folder, by_rank))), step)


def repeated(actions, steps=STEPS):
    return [*actions, EndOfStep()] * steps


def test_a_late_sender_is_found_with_its_size_and_its_cause(tmp_path):
    step = [Work(0, 25 * MS), Work(1, 5 * MS), Message(0, 1, MS), Collective("barrier", 10_000)]
    found = measured(tmp_path, play(2, repeated(step))[0])
    (call,) = (call for call in found.waits.calls if call.state == "late sender")
    assert call.seconds / call.count == pytest.approx(0.020, rel=0.05)
    assert (call.operation, call.count) == ("recv", STEPS - 1)
    assert (found.waits.delays[0].rank, found.waits.delays[0].phase) == (0, "forward")
    assert found.waits.delays[0].direct_s == pytest.approx(0.020 * (STEPS - 1), rel=0.05)


def test_a_slow_loader_is_charged_with_what_all_others_wait(tmp_path):
    late = (Late(rank=2, ms=20, first=0, last=STEPS),)
    found = measured(tmp_path, data_parallel(4, STEPS, late=late))
    (call,) = found.waits.calls
    assert (call.state, call.operation, call.phase) == ("wait at NxN", "all_reduce", "backward")
    assert call.seconds == pytest.approx(3 * 0.020 * (STEPS - 1), rel=0.05)
    cost = found.waits.delays[0]
    assert (cost.rank, cost.phase) == (2, "input")
    assert cost.direct_s == pytest.approx(found.waits.seconds)
    waited = {rank.rank: sum(rank.waited_s.values()) for rank in found.waits.ranks}
    assert waited[2] == 0
    assert waited[0] == pytest.approx(0.020 * (STEPS - 1))
    assert found.path.parts[0].rank == 2
    assert found.path.parts[0].phase == "input"


def test_a_wait_that_is_passed_on_is_charged_to_its_origin(tmp_path):
    step = [
        *(Work(0, 21 * MS), Work(1, MS), Work(2, MS)),
        *(Message(0, 1, 0), Work(1, MS), Work(2, MS), Message(1, 2, 0)),
        Collective("barrier", 10_000),
    ]
    found = measured(tmp_path, play(3, repeated(step))[0])
    cost = found.waits.delays[0]
    assert (cost.rank, cost.phase) == (0, "forward")
    of_messages_s = 0.020 * (STEPS - 1)
    assert cost.indirect_s >= 0.9 * of_messages_s
    assert cost.seconds == pytest.approx(found.waits.seconds, rel=0.1)


@pytest.mark.parametrize(
    ("operation", "state", "waits"),
    [("broadcast", "late broadcast", 2), ("reduce", "early reduce", 1)],
)
def test_one_way_collectives_have_states_of_their_own(tmp_path, operation, state, waits):
    late = 0 if operation == "broadcast" else 1
    step = [
        *(Work(rank, 25 * MS if rank == late else 5 * MS) for rank in range(3)),
        Collective(operation, 10_000, root=0),
        Collective("barrier", 10_000),
    ]
    found = measured(tmp_path, play(3, repeated(step))[0])
    calls = [call for call in found.waits.calls if call.operation == operation]
    assert [call.state for call in calls] == [state]
    assert calls[0].seconds == pytest.approx(waits * 0.020 * (STEPS - 1), rel=0.05)
    assert found.waits.delays[0].rank == late


def test_the_parts_of_the_critical_path_add_up_to_the_steps(tmp_path):
    found = measured(tmp_path, data_parallel(4, STEPS, late=(Late(1, 20, 3, 6),)))
    assert found.path.seconds == pytest.approx(found.seconds, rel=1e-9)
    assert sum(part.seconds for part in found.path.parts) == pytest.approx(found.path.seconds)
    assert found.replay_error == pytest.approx(0, abs=1e-9)
    one = measure_efficiency(analyse(load_run(tmp_path)), 4)
    assert (one.first_step, one.last_step, one.steps) == (4, 4, 1)
    assert one.path.seconds == pytest.approx(0.030, rel=0.01)


@pytest.mark.parametrize(
    ("late", "changes"),
    [
        ((Late(0, 20, 0, STEPS),), 0),
        ((Late(1, 20, 0, STEPS),), 1),  # the path ends on rank 0
        ((Late(0, 20, 0, 5), Late(1, 20, 6, STEPS)), 2),
        (tuple(Late(step % 2, 20, step, step) for step in range(STEPS)), STEPS - 2),
    ],
)
def test_the_critical_path_goes_to_the_rank_that_is_late(tmp_path, late, changes):
    path = measured(tmp_path, data_parallel(2, STEPS, late=late)).path
    assert path.rank_changes == changes


def test_a_balanced_load_spreads_what_one_rank_does_longer(tmp_path):
    late = (Late(rank=1, ms=8, first=0, last=STEPS, cause="compute"),)
    found = measured(tmp_path, data_parallel(4, STEPS, late=late))
    steps_s = {item.scenario: item.step_s for item in found.what_ifs}
    assert steps_s["as recorded"] == pytest.approx(0.018)
    assert steps_s["perfectly balanced load"] == pytest.approx(0.012, rel=0.01)
    assert steps_s["free communication"] == pytest.approx(0.017, rel=0.01)
    assert steps_s["free communication and balanced load"] == pytest.approx(0.011, rel=0.01)
    assert steps_s["free input and checkpoints"] == pytest.approx(0.017, rel=0.01)
    metrics = found.metrics
    assert metrics.load_balance == pytest.approx(11 / 17, rel=0.01)
    assert metrics.serialisation == pytest.approx(1, rel=0.01)
    assert metrics.transfer == pytest.approx(17 / 18, rel=0.01)
    assert metrics.io == pytest.approx(10 / 11, rel=0.01)


def test_messages_count_as_sent_and_collectives_as_their_algorithm_moves_them(tmp_path):
    step = [
        *(Work(rank, MS) for rank in range(4)),
        Message(0, 3, MS, amount=700),
        Message(3, 0, MS, amount=50),
        Collective("all_reduce", MS, amount=4000),
        Collective("broadcast", MS, root=1, amount=90),
    ]
    run = write_run(tmp_path, play(4, repeated(step))[0])
    for rank in (2, 3):
        set_boot_id(run / "trace" / f"rank-{rank:05d}.trace", "another node")
    found = measure_efficiency(analyse(load_run(run))).matrix
    pairs = {(pair.source, pair.target): pair for pair in found.pairs}
    assert pairs[0, 3] == PairTraffic(0, 3, STEPS, 700 * STEPS, 0, 0)
    assert pairs[3, 0].message_bytes == 50 * STEPS
    assert pairs[3, 0].collective_bytes == STEPS * 2 * 3 * 1000
    assert pairs[1, 2].collective_bytes == STEPS * (2 * 3 * 1000 + 90)
    assert pairs[1, 3].collective_bytes == STEPS * 90
    assert found.algorithms == {"all_reduce": "ring", "broadcast": "root to each rank"}
    levels = {level.level: level for level in found.levels}
    assert levels["network"].message_bytes == 750 * STEPS
    assert levels["node"].message_bytes == 0
    total = sum(level.collective_bytes for level in found.levels)
    assert total == STEPS * (4 * 6000 + 3 * 90)


def test_a_collective_behind_computing_is_hidden_but_for_what_the_rank_waits(tmp_path):
    def events(rank):
        found = []
        for step in range(STEPS):
            begin = 10**12 + step * 20 * MS
            at = {"group": "g", "sequence": step + 1}
            span = begin + 5 * MS, begin + 15 * MS
            found += [
                Event(Kind.COLLECTIVE, *span, "all_reduce", step, 8, location=COMMUNICATION, **at),
                Event(Kind.BACKWARD, begin, begin + 13 * MS, "backward", step),
                Event(Kind.WAIT, begin + 13 * MS, begin + 15 * MS, "all_reduce", step, **at),
                Event(Kind.STEP, begin, begin + 20 * MS, "step", step),
            ]
        return found

    found = measured(tmp_path, [events(0), events(1)])
    for rank in found.overlap:
        assert rank.moving_s == pytest.approx(0.010 * STEPS)
        assert rank.exposed_s == pytest.approx(0.002 * STEPS)
        assert rank.hidden_share == pytest.approx(0.8)
    assert found.what_ifs[1].step_s == pytest.approx(0.018)


def test_clocks_that_contradict_each_other_are_cut_and_counted(tmp_path):
    by_rank = play(2, repeated([Work(0, MS), Work(1, MS), Message(0, 1, MS), Message(1, 0, MS)]))[0]
    by_rank[1] = [moved(event, -5 * MS) for event in by_rank[1]]
    found = measured(tmp_path, by_rank)
    assert found.seconds > 0
    assert sum(part.seconds for part in found.path.parts) == pytest.approx(found.path.seconds)


def test_ranks_of_two_nodes_are_compared_on_one_clock(tmp_path):
    late = (Late(rank=1, ms=20, first=0, last=5), Late(0, 20, 6, STEPS, "compute"))
    by_rank = data_parallel(2, STEPS, late=late)
    by_rank[1] = [moved(event, 2000 * MS) for event in by_rank[1]]
    run = write_run(tmp_path, by_rank)
    set_boot_id(run / "trace" / "rank-00001.trace", "another node")
    found = measure_efficiency(analyse(load_run(run)))
    assert found.waits.seconds == pytest.approx(0.020 * (STEPS - 1), rel=0.05)
    costs = {(cost.rank, cost.phase): cost.direct_s for cost in found.waits.delays}
    assert costs[1, "input"] == pytest.approx(0.020 * 5, rel=0.05)
    assert costs[0, "forward"] == pytest.approx(0.020 * 6, rel=0.05)
    assert found.path.seconds == pytest.approx(found.seconds, rel=1e-3)
    assert [level.level for level in found.matrix.levels] == ["network"]


def moved(event, ns):
    return Event(
        **{
            **{name: getattr(event, name) for name in event.__dataclass_fields__},
            "begin_ns": event.begin_ns + ns,
            "end_ns": event.end_ns + ns,
        }
    )


def test_a_single_rank_has_nothing_to_wait_for(tmp_path):
    found = measured(tmp_path, play(1, repeated([Work(0, MS)]))[0])
    assert found.metrics.parallel == 1
    assert found.waits.seconds == 0
    assert not found.matrix.pairs


def test_a_step_that_a_rank_lost_is_refused_and_the_others_are_measured(tmp_path):
    by_rank = data_parallel(2, STEPS)
    by_rank[1] = [event for event in by_rank[1] if event.kind != Kind.STEP or event.step != 4]
    run = write_run(tmp_path, by_rank)
    set_dropped_count(run / "trace" / "rank-00001.trace", 1)
    analysis = analyse(load_run(run))
    with pytest.raises(NotFound, match="step 4 of rank 1 was not recorded"):
        measure_efficiency(analysis, 4)
    assert measure_efficiency(analysis).what_ifs[0].step_s == pytest.approx(0.010)


def test_steps_that_are_not_there_are_refused(tmp_path):
    analysis = analyse(load_run(write_run(tmp_path / "a", data_parallel(2, 5))))
    with pytest.raises(UsageError, match="no step 7"):
        measure_efficiency(analysis, 7)
    events = [[Event(Kind.FORWARD, 10**12, 10**12 + 1)]]
    with pytest.raises(NotFound, match="no step"):
        measure_efficiency(analyse(load_run(write_run(tmp_path / "b", events))))
