"""Proves that a PipelineSchedule computes the batch, ends, and fits into memory, before it runs.

What makes a result wrong is found by counting. For each stage and microbatch there must be, on the
stage's rank, exactly one forward, and after it either one backward, or one backward_input and after
it one backward_weight.

What makes ranks wait for ever is a cycle. Let an action wait for the action before it on its rank,
and for those whose data it uses (see `ActionGraph`). Transfers make nobody wait: sends do not
block, and receives are posted ahead and matched by what they carry, so an action can begin as soon
as all that it waits for have ended. If the waits have no cycle, then among the actions that have
not ended there is always one that waits for none of them; so each action is performed, whatever the
durations and delays. If they have a cycle, none of its actions is ever performed. Thus the
schedule deadlocks if and only if there is a cycle::

    rank 0   F0.0 B0.0 F0.1 B0.1        rank 1   F1.1 B1.1 F1.0 B1.0

    F0.1 waits for B0.0 (order of rank 0), for B1.0 (gradients), for F1.0 and B1.1 (order of
    rank 1), for F1.1, for F0.1 (activations)

The peak of memory depends on the order alone, see `paceline.schedules.pipeline.live`.

Cost: one pass over actions and arcs; 0.2 s for 100,000 actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.schedules.pipeline.graph import ActionGraph, describe, error
from paceline.schedules.pipeline.live import peak_activation_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.errors import InvalidSchedule
    from paceline.schedules.pipeline.schedule import PipelineSchedule, StageEdge

_SHOWN = 24  # actions of a cycle, at most


def check_pipeline(
    schedule: PipelineSchedule,
    edges: Sequence[StageEdge],
    *,
    activation_bytes: Sequence[int] = (),
    bound_bytes: Sequence[int] = (),
) -> None:
    """Return if the schedule computes every microbatch, cannot deadlock, and stays in its bounds.

    Args:
        schedule: to check.
        edges: of the model's stages.
        activation_bytes: that each stage saves for one microbatch; only needed with a bound.
        bound_bytes: the most bytes of activations that each rank may keep; empty: no bound.

    Raises:
        InvalidSchedule: it does not; names the rank, the action and the cycle or the bytes.
        UsageError: the bytes are not those of the schedule's stages or ranks.
    """
    graph = ActionGraph.of(schedule, edges)
    cycle = graph.cycle()
    if cycle:
        raise cycle_error(schedule, graph, cycle)
    if bound_bytes:
        _check_memory(schedule, activation_bytes, bound_bytes)


def _check_memory(
    schedule: PipelineSchedule, activation_bytes: Sequence[int], bound_bytes: Sequence[int]
) -> None:
    """Refuse a rank that keeps more activations than its bound."""
    for values, count, what in (
        (activation_bytes, schedule.stages, "stages"),
        (bound_bytes, schedule.ranks, "ranks"),
    ):
        if len(values) != count:
            raise UsageError(
                f"{len(values)} numbers of bytes are given for {count} {what}",
                where=schedule.name,
                fix="Give activation_bytes for each stage, and bound_bytes for each rank",
            )
    peaks = peak_activation_bytes(schedule, activation_bytes)
    for rank, (peak, bound) in enumerate(zip(peaks, bound_bytes, strict=True)):
        if peak > bound:
            raise error(
                schedule,
                f"rank {rank} keeps {peak:,} bytes of activations, {peak - bound:,} more than its "
                f"bound of {bound:,}",
                fix="Take an order with fewer live microbatches, smaller ones, or more stages",
            )


def cycle_error(
    schedule: PipelineSchedule, graph: ActionGraph, cycle: Sequence[int]
) -> InvalidSchedule:
    """Return the error of a schedule whose actions wait for each other.

    Args:
        schedule: that deadlocks.
        graph: of the schedule.
        cycle: as `ActionGraph.cycle` returns it.
    """
    waits = [
        (number, awaited, graph.rank[number] == graph.rank[awaited] and awaited == number - 1)
        for number, awaited in zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    ]
    # Where an order makes an action wait, only the ends of the wait are shown.
    begin = next(index for index, (_, _, in_order) in enumerate(waits) if not in_order)
    waits = waits[begin:] + waits[:begin]
    text = _on_rank(graph, waits[0][0])
    shown = 1
    for (number, awaited, in_order), (_, _, goes_on) in zip(
        waits, waits[1:] + waits[:1], strict=True
    ):
        if in_order and goes_on:
            continue
        reason = f"order of rank {graph.rank[number]}" if in_order else _data(graph, awaited)
        if shown < _SHOWN:
            text += f", which waits for {_on_rank(graph, awaited)} ({reason})"
        shown += 1
    if shown > _SHOWN:
        text += f", and {shown - _SHOWN} more, the last of which waits for the first"
    ranks = sorted({graph.rank[number] for number in cycle})
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
    return error(schedule, f"{who} in a cycle of {len(cycle)} actions", text)


def _on_rank(graph: ActionGraph, number: int) -> str:
    return f"rank {graph.rank[number]}: {describe(graph.actions[number])}"


def _data(graph: ActionGraph, awaited: int) -> str:
    """Return what the action whose end is awaited computes for the one that waits."""
    return "activations" if graph.actions[awaited].kind == "forward" else "gradients"
