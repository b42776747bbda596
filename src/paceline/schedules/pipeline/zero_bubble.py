"""ZB-H1, the zero-bubble order that needs no more memory than 1F1B.

Only the gradients of a stage's inputs are waited for by other stages; those of its parameters can
be computed at any time. So each backward is split, and its second part fills the time in which a
rank would wait at the end::

    3 stages, 3 microbatches             F forward, B backward_input, W backward_weight

    rank 0   F F F . . B W B W B W
    rank 1   . F F . B F B W B W W       the first B of rank 0 need not wait for a W of rank 1
    rank 2   . . F B F B F B W W W

Rank r begins as in 1F1B, with P - 1 - r forwards. Its backward_weight stays r microbatches behind
its backward_input as long as there are forwards; then both take turns, and the backward_weights
that are left end the batch. So at most min(P, M) microbatches are live on each rank, no more than
on rank 0 under 1F1B.

With F, B and W seconds for forward, backward_input and backward_weight on all stages, W at most F
and B, free transfers and M >= P, each rank is idle for (P - 1) (F + B - W) seconds in place of
(P - 1) (F + B + W).

Source: Qi, Wan, Huang and Lin, Zero bubble pipeline parallelism, ICLR 2024 (arXiv 2401.10241),
section 2.3, Table 2.
"""

from __future__ import annotations

from paceline.schedules.pipeline.schedule import (
    PipelineAction,
    PipelineSchedule,
    one_stage_per_rank,
)


def zero_bubble(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the order ZB-H1, in which each backward is split.

    Args:
        stages: of the model; stage s is on rank s.
        microbatches: of the batch.

    Raises:
        ConfigError: there is no stage or no microbatch.
    """
    return one_stage_per_rank(
        "zero_bubble", stages, microbatches, lambda stage: _order(stage, stages, microbatches)
    )


def _order(stage: int, stages: int, microbatches: int) -> tuple[PipelineAction, ...]:
    warm_up = min(stages - 1 - stage, microbatches)
    order = [PipelineAction("forward", stage, m) for m in range(warm_up)]
    weights = 0  # microbatches whose backward has ended
    for m in range(microbatches):
        has_forward = m + warm_up < microbatches
        if has_forward:
            order.append(PipelineAction("forward", stage, m + warm_up))
        order.append(PipelineAction("backward_input", stage, m))
        if not has_forward or m >= stage:
            order.append(PipelineAction("backward_weight", stage, weights))
            weights += 1
    order += [PipelineAction("backward_weight", stage, m) for m in range(weights, microbatches)]
    return tuple(order)
