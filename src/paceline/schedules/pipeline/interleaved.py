"""The interleaved order of Megatron: several stages per rank, so that the pipeline fills sooner.

Stage s of P ranks with V stages each is on rank s modulo P: a microbatch passes all ranks V times.
Filling takes P - 1 stages, each of them 1 / V as long as if the rank had one stage. Hence the
bubble over the time of computing is (P - 1) / (V M) in place of (P - 1) / M, for V times as many
transfers and some more live microbatches.

Each rank numbers its V M forwards k = 0, 1, ... and takes P microbatches through its first stage,
then the same through its second stage, ..., then the next P microbatches::

    P = 2, V = 2     k            0  1  2  3  4  5  6  7
                     stage of it  0  0  1  1  0  0  1  1     (of the rank's V stages)
                     microbatch   0  1  0  1  2  3  2  3

Backwards take the same microbatches from the last stage to the first one. Forward k of rank r needs
forward k of rank r - 1, or, on rank 0, forward k - P of rank P - 1: so forward k can be performed
in time slot k + r, and forwards alone have no cycle. Rank r performs 2 (P - 1 - r) + (V - 1) P
forwards before its first backward, those that have begun when the first gradient can reach it.

A number of microbatches that P does not divide is rounded up, and the actions of the surplus
microbatches are dropped: without some microbatches, a graph of actions without cycle has none.

Source: Narayanan et al., Efficient large-scale language model training on GPU clusters using
Megatron-LM, SC 2021 (arXiv 2104.04473), section 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.schedules.pipeline.schedule import PipelineAction, PipelineSchedule

if TYPE_CHECKING:
    from paceline.schedules.pipeline.schedule import ActionKind


def interleaved(ranks: int, stages_per_rank: int, microbatches: int) -> PipelineSchedule:
    """Return the interleaved 1F1B order; with one stage per rank, the order of 1F1B.

    Args:
        ranks: stage s is on rank s modulo `ranks`.
        stages_per_rank: stages of the model over `ranks`.
        microbatches: of the batch. A multiple of `ranks` has the smallest bubble.

    Raises:
        ConfigError: there is no rank, no stage or no microbatch.
    """
    if ranks < 1 or stages_per_rank < 1:
        raise ConfigError(
            f"a pipeline has at least 1 rank with 1 stage, got {ranks} with {stages_per_rank}",
            where="interleaved",
            fix="Give 1 or more of both",
        )
    return PipelineSchedule(
        name="interleaved",
        stages=ranks * stages_per_rank,
        microbatches=microbatches,
        rank_of=tuple(range(ranks)) * stages_per_rank,
        actions=tuple(_order(rank, ranks, stages_per_rank, microbatches) for rank in range(ranks)),
    )


def _order(
    rank: int, ranks: int, stages_per_rank: int, microbatches: int
) -> tuple[PipelineAction, ...]:
    count = -(-microbatches // ranks) * ranks * stages_per_rank  # rounded up

    def action(kind: ActionKind, k: int) -> PipelineAction:
        turn, place = divmod(k, ranks * stages_per_rank)
        index, microbatch = divmod(place, ranks)
        if kind == "backward":
            index = stages_per_rank - 1 - index
        return PipelineAction(kind, index * ranks + rank, turn * ranks + microbatch)

    # With one stage a gradient comes back twice as soon as the formula for several says.
    warm_up = ranks - 1 - rank
    if stages_per_rank > 1:
        warm_up = min(2 * warm_up + (stages_per_rank - 1) * ranks, count)
    order = [action("forward", k) for k in range(min(warm_up, count))]
    for k in range(count):
        if k + warm_up < count:
            order.append(action("forward", k + warm_up))
        order.append(action("backward", k))
    return tuple(action for action in order if action.microbatch < microbatches)
