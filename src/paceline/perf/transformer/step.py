"""Predicts a training step of a transformer on a large machine: the Estimate of a Plan.

Architecture + Machine + Plan + batch -> Estimate. Ranks fall into classes that do the same: the
ranks of a pipeline stage. So the cost of a prediction depends on layers and stages, not on ranks.

    layer        products, attention and traffic (`layer`, `pricing`); tensor-parallel collectives
                 between them are exposed unless the plan overlaps them
    stage        its layers, the embedding or output layer, the message to the next stage; with
                 ZeRO-3 gathers and reductions overlap with the layers' passes (`lanes`)
    pipeline     the schedule's replay (`pipelining`)
    replicas     gradients are reduced beside the last backward pass of a stage
    optimizer    moves its state once

No torch, no measurement of the model: `fitting` corrects the machine's efficiency by measured
steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.breakdown import Breakdown
from paceline.perf.transformer.checks import check
from paceline.perf.transformer.efficiency import efficiency_of
from paceline.perf.transformer.lanes import LaneTask, pass_s
from paceline.perf.transformer.layer import ACTIVATION_BYTES, TILE, Product, layer_work
from paceline.perf.transformer.memory import rank_parameters, stage_layer_counts
from paceline.perf.transformer.network import Network, RankGroup, strides
from paceline.perf.transformer.pipelining import StagePasses, batch_s
from paceline.perf.transformer.pricing import DeviceRates, layer_seconds
from paceline.perf.transformer.reduction import (
    compression_s,
    exposed_reduction_s,
    reduction_s,
)

if TYPE_CHECKING:
    from paceline.core.machine import Efficiency, Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture

# Bytes that the loss moves per logit, by operator: the product writes 2; widening 6; log of softmax
# 12, its gradient 12; the loss's own gradient 4; narrowing 6.
LOGIT_BYTES = 42
# Bytes per parameter that Adam moves: gradient, two moments and master read, all but the first
# written, the 16-bit copy; and the norm of the gradients.
OPTIMIZER_BYTES = 34
# Of tensor-parallel collectives, what products hide that are cut into pieces beside them: a product
# in pieces is slower, and so is a collective by single messages. Source: torchtitan, benchmarks of
# 2024-12, table 4: 829 tokens a second become 876, 5.4 % of a step of which a quarter is exchanges.
TENSOR_HIDDEN = 0.25
# Bytes per parameter that adding a microbatch's gradient to a 32-bit sum moves.
ACCUMULATE_BYTES = 8


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a predicted step.

    Attributes:
        breakdown: by phase.
        exposed: communication that compute does not hide, by kind.
        stretch: time of the pipeline over that of its busiest rank without waiting, at least 1.
    """

    breakdown: Breakdown
    exposed: dict[str, float]
    stretch: float

    @property
    def bubble_share(self) -> float:
        """Idle time of the busiest rank over the time of the pipeline, 0 to 1."""
        return max(0.0, 1 - 1 / self.stretch)


@dataclass(frozen=True, kw_only=True, slots=True)
class AfterPasses:
    """Seconds of a rank after its last backward pass.

    Attributes:
        gradients_s: of reducing gradients, and of gathering parameters with ZeRO 1 and 2, exposed.
        compression_s: of compressing gradients.
        optimizer_s: of the update.
    """

    gradients_s: float
    compression_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """All three."""
        return self.gradients_s + self.compression_s + self.optimizer_s


@dataclass(frozen=True, slots=True)
class MicrobatchCosts:
    """What the parts of a step cost a rank for one microbatch, in seconds.

    Attributes:
        layer_forward_s, layer_backward_s: of a layer's compute.
        tensor_forward_s, tensor_backward_s: of its exchanges that compute does not hide.
        output_forward_s, output_backward_s: of the output layer and the loss.
    """

    layer_forward_s: float
    layer_backward_s: float
    tensor_forward_s: float
    tensor_backward_s: float
    output_forward_s: float
    output_backward_s: float


def step_times(
    machine: Machine,
    model: Architecture,
    plan: Plan,
    batch: int,
    efficiency: Efficiency | None = None,
    stretch: float | None = None,
) -> StepSeconds:
    """Return the predicted seconds of a step.

    Args:
        machine: with peaks, memory bandwidth and links.
        model: to train.
        plan: how it is spread.
        batch: samples of a step over all replicas.
        efficiency: instead of the machine's own; `fitting` varies it.
        stretch: `StepSeconds.stretch` of a similar prediction, which saves the schedule's replay.

    Raises:
        UsageError: the plan does not fit the model or the machine, which may lack a figure.
    Cost: 1 to 10 ms.
    """
    microbatch = check(machine, model, plan, batch)
    reached = efficiency or efficiency_of(machine.devices[0])
    rates = DeviceRates.of(machine, plan.precision, reached)
    network = Network.of(machine, reached, plan.nodes)
    costs = microbatch_costs(model, plan, microbatch, rates, network)
    sent_s = messages_s(model, plan, microbatch, network, rates.layer_s)
    return _combined(model, plan, costs, sent_s, rates, network, stretch)


def microbatch_costs(
    model: Architecture, plan: Plan, microbatch: float, rates: DeviceRates, network: Network
) -> MicrobatchCosts:
    """Return what the parts of a step cost a rank for a microbatch of so many samples.

    They depend on the tensor and context axes of the mesh, not on stages and replicas.
    """
    work = layer_work(model, plan, microbatch)
    forward_s, backward_s = layer_seconds(work, rates)
    stride = strides(plan.mesh)
    tensor = network.group(plan.mesh.tensor, 1)
    exchange_s = 2 * network.all_reduce_s(tensor, work.exchange_bytes)
    ring = network.group(plan.mesh.context, stride["context"])
    ring_s = 0.0
    if ring.ranks > 1:  # keys and values go round while attention computes
        ring_s = (ring.ranks - 1) * network.ring_step_s(ring, work.ring_bytes / (ring.ranks - 1))
        ring_s = max(0.0, ring_s - work.attention / rates.attention_per_s)
    hidden_s = min(TENSOR_HIDDEN * exchange_s, forward_s / 2) if plan.overlap_tensor else 0.0
    forward_exchange_s = exchange_s - hidden_s + ring_s
    repeats = 2 if work.recompute_all else 1
    exchanges_s = (
        forward_exchange_s,
        forward_exchange_s * repeats + (ring_s if repeats == 1 else 0.0),
    )
    forward_all_s, backward_all_s = layer_seconds(work, rates, exchanges_s)
    output = _output_products(model, plan, microbatch)
    output_s = rates.products_s(output)
    logits = 0.0 if model.patch_inputs else output[0].rows * output[0].columns
    loss_s = LOGIT_BYTES * logits / rates.bytes_per_s
    weights = (model.layer_parameters / plan.mesh.tensor) * ACCUMULATE_BYTES / rates.bytes_per_s
    return MicrobatchCosts(
        layer_forward_s=forward_s,
        layer_backward_s=backward_s + weights,
        tensor_forward_s=forward_all_s - forward_s,
        tensor_backward_s=backward_all_s - backward_s,
        output_forward_s=output_s + loss_s / 3,
        output_backward_s=2 * output_s + 2 * loss_s / 3,
    )


def messages_s(
    model: Architecture, plan: Plan, microbatch: float, network: Network, host_s: float
) -> tuple[float, ...]:
    """Return the seconds of the message after each rank of the pipeline but the last.

    Before a message for which both ranks wait, their hosts wait for their devices and exchange its
    shape, about as much work as the start of a layer's kernels, `host_s`.

    Source: nanotron, src/nanotron/parallel/pipeline_parallel/p2p.py: two messages of metadata,
    which the receiver reads on the host.
    """
    stride = strides(plan.mesh)["pipeline"]
    size_bytes = layer_work(model, plan, microbatch).exchange_bytes / plan.mesh.tensor
    more_s = 0.0 if plan.overlap_pipeline else host_s
    ranks = range(plan.mesh.pipeline - 1)
    return tuple(network.boundary_s(rank, stride, size_bytes) + more_s for rank in ranks)


def _output_products(model: Architecture, plan: Plan, microbatch: float) -> tuple[Product, ...]:
    tokens = microbatch * model.sequence / plan.mesh.context
    rows = microbatch if model.patch_inputs else tokens
    multiple = TILE if plan.padded_vocabulary else 1
    share = -(-model.vocab // (multiple * plan.mesh.tensor)) * multiple
    return (Product(rows, model.hidden, share),)


def _combined(
    model: Architecture,
    plan: Plan,
    costs: MicrobatchCosts,
    sent_s: tuple[float, ...],
    rates: DeviceRates,
    network: Network,
    stretch: float | None,
) -> StepSeconds:
    mesh, counts, count = plan.mesh, stage_layer_counts(model, plan), plan.microbatch_count
    replicas = network.group(mesh.data * mesh.context, mesh.tensor)
    forward_s, backward_s = stage_passes(model, plan, costs, network, replicas)
    times = StagePasses(forward_s, backward_s, sent_s)
    busy = [
        count * (sum(forward_s[rank :: mesh.pipeline]) + sum(backward_s[rank :: mesh.pipeline]))
        for rank in range(mesh.pipeline)
    ]
    busiest = max(range(mesh.pipeline), key=lambda rank: busy[rank])
    busy_s = busy[busiest]
    pipeline_s = busy_s * stretch if stretch else batch_s(plan, times, count)
    parameters = max(rank_parameters(model, plan))
    after = after_passes(
        plan, parameters, sum(backward_s[:: mesh.pipeline]), rates, network, replicas
    )
    exposed = {"gradients": after.gradients_s, "compression": after.compression_s}
    layers = count * sum(counts[busiest :: mesh.pipeline])
    outputs = count * (busiest == mesh.pipeline - 1)
    compute_forward_s = layers * costs.layer_forward_s + outputs * costs.output_forward_s
    compute_backward_s = layers * costs.layer_backward_s + outputs * costs.output_backward_s
    exposed["tensor"] = layers * (costs.tensor_forward_s + costs.tensor_backward_s)
    exposed["parameters"] = busy_s - compute_forward_s - compute_backward_s - exposed["tensor"]
    waiting_s = max(0.0, pipeline_s - busy_s)
    mean_s = sum(sent_s) / mesh.pipeline
    messages = (2 if plan.overlap_pipeline else 4) * count * plan.stages_per_rank
    exposed["pipeline"] = min(waiting_s, messages * mean_s)
    breakdown = Breakdown(
        forward=compute_forward_s,
        backward=compute_backward_s,
        optimizer=after.optimizer_s,
        transfer=sum(exposed.values()),
        waiting=waiting_s - exposed["pipeline"],
    )
    return StepSeconds(breakdown, exposed, pipeline_s / busy_s)


def after_passes(
    plan: Plan,
    parameters: float,
    backward_s: float,
    rates: DeviceRates,
    network: Network,
    replicas: RankGroup,
) -> AfterPasses:
    """Return the seconds of what follows the passes of a rank with so many parameters.

    `backward_s` is that of the rank's last backward passes, which hide a part of the reduction.
    """
    reduce_s = reduction_s(plan, parameters, network, replicas)
    gradients_s = exposed_reduction_s(plan, reduce_s, backward_s)
    if plan.zero in (1, 2):
        gradients_s += network.all_gather_s(replicas, ACTIVATION_BYTES * parameters)
    share = replicas.ranks if plan.zero else 1
    return AfterPasses(
        gradients_s=gradients_s,
        compression_s=compression_s(plan, parameters, rates, replicas),
        optimizer_s=parameters / share * OPTIMIZER_BYTES / rates.bytes_per_s,
    )


def stage_passes(
    model: Architecture,
    plan: Plan,
    costs: MicrobatchCosts,
    network: Network,
    replicas: RankGroup,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the seconds of each stage's forward and backward pass of one microbatch."""
    counts = stage_layer_counts(model, plan)
    last = len(counts) - 1
    gather_s, reduce_s = sharded_layer_s(model, plan, network, replicas)
    forward, backward = [], []
    for stage, layers in enumerate(counts):
        ends = stage == last
        layer_s = costs.layer_forward_s + costs.tensor_forward_s
        tasks = [_layer_task(plan, gather_s, layer_s)] * layers
        if ends:
            tasks.append(LaneTask(0.0, costs.output_forward_s))
        forward.append(pass_s(tasks))
        layer_s = costs.layer_backward_s + costs.tensor_backward_s
        tasks = [LaneTask(0.0, costs.output_backward_s)] if ends else []
        tasks += [_layer_task(plan, gather_s, layer_s, reduce_s)] * layers
        backward.append(pass_s(tasks))
    return tuple(forward), tuple(backward)


def sharded_layer_s(
    model: Architecture, plan: Plan, network: Network, replicas: RankGroup
) -> tuple[float, float]:
    """Return the seconds of gathering a layer's parameters with ZeRO-3, and of reducing gradients.

    Both are 0 without ZeRO-3.
    """
    if plan.zero < 3 or replicas.ranks == 1:
        return 0.0, 0.0
    layer = model.layer_parameters / plan.mesh.tensor
    wide = 4 if plan.reduce_precision == "float32" else 2
    gather_s = network.all_gather_s(replicas, ACTIVATION_BYTES * layer)
    return gather_s, network.all_gather_s(replicas, wide * layer)


def _layer_task(plan: Plan, gather_s: float, layer_s: float, reduce_s: float = 0.0) -> LaneTask:
    """Return a layer's pass; its collectives are part of the compute lane if nothing overlaps."""
    if plan.overlap_data:
        return LaneTask(gather_s, layer_s, reduce_s)
    return LaneTask(0.0, gather_s + layer_s + reduce_s)
