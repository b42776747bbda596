"""Cuts a list of layers into stages, so that the slowest stage is as fast as possible.

The throughput of a pipeline is that of its slowest stage or link. A stage of layers i to j - 1
takes, for one microbatch on its device::

    (T[j] - T[i]) / speed + e x[i] + e x[j]

    T      running sum of the layers' forward and backward seconds
    x[i]   seconds of sending what crosses the cut before layer i; 0 before the first layer and
           after the last: latency + bytes / bandwidth
    e      share of a transfer that compute does not hide, 0 to 1

for it waits for activations over its first cut and for gradients over its last one. A tensor that
crosses a cut counts once, also one that skips the stage. The link across a cut is busy for bytes /
bandwidth in each direction, hidden or not. The stage needs::

    live (A[j] - A[i]) + P[j] - P[i] <= its bound

    A, P   running sums of activation and parameter bytes
    live   microbatches that are live at the stage under the order, see `live_microbatches`

Both are differences of a term in j and a term in i, so whether stages 0 to s can end before layer j
within t seconds each is one comparison per j::

    T[j] / speed + e x[j] - t  <=  max over i of  T[i] / speed - e x[i]

over those i at which stages 0 to s - 1 can end, and which keep the bound: a range that ends at
j - 1, and whose begin rises with j. Cuts whose link is busy for longer than t are left out. The
least t is found by halving the interval in which it lies until no float is between its ends. So the
partition is optimal for these costs, up to the rounding of a sum.

Cost: stages x layers x log(layers), some 50 times; half a second for 5,000 layers and 64 stages.
Source: the dynamic programming over cuts is that of PipeDream (Narayanan et al., SOSP 2019, section
3.1) without replicas; the search by feasibility that of chains-on-chains partitioning, Pinar and
Aykanat, Fast optimal load balancing algorithms for 1D partitioning, JPDC 64(8), 2004.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from paceline.core.machine import Link
    from paceline.schedules.pipeline.layers import LayerCosts

Scalar = TypeVar("Scalar", np.int64, np.float64)
_NEVER = -np.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePartition(Record):
    """Which layers each stage has.

    Attributes:
        cuts: first layer of each stage but the first, in rising order.
        stage_s: seconds of each stage for one microbatch, with its exposed transfers.
        link_s: seconds that the link across each cut is busy for one microbatch, per direction.
        stage_bytes: of each stage's parameters and live activations.
    """

    cuts: tuple[int, ...]
    stage_s: tuple[float, ...]
    link_s: tuple[float, ...]
    stage_bytes: tuple[int, ...]

    @property
    def slowest_s(self) -> float:
        """Seconds of the slowest stage or link for one microbatch."""
        return max(*self.stage_s, *self.link_s, 0.0)


def partition(
    costs: LayerCosts,
    stages: int,
    *,
    speeds: Sequence[float] = (),
    bound_bytes: Sequence[int] = (),
    live: Sequence[int] = (),
    link: Link | None = None,
    exposed: float = 1.0,
    layers_per_stage: Sequence[int] = (),
) -> StagePartition:
    """Return the cuts with which the slowest stage or link is fastest; among those, any.

    Args:
        costs: of the layers.
        stages: to cut them into, at least one layer each.
        speeds: of each stage's device, relative to that of the costs; empty: 1 each.
        bound_bytes: of each stage's parameters and activations; empty: no bound.
        live: microbatches that are live at each stage; empty: 1 each.
        link: between the ranks of neighbouring stages; None: transfers are free.
        exposed: share of a transfer that compute does not hide, 0 to 1.
        layers_per_stage: the user's own partition; it is only checked against the bound.

    Raises:
        UsageError: there are fewer layers than stages, or values for another number of stages.
        MemoryExceeded: no partition keeps the bound, or the given one does not; says by how much,
            and the smallest bound that would do.
    """
    problem = _Problem.of(costs, stages, speeds, live, _Transfers.of(costs, link, exposed))
    if len(bound_bytes) not in (0, stages):
        raise _count_error("bound_bytes", len(bound_bytes), stages)
    if layers_per_stage:
        given = problem.partition(_given_ends(costs.layers, stages, layers_per_stage))
        _check_bound(given, bound_bytes)
        return given
    windows = problem.windows(bound_bytes)
    found = problem.cut(math.inf, windows)
    if found is None:
        raise _too_small(problem, bound_bytes)
    return _fastest(problem, windows, found)


def _fastest(
    problem: _Problem, windows: Sequence[_Window], found: StagePartition
) -> StagePartition:
    """Return a partition whose slowest stage is fastest; `found` is any that keeps the bound."""
    low_s, high_s = 0.0, found.slowest_s
    while low_s < (middle_s := (low_s + high_s) / 2) < high_s:
        better = problem.cut(middle_s, windows)
        if better is None:
            low_s = middle_s
        else:
            high_s = min(middle_s, better.slowest_s)
            found = min(found, better, key=lambda candidate: candidate.slowest_s)
    return found


class _Window(NamedTuple):
    """Where a stage that ends before layer j may begin: at the layers from `first[j]` to j - 1.

    The maximum over such a range is that over two ranges of 2 ** `level[j]` layers, which begin at
    `first[j]` and `second[j]`. Where `is_empty[j]` there is no such layer.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    level: NDArray[np.int64]
    is_empty: NDArray[np.bool_]

    @classmethod
    def of(cls, first: NDArray[np.int64]) -> _Window:
        ends = np.arange(len(first))
        is_empty = first >= ends
        first = np.where(is_empty, 0, first)
        level = np.frexp(np.maximum(ends - first, 1))[1].astype(np.int64) - 1
        second = np.maximum(ends - (1 << level), 0)
        return cls(first, second, level, is_empty)

    def maxima(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the maximum of `values` over each range; -inf where that is empty."""
        table = [values]  # row k: maxima over 2 ** k values
        for level in range(int(self.level.max())):
            last, step = table[-1], 1 << level
            following = last.copy()
            np.maximum(last[:-step], last[step:], out=following[:-step])
            table.append(following)
        rows = np.array(table)
        found = np.maximum(rows[self.level, self.first], rows[self.level, self.second])
        found[self.is_empty] = _NEVER
        return found


class _Transfers(NamedTuple):
    """What the cut before each layer costs, for one microbatch; shape (layers + 1,) each.

    Attributes:
        exposed_s: e x of the module's docstring.
        link_s: seconds that the link is busy in each direction.
    """

    exposed_s: NDArray[np.float64]
    link_s: NDArray[np.float64]

    @classmethod
    def of(cls, costs: LayerCosts, link: Link | None, exposed: float) -> _Transfers:
        if not 0 <= exposed <= 1:
            raise UsageError(f"exposed is {exposed}", fix="Give a share from 0 to 1")
        if link is None:
            return cls(np.zeros(costs.layers + 1), np.zeros(costs.layers + 1))
        change = np.zeros(costs.layers + 1, np.int64)
        for source, destinations, size in costs.edges:
            change[source + 1] += size
            change[max(destinations) + 1] -= size
        crossing = np.cumsum(change)
        link_s = crossing / link.bandwidth_bytes_per_s.value
        latency_s = np.where(crossing > 0, link.latency_s.value, 0.0)
        return cls(exposed * (latency_s + link_s), link_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Problem:
    """Running sums over the layers, shape (layers + 1,), and what is known of the stages.

    Attributes:
        seconds: T of the module's docstring.
        transfers: over the cut before each layer.
        stage_bytes: of each stage: live A + P.
        speeds: of each stage's device.
    """

    seconds: NDArray[np.float64]
    transfers: _Transfers
    stage_bytes: list[NDArray[np.int64]]
    speeds: list[float]

    @classmethod
    def of(
        cls,
        costs: LayerCosts,
        stages: int,
        speeds: Sequence[float],
        live: Sequence[int],
        transfers: _Transfers,
    ) -> _Problem:
        if not 1 <= stages <= costs.layers:
            raise UsageError(
                f"{costs.layers} layers cannot be cut into {stages} stages",
                fix=f"Ask for 1 to {costs.layers} stages",
            )
        for name, values in (("speeds", speeds), ("live", live)):
            if len(values) not in (0, stages):
                raise _count_error(name, len(values), stages)
            if any(value <= 0 for value in values):
                raise UsageError(f"{name} has a value of 0 or less", fix="Give more than 0")
        activations = _sums(costs.activation_bytes, np.int64)
        parameters = _sums(costs.parameter_bytes, np.int64)
        seconds = np.add(costs.forward_s, costs.backward_s)
        return cls(
            seconds=_sums(seconds, np.float64),
            transfers=transfers,
            stage_bytes=[count * activations + parameters for count in live or (1,) * stages],
            speeds=list(speeds) or [1.0] * stages,
        )

    @property
    def stages(self) -> int:
        return len(self.speeds)

    @property
    def layers(self) -> int:
        return len(self.seconds) - 1

    def windows(self, bound_bytes: Sequence[int]) -> list[_Window]:
        """Return where each stage may begin, given where it ends, so that it keeps its bound."""
        if not bound_bytes:
            return [_Window.of(np.zeros(self.layers + 1, np.int64))] * self.stages
        return [
            _Window.of(np.searchsorted(needed, needed - bound))
            for needed, bound in zip(self.stage_bytes, bound_bytes, strict=True)
        ]

    def cut(self, limit_s: float, windows: Sequence[_Window]) -> StagePartition | None:
        """Return a partition whose stages take at most `limit_s` each; None if there is none."""
        exposed_s, link_s = self.transfers
        can_end = np.arange(self.layers + 1) == 0  # the stages so far before that layer
        gains = []
        for speed, window in zip(self.speeds, windows, strict=True):
            gain = np.where(can_end, self.seconds / speed - exposed_s, _NEVER)
            gains.append(gain)
            best = window.maxima(gain)
            can_end = best >= self.seconds / speed + exposed_s - limit_s
            can_end &= (best > _NEVER) & (link_s <= limit_s)
        if not can_end[-1]:
            return None
        ends = [self.layers]
        for gain, window in zip(reversed(gains), reversed(windows), strict=True):
            first = int(window.first[ends[-1]])
            ends.append(first + int(gain[first : ends[-1]].argmax()))
        return self.partition(ends[::-1])

    def partition(self, ends: Sequence[int]) -> StagePartition:
        """Return the partition whose stage s has the layers from ends[s] to ends[s + 1] - 1."""
        at = np.asarray(ends)
        compute_s = np.diff(self.seconds[at]) / self.speeds
        exposed_s = self.transfers.exposed_s[at]
        ranges = zip(self.stage_bytes, itertools.pairwise(ends), strict=True)
        return StagePartition(
            cuts=tuple(ends[1:-1]),
            stage_s=tuple((compute_s + exposed_s[:-1] + exposed_s[1:]).tolist()),
            link_s=tuple(self.transfers.link_s[at[1:-1]].tolist()),
            stage_bytes=tuple(int(needed[end] - needed[begin]) for needed, (begin, end) in ranges),
        )


def _sums(values: ArrayLike, dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return the running sums of `values`, from 0."""
    array = np.asarray(values, dtype)
    return np.concatenate([np.zeros(1, dtype), np.cumsum(array)])


def _given_ends(layers: int, stages: int, layers_per_stage: Sequence[int]) -> list[int]:
    """Return where the user's stages end, from 0."""
    if len(layers_per_stage) != stages:
        raise _count_error("layers_per_stage", len(layers_per_stage), stages)
    if min(layers_per_stage) < 1 or sum(layers_per_stage) != layers:
        raise UsageError(
            f"layers_per_stage {tuple(layers_per_stage)} does not divide {layers} layers",
            fix=f"Give {stages} numbers of at least 1 whose sum is {layers}",
        )
    return [0, *itertools.accumulate(layers_per_stage)]


def _count_error(name: str, count: int, stages: int) -> UsageError:
    return UsageError(
        f"{name} has {count} values for {stages} stages", fix="Give a value for each stage"
    )


def _check_bound(given: StagePartition, bound_bytes: Sequence[int]) -> None:
    """Refuse the user's partition if a stage does not keep its bound."""
    for stage, (needed, bound) in enumerate(zip(given.stage_bytes, bound_bytes, strict=False)):
        if needed > bound:
            raise MemoryExceeded(
                f"stage {stage} of the given partition needs {needed:,} bytes, {needed - bound:,} "
                f"more than its bound of {bound:,}",
                fix=f"Give the stage fewer layers, or a bound of {needed:,} bytes",
            )


def _too_small(problem: _Problem, bound_bytes: Sequence[int]) -> MemoryExceeded:
    """Return the error of bounds that no partition keeps."""
    low, high = 0, max(int(needed[-1]) for needed in problem.stage_bytes)
    while high - low > 1:  # low: too little to add to each bound; high: enough
        middle = (low + high) // 2
        raised = [bound + middle for bound in bound_bytes]
        low, high = (
            (low, middle) if problem.cut(math.inf, problem.windows(raised)) else (middle, high)
        )
    raised = [bound + high for bound in bound_bytes]
    smallest = (
        f"of {raised[0]:,} bytes for each stage"
        if len(set(raised)) == 1
        else "by stage of " + ", ".join(f"{bound:,}" for bound in raised) + " bytes"
    )
    return MemoryExceeded(
        f"no partition of {problem.layers} layers into {problem.stages} stages keeps the memory "
        "bound",
        why=f"the best one exceeds it by {high:,} bytes",
        fix=f"Give a bound {smallest}, more stages, smaller microbatches, or an order with fewer "
        "live ones",
    )
