"""What `paceline.training.prepare` does for a strategy that divides the model's layers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError, first_line
from paceline.schedules.pipeline import (
    ORDERS,
    interleaved,
    partition,
)
from paceline.training.batch_norm import (
    BatchShare,
    batch_norms,
    check_synchronised,
    synchronise,
    use_own_batch,
)
from paceline.training.engine.data_parallel import check_equal
from paceline.training.engine.exchange import RowExchange
from paceline.training.engine.modes import broadcast_values
from paceline.training.engine.optimizer_checks import check_stateless, refuse_lbfgs
from paceline.training.engine.ranks import computed_by_all, find_ranks, first_difference
from paceline.training.pipeline.batch_inputs import inputs_without_samples
from paceline.training.pipeline.choice import (
    estimate_layouts,
    measure_rates,
    measured,
)
from paceline.training.pipeline.computing import ComputeOptions
from paceline.training.pipeline.costs import layer_costs
from paceline.training.pipeline.graph import capture
from paceline.training.pipeline.mesh import StageMesh
from paceline.training.pipeline.parallel import PipelineParallel
from paceline.training.pipeline.stages import StagedModel, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.plan import Plan
    from paceline.schedules.pipeline import PipelineSchedule
    from paceline.training.engine.ranks import Ranks
    from paceline.training.health import GradientCheck
    from paceline.training.options import TrainingOptions
    from paceline.training.pipeline.graph import CapturedGraph

_MOST_SHOWN = 40  # names of layers in an error


class GivenModel(NamedTuple):
    """What the user hands to `prepare`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    example_inputs: Any


def divide_ranks(options: TrainingOptions, plan: Plan | None, ranks: int) -> tuple[int, int]:
    """Return the partitions of the model and its replicas.

    Args:
        options: of `prepare`.
        plan: its mesh is used where the options leave both open.
        ranks: in all.

    Raises:
        UsageError: the ranks cannot be divided like this.
    """
    strategy, partitions, replicas = options.strategy, options.partitions, options.replicas
    if strategy is None and partitions is None and replicas is None and plan is not None:
        partitions = plan.mesh.pipeline if plan.mesh.pipeline > 1 else None
    if strategy == "data" or (strategy is None and partitions is None and replicas is None):
        partitions = partitions or 1
    if strategy == "auto":  # one rank
        partitions = replicas = 1
    if strategy == "model":
        replicas = replicas or 1
    if partitions is None and replicas is None:
        raise UsageError(
            f"the strategy {strategy} needs partitions or replicas",
            where="prepare",
            fix="Give partitions=N, the parts that the model's layers are divided into",
        )
    partitions = partitions or max(1, ranks // (replicas or 1))
    replicas = replicas or max(1, ranks // partitions)
    if strategy == "data" and partitions > 1:
        raise UsageError(
            f"the strategy data has 1 partition, not {partitions}",
            where="prepare",
            fix="Leave partitions out, or give the strategy model or hybrid",
        )
    if partitions * replicas != ranks:
        raise UsageError(
            f"{partitions} partitions x {replicas} replicas are not {ranks} ranks",
            where="prepare",
            fix=f"Start {partitions * replicas} ranks, or give numbers whose product is {ranks}",
        )
    return partitions, replicas


def choose_shape(
    given: GivenModel, options: TrainingOptions, world: int, group: Any
) -> tuple[TrainingOptions, list[str]]:
    """Return the options, for ``auto`` with the partitions that an estimate says are fastest.

    Also returns what to say of it.

    Raises:
        UsageError: there is no example to estimate with, or the model cannot be captured.
        MemoryExceeded: the ranks' memory is too small for the model, however it is divided.
    """
    if options.strategy != "auto" or world == 1:
        return options, []
    ranks = find_ranks(None, group)
    graphs: list[CapturedGraph] = []

    def capture_example() -> None:
        if given.example_inputs is None:
            raise UsageError(
                "the strategy auto estimates the model for an example",
                where="prepare(strategy='auto')",
                fix="Give example_inputs: a batch as each rank gets it",
            )
        model, points = given.model, options.split_points
        graphs.append(capture(model, given.example_inputs, split_points=points))

    computed_by_all(capture_example, ranks, "prepare(strategy='auto')")
    captured = graphs[0]
    rates = measure_rates(ranks, next(given.model.parameters()).device)
    counted = layer_costs(captured, given.example_inputs)
    costs = measured(captured, given.example_inputs, counted, ranks)
    if costs is not counted:
        rates = rates._replace(slowness=1.0)  # these are seconds of this machine
    found = estimate_layouts(costs, world, rates, options.microbatches)
    layers = options.layers
    if layers is None and found[0].partitions > 1 and options.schedule != "interleaved":
        layers = found[0].layers  # what was estimated
    chosen = replace(
        options, strategy=None, partitions=found[0].partitions, replicas=None, layers=layers
    )
    return chosen, ["strategy auto, partitions x replicas: " + ", ".join(map(str, found))]


def check_undivided(options: TrainingOptions) -> None:
    """Raise an error for options of stages where nothing asks for stages.

    Raises:
        UsageError: it has one of them.
    """
    if options.partitions is not None or options.replicas is not None:
        return  # one partition of a script that tries several
    for name in (
        *("microbatches", "schedule", "stages_per_rank", "layers", "recompute", "split_points"),
    ):
        value = getattr(options, name)
        if value not in (None, False, ()) and options.strategy in (None, "data"):
            raise UsageError(
                f"{name} has no effect on a model that is not divided",
                where=f"prepare({name}={value!r})",
                fix="Give partitions=N or a strategy that divides layers, or leave it out",
            )


def check_options(options: TrainingOptions) -> None:
    """Raise an error for options that a model in stages does not have.

    Raises:
        UsageError: it has one of them.
    """
    given = {
        "engine": options.engine not in (None, "allreduce", "ddp", "fsdp2"),
        "compression": options.compression is not None,
        "scaling": options.scaling is not None,
    }
    if options.tensor_parallel is not None:
        raise UsageError(
            "a model is divided into stages or by tensor_parallel, not by both",
            where=f"prepare(tensor_parallel={options.tensor_parallel!r}, partitions=...)",
            fix="Leave out tensor_parallel; or leave out partitions, and give "
            "tensor_parallel_ranks=T for groups of ranks that are data-parallel",
        )
    if options.stages_per_rank is not None and options.schedule != "interleaved":
        raise UsageError(
            "stages_per_rank has no effect on this schedule",
            where=f"prepare(stages_per_rank={options.stages_per_rank}, "
            f"schedule={options.schedule or '1f1b'!r})",
            fix="Give schedule='interleaved', or leave it out",
        )
    if options.engine == "fsdp2" and options.memory_budget is not None:
        raise UsageError(
            "a rank that has parts of its parameters cannot spill them",
            where="prepare(engine='fsdp2', memory_budget=..., partitions=...)",
            fix="Leave one of both out",
        )
    for name, is_given in given.items():
        if is_given:
            raise UsageError(
                f"a model in stages has no {name}",
                where=f"prepare({name}={getattr(options, name)!r}, partitions=...)",
                fix="Leave it out, or use the strategy data",
            )


def in_stages(
    given: GivenModel,
    ranks: Ranks,
    options: TrainingOptions,
    shape: tuple[int, int],
    *,
    check: GradientCheck,
    scale_outputs: Callable[[Any], Any],
) -> PipelineParallel:
    """Return a model divided among the ranks; the optimizer keeps this rank's parameters.

    Args:
        given: to `prepare`.
        ranks: all of them.
        options: of `prepare`.
        shape: partitions and replicas.
        check: sees the gradients of this rank before they are reduced.
        scale_outputs: applied to what the model returns.

    Raises:
        UsageError: the model cannot be captured or divided, or the ranks' models differ.
    """
    model, optimizer, loss_fn, example_inputs = given
    computed_by_all(lambda: _check_given(given), ranks, "prepare(partitions=...)")
    assert loss_fn is not None
    use_own_batch(batch_norms(model, only_synchronised=True))
    synchronised = batch_norms(model, only_synchronised=not options.sync_batch_norm)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    check_equal(list(model.named_parameters()), ranks)
    broadcast_values(model, ranks.group)
    partitions, replicas = shape
    order = _order(options, partitions)
    parallel = PipelineParallel(
        model,
        _agreed_stages(model, options, order(1).stages, example_inputs, ranks),
        StageMesh(ranks, order(1).rank_of, replicas, options.engine == "fsdp2" and replicas > 1),
        order=order,
        microbatches=options.microbatches,
        compute=ComputeOptions(
            loss_fn=loss_fn,
            scale_outputs=scale_outputs,
            autocast=_autocast(next(model.parameters()).device.type, options.precision),
            recompute=options.recompute,
        ),
        check=check,
        deadline_s=options.deadline_s,
    )
    _synchronise(parallel, synchronised, options)
    for group in optimizer.param_groups:
        own_names = [names[id(parameter)] for parameter in group["params"]]
        parallel.group_names.append(own_names)
        group["params"] = [parallel.own[name] for name in own_names if name in parallel.own]
    return parallel


def _check_given(given: GivenModel) -> None:
    """Raise an error for a model without a loss, or an optimizer that has begun.

    Raises:
        UsageError: it is one of them.
    """
    if given.loss_fn is None:
        raise UsageError(
            "the rank of the last stage needs the loss",
            where="prepare(partitions=...)",
            fix="Give loss_fn, for example torch.nn.functional.cross_entropy",
        )
    check_stateless(given.optimizer)
    refuse_lbfgs(given.optimizer, "prepare(partitions=...)")


def _synchronise(
    parallel: PipelineParallel, layers: dict[str, nn.Module], options: TrainingOptions
) -> None:
    """Have layers take the statistics of the microbatches of all replicas of their stage."""
    mesh = parallel.mesh
    if not layers or mesh.replicas == 1:
        return
    if parallel.staged.example is not None:
        raise UsageError(
            "batch normalisation cannot be synchronised in a model that torch.export captured",
            where="prepare(partitions=..., replicas=...)",
            why="its graph has operators in place of these layers",
            fix="Give split_points, or use a normalisation without statistics of the batch",
        )
    check_synchronised(options)
    places = range(mesh.ranks.size // mesh.replicas)
    members = [[place * mesh.replicas + n for n in range(mesh.replicas)] for place in places]
    exchange = RowExchange(mesh.ranks, members, deadline_s=options.deadline_s)
    # A replica's gradients are those of its own mean: all samples alike by its number of them.
    synchronise(layers, exchange, lambda: BatchShare(factor=float(parallel.samples)))


def _order(options: TrainingOptions, partitions: int) -> Callable[[int], PipelineSchedule]:
    """Return what makes the schedule of a number of microbatches."""
    name = options.schedule or "1f1b"
    if name == "interleaved":
        return functools.partial(interleaved, partitions, options.stages_per_rank or 2)
    return functools.partial(ORDERS[name], partitions)


def _autocast(kind: str, precision: str | None) -> Callable[[], Any]:
    """Return what makes the context of a forward pass on a kind of device."""
    if precision in (None, "float32"):
        return contextlib.nullcontext
    return functools.partial(torch.autocast, kind, getattr(torch, str(precision)))


def _agreed_stages(
    model: nn.Module, options: TrainingOptions, stages: int, example_inputs: Any, ranks: Ranks
) -> StagedModel:
    """Return a model in stages, which are the same on all ranks.

    Raises:
        UsageError: this or another rank cannot divide the model, or divides another one.
    """
    staged: StagedModel | None = None
    problem: Exception | None = None
    try:
        staged = stage(model, options, stages, example_inputs)
    except Exception as own:  # noqa: BLE001  # whatever a model raises; it is raised below
        problem = own
    lines = staged.lines if staged is not None else ()
    text: str | int = zlib.crc32("\n".join(lines).encode())
    if problem is not None:
        text = problem.what if isinstance(problem, UsageError) else first_line(problem)
    difference = first_difference(text, ranks)
    if problem is not None:
        raise problem
    assert staged is not None
    if difference is None:
        return staged
    rank, expected, other = difference
    for at, said in ((0, expected), (rank, other)):
        if isinstance(said, str):
            raise UsageError(
                f"rank {at} could not divide the model",
                where="prepare",
                why=said,
                fix=f"Look at the end of the log of rank {at}",
            )
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, lines, group=ranks.group)
    pairs = itertools.zip_longest(every[0], every[rank], fillvalue="nothing more")
    expected, other = next(pair for pair in pairs if pair[0] != pair[1])
    raise UsageError(
        f"the model of rank {rank} computes something else than that of rank 0",
        where="prepare",
        why=f"the first difference: {expected} on rank 0, {other} on rank {rank}",
        fix="Build the same model on all ranks, and give them the same example_inputs",
    )


def stage(
    model: nn.Module, options: TrainingOptions, stages: int, example_inputs: Any
) -> StagedModel:
    """Return a model in stages, as the options want them or of equal cost.

    Raises:
        UsageError: the model cannot be captured or divided.
    """
    captured = capture(model, example_inputs, split_points=options.split_points)
    if len(captured.layers) < stages:
        raise UsageError(
            f"{len(captured.layers)} layers cannot be divided into {stages} stages",
            where=type(model).__name__,
            why=_why_few(captured.opaque),
            fix="Use fewer partitions",
        )
    _check_layers(options, stages, [layer.name for layer in captured.layers])
    costs = layer_costs(captured, example_inputs)
    cuts = partition(costs, stages, layers_per_stage=options.layers or ()).cuts
    staged = cut(captured, cuts)
    whole = inputs_without_samples(captured, example_inputs)
    lines = (*staged.lines, *(f"all microbatches get {name} whole" for name in sorted(whole)))
    return replace(staged, whole=whole, lines=lines)


def _check_layers(options: TrainingOptions, stages: int, names: list[str]) -> None:
    """Raise an error unless `layers` gives each stage some of the model's layers, and all of them.

    Raises:
        UsageError: it does not; the error lists the model's layers.
    """
    layers = options.layers
    if layers is None or (len(layers) == stages and sum(layers) == len(names)):
        return
    shown = names if len(names) <= _MOST_SHOWN else [*names[: _MOST_SHOWN - 1], "...", names[-1]]
    raise UsageError(
        f"layers has {len(layers)} numbers, whose sum is {sum(layers)}, for {stages} stages and "
        f"{len(names)} layers",
        where=f"prepare(layers={tuple(layers)})",
        why=f"the layers are {', '.join(shown)}",
        fix=f"Give {stages} numbers whose sum is {len(names)}, or leave it out for stages of "
        "equal cost",
    )


def _why_few(opaque: dict[str, str]) -> str:
    return "; ".join(f"{name or 'the model'} is one layer: {why}" for name, why in opaque.items())


def lines_of(parallel: PipelineParallel) -> Iterator[str]:
    """Yield what rank 0 says of the stages: layers and parameters of each."""
    mesh, stages = parallel.mesh, parallel.staged.stages
    sharded = ", each stage sharded over its replicas (fsdp2)" if mesh.is_sharded else ""
    if parallel.staged.whole:
        yield f"all microbatches get {', '.join(sorted(parallel.staged.whole))} whole"
    yield (
        f"{parallel.ranks.size} ranks, {len(stages)} stages x {mesh.replicas} replicas, "
        f"schedule {parallel.schedule_of(1).name}{sharded}"
    )
    for part in stages:
        count = sum(parameter.numel() for parameter in part.parameters.values())
        begin, end = part.layers[0], part.layers[-1]
        ranks = ", ".join(map(str, mesh.ranks_of([part.number])))
        yield (
            f"stage {part.number} on rank {ranks}: {len(part.layers)} layers, {begin} to {end}, "
            f"{count:,} parameters"
        )
