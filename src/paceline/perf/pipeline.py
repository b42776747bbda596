"""Predicts a step of a model in stages: the schedule is replayed with the machine's figures.

    Machine rates                 -> seconds of each stage's passes       (compute)
    Machine links, nodes          -> seconds of the messages between them (replay)
    collectives over R replicas   -> seconds of reducing a stage's gradients

`schedules.pipeline.step` puts these together, as it does for the runtime's ``auto``.

The ranks follow the same PipelineSchedule as `paceline.training` runs.

Under ``fsdp2`` the replicas of a stage gather its parameters and reduce-scatter its gradients. That
sends as much as an all-reduce, and all of it is counted where gradients are reduced.

Limits: where a schedule splits backward passes, both parts take half of them; transfers take no
cores from compute; all microbatches have the size of the largest one; the update of a shared
parameter is counted in the first of its stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from paceline.core.breakdown import Breakdown
from paceline.core.errors import UsageError
from paceline.core.estimate import StageEstimate
from paceline.core.machine import Quantity
from paceline.core.workload import Layer, Workload
from paceline.perf.caveats import oversubscription_factor, ranks_per_device, unpriced_operators
from paceline.perf.communication import all_reduce_s, make_buckets
from paceline.perf.compute import (
    COMPUTE_PHASES,
    RESIDUALS,
    StepCompute,
    StepPrediction,
    compute_sources,
    cost_model,
    input_wait_s,
    layer_costs,
    shares_of,
    step_compute,
)
from paceline.perf.memory import DTYPE_BYTES, memory_bytes
from paceline.schedules.pipeline import (
    ORDERS,
    LayerCosts,
    PipelineEnds,
    PipelineReplay,
    PipelineSchedule,
    StageCosts,
    StageEdge,
    fastest_partition,
    live_microbatches,
    pipeline_ends,
    replay,
    stage_edges,
)
from paceline.schedules.topology import Topology

if TYPE_CHECKING:
    from paceline.core.machine import CollectiveCost, Link, Machine
    from paceline.core.plan import Plan
    from paceline.schedules.pipeline import StagePartition

# The runtime reduces gradients in buckets of these sizes, whatever the plan's are.
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20
_UNITS_IN_FLIGHT = 2  # of a bucket's size, of a stage that its replicas shard


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """A stage on its rank.

    Attributes:
        workload: one microbatch of it, and its update.
        compute: of one microbatch, and of the update.
        reduce_s: seconds of reducing its gradients.
        memory_bytes: that a rank needs for it, by kind.
    """

    workload: Workload
    compute: StepCompute
    reduce_s: float
    memory_bytes: dict[str, int]

    def seconds(self, phase: str) -> float:
        return self.compute.phases[phase].total_s

    def slowed(self, factor: float) -> _Stage:
        """Return the stage with passes and an update that take `factor` times as long."""
        phases = {phase: cost.times(factor) for phase, cost in self.compute.phases.items()}
        return replace(self, compute=replace(self.compute, phases=phases))


@dataclass(frozen=True, kw_only=True, slots=True)
class _PipelineStep:
    """A step of the pipeline, replayed.

    Attributes:
        schedule: that the ranks follow.
        edges: what the stages exchange.
        stages: on their ranks.
        replayed: the passes and messages of a step.
        ends: when the ranks end, with their gradients reduced and their parameters updated.
    """

    schedule: PipelineSchedule
    edges: Sequence[StageEdge]
    stages: Sequence[_Stage]
    replayed: PipelineReplay
    ends: PipelineEnds

    @property
    def slowest(self) -> _Stage:
        """Of the stages, that of the rank which ends last."""
        return self.stages[self.ends.slowest]


def slowed_step_s(
    machine: Machine, workload: Workload, plan: Plan, slowdowns: Sequence[float]
) -> float:
    """Return the seconds of a step whose stages take longer than predicted.

    Args:
        machine: on which ranks train.
        workload: one microbatch of a replica's batch; its layers with their edges.
        plan: with the number of layers of each stage.
        slowdowns: the time of each stage's passes and update, over the predicted one.
    """
    return _breakdown(machine, workload, plan, _step(machine, workload, plan, slowdowns)).total_s


def predict_pipeline(machine: Machine, workload: Workload, plan: Plan) -> StepPrediction:
    """Return the predicted step of a model in stages.

    Args:
        machine: on which ranks train.
        workload: one microbatch of a replica's batch; its layers with their edges.
        plan: mesh, microbatches, schedule and layers of the stages.

    Raises:
        UsageError: the workload has no edges, or not as many layers as the plan; the machine has no
            rates, no link between stages, or no cost of reducing gradients.
    """
    plan = divide(machine, workload, plan)
    step = _step(machine, workload, plan)
    stages, slowest = step.stages, step.slowest
    breakdown = _breakdown(machine, workload, plan, step)
    count = plan.microbatch_count
    phases = slowest.compute.phases
    costs = [phases[phase].times(count) for phase in ("forward", "backward")]
    shares = shares_of([*costs, phases["optimizer"]], breakdown)
    shares["pipeline bubble"] = breakdown.waiting / max(breakdown.total_s, 1e-12)
    model = cost_model(machine, slowest.workload, plan)
    return StepPrediction(
        breakdown=breakdown,
        shares=shares,
        sources=_sources(machine, workload, plan, stages),
        memory_bytes=max((s.memory_bytes for s in stages), key=lambda kinds: sum(kinds.values())),
        needed_bytes=_needed_bytes(machine, plan, stages),
        link_bytes=_link_bytes(plan, step),
        unpriced=unpriced_operators(model, slowest.workload, breakdown.total_s / count),
        stages=tuple(
            _described(stage, live, count)
            for stage, live, count in zip(
                stages, live_microbatches(step.schedule), plan.layers, strict=True
            )
        ),
        bubble_share=step.replayed.bubble_share,
    )


# --- stages --------------------------------------------------------------------------------------


def divide(machine: Machine, workload: Workload, plan: Plan) -> Plan:
    """Return the plan with the number of layers of each stage; as it is if it has them.

    Of the cuts that make the slowest stage fastest if its transfers are hidden, and if they are
    not, those are taken whose step is shorter. Where no cuts keep the device's memory bound, the
    bound is left out.

    Raises:
        UsageError: the workload has no edges, fewer layers than stages, or not those of the plan.
    """
    _check(workload, plan)
    if plan.layers:
        return plan
    costs = _layer_costs(machine, workload, plan)
    stages, link = plan.mesh.pipeline, _slowest_link(_topology(machine, plan))
    schedule = ORDERS[plan.schedule](stages, plan.microbatch_count)
    live = live_microbatches(schedule)
    device = machine.devices[0]
    bound = int(device.memory_bytes.value) // ranks_per_device(device, plan)

    def divided(found: StagePartition) -> Plan:
        ends = [0, *found.cuts, costs.layers]
        return replace(plan, layers=tuple(end - begin for begin, end in pairwise(ends)))

    found = fastest_partition(
        costs,
        [bound] * stages,
        live,
        link,
        step_s=lambda found: _step(machine, workload, divided(found)).ends.step_s,
        is_bound=False,
    )
    return divided(found)


def _check(workload: Workload, plan: Plan) -> None:
    count = len(workload.layers)
    if not workload.edges:
        raise UsageError(
            "it is not known what the layers of the model exchange",
            where=f"workload {workload.name}",
            why="a plan with a pipeline needs the model's graph",
            fix="Write the plan with `paceline plan --strategy hybrid --partitions N`",
        )
    if plan.mesh.pipeline > count or (plan.layers and sum(plan.layers) != count):
        layers = f", which have {sum(plan.layers)} layers" if plan.layers else ""
        raise UsageError(
            f"{count} layers cannot be divided into the plan's {plan.mesh.pipeline} stages{layers}",
            where=f"workload {workload.name}",
            fix="Plan with fewer partitions, or leave the plan's 'layers' empty",
        )


def _cuts(plan: Plan) -> list[int]:
    """Return the first layer of each stage but the first."""
    return list(accumulate(plan.layers))[:-1]


def _layer_costs(machine: Machine, workload: Workload, plan: Plan) -> LayerCosts:
    model = cost_model(machine, workload, plan)
    scale = DTYPE_BYTES[plan.precision] / DTYPE_BYTES["float32"]
    seconds = [layer_costs(model, layer) for layer in workload.layers]
    trained = max(1, workload.trained_bytes)
    memory = _memory_bytes(workload, plan)
    of_trained = memory["gradients"] + memory["buckets"] + memory["optimizer"]
    whole = max(1, workload.parameter_bytes)
    kept = [
        sum(layer.parameter_bytes) * memory["parameters"] // whole
        + layer.buffer_bytes
        + sum(layer.trained_bytes) * of_trained // trained
        for layer in workload.layers
    ]

    def of(phase: str) -> tuple[float, ...]:
        return tuple(costs[phase].total_s if phase in costs else 0.0 for costs in seconds)

    return LayerCosts(
        forward_s=of("forward"),
        backward_s=of("backward"),
        parameter_bytes=tuple(kept),
        activation_bytes=tuple(int(layer.saved_bytes * scale) for layer in workload.layers),
        edges=workload.edges,
    )


def stage_workloads(workload: Workload, cuts: Sequence[int]) -> tuple[Workload, ...]:
    """Return one microbatch's work of each stage; a shared parameter is held by all of its stages.

    The optimizer's state is divided in proportion to the trained parameters.

    Args:
        workload: of the whole model, with edges.
        cuts: first layer of each stage but the first.
    """
    stages = []
    for begin, end in pairwise([0, *cuts, len(workload.layers)]):
        copies = tuple(
            size
            for users, size in workload.shared
            if users[0] < begin and any(begin <= user < end for user in users)
        )
        layers = workload.layers[begin:end]
        if copies:
            layers += (Layer(name="", kind="shared", parameter_bytes=copies),)
        stage = replace(workload, layers=layers, edges=(), shared=())
        share = stage.trained_bytes / max(1, workload.trained_bytes)
        stages.append(replace(stage, optimizer_bytes=round(workload.optimizer_bytes * share)))
    return tuple(stages)


def _stages(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    schedule: PipelineSchedule,
    edges: Sequence[StageEdge],
) -> list[_Stage]:
    received = [0] * schedule.stages
    for edge in edges:
        received[edge.destination] += edge.bytes
    works = stage_workloads(workload, _cuts(plan))
    # DistributedDataParallel never wraps stages: what that costs is not theirs.
    unwrapped = replace(plan, engine="allreduce")
    scale = DTYPE_BYTES[plan.precision] / DTYPE_BYTES["float32"]
    stages = []
    for stage, live, size in zip(works, live_microbatches(schedule), received, strict=True):
        model = cost_model(machine, stage, plan)
        compute = step_compute(model, machine.devices[0], stage, unwrapped)
        if _is_sharded(plan):
            update = compute.phases["optimizer"]
            parts = plan.mesh.data  # the framework's overhead is not divided
            update = replace(
                update, compute_s=update.compute_s / parts, memory_s=update.memory_s / parts
            )
            compute = replace(compute, phases={**compute.phases, "optimizer": update})
        memory = _memory_bytes(stage, plan)
        memory["activations"] = live * (memory["activations"] + int(size * scale))
        memory["input"] *= plan.microbatch_count
        stages.append(
            _Stage(
                workload=stage,
                compute=compute,
                reduce_s=_reduce_s(machine, plan, compute),
                memory_bytes=memory,
            )
        )
    return stages


def _is_sharded(plan: Plan) -> bool:
    """Return whether each stage's parameters and state are divided among its replicas."""
    return plan.engine == "fsdp2" and plan.mesh.data > 1


def _memory_bytes(stage: Workload, plan: Plan) -> dict[str, int]:
    """Return the bytes that a rank needs for a stage and one microbatch, by kind.

    Of a stage that its replicas shard: their parts, and in a batch parameters and gradients whole.
    """
    # The peak of a whole step is none of a stage: saved activations count for each microbatch.
    memory = memory_bytes(replace(stage, peak_bytes=0), plan)
    if _is_sharded(plan):
        for kind in ("parameters", "gradients"):
            memory[kind] += memory[kind] // plan.mesh.data
        memory["optimizer"] //= plan.mesh.data
        memory["buckets"] = min(memory["buckets"], _UNITS_IN_FLIGHT * _BUCKET_BYTES)
    return memory


def _described(stage: _Stage, live: int, layers: int) -> StageEstimate:
    names = [layer.name for layer in stage.workload.layers[:layers]]
    return StageEstimate(
        layers=layers,
        first=names[0],
        last=names[-1],
        parameter_bytes=stage.workload.parameter_bytes,
        trained_bytes=stage.workload.trained_bytes,
        forward_s=stage.seconds("forward"),
        backward_s=stage.seconds("backward"),
        reduce_s=stage.reduce_s,
        optimizer_s=stage.seconds("optimizer"),
        live_microbatches=live,
        memory_bytes=sum(stage.memory_bytes.values()),
    )


# --- where ranks are -----------------------------------------------------------------------------


def _topology(machine: Machine, plan: Plan) -> Topology:
    """Return where the ranks of a replica's pipeline are.

    Rank = place x replicas + replica, and a node has consecutive ranks. Replicas of a pipeline send
    at the same time: each has its part of a link that a node's ranks share.

    Raises:
        UsageError: the machine has no such link.
    """
    replicas, per_node = plan.mesh.data, plan.ranks_per_node
    hosts: dict[int, list[int]] = {}
    for place in range(plan.mesh.pipeline):
        hosts.setdefault(place * replicas // per_node, []).append(place)
    together = min(replicas, per_node)
    most = max(len(places) for places in hosts.values())
    inside = _link(machine, "loopback", "shared-memory") if most > 1 else None
    across = _link(machine, "network") if len(hosts) > 1 else None
    return Topology(
        hosts=tuple(tuple(places) for places in hosts.values()),
        inside=_part(inside, together),
        across=_part(across, together),
        devices=machine.devices[0].count,
    )


def _slowest_link(topology: Topology) -> Link:
    link = topology.across or topology.inside
    assert link is not None  # there are two stages or more
    return link


def _link(machine: Machine, *levels: str) -> Link:
    for level in levels:
        link = machine.link(level)
        if link is not None:
            return link
    raise UsageError(
        f"the machine has no link {' or '.join(levels)}, over which stages exchange activations",
        where=machine.name,
        why="; ".join(machine.missing),
        fix="Run `paceline probe`, between hosts with --between, and plan with its machine file",
    )


def _part(link: Link | None, together: int) -> Link | None:
    if link is None or link.sharing not in ("node", "all") or together == 1:
        return link
    whole = link.bandwidth_bytes_per_s
    part = Quantity(value=whole.value / together, source=whole.source)
    return replace(link, bandwidth_bytes_per_s=part)


def _replay(
    machine: Machine,
    plan: Plan,
    schedule: PipelineSchedule,
    edges: Sequence[StageEdge],
    stages: Sequence[_Stage],
) -> PipelineReplay:
    scale = DTYPE_BYTES[plan.precision] / DTYPE_BYTES["float32"]
    sent = [edge._replace(bytes=int(edge.bytes * scale)) for edge in edges]
    seconds = StageCosts(
        forward_s=tuple(stage.seconds("forward") for stage in stages),
        backward_s=tuple(stage.seconds("backward") for stage in stages),
    )
    return replay(schedule, sent, seconds, _topology(machine, plan))


# --- collectives ---------------------------------------------------------------------------------


def _all_reduce(machine: Machine, plan: Plan) -> CollectiveCost:
    """Return the cost of reducing over the replicas of a stage.

    Raises:
        UsageError: the machine has none.
    """
    replicas, per_node = plan.mesh.data, plan.ranks_per_node
    spread = max(
        ((place + 1) * replicas - 1) // per_node - place * replicas // per_node + 1
        for place in range(plan.mesh.pipeline)
    )
    cost = machine.collective("all_reduce", replicas, collectives=plan.collectives, hosts=spread)
    if cost is None:
        raise UsageError(
            "the machine has no cost of all_reduce, by which replicas of a stage add gradients",
            where=machine.name,
            why="; ".join(machine.missing),
            fix="Run `paceline probe` on a node with two cores and torch",
        )
    return cost


def _reduce_s(machine: Machine, plan: Plan, compute: StepCompute) -> float:
    if plan.mesh.data == 1:
        return 0.0
    cost = _all_reduce(machine, plan)
    buckets = make_buckets(
        [(size, 0.0) for size, _ in compute.gradients],
        bucket_bytes=_BUCKET_BYTES,
        first_bucket_bytes=_FIRST_BUCKET_BYTES,
    )
    return sum(sum(all_reduce_s(cost, bucket.bytes, plan.mesh.data)) for bucket in buckets)


# --- the step ------------------------------------------------------------------------------------


def _step(
    machine: Machine, workload: Workload, plan: Plan, slowdowns: Sequence[float] = ()
) -> _PipelineStep:
    """Return the replayed step of a plan with the number of layers of each stage.

    `slowdowns`: the time of each stage's passes and update, over the predicted one; empty: 1.
    """
    schedule = ORDERS[plan.schedule](plan.mesh.pipeline, plan.microbatch_count)
    edges = stage_edges(workload.edges, _cuts(plan))
    stages = _stages(machine, workload, plan, schedule, edges)
    if slowdowns:
        stages = [stage.slowed(x) for stage, x in zip(stages, slowdowns, strict=True)]
    replayed = _replay(machine, plan, schedule, edges, stages)
    ends = pipeline_ends(
        replayed,
        [stage.reduce_s for stage in stages],
        [stage.seconds("optimizer") for stage in stages],
    )
    return _PipelineStep(
        schedule=schedule, edges=edges, stages=stages, replayed=replayed, ends=ends
    )


def _breakdown(machine: Machine, workload: Workload, plan: Plan, step: _PipelineStep) -> Breakdown:
    """Return the seconds of the slowest rank by phase."""
    rank, count = step.ends.slowest, plan.microbatch_count
    stage, replayed, ends = step.slowest, step.replayed, step.ends
    model = cost_model(machine, stage.workload, plan)
    phases_s = {phase: stage.seconds(phase) for phase in COMPUTE_PHASES}
    phases_s["forward"] *= count
    phases_s["backward"] *= count
    exposed_s = max(0.0, ends.reduced_s[rank] - ends.makespan_s)
    transfer_s = replayed.exposed_transfer_s[rank] + exposed_s
    busy_s = sum(phases_s.values()) + transfer_s
    waiting_s = max(0.0, ends.end_s[rank] - busy_s)
    residual_s = {
        phase: model.framework_overhead_s("loop", "residual", phase) for phase in RESIDUALS
    }
    residual_s["waiting"] += waiting_s
    batch = replace(workload, batch=workload.batch * count)
    factor = oversubscription_factor(machine.devices[0], plan)
    residual_s["input"] = input_wait_s(batch, plan, busy_s + waiting_s, factor, residual_s["input"])
    return Breakdown(**phases_s, transfer=transfer_s, **residual_s)


def _needed_bytes(machine: Machine, plan: Plan, stages: Sequence[_Stage]) -> int:
    """Return the bytes of all ranks that share a device, where they need most."""
    replicas, per_node = plan.mesh.data, plan.ranks_per_node
    each = [sum(stage.memory_bytes.values()) for stage in stages for _ in range(replicas)]
    together = ranks_per_device(machine.devices[0], plan)
    nodes = [each[begin : begin + per_node] for begin in range(0, len(each), per_node)]
    return max(
        sum(node[begin : begin + together])
        for node in nodes
        for begin in range(0, len(node), together)
    )


def _link_bytes(plan: Plan, step: _PipelineStep) -> dict[str, int]:
    """Return what the slowest rank sends: activations, their gradients, and its own gradients."""
    replicas, rank = plan.mesh.data, step.ends.slowest
    crossing = sum(edge.bytes for edge in step.edges if rank in (edge.source, edge.destination))
    reduced = step.slowest.workload.trained_bytes * 2 * (replicas - 1) // replicas
    level = "node" if plan.nodes == 1 else "network"
    return {level: crossing * plan.microbatch_count + reduced}


def _sources(
    machine: Machine, workload: Workload, plan: Plan, stages: Sequence[_Stage]
) -> dict[str, str]:
    sources = compute_sources(machine, workload, plan)
    link = _slowest_link(_topology(machine, plan))
    sources["transfer"] = f"{link.level}: {link.bandwidth_bytes_per_s.source}"
    if plan.mesh.data > 1:
        cost = _all_reduce(machine, plan)
        sources["transfer"] += f"; {cost.backend}: {cost.points[0].seconds.source}"
    sources["waiting"] = (
        f"{plan.schedule} replayed, {len(stages)} stages, {plan.microbatch_count} microbatches"
    )
    return sources
