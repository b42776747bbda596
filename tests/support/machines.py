"""Machines by hand, for tests of what predicts from them."""

from __future__ import annotations

from paceline.core.machine import (
    CollectiveCost,
    CollectivePoint,
    Device,
    FrameworkOverhead,
    Machine,
    Point,
    Quantity,
    Rate,
)


def sheet(value: float) -> Quantity:
    """Return a number as a datasheet states it."""
    return Quantity(value=float(value), source="datasheet")


def collective(
    operation: str,
    latency_s: float = 1e-3,
    bandwidth_bytes_per_s: float = 1e9,
    ranks: int = 2,
    backend: str = "gloo",
    algorithm: str = "",
    hosts: int = 1,
) -> CollectiveCost:
    """Return a collective whose cost is a line."""
    far = 1e9
    points = (
        CollectivePoint(bytes=0.0, seconds=sheet(latency_s)),
        CollectivePoint(bytes=far, seconds=sheet(latency_s + far / bandwidth_bytes_per_s)),
    )
    return CollectiveCost(
        backend=backend,
        operation=operation,
        algorithm=algorithm,
        ranks=ranks,
        hosts=hosts,
        level="loopback" if hosts == 1 else "network",
        points=points,
    )


def framework(framework: str, what: str, phase: str, seconds: float) -> FrameworkOverhead:
    """Return what a framework adds to a phase, measured with one thread alone."""
    return FrameworkOverhead(
        framework=framework,
        what=what,
        phase=phase,
        threads=1,
        processes=1,
        seconds=sheet(seconds),
    )


def small_machine(rate_per_s: float = 1e9) -> Machine:
    """Return a machine of four cores with one rate for all operators and sizes."""
    rates = tuple(
        Rate(
            operator=operator,
            phase="forward",
            dtype="float32",
            threads=1,
            processes=1,
            unit=unit,
            source="datasheet",
            points=(Point(work=1.0, rate_per_s=rate_per_s),),
        )
        for operator, unit in (("matmul", "flops"), ("elementwise", "bytes"))
    )
    device = Device(name="cpu", kind="cpu", cores=4, memory_bytes=sheet(1e9), rates=rates)
    costs = (collective("all_reduce", 1e-4, 1e9),)
    return Machine(name="m", devices=(device,), collectives=costs)
