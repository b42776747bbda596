"""What one operator call costs on a machine: its overhead, and its work over the measured rate.

::

    seconds(call) = overhead(class, phase)
                    + max(flops / flops_rate(class, phase) + bytes / bytes_rate(class, phase),
                          bytes / bandwidth    if the step exceeds the cache)

Most classes have one of the two rates; convolutions have both: they rearrange their tensors.

Limits: a call with no work costs its overhead, which is what bounds small models; a large one costs
work / rate, the roofline with the efficiency that this class really reached. On a machine that is
described by datasheets a curve is one point, the peak, and overheads are 0.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.machine import Device, Overhead, Point, Rate
    from paceline.core.workload import Operation


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Seconds of a call, by what it was bound by."""

    overhead_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the call."""
        return self.overhead_s + self.compute_s + self.memory_s

    def __add__(self, other: Price) -> Price:
        return Price(
            overhead_s=self.overhead_s + other.overhead_s,
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
        )

    def times(self, count: float) -> Price:
        """Return the price of `count` calls."""
        return Price(
            overhead_s=self.overhead_s * count,
            compute_s=self.compute_s * count,
            memory_s=self.memory_s * count,
        )


class PriceList:
    """Prices on one device with so many threads per process and so many busy processes."""

    def __init__(
        self, device: Device, *, threads: int, processes: int, step_bytes: float, precision: str
    ) -> None:
        """Make the list.

        Args:
            device: that computes.
            threads: of each process.
            processes: that compute at once on the node.
            step_bytes: that a step touches; above the cache's size, memory's bandwidth holds.
            precision: in which float32 operators run.

        Raises:
            UsageError: the device has no rates.
        """
        if not device.rates:
            raise UsageError(
                "the machine has no compute rates",
                where=device.name,
                fix="Run `paceline probe` where torch is installed",
            )
        self._device = device
        self._threads = threads
        self._processes = processes
        self._precision = precision
        self._rates: dict[tuple[str, str, str], list[tuple[Rate, float]]] = {}
        self._overheads: dict[tuple[str, str], float] = {}
        shared = processes > 1 and device.bandwidth_shared_bytes_per_s
        bandwidth = shared or device.bandwidth_bytes_per_s
        cache = device.cache_bytes.value / processes if device.cache_bytes else 0.0
        self._bandwidth = bandwidth.value if bandwidth and step_bytes > cache else math.inf

    def price(self, operation: Operation) -> Price:
        """Return the price of one call."""
        overhead_s = self.overhead_s(operation.operator, operation.phase)
        if operation.operator == "view":
            return Price(overhead_s=overhead_s)
        dtype = self._precision if operation.dtype == "float32" else operation.dtype
        compute_s = memory_s = 0.0
        for rate, scale in self._rates_of(operation.operator, operation.phase, dtype):
            work = operation.flops if rate.unit == "flops" else operation.bytes
            work_s = work / (scale * rate_at(rate.points, work)) if work else 0.0
            if rate.unit == "flops":
                compute_s += work_s
            else:
                memory_s += work_s
        beyond_cache_s = operation.bytes / self._bandwidth
        if beyond_cache_s > compute_s + memory_s:
            return Price(overhead_s=overhead_s, memory_s=beyond_cache_s)
        return Price(overhead_s=overhead_s, compute_s=compute_s, memory_s=memory_s)

    def overhead_s(self, operator: str, phase: str) -> float:
        """Return seconds of dispatching one operator; 0 if the machine does not say."""
        key = (operator, phase)
        if key not in self._overheads:
            self._overheads[key] = self._find_overhead(operator, phase)
        return self._overheads[key]

    def _find_overhead(self, operator: str, phase: str) -> float:
        known = self._device.overheads
        same = [one for one in known if (one.operator, one.phase) == (operator, phase)]
        if not same and operator not in ("step", "ddp"):
            # No figure of its own (a rare class in this phase): what an elementwise one costs.
            same = [one for one in known if (one.operator, one.phase) == ("elementwise", phase)]
        return min(same, key=self._distance).seconds.value if same else 0.0

    def _distance(self, one: Rate | Overhead) -> tuple[int, float]:
        """Return how far a measurement is from what is asked: processes first, then threads."""
        return abs(one.processes - self._processes), abs(math.log(one.threads / self._threads))

    def _rates_of(self, operator: str, phase: str, dtype: str) -> list[tuple[Rate, float]]:
        """Return the nearest curve of each unit, with its factor for threads not measured."""
        key = (operator, phase, dtype)
        if key not in self._rates:
            self._rates[key] = self._find_rates(operator, phase, dtype)
        return self._rates[key]

    def _find_rates(self, operator: str, phase: str, dtype: str) -> list[tuple[Rate, float]]:
        def distance(one: Rate) -> tuple[bool, bool, bool, bool, int, float]:
            return (
                one.operator != operator,
                one.operator != "elementwise",
                one.dtype != dtype,
                one.phase != phase,
                *self._distance(one),
            )

        nearest = min(distance(one) for one in self._device.rates)
        found = {one.unit: one for one in self._device.rates if distance(one) == nearest}
        # Rates grow at most with the threads; beyond the cores that were measured, not at all.
        threads = min(self._threads, self._device.cores)
        return [(one, threads / one.threads) for one in found.values()]


def rate_at(points: tuple[Point, ...], work: float) -> float:
    """Return the rate at `work`: between points along a power law, beyond them the nearest's."""
    if work <= points[0].work:
        return points[0].rate_per_s
    for low, high in itertools.pairwise(points):
        if work <= high.work:
            share = math.log(work / low.work) / math.log(high.work / low.work)
            return float(low.rate_per_s * (high.rate_per_s / low.rate_per_s) ** share)
    return points[-1].rate_per_s
