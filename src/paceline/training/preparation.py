"""Prepares a model and its optimizer for training on the ranks of the job.

    model, optimizer = prepare(model, optimizer)
    for batch, target in loader:
        optimizer.zero_grad()
        loss_fn(model(batch), target).backward()
        optimizer.step()

The loop stays as it was, with one process or many: everything else happens in the model's forward
pass, in hooks on its gradients, and in a hook before the optimizer's step.
"""

from __future__ import annotations

import itertools
import os
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map

from paceline.core.errors import UsageError
from paceline.core.plan import PLAN_VARIABLE, Plan
from paceline.training.batch_norm import (
    BatchShare,
    batch_norms,
    check_synchronised,
    synchronise,
)
from paceline.training.before_step import BeforeStep, watch_gradients
from paceline.training.compression import (
    DeepGradientCompression,
    HalfCompression,
    MomentumTakeover,
    measure,
    register_hook,
)
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.exchange import RowExchange
from paceline.training.engine.fully_sharded import shard_fully
from paceline.training.engine.modes import CompressedAllReduce
from paceline.training.engine.ranks import (
    Ranks,
    computed_by_all,
    find_ranks,
    first_difference,
)
from paceline.training.engine.torch_data_parallel import TorchDataParallel
from paceline.training.health import DivergenceAlarm, GradientCheck
from paceline.training.optimizers.norms import ShardedNorms, StageNorms, TensorNorms
from paceline.training.options import MODES, options_of
from paceline.training.out_of_core.recompute import recompute_always
from paceline.training.out_of_core.training import OutOfCore
from paceline.training.pipeline.preparation import (
    GivenModel,
    check_options,
    check_undivided,
    choose_shape,
    divide_ranks,
    in_stages,
    lines_of,
)
from paceline.training.precision.scaling import LossScaler, scale_gradients
from paceline.training.prepared import Prepared
from paceline.training.tensor_parallel import (
    DividedLayer,
    TensorParallel,
    check_tensor_parallel,
    choose_layers,
)
from paceline.training.uneven import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.training.compression import DGCOptions
    from paceline.training.compression.cost import CompressionEstimate
    from paceline.training.compression.hooks import Compressor
    from paceline.training.optimizers.norms import LayerNorms
    from paceline.training.options import Precision, TrainingOptions


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    *,
    group: Any = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    example_inputs: Any = None,
    **options: Any,
) -> Prepared:
    """Return the model and the optimizer, ready to train on all ranks of the process group.

    Every rank calls this. Without a process group it trains in this process alone.

    Args:
        model: on the device where it trains.
        optimizer: of the model's parameters, before its first step.
        plan: its engine, buckets and precision are used where no option says otherwise, and its
            microbatches and recomputation, also of a model that is not divided. None: the plan that
            `paceline run` follows, where it started this process with one.
        group: a process group in place of the default one.
        loss_fn: takes what the model returns and the targets, and returns the mean over the
            samples; for `Prepared.forward_backward`.
        example_inputs: a batch of a few samples, as `Prepared.forward_backward` takes it: where
            the model is divided, its layers are weighed by it, and it says which arguments the
            model gets.
        options: those of `TrainingOptions`.

    Raises:
        UsageError: the ranks' models differ, the optimizer has other parameters, or an option is
            unknown.
    """
    plan = plan or _plan_of_run()
    chosen = options_of(options, plan)
    _check_parameters(model, optimizer)
    world = dist.get_world_size(group) if dist.is_initialized() else 1
    given = GivenModel(model, optimizer, loss_fn, example_inputs)
    chosen, said = choose_shape(given, chosen, world, group)
    shape = divide_ranks(chosen, plan, world)
    if shape[0] > 1:
        return _divided(given, plan, group, chosen, shape, said)
    check_undivided(chosen)
    chosen, notes = _planned_passes(chosen, plan, given)
    said += notes
    ranks = find_ranks(model if chosen.engine in MODES else None, group)
    _check_options(chosen, plan, ranks)
    _check_optimizers(optimizer, ranks)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    dgc = chosen.dgc()
    if dgc is not None and ranks.size > 1:
        decision = _measured(trained, ranks, dgc)
        said.append(str(decision))
        if chosen.compression == "auto":
            chosen = _decided(chosen, decision)
        elif not decision.pays:
            said.append("gradients are compressed all the same; compression='auto' would not")
    if chosen.scaling == "weak":
        said += _scale_rates(optimizer, ranks.size)
    check = GradientCheck([name for name, _ in model.named_parameters()])
    parts = _Parts(
        scaler=LossScaler(enabled=chosen.precision == "float16"),
        check=check,
        weight=Weight(is_required=chosen.scaling == "strong" and ranks.size > 1),
        divided=_tensor_parallel(given, chosen, ranks, check, said),
    )
    _synchronise(model, chosen, ranks, parts.weight)
    before_step = BeforeStep(
        optimizer,
        ranks,
        scaler=parts.scaler,
        check=parts.check,
        norms=_norms(chosen, ranks, parts.divided),
        clip_norm=chosen.clip_norm,
        alarm=DivergenceAlarm() if chosen.alarm else None,
    )
    # Its hook adds weight decay to gradients, and so comes after that of `before_step`.
    takeover, compressor = _compression(chosen, optimizer, trained, ranks)
    _autocast(model, chosen.precision)
    wrapped = _wrap(model, optimizer, trained, plan, ranks, chosen, compressor, parts)
    if isinstance(wrapped, DataParallel):
        wrapped.adopt(optimizer)
    wrapped.register_forward_hook(parts.scale_outputs)
    kept: dict[str, Any] = {"steps": before_step}
    if takeover is not None:
        kept["decay"] = takeover
    if compressor is not None:
        kept["compression"] = compressor
        if isinstance(wrapped, DataParallel):
            optimizer.register_step_post_hook(lambda *_: _end_step(before_step, compressor))
    out_of_core = _out_of_core(wrapped, optimizer, ranks, chosen)
    if ranks.rank == 0 and ranks.size > 1:
        for line in (_described(chosen, ranks), *said):
            _say(line)
    return Prepared(
        wrapped,
        optimizer,
        chosen,
        before_step,
        ranks,
        parts.weight,
        kept,
        loss_fn,
        out_of_core,
        parts.divided,
    )


def _divided(
    given: GivenModel,
    plan: Plan | None,
    group: Any,
    options: TrainingOptions,
    shape: tuple[int, int],
    said: list[str],
) -> Prepared:
    """Return a model whose layers are divided among the ranks."""
    model, optimizer = given.model, given.optimizer
    check_options(options)
    ranks = find_ranks(None, group)
    _check_options(options, plan, ranks)
    _check_optimizers(optimizer, ranks)
    parts = _Parts(
        scaler=LossScaler(enabled=options.precision == "float16"),
        check=GradientCheck([name for name, p in model.named_parameters() if p.requires_grad]),
        weight=Weight(),
    )
    wrapped = in_stages(
        given,
        ranks,
        options,
        shape,
        check=parts.check,
        scale_outputs=parts.scaler.scale_outputs,
    )
    before_step = BeforeStep(
        optimizer,
        ranks,
        scaler=parts.scaler,
        check=parts.check,
        norms=StageNorms(ranks.group, wrapped.holders()),
        clip_norm=options.clip_norm,
        alarm=DivergenceAlarm() if options.alarm else None,
    )
    if ranks.rank == 0:
        for line in (*said, *lines_of(wrapped)):
            _say(line)
    kept: dict[str, Any] = {"steps": before_step}
    out_of_core = _out_of_core(wrapped, optimizer, ranks, options)
    return Prepared(
        wrapped,
        optimizer,
        options,
        before_step,
        ranks,
        parts.weight,
        kept,
        given.loss_fn,
        out_of_core,
    )


def _planned_passes(
    options: TrainingOptions, plan: Plan | None, given: GivenModel
) -> tuple[TrainingOptions, list[str]]:
    """Return the options with the passes and the recomputation of a plan, and what to say of them.

    Raises:
        UsageError: the plan has layers computed again, and the model none that can be.
    """
    if plan is None or plan.mesh.pipeline > 1:
        return options, []
    said = []
    if plan.recompute == "full":
        names = recompute_always(given.model)
        if not names:
            raise UsageError(
                "the model has no layers that can be computed again",
                where="prepare(plan=...), recompute = full",
                why="they are elements of nn.Sequential or nn.ModuleList, without batch "
                "normalisation",
                fix="Plan without recomputation",
            )
        options = replace(options, recompute=True)
        said.append(f"{len(names)} layers are computed again in the backward pass")
    if (passes := plan.microbatch_count) > 1:
        if given.loss_fn is None:
            said.append(
                f"the plan has {passes} passes before an update: the loop has to make them, or "
                "give loss_fn to prepare and call forward_backward"
            )
        else:
            options = replace(options, microbatches=passes)
            said.append(f"forward_backward makes {passes} passes before an update")
    return options, said


@dataclass(frozen=True, slots=True)
class _Parts:
    """What every engine hands gradients to, or is handed by."""

    scaler: LossScaler
    check: GradientCheck
    weight: Weight
    divided: TensorParallel | None = None

    def scale_outputs(self, _model: nn.Module, _given: Any, outputs: Any) -> Any:
        """Return a model's outputs, whose gradients are those of the scaled and weighted loss."""
        self.weight.check_used()
        scaled = self.scaler.scale_outputs(outputs)
        return scale_gradients(scaled, self.weight) if self.weight.is_used else scaled


def _tensor_parallel(
    given: GivenModel,
    options: TrainingOptions,
    ranks: Ranks,
    check: GradientCheck,
    said: list[str],
) -> TensorParallel | None:
    """Divide the linear layers that rank 0 chooses; add what to say of it.

    Raises:
        UsageError: one cannot be divided; on all ranks the same error.
    """
    if options.tensor_parallel is None or ranks.size == 1:
        return None
    shared_by = options.tensor_parallel_ranks or ranks.size
    chosen = options.tensor_parallel

    def choose() -> tuple[list[DividedLayer], str] | None:
        if ranks.rank:
            return None
        return choose_layers(
            given.model,
            chosen,
            shared_by,
            given.example_inputs,
            groups=ranks.size // shared_by,
        )

    agreed = computed_by_all(choose, ranks, "prepare(tensor_parallel=...)")[0]
    assert agreed is not None
    layers, line = agreed
    said.append(line)
    if not layers:
        return None
    return TensorParallel(given.model, given.optimizer, layers, ranks, options=options, check=check)


def _synchronise(model: nn.Module, options: TrainingOptions, ranks: Ranks, weight: Weight) -> None:
    """Have layers of batch normalisation take the statistics of all ranks' batches, if asked.

    Those that are torch's SyncBatchNorm do on a CPU as well, where torch has none.

    Raises:
        UsageError: the ranks have other such layers, or an option does not go with them.
    """
    if ranks.size == 1:
        return
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())

    def own() -> dict[str, nn.Module]:
        if not (options.sync_batch_norm or on_cpu):
            return {}
        return batch_norms(model, only_synchronised=not options.sync_batch_norm)

    names = computed_by_all(lambda: list(own()), ranks, "prepare")
    for rank, others in enumerate(names):
        if others != names[0]:
            first, other = (", ".join(some) or "none" for some in (names[0], others))
            raise UsageError(
                f"rank {rank} has other layers of batch normalisation to synchronise than rank 0",
                where="prepare",
                why=f"{other} on rank {rank}, {first} on rank 0",
                fix="Build the same model on all ranks",
            )
    if not names[0]:
        return
    check_synchronised(options)
    if options.overlap and ranks.heap is not None:
        raise UsageError(
            "synchronised batch normalisation does not go with overlap within a host",
            where="prepare(overlap=True)",
            why="a rank would wait in the reduction of a gradient that another one does not have "
            "yet, while that one waits for it in a batch normalisation",
            fix="Leave overlap out: within a host it is off, and gradients are reduced afterwards",
        )
    exchange = RowExchange(ranks, deadline_s=options.deadline_s)
    synchronise(own(), exchange, lambda: BatchShare(counts=not weight.is_used or weight.scale != 0))


def _norms(options: TrainingOptions, ranks: Ranks, divided: TensorParallel | None) -> LayerNorms:
    """Return what computes the norms of whole layers."""
    if divided is not None:
        return divided.norms
    return ShardedNorms(ranks.group) if options.engine == "sharded" else TensorNorms()


def _out_of_core(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks, options: TrainingOptions
) -> OutOfCore | None:
    """Return what keeps this rank within its memory budget, if it has one."""
    if options.memory_budget is None:
        return None
    return OutOfCore(
        model,
        optimizer,
        budget_bytes=options.memory_budget,
        spill_folder=options.spill_folder,
        say=_say if ranks.rank == 0 else None,
    )


def _say(line: str) -> None:
    sys.stderr.write(f"training: {line}\n")


def _plan_of_run() -> Plan | None:
    """Return the plan that `paceline run` gave its ranks; None without one."""
    text = os.environ.get(PLAN_VARIABLE)
    return Plan.from_text(text, where=PLAN_VARIABLE) if text else None


def _check_options(options: TrainingOptions, plan: Plan | None, ranks: Ranks) -> None:
    """Raise the same error on all ranks unless all train with the same options.

    Raises:
        UsageError: they do not; the error names the first rank that differs.
    """
    sizes = (plan.bucket_bytes, plan.first_bucket_bytes) if plan is not None else ()
    difference = first_difference(f"{options} {sizes}", ranks)
    if difference is not None:
        rank, expected, other = difference
        raise UsageError(
            f"rank {rank} trains with other options than rank 0",
            where="prepare",
            why=f"{expected} on rank 0, {other} on rank {rank}",
            fix="Give all ranks the same options and the same plan",
        )
    if options.tensor_parallel is not None and ranks.size > 1:
        check_tensor_parallel(options, ranks)


def _check_optimizers(optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
    """Raise the same error on all ranks unless their optimizers make the same updates.

    Raises:
        UsageError: another kind of optimizer or another hyper-parameter; the error names both.
    """
    difference = first_difference(list(_hyperparameters(optimizer)), ranks)
    if difference is None:
        return
    rank, expected, other = difference
    pairs = itertools.zip_longest(expected, other, fillvalue="nothing more")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise UsageError(
        f"the optimizer of rank {rank} is another one than that of rank 0",
        where="prepare",
        why=f"{first} on rank 0, {second} on rank {rank}",
        fix="Build the same optimizer with the same hyper-parameters on all ranks",
    )


def _hyperparameters(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    """Yield what decides the updates of an optimizer, as far as plain values do."""
    yield type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        yield f"{len(group['params'])} parameters in group {number}"
        for name, value in sorted(group.items()):
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()  # a rate may be a tensor
            if value is None or isinstance(value, bool | int | float | str | tuple):
                yield f"{name}={value!r} in group {number}"


def _measured(
    trained: list[tuple[str, nn.Parameter]], ranks: Ranks, options: DGCOptions
) -> CompressionEstimate:
    """Return what a measurement says of compressing this model's gradients between these ranks."""
    count = sum(parameter.numel() for _, parameter in trained)
    average = ranks.heap.average if ranks.heap is not None else None
    return measure(count, ranks.group, options=options, average=average, hosts="find")


def _decided(options: TrainingOptions, decision: CompressionEstimate) -> TrainingOptions:
    """Return the options with ``auto`` replaced by what a measurement says."""
    if decision.pays:
        return replace(options, compression="dgc")
    return replace(options, compression=None, compression_warmup=None)


def _scale_rates(optimizer: torch.optim.Optimizer, ranks: int) -> list[str]:
    """Multiply the learning rates for batches that are `ranks` times as large; return what to say.

    In proportion for SGD (Goyal et al., Accurate, Large Minibatch SGD, 2017), with the square root
    for optimizers that divide gradients by their size (Krizhevsky, One weird trick, 2014).

    Raises:
        UsageError: a schedule has the rates from before already.
    """
    is_proportional = isinstance(optimizer, torch.optim.SGD)
    factor = float(ranks) if is_proportional else ranks**0.5
    before = sorted({float(group["lr"]) for group in optimizer.param_groups})
    for group in optimizer.param_groups:
        if "initial_lr" in group:
            raise UsageError(
                "the optimizer has a schedule already, which would set its learning rates back",
                where="prepare(scaling='weak')",
                fix="Make the schedule after prepare",
            )
        group["lr"] = group["lr"] * factor
    rates = ", ".join(f"{rate:g} -> {rate * factor:g}" for rate in before)
    rule = "in proportion to" if is_proportional else "with the square root of"
    return [f"learning rate {rates}, {rule} the {ranks} ranks; warm it up over the first epochs"]


def _wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    trained: list[tuple[str, nn.Parameter]],
    plan: Plan | None,
    ranks: Ranks,
    options: TrainingOptions,
    compressor: Compressor | None,
    parts: _Parts,
) -> nn.Module:
    """Return the model in its engine."""
    sizes: dict[str, Any] = {}
    if plan is not None:
        sizes = {"bucket_bytes": plan.bucket_bytes, "first_bucket_bytes": plan.first_bucket_bytes}
    if options.engine == "fsdp2" and ranks.size > 1:
        return shard_fully(model, optimizer, ranks.group)
    if options.engine in MODES or ranks.size == 1:
        overlap = ranks.heap is None if options.overlap is None else options.overlap
        if ranks.size == 1:
            watch_gradients(trained, parts.check)
        mode: Any = options.engine if options.engine in MODES else "allreduce"
        if compressor is not None:
            mode = CompressedAllReduce(ranks, compressor, parts.scaler)
        return DataParallel(
            model,
            ranks,
            mode=mode,
            overlap_gradients=overlap and compressor is None,
            overlap_parameters=overlap,
            check=parts.check,
            apart=parts.divided.names if parts.divided is not None else (),
            **sizes,
        )
    watch_gradients(trained, parts.check)
    megabytes = {"bucket_cap_mb": sizes["bucket_bytes"] / (1 << 20)} if sizes else {}
    device = next(model.parameters()).device
    wrapped = TorchDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=ranks.group,
        gradient_as_bucket_view=True,
        find_unused_parameters=compressor is None,
        accumulates=compressor is None or compressor.accumulates,
        **megabytes,
    )
    wrapped.check_before(optimizer)
    if compressor is not None:
        register_hook(wrapped, compressor)
    return wrapped


def _compression(
    options: TrainingOptions,
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, nn.Parameter]],
    ranks: Ranks,
) -> tuple[MomentumTakeover | None, Compressor | None]:
    """Return what compresses gradients, and what takes the optimizer's momentum for it."""
    if options.compression is None or ranks.size == 1:
        return None, None
    given = options.dgc()
    if given is None:
        return None, HalfCompression(getattr(torch, str(options.compression)))
    takeover = MomentumTakeover(optimizer, named)
    given = replace(given, momentum=takeover.momentum, nesterov=takeover.nesterov)
    return takeover, DeepGradientCompression(given, hosts="find")


def _end_step(before_step: BeforeStep, compressor: Compressor) -> None:
    if not before_step.is_skipped:
        compressor.end_step()


def _autocast(model: nn.Module, precision: Precision | None) -> None:
    """Have the model compute in a lower precision, wherever it is called; outputs are float32."""
    if precision in (None, "float32"):
        return
    model.forward = _Autocast(model, getattr(torch, str(precision)))


class _Autocast:
    """A model's `forward` under autocast; a copy of the model gets one of its own."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._device_type = next(model.parameters()).device.type
        self._dtype = dtype
        self.__wrapped__ = model.forward  # its signature says which arguments it takes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device_type, self._dtype):
            outputs = self.__wrapped__(*args, **kwargs)
        return tree_map(lambda value: value.float() if _is_half(value) else value, outputs)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _described(options: TrainingOptions, ranks: Ranks) -> str:
    """Return the options that matter in words: "2 ranks, engine allreduce, bfloat16"."""
    parts = [f"{ranks.size} ranks", f"engine {options.engine}", str(options.precision)]
    if options.clip_norm is not None:
        parts.append(f"gradients clipped at norm {options.clip_norm:g}")
    if options.compression is not None:
        dgc = options.dgc()
        parts.append(f"gradients sent as {options.compression if dgc is None else 'dgc'}")
        if dgc is not None:
            parts.append(str(dgc.density))
            parts.append("momentum and weight decay of the optimizer applied before sending")
    return ", ".join(parts)


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error unless the model has values, and the optimizer updates nothing else.

    Raises:
        UsageError: a parameter or buffer is without values, or the optimizer has another tensor.
    """
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_meta:
            raise UsageError(
                f"{name} is on the device meta, and has no values to train",
                where="prepare",
                why="the model was built under torch.device('meta'), or was divided by an earlier "
                "prepare, which keeps this rank's layers only",
                fix="Build the model on the device where it trains, and prepare it once",
            )
    known = {id(parameter) for parameter in model.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise UsageError(
                    f"the optimizer updates a tensor of shape {list(parameter.shape)} that is no "
                    "parameter of the model",
                    where="prepare",
                    fix="Build the optimizer from model.parameters(), after the model was moved",
                )
