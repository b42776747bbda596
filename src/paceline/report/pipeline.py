"""Why the ranks of a model in stages idle: what was measured, beside its schedule replayed.

    share of the schedule    replayed with stages of equal length, transfers free
    share of the stages      replayed with what each stage really takes, less the former
    share of the transfers   measured: values on their way
    the rest                 passes of a stage that take longer than its mean

The order that is replayed is the recorded one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from paceline.core.errors import ConfigError
from paceline.core.record import Record
from paceline.report.units import format_bytes, format_seconds, format_share, plural
from paceline.schedules.pipeline import (
    ORDERS,
    PipelineAction,
    PipelineSchedule,
    StageCosts,
    StageEdge,
    interleaved,
    replay,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.schedules.pipeline import ActionKind
    from paceline.trace.analysis.pipeline import PipelineUse, StageTime

_NOTABLE = 0.01  # of a step: less idle time is not worth a sentence
_ALSO = 0.25  # of the idle time: a second cause that is named
_UNEVEN = 1.05  # times as long as the others that the slowest stage takes, to be named


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubble(Record):
    """The shares of a batch in which ranks idle, 0 to 1, by cause.

    Attributes:
        schedule: its name; empty for an order that is none of ours.
        measured: of all causes.
        by_schedule: of the schedule, with stages of equal length.
        by_stages: of stages that are not.
        by_transfers: of values on their way.
        more_microbatches: twice as many; 0 where the schedule is not known.
        with_more: share of the schedule with so many.
    """

    schedule: str
    measured: float
    by_schedule: float
    by_stages: float
    by_transfers: float
    more_microbatches: int = 0
    with_more: float = 0.0

    @property
    def by_rest(self) -> float:
        """The share of passes that take longer than usual."""
        known = self.by_schedule + self.by_stages + self.by_transfers
        return max(0.0, self.measured - known)


def bubble_of(use: PipelineUse) -> Bubble:
    """Return why the ranks idle, by replaying the recorded schedule."""
    ranks = [rank for rank in use.ranks if rank.shown]
    count = len(use.stages)
    edges = [StageEdge(stage, stage + 1, 0) for stage in range(count - 1)]
    rank_of = {stage: place for place, rank in enumerate(ranks) for stage in rank.stages}
    recorded = PipelineSchedule(
        name="recorded",
        stages=count,
        microbatches=use.microbatches,
        rank_of=tuple(rank_of[stage.stage] for stage in use.stages),
        actions=tuple(
            tuple(
                PipelineAction(cast("ActionKind", action.kind), action.stage, action.microbatch)
                for action in rank.shown
            )
            for rank in ranks
        ),
    )
    measured = StageCosts(
        forward_s=tuple(stage.forward_s for stage in use.stages),
        backward_s=tuple(stage.backward_s for stage in use.stages),
    )
    even = StageCosts.uniform(
        count, sum(measured.forward_s) / count, sum(measured.backward_s) / count
    )
    by_schedule = replay(recorded, edges, even).bubble_share
    both = replay(recorded, edges, measured).bubble_share
    exposed = sum(rank.exposed_s for rank in use.ranks) / len(use.ranks) / use.batch_s
    name, more = _recognised(recorded)
    return Bubble(
        schedule=name,
        measured=use.idle_share,
        by_schedule=by_schedule,
        by_stages=max(0.0, both - by_schedule),
        by_transfers=exposed,
        more_microbatches=2 * use.microbatches if more else 0,
        with_more=replay(more, edges, even).bubble_share if more else 0.0,
    )


def _recognised(recorded: PipelineSchedule) -> tuple[str, PipelineSchedule | None]:
    """Return the name of a recorded order, and the same order of twice as many microbatches."""
    orders: dict[str, Callable[[int], PipelineSchedule]] = {
        **{name: functools.partial(order, recorded.stages) for name, order in ORDERS.items()},
        "interleaved": lambda count: interleaved(
            recorded.ranks, recorded.stages // recorded.ranks, count
        ),
    }
    for name, order in orders.items():
        try:
            made = order(recorded.microbatches)
        except ConfigError:  # not so many stages
            continue
        if (made.actions, made.rank_of) == (recorded.actions, recorded.rank_of):
            return name, order(2 * recorded.microbatches)
    return "", None


def share_of_step(use: PipelineUse, share: float) -> float:
    """Return what share of a step a share of a batch is."""
    return share * use.batch_s / max(use.step_s, use.batch_s)


def with_more_share(use: PipelineUse, bubble: Bubble) -> float:
    """Return the share of a step that ranks would idle with twice as many microbatches.

    The schedule's part of it changes, and the step is shorter by as much; other parts stay.
    """
    outside_s = max(use.step_s, use.batch_s) - use.batch_s
    busy_s = use.batch_s * (1 - bubble.by_schedule)
    batch_s = busy_s / (1 - bubble.with_more)
    others_s = use.batch_s * (bubble.measured - bubble.by_schedule)
    return max(0.0, batch_s * bubble.with_more + others_s) / (batch_s + outside_s)


def slowest_stage(use: PipelineUse) -> tuple[StageTime, float] | None:
    """Return the stage that takes longest, and how often as long as the mean of the others."""
    times = [stage.forward_s + stage.backward_s for stage in use.stages]
    slowest = max(range(len(times)), key=times.__getitem__)
    others = (sum(times) - times[slowest]) / (len(times) - 1)
    if others <= 0 or times[slowest] < _UNEVEN * others:
        return None
    return use.stages[slowest], times[slowest] / others


def pipeline_words(use: PipelineUse | None, bubble: Bubble | None) -> str:
    """Return how long the ranks of a pipeline idle and why, as a sentence; empty without one."""
    if use is None or bubble is None:
        return ""
    share = format_share(use.step_share)
    if use.step_share < _NOTABLE:
        return f"Ranks idle {share} of a step in the pipeline."
    causes = _causes(use, bubble)
    text = f"Ranks idle {share} of a step in the pipeline: {causes[0][1]}"
    if len(causes) > 1 and causes[1][0] >= _ALSO * bubble.measured:
        text += f"; and {causes[1][1]}"
    return f"{text}."


def _causes(use: PipelineUse, bubble: Bubble) -> list[tuple[float, str]]:
    """Return the causes in words with their shares of a batch, the largest first."""
    stages = plural(len(use.stages), "stage")
    by_schedule = (
        f"{format_share(share_of_step(use, bubble.by_schedule))} is warm-up and drain, "
        f"{use.microbatches:,} microbatch{'es' * (use.microbatches > 1)} for {stages}"
    )
    if bubble.more_microbatches and bubble.with_more < bubble.by_schedule:
        more = format_share(with_more_share(use, bubble))
        by_schedule += f" ({bubble.more_microbatches} would make it {more} in all)"
    found = [(bubble.by_schedule, by_schedule)]
    slowest = slowest_stage(use)
    if slowest is not None:
        stage, factor = slowest
        whom = "the other" if len(use.stages) == 2 else "the others on average"
        share = format_share(share_of_step(use, bubble.by_stages))
        words = f"{share} since stage {stage.stage} computes {factor:.1f} times as long as {whom}"
        found.append((bubble.by_stages, words))
    share = format_share(share_of_step(use, bubble.by_transfers))
    found.append((bubble.by_transfers, f"{share} while values are on their way between stages"))
    share = format_share(share_of_step(use, bubble.by_rest))
    found.append((bubble.by_rest, f"{share} for passes that took longer than others of a stage"))
    return sorted(found, key=lambda cause: -cause[0])


def rank_rows(use: PipelineUse) -> tuple[list[str], list[list[str]]]:
    """Return the head and rows of a table: what each rank did in a batch."""
    heads = ["rank", "stage", "computing", "warm-up", "between", "drain", "transfers", "idle"]
    rows = [
        [
            f"rank {rank.rank}",
            ", ".join(map(str, rank.stages)),
            *(
                format_seconds(seconds)
                for seconds in (
                    rank.busy_s,
                    rank.warm_up_s,
                    rank.between_s,
                    rank.drain_s,
                    rank.exposed_s,
                )
            ),
            format_share(rank.idle_s / use.batch_s),
        ]
        for rank in use.ranks
    ]
    return heads, rows


def cause_rows(use: PipelineUse, bubble: Bubble) -> list[list[str]]:
    """Return rows of a table: the idle time of all ranks by cause, as shares of batch and step."""
    order = bubble.schedule or "the order"
    slowest = slowest_stage(use)
    stages = "" if slowest is None else f": stage {slowest[0].stage}"
    parts = [
        (f"warm-up and drain of {order}, with equal stages", bubble.by_schedule),
        (f"stages of unequal length{stages}", bubble.by_stages),
        ("values on their way", bubble.by_transfers),
        ("passes that took longer than others of their stage", bubble.by_rest),
        ("measured", bubble.measured),
    ]
    return [
        [name, format_share(part), format_share(share_of_step(use, part))] for name, part in parts
    ]


def transfer_words(use: PipelineUse) -> str:
    """Return how many bytes went between stages, and how many of them ranks waited for."""
    moved = use.transfers
    total = moved.hidden_bytes + moved.exposed_bytes
    if not total:
        return ""
    return (
        f"Stages send each other {format_bytes(total)} a batch: "
        f"{format_bytes(moved.hidden_bytes)} ({format_seconds(moved.hidden_s)}) hidden behind "
        f"computing, {format_bytes(moved.exposed_bytes)} ({format_seconds(moved.exposed_s)}, over "
        "all ranks) exposed."
    )
