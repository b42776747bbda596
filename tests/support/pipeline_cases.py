"""Pipelines for tests: orders of every generator, random models, and ranks that execute them."""

from __future__ import annotations

import heapq
from collections import defaultdict

from hypothesis import strategies as st

from paceline.schedules.pipeline import (
    LayerEdge,
    PipelineAction,
    PipelineSchedule,
    StageEdge,
    fill_drain,
    interleaved,
    one_forward_one_backward,
    stage_edges,
    zero_bubble,
)


def chain(stages: int, size: int = 1) -> list[StageEdge]:
    """Return the edges of a model without skips."""
    return [StageEdge(stage, stage + 1, size) for stage in range(stages - 1)]


def schedules(ranks: int, microbatches: int, stages_per_rank: int = 2) -> list[PipelineSchedule]:
    """Return the schedule of every generator."""
    return [
        fill_drain(ranks, microbatches),
        one_forward_one_backward(ranks, microbatches),
        zero_bubble(ranks, microbatches),
        interleaved(ranks, stages_per_rank, microbatches),
    ]


def random_edges(rng, stages: int) -> list[StageEdge]:
    """Return edges to later stages, some of which skip stages."""
    pairs = [(i, j) for j in range(stages) for i in range(j)]
    return [StageEdge(i, j, rng.randrange(1000)) for i, j in pairs if rng.random() < 0.4]


def cut_edges(rng, stages: int) -> list[StageEdge]:
    """Return the edges of a random graph of layers, cut into stages at random."""
    layers = stages + rng.randrange(20)
    edges = []
    for source in range(layers - 1):
        users = {rng.randrange(source + 1, layers) for _ in range(rng.randrange(3))}
        if users:
            edges.append(LayerEdge(source, tuple(sorted(users)), rng.randrange(1000)))
    return list(stage_edges(edges, sorted(rng.sample(range(1, layers), stages - 1))))


@st.composite
def drawn_schedules(draw) -> PipelineSchedule:
    """Return a generator's schedule of 1 to 8 ranks and 1 to 16 microbatches."""
    ranks, microbatches = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    return draw(st.sampled_from(schedules(ranks, microbatches, draw(st.integers(1, 4)))))


@st.composite
def edges_of(draw, schedule: PipelineSchedule) -> list[StageEdge]:
    """Return edges of a model with the schedule's stages."""
    return random_edges(draw(st.randoms(use_true_random=False)), schedule.stages)


def execute(schedule: PipelineSchedule, edges, seconds, delay_s) -> dict[PipelineAction, float]:
    """Let ranks execute the schedule by messages; return when each action ended that could begin.

    Written from the point of view of a rank, without `ActionGraph`: a rank looks at its next
    action, and begins it if its inbox holds all tensors for it.

    Args:
        schedule: whatever order.
        edges: between stages.
        seconds: of an action, a function of it.
        delay_s: of a message, a function of the edge.
    """
    wanted_by, sent_by = defaultdict(list), defaultdict(list)
    for index, (source, destination, _) in enumerate(edges):
        sent_by["forward", source].append(index)
        wanted_by["forward", destination].append(index)
        for kind in ("backward", "backward_input"):
            sent_by[kind, destination].append(index)
            wanted_by[kind, source].append(index)
    inbox, ended, begun = set(), {}, set()
    place = [0] * schedule.ranks
    events = [(0.0, 0, ("look", rank)) for rank in range(schedule.ranks)]
    count = len(events)

    def can_begin(action):
        kind, stage, microbatch = action
        direction = "forward" if kind == "forward" else "backward"
        own = {"forward": (), "backward_weight": ("backward_input",)}.get(kind, ("forward",))
        return all(PipelineAction(k, stage, microbatch) in ended for k in own) and all(
            (direction, index, microbatch) in inbox for index in wanted_by[kind, stage]
        )

    while events:
        now_s, _, (what, rank, *data) = heapq.heappop(events)
        if what == "arrive":
            inbox.add(data[0])
        elif what == "end":
            (action,) = data
            ended[action] = now_s
            place[rank] += 1
            direction = "forward" if action.kind == "forward" else "backward"
            for index in sent_by[action.kind, action.stage]:
                edge = edges[index]
                other = edge.destination if direction == "forward" else edge.source
                local = schedule.rank_of[edge.source] == schedule.rank_of[edge.destination]
                message = (direction, index, action.microbatch)
                arrive_s = now_s + (0 if local else delay_s(edge))
                event = ("arrive", schedule.rank_of[other], message)
                heapq.heappush(events, (arrive_s, count, event))
                count += 1
        order = schedule.actions[rank]
        if place[rank] < len(order):
            action = order[place[rank]]
            if (rank, place[rank]) not in begun and can_begin(action):
                begun.add((rank, place[rank]))
                heapq.heappush(events, (now_s + seconds(action), count, ("end", rank, action)))
                count += 1
    return ended


def ends(schedule: PipelineSchedule, edges, rng) -> bool:
    """Return whether ranks with random durations and delays perform all actions."""
    ended = execute(schedule, edges, lambda action: rng.random(), lambda edge: rng.random())
    return len(ended) == sum(len(order) for order in schedule.actions)
