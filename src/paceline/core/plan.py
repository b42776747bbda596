"""The Plan: how a Workload is distributed over a Machine. `plan` writes it, `run` follows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.allocator import AllocatorChoice
from paceline.core.errors import ConfigError
from paceline.core.record import Record

PLAN_VARIABLE = "_PACELINE_PLAN"  # not PACELINE_: that would be a setting of the user's
CollectivesChoice = Literal["torch", "paceline"]
StrategyChoice = Literal["data", "model", "hybrid", "auto"]
EngineChoice = Literal["ddp", "fsdp2", "allreduce", "sharded"]
PipelineChoice = Literal["1f1b", "fill_drain", "zero_bubble"]
PrecisionChoice = Literal["float32", "bfloat16", "float16", "float8"]
RecomputeChoice = Literal["none", "selective", "operators", "full"]
MICROBATCHES_PER_STAGE = 4  # at which a pipeline is idle for a fifth of the time
OWN_ENGINES: tuple[EngineChoice, ...] = ("allreduce", "sharded")  # modes of Paceline's


def is_chosen(backend: str, collectives: CollectivesChoice) -> bool:
    """Return whether figures of a backend hold under a choice; ``torch`` is any but Paceline's.

    >>> is_chosen("gloo", "torch"), is_chosen("paceline", "torch")
    (True, False)
    """
    return (backend == "paceline") == (collectives == "paceline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh(Record):
    """How many ranks along each axis; their product is the world size."""

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        for axis in ("data", "pipeline", "tensor", "context"):
            if getattr(self, axis) < 1:
                raise ConfigError(
                    f"mesh axis '{axis}' must be at least 1", where="Plan", fix="Use 1 for none"
                )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.data * self.pipeline * self.tensor * self.context


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan(Record):
    """How to train.

    Changes results: `mesh` (with the batch of the Workload), `precision`, `microbatches` where a
    layer uses statistics of its batch.
    Changes speed: the rest.

    Attributes:
        mesh: ranks per axis.
        precision: dtype of the compute.
        threads: compute threads of each rank.
        nodes: number of nodes, each with an equal number of ranks.
        bucket_bytes: gradients that are reduced in one collective; torch's default.
        first_bucket_bytes: of the bucket that is ready first; torch's default.
        loader_workers: processes per rank that prepare batches; 0 prepares them in the loop.
        allocator: what becomes of memory that a rank frees: ``keep`` leaves it with the rank,
            ``system`` with the C library, which gives much of it back; the next step pays for that.
        collectives: ``torch`` leaves the backend to the script (gloo on CPUs), ``paceline`` takes
            Paceline's in its place.
        engine: what reduces gradients in a script that calls `paceline.training.prepare`: torch's
            DistributedDataParallel or fully_shard, or a mode of Paceline's engine.
        microbatches: of a replica's batch: on their way through a pipeline at the same time, or
            passes before an update; 0: 4 for each stage of a pipeline, else 1.
        schedule: order in which the stages of a pipeline compute them.
        layers: number of layers of each stage; empty: stages of equal cost. 0 for the last one: of
            a transformer it has the output layer alone.
        stages_per_rank: of a pipeline; more than 1: the interleaved order of Megatron.
        zero: what data-parallel ranks share out, as ZeRO's stages: 0 nothing, 1 the optimizer's
            state, 2 and the gradients, 3 and the parameters.
        recompute: activations that the backward pass computes again: ``selective`` the scores of
            attention, ``operators`` every second matrix product and all that is none, ``full`` all
            but the inputs of layers. Of a captured model ``none`` or ``full``.
        sequence_parallel: tensor-parallel ranks share out the sequence where they do not the
            tensors.
        fused_attention: attention in one kernel, which keeps no scores.
        balanced_context: context-parallel ranks have equal shares of causal attention, not equal
            runs of tokens.
        compiled: elementwise operators are fused with their neighbours.
        padded_vocabulary: the output layer has rows beyond the vocabulary, so that it fits tiles.
        overlap_tensor: tensor-parallel collectives run beside the products that need them.
        overlap_data: the reduction of gradients, and with ZeRO-3 the gathers of parameters, run
            beside the passes.
        overlap_pipeline: messages between stages move while both stages compute; else each waits
            for what it sends and receives.
        reduce_precision: dtype in which gradients are kept and reduced.
        compression: bytes of gradients over those that replicas exchange of them; 1: all are.
    """

    mesh: Mesh = Mesh()
    precision: PrecisionChoice = "float32"
    threads: int = 1
    nodes: int = 1
    bucket_bytes: int = 25 * 1024 * 1024
    first_bucket_bytes: int = 1024 * 1024
    loader_workers: int = 0
    allocator: AllocatorChoice = "keep"
    collectives: CollectivesChoice = "torch"
    engine: EngineChoice = "ddp"
    microbatches: int = 0
    schedule: PipelineChoice = "1f1b"
    layers: tuple[int, ...] = ()
    stages_per_rank: int = 1
    zero: Literal[0, 1, 2, 3] = 0
    recompute: RecomputeChoice = "none"
    sequence_parallel: bool = False
    fused_attention: bool = True
    balanced_context: bool = True
    compiled: bool = False
    padded_vocabulary: bool = True
    overlap_tensor: bool = False
    overlap_data: bool = True
    overlap_pipeline: bool = True
    reduce_precision: Literal["float32", "bfloat16"] = "float32"
    compression: float = 1.0

    def __post_init__(self) -> None:
        self._check_stages()
        for name in ("threads", "nodes", "bucket_bytes", "first_bucket_bytes", "stages_per_rank"):
            if getattr(self, name) < 1:
                raise ConfigError(f"'{name}' must be at least 1", where="Plan", fix="Use 1 or more")
        if self.compression < 1:
            raise ConfigError(
                f"'compression' is {self.compression:g}",
                where="Plan",
                fix="Use 1 for none, or more",
            )
        if self.loader_workers < 0:
            raise ConfigError(
                "'loader_workers' must not be negative", where="Plan", fix="Use 0 for none"
            )

    def _check_stages(self) -> None:
        if self.microbatches < 0:
            raise ConfigError(
                f"'microbatches' is {self.microbatches}",
                where="Plan",
                fix=f"Use 0 for {MICROBATCHES_PER_STAGE} per stage",
            )
        least = min([*self.layers[:-1], *(count + 1 for count in self.layers[-1:])], default=1)
        if self.layers and (len(self.layers) != self.mesh.pipeline or least < 1):
            raise ConfigError(
                f"'layers' is {list(self.layers)} for {self.mesh.pipeline} stages",
                where="Plan",
                fix="Give 1 or more layers for each stage, or leave 'layers' empty",
            )

    @property
    def microbatch_count(self) -> int:
        """Microbatches of a replica's batch; 1 without a pipeline."""
        stages = self.mesh.pipeline
        return self.microbatches or (MICROBATCHES_PER_STAGE * stages if stages > 1 else 1)

    def microbatch_samples(self, batch: int) -> float:
        """Return the samples of a microbatch, of a step of `batch` samples over all replicas."""
        return batch / self.mesh.data / self.microbatch_count

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node, rounded up."""
        return -(-self.mesh.world_size // self.nodes)
