"""What a rank of a plan does in a step, as a list of operations: its pipeline rank decides.

    COMPUTE   a pass of a stage's microbatch, or the optimizer
    SEND      an activation or gradient to another pipeline rank; the sender goes on
    RECEIVE   waits for one
    LAYERS    meets the ranks that share its layers (tensor and context axes), which exchange
    REPLICAS  meets the replicas of its stage: gradients are reduced, or parameters gathered
    LOAD      makes the step's batch itself, on the first pipeline rank
    FETCH     takes the batch that loader processes make beside the step, and waits for it

The order of passes is that of the `PipelineSchedule` that the runtime executes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from paceline.perf.transformer.checks import check
from paceline.perf.transformer.efficiency import efficiency_of
from paceline.perf.transformer.memory import stage_layer_counts
from paceline.perf.transformer.network import Network
from paceline.perf.transformer.pipelining import StagePasses, make_schedule
from paceline.perf.transformer.pricing import DeviceRates
from paceline.perf.transformer.step import (
    messages_s,
    microbatch_costs,
    stage_passes,
    step_times,
)
from paceline.perf.transformer.supply import supply
from paceline.schedules.pipeline import PipelineAction, StageCosts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.supply import SampleCost, Supply


# Of a collective whose bytes are all hidden: that all ranks are there takes a message's latency.
_MEETING_S = 1e-6


class OperationKind(IntEnum):
    """What an operation does."""

    COMPUTE = 0
    SEND = 1
    RECEIVE = 2
    LAYERS = 3
    REPLICAS = 4
    LOAD = 5
    FETCH = 6


class RankOperation(NamedTuple):
    """One operation of a rank.

    Attributes:
        kind: what it does.
        seconds: of compute, of the message, of the collective once all are there, or of making a
            batch.
        action: of the pipeline that it belongs to; of a message the one that made it. None: of the
            optimizer, of the reduction of gradients, or of loading.
        peer: pipeline rank of the other side of a message; -1 for none.
    """

    kind: OperationKind
    seconds: float
    action: PipelineAction | None = None
    peer: int = -1


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds by kind of action and stage: computing, and exchanging between layers' ranks."""

    compute_s: dict[str, tuple[float, ...]]
    exchange_s: dict[str, tuple[float, ...]]


def step_programs(
    machine: Machine,
    model: Architecture,
    plan: Plan,
    batch: int,
    sample: SampleCost | None = None,
) -> tuple[tuple[RankOperation, ...], ...]:
    """Return what each pipeline rank does in a step.

    Args:
        machine: with peaks, memory bandwidth and links.
        model: to train.
        plan: how it is spread.
        batch: samples of a step over all replicas.
        sample: what it takes to load one; None: data are in memory.

    Raises:
        UsageError: the plan does not fit the model or the machine.
    """
    microbatch = check(machine, model, plan, batch)
    reached = efficiency_of(machine.devices[0])
    network = Network.of(machine, reached, plan.nodes)
    ranks = plan.mesh.pipeline
    rates = DeviceRates.of(machine, plan.precision, reached)
    boundaries_s = messages_s(model, plan, microbatch, network, rates.layer_s)
    blocking_s: tuple[float, ...] = ()
    if not plan.overlap_pipeline:  # messages are part of passes
        boundaries_s, blocking_s = (0.0,) * len(boundaries_s), boundaries_s
    passes = _passes(model, plan, microbatch, rates, network, blocking_s)
    whole = step_times(machine, model, plan, batch, reached, 1.0)
    ends = (
        RankOperation(OperationKind.REPLICAS, max(_MEETING_S, whole.exposed["gradients"])),
        RankOperation(
            OperationKind.COMPUTE, whole.exposed["compression"] + whole.breakdown.optimizer
        ),
    )
    schedule = make_schedule(plan, ranks, plan.microbatch_count)
    programs = []
    for rank, actions in enumerate(schedule.actions):
        operations: list[RankOperation] = []
        if rank == 0 and sample is not None:
            operations += _loading(supply(machine, plan, batch, sample))
        for action in actions:
            operations += _operations(plan, action, rank, schedule.stages, passes, boundaries_s)
        programs.append((*operations, *ends))
    return tuple(programs)


def _loading(found: Supply) -> Iterator[RankOperation]:
    """Yield how a replica's first rank gets its batch."""
    if found.runs_beside:
        yield RankOperation(OperationKind.FETCH, max(found.prepare_s, found.read_s))
    elif found.prepare_s or found.read_s:
        yield RankOperation(OperationKind.LOAD, found.prepare_s + found.read_s)


def _passes(
    model: Architecture,
    plan: Plan,
    microbatch: float,
    rates: DeviceRates,
    network: Network,
    blocking_s: tuple[float, ...],
) -> _Passes:
    """Return the seconds of passes; `blocking_s` are of messages in which ranks do not compute."""
    costs = microbatch_costs(model, plan, microbatch, rates, network)
    replicas = network.group(plan.mesh.data * plan.mesh.context, plan.mesh.tensor)
    times = StagePasses(*stage_passes(model, plan, costs, network, replicas), blocking_s)
    times = times.blocking(plan.mesh.pipeline)
    counts = stage_layer_counts(model, plan)
    exchange = {
        "forward": tuple(layers * costs.tensor_forward_s for layers in counts),
        "backward": tuple(layers * costs.tensor_backward_s for layers in counts),
    }
    exchange["backward_input"] = exchange["backward"]
    exchange["backward_weight"] = tuple(0.0 for _ in counts)
    whole = StageCosts(
        forward_s=_differences(times.forward_s, exchange["forward"]),
        backward_s=_differences(times.backward_s, exchange["backward"]),
    )
    return _Passes({str(kind): seconds for kind, seconds in whole.by_kind().items()}, exchange)


def _differences(values: tuple[float, ...], others: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(value - other for value, other in zip(values, others, strict=True))


def _operations(
    plan: Plan,
    action: PipelineAction,
    rank: int,
    stages: int,
    passes: _Passes,
    boundaries_s: tuple[float, ...],
) -> list[RankOperation]:
    """Return what one action needs, does and sends."""
    ranks = plan.mesh.pipeline
    found = []
    source = _source(action, stages)
    if source is not None and source.stage % ranks != rank:
        peer = source.stage % ranks
        found.append(RankOperation(OperationKind.RECEIVE, 0.0, source, peer))
    seconds = passes.compute_s[action.kind][action.stage]
    found.append(RankOperation(OperationKind.COMPUTE, seconds, action))
    if plan.mesh.tensor * plan.mesh.context > 1:
        exchange_s = max(_MEETING_S, passes.exchange_s[action.kind][action.stage])
        found.append(RankOperation(OperationKind.LAYERS, exchange_s, action))
    if plan.zero == 3 and plan.mesh.data * plan.mesh.context > 1:
        found.append(RankOperation(OperationKind.REPLICAS, _MEETING_S, action))
    target = _target(action, stages)
    if target is not None and target % ranks != rank:
        peer = target % ranks
        # Interleaved stages go round: from the last rank to the first one over the longest way.
        near = abs(peer - rank) == 1
        seconds = boundaries_s[min(rank, peer)] if near else max(boundaries_s)
        found.append(RankOperation(OperationKind.SEND, seconds, action, peer))
    return found


def _source(action: PipelineAction, stages: int) -> PipelineAction | None:
    """Return the action of another stage whose outcome this one needs.

    A gradient is sent when the gradients of a stage's inputs are known: by the whole backward, or
    by its first part.
    """
    if action.kind == "forward":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == "backward_weight" or action.stage == stages - 1:
        return None
    return action._replace(stage=action.stage + 1)


def _target(action: PipelineAction, stages: int) -> int | None:
    """Return the stage that needs the outcome of an action."""
    if action.kind == "backward_weight":
        return None
    stage = action.stage + (1 if action.kind == "forward" else -1)
    return stage if 0 <= stage < stages else None
