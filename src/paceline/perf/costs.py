"""The cost of one operator call on a machine: its overhead plus its work over the measured rate.

::

    seconds(call) = overhead(class, phase)
                    + max(flops / flops_rate(class, phase) + bytes / bytes_rate(class, phase),
                          bytes / bandwidth    if the step exceeds the cache)

Most classes have one of the two rates; convolutions have both: they rearrange their tensors.

Limits: a call without work costs its overhead, which dominates in small models; a large call costs
work / rate, the roofline with the measured efficiency of its class. On a machine that is described
by datasheets a curve is one point, the peak, and overheads are 0.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.plan import is_chosen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.machine import (
        Device,
        FrameworkOverhead,
        Overhead,
        Point,
        Quantity,
        Rate,
    )
    from paceline.core.plan import CollectivesChoice
    from paceline.core.workload import Operation


# Whose figures a class takes where the machine has none of its own, as of a probe of before.
NEAREST_CLASS = {
    "convolution_1d": "convolution",
    "depthwise": "convolution",
    "transposed": "convolution",
    "recurrent": "matmul",
    "group_norm": "layer_norm",
    "upsampling": "pooling",
    "embedding_bag": "embedding",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCost:
    """Seconds of operator calls, by what bounds them."""

    overhead_s: float = 0.0
    compute_s: float = 0.0
    memory_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds in all."""
        return self.overhead_s + self.compute_s + self.memory_s

    def __add__(self, other: OperatorCost) -> OperatorCost:
        return OperatorCost(
            overhead_s=self.overhead_s + other.overhead_s,
            compute_s=self.compute_s + other.compute_s,
            memory_s=self.memory_s + other.memory_s,
        )

    def times(self, count: float) -> OperatorCost:
        """Return the cost of `count` calls."""
        return OperatorCost(
            overhead_s=self.overhead_s * count,
            compute_s=self.compute_s * count,
            memory_s=self.memory_s * count,
        )


class LayerCost:
    """The cost of a layer's operations.

    Attributes:
        phases: by phase.
        classes: seconds by class of operators.
        assumed: calls and seconds of operators whose rate was not measured, by name.
    """

    __slots__ = ("assumed", "classes", "phases")

    def __init__(self, operations: tuple[Operation, ...], model: CostModel) -> None:
        self.phases: dict[str, OperatorCost] = {}
        self.classes: dict[str, float] = {}
        self.assumed: dict[str, tuple[int, float]] = {}
        for operation in operations:
            cost = model.cost(operation).times(operation.count)
            self.phases[operation.phase] = self.phases.get(operation.phase, OperatorCost()) + cost
            before_s = self.classes.get(operation.operator, 0.0)
            self.classes[operation.operator] = before_s + cost.total_s
            if operation.assumed:
                calls, seconds = self.assumed.get(operation.assumed, (0, 0.0))
                self.assumed[operation.assumed] = (calls + operation.count, seconds + cost.total_s)


class CostModel:
    """Costs on one device for a number of threads per process and of busy processes."""

    def __init__(
        self,
        device: Device,
        *,
        threads: int,
        processes: int,
        step_bytes: float,
        precision: str,
        collectives: CollectivesChoice = "torch",
    ) -> None:
        """Make the model.

        Args:
            device: the device that computes.
            threads: compute threads of each process.
            processes: processes that compute at the same time on the node.
            step_bytes: bytes that a step touches; if they exceed the cache, memory bandwidth bounds
                the operators.
            precision: the dtype in which float32 operators run.
            collectives: over which DistributedDataParallel reduces.

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
        self._collectives = collectives
        self._rates: dict[tuple[str, str, str], list[tuple[Rate, float]]] = {}
        self._overheads: dict[tuple[str, str], float] = {}
        self._by_content: dict[tuple[Operation, ...], LayerCost] = {}
        self._by_identity: dict[int, tuple[tuple[Operation, ...], LayerCost]] = {}
        shared = processes > 1 and device.bandwidth_shared_bytes_per_s
        bandwidth = shared or device.bandwidth_bytes_per_s
        cache = device.cache_bytes.value / processes if device.cache_bytes else 0.0
        self._bandwidth = bandwidth.value if bandwidth and step_bytes > cache else math.inf

    def layer(self, operations: tuple[Operation, ...]) -> LayerCost:
        """Return the cost of a layer's operations; of equal layers it is computed once."""
        # Hashing the content takes a while: the same tuple is found by its identity, while it is
        # kept here and so cannot be another one's.
        known = self._by_identity.get(id(operations))
        if known is not None:
            return known[1]
        cost = self._by_content.get(operations)
        if cost is None:
            cost = self._by_content[operations] = LayerCost(operations, self)
        self._by_identity[id(operations)] = (operations, cost)
        return cost

    def cost(self, operation: Operation) -> OperatorCost:
        """Return the cost of one call."""
        overhead_s = self.overhead_s(operation.operator, operation.phase)
        if operation.operator == "view":
            return OperatorCost(overhead_s=overhead_s)
        compute_s = memory_s = 0.0
        for rate, scale in self.rates_of(operation):
            work = operation.flops if rate.unit == "flops" else operation.bytes
            work_s = work / (scale * rate_at(rate.points, work)) if work else 0.0
            if rate.unit == "flops":
                compute_s += work_s
            else:
                memory_s += work_s
        beyond_cache_s = operation.bytes / self._bandwidth
        if beyond_cache_s > compute_s + memory_s:
            return OperatorCost(overhead_s=overhead_s, memory_s=beyond_cache_s)
        return OperatorCost(overhead_s=overhead_s, compute_s=compute_s, memory_s=memory_s)

    def overhead_s(self, operator: str, phase: str) -> float:
        """Return seconds of dispatching one operator; 0 if the machine does not say."""
        key = (operator, phase)
        if key not in self._overheads:
            overhead = self.overhead_of(operator, phase)
            self._overheads[key] = overhead.seconds.value if overhead else 0.0
        return self._overheads[key]

    def overhead_of(self, operator: str, phase: str) -> Overhead | None:
        """Return the nearest measured overhead of a class in a phase, if there is one.

        A class without an overhead of its own in this phase has that of elementwise operators.
        """
        for name in (operator, NEAREST_CLASS.get(operator, operator), "elementwise"):
            same = [
                overhead
                for overhead in self._device.overheads
                if (overhead.operator, overhead.phase) == (name, phase)
            ]
            if same:
                return min(same, key=self._distance)
        return None

    def framework_overhead(self, framework: str, what: str, phase: str) -> FrameworkOverhead | None:
        """Return the nearest measured overhead of a framework in a phase, if there is one."""
        same = [
            overhead
            for overhead in self._device.framework_overheads
            if (overhead.framework, overhead.what, overhead.phase) == (framework, what, phase)
            and (framework != "ddp" or is_chosen(overhead.backend, self._collectives))
        ]
        return min(same, key=self._distance, default=None)

    def framework_overhead_s(self, framework: str, what: str, phase: str) -> float:
        """Return the value of a `FrameworkOverhead`, whose docstring lists what each `what` means.

        The value is in seconds, or in seconds per byte; 0 if the machine has none.
        """
        overhead = self.framework_overhead(framework, what, phase)
        quantity: Quantity | None = None
        if overhead is not None:
            quantity = overhead.seconds or overhead.seconds_per_byte
        return quantity.value if quantity else 0.0

    def rates_of(self, operation: Operation) -> list[tuple[Rate, float]]:
        """Return, for each unit, the nearest curve and its factor.

        The factor scales the curve to this model's thread count.
        """
        dtype = self._precision if operation.dtype == "float32" else operation.dtype
        key = (operation.operator, operation.phase, dtype)
        if key not in self._rates:
            self._rates[key] = self._find_rates(*key)
        return self._rates[key]

    def _distance(self, measured: Rate | Overhead | FrameworkOverhead) -> tuple[int, float]:
        """Return how far a measurement's processes, then threads, are from this model's."""
        return (
            abs(measured.processes - self._processes),
            abs(math.log(measured.threads / self._threads)),
        )

    def _find_rates(self, operator: str, phase: str, dtype: str) -> list[tuple[Rate, float]]:
        def distance(rate: Rate) -> tuple[bool, bool, bool, bool, bool, bool, int, float]:
            return (
                rate.operator != operator,
                rate.operator != NEAREST_CLASS.get(operator, operator),
                rate.operator != "elementwise",
                rate.dtype != dtype,
                rate.phase != phase,
                # a rate fitted by calibration to optimizer updates holds only for them: for other
                # phases take it last
                rate.phase == "optimizer",
                *self._distance(rate),
            )

        nearest = min(distance(rate) for rate in self._device.rates)
        chosen = {rate.unit: rate for rate in self._device.rates if distance(rate) == nearest}
        # Rates grow at most with the threads; beyond the cores that were measured, not at all.
        threads = min(self._threads, self._device.cores)
        return [(rate, threads / rate.threads) for rate in chosen.values()]


def total_cost(costs: Iterable[OperatorCost]) -> OperatorCost:
    """Return the sum of costs."""
    return sum(costs, OperatorCost())


def rate_at(points: tuple[Point, ...], work: float) -> float:
    """Return the rate at `work`: a power law between points, constant extrapolation beyond."""
    if work <= points[0].work:
        return points[0].rate_per_s
    for low, high in itertools.pairwise(points):
        if work <= high.work:
            share = math.log(work / low.work) / math.log(high.work / low.work)
            return float(low.rate_per_s * (high.rate_per_s / low.rate_per_s) ** share)
    return points[-1].rate_per_s
