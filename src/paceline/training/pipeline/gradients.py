"""Reduces the gradients of a pipeline's stages over the replicas of the model.

    ranks of 3 stages x 2 replicas       groups
    stage 0    0 1                       {0, 1} {2, 3} {4, 5}    one for each stage
    stage 1    2 3                       {0, 1, 4, 5}            a parameter of stages 0 and 2
    stage 2    4 5

A stage's reduction starts when its last backward pass of the batch has ended, and goes on while
other stages still compute. A parameter that several stages use (tied weights) has a part of its
gradient on each of them: one reduction over all of its ranks adds these parts and the replicas. It
starts after the last pass of all stages, since ranks end their stages in different orders.

Replica r brings the mean over its n_r samples. It is multiplied by n_r before the reduction, and
the sum divided by N = sum_r n_r afterwards, which is the mean over all samples.
Source: A. Awan et al., HyPar-Flow, ISC 2020 (one group per partition).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.training.engine.buckets import GradientBucket, divide, make_buckets
from paceline.training.engine.modes import give

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    from paceline.training.health import GradientCheck
    from paceline.training.pipeline.mesh import StageMesh
    from paceline.training.pipeline.stages import StagedModel

MIB = 1 << 20
_FIRST_BYTES, _BUCKET_BYTES = MIB, 25 * MIB


@dataclass(slots=True, eq=False)
class _Reduction:
    """Parameters of the same stages, which are reduced over the same ranks."""

    group: Any
    stages: frozenset[int]  # of this rank, that bring gradients
    buckets: list[GradientBucket]
    is_tied: bool


class StageGradients:
    """Reduces the gradients of the parameters that this rank holds.

    Args:
        model: in stages.
        mesh: of the ranks; all of them make this object together.
        own: trained parameters of this rank by name.
        check: sees the gradients of this rank before they are reduced.
    """

    def __init__(
        self,
        model: StagedModel,
        mesh: StageMesh,
        own: Mapping[str, nn.Parameter],
        check: GradientCheck,
    ) -> None:
        self._own, self._mesh, self._check = dict(own), mesh, check
        self._ended: set[int] = set()
        self._samples = 1
        self._started: list[tuple[GradientBucket, Any]] = []
        self._before: dict[str, torch.Tensor] = {}
        stages = model.stages_of
        self._local = {name: frozenset(s for s in stages[name] if s in mesh.stages) for name in own}
        members: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
        # As the backward pass brings them, in an order that is the same on all ranks: stages may
        # use the parameters that they share in different orders.
        for name, numbers in reversed(list(stages.items())):
            if name in own:
                members.setdefault(tuple(numbers), []).append((name, own[name]))
        groups = mesh.groups({mesh.ranks_of(numbers) for numbers in stages.values()})
        self._reductions = [
            _Reduction(
                group=groups[holders],
                stages=frozenset(numbers) & frozenset(mesh.stages),
                buckets=make_buckets(divide(named, _FIRST_BYTES, _BUCKET_BYTES), 1, _empty),
                is_tied=len(holders) > mesh.replicas,
            )
            for numbers, named in members.items()
            if len(holders := mesh.ranks_of(numbers)) > 1
        ]

    def begin(self, samples: int) -> None:
        """Expect the gradients of a batch.

        Args:
            samples: of this replica.
        """
        self._ended, self._samples = set(), samples
        self._before, self._started = {}, []
        for reduction in self._reductions:
            for bucket in reduction.buckets:
                bucket.reset()
                for name, parameter in zip(bucket.names, bucket.parameters, strict=True):
                    if parameter.grad is not None:  # of earlier batches, and reduced already
                        self._before[name] = parameter.grad.clone()
                        parameter.grad = None

    def end_stage(self, stage: int) -> None:
        """Start the reductions that waited for the backward passes of a stage only.

        Not those of tied weights: some collectives block, and other ranks end stages in other
        orders.
        """
        self._ended.add(stage)
        self._observe(stage)
        for reduction in self._reductions:
            is_complete = stage in reduction.stages and reduction.stages <= self._ended
            if is_complete and not reduction.is_tied:
                for bucket in reduction.buckets:
                    self._start(reduction, bucket)

    def _observe(self, stage: int) -> None:
        """Show the check the gradients that are complete on this rank now."""
        brought = {
            name: parameter.grad
            for name, parameter in self._own.items()
            if parameter.grad is not None
            and stage in self._local[name]
            and self._local[name] <= self._ended
        }
        self._check.observe(list(brought), list(brought.values()))

    def _start(self, reduction: _Reduction, bucket: GradientBucket) -> None:
        for index, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None:
                bucket.take(index)
        bucket.complete()
        if self._mesh.replicas > 1:
            bucket.gradients.mul_(self._samples)
        work = dist.all_reduce(bucket.gradients, group=reduction.group, async_op=True)
        self._started.append((bucket, work))

    def finish(self, samples: int, wait: Callable[[Any, str], None]) -> None:
        """Wait for all reductions; parameters then have the gradients of the whole batch.

        Args:
            samples: of all replicas.
            wait: waits for a collective; it also takes what it is for.
        """
        for reduction in self._reductions:
            for bucket in reduction.buckets if reduction.is_tied else ():
                self._start(reduction, bucket)
        for bucket, work in self._started:
            wait(work, f"gradients of {bucket.names[0]} and others")
            if self._mesh.replicas > 1:
                bucket.gradients.div_(samples)
            give(bucket, bucket.used.tolist())
        self._started = []
        for name, gradient in self._before.items():
            parameter = self._own[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


def _empty(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(length, dtype=dtype, device=device)
