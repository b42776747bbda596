"""A model whose ranks hold different stages of it, and train it together.

    prepare -> PipelineParallel.forward_backward(inputs, target)
                 cut the batch into microbatches
                 run the schedule                    (runtime)
                 reduce gradients stage by stage     (gradients), while other stages go on
                 loss of all ranks

The model object stays the user's own, with its own submodules. A rank keeps the parameters of its
stages; those of other stages become tensors without memory (device ``meta``).
"""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from paceline.core.errors import RankLost, UsageError, first_line
from paceline.core.plan import MICROBATCHES_PER_STAGE
from paceline.schedules.pipeline import StageEdge, check_pipeline
from paceline.training.local_tensors import local, part_of, whole
from paceline.training.pipeline.computing import ComputeOptions, StageComputing
from paceline.training.pipeline.exported import named_arguments
from paceline.training.pipeline.gradients import StageGradients
from paceline.training.pipeline.graph import bind_inputs
from paceline.training.pipeline.microbatches import divided_leaves, joined, sizes_of
from paceline.training.pipeline.runtime import PipelineRuntime
from paceline.training.pipeline.sharded import ShardedGradients
from paceline.training.pipeline.transfers import Transfers
from paceline.training.uneven import checksum, samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from paceline.schedules.pipeline import PipelineSchedule
    from paceline.training.health import GradientCheck
    from paceline.training.optimizer_state import State
    from paceline.training.pipeline.mesh import StageMesh
    from paceline.training.pipeline.stages import ModelStage, StagedModel

# `_mean_loss` sends the place of one of them.
_TYPES_OF_LOSSES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class PipelineParallel(nn.Module):  # type: ignore[misc]  # torch has no types here
    """Trains a model in stages on the ranks of a group.

    Args:
        model: whose parameters are equal on all ranks.
        staged: the model in stages.
        mesh: of the ranks; as many as partitions times replicas.
        order: returns the schedule of a number of microbatches.
        microbatches: the most of a replica's batch; None: four for each partition, and fewer where
            the captured graph takes no such small ones.
        compute: how stages compute.
        check: sees the gradients of this rank before they are reduced.
        deadline_s: the longest wait for another rank.

    Attributes:
        own: this rank's parameters, by their names in the model.
        samples: of the replica's batch that is computed, or was last.
        group_names: names of the parameters in each of the optimizer's groups, on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        staged: StagedModel,
        mesh: StageMesh,
        *,
        order: Callable[[int], PipelineSchedule],
        microbatches: int | None,
        compute: ComputeOptions,
        check: GradientCheck,
        deadline_s: float,
    ) -> None:
        super().__init__()
        self.module = model
        model.register_forward_pre_hook(_refuse_call)
        self._device = next(model.parameters()).device
        self.ranks, self.mesh = mesh.ranks, mesh
        self._order = order
        self._microbatches = microbatches or MICROBATCHES_PER_STAGE * len(mesh.pipeline)
        self._takes_fewer = microbatches is None
        self._failure: str | None = None
        self.edges = staged.edges
        self._schedules: dict[int, PipelineSchedule] = {}
        self.staged = staged = keep_own(model, staged, mesh.stages)
        stages = {number: staged.stages[number] for number in mesh.stages}
        self.samples = 1
        self.group_names: list[list[str]] = []
        self._transfers = Transfers(self.ranks.group, deadline_s) if self.ranks.size > 1 else None
        self._shards: ShardedGradients | None = None
        if mesh.is_sharded and self._transfers is not None:
            wait = self._transfers.wait_for_all
            self._shards = ShardedGradients(model, staged, mesh, check, wait)
        self.own = {name: p for stage in stages.values() for name, p in stage.parameters.items()}
        trained = {name: p for name, p in self.own.items() if p.requires_grad}
        self._gradients = self._shards or StageGradients(staged, mesh, trained, check)
        self._runtime = PipelineRuntime(
            {number: StageComputing(stage, compute) for number, stage in stages.items()},
            staged.edges,
            mesh,
            self._transfers,
            microbatches=self._microbatches,
            device=self._device,
            on_stage_end=self._gradients.end_stage,
            whole=staged.whole,
        )

    def schedule_of(self, microbatches: int) -> PipelineSchedule:
        """Return the order in which ranks compute so many microbatches.

        Raises:
            InvalidSchedule: it cannot be executed.
        """
        if microbatches not in self._schedules:
            schedule = self._order(microbatches)
            edges = [StageEdge(edge.source, edge.destination, 0) for edge in self.edges]
            check_pipeline(schedule, edges)
            self._schedules[microbatches] = schedule
        return self._schedules[microbatches]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns, on the ranks of the last stage, and None on others.

        All ranks of a pipeline call this with the same batch. There is no backward pass: a call of
        a model in training mode that asks for gradients is refused.

        Raises:
            UsageError: gradients are asked for, the model does not take these arguments, or it was
                captured in another mode.
            RankLost: another rank ended, or does not answer; the error names it.
        """
        if self.training and torch.is_grad_enabled():
            raise UsageError(
                "outputs of a model in stages have no gradients",
                where=f"{type(self.module).__name__}.forward",
                why="the backward pass begins while other microbatches still go forwards",
                fix="Train with prepared.forward_backward(inputs, target); for the outputs alone "
                "call the model under torch.no_grad() or after eval()",
            )
        bound = inspect.signature(self.module.forward).bind(*args, **kwargs)
        arguments, sizes = self._agreed(lambda: self._arguments(bound), None)
        gathered = self._shards.gathered() if self._shards else contextlib.nullcontext()
        with self._step(), gathered, torch.no_grad():
            parts = self._runtime.run_forward(self.schedule_of(len(sizes)), arguments, sizes)
        return joined(parts, sizes) if parts else None

    def forward_backward(self, inputs: Any, target: Any) -> torch.Tensor:
        """Run a batch through all stages and back; return the mean loss over all samples.

        All ranks call this. The ranks of one pipeline have the same batch, replicas have others.

        Args:
            inputs: a tensor, a tuple of positional arguments, or a dict of arguments by name.
            target: for the loss; tensors in it have the samples along dim 0.

        Returns:
            Shape (), on all ranks the same.

        Raises:
            UsageError: the model does not take the inputs.
            RankLost: another rank ended, or does not answer; the error names it.
        """
        arguments, sizes = self._agreed(
            lambda: self._arguments(bind_inputs(self.module, inputs)), target
        )
        self.samples = sum(sizes)
        with self._step():
            return self._mean_loss(arguments, target, sizes)

    def _mean_loss(self, arguments: dict[str, Any], target: Any, sizes: list[int]) -> torch.Tensor:
        samples = sum(sizes)
        self._gradients.begin(samples)
        # Losses and samples, summed; and the loss's type, which the last stage alone knows.
        totals = torch.zeros(3, dtype=torch.float64, device=self._device)
        share = self._sharing(totals)
        with torch.enable_grad():
            loss = self._runtime.run(self.schedule_of(len(sizes)), arguments, target, sizes)
        if loss is not None:
            totals[0], totals[1] = loss.double() * samples, samples
            totals[2] = _TYPES_OF_LOSSES.index(loss.dtype) * samples
        share()
        loss_sum, count, types = totals.tolist()
        if self._transfers is not None:
            self._gradients.finish(int(count), self._transfers.wait_for_all)
        dtype = _TYPES_OF_LOSSES[round(types / count)]
        return torch.tensor(loss_sum / count, dtype=dtype, device=self._device)

    def _sharing(self, totals: torch.Tensor) -> Callable[[], None]:
        """Return what makes the ranks' totals their sum on all ranks, after a batch.

        The last stage has its loss before others end their backward passes: without replicas, it
        sends it and goes on.
        """
        transfers = self._transfers
        if transfers is None:
            return lambda: None
        what = "the loss of all ranks"
        if self.mesh.replicas == 1:
            peers = self.mesh.pipeline
            return transfers.share(totals, peers[self.mesh.rank_of[-1]], peers, what)

        def reduce() -> None:
            work = dist.all_reduce(totals, group=self.ranks.group, async_op=True)
            transfers.wait_for_all(work, what)

        return reduce

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Note that a step failed: its messages are on their way, and would meet those of others.

        Raises:
            UsageError: an earlier step failed.
        """
        self._check_usable()
        try:
            yield
        except BaseException as problem:
            self._failure = f"{type(problem).__name__}: {first_line(problem)}"
            if self._transfers is not None and not isinstance(problem, RankLost):
                self._transfers.fail(self._failure)
            raise

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise UsageError(
                "an earlier step of this model failed, and its ranks are not in step any more",
                where=f"rank {self.ranks.rank}",
                why=self._failure,
                fix="End the job, and start it again from its last checkpoint",
            )

    def _agreed(
        self, arguments_of: Callable[[], dict[str, Any]], target: Any
    ) -> tuple[dict[str, Any], list[int]]:
        """Return the arguments and the samples of each microbatch: alike on the pipeline's ranks.

        Raises:
            UsageError: this or another rank cannot use its batch, or has another one than the
                first; the error is raised on all of them, before anything is computed.
        """
        self._check_usable()
        problem: UsageError | None = None
        arguments: dict[str, Any] = {}
        samples, digest = -1, 0
        sizes: list[int] = []
        try:
            arguments = arguments_of()
            samples = samples_of(divided_leaves(arguments, self.staged.whole))
            if samples == 0:
                raise UsageError(
                    "the batch has no samples",
                    where=f"rank {self.ranks.rank}",
                    fix="Leave empty batches out, on all ranks alike",
                )
            sizes = sizes_of(samples, self._most_microbatches(arguments))
            digest = checksum([arguments, target])
        except UsageError as own:
            problem, samples = own, -1
        if self._transfers is not None:
            own_numbers = (samples, digest)
            every = self._transfers.agree(own_numbers, self.mesh.pipeline, "the batch's checksum")
            problem = problem or _disagreement(every, self.mesh.pipeline)
        if problem is not None:
            if self.mesh.replicas > 1:  # other replicas have begun the step
                self._failure = problem.what
            raise problem
        return arguments, sizes

    def _most_microbatches(self, arguments: dict[str, Any]) -> int:
        """Return the most microbatches of a batch: those given, or what the graph takes of them.

        Raises:
            UsageError: the graph is not made for these arguments.
        """
        example, most, whole = self.staged.example, self._microbatches, self.staged.whole
        if example is None:
            return most
        if self._takes_fewer:
            return example.most_microbatches(arguments, most, whole)
        example.check(arguments, most, whole)
        return most

    def _arguments(self, bound: inspect.BoundArguments) -> dict[str, Any]:
        """Return the arguments by name.

        Raises:
            UsageError: they are not those that the model was captured with, or its mode is not.
        """
        if self.staged.mode not in (None, self.module.training):
            raise UsageError(
                "the model was captured in another mode",
                where=f"training={self.staged.mode}",
                why="its forward pass is another one in the other mode",
                fix="Call prepare in the mode in which the model is used, or use split_points",
            )
        arguments = named_arguments(bound)
        for name in self.staged.inputs:
            if name not in arguments:
                raise _other_arguments(
                    f"the batch has no {name}, which the model was captured with"
                )
        for name, value in arguments.items():
            parameter = bound.signature.parameters.get(name)
            is_default = parameter is not None and value is parameter.default
            if name not in self.staged.inputs and not is_default:
                raise _other_arguments(
                    f"the model was captured without {name}, which the batch has"
                )
        return arguments

    def holders(self) -> dict[int, int]:
        """Return how many ranks hold the same of each parameter of this rank, by its `id`."""
        stages, shards = self.staged.stages_of, self.mesh.replicas
        return {
            id(p): len(self.mesh.ranks_of(stages[name]))
            // (shards if isinstance(p, DTensor) else 1)
            for name, p in self.own.items()
        }

    def train(self, mode: bool = True) -> PipelineParallel:
        """Set the mode of the model's layers."""
        super().train(mode)
        self.module.train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters, by their names in the model."""
        del args, kwargs
        yield from self.own.items()

    # --- state -------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's whole state on rank 0, and on other ranks their own part of it.

        All ranks call this. The buffers are those of replica 0.
        """
        del args, kwargs
        every = self.module.state_dict(keep_vars=True)
        own = {id(tensor) for tensor in [*self.own.values(), *self._buffers_of_stages()]}
        part = {key: whole(value.detach()) for key, value in every.items() if id(value) in own}
        parts = self._gathered(part if self.mesh.replica == 0 else {})
        if self.ranks.rank > 0:
            return part
        found = {key: value for part in parts for key, value in part.items()}
        return {key: found.get(key, value) for key, value in every.items()}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Load this rank's part of the model's state; every rank loads the same whole state.

        Raises:
            UsageError: a part is missing.
        """
        del args, kwargs
        for key, value in self.module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            if key not in state:
                raise UsageError(
                    f"the state has no {key}",
                    where=f"rank {self.ranks.rank}",
                    fix="Load what rank 0 saved: it has the whole model",
                )
            with torch.no_grad():
                local(value).copy_(local(part_of(state[key], value)))

    def whole_optimizer(self, state: State, groups: list[Any]) -> tuple[State, list[Any]]:
        """Return the optimizer's state of all ranks on rank 0, of this rank on others.

        Args:
            state: of this rank's parameters, by name.
            groups: with the names of this rank's parameters.
        """
        state = {name: _whole(state[name]) for name in sorted(state)}  # on all ranks in one order
        parts = self._gathered(state if self.mesh.replica == 0 else {})
        if self.ranks.rank > 0:
            return state, groups
        found = {name: values for part in parts for name, values in part.items()}
        named = zip(groups, self.group_names, strict=True)
        return found, [{**group, "names": list(names)} for group, names in named]

    def own_optimizer(self, state: State, groups: list[Any]) -> tuple[State, list[Any]]:
        """Return this rank's part of the optimizer's state."""
        own = {
            name: {key: _part(value, self.own[name]) for key, value in values.items()}
            for name, values in state.items()
            if name in self.own
        }
        return own, [
            {**group, "names": [name for name in group["names"] if name in self.own]}
            for group in groups
        ]

    def _buffers_of_stages(self) -> Iterator[torch.Tensor]:
        for number in self.mesh.stages:
            yield from self.staged.stages[number].module.buffers()

    def _gathered(self, own: Any) -> list[Any]:
        """Return what all ranks have, on rank 0; all ranks call this."""
        if self.ranks.size == 1:
            return [own]
        found: list[Any] | None = [None] * self.ranks.size if self.ranks.rank == 0 else None
        dist.gather_object(own, found, group=self.ranks.group, group_dst=0)
        return found or []


def _whole(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: whole(value) if isinstance(value, torch.Tensor) else value
        for key, value in sorted(values.items())
    }


def _part(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's part of a value of an optimizer's state, if it has one for each weight."""
    is_alike = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return part_of(value, parameter) if is_alike else value


def _disagreement(every: list[list[int]], ranks: list[int]) -> UsageError | None:
    """Return what to say where the ranks of a pipeline have not the same batch."""
    first = every[0]
    for rank, found in zip(ranks, every, strict=True):
        if found[0] < 0:
            return UsageError(
                f"rank {rank} cannot use its batch",
                where="forward_backward",
                why="its own error says why",
                fix=f"Look at the end of the log of rank {rank}",
            )
    for rank, found in zip(ranks, every, strict=True):
        if found != first:
            why = "its values are others"
            if found[0] != first[0]:
                why = f"{found[0]} samples on rank {rank}, {first[0]} on rank {ranks[0]}"
            return UsageError(
                f"rank {rank} has another batch than rank {ranks[0]}",
                where="forward_backward",
                why=f"the ranks of one replica have the same batches; {why}",
                fix="Use DistributedSampler(data, num_replicas=prepared.replicas, "
                "rank=prepared.replica), and seed shuffling and augmentation by the replica",
            )
    return None


def _other_arguments(what: str) -> UsageError:
    return UsageError(
        what,
        where="forward_backward",
        why="the graph of the model is that of the arguments in example_inputs",
        fix="Give prepare example_inputs with the same arguments as the batches",
    )


def keep_own(model: nn.Module, staged: StagedModel, stages: Collection[int]) -> StagedModel:
    """Free the memory of what other ranks hold; return the model in stages without it.

    Args:
        model: whose other parameters get the device ``meta``.
        staged: the model in stages.
        stages: of this rank.
    """
    own = {id(p) for number in stages for p in staged.stages[number].parameters.values()}
    empty: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001  # as torch.nn.utils
            if parameter is not None and id(parameter) not in own:
                without = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                module._parameters[name] = empty.setdefault(id(parameter), without)  # noqa: SLF001
    return replace(
        staged,
        stages=tuple(
            stage if stage.number in stages else _without_memory(stage, empty)
            for stage in staged.stages
        ),
    )


def _without_memory(stage: ModelStage, empty: dict[int, nn.Parameter]) -> ModelStage:
    parameters = {name: empty.get(id(p), p) for name, p in stage.parameters.items()}
    return replace(stage, module=nn.Identity(), parameters=parameters)


def _refuse_call(model: nn.Module, _inputs: Any) -> None:
    """Raise an error for a call of the model itself, which has lost the layers of other ranks.

    Raises:
        UsageError: always.
    """
    raise UsageError(
        "the layers of this model are divided among the ranks",
        where=f"{type(model).__name__}.forward",
        fix="Train with prepared.forward_backward(inputs, target), and call prepared.model for "
        "outputs",
    )
