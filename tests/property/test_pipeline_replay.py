"""The replay of a pipeline: the published bubbles, and the times of ranks that send messages."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.pipeline_cases import chain, drawn_schedules, edges_of, execute

from paceline.core.errors import ConfigError, InvalidSchedule, UsageError
from paceline.core.machine import Link, Quantity
from paceline.schedules import Topology
from paceline.schedules.pipeline import (
    PipelineAction,
    PipelineReplay,
    PipelineSchedule,
    StageCosts,
    StageEdge,
    fill_drain,
    interleaved,
    one_forward_one_backward,
    replay,
    zero_bubble,
)

seconds = st.floats(0, 10, allow_subnormal=False)


def link(bandwidth=1e30, latency_s=0.0, sharing="pair"):
    return Link(
        level="network",
        latency_s=Quantity(value=latency_s, source="datasheet"),
        bandwidth_bytes_per_s=Quantity(value=bandwidth, source="datasheet"),
        sharing=sharing,
    )


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 16))
@pytest.mark.parametrize("make", [fill_drain, one_forward_one_backward])
def test_the_bubble_of_equal_stages_is_the_published_one(make, stages, microbatches):
    costs = StageCosts.uniform(stages, 2.0, 2.0)
    replayed = replay(make(stages, microbatches), chain(stages), costs)
    assert replayed.bubble_share == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert replayed.busy_s == (4.0 * microbatches,) * stages


@given(ranks=st.integers(1, 8), turns=st.integers(1, 3), stages_per_rank=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_stages_per_rank(ranks, turns, stages_per_rank):
    schedule = interleaved(ranks, stages_per_rank, turns * ranks)
    replayed = replay(
        schedule, chain(schedule.stages), StageCosts.uniform(schedule.stages, 1.0, 2.0)
    )
    assert replayed.bubble_s == (3.0 * (ranks - 1),) * ranks


@given(
    stages=st.integers(1, 8),
    extra=st.integers(0, 8),
    forward=st.integers(1, 9),
    backward_input=st.integers(1, 9),
    data=st.data(),
)
def test_zero_bubble_fills_what_the_paper_says(stages, extra, forward, backward_input, data):
    weight = data.draw(st.integers(1, min(forward, backward_input)))
    costs = StageCosts(
        forward_s=(float(forward),) * stages,
        backward_s=(float(backward_input + weight),) * stages,
        backward_weight_s=(float(weight),) * stages,
    )
    schedule = zero_bubble(stages, stages + extra)
    idle_s = (stages - 1) * (forward + backward_input - weight)
    assert replay(schedule, chain(stages), costs).bubble_s == (float(idle_s),) * stages


@given(schedule=drawn_schedules(), data=st.data(), latency_s=st.sampled_from([0.0, 0.3]))
def test_times_are_those_of_ranks_that_send_messages(schedule, data, latency_s):
    """Without contention: no link is shared by two messages at a time if bandwidth is endless."""
    edges = data.draw(edges_of(schedule))
    rng = random.Random(data.draw(st.integers(0, 999)))
    costs = StageCosts(
        forward_s=tuple(rng.random() for _ in range(schedule.stages)),
        backward_s=tuple(rng.random() for _ in range(schedule.stages)),
    )
    by_kind = costs.by_kind()
    replayed = replay(schedule, edges, costs, link(latency_s=latency_s))
    expected = execute(
        schedule,
        edges,
        lambda action: by_kind[action.kind][action.stage],
        lambda edge: latency_s,
    )
    for rank, order in enumerate(schedule.actions):
        assert replayed.end_s[rank] == pytest.approx([expected[action] for action in order])
        assert replayed.start_s[rank] == pytest.approx(
            [expected[action] - by_kind[action.kind][action.stage] for action in order]
        )
    assert replayed.makespan_s == pytest.approx(max(expected.values()))


@given(
    schedule=drawn_schedules(),
    data=st.data(),
    sharing=st.sampled_from(["pair", "device", "node", "all"]),
)
def test_a_slow_link_only_delays_and_is_accounted_for(schedule, data, sharing):
    edges = data.draw(edges_of(schedule))
    costs = StageCosts.uniform(schedule.stages, 1.0, 2.0)
    free = replay(schedule, edges, costs)
    slow = replay(schedule, edges, costs, link(1000.0, 0.1, sharing))
    assert free.exposed_transfer_s == (0.0,) * schedule.ranks
    assert slow.busy_s == free.busy_s
    assert slow.makespan_s >= free.makespan_s - 1e-9
    for exposed_s, bubble_s in zip(slow.exposed_transfer_s, slow.bubble_s, strict=True):
        assert -1e-9 <= exposed_s <= bubble_s + 1e-9
    for starts, finishes in zip(slow.start_s, slow.end_s, strict=True):
        for start_s, end_s in zip(starts[1:], finishes[:-1], strict=True):
            assert start_s >= end_s
    assert PipelineReplay.from_text(slow.to_text()) == slow


def fan(microbatches=1):
    """Return a model whose first stage feeds two others, and its order."""
    return fill_drain(3, microbatches), [StageEdge(0, 1, 100), StageEdge(0, 2, 100)]


@pytest.mark.parametrize(
    ("sharing", "starts"),
    [("pair", (2.5, 2.5)), ("device", (2.5, 3.5)), ("node", (2.5, 3.5)), ("all", (2.5, 3.5))],
)
def test_messages_that_share_a_link_move_one_after_another(sharing, starts):
    schedule, edges = fan()
    replayed = replay(schedule, edges, StageCosts.uniform(3, 1.0, 1.0), link(100.0, 0.5, sharing))
    assert (replayed.start_s[1][0], replayed.start_s[2][0]) == starts


@pytest.mark.parametrize(("sharing", "start_s"), [("pair", 2.5), ("device", 3.5), ("node", 3.5)])
def test_messages_to_one_rank_share_its_link(sharing, start_s):
    schedule, edges = fill_drain(3, 1), [StageEdge(0, 2, 100), StageEdge(1, 2, 100)]
    replayed = replay(schedule, edges, StageCosts.uniform(3, 1.0, 1.0), link(100.0, 0.5, sharing))
    assert replayed.start_s[2][0] == start_s


def test_of_messages_that_arrive_together_the_last_sent_one_is_exposed():
    edges = [StageEdge(0, 2, 200), StageEdge(0, 1, 0), StageEdge(1, 2, 100)]
    for order in (edges, edges[::-1]):
        replayed = replay(fill_drain(3, 1), order, StageCosts.uniform(3, 1.0, 0.0), link(100.0))
        assert replayed.start_s[2][0] == 3.0
        assert replayed.exposed_transfer_s[2] == 1.0


def test_a_link_is_full_duplex_unless_all_share_it():
    """Rank 0 sends the activations of microbatch 1 while rank 1 sends gradients of 0."""
    schedule = one_forward_one_backward(2, 2)
    costs = StageCosts(forward_s=(1.0, 0.0), backward_s=(1.0, 0.0))
    starts = {
        sharing: replay(schedule, chain(2, 100), costs, link(100.0, 0.0, sharing)).start_s
        for sharing in ("pair", "node", "all")
    }
    # F0.0 ends at 1, arrives at 2; F0.1 ends at 2: its message and the gradient are ready at once.
    assert starts["pair"] == starts["node"] == ((0.0, 1.0, 3.0, 4.0), (2.0, 2.0, 3.0, 3.0))
    assert starts["all"][1][2] + starts["all"][0][2] == 3.0 + 4.0


def test_ranks_of_a_host_use_its_own_link():
    schedule, edges = fan()
    topology = Topology(hosts=((0, 1), (2,)), inside=link(1000.0, 0.0), across=link(100.0, 0.5))
    replayed = replay(schedule, edges, StageCosts.uniform(3, 1.0, 1.0), topology)
    assert (replayed.start_s[1][0], replayed.start_s[2][0]) == (1.1, 2.5)


def test_exposed_transfer_is_the_wait_while_data_are_on_their_way():
    replayed = replay(
        fill_drain(2, 1), chain(2, 100), StageCosts.uniform(2, 1.0, 2.0), link(100.0, 0.5)
    )
    assert replayed.start_s == ((0.0, 7.0), (2.5, 3.5))
    assert replayed.end_s == ((1.0, 9.0), (3.5, 5.5))
    assert replayed.exposed_transfer_s == (1.5, 1.5)
    assert replayed.bubble_s == (6.0, 6.0)
    assert replayed.bubble_share == pytest.approx(12 / 18)


def test_a_ranks_first_wait_begins_with_the_batch_whatever_other_ranks_do():
    """Stage 2 is on rank 0, alone, and ends before the first data reach rank 1."""
    schedule = fill_drain(3, 1)
    orders = (schedule.actions[2], schedule.actions[1], schedule.actions[0])
    turned = dataclasses.replace(schedule, rank_of=(2, 1, 0), actions=orders)
    costs = StageCosts.uniform(3, 1.0, 1.0)
    replayed = replay(turned, [StageEdge(0, 1, 400)], costs, link(100.0))
    assert replayed.start_s[1][0] == 5.0
    assert replayed.exposed_transfer_s[1] == 4.0


def test_stages_of_one_rank_exchange_nothing():
    schedule = interleaved(1, 3, 2)
    replayed = replay(schedule, chain(3, 100), StageCosts.uniform(3, 1.0, 1.0), link(1.0, 9.0))
    assert replayed.makespan_s == 12.0
    assert replayed.bubble_share == 0.0


@given(whole=st.tuples(seconds, seconds), part=st.tuples(seconds, seconds))
@settings(max_examples=examples(30))
def test_the_parts_of_a_backward_that_are_not_given_follow_from_the_whole(whole, part):
    forward = (1.0, 1.0)
    halves = StageCosts(forward_s=forward, backward_s=whole).by_kind()
    assert halves["backward_input"] == halves["backward_weight"] == tuple(s / 2 for s in whole)
    rest = tuple(max(0.0, a - b) for a, b in zip(whole, part, strict=True))
    inputs = StageCosts(forward_s=forward, backward_s=whole, backward_input_s=part).by_kind()
    assert (inputs["backward_input"], inputs["backward_weight"]) == (part, rest)
    weights = StageCosts(forward_s=forward, backward_s=whole, backward_weight_s=part).by_kind()
    assert (weights["backward_input"], weights["backward_weight"]) == (rest, part)


def test_a_smaller_microbatch_takes_less_time():
    costs = StageCosts.uniform(2, 1.0, 2.0)
    replayed = replay(
        fill_drain(2, 2), chain(2, 100), costs, link(100.0), microbatch_sizes=[1.0, 0.5]
    )
    assert replayed.start_s == ((0.0, 1.0, 5.0, 7.5), (2.0, 3.0, 3.5, 4.5))
    assert replayed.end_s == ((1.0, 1.5, 6.0, 9.5), (3.0, 3.5, 4.5, 6.5))
    with pytest.raises(UsageError, match="3 sizes are given for 2 microbatches"):
        replay(fill_drain(2, 2), chain(2), costs, microbatch_sizes=[1.0] * 3)


def test_a_schedule_that_deadlocks_is_refused_with_its_cycle():
    actions = tuple(PipelineAction(kind, 0, 0) for kind in ("backward", "forward"))
    schedule = PipelineSchedule(
        name="test", stages=1, microbatches=1, rank_of=(0,), actions=(actions,)
    )
    with pytest.raises(InvalidSchedule, match="rank 0 waits in a cycle of 2 actions"):
        replay(schedule, [], StageCosts.uniform(1, 1.0, 1.0))


def test_costs_or_hosts_of_other_ranks_are_refused():
    schedule, costs = fill_drain(2, 1), StageCosts.uniform(2, 1.0, 1.0)
    with pytest.raises(UsageError, match="costs are of 3 stages, the schedule has 2"):
        replay(schedule, chain(2), StageCosts.uniform(3, 1.0, 1.0))
    with pytest.raises(UsageError, match="for 2 ranks, the hosts have 1"):
        replay(schedule, chain(2), costs, Topology(hosts=((0,),)))
    with pytest.raises(UsageError, match="no link between ranks 0 and 1"):
        replay(schedule, chain(2), costs, Topology(hosts=((0,), (1,))))
    with pytest.raises(ConfigError, match="backward_s has 1 values for 2 stages"):
        StageCosts(forward_s=(1.0, 1.0), backward_s=(1.0,))
    with pytest.raises(ConfigError, match="forward_s has a value below 0"):
        StageCosts(forward_s=(-1.0,), backward_s=(1.0,))
