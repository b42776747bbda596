"""How a prepared model trains: what `prepare` takes, checked."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from paceline.core.config import Configuration, resolve
from paceline.core.errors import UsageError
from paceline.core.plan import StrategyChoice
from paceline.training.compression import DensitySchedule, DGCOptions
from paceline.training.engine.modes import ModeName

if TYPE_CHECKING:
    from paceline.core.plan import Plan

Engine = Literal["ddp", "fsdp2", "allreduce", "sharded", "root"]
Precision = Literal["float32", "bfloat16", "float16"]
Compression = Literal["auto", "dgc", "float16", "bfloat16"]
Scaling = Literal["strong", "weak"]
PipelineOrder = Literal["1f1b", "fill_drain", "interleaved", "zero_bubble"]
MODES = get_args(ModeName)
_CHOICES = {
    "engine": Engine,
    "precision": Precision,
    "scaling": Scaling,
    "strategy": StrategyChoice,
    "schedule": PipelineOrder,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(Configuration):
    """How models are divided where a script does not say; `paceline run --strategy` sets it.

    Changes results, in the last bits of sums: all of them, as in `TrainingOptions`.

    Attributes:
        strategy: how batches and layers are divided among the ranks.
        partitions: parts of the model's layers.
        replicas: of the model.
        microbatches: parts of a batch.
    """

    section: ClassVar[str] = "training"
    strategy: StrategyChoice | None = None
    partitions: int | None = None
    replicas: int | None = None
    microbatches: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingOptions:
    """How a prepared model trains.

    Attributes:
        engine: ``ddp`` is torch's DistributedDataParallel, ``fsdp2`` its fully_shard (by the layers
            of each nn.Sequential and nn.ModuleList, in stages by stage); the others are modes of
            Paceline's. None: as the plan says, or ``allreduce``.
        precision: dtype of the computing (torch.autocast); weights and updates stay float32.
            With ``float16`` the loss is scaled. None: as the plan says, or float32.
        scaling: ``weak``: each rank trains on whole batches of its loader, and the learning rates
            grow with the number of ranks (SGD in proportion, other optimizers with its square
            root). ``strong``: all loaders yield the same batches, and `Prepared.batches` gives
            each rank its part of each. None: neither loader nor rates are touched.
        clip_norm: the most that the norm of all gradients may be; None: not clipped.
        compression: what gradients become on the wire: ``dgc`` or its options (needs SGD, whose
            momentum it takes over), ``float16`` or ``bfloat16``. ``auto`` is ``dgc`` where a
            measurement at the start says that it makes steps shorter, and None elsewhere.
        compression_warmup: steps in which ``dgc`` sends fewer and fewer entries, before it sends
            0.1 %; 0: none. The published warm-up is 4 epochs of 90. None: 1,000.
        overlap: whether communication overlaps computing; None: between hosts it does.
        memory_budget: bytes that each rank's process stays under, by spilling tensors to a file, or
            that its tensors on a GPU stay under, by offloading them to the memory of the host
            (`paceline.training.OutOfCore`); None: without limit.
        spill_folder: of that file, on a local disk; None: the folder for temporary files.
        alarm: whether rank 0 says when gradients or the loss grow as those of a training that
            diverges, with step and layer.
        strategy: ``data``: every rank has the whole model. ``model``: each rank has some of its
            layers. ``hybrid``: both, `partitions` times `replicas` ranks. ``auto``: what an
            estimate says is fastest. None: as `partitions` or the plan say, or ``data``.
        partitions: parts that the model's layers are divided into, each on another rank.
        replicas: of the model. One of the two follows from the other.
        microbatches: parts of a batch that are on their way through the stages at the same time;
            None: 4 for each partition.
        schedule: order in which stages compute them: ``1f1b`` keeps the activations of few,
            ``fill_drain`` those of all; ``interleaved`` gives each rank several stages and
            ``zero_bubble`` splits backward passes, so that ranks wait less. None: ``1f1b``.
        stages_per_rank: of ``interleaved``; None: 2.
        layers: number of layers of each stage; None: stages that cost the same.
        recompute: whether stages compute their forward passes again in the backward pass, and keep
            no activations in between but their inputs.
        split_points: names of submodules that make up the model, where its forward pass cannot be
            captured: each is called with the output of the one before.
        deadline_s: the longest wait for another rank of a pipeline, or of a divided layer.
        sync_batch_norm: whether layers of batch normalisation take the statistics of all ranks'
            batches, in stages those of all replicas' microbatches; SyncBatchNorm always does.
        tensor_parallel: names of linear layers whose weights are divided among the ranks, which
            exchange activations in place of their gradients; ``auto``: those that have more bytes
            of gradients. All other layers are data-parallel. None: all layers are; a list of no
            names is refused.
        tensor_parallel_ranks: that share a divided layer, a divisor of all ranks: neighbours, such
            as those of a host; the groups of them are data-parallel. None: all ranks.
    """

    engine: Engine | None = None
    precision: Precision | None = None
    scaling: Scaling | None = None
    clip_norm: float | None = None
    compression: Compression | DGCOptions | None = None
    compression_warmup: int | None = None
    overlap: bool | None = None
    memory_budget: int | None = None
    spill_folder: str | None = None
    alarm: bool = True
    strategy: StrategyChoice | None = None
    partitions: int | None = None
    replicas: int | None = None
    microbatches: int | None = None
    schedule: PipelineOrder | None = None
    stages_per_rank: int | None = None
    layers: tuple[int, ...] | None = None
    recompute: bool = False
    split_points: tuple[str, ...] = ()
    deadline_s: float = 300.0
    sync_batch_norm: bool = False
    tensor_parallel: Literal["auto"] | tuple[str, ...] | None = None
    tensor_parallel_ranks: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check_choice(name, getattr(self, name), get_args(choices))
        if not isinstance(self.compression, DGCOptions):
            _check_choice("compression", self.compression, get_args(Compression))
        if self.engine == "ddp" and self.compression and self.precision == "float16":
            raise UsageError(
                "DistributedDataParallel sends gradients before they can be unscaled",
                where="TrainingOptions(precision='float16', compression=...)",
                fix="Use the engine allreduce, or bfloat16, which needs no scaling",
            )
        if self.compression is not None and self.engine not in (None, "ddp", "allreduce"):
            raise UsageError(
                f"the engine {self.engine} cannot compress gradients",
                where="TrainingOptions",
                fix="Use the engine allreduce or ddp",
            )
        if self.compression_warmup is not None:
            self._check_warmup(self.compression_warmup)
        self._check_stages()
        self._check_shared_layers()
        self._check_numbers()

    def dgc(self) -> DGCOptions | None:
        """Return the options of Deep Gradient Compression, if it is or may be chosen."""
        if isinstance(self.compression, DGCOptions):
            return self.compression
        if self.compression not in ("auto", "dgc"):
            return None
        schedule = DensitySchedule()
        if self.compression_warmup is not None:
            stage = -(-self.compression_warmup // schedule.stages)
            schedule = replace(schedule, steps_per_stage=stage)
        return DGCOptions(density=schedule)

    def _check_stages(self) -> None:
        if self.recompute and self.schedule == "zero_bubble":
            raise UsageError(
                "a stage that recomputes cannot split its backward pass",
                where="TrainingOptions(recompute=True, schedule='zero_bubble')",
                fix="Use the schedule 1f1b, or do not recompute",
            )
        if self.strategy == "auto" and (self.partitions or self.replicas):
            name = "partitions" if self.partitions else "replicas"
            raise UsageError(
                "the strategy auto chooses partitions and replicas itself",
                where=f"TrainingOptions(strategy='auto', {name}={getattr(self, name)!r})",
                fix=f"Leave out {name}, or give the strategy hybrid",
            )
        if isinstance(self.split_points, str):
            raise UsageError(
                f"split_points is {self.split_points!r}",
                where="TrainingOptions",
                fix="Give the names of the submodules that make up the model in a list",
            )

    def _check_shared_layers(self) -> None:
        chosen = self.tensor_parallel
        if not (chosen is None or isinstance(chosen, str | tuple | list)):
            raise UsageError(
                f"tensor_parallel is {chosen!r}",
                where="TrainingOptions",
                fix="Give 'auto', or the names of linear layers in a list",
            )
        if isinstance(chosen, str) and chosen != "auto":
            raise UsageError(
                f"tensor_parallel is {chosen!r}",
                where="TrainingOptions",
                fix=f"Give 'auto', or the names of linear layers in a list: [{chosen!r}]",
            )
        if chosen == ():
            raise UsageError(
                "tensor_parallel names no layer",
                where="TrainingOptions(tensor_parallel=[])",
                why="nothing would be divided, although a list of names asks for it",
                fix="Name linear layers, give 'auto', or leave it out to divide none",
            )
        if self.sync_batch_norm and self.memory_budget is not None:
            raise UsageError(
                "a rank out of core may compute a layer again when others do not",
                where="TrainingOptions(sync_batch_norm=True, memory_budget=...)",
                why="the ranks share the statistics of their batches in each such layer",
                fix="Leave one of both out, or use a normalisation without statistics of the batch",
            )
        if self.tensor_parallel_ranks is not None and chosen is None:
            raise UsageError(
                "tensor_parallel_ranks are those that share divided layers, and none is divided",
                where="TrainingOptions",
                fix="Give tensor_parallel too: 'auto', or the names of linear layers",
            )

    def _check_numbers(self) -> None:
        counts = ("partitions", "replicas", "microbatches", "stages_per_rank")
        for name in (*counts, "tensor_parallel_ranks", "memory_budget"):
            value = getattr(self, name)
            if value is not None and (not _is_count(value) or value < 1):
                raise UsageError(
                    f"{name} must be a whole number of at least 1, got {value!r}",
                    where="TrainingOptions",
                    fix="Leave it out, or give "
                    + ("bytes, as 8 << 30" if name == "memory_budget" else "1 or more"),
                )
        for layers in self.layers or ():
            if not _is_count(layers) or layers < 1:
                raise UsageError(
                    f"a stage has 1 layer or more, got {layers!r}",
                    where=f"TrainingOptions(layers={self.layers!r})",
                    fix="Give the number of layers of each stage, as (6, 4)",
                )
        for name in ("clip_norm", "deadline_s"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (is_number and value > 0):
                raise UsageError(
                    f"{name} must be a number above 0, got {value!r}",
                    where="TrainingOptions",
                    fix="Leave it out, or give a number above 0",
                )

    def _check_warmup(self, steps: int) -> None:
        if steps < 0:
            raise UsageError(
                f"compression_warmup must be 0 or more, got {steps}",
                where="TrainingOptions",
                fix="Give the steps before the final density, 0 for none",
            )
        if self.compression not in ("auto", "dgc"):
            raise UsageError(
                "compression_warmup is that of compression='dgc'",
                where="TrainingOptions",
                fix="Leave it out, or give DGCOptions a DensitySchedule with steps_per_stage",
            )


def options_of(given: dict[str, Any], plan: Plan | None) -> TrainingOptions:
    """Return options from keywords; what they leave open is as the configuration or plan says.

    Raises:
        UsageError: an option is unknown, or has a value that it cannot have.
    """
    known = [field.name for field in fields(TrainingOptions)]
    for name in given:
        if name not in known:
            raise UsageError(
                f"there is no option {name!r}",
                where="prepare",
                fix=f"The options are {', '.join(known)}",
            )
    if isinstance(given.get("tensor_parallel"), list):
        given = {**given, "tensor_parallel": tuple(given["tensor_parallel"])}
    options = TrainingOptions(**given)
    config = resolve(TrainingConfig).config
    if options.strategy is None and options.partitions is None and options.replicas is None:
        options = replace(
            options,
            strategy=config.strategy,
            partitions=config.partitions,
            replicas=config.replicas,
        )
    elif options.strategy == "data":
        config = TrainingConfig()
    options = replace(options, microbatches=options.microbatches or config.microbatches)
    engine: Engine = options.engine or (plan.engine if plan else "allreduce")
    precision: Precision = options.precision or _planned_precision(plan)
    options = replace(options, engine=engine, precision=precision)
    if plan is not None and plan.mesh.tensor > 1 and options.tensor_parallel is None:
        options = replace(options, tensor_parallel="auto", tensor_parallel_ranks=plan.mesh.tensor)
    shape = (options.strategy, options.partitions, options.replicas)
    if plan is None or plan.mesh.pipeline == 1:
        return options
    if shape != (None, None, None) and options.partitions != plan.mesh.pipeline:
        return options  # the plan's stages are not those of the options
    return replace(
        options,
        microbatches=options.microbatches or plan.microbatches or None,
        schedule=options.schedule or plan.schedule,
        layers=options.layers or plan.layers or None,
    )


def _planned_precision(plan: Plan | None) -> Precision:
    """Return the precision of a plan; without one 32 bits.

    Raises:
        UsageError: it can be predicted, not trained with.
    """
    if plan is None:
        return "float32"
    if plan.precision == "float8":
        raise UsageError(
            "a plan has precision float8, which prepare does not train with",
            where="prepare",
            fix="Give precision='bfloat16', or plan with it",
        )
    return plan.precision


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value is not None and value not in choices:
        raise UsageError(
            f"there is no {name} {value!r}",
            where="TrainingOptions",
            fix=f"Choose one of {', '.join(choices)}",
        )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
