"""Turns timed kernels into rates and overheads. Imports torch: only a probe loads it.

A tiny chain of length n costs ``step + n * (sum of its operators' overheads)``, so two lengths
give the slope; what other classes in the chain cost is known already and taken off. A larger kernel
then costs its overheads plus work over rate. All arithmetic is on arrays that hold the value over
all rounds first, then that of each round alone: each result has the same shape, and so an interval.
"""

from __future__ import annotations

import dataclasses
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from paceline.core.machine import Device, FrameworkOverhead, Overhead, Point, Quantity, Rate
from paceline.perf.costs import CostModel
from paceline.probe.figures import probed, typical_by_round
from paceline.probe.kernels import (
    Kernel,
    convolutional_part,
    networks,
    operations_of,
    rate_kernels,
    time_calls,
    time_phases,
    tiny_kernels,
)
from paceline.probe.protocol import MemoryRates
from paceline.probe.quiet import QuietParts

if TYPE_CHECKING:
    from paceline.core.machine import Phase
    from paceline.core.workload import Operation

SHORT, LONG = 1, 9
CONVOLUTIONS = ("convolution", "convolution_1d", "depthwise", "transposed")
# The others are bound by memory.
FLOPS = ("matmul", *CONVOLUTIONS, "recurrent", "attention")
# FLOPs per byte below which a matrix product is bound by moving its factors.
LOW_INTENSITY = 4.0
LEAST_PART = 0.2  # of a product's time that its FLOPs keep, whatever its bytes seem to cost
PHASES: tuple[Phase, Phase] = ("forward", "backward")
LEAST_OVERHEAD_S = 1e-7
Figure = np.ndarray  # a value over all rounds, then that of each round alone
Costs = dict[tuple[str, str], Figure]
Round = list[dict["Phase", float]]  # seconds of each chain by phase


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        budget_s: for one kernel in one round.
        rounds: the best of them counts: what disturbs one kernel for some time rarely meets it in
            every round.
        quick: one size of each kernel.
        synchronize: called before each kernel, so that two processes measure the same at the same
            time.
        parts: measures rounds again that other processes disturbed.
    """

    budget_s: float
    rounds: int
    quick: bool = False
    synchronize: Callable[[], None] = lambda: None
    parts: QuietParts = field(default_factory=lambda: QuietParts(repeat_s=0.0))


def _time_rounds(
    name: str, chains: list[tuple[Kernel, int]], effort: Effort
) -> list[dict[Phase, Figure]]:
    """Return the seconds of each chain (kernel, length) by phase: the least, then each round's."""

    def time_round() -> Round:
        times = []
        for kernel, length in chains:
            effort.synchronize()
            times.append(time_phases(kernel, length, effort.budget_s))
        return times

    rounds = effort.parts.measure_rounds(name, time_round, effort.rounds, disagreement)
    # Figures of different measurements are combined round by round: each has the same number.
    fastest = sorted(rounds, key=_total_s)[: effort.rounds]
    return [
        {
            phase: np.asarray([min(seconds), *seconds])
            for phase in PHASES
            for seconds in [[sample[phase] for sample in samples]]
        }
        for samples in zip(*fastest, strict=True)
    ]


def _total_s(times: Round) -> float:
    return sum(seconds for sample in times for seconds in sample.values())


def disagreement(rounds: list[Round]) -> float:
    """Return the factor by which the two fastest rounds of a chain differ, typically."""
    seconds = np.asarray([[list(sample.values()) for sample in times] for times in rounds])
    fastest = np.sort(seconds, axis=0)[:2]
    return float(np.median(fastest[-1] / fastest[0]))


def measure_overheads(effort: Effort) -> Costs:
    """Return seconds per operator by (class, phase), ``step`` included."""
    costs: Costs = {}
    steps: dict[Phase, list[Figure]] = {phase: [] for phase in PHASES}
    kernels = tiny_kernels()
    chains = [(kernel, length) for kernel in kernels for length in (SHORT, LONG)]
    times = _time_rounds("overheads", chains, effort)
    for kernel, short, long in zip(kernels, times[::2], times[1::2], strict=True):
        added = _added(operations_of(kernel, SHORT), operations_of(kernel, LONG))
        for phase in PHASES:
            own = added.get((kernel.operator, phase), 0)
            slope_s = long[phase] - short[phase]
            others_s = sum(
                count * costs.get((operator, of), 0.0)
                for (operator, of), count in added.items()
                if of == phase and operator != kernel.operator
            )
            if own:
                each_s = (slope_s - others_s) / own
                costs[kernel.operator, phase] = np.maximum(LEAST_OVERHEAD_S, each_s)
            steps[phase].append(np.maximum(0.0, short[phase] - slope_s / (LONG - SHORT)))
    for phase in PHASES:
        by_kernel = np.sort(np.stack(steps[phase]), axis=0)
        costs["step", phase] = by_kernel[len(by_kernel) // 5]  # of the kernels, in every round
    return costs


def _added(short: tuple[Operation, ...], long: tuple[Operation, ...]) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for operations, sign in ((long, 1), (short, -1)):
        for operation in operations:
            key = (operation.operator, operation.phase)
            counts[key] = counts.get(key, 0) + sign * operation.count
    return counts


def measure_rates(costs: Costs, effort: Effort, *, threads: int, processes: int) -> list[Rate]:
    """Return the curve of each class, dtype and phase; `costs` from `measure_overheads`."""
    points: dict[tuple[str, str, str], list[Point]] = {}
    moves: dict[str, Point] = {}
    fitted: dict[tuple[str, Phase], list[tuple[int, int, Figure]]] = {}
    kernels = rate_kernels(quick=effort.quick)
    rounds = _time_rounds("rates", [(kernel, SHORT) for kernel in kernels], effort)
    for kernel, times in zip(kernels, rounds, strict=True):
        operations = operations_of(kernel)
        for phase in PHASES:
            own = [
                operation
                for operation in operations
                if (operation.operator, operation.phase) == (kernel.operator, phase)
            ]
            unit = "flops" if kernel.operator in FLOPS else "bytes"
            work = sum(getattr(operation, unit) * operation.count for operation in own)
            if not work:
                continue
            busy_s = _busy_s(kernel, phase, times[phase], operations, costs, points)
            moved = sum(operation.bytes * operation.count for operation in own)
            calls = sum(operation.count for operation in own)
            if kernel.operator in CONVOLUTIONS:
                fitted.setdefault((kernel.operator, phase), []).append((work, moved, busy_s))
                continue
            if kernel.operator == "matmul" and work < LOW_INTENSITY * moved:
                moves[phase] = _point(moved / calls, moved / busy_s)
                continue
            if kernel.operator == "matmul" and phase in moves:
                moved_s = moved / moves[phase].rate_per_s
                busy_s = np.maximum(busy_s - moved_s, LEAST_PART * busy_s)
            key = (kernel.operator, phase, str(kernel.dtype).removeprefix("torch."))
            points.setdefault(key, []).append(_point(work / calls, work / busy_s))
    rates = _fit_convolutions(fitted, threads=threads, processes=processes)
    curves = [
        (key, "flops" if key[0] in FLOPS else "bytes", curve) for key, curve in points.items()
    ]
    curves += [
        (("matmul", phase, dtype), "bytes", [point])
        for phase, point in moves.items()
        for dtype in sorted({key[2] for key in points if key[0] == "matmul"})
    ]
    return rates + [
        Rate(
            operator=operator,  # type: ignore[arg-type]  # a class of the kernels above
            phase=phase,  # type: ignore[arg-type]
            dtype=dtype,
            threads=threads,
            processes=processes,
            unit=unit,  # type: ignore[arg-type]  # one of the two
            source="probe",
            points=tuple(sorted(curve, key=lambda point: point.work)),
        )
        for (operator, phase, dtype), unit, curve in curves
    ]


def _fit_convolutions(
    samples: dict[tuple[str, Phase], list[tuple[int, int, Figure]]],
    *,
    threads: int,
    processes: int,
) -> list[Rate]:
    """Return two rates per class and phase: a convolution computes, and rearranges its tensors.

    ``seconds = flops / flops_rate + bytes / bytes_rate``, by relative least squares: the size of a
    call alone says little, since one with few channels is bound by the second term.
    """
    rates = []
    for (operator, phase), rows in samples.items():
        work = np.asarray([row[:2] for row in rows])
        seconds = np.asarray([row[2] for row in rows])
        # One fit to the best times, then one to those of each round.
        fits = np.asarray([nonnegative_fit(work / column[:, None]) for column in seconds.T])
        for index, unit in enumerate(("flops", "bytes")):
            per_unit = fits[:, index]
            if per_unit[0] > 0:
                largest = float(work[:, index].max())
                point = _point(largest, 1 / per_unit[per_unit > 0])
                rates.append(
                    Rate(
                        operator=operator,  # type: ignore[arg-type]  # one of CONVOLUTIONS
                        phase=phase,
                        dtype="float32",
                        threads=threads,
                        processes=processes,
                        unit=unit,  # type: ignore[arg-type]  # one of the two above
                        source="fit",
                        points=(point,),
                    )
                )
    return rates


def nonnegative_fit(columns_NU: np.ndarray) -> tuple[float, float]:  # noqa: N803  # shape letters
    """Return the two coefficients, neither below 0, that bring each row's sum nearest to 1.

    Args:
        columns_NU: work per second by sample (N) and unit (U, two of them).
    """
    first, second = (
        float(value) for value in np.linalg.lstsq(columns_NU, np.ones(len(columns_NU)))[0]
    )
    if first >= 0 and second >= 0:
        return first, second
    alone = columns_NU.sum(axis=0) / (columns_NU**2).sum(axis=0)  # least squares of one column
    return (float(alone[0]), 0.0) if second < 0 else (0.0, float(alone[1]))


def _busy_s(
    kernel: Kernel,
    phase: Phase,
    total_s: Figure,
    operations: tuple[Operation, ...],
    costs: Costs,
    points: dict[tuple[str, str, str], list[Point]],
) -> Figure:
    """Return seconds that the kernel's own class computed: total less overheads and the others."""
    busy_s = total_s - costs["step", phase]
    for operation in operations:
        if operation.phase != phase:
            continue
        busy_s = busy_s - operation.count * costs.get((operation.operator, phase), 0.0)
        if operation.operator != kernel.operator and operation.bytes:
            known = points.get((operation.operator, phase, "float32"), [])
            at_least = [point for point in known if point.work >= operation.bytes] or known[-1:]
            rate = at_least[0].rate_per_s if at_least else TYPICAL_BYTES_PER_S
            busy_s = busy_s - operation.count * operation.bytes / rate
    # A call that is mostly overhead says little of the rate; its rate is at least finite.
    at_least_s: Figure = np.maximum(busy_s, 0.1 * total_s)
    return at_least_s


def _point(work: float, rates_per_s: Figure) -> Point:
    """Return a curve's point from its rate and that of each round."""
    return Point(
        work=work,
        rate_per_s=float(rates_per_s[0]),
        low_per_s=float(rates_per_s.min()),
        high_per_s=float(rates_per_s.max()),
    )


TYPICAL_BYTES_PER_S = 50e9  # before the elementwise rates are known


# Operators per parameter of an update in torch 2.13, as `training.capture` counts them.
_SGD_OPERATORS, _ADAM_OPERATORS, _FOREACH_OPERATORS, _FOREACH_OTHERS = 3, 9, 8, 2


def measure_optimizer(effort: Effort) -> Costs:
    """Return the optimizer's seconds per operator and per step, by kind of optimizer.

    Loops over parameters: from SGD with momentum and Adam. ``foreach`` and ``fused``: from Adam's;
    a CPU works on the tensors of a list one by one, so that each counts.
    """
    (sgd_s, sgd_step_s), (adam_s, adam_step_s) = (_line(make, effort) for make in (_sgd, _adam))
    looped_s = (sgd_s / _SGD_OPERATORS + adam_s / _ADAM_OPERATORS) / 2
    foreach_s = (_line(_foreach, effort)[0] - _FOREACH_OTHERS * looped_s) / _FOREACH_OPERATORS
    foreach_s = np.maximum(LEAST_OVERHEAD_S, foreach_s)
    # A fused update has one operator besides, which counts the steps of all parameters.
    fused_s = np.maximum(LEAST_OVERHEAD_S, _line(_fused, effort)[0] - foreach_s)
    return {
        ("elementwise", "optimizer"): looped_s,
        ("foreach", "optimizer"): foreach_s,
        ("fused", "optimizer"): fused_s,
        ("step", "optimizer"): (sgd_step_s + adam_step_s) / 2,
    }


def _line(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], effort: Effort
) -> tuple[Figure, Figure]:
    """Return the seconds of an update per parameter, and what it takes besides."""
    few, many = (_update_s(make, count, effort) for count in (4, 40))
    each_s = (many - few) / 36
    return each_s, np.maximum(0.0, few - 4 * each_s)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def _foreach(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, foreach=True)


def _fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, fused=True)


def _update_s(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], count: int, effort: Effort
) -> Figure:
    """Return seconds of an update that comes, as in training, when the caches hold others' data.

    So they do of code: a pass through other operators comes before each update.
    """
    parameters = [nn.Parameter(torch.zeros(8, 8)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make(parameters)
    other, network = torch.zeros(4 << 20), convolutional_part()
    samples = []
    for _ in range(4 * effort.rounds + 2):
        other.add_(1.0)
        network(torch.ones(2, 3, 16, 16)).sum().backward()
        begin = time.perf_counter()
        optimizer.step()
        samples.append(time.perf_counter() - begin)
    return np.asarray(typical_by_round(samples[2:]))


def in_company(
    effort: Effort, rates: list[Rate], overheads: list[Overhead], *, threads: int, processes: int
) -> list[Rate]:
    """Return rates as operators reach them in a whole step, not in a chain of their like.

    Chains of equal operators find code and data in the caches. In a step each operator follows
    another one, called from other modules. So the steps of two small networks are timed, one of
    convolutions and one of the other classes: what they take beyond the overheads of their
    operators, over the work's predicted time, is the factor by which rates fall.
    """
    device = Device(
        name="",
        kind="cpu",
        cores=threads,
        memory_bytes=Quantity(value=1.0, source="datasheet"),
        rates=tuple(rates),
        overheads=tuple(overheads),
    )
    model = CostModel(
        device, threads=threads, processes=processes, step_bytes=0.0, precision="float32"
    )
    slower: dict[tuple[bool, str], float] = {}
    kernels = networks()
    rounds = _time_rounds("steps", [(kernel, SHORT) for kernel in kernels], effort)
    for kernel, times in zip(kernels, rounds, strict=True):
        for phase in PHASES:
            own = [
                (model.cost(operation), operation.count)
                for operation in operations_of(kernel)
                if operation.phase == phase
            ]
            overhead_s = sum(cost.overhead_s * count for cost, count in own)
            work_s = sum((cost.total_s - cost.overhead_s) * count for cost, count in own)
            factor = (float(times[phase][0]) - overhead_s) / max(work_s, 1e-9)
            is_image = kernel.operator == "convolution"
            slower[is_image, phase] = min(MOST_SLOWER, max(1.0, factor))
    return [
        _slowed(rate, slower.get((rate.operator in _OF_IMAGES, rate.phase), 1.0)) for rate in rates
    ]


MOST_SLOWER = 1.5  # beyond, something disturbed the steps
_OF_IMAGES = (*CONVOLUTIONS, "batch_norm", "group_norm", "pooling", "upsampling")


def _slowed(rate: Rate, factor: float) -> Rate:
    points = tuple(
        dataclasses.replace(
            point,
            rate_per_s=point.rate_per_s / factor,
            low_per_s=None if point.low_per_s is None else point.low_per_s / factor,
            high_per_s=None if point.high_per_s is None else point.high_per_s / factor,
        )
        for point in rate.points
    )
    return dataclasses.replace(rate, points=points)


def measure_memory(effort: Effort) -> MemoryRates:
    """Return bytes per second out of cache, and of memory that is touched for the first time."""
    count = 1 << 20  # 4 MiB each, 96 MiB in all: more than a CPU's cache
    pool = [torch.zeros(count) for _ in range(24)]
    samples = []
    end = time.perf_counter() + 2 * effort.budget_s * effort.rounds
    at = 0
    while at < len(pool) or time.perf_counter() < end:
        source, target = pool[at % 24], pool[(at + 12) % 24]
        begin = time.perf_counter()
        torch.add(source, 1.0, out=target)
        samples.append(time.perf_counter() - begin)
        at += 1
    fresh = 64 << 20
    moved_s = np.asarray(typical_by_round(samples))
    touched_s = np.asarray(typical_by_round(time_calls(lambda: touch(fresh), effort.budget_s)))
    return MemoryRates(
        bandwidth_bytes_per_s=probed(2 * 4 * count / moved_s),
        first_touch_bytes_per_s=probed(fresh / touched_s),
    )


def touch(size_bytes: int) -> None:
    """Write memory that comes straight from the system: the allocator may keep what is freed."""
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        torch.frombuffer(memory, dtype=torch.float32).fill_(1.0)


def overhead_records(costs: Costs, threads: int, processes: int) -> list[Overhead]:
    """Return the operators' overheads among `costs` as records."""
    return [
        Overhead(
            operator=operator,  # type: ignore[arg-type]  # classes of the kernels
            phase=phase,  # type: ignore[arg-type]
            threads=threads,
            processes=processes,
            seconds=probed(seconds),
        )
        for (operator, phase), seconds in costs.items()
        if operator != "step"
    ]


def framework_records(costs: Costs, threads: int, processes: int) -> list[FrameworkOverhead]:
    """Return what torch adds to a phase, among `costs`, as records."""
    return [
        FrameworkOverhead(
            framework="torch",
            what="phase",
            phase=phase,  # type: ignore[arg-type]
            threads=threads,
            processes=processes,
            seconds=probed(seconds),
        )
        for (operator, phase), seconds in costs.items()
        if operator == "step"
    ]
