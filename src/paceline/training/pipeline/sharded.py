"""Shards what the replicas of a stage have in common: torch's FSDP2 over the ranks of each stage.

    ranks of 2 stages x 2 replicas       between batches
    stage 0    0 1                       each has half of stage 0, of its gradients and its state
    stage 1    2 3                       each has half of stage 1

    a batch begins        gather the stage's parameters                 all-gather, ranks of a stage
    microbatches          gradients add up on whole parameters          nothing
    its last pass ended   reduce, keep the own part, free all others    reduce-scatter
    all ranks ended       add up the parts of tied weights              all-reduce, see below

`fully_shard` gathers before a module's forward pass, and reduces after its backward pass. A stage
has one of each for every microbatch, in the order of a schedule that may split backward passes. So
what is sharded here is not the stage but a `_Unit`: the identity function, which has the stage's
parameters. Its one forward pass begins the batch, its one backward pass ends it, and FSDP2 sees an
ordinary step whatever the schedule is.

A parameter that several stages use (tied weights) is sharded by the ranks of each stage alike, so
that rank r of each has the same part of it: those parts are added over the stages.

    stage 0    0 1      part 0 of a weight of stages 0 and 1: ranks {0, 2}
    stage 1    2 3      part 1:                               ranks {1, 3}

Replica r brings the mean over its n_r samples, as in `gradients`: n_r times that is added up, and
the sum divided by N = sum_r n_r. A rank reduces when its last pass has ended, so that nobody waits
for what it would send after that.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from paceline.training.engine.buckets import divide
from paceline.training.local_tensors import local
from paceline.training.pipeline.gradients import StageGradients

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from paceline.training.health import GradientCheck
    from paceline.training.pipeline.mesh import StageMesh
    from paceline.training.pipeline.stages import StagedModel

    Wait = Callable[[Any, str], None]

_UNIT_BYTES = 25 << 20  # what is gathered, or reduced, by one message; twice that is in flight


class ShardedGradients:
    """Gathers the parameters of this rank's stages for a batch, and reduces their gradients.

    Making it replaces the parameters of this rank's stages, in the model and in the stages, by
    DTensors with this rank's part of them. A parameter without a dimension stays whole.

    Args:
        root: the model that was given.
        model: in stages; its stages' parameters are replaced.
        mesh: of the ranks; all of them make this object together.
        check: sees the gradients of this rank before they are reduced.
        wait: waits for a collective; it also takes what it is for.

    Attributes:
        own: this rank's parameters, by their names in the model.
    """

    def __init__(
        self,
        root: nn.Module,
        model: StagedModel,
        mesh: StageMesh,
        check: GradientCheck,
        wait: Wait,
    ) -> None:
        self._root, self._mesh, self._check, self._wait = root, mesh, check, wait
        self._ended: set[int] = set()
        self._names = list(model.stages_of)
        stages = [model.stages[number] for number in mesh.stages]
        whole = {name: p for stage in stages for name, p in stage.parameters.items()}
        group = mesh.groups({mesh.ranks_of([n]) for n in range(len(model.stages))})[
            mesh.ranks_of(mesh.stages)
        ]
        self._exchange = _Exchange(wait)
        modules = [root, *(stage.module for stage in stages)]
        shards = DeviceMesh.from_group(group, next(iter(whole.values())).device.type)
        divided = [(name, p) for name, p in whole.items() if p.ndim]
        self._units = [
            _sharded_unit(modules, [p for _, p in members], shards, self._exchange)
            for members in divide(divided, _UNIT_BYTES, _UNIT_BYTES)
        ]
        successors = dict(root.named_parameters())
        for stage in stages:
            stage.parameters.update({name: successors[name] for name in stage.parameters})
        self.own = {name: successors[name] for name in whole}
        self._trained = {name: self.own[name] for name, p in divided if p.requires_grad}
        self._tied = self._find_tied(model)
        others = {n: p for n, p in self.own.items() if p.requires_grad and not p.ndim}
        self._others = StageGradients(model, mesh, others, check)
        self._before: dict[str, torch.Tensor] = {}
        self._passes: list[torch.Tensor] = []
        self._used: set[str] = set()

    def _find_tied(self, model: StagedModel) -> dict[tuple[int, ...], list[str]]:
        """Return the trained parameters of this rank that other stages have too, by their ranks."""
        columns = {
            (numbers, replica): self._mesh.column(numbers, replica)
            for numbers in dict.fromkeys(model.stages_of.values())
            for replica in range(self._mesh.replicas)
        }
        self._mesh.groups(set(columns.values()))
        found: dict[tuple[int, ...], list[str]] = {}
        for name, numbers in model.stages_of.items():
            ranks = columns[numbers, self._mesh.replica]
            if name in self._trained and len(ranks) > 1:
                found.setdefault(ranks, []).append(name)
        return found

    def begin(self, samples: int) -> None:
        """Gather the parameters for a batch, and expect its gradients.

        Args:
            samples: of this replica.
        """
        self._ended, self._exchange.samples = set(), samples
        self._before = {n: p.grad for n, p in self._trained.items() if p.grad is not None}
        for parameter in self._trained.values():
            parameter.grad = None  # those of earlier batches are reduced already
        self._others.begin(samples)
        with torch.enable_grad():
            self._passes = [unit(self._probe()) for unit in self._units]

    def _probe(self) -> torch.Tensor:
        device = next(iter(self.own.values())).device
        return torch.zeros((), device=device, requires_grad=True)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather the parameters for forward passes without gradients."""
        with torch.no_grad():
            for unit in self._units:
                unit(self._probe())
        try:
            yield
        finally:
            for unit in self._units:
                unit.reshard()

    def end_stage(self, stage: int) -> None:
        """Reduce the gradients of this rank if it was the last stage whose passes ended."""
        self._others.end_stage(stage)
        self._ended.add(stage)
        if self._ended == set(self._mesh.stages):
            self._reduce()

    def _reduce(self) -> None:
        whole = {n: p for n, p in self._root.named_parameters() if n in self._trained}
        brought = {name: p.grad for name, p in whole.items() if p.grad is not None}
        self._check.observe(list(brought), list(brought.values()))
        self._used = set(brought)
        for name, parameter in whole.items():
            if name not in brought:  # other replicas may bring one: all reduce the same ones
                parameter.grad = torch.zeros_like(parameter)
        brought.clear()
        while self._passes:
            self._passes.pop().backward()

    def finish(self, samples: int, wait: Wait) -> None:
        """Wait for what is left; parameters then have their parts of the whole batch's gradients.

        Args:
            samples: of all replicas.
            wait: waits for a collective; it also takes what it is for.
        """
        self._others.finish(samples, wait)
        used = self._used_by_any(wait)
        self._add_tied(wait)
        for name, parameter in self._trained.items():
            if name not in used:
                parameter.grad = None
            elif parameter.grad is not None:
                local(parameter.grad).div_(samples)
            if name in self._before:
                before = self._before[name]
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = {}

    def _used_by_any(self, wait: Wait) -> set[str]:
        """Return the names of the parameters that have a gradient on any rank."""
        device = next(iter(self.own.values())).device
        flags = torch.tensor([n in self._used for n in self._names], dtype=torch.int32).to(device)
        work = dist.all_reduce(
            flags, dist.ReduceOp.MAX, group=self._mesh.ranks.group, async_op=True
        )
        wait(work, "which parameters were used")
        return {name for name, flag in zip(self._names, flags.tolist(), strict=True) if flag}

    def _add_tied(self, wait: Wait) -> None:
        """Add up the parts of tied weights over their stages; all ranks take them in one order."""
        for ranks, names in self._tied.items():
            for members in divide(
                [(name, self._trained[name]) for name in names], _UNIT_BYTES, _UNIT_BYTES
            ):
                parts = [local(parameter.grad) for _, parameter in members]
                flat = torch.cat([part.reshape(-1) for part in parts])
                group = self._mesh.groups(())[ranks]
                work = dist.all_reduce(flat, group=group, async_op=True)
                wait(work, f"gradients of {members[0][0]} and others")
                sizes = [part.numel() for part in parts]
                for part, summed in zip(parts, flat.split(sizes), strict=True):
                    part.copy_(summed.view_as(part))


class _Unit(nn.Module):  # type: ignore[misc]  # torch has no types here
    """The identity function, with some of a rank's parameters."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.owners = nn.ModuleList(modules)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the same values."""
        return x.clone()


def _sharded_unit(
    modules: Sequence[nn.Module],
    parameters: Collection[nn.Parameter],
    shards: DeviceMesh,
    exchange: _Exchange,
) -> Any:
    """Return a unit that gathers and reduces these parameters of the modules, and no others."""
    unit = _Unit(modules)
    chosen = {id(parameter) for parameter in parameters}
    others = {parameter for parameter in unit.parameters() if id(parameter) not in chosen}
    sharded: Any = fully_shard(
        unit, mesh=shards, reshard_after_forward=False, ignored_params=others
    )
    sharded.set_gradient_divide_factor(1.0)  # the sum: replicas weigh by their samples
    sharded.set_force_sum_reduction_for_comms(True)
    sharded.set_custom_all_gather(_Gather(exchange))
    sharded.set_custom_reduce_scatter(_ReduceScatter(exchange))
    return sharded


class _Exchange:
    """What the messages of all units share.

    Attributes:
        wait: waits for a collective, with a deadline.
        samples: of this replica's batch, by which its gradients are weighed.
    """

    def __init__(self, wait: Wait) -> None:
        self.wait, self.samples = wait, 1

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for a message, as torch asks for it."""
        return torch.empty(*size, dtype=dtype, device=device)


class _ReplicaMessage:
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange, self.allocate = exchange, exchange.allocate


class _Gather(_ReplicaMessage):
    """FSDP2's all-gather, with a deadline; see torch's AllGather."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        async_op: bool = False,
    ) -> None:
        del async_op
        work = dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=True)
        self._exchange.wait(work, "parameters of the other replicas")


class _ReduceScatter(_ReplicaMessage):
    """FSDP2's reduce-scatter, weighed and with a deadline; see torch's ReduceScatter."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        del async_op
        input_tensor.mul_(self._exchange.samples)
        work = dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=True
        )
        self._exchange.wait(work, "gradients of the other replicas")
