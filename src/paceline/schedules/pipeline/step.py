"""When the ranks of a pipeline end a step, and which cuts make it shortest.

    rank   |-- forward, backward, waiting --|-- waiting --|-- all-reduce left --|-- optimizer --|
           0                       end of its passes   makespan          reduced

A stage's gradients are reduced from the end of its last backward pass, while other stages still
compute; the loss of the batch is known to all ranks when the last pass of any stage has ended; then
each rank updates its own parameters.

`paceline.perf` estimates plans by it, with a Machine's figures, and the runtime's ``auto`` with
what it measures at the start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import MemoryExceeded
from paceline.schedules.pipeline.partition import partition

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.core.machine import Link
    from paceline.schedules.pipeline.layers import LayerCosts
    from paceline.schedules.pipeline.partition import StagePartition
    from paceline.schedules.pipeline.replay import PipelineReplay


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineEnds:
    """When the ranks of a pipeline end.

    Attributes:
        computed_s: each rank's last backward pass.
        reduced_s: the reduction of its gradients, which begins then.
        makespan_s: the last backward pass of any rank.
        end_s: each rank's update.
    """

    computed_s: tuple[float, ...]
    reduced_s: tuple[float, ...]
    makespan_s: float
    end_s: tuple[float, ...]

    @property
    def step_s(self) -> float:
        """Seconds until all ranks have ended."""
        return max(self.end_s)

    @property
    def slowest(self) -> int:
        """The rank that ends last; among equals the one that computes longest."""
        ranks = range(len(self.end_s))
        return max(ranks, key=lambda rank: (self.end_s[rank], self.computed_s[rank]))


def pipeline_ends(
    replayed: PipelineReplay, reduce_s: Sequence[float], update_s: Sequence[float]
) -> PipelineEnds:
    """Return when the ranks end a step.

    Args:
        replayed: the passes.
        reduce_s: seconds of reducing each rank's gradients over its replicas.
        update_s: seconds of each rank's update.
    """
    computed = tuple(ends[-1] for ends in replayed.end_s)
    reduced = tuple(end_s + own_s for end_s, own_s in zip(computed, reduce_s, strict=True))
    makespan_s = replayed.makespan_s
    return PipelineEnds(
        computed_s=computed,
        reduced_s=reduced,
        makespan_s=makespan_s,
        end_s=tuple(
            max(makespan_s, reduced_s) + own_s
            for reduced_s, own_s in zip(reduced, update_s, strict=True)
        ),
    )


def fastest_partition(
    costs: LayerCosts,
    bound_bytes: Sequence[int],
    live: Sequence[int],
    link: Link,
    *,
    step_s: Callable[[StagePartition], float],
    is_bound: bool,
) -> StagePartition:
    """Return the cuts of the shorter step: those that hide transfers, or those that cannot.

    Args:
        costs: of the layers.
        bound_bytes: of each stage's parameters and activations.
        live: microbatches that are live at each stage.
        link: between the ranks of neighbouring stages.
        step_s: returns the seconds of a step with these cuts.
        is_bound: whether cuts must keep the bound; otherwise it is left out where none does.

    Raises:
        UsageError: there are fewer layers than stages.
        MemoryExceeded: no cuts keep a bound that they must keep.
    """

    def candidates() -> Iterator[StagePartition]:
        stages = len(bound_bytes)
        for exposed in (0.0, 1.0):
            try:
                yield partition(
                    costs, stages, bound_bytes=bound_bytes, live=live, link=link, exposed=exposed
                )
            except MemoryExceeded:
                if is_bound:
                    raise
                yield partition(costs, stages, link=link, exposed=exposed)

    return min(candidates(), key=step_s)
