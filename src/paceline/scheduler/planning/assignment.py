"""Device types and numbers of devices for jobs: prices that clear the market, then the rest.

Each device type has a price per device. A job takes the option whose value exceeds the price of its
devices by most, or none. The price of a type is the lowest at which no more of its devices are
wanted than exist, found by bisection, one type after the other until they settle. So a fast device
goes to the job that gains most by it, not to the first in the queue; and a job grows until the gain
of its next device is below what the device is worth to others.

Jobs whose values are equal want devices at the same price, all or none of them. What prices leave
free is given out one step at a time, to the best gain per device.
Source: the Lagrangian dual of the multiple-choice knapsack problem; H. Everett, Generalized
Lagrange Multiplier Method, Operations Research 11(3), 1963.
Cost: O(jobs x options) for each step of bisection, about 100 steps per device type.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from paceline.scheduler.planning.candidates import Candidate

_SWEEPS, _STEPS = 3, 24


@dataclass(frozen=True, slots=True)
class Assignment:
    """Which option each candidate takes.

    Attributes:
        chosen: index of the option, or None, for each candidate.
        price: value per second of a device, by type.
        free: devices that nobody took, by type.
    """

    chosen: list[int | None]
    price: dict[str, float]
    free: dict[str, int]


def assign(candidates: Sequence[Candidate], capacity: Mapping[str, int]) -> Assignment:
    """Return an option for as many candidates as it pays for, within the capacity.

    Args:
        candidates: with their values.
        capacity: devices by type.
    """
    kinds = list(capacity)
    market = _Market(candidates, kinds, [capacity[kind] for kind in kinds])
    prices = market.clear()
    free = dict(capacity)
    chosen: list[int | None] = [None] * len(candidates)
    # The price counts demand in one go; taking in the order of value keeps within the capacity.
    wanted = market.choices(prices)
    for index in market.by_value():
        option = wanted[index]
        if option >= 0 and _fits(candidates[index], option, free):
            _take(candidates[index], option, free)
            chosen[index] = option
    _give_out(candidates, chosen, free)
    return Assignment(chosen, dict(zip(kinds, prices.tolist(), strict=True)), free)


class _Market:
    """Options of all candidates as arrays, shape (candidates, options)."""

    def __init__(
        self, candidates: Sequence[Candidate], kinds: list[str], capacity: list[int]
    ) -> None:
        width = max((len(c.options) for c in candidates), default=1)
        shape = (len(candidates), width)
        self.values = np.full(shape, -1.0)
        self.devices = np.ones(shape)
        self.kinds = np.zeros(shape, int)
        self.capacity = capacity
        index_of = {kind: index for index, kind in enumerate(kinds)}
        for row, candidate in enumerate(candidates):
            for column, option in enumerate(candidate.options):
                if option.devices > capacity[index_of[option.device_type]]:
                    continue  # wanting what does not exist would only raise the price
                self.values[row, column] = candidate.values[column]
                self.devices[row, column] = option.devices
                self.kinds[row, column] = index_of[option.device_type]

    def clear(self) -> NDArray[np.float64]:
        """Return prices at which no type is wanted more than it exists."""
        prices = np.zeros(len(self.capacity))
        if not len(self.values):
            return prices
        top = float((self.values / self.devices).max()) * 1.001
        for _ in range(_SWEEPS if len(self.capacity) > 1 else 1):
            for kind in range(len(self.capacity)):
                prices[kind] = 0.0
                if self._wanted(prices, kind) <= self.capacity[kind]:
                    continue
                low, high = 0.0, top
                for _ in range(_STEPS):
                    prices[kind] = (low + high) / 2
                    if self._wanted(prices, kind) > self.capacity[kind]:
                        low = prices[kind]
                    else:
                        high = prices[kind]
                prices[kind] = high
        return prices

    def by_value(self) -> list[int]:
        """Return the candidates, the most valuable per device first."""
        if not len(self.values):
            return []
        order: list[int] = np.argsort(
            -(self.values / self.devices).max(axis=1), kind="stable"
        ).tolist()
        return order

    def choices(self, prices: NDArray[np.float64]) -> list[int]:
        """Return, for each candidate, the option that gains most at these prices, or -1."""
        if not len(self.values):
            return []
        gain = self.values - self.devices * prices[self.kinds]
        best: list[int] = np.where(gain.max(axis=1) > 0, gain.argmax(axis=1), -1).tolist()
        return best

    def _wanted(self, prices: NDArray[np.float64], kind: int) -> float:
        gain = self.values - self.devices * prices[self.kinds]
        best = gain.argmax(axis=1)
        rows = np.arange(len(best))
        taken = (gain[rows, best] > 0) & (self.kinds[rows, best] == kind)
        return float(self.devices[rows, best][taken].sum())


def _fits(candidate: Candidate, option: int, free: Mapping[str, int]) -> bool:
    return candidate.options[option].devices <= free[candidate.options[option].device_type]


def _take(candidate: Candidate, option: int, free: dict[str, int]) -> None:
    free[candidate.options[option].device_type] -= candidate.options[option].devices


def _give_out(
    candidates: Sequence[Candidate], chosen: list[int | None], free: dict[str, int]
) -> None:
    """Give out what is left, the best gain per device first."""
    heap = [
        step for index in range(len(candidates)) if (step := _step(candidates, chosen, index, free))
    ]
    heapq.heapify(heap)
    while heap and any(free.values()):
        step = heapq.heappop(heap)
        index = step[1]
        now = _step(candidates, chosen, index, free)
        if now is None:
            continue
        if now != step and heap and now > heap[0]:
            heapq.heappush(heap, now)  # less fits by now: its turn comes later
            continue
        option = now[2]
        before = chosen[index]
        if before is not None:
            taken = candidates[index].options[before]
            free[taken.device_type] += taken.devices
        _take(candidates[index], option, free)
        chosen[index] = option
        if (following := _step(candidates, chosen, index, free)) is not None:
            heapq.heappush(heap, following)


def _step(
    candidates: Sequence[Candidate],
    chosen: list[int | None],
    index: int,
    free: Mapping[str, int],
) -> tuple[float, int, int] | None:
    """Return the best next step of a candidate: minus its gain per device, candidate, option."""
    candidate = candidates[index]
    before = chosen[index]
    value = 0.0 if before is None else candidate.values[before]
    held = None if before is None else candidate.options[before]
    best: tuple[float, int, int] | None = None
    for number, option in enumerate(candidate.options):
        gain = candidate.values[number] - value
        if number == before or gain <= 0:
            continue
        own = held.devices if held and held.device_type == option.device_type else 0
        needed = option.devices - own
        if needed > free[option.device_type]:
            continue
        step = (-gain / max(needed, 0.5), index, number)
        if best is None or step < best:
            best = step
    return best
