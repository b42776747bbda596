"""Predicts a training step: the same Breakdown as a trace has, before anything runs.

Machine + Workload + Plan -> Estimate. No torch: a login node can do it. Each layer's operators are
priced one by one (`prices`), communication is laid beside the backward pass (`communication`), and
the loader is a stage that the loop waits for when it is the slower one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.breakdown import Breakdown
from paceline.core.errors import UsageError
from paceline.core.record import Record
from paceline.perf.communication import broadcast_s, exposed_s, make_buckets
from paceline.perf.prices import Price, PriceList

if TYPE_CHECKING:
    from paceline.core.machine import Device, Link, Machine
    from paceline.core.plan import Plan
    from paceline.core.workload import Layer, Workload

SPREAD = 0.25  # half of the interval, relative; bench/predict_small.py is what it rests on
# The C library gives freed memory back to the system once about twice the largest block is free at
# the end of its heap, and the next step pays for touching it anew. What is given back per step lay
# between 0 and 3 times the largest tensor on six models, 1.5 times on average, by page faults.
# Source: mallopt(3), the dynamic M_TRIM_THRESHOLD and M_MMAP_THRESHOLD (at most 32 MiB).
KEPT_FACTOR, FRESH_FACTOR = 2.0, 1.5
LARGEST_BYTES = 32 << 20
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Record):
    """A predicted step of one rank.

    Attributes:
        workload: its name.
        machine: its name.
        world_size: ranks in all.
        threads: of each rank.
        breakdown: seconds of a step by phase.
        step_time_s: their sum.
        low_s: lower end of the interval in which the step time is expected.
        high_s: its upper end.
        memory_bytes: per rank, by kind.
        link_bytes: that a rank sends per step, by level of link.
        limit: what limits the step, in words.
        shares: the resources' parts of the step, which decided `limit`.
        sources: for each phase, what its figure rests on.
    """

    workload: str
    machine: str
    world_size: int
    threads: int
    breakdown: Breakdown
    step_time_s: float
    low_s: float
    high_s: float
    memory_bytes: dict[str, int]
    link_bytes: dict[str, int]
    limit: str
    shares: dict[str, float]
    sources: dict[str, str]


def estimate(machine: Machine, workload: Workload, plan: Plan) -> Estimate:
    """Return the predicted step of `workload` on `machine` under `plan`.

    Raises:
        UsageError: the plan asks for pipeline or tensor parallelism, the machine has no device or
            rates, or no link for the ranks' collectives.
    """
    if plan.mesh.pipeline > 1 or plan.mesh.tensor > 1:
        raise UsageError(
            "only data parallelism can be predicted so far",
            where=f"mesh {plan.mesh.pipeline} x {plan.mesh.tensor} (pipeline x tensor)",
            fix="Plan with pipeline = tensor = 1",
        )
    ranks = plan.mesh.data
    compute = _compute(machine, workload, plan)
    transfer_s, sync_s = _communication_s(machine, workload, plan, compute)
    forward_s = compute.phases["forward"].total_s
    backward_s = compute.phases["backward"].total_s
    optimizer_s = compute.phases["optimizer"].total_s
    busy_s = forward_s + backward_s + optimizer_s + transfer_s + sync_s
    input_s = _input_s(workload, plan, busy_s, _turns(machine.devices[0], plan))
    breakdown = Breakdown(
        input=input_s,
        forward=forward_s,
        backward=backward_s,
        optimizer=optimizer_s,
        transfer=transfer_s + sync_s,
    )
    shares = _shares(compute, breakdown)
    step_s = breakdown.total_s
    return Estimate(
        workload=workload.name,
        machine=machine.name,
        world_size=ranks,
        threads=plan.threads,
        breakdown=breakdown,
        step_time_s=step_s,
        low_s=step_s * (1 - SPREAD),
        high_s=step_s * (1 + SPREAD),
        memory_bytes=memory_bytes(workload, plan),
        link_bytes=_link_bytes(workload, plan),
        limit=max(shares, key=lambda name: shares[name]),
        shares=shares,
        sources=_sources(machine, workload, plan),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Compute:
    """Prices by phase, and when each gradient is ready (bytes, seconds), in backward order."""

    phases: dict[str, Price]
    gradients: list[tuple[int, float]]


def _compute(machine: Machine, workload: Workload, plan: Plan) -> _Compute:
    if not machine.devices:
        raise UsageError(
            "the machine has no device to compute on",
            where=machine.name,
            why="; ".join(machine.missing),
            fix="Run `paceline probe` on a node with torch",
        )
    device = machine.devices[0]
    step_bytes = workload.saved_bytes + 3 * workload.parameter_bytes + workload.optimizer_bytes
    prices = PriceList(
        device,
        threads=plan.threads,
        processes=plan.ranks_per_node,
        step_bytes=step_bytes,
        precision=plan.precision,
    )
    phases = {
        phase: Price(overhead_s=prices.overhead_s("step", phase))
        for phase in ("forward", "backward", "optimizer")
    }
    if plan.mesh.data > 1:
        for phase in ("forward", "backward"):
            phases[phase] += Price(overhead_s=prices.overhead_s("ddp", phase))
    if device.kind == "cpu" and device.first_touch_bytes_per_s:
        touch_s = _fresh_bytes(workload) / device.first_touch_bytes_per_s.value
        for phase in ("forward", "backward"):
            phases[phase] += Price(memory_s=touch_s / 2)
    gradients = []
    for layer in reversed(workload.layers):
        by_phase = _price_layer(prices, layer)
        for phase, price in by_phase.items():
            phases[phase] += price
        ready_s = phases["backward"].total_s
        gradients += [(size, ready_s) for size in reversed(layer.parameter_bytes)]
    turns = _turns(device, plan)
    return _Compute(
        phases={phase: price.times(turns) for phase, price in phases.items()},
        gradients=[(size, ready_s * turns) for size, ready_s in gradients],
    )


def _turns(device: Device, plan: Plan) -> float:
    """Return how many times longer ranks compute that take turns on too few cores; 1 if enough."""
    if device.kind != "cpu":
        return 1.0
    wanted = plan.ranks_per_node * min(plan.threads, device.cores)
    return max(1.0, wanted / device.cores)


def _fresh_bytes(workload: Workload) -> float:
    """Return the bytes that a step gets from the system again; none if all of it is kept."""
    largest = min(workload.largest_bytes, LARGEST_BYTES)
    beyond = workload.saved_bytes + workload.parameter_bytes - KEPT_FACTOR * largest
    return max(0.0, min(FRESH_FACTOR * largest, beyond))


def _price_layer(prices: PriceList, layer: Layer) -> dict[str, Price]:
    by_phase: dict[str, Price] = {}
    for operation in layer.operations:
        price = prices.price(operation).times(operation.count)
        by_phase[operation.phase] = by_phase.get(operation.phase, Price()) + price
    return by_phase


def _communication_s(
    machine: Machine, workload: Workload, plan: Plan, compute: _Compute
) -> tuple[float, float]:
    """Return seconds of exposed gradient reduction, and of sending buffers before the forward."""
    if plan.mesh.data == 1:
        return 0.0, 0.0
    buckets = make_buckets(
        compute.gradients,
        bucket_bytes=plan.bucket_bytes,
        first_bucket_bytes=plan.first_bucket_bytes,
    )
    transfer_s = exposed_s(
        buckets,
        compute.phases["backward"].total_s,
        _collective(machine, "all_reduce"),
        plan.mesh.data,
        cpu_moves=plan.ranks_per_node > 1,
    )
    if not workload.buffer_bytes:
        return transfer_s, 0.0
    # Running means and their integer counters go in one broadcast per dtype.
    link = _collective(machine, "broadcast")
    counters_s = broadcast_s(link, 0, plan.mesh.data)
    return transfer_s, counters_s + broadcast_s(link, workload.buffer_bytes, plan.mesh.data)


def _collective(machine: Machine, operation: str) -> Link:
    links = [one for one in machine.links if one.operation == operation]
    # What DistributedDataParallel really pays is better than what a bare collective takes.
    link = min(links, key=lambda one: one.level != "ddp", default=None)
    if link is None:
        raise UsageError(
            f"the machine has no figure for {operation}",
            where=machine.name,
            why="; ".join(machine.missing),
            fix="Run `paceline probe` on a node with two cores and torch",
        )
    return link


def _input_s(workload: Workload, plan: Plan, busy_s: float, turns: float) -> float:
    """Return seconds that the loop waits for a batch.

    Without workers the loop prepares it itself; with w workers a batch comes every 1/w of its
    cost, and only what exceeds the rest of the step is waited for.
    """
    if workload.dataset is None:
        return 0.0
    batch_s = workload.batch * workload.dataset.seconds_per_sample * turns
    if plan.loader_workers == 0:
        return batch_s
    return max(0.0, batch_s / plan.loader_workers - busy_s)


def memory_bytes(workload: Workload, plan: Plan) -> dict[str, int]:
    """Return the bytes that a rank needs at its peak, by kind.

    ``buckets`` are DistributedDataParallel's copies of the gradients.
    """
    scale = DTYPE_BYTES[plan.precision] / DTYPE_BYTES["float32"]
    return {
        "parameters": workload.parameter_bytes,
        "gradients": workload.parameter_bytes,
        "optimizer": workload.optimizer_bytes,
        "activations": int(workload.saved_bytes * scale),
        "buffers": workload.buffer_bytes,
        "input": workload.input_bytes,
        "buckets": workload.parameter_bytes if plan.mesh.data > 1 else 0,
    }


def _link_bytes(workload: Workload, plan: Plan) -> dict[str, int]:
    ranks = plan.mesh.data
    if ranks == 1:
        return {}
    level = "node" if plan.nodes == 1 else "network"
    return {level: workload.parameter_bytes * 2 * (ranks - 1) // ranks + workload.buffer_bytes}


def _shares(compute: _Compute, breakdown: Breakdown) -> dict[str, float]:
    total = sum(compute.phases.values(), Price())
    seconds = {
        "operator overhead": total.overhead_s,
        "compute": total.compute_s,
        "memory bandwidth": total.memory_s,
        "communication": breakdown.transfer,
        "data loading": breakdown.input,
    }
    return {name: one / max(breakdown.total_s, 1e-12) for name, one in seconds.items()}


def _sources(machine: Machine, workload: Workload, plan: Plan) -> dict[str, str]:
    device = machine.devices[0]
    exact = any(
        (one.threads, one.processes) == (plan.threads, plan.ranks_per_node) for one in device.rates
    )
    kinds = "/".join(sorted({one.source for one in device.rates}))
    rates = f"rates: {kinds}" + ("" if exact else ", scaled from other threads or processes")
    if _turns(device, plan) > 1:
        rates += f"; {plan.ranks_per_node} ranks take turns on {device.cores} cores"
    measured = workload.dataset is not None and workload.dataset.seconds_per_sample > 0
    sources = dict.fromkeys(("forward", "backward", "optimizer"), rates)
    sources["input"] = "measured cost per sample" if measured else "data in memory"
    if plan.mesh.data > 1:
        link = _collective(machine, "all_reduce")
        sources["transfer"] = f"{link.level}: {link.latency_s.source}, {link.ranks} ranks"
        if _turns(device, plan) > 1:  # 4 ranks on 2 cores: 8 times as long as the links promise
            sources["transfer"] += "; too low, as waiting for a core is not in it"
    return sources
