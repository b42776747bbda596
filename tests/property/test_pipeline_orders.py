"""Orders of pipelines: every generator's is proved, and what is wrong with an order is found."""

import dataclasses
import random
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.pipeline_cases import (
    chain,
    cut_edges,
    drawn_schedules,
    edges_of,
    ends,
    random_edges,
    schedules,
)

from paceline.core.errors import ConfigError, InvalidSchedule, UsageError
from paceline.schedules.pipeline import (
    PipelineAction,
    PipelineSchedule,
    StageEdge,
    check_pipeline,
    fill_drain,
    interleaved,
    live_microbatches,
    one_forward_one_backward,
    peak_activation_bytes,
    zero_bubble,
)
from paceline.schedules.pipeline.graph import ActionGraph

RANDOM_GRAPHS = 1000
LETTERS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def order(text):
    """Return actions from words like ``F0.1``: kind, stage, microbatch."""
    words = (re.fullmatch(r"([FBIW])(\d+)\.(\d+)", word).groups() for word in text.split())
    return tuple(PipelineAction(LETTERS[kind], int(s), int(m)) for kind, s, m in words)


def schedule_of(*orders, stages=2, microbatches=2, rank_of=(0, 1)):
    return PipelineSchedule(
        name="test",
        stages=stages,
        microbatches=microbatches,
        rank_of=rank_of,
        actions=tuple(order(text) for text in orders),
    )


@given(schedule=drawn_schedules(), data=st.data())
def test_each_generated_order_is_proved_whatever_the_edges(schedule, data):
    check_pipeline(schedule, data.draw(edges_of(schedule)))
    check_pipeline(schedule, chain(schedule.stages))


@given(schedule=drawn_schedules())
@settings(max_examples=examples(30))
def test_a_schedule_survives_json(schedule):
    assert PipelineSchedule.from_text(schedule.to_text()) == schedule


@given(stages=st.integers(1, 8), microbatches=st.integers(1, 16))
def test_live_microbatches_are_as_published(stages, microbatches):
    assert live_microbatches(fill_drain(stages, microbatches)) == (microbatches,) * stages
    assert live_microbatches(one_forward_one_backward(stages, microbatches)) == tuple(
        min(stages - stage, microbatches) for stage in range(stages)
    )
    most = min(stages, microbatches)
    assert live_microbatches(zero_bubble(stages, microbatches)) == (most,) * stages


@given(ranks=st.integers(1, 8), turns=st.integers(1, 3), stages_per_rank=st.integers(2, 4))
def test_an_interleaved_rank_keeps_what_it_begins_with_and_one_more(ranks, turns, stages_per_rank):
    schedule = interleaved(ranks, stages_per_rank, turns * ranks)
    for rank, peak in enumerate(peak_activation_bytes(schedule, [1] * schedule.stages)):
        warm_up = 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * ranks
        assert peak == min(warm_up + 1, turns * ranks * stages_per_rank)


def test_orders_of_small_pipelines_are_those_of_the_papers():
    assert one_forward_one_backward(2, 3).actions == (
        order("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"),
        order("F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"),
    )
    assert fill_drain(2, 2).actions == (order("F0.0 F0.1 B0.1 B0.0"), order("F1.0 F1.1 B1.1 B1.0"))
    assert interleaved(2, 2, 4).actions == (
        order("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"),
        order("F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"),
    )
    assert zero_bubble(3, 3).actions == (
        order("F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2"),
        order("F1.0 F1.1 I1.0 F1.2 I1.1 W1.0 I1.2 W1.1 W1.2"),
        order("F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 W2.1 W2.2"),
    )
    assert interleaved(3, 1, 4).actions == one_forward_one_backward(3, 4).actions


@given(schedule=drawn_schedules(), data=st.data())
def test_a_dropped_repeated_or_misplaced_action_is_found(schedule, data):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    index = data.draw(st.integers(0, len(actions) - 1))
    changed = [list(other) for other in schedule.actions]
    mutation = data.draw(st.sampled_from(["drop", "repeat", "move"]))
    if mutation == "repeat":
        changed[rank].insert(data.draw(st.integers(0, len(actions))), actions[index])
    else:
        del changed[rank][index]
    if mutation == "move":
        assume(schedule.ranks > 1)
        changed[(rank + 1) % schedule.ranks].append(actions[index])
    mutant = dataclasses.replace(schedule, actions=tuple(map(tuple, changed)))
    with pytest.raises(InvalidSchedule, match=f"stage {actions[index].stage}, microbatch"):
        check_pipeline(mutant, chain(schedule.stages))


@given(schedule=drawn_schedules(), data=st.data(), seed=st.integers(0, 999))
@settings(max_examples=examples(200))
def test_swapped_actions_are_refused_exactly_if_ranks_would_wait_for_ever(schedule, data, seed):
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    actions = list(schedule.actions[rank])
    first, second = (data.draw(st.integers(0, len(actions) - 1)) for _ in range(2))
    actions[first], actions[second] = actions[second], actions[first]
    orders = (*schedule.actions[:rank], tuple(actions), *schedule.actions[rank + 1 :])
    mutant = dataclasses.replace(schedule, actions=orders)
    edges = data.draw(edges_of(schedule))
    assert is_refused(mutant, edges) != ends(mutant, edges, random.Random(seed))


def is_refused(schedule, edges):
    try:
        check_pipeline(schedule, edges)
    except InvalidSchedule:
        return True
    return False


def test_no_order_deadlocks_on_random_graphs_with_random_cuts_and_delays():
    for seed in range(RANDOM_GRAPHS):
        rng = random.Random(seed)
        cases = schedules(rng.randint(2, 6), rng.randint(1, 8), rng.randint(1, 3))
        schedule = rng.choice(cases)
        edges = cut_edges(rng, schedule.stages)
        check_pipeline(schedule, edges)
        assert ends(schedule, edges, rng), seed


def test_planted_cycles_are_refused_and_shown():
    """One rank ends each microbatch before the next; one across an edge begins with all of them."""
    planted = 0
    for seed in range(RANDOM_GRAPHS):
        rng = random.Random(seed)
        stages, microbatches = rng.randint(2, 6), rng.randint(2, 6)
        edges = random_edges(rng, stages)
        if not edges:
            continue
        edge = rng.choice(edges)
        schedule = fill_drain(stages, microbatches)
        one_by_one = tuple(
            PipelineAction(kind, edge.source, m)
            for m in range(microbatches)
            for kind in ("forward", "backward")
        )
        orders = list(schedule.actions)
        orders[edge.source] = one_by_one
        mutant = dataclasses.replace(schedule, actions=tuple(orders))
        assert not ends(mutant, edges, rng)
        with pytest.raises(InvalidSchedule, match="wait in a cycle of") as caught:
            check_pipeline(mutant, edges)
        assert caught.value.why.count("which waits for") >= 4
        graph = ActionGraph.of(mutant, edges)
        cycle = graph.cycle()
        for waiting, awaited in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            arcs = slice(graph.first[awaited], graph.first[awaited + 1])
            assert waiting in graph.after[arcs]
        planted += 1
    assert planted > RANDOM_GRAPHS / 2


def test_a_cycle_is_shown_action_by_action_with_ranks():
    schedule = schedule_of("F0.0 B0.0 F0.1 B0.1", "F1.1 B1.1 F1.0 B1.0")
    with pytest.raises(InvalidSchedule) as caught:
        check_pipeline(schedule, chain(2))
    assert caught.value.what == "2 ranks wait in a cycle of 6 actions"
    assert caught.value.why.split(", which waits for ") == [
        "rank 0: backward of stage 0, microbatch 0",
        "rank 1: backward of stage 1, microbatch 0 (gradients)",
        "rank 1: forward of stage 1, microbatch 1 (order of rank 1)",
        "rank 0: forward of stage 0, microbatch 1 (activations)",
        "rank 0: backward of stage 0, microbatch 0 (order of rank 0)",
    ]


def test_a_long_cycle_is_shown_in_part():
    stages = 40
    orders = [f"B{stage}.0 F{stage}.0" if stage == 39 else f"F{stage}.0 B{stage}.0"
              for stage in range(stages)]  # fmt: skip
    schedule = schedule_of(*orders, stages=stages, microbatches=1, rank_of=tuple(range(stages)))
    edges = [*chain(stages), StageEdge(39, 0, 1)]
    with pytest.raises(InvalidSchedule, match="cycle") as caught:
        check_pipeline(schedule, [edge for edge in edges if edge.source < edge.destination])
    assert caught.value.what == "rank 39 waits in a cycle of 2 actions"
    with pytest.raises(InvalidSchedule, match="40 ranks wait in a cycle of 40 actions") as caught:
        check_pipeline(fill_drain(stages, 1), edges)
    assert "and 17 more, the last of which waits for the first" in caught.value.why


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (("F0.0 B0.0", "F1.0 B1.0"), "has no forward"),
        (("F0.0 B0.0 F0.1", "F1.0 B1.0 F1.1 B1.1"), "has no backward"),
        (("F0.0 B0.0 F0.1 I0.1", "F1.0 B1.0 F1.1 B1.1"), "no backward_weight"),
        (("F0.0 B0.0 F0.1 W0.1", "F1.0 B1.0 F1.1 B1.1"), "no backward_input"),
        (("F0.0 B0.0 F0.1 B0.1 W0.1", "F1.0 B1.0 F1.1 B1.1"), "whole backward and a part"),
        (("F0.0 B0.0 F0.1 W0.1 I0.1", "F1.0 B1.0 F1.1 B1.1"), "rank 0 waits in a cycle"),
        (("B0.0 F0.0 F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1"), "rank 0 waits in a cycle"),
        (("F0.0 B0.0 F0.1 B0.1 F2.0", "F1.0 B1.0 F1.1 B1.1"), "there is no such stage"),
        (("F0.0 B0.0 F0.1 B0.1 F0.2", "F1.0 B1.0 F1.1 B1.1"), "there is no such microbatch"),
        (("F0.0 B0.0 F0.1 B0.1 F1.0", "B1.0 F1.1 B1.1"), "the stage is on rank 1"),
    ],
)
def test_what_is_wrong_is_named(orders, message):
    with pytest.raises(InvalidSchedule, match=message):
        check_pipeline(schedule_of(*orders), chain(2))


def test_a_kind_that_does_not_exist_is_refused():
    schedule = schedule_of("F0.0 B0.0 F0.1 B0.1", "F1.0 B1.0 F1.1 B1.1")
    actions = ((*schedule.actions[0], PipelineAction("sideways", 0, 0)), schedule.actions[1])
    with pytest.raises(InvalidSchedule, match="no such kind"):
        check_pipeline(dataclasses.replace(schedule, actions=actions), [])


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (StageEdge(0, 2, 1), "there is no stage 2"),
        (StageEdge(-1, 1, 1), "there is no stage -1"),
        (StageEdge(0, 1, -1), "-1 bytes go"),
        (StageEdge(1, 1, 1), "rank 1 waits in a cycle of 1 actions"),
        (StageEdge(1, 0, 1), "2 ranks wait in a cycle"),
    ],
)
def test_edges_of_no_model_are_refused(edge, message):
    with pytest.raises(InvalidSchedule, match=message):
        check_pipeline(fill_drain(2, 2), [*chain(2), edge])


@given(schedule=drawn_schedules(), data=st.data())
def test_a_bound_is_refused_exactly_if_the_peak_exceeds_it(schedule, data):
    sizes = data.draw(
        st.lists(st.integers(0, 9), min_size=schedule.stages, max_size=schedule.stages)
    )
    peaks = peak_activation_bytes(schedule, sizes)
    check = {"schedule": schedule, "edges": chain(schedule.stages), "activation_bytes": sizes}
    check_pipeline(**check, bound_bytes=peaks)
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    less = [peak - (rank == r) for r, peak in enumerate(peaks)]
    message = rf"rank {rank} keeps {peaks[rank]} bytes of activations, 1 more than its bound"
    with pytest.raises(InvalidSchedule, match=message):
        check_pipeline(**check, bound_bytes=less)


def test_bytes_of_other_stages_are_refused():
    with pytest.raises(UsageError, match="1 numbers of bytes are given for 2 stages"):
        check_pipeline(fill_drain(2, 1), [], activation_bytes=[1], bound_bytes=[1, 1])
    with pytest.raises(UsageError, match="1 numbers of bytes are given for 2 ranks"):
        check_pipeline(fill_drain(2, 1), [], activation_bytes=[1, 1], bound_bytes=[1])


def test_impossible_pipelines_are_refused():
    for make in (fill_drain, one_forward_one_backward, zero_bubble):
        for sizes in ((0, 1), (1, 0)):
            with pytest.raises(ConfigError, match="at least 1 stage and 1 microbatch"):
                make(*sizes)
    with pytest.raises(ConfigError, match="at least 1 rank with 1 stage"):
        interleaved(2, 0, 4)
    with pytest.raises(ConfigError, match="rank_of has 1 entries for 2 stages"):
        schedule_of("", "", rank_of=(0,))
    with pytest.raises(ConfigError, match="stage 1 is on rank 2"):
        schedule_of("", "", rank_of=(0, 2))
