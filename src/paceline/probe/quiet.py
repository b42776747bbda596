"""Measures again what other processes disturbed, and says what stayed disturbed. No torch.

A measurement is taken in parts: a round of all kernels, the optimizer, the collectives. Beside each
part the CPU time of other processes is counted. A part that met more than `QUIET_CORES` of it is
measured again while there is time left for repetitions, and the least disturbed attempt counts. So
is a set of rounds of which no two agree. What stayed disturbed becomes a Disturbance, which the
Machine keeps and `paceline plan` tells.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from paceline.core.foreign_cpu import cpu_use
from paceline.core.machine import Disturbance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.foreign_cpu import CpuUse
    from paceline.core.machine import Rate

T = TypeVar("T")

# Other processes may use so much of a core: on an idle node they use less than 0.05, and a part of
# 0.2 s is known to 0.1. One process that computes uses 1.
QUIET_CORES = 0.2
# Rounds agree if the two fastest differ by no more than this factor.
AGREEMENT = 1.25
_BUSY = "other processes used {:.2f} cores"
_UNEQUAL = "the two fastest rounds differ by a factor of {:.2f}"


class QuietParts:
    """Measures parts, again if need be, and remembers what disturbed them.

    Ranks that measure together decide together: `combine` sums values over them.
    """

    def __init__(
        self,
        *,
        repeat_s: float,
        combine: Callable[[Sequence[float]], Sequence[float]] = lambda values: values,
        leads: bool = True,
        own_cores: bool = True,
        read: Callable[[], CpuUse | None] = cpu_use,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with nothing measured.

        Args:
            repeat_s: seconds that all repetitions together may take.
            combine: sums each value over the ranks that measure together.
            leads: whether this rank's clock decides for all ranks.
            own_cores: whether this rank is bound to cores that the other ranks do not use.
            read: returns the CPU time until now.
            now_s: returns the seconds of a clock.
        """
        self._left_s = repeat_s
        self._combine = combine
        self._leads = leads
        self._counts_cores = own_cores or leads
        self._read = read
        self._now_s = now_s
        self._foreign: dict[str, list[float]] = {}
        self._disagreement: dict[str, float] = {}
        self._repeats: dict[str, int] = {}
        self._repeats_s = 0.0
        self._repeat_reasons: dict[str, float] = {}  # the worst value of each

    def measure(self, name: str, function: Callable[[], T]) -> T:
        """Return what `function` measures in its least disturbed call.

        Args:
            name: of the part; if parts of one name are measured several times, the best counts.
            function: called once or more.
        """
        best, best_cores, took_s = self._attempt(function)
        while best_cores > QUIET_CORES and self._may_repeat(took_s):
            value, cores, took_s = self._repeat(name, function, _BUSY, best_cores)
            if cores < best_cores:
                best, best_cores = value, cores
        self._foreign.setdefault(name, []).append(best_cores)
        return best

    def measure_rounds(
        self,
        name: str,
        function: Callable[[], T],
        count: int,
        disagreement: Callable[[list[T]], float],
    ) -> list[T]:
        """Return what `count` rounds measured, and more if no two of them agree.

        Args:
            name: of the part.
            function: measures one round.
            count: of rounds, at least.
            disagreement: returns the factor by which the two fastest rounds differ.
        """
        begin_s = self._now_s()
        rounds = [self.measure(name, function) for _ in range(count)]
        took_s = (self._now_s() - begin_s) / count
        factor = self._agreed(disagreement(rounds))
        while factor > AGREEMENT and self._may_repeat(took_s):
            value, cores, took_s = self._repeat(name, function, _UNEQUAL, factor)
            rounds.append(value)
            self._foreign[name].append(cores)
            factor = self._agreed(disagreement(rounds))
        self._disagreement[name] = factor
        return rounds

    def disturbances(self, where: str) -> tuple[Disturbance, ...]:
        """Return what stayed disturbed, once for each part.

        Args:
            where: with what was measured, for example ``2 threads alone``.
        """
        found = []
        for name, attempts in self._foreign.items():
            cores, factor = min(attempts), self._disagreement.get(name, 1.0)
            why = []
            if cores > QUIET_CORES:
                why.append(_BUSY.format(cores))
            if factor > AGREEMENT:
                why.append(_UNEQUAL.format(factor))
            if why:
                found.append(
                    Disturbance(where=where, part=name, foreign_cores=cores, why=" and ".join(why))
                )
        return tuple(found)

    def repetitions(self, where: str) -> str:
        """Return in words what was measured again, and why; empty if nothing was.

        Args:
            where: as for `disturbances`.
        """
        if not self._repeats:
            return ""
        parts = ", ".join(
            f"{name} {'once' if count == 1 else f'{count} times'}"
            for name, count in self._repeats.items()
        )
        why = " and ".join(text.format(worst) for text, worst in self._repeat_reasons.items())
        return f"measured again, {where}: {parts} ({self._repeats_s:.1f} s more), as {why}"

    def _attempt(self, function: Callable[[], T]) -> tuple[T, float, float]:
        """Return what `function` measures, the cores that others used, and the seconds it took."""
        begin_s = self._now_s()
        begin = self._read()
        value = function()
        end = self._read()
        took_s = self._now_s() - begin_s
        if begin is None or end is None:  # the kernel does not say: nothing is known to disturb
            return value, 0.0, took_s
        busy_s, own_s, span_s = self._combine(
            (
                (end.busy_s - begin.busy_s) * self._counts_cores,
                end.own_s - begin.own_s,
                (end.at_s - begin.at_s) * self._leads,
            )
        )
        return value, max(0.0, busy_s - own_s) / max(span_s, 1e-9), took_s

    def _repeat(
        self, name: str, function: Callable[[], T], reason: str, value_of_reason: float
    ) -> tuple[T, float, float]:
        value, cores, took_s = self._attempt(function)
        self._left_s -= took_s
        self._repeats_s += took_s
        self._repeats[name] = self._repeats.get(name, 0) + 1
        worst = max(value_of_reason, self._repeat_reasons.get(reason, 0.0))
        self._repeat_reasons[reason] = worst
        return value, cores, took_s

    def _may_repeat(self, took_s: float) -> bool:
        """Return whether there is time for what took so long before."""
        return self._agreed(float(took_s <= self._left_s)) > 0

    def _agreed(self, value: float) -> float:
        """Return the leading rank's value on every rank."""
        (agreed,) = self._combine((value * self._leads,))
        return agreed


# Classes whose kernels use all threads, so that more threads are never slower.
_PARALLEL = ("matmul", "elementwise", "transcendental", "batch_norm", "layer_norm", "softmax")


def slower_with_threads(one: Sequence[Rate], many: Sequence[Rate]) -> list[str]:
    """Return in words what several threads measured to be slower than one does, at equal work.

    Args:
        one: rates of one thread alone.
        many: rates of several threads of one process.
    """
    alone = {_key(rate): rate.points[-1].rate_per_s for rate in one}
    found = []
    for rate in many:
        reached, by_one = rate.points[-1].rate_per_s, alone.get(_key(rate))
        if rate.operator in _PARALLEL and by_one is not None and reached < by_one:
            found.append(f"{rate.operator} {rate.phase} {rate.dtype} {reached / by_one:.2f} times")
    return found


def _key(rate: Rate) -> tuple[str, str, str, str]:
    return rate.operator, rate.phase, rate.dtype, rate.unit
