"""Memory of a rank, by kind, under a plan: what fills a device before a step is ever run.

    process        the runtime's own, before it has a tensor (`Device.base_bytes`)
    parameters     2 bytes each in 16-bit training; divided by ZeRO-3
    gradients      2 or 4 bytes each (`Plan.reduce_precision`); divided by ZeRO-2 and 3
    optimizer      Adam: 4 + 4 bytes of moments, and 4 of the master copy; divided by ZeRO-1 to 3
    activations    of the layers, all microbatches that the schedule keeps alive
    embedding and output    activations outside of the layers, logits among them
    transients     of the layer that is computed, or computed again
    communication  whole layers that ZeRO-3 gathers, buckets
    compression    what compressed gradients have not sent yet
    allocator      slack of a caching allocator

Sources: Rajbhandari et al., ZeRO, SC 2020 (arXiv 1910.02054), section 3 and table 1; Korthikanti et
al. 2022 for activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.perf.transformer.layer import activation_bytes
from paceline.perf.transformer.pipelining import live_layers
from paceline.perf.transformer.reduction import RESIDUAL_BYTES

if TYPE_CHECKING:
    from paceline.core.machine import Device
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture

ALLOCATOR_SLACK = 0.05  # of activations and transients; a caching allocator rounds and fragments
LOGIT_BYTES = 10  # 2 of the product, 4 widened, 4 of the logarithm of softmax
ADAM_BYTES = {"moments": 8, "master": 4}


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of a rank's parameters, gradients and optimizer."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All three."""
        return self.parameters + self.gradients + self.optimizer


def parameter_bytes(plan: Plan) -> int:
    """Return the bytes of one parameter that the passes compute with."""
    return 4 if plan.precision == "float32" else 2


def state_bytes(parameters: float, plan: Plan) -> StateBytes:
    """Return the state of `parameters` that a tensor- and pipeline-parallel rank holds.

    The optimizer is Adam. In 32-bit training there is no master copy. With ZeRO-2 the ranks of a
    pipeline keep their gradients whole until the last microbatch: only then are they reduced.

    Source: torch.distributed.pipelining, stage.py, and FSDP2's `set_requires_gradient_sync`.
    """
    ranks = plan.mesh.data * plan.mesh.context
    share = [1.0 / ranks if plan.zero >= stage else 1.0 for stage in (1, 2, 3)]
    if plan.zero == 2 and plan.mesh.pipeline > 1:
        share[1] = 1.0
    wide = plan.precision == "float32"
    gradient = 4 if wide or plan.reduce_precision == "float32" else 2
    optimizer = ADAM_BYTES["moments"] + (0 if wide else ADAM_BYTES["master"])
    return StateBytes(
        parameters=parameters * parameter_bytes(plan) * share[2],
        gradients=parameters * gradient * share[1],
        optimizer=parameters * optimizer * share[0],
    )


def stage_layer_counts(model: Architecture, plan: Plan) -> tuple[int, ...]:
    """Return the number of layers of each stage, in the order of the model.

    As the plan says, or as equal as possible, the first stages with one more.
    """
    if plan.layers:
        return plan.layers
    stages = plan.mesh.pipeline * plan.stages_per_rank
    least, more = divmod(model.layers, stages)
    return tuple(least + (stage < more) for stage in range(stages))


def rank_parameters(model: Architecture, plan: Plan) -> tuple[float, ...]:
    """Return the parameters of each pipeline rank, over its tensor-parallel ranks."""
    ranks = plan.mesh.pipeline
    counts = stage_layer_counts(model, plan)
    return tuple(
        parameters_of_rank(model, plan, rank, sum(counts[rank::ranks])) for rank in range(ranks)
    )


def parameters_of_rank(model: Architecture, plan: Plan, rank: int, layers: int) -> float:
    """Return the parameters of a pipeline rank with so many layers, over its tensor-parallel ranks.

    The last stage has an output layer of its own; with tied weights it holds a copy of the
    embedding's.
    """
    ranks = plan.mesh.pipeline
    found = layers * float(model.layer_parameters)
    if rank == 0:
        found += model.embedding_parameters
    if rank == ranks - 1:
        found += model.output_parameters
        if model.tied and ranks > 1:
            found += model.vocab * model.hidden
    return found / plan.mesh.tensor


def rank_memory(
    model: Architecture, plan: Plan, microbatch: float, device: Device
) -> tuple[dict[str, int], ...]:
    """Return the bytes of each pipeline rank, by kind.

    Args:
        model: its architecture.
        plan: how it is spread.
        microbatch: samples of one.
        device: that holds the rank.
    """
    counts = stage_layer_counts(model, plan)
    live = live_layers(plan, counts, plan.microbatch_count)
    activations = activation_bytes(model, plan, microbatch)
    return tuple(
        memory_of_rank(model, plan, microbatch, device, rank, parameters, live[rank], activations)
        for rank, parameters in enumerate(rank_parameters(model, plan))
    )


def memory_of_rank(
    model: Architecture,
    plan: Plan,
    microbatch: float,
    device: Device,
    rank: int,
    parameters: float,
    live: int,
    activations: tuple[float, float],
) -> dict[str, int]:
    """Return the bytes of one pipeline rank, by kind.

    Args:
        model: its architecture.
        plan: how it is spread.
        microbatch: samples of one.
        device: that holds the rank.
        rank: of the pipeline.
        parameters: that it holds, as `rank_parameters` counts them.
        live: layers whose activations it keeps at the same time, as `live_layers` counts them.
        activations: of a layer, as `activation_bytes` counts them.
    """
    saved, working = activations
    state = state_bytes(parameters, plan)
    ends = _end_activations(model, plan, microbatch, rank)
    kinds = {
        "process": device.base_bytes.value if device.base_bytes else 0.0,
        "parameters": state.parameters,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "activations": live * saved,
        "embedding and output": ends,
        "transients": working,
        "communication": _communication_bytes(model, plan),
        "compression": RESIDUAL_BYTES * parameters if plan.compression > 1 else 0,
        "allocator": ALLOCATOR_SLACK * (live * saved + ends + working),
    }
    return {kind: round(size) for kind, size in kinds.items()}


def _end_activations(model: Architecture, plan: Plan, microbatch: float, rank: int) -> float:
    """Return bytes before the first and after the last layer.

    Source: Korthikanti et al. 2022, section 4.3: dropout of the embedding, the last norm, the input
    of the output layer, and logits in 32 bits. While the loss is computed, half-width logits and
    their logarithms of softmax are there beside them.
    """
    mesh = plan.mesh
    tokens = microbatch * model.sequence / mesh.context
    shared = tokens * model.hidden / (mesh.tensor if plan.sequence_parallel else 1)
    size = 0.0
    if rank == 0 and model.dropout:
        size += shared * min(plan.microbatch_count, mesh.pipeline)
    if rank == mesh.pipeline - 1:
        logits = 0 if model.patch_inputs else tokens * model.vocab / mesh.tensor
        size += 4 * shared + LOGIT_BYTES * logits
    return size


def _communication_bytes(model: Architecture, plan: Plan) -> float:
    """Return bytes of buffers: two whole layers with ZeRO-3 and one's gradients, else a bucket."""
    if plan.mesh.data * plan.mesh.context == 1:
        return 0.0
    if plan.zero == 3:
        return model.layer_parameters / plan.mesh.tensor * (2 * 2 + 2)
    return float(plan.bucket_bytes)
