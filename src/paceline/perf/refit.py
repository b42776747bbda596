"""Applies calibration's factors: returns machines with some figures changed.

A changed figure is kept for exactly the threads and processes of the plan that ran, so that it is
the nearest one for that plan; the figures of other plans stay. Its source is ``fit``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from paceline.core.collective_costs import costs_of
from paceline.core.machine import (
    CollectivePoint,
    FrameworkOverhead,
    Overhead,
    Point,
    Quantity,
    Rate,
)
from paceline.perf.compute import cost_model

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.machine import Device, Machine, StepPhase
    from paceline.core.plan import Plan
    from paceline.core.workload import Operation, Workload
    from paceline.perf.costs import CostModel

Interval = tuple[float, float]  # lower and upper end, relative to the value
F = TypeVar("F", Rate, Overhead, FrameworkOverhead)


def scale_compute(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    phase: str,
    factor: float,
    *,
    interval: Interval,
) -> Machine:
    """Return the machine with all rates and overheads of `phase` taking `factor` times as long."""
    device = machine.devices[0]
    costs = cost_model(machine, workload, plan)
    operations = [
        operation
        for layer in workload.layers
        for operation in layer.operations
        if operation.phase == phase
    ]
    rates = [
        rate
        for operation in _distinct(operations)
        for rate in _scaled_rates(device, costs, plan, operation, factor, interval)
    ]
    overheads = []
    for operation in _distinct(operations):
        known = costs.overhead_of(operation.operator, operation.phase)
        if known is not None:
            overheads.append(
                dataclasses.replace(
                    known,
                    seconds=_scaled(known.seconds, factor, interval),
                    threads=plan.threads,
                    processes=plan.ranks_per_node,
                )
            )
    frameworks = [
        dataclasses.replace(
            overhead,
            seconds=_scaled(overhead.seconds, factor, interval),
            threads=plan.threads,
            processes=plan.ranks_per_node,
        )
        for framework, what in (("torch", "phase"), ("ddp", "wrapper"))
        if (overhead := costs.framework_overhead(framework, what, phase)) and overhead.seconds
    ]
    return _with_device(
        machine,
        rates=_replaced(device.rates, rates),
        overheads=_replaced(device.overheads, overheads),
        framework_overheads=_replaced(device.framework_overheads, frameworks),
    )


def scale_ddp(
    machine: Machine, workload: Workload, plan: Plan, factor: float, *, interval: Interval
) -> Machine:
    """Return the machine with DDP's communication costing `factor` times as much."""
    costs = cost_model(machine, workload, plan)
    scaled = [
        dataclasses.replace(
            overhead,
            seconds=overhead.seconds and _scaled(overhead.seconds, factor, interval),
            seconds_per_byte=overhead.seconds_per_byte
            and _scaled(overhead.seconds_per_byte, factor, interval),
            threads=plan.threads,
            processes=plan.ranks_per_node,
        )
        for what, phase in (("reduction", "backward"), ("buffer_broadcast", "forward"))
        if (overhead := costs.framework_overhead("ddp", what, phase))
    ]
    known = machine.devices[0].framework_overheads
    return _with_device(machine, framework_overheads=_replaced(known, scaled))


def scale_collectives(
    machine: Machine, plan: Plan, operation: str, factor: float, *, interval: Interval
) -> Machine:
    """Return the machine with the collectives of an operation taking `factor` times as long.

    Those from which the plan's collectives are predicted.
    """
    used = costs_of(machine.collectives, operation, plan.collectives, plan.nodes)
    costs = tuple(
        dataclasses.replace(
            cost,
            points=tuple(
                CollectivePoint(
                    bytes=point.bytes,
                    seconds=_scaled(point.seconds, factor, interval),
                    cpu_seconds=point.cpu_seconds and _scaled(point.cpu_seconds, factor, interval),
                )
                for point in cost.points
            ),
        )
        if cost in used
        else cost
        for cost in machine.collectives
    )
    return dataclasses.replace(machine, collectives=costs)


def add_residual(machine: Machine, plan: Plan, phase: StepPhase, seconds: Quantity) -> Machine:
    """Return the machine with `seconds` added to a phase, beyond rates and collectives."""
    device = machine.devices[0]
    residual = FrameworkOverhead(
        framework="loop",
        what="residual",
        phase=phase,
        seconds=seconds,
        threads=plan.threads,
        processes=plan.ranks_per_node,
    )
    before = [
        overhead.seconds.value
        for overhead in device.framework_overheads
        if overhead.seconds and _key(overhead) == _key(residual)
    ]
    if before:  # the prior has a residual already: `seconds` come on top of it
        shift = sum(before)
        low, high = (None if end is None else end + shift for end in (seconds.low, seconds.high))
        moved = Quantity(value=seconds.value + shift, source="fit", low=low, high=high)
        residual = dataclasses.replace(residual, seconds=moved)
    return _with_device(
        machine, framework_overheads=_replaced(device.framework_overheads, [residual])
    )


def _distinct(operations: Iterable[Operation]) -> list[Operation]:
    """Return one operation of each class and dtype."""
    return list(
        {(operation.operator, operation.dtype): operation for operation in operations}.values()
    )


def _scaled_rates(
    device: Device,
    costs: CostModel,
    plan: Plan,
    operation: Operation,
    factor: float,
    interval: Interval,
) -> list[Rate]:
    if operation.operator == "view":
        return []
    dtype = plan.precision if operation.dtype == "float32" else operation.dtype
    own_scale = min(plan.threads, device.cores) / plan.threads
    low, high = interval
    scaled = []
    for rate, scale in costs.rates_of(operation):
        faster = scale / (own_scale * factor)
        points = tuple(
            Point(
                work=point.work,
                rate_per_s=point.rate_per_s * faster,
                low_per_s=point.rate_per_s * faster / high,
                high_per_s=point.rate_per_s * faster / low,
            )
            for point in rate.points
        )
        scaled.append(
            dataclasses.replace(
                rate,
                phase=operation.phase,
                dtype=dtype,
                source="fit",
                points=points,
                threads=plan.threads,
                processes=plan.ranks_per_node,
            )
        )
    return scaled


def _scaled(quantity: Quantity, factor: float, interval: Interval) -> Quantity:
    value = quantity.value * factor
    low, high = sorted((value * interval[0], value * interval[1]))
    return Quantity(value=value, source="fit", low=low, high=high)


def _key(figure: Rate | Overhead | FrameworkOverhead) -> tuple[object, ...]:
    """Return the key of a figure: a machine has at most one figure with each key."""
    place = (figure.phase, figure.threads, figure.processes)
    if isinstance(figure, Rate):
        return (figure.operator, figure.dtype, figure.unit, *place)
    if isinstance(figure, Overhead):
        return (figure.operator, *place)
    return (figure.framework, figure.what, figure.backend, *place)


def _replaced(figures: tuple[F, ...], changed: list[F]) -> tuple[F, ...]:
    """Return `figures` with those of the same keys replaced, and new ones at the end."""
    by_key = {_key(figure): figure for figure in figures}
    by_key.update({_key(figure): figure for figure in changed})
    return tuple(by_key.values())


def _with_device(machine: Machine, **changes: object) -> Machine:
    """Return the machine with changed fields of its first device."""
    first, *others = machine.devices
    return dataclasses.replace(
        machine,
        devices=(dataclasses.replace(first, **changes), *others),  # type: ignore[arg-type]  # its fields
    )
