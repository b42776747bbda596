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
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from paceline.collectives.tensor_heap import TensorHeap
from paceline.core.errors import UsageError
from paceline.training.before_step import BeforeStep, watch_gradients
from paceline.training.compression import (
    DeepGradientCompression,
    DGCOptions,
    HalfCompression,
    MomentumTakeover,
    register_hook,
)
from paceline.training.engine.buckets import bytes_of_buckets
from paceline.training.engine.data_parallel import DataParallel
from paceline.training.engine.fully_sharded import shard_fully
from paceline.training.engine.modes import (
    CompressedAllReduce,
    ModeName,
    Ranks,
    first_difference,
)
from paceline.training.health import GradientCheck
from paceline.training.optimizers.norms import ShardedNorms, TensorNorms
from paceline.training.precision.scaling import LossScaler, scale_gradients
from paceline.training.uneven import Weight, weighted_batches

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from paceline.core.plan import Plan
    from paceline.training.compression.hooks import Compressor

Engine = Literal["ddp", "fsdp2", "allreduce", "sharded", "root"]
Precision = Literal["float32", "bfloat16", "float16"]
_HEAP_SLACK = 1 << 20
_FORM_S = 300.0  # the longest wait for a rank that has not called `prepare`
_STATE_VERSION = 1
_calls = itertools.count()  # all ranks call `prepare` equally often: each call has keys of its own


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How a prepared model trains.

    Attributes:
        engine: ``ddp`` is torch's DistributedDataParallel, ``fsdp2`` its fully_shard (by the layers
            of each nn.Sequential and nn.ModuleList); the others are modes of Paceline's.
        precision: dtype of the computing (torch.autocast); weights and updates stay float32.
            With ``float16`` the loss is scaled. None: as the plan says, or float32.
        clip_norm: the most that the norm of all gradients may be; None: not clipped.
        compression: what gradients become on the wire: ``dgc`` or its options (needs SGD, whose
            momentum it takes over), ``float16`` or ``bfloat16``.
        overlap: whether communication overlaps computing; None: between hosts it does.
    """

    engine: Engine = "allreduce"
    precision: Precision | None = None
    clip_norm: float | None = None
    compression: Literal["dgc", "float16", "bfloat16"] | DGCOptions | None = None
    overlap: bool | None = None

    def __post_init__(self) -> None:
        known = {
            "engine": get_args(Engine),
            "precision": (None, *get_args(Precision)),
        }
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise UsageError(
                    f"there is no {name} {getattr(self, name)!r}",
                    where="TrainingOptions",
                    fix="Choose one of " + ", ".join(map(str, values)),
                )
        if self.engine == "ddp" and self.compression and self.precision == "float16":
            raise UsageError(
                "DistributedDataParallel sends gradients before they can be unscaled",
                where="TrainingOptions(precision='float16', compression=...)",
                fix="Use the engine allreduce, or bfloat16, which needs no scaling",
            )
        if self.compression is not None and self.engine not in ("ddp", "allreduce"):
            raise UsageError(
                f"the engine {self.engine} cannot compress gradients",
                where="TrainingOptions",
                fix="Use the engine allreduce or ddp",
            )


@dataclass(slots=True)
class Prepared:
    """A model and an optimizer that train on all ranks. Unpacks into the two.

    Attributes:
        model: to pass batches through.
        optimizer: the one that was given.
        rank: of this process.
        ranks: how many train.
        before_step: counts steps, also those that a gradient which was not finite prevented.
        group: the process group, or None for the default one.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    rank: int
    ranks: int
    before_step: BeforeStep
    group: Any
    _weight: Weight
    _parts: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.optimizer))

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loader, where ranks have unequal batches or numbers of them.

        The gradients of a step are weighted by the ranks' samples, so that their average is that of
        all samples. A rank whose loader has ended repeats its last batch with the weight 0 until
        the others have ended, so that no rank waits for another. All ranks call this.

        Raises:
            UsageError: a rank has no batch at all; the error names it.
        """
        return weighted_batches(loader, self._weight, self.group, self.rank, self.ranks)

    def own_samples(self, samples: int) -> int:
        """Return how many of the samples of a batch count: none of one that `batches` repeats."""
        return samples if self._weight.scale else 0

    def state_dict(self) -> dict[str, Any]:
        """Return what training has besides model and optimizer, of this rank: save one per rank."""
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        return {"version": _STATE_VERSION, "ranks": self.ranks, **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken on this rank.

        Raises:
            UsageError: it is of another number of ranks, or of other options.
        """
        own = {"version", "ranks", *self._parts}
        if state.get("version") != _STATE_VERSION or set(state) != own:
            raise UsageError(
                f"the state has {sorted(state)}, and this training {sorted(own)}",
                where="Prepared.load_state_dict",
                fix="Prepare with the options with which the state was saved",
            )
        if state["ranks"] != self.ranks and "compression" in self._parts:
            raise UsageError(
                f"the state is of {state['ranks']} ranks, and {self.ranks} train",
                where="Prepared.load_state_dict",
                why="each rank's residuals of compressed gradients are its own",
                fix="Start as many ranks as before",
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None = None,
    *,
    group: Any = None,
    **options: Any,
) -> Prepared:
    """Return the model and the optimizer, ready to train on all ranks of the process group.

    Every rank calls this. Without a process group it trains in this process alone.

    Args:
        model: on the device where it trains.
        optimizer: of the model's parameters, before its first step.
        plan: its buckets and precision are used; without one torch's defaults.
        group: a process group in place of the default one.
        options: those of `TrainingOptions`.

    Raises:
        UsageError: the ranks' models differ, the optimizer has other parameters, or an option is
            unknown.
    """
    try:
        chosen = TrainingOptions(**options)
    except TypeError as problem:
        raise UsageError(str(problem), where="prepare", fix="See TrainingOptions") from None
    chosen = replace(chosen, precision=chosen.precision or (plan.precision if plan else "float32"))
    ranks = find_ranks(model if chosen.engine in get_args(ModeName) else None, group)
    _check_parameters(model, optimizer)
    _check_options(chosen, plan, ranks)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    scaler = LossScaler(enabled=chosen.precision == "float16")
    check, weight = GradientCheck([name for name, _ in named]), Weight()
    norms = ShardedNorms(ranks.group) if chosen.engine == "sharded" else TensorNorms()
    before_step = BeforeStep(
        optimizer, ranks, scaler=scaler, check=check, norms=norms, clip_norm=chosen.clip_norm
    )
    # Its hook adds weight decay to gradients, and so comes after that of `before_step`.
    takeover, compressor = _compression(chosen, optimizer, named, ranks)
    _autocast(model, chosen.precision)
    wrapped = _wrap(model, optimizer, plan, ranks, chosen, compressor, scaler, check)
    if isinstance(wrapped, DataParallel):
        wrapped.adopt(optimizer)

    def scale(_model: nn.Module, _given: Any, outputs: Any) -> Any:
        scaled = scaler.scale_outputs(outputs)
        return scale_gradients(scaled, weight) if weight.is_used else scaled

    wrapped.register_forward_hook(scale)
    parts: dict[str, Any] = {"steps": before_step}
    if takeover is not None:
        parts["decay"] = takeover
    if compressor is not None:
        parts["compression"] = compressor
        if isinstance(wrapped, DataParallel):
            optimizer.register_step_post_hook(lambda *_: _end_step(before_step, compressor))
    if ranks.rank == 0 and ranks.size > 1:
        sys.stderr.write(f"training: {_described(chosen, ranks)}\n")
    return Prepared(
        wrapped, optimizer, ranks.rank, ranks.size, before_step, ranks.group, weight, parts
    )


def find_ranks(model: nn.Module | None = None, group: Any = None) -> Ranks:
    """Return the ranks of a process group, or one rank where there is none.

    Every rank calls this. Where all share a host, they get shared memory for a model's gradients.

    Args:
        model: that Paceline's engine will train; None: another engine has its own memory.
        group: a process group in place of the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 0, 1, None)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    heap = _form_heap(model, group or dist.group.WORLD, rank, size) if model is not None else None
    return Ranks(group, rank, size, heap)


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


def _wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | None,
    ranks: Ranks,
    options: TrainingOptions,
    compressor: Compressor | None,
    scaler: LossScaler,
    check: GradientCheck,
) -> nn.Module:
    """Return the model in its engine."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    sizes: dict[str, Any] = {}
    if plan is not None:
        sizes = {"bucket_bytes": plan.bucket_bytes, "first_bucket_bytes": plan.first_bucket_bytes}
    if options.engine == "fsdp2" and ranks.size > 1:
        return shard_fully(model, optimizer, ranks.group)
    if options.engine in get_args(ModeName) or ranks.size == 1:
        overlap = ranks.heap is None if options.overlap is None else options.overlap
        if ranks.size == 1:
            watch_gradients(named, check)
        mode: Any = options.engine if options.engine in get_args(ModeName) else "allreduce"
        if compressor is not None:
            mode = CompressedAllReduce(ranks, compressor, scaler)
        return DataParallel(
            model,
            ranks,
            mode=mode,
            overlap_gradients=overlap and compressor is None,
            overlap_parameters=overlap,
            check=check,
            **sizes,
        )
    watch_gradients(named, check)
    megabytes = {"bucket_cap_mb": sizes["bucket_bytes"] / (1 << 20)} if sizes else {}
    device = next(model.parameters()).device
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=ranks.group,
        gradient_as_bucket_view=True,
        **megabytes,
    )
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
    wanted = options.compression
    if wanted is None or ranks.size == 1:
        return None, None
    if wanted in ("float16", "bfloat16"):
        return None, HalfCompression(getattr(torch, str(wanted)))
    given = wanted if isinstance(wanted, DGCOptions) else DGCOptions()
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
    kind = next(model.parameters()).device.type
    forward = torch.autocast(kind, getattr(torch, str(precision)))(model.forward)

    def computed(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        return tree_map(lambda value: value.float() if _is_half(value) else value, outputs)

    model.forward = computed


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)


def _described(options: TrainingOptions, ranks: Ranks) -> str:
    """Return the options that matter in words: "2 ranks, engine allreduce, bfloat16"."""
    parts = [f"{ranks.size} ranks", f"engine {options.engine}", str(options.precision)]
    if options.clip_norm is not None:
        parts.append(f"gradients clipped at norm {options.clip_norm:g}")
    if options.compression is not None:
        how = options.compression
        parts.append(f"gradients sent as {how if isinstance(how, str) else 'dgc'}")
        if how not in ("float16", "bfloat16"):
            density = (how if isinstance(how, DGCOptions) else DGCOptions()).density
            since = "from the first step" if not density.steps_per_stage else "after the warm-up"
            parts.append(f"{density.density:.2%} of the entries {since}")
            parts.append("momentum and weight decay of the optimizer applied before sending")
    return ", ".join(parts)


def _form_heap(model: nn.Module, group: Any, rank: int, size: int) -> TensorHeap | None:
    """Return shared memory with room for the gradients, where all ranks are on one host."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if size == 1 or any(parameter.device.type != "cpu" for parameter in parameters):
        return None
    store = dist.PrefixStore(f"training/{next(_calls)}", group.get_group_store())
    # Twice: new buckets are made beside the old ones.
    needed = 2 * bytes_of_buckets(parameters, size) + _HEAP_SLACK
    return TensorHeap.form(store, rank, size, needed, _FORM_S)


def _check_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
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
