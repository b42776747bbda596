"""Makes the Plan and the Architecture of what a user types: sizes in words, defaults that fit.

Sits between ``paceline plan --model`` and `prediction`: no output, no files but the model's.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.errors import ConfigError, UsageError
from paceline.core.plan import Mesh, PipelineChoice, Plan, PrecisionChoice, RecomputeChoice
from paceline.core.record import convert, nearest
from paceline.perf.transformer.architecture import Architecture
from paceline.perf.transformer.configurations import read_architecture

if TYPE_CHECKING:
    from paceline.core.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerOptions:
    """How a transformer is to be trained; each field is a flag of ``paceline plan``.

    Attributes:
        nodes: of the machine, all devices of each.
        batch: samples of a step over all replicas; 0: one microbatch for each replica.
        microbatch: samples of one.
        tensor: ranks that share each layer.
        stages: ranks of a pipeline.
        context: ranks that share a sequence.
        interleave: stages of the model per rank of the pipeline.
        zero: stage of ZeRO.
        recompute: what the backward pass computes again.
        schedule: order of the pipeline.
        precision: of products.
        sequence_parallel: None: as soon as there are tensor-parallel ranks.
        fused_attention: attention in one kernel.
        compiled: elementwise operators are fused.
        overlap: collectives run beside compute where that is possible.
        loader_workers: processes that prepare a replica's samples beside the step; 0: the loop
            does.
        compression: bytes of gradients over those that replicas exchange of them.
    """

    nodes: int = 1
    batch: int = 0
    microbatch: int = 1
    tensor: int = 1
    stages: int = 1
    context: int = 1
    interleave: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    recompute: RecomputeChoice = "none"
    schedule: PipelineChoice = "1f1b"
    precision: PrecisionChoice = "bfloat16"
    sequence_parallel: bool | None = None
    fused_attention: bool = True
    compiled: bool = False
    overlap: bool = True
    loader_workers: int = 0
    compression: float = 1.0


def make_plan(machine: Machine, options: TransformerOptions) -> tuple[Plan, int]:
    """Return the plan, and the samples of a step.

    Raises:
        UsageError: the devices or the batch cannot be divided like this.
    """
    devices = options.nodes * (machine.devices[0].count if machine.devices else 1)
    inner = options.tensor * options.stages * options.context
    if devices % inner:
        raise UsageError(
            f"{inner} ranks of tensor x stages x context do not divide {devices} devices",
            where=f"paceline plan --nodes {options.nodes}",
            fix="Give numbers that divide the devices of the nodes",
        )
    replicas = devices // inner
    batch = options.batch or replicas * options.microbatch
    if batch % (replicas * options.microbatch):
        raise UsageError(
            f"a batch of {batch} is not a multiple of {replicas} replicas x {options.microbatch}",
            where=f"paceline plan --batch {batch} --microbatch {options.microbatch}",
            fix=f"Give a multiple of {replicas * options.microbatch}",
        )
    shared = options.sequence_parallel
    plan = Plan(
        mesh=Mesh(
            data=replicas, tensor=options.tensor, pipeline=options.stages, context=options.context
        ),
        nodes=options.nodes,
        precision=options.precision,
        microbatches=batch // replicas // options.microbatch,
        schedule=options.schedule,
        stages_per_rank=options.interleave,
        engine="fsdp2" if options.zero == 3 else "ddp",  # what `prepare` makes of it
        zero=options.zero,
        recompute=options.recompute,
        sequence_parallel=options.tensor > 1 if shared is None else shared,
        fused_attention=options.fused_attention,
        compiled=options.compiled,
        overlap_data=options.overlap,
        overlap_pipeline=options.overlap,
        reduce_precision="float32",
        loader_workers=options.loader_workers,
        compression=options.compression,
    )
    return plan, batch


def make_architecture(text: str, *, sequence: int | None = None) -> Architecture:
    """Return the architecture that `text` names: a file, or numbers.

    Args:
        text: path of a JSON file, or ``layers=24,hidden=2048,heads=16,vocab=50257,sequence=2048``.
        sequence: tokens of a sample, instead of the model's longest.

    Raises:
        NotFound, StorageError, CorruptData: the file is missing or cannot be read.
        ConfigError: a number is missing, unknown or impossible.
        UsageError: the file is of a family that is not known.
    """
    if "=" not in text or Path(text).exists():
        return read_architecture(Path(text), sequence=sequence)
    known = {field.name: field for field in fields(Architecture)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ConfigError(f"unknown key '{name}'", where="--model", fix=nearest(name, known))
        values[name] = convert(_parsed(value), _kind(name), f"--model {name}")
    if sequence is not None:
        values["sequence"] = sequence
    missing = [name for name in known if known[name].default is MISSING and name not in values]
    if missing:
        raise ConfigError(
            f"key '{missing[0]}' is missing", where="--model", fix=f"Give {', '.join(missing)}"
        )
    return Architecture(**values)


def _kind(name: str) -> type:
    default = Architecture.__dataclass_fields__[name].default
    return int if default is MISSING else type(default)


def _parsed(text: str) -> object:
    words: dict[str, object] = {"true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    return int(text) if text.lstrip("-").isdigit() else text
