"""The PipelineSchedule: in which order each rank computes the stages of a model, as plain data.

A model is cut into stages, numbered so that data flow from a lower to a higher stage; a batch is
cut into microbatches. A rank holds one or more stages and performs its actions one after another::

    1F1B, 2 stages, 3 microbatches      time ->
    rank 0   F0.0  F0.1  B0.0  F0.2  B0.1  B0.2        F stage.microbatch: forward
    rank 1   F1.0  B1.0  F1.1  B1.1  F1.2  B1.2        B stage.microbatch: backward

The rules by which ranks follow a schedule:

1. A rank begins its next action when its action before has ended and the data that the next action
   needs have arrived. A forward needs the outputs of all source stages of the stage's edges, for
   the same microbatch; a backward needs the stage's own forward and the gradients from all
   destination stages. Edges may skip stages.
2. A backward is either one action, or two: ``backward_input`` computes the gradients that other
   stages wait for, ``backward_weight`` those of the stage's parameters, at any time after it.
3. Transfers are no actions. The outputs of an action are sent without blocking when it ends.
   Receives are posted before the data can arrive, and are matched by edge, microbatch and
   direction, so that no order of messages on a link can make a rank wait.

By rule 3 a rank waits only for actions of other ranks, never for a receiver. Hence a schedule can
deadlock only if the ranks' orders and the data dependencies together have a cycle, which
`paceline.schedules.pipeline.check` excludes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from paceline.core.errors import ConfigError
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable

ActionKind = Literal["forward", "backward", "backward_input", "backward_weight"]


class PipelineAction(NamedTuple):
    """One computation of a rank.

    A named tuple rather than a Record, because a schedule can have a million of them.

    Attributes:
        kind: ``forward``, ``backward``, or one of a backward's two parts: ``backward_input``, then
            ``backward_weight``.
        stage: of the model, counted from 0.
        microbatch: of the batch, counted from 0.
    """

    kind: ActionKind
    stage: int
    microbatch: int


class StageEdge(NamedTuple):
    """What one stage computes and another one uses.

    Attributes:
        source: stage that computes it.
        destination: stage that uses it: higher than `source`, not always the next one.
        bytes: of the activation for one microbatch. Its gradient, of the same size, goes back.
    """

    source: int
    destination: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule(Record):
    """Which rank performs which actions in which order, for one batch.

    Attributes:
        name: of the order, for example ``1f1b``.
        stages: of the model, numbered from 0.
        microbatches: of the batch, numbered from 0.
        rank_of: the rank of each stage.
        actions: by rank, in the order in which it performs them.
    """

    name: str
    stages: int
    microbatches: int
    rank_of: tuple[int, ...]
    actions: tuple[tuple[PipelineAction, ...], ...]

    def __post_init__(self) -> None:
        if self.stages < 1 or self.microbatches < 1:
            raise ConfigError(
                "a pipeline has at least 1 stage and 1 microbatch, got "
                f"{self.stages} and {self.microbatches}",
                where=self.name,
                fix="Give 1 or more of both",
            )
        if len(self.rank_of) != self.stages:
            raise ConfigError(
                f"rank_of has {len(self.rank_of)} entries for {self.stages} stages",
                where=self.name,
                fix="Give the rank of each stage",
            )
        for stage, rank in enumerate(self.rank_of):
            if not 0 <= rank < self.ranks:
                raise ConfigError(
                    f"stage {stage} is on rank {rank}, but there are actions for "
                    f"{self.ranks} ranks",
                    where=self.name,
                    fix=f"Give a rank from 0 to {self.ranks - 1}, or actions for that rank",
                )

    @property
    def ranks(self) -> int:
        """Number of ranks, numbered from 0."""
        return len(self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, in rising order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)


def one_stage_per_rank(
    name: str,
    stages: int,
    microbatches: int,
    order: Callable[[int], tuple[PipelineAction, ...]],
) -> PipelineSchedule:
    """Return the schedule in which stage s is on rank s.

    Args:
        name: of the order.
        stages: of the model.
        microbatches: of the batch.
        order: returns a stage's actions.

    Raises:
        ConfigError: there is no stage or no microbatch.
    """
    return PipelineSchedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        rank_of=tuple(range(stages)),
        actions=tuple(order(stage) for stage in range(stages)),
    )
