"""The Estimate of a transformer's training step: time with its interval, memory, bytes, the limit.

`step` has the seconds, `memory` the bytes of each rank, `traffic` those that it sends. This module
adds what a reader needs to trust them: an interval from the intervals of the machine's efficiency,
the share of each resource in the step, whether the fullest rank fits, and what is extrapolated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paceline.core.estimate import Estimate
from paceline.perf.transformer.checks import check
from paceline.perf.transformer.efficiency import FIGURES, efficiency_of
from paceline.perf.transformer.memory import parameter_bytes, rank_memory, rank_parameters
from paceline.perf.transformer.network import Network, inside_level
from paceline.perf.transformer.offload import fit_device
from paceline.perf.transformer.reliability import checkpoint_plan, straggler_wait_s
from paceline.perf.transformer.step import step_times
from paceline.perf.transformer.supply import SampleCost, supply
from paceline.perf.transformer.traffic import link_bytes

if TYPE_CHECKING:
    from paceline.core.breakdown import Breakdown
    from paceline.core.machine import Efficiency, Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.step import StepSeconds
    from paceline.perf.transformer.supply import Supply

# Error of the model where the efficiency is known: mean over rows of published tables that were
# not fitted, bench/validate_perf.py.
MODEL_ERROR = 0.06
_SIGMAS = 1.645  # of a 90 % interval
_STEP = 0.01
_RESOURCES = {
    "matmul": "compute",
    "attention": "compute",
    "unaligned": "compute",
    "bandwidth": "memory bandwidth",
    "link": "communication",
    "network": "communication",
    "layer_s": "operator overhead",
}
_CHECKPOINT_BYTES = 14  # per parameter: 16-bit copy, master copy, two moments
GIB = 2**30
# Of the device's memory, from which a plan is called tight: bench/validate_perf.py shows that peaks
# of published runs are up to 1 / 0.7 of what is predicted.
TIGHT_SHARE = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Risks:
    """What goes wrong at scale, as far as the user knows it.

    Attributes:
        jitter: standard deviation of a rank's step over its mean; 0: all ranks are equal.
        node_failure_s: mean time between failures of one node; 0: none.
        checkpoint_bytes_per_s: at which the job writes its state; 0: the machine's last tier, from
            every node.
    """

    jitter: float = 0.0
    node_failure_s: float = 0.0
    checkpoint_bytes_per_s: float = 0.0


def estimate_transformer(
    machine: Machine,
    model: Architecture,
    plan: Plan,
    batch: int,
    risks: Risks | None = None,
    *,
    sample: SampleCost | None = None,
    budget_bytes: int | None = None,
) -> Estimate:
    """Return the predicted step of a transformer.

    Args:
        machine: with peaks, memory bandwidth and links.
        model: to train.
        plan: how it is spread.
        batch: samples of a step over all replicas.
        risks: stragglers and failures; None: none.
        sample: what it takes to load one; None: data are in memory.
        budget_bytes: of each device, of which `Estimate.memory_fit` says how it is kept; None:
            none.

    Raises:
        MemoryExceeded: nothing that can leave a device for its host keeps the budget.
        UsageError: the plan does not fit the model or the machine, which may lack a figure.
    Cost: 2 to 20 ms.
    """
    microbatch = check(machine, model, plan, batch)
    device = machine.devices[0]
    reached = efficiency_of(device)
    times = step_times(machine, model, plan, batch, reached)
    slopes = _slopes(machine, model, plan, batch, reached, times)
    risks = risks or Risks()
    total_s = times.breakdown.total_s
    wait_s = straggler_wait_s(total_s, risks.jitter, plan.mesh.world_size)
    loading = supply(machine, plan, batch, sample or SampleCost())
    breakdown = replace(
        times.breakdown,
        waiting=times.breakdown.waiting + wait_s,
        input=loading.wait_s(total_s + wait_s),
    )
    step_s = breakdown.total_s
    spread = math.exp(_SIGMAS * _deviation(machine, reached, slopes))
    ranks = rank_memory(model, plan, microbatch, device)
    fullest = max(range(len(ranks)), key=lambda rank: sum(ranks[rank].values()))
    memory = {kind: size for kind, size in ranks[fullest].items() if size}
    needed, available = sum(memory.values()), int(device.memory_bytes.value)
    network = Network.of(machine, reached, plan.nodes)
    shares = _shares(slopes, breakdown, loading)
    interval_s, useful = _checkpoints(machine, model, plan, risks)
    return Estimate(
        workload=model.name,
        workload_digest=model.digest(),
        machine=machine.name,
        machine_digest=machine.digest(),
        plan=plan,
        breakdown=breakdown,
        step_time_s=step_s,
        low_s=step_s / spread,
        high_s=step_s * spread,
        memory_bytes=memory,
        link_bytes=link_bytes(model, plan, microbatch, network, inside_level(machine)),
        trained_parameter_bytes=round(max(rank_parameters(model, plan)) * parameter_bytes(plan)),
        limit=max(shares, key=lambda name: shares[name]),
        shares=shares,
        sources=_sources(reached, loading),
        fits=needed <= available,
        needed_memory_bytes=needed,
        available_memory_bytes=available,
        bubble_share=times.bubble_share,
        warnings=(
            *_memory_warnings(memory, needed, available, fullest, len(ranks)),
            *_warnings(machine, plan, reached),
        ),
        fullest_rank=fullest,
        batch=batch,
        checkpoint_interval_s=interval_s,
        useful_share=useful,
        memory_fit=None
        if budget_bytes is None
        else fit_device(
            machine, model, plan, microbatch, times, step_s=step_s, budget_bytes=budget_bytes
        ),
    )


def _slopes(
    machine: Machine,
    model: Architecture,
    plan: Plan,
    batch: int,
    reached: Efficiency,
    times: StepSeconds,
) -> dict[str, float]:
    """Return the change of the step's logarithm with that of each figure."""
    slopes = {}
    base = math.log(times.breakdown.total_s)
    for name in FIGURES:
        figure = getattr(reached, name)
        moved = replace(reached, **{name: replace(figure, value=figure.value * (1 + _STEP))})
        other = step_times(machine, model, plan, batch, moved, times.stretch)
        slopes[name] = (math.log(other.breakdown.total_s) - base) / math.log1p(_STEP)
    return slopes


def _deviation(machine: Machine, reached: Efficiency, slopes: dict[str, float]) -> float:
    """Return the standard deviation of the step's logarithm; intervals are two deviations wide.

    The interval of a bandwidth in the machine file counts as that of its efficiency.
    """
    variance = MODEL_ERROR**2
    links = {"network": machine.link("network"), "link": machine.link(inside_level(machine))}
    for name in FIGURES:
        figures = [getattr(reached, name)]
        link = links.get(name)
        if link is not None:
            figures.append(link.bandwidth_bytes_per_s)
        for figure in figures:
            if figure.low and figure.high:
                variance += (slopes[name] * math.log(figure.high / figure.low) / 4) ** 2
    return math.sqrt(variance)


def _shares(slopes: dict[str, float], breakdown: Breakdown, loading: Supply) -> dict[str, float]:
    """Return each resource's share of the step: how much shorter a faster one would make it.

    While a step waits for loaders beside it, nothing but faster loaders makes it shorter.
    """
    if loading.runs_beside and breakdown.input:
        return {"data loading": 1.0}
    waiting, reading = (part / breakdown.total_s for part in (breakdown.waiting, breakdown.input))
    shares = {"pipeline bubble": max(0.0, waiting), "data loading": reading}
    rest = 1 - waiting - reading
    for name, slope in slopes.items():
        resource = _RESOURCES[name]
        shares[resource] = shares.get(resource, 0.0) + abs(slope) * rest
    shares["compute"] -= abs(slopes["unaligned"]) * rest  # part of matmul's own slope
    return {name: round(share, 4) for name, share in shares.items()}


def _sources(reached: Efficiency, loading: Supply) -> dict[str, str]:
    compute = f"{reached.matmul.source}: {reached.matmul.reference}"
    network = f"{reached.network.source}: {reached.network.reference}"
    return dict.fromkeys(("forward", "backward", "optimizer"), compute) | {
        "input": loading.source,
        "transfer": network,
        "waiting": "replay of the schedule",
    }


def _memory_warnings(
    memory: dict[str, int], needed: int, available: int, rank: int, ranks: int
) -> list[str]:
    if needed <= TIGHT_SHARE * available:
        return []
    if needed <= available:
        return [
            f"tight: {needed / available:.0%} of the device's memory; peaks that trainers report "
            "are up to 60 % above such predictions, for temporary buffers and fragmentation"
        ]
    kind = max(memory, key=lambda name: memory[name])
    where = f"rank {rank} of {ranks} pipeline ranks" if ranks > 1 else "every rank"
    return [
        f"does not fit: {where} needs {needed / GIB:.1f} GiB, {(needed - available) / GIB:.1f} GiB "
        f"more than the device has; most of it is {kind} ({memory[kind] / GIB:.1f} GiB)"
    ]


def _warnings(machine: Machine, plan: Plan, reached: Efficiency) -> list[str]:
    found = []
    if plan.nodes > machine.nodes:
        found.append(f"extrapolated: the plan has {plan.nodes} nodes, the machine {machine.nodes}")
    if reached.matmul.source != "fit":
        found.append(
            f"not measured: the machine's efficiency is the {reached.matmul.reference}; refit it "
            "with measured steps"
        )
    recalled = sum(link.bandwidth_bytes_per_s.source == "recalled" for link in machine.links)
    if recalled:
        found.append(f"not measured: bandwidths of {recalled} links are published figures")
    return found


def _checkpoints(
    machine: Machine, model: Architecture, plan: Plan, risks: Risks
) -> tuple[float, float]:
    """Return (seconds between checkpoints, useful share of the time); (0, 1) without failures."""
    if not risks.node_failure_s:
        return 0.0, 1.0
    rate = risks.checkpoint_bytes_per_s
    if not rate and machine.tiers:
        rate = machine.tiers[-1].bandwidth_bytes_per_s.value * plan.nodes
    if not rate:
        return 0.0, 1.0
    checkpoint_s = model.parameters * _CHECKPOINT_BYTES / rate
    found = checkpoint_plan(checkpoint_s, risks.node_failure_s / plan.nodes)
    return found.interval_s, found.useful_share
