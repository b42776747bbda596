"""Orders of a pipeline with one stage per rank: fill-drain and 1F1B.

With P stages and M microbatches, forward and backward equally long on all stages, and transfers
that cost nothing, both orders leave each rank idle for (P - 1) / (M + P - 1) of the time. They
differ in the microbatches whose activations a stage keeps at the same time::

    fill_drain                  M at every stage
    one_forward_one_backward    min(P - s, M) at stage s

Neither order depends on the edges: a stage's actions wait at most for what the edges from each
stage to the next one already make them wait for, as every edge leads from a lower to a higher
stage.

Source: Huang et al., GPipe, NeurIPS 2019 (fill-drain); Narayanan et al., PipeDream, SOSP 2019, and
Memory-efficient pipeline-parallel DNN training, ICML 2021 (1F1B with a flush).
"""

from __future__ import annotations

from paceline.schedules.pipeline.schedule import (
    PipelineAction,
    PipelineSchedule,
    one_stage_per_rank,
)


def fill_drain(stages: int, microbatches: int) -> PipelineSchedule:
    """Return the order of GPipe: forwards of all microbatches, then all backwards.

    The backwards begin with the last microbatch, whose forward ended last.

    Args:
        stages: of the model; stage s is on rank s.
        microbatches: of the batch.

    Raises:
        ConfigError: there is no stage or no microbatch.
    """
    return one_stage_per_rank(
        "fill_drain",
        stages,
        microbatches,
        lambda stage: (
            *(PipelineAction("forward", stage, m) for m in range(microbatches)),
            *(PipelineAction("backward", stage, m) for m in reversed(range(microbatches))),
        ),
    )


def one_forward_one_backward(stages: int, microbatches: int) -> PipelineSchedule:
    """Return 1F1B: each stage begins a backward as soon as it can, forwards and backwards in turn.

    Stage s of P performs P - 1 - s forwards first, then a forward and a backward in turn, then the
    backwards that are left.

    Args:
        stages: of the model; stage s is on rank s.
        microbatches: of the batch.

    Raises:
        ConfigError: there is no stage or no microbatch.
    """
    return one_stage_per_rank(
        "1f1b",
        stages,
        microbatches,
        lambda stage: _one_forward_one_backward(stage, stages - 1 - stage, microbatches),
    )


def _one_forward_one_backward(
    stage: int, warm_up: int, microbatches: int
) -> tuple[PipelineAction, ...]:
    """Return the order of one stage that begins with `warm_up` forwards, if there are as many."""
    warm_up = min(warm_up, microbatches)
    order = [PipelineAction("forward", stage, m) for m in range(warm_up)]
    for m in range(microbatches):
        if m + warm_up < microbatches:
            order.append(PipelineAction("forward", stage, m + warm_up))
        order.append(PipelineAction("backward", stage, m))
    return tuple(order)
