"""The plans of a captured model that one machine can run, and which of them are best.

Data-parallel ranks on one node, with the same samples in a step. Axes:

    ranks        those that are asked for, where they divide the batch
    threads      of a rank: half its share of the cores, the share, and twice the share; 1 where
                 ranks outnumber cores
    microbatch   forward and backward passes before an update: 1, 2 or 4, if they divide a share
    recompute    ``none``, and ``full`` where the model has layers that can run again
    collectives  torch's and Paceline's
    bucket       gradients that are reduced in one collective: torch's sizes, and powers of two up
                 to the first that holds all gradients

Every plan is priced: a space has some hundred plans, and an estimate takes milliseconds.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UsageError
from paceline.core.plan import Mesh, Plan
from paceline.perf.planner.front import MILLION, plan_front
from paceline.perf.planner.result import Alternative, PlanSearch, PricedPlan
from paceline.perf.planner.winner import grown_phase, other_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.core.estimate import Estimate

PASSES = (1, 2, 4)
MIB = 1 << 20
BUCKETS = tuple(MIB << power for power in range(0, 9, 2))  # 1 to 256 MiB
AXES = ("ranks", "threads", "microbatch", "recompute", "collectives", "bucket")


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedSpace:
    """What is fixed and what is varied.

    Attributes:
        batch: samples of a step on all ranks together.
        ranks: numbers of ranks to try.
        cores: of the node.
        trained_bytes: of the gradients.
        recomputes: whether the model has layers that can compute their forward pass again.
        base: what all plans have in common beside the axes.
        fixed: values of axes that are not varied, by name.
    """

    batch: int
    ranks: tuple[int, ...]
    cores: int
    trained_bytes: int
    recomputes: bool = False
    base: Plan = field(default_factory=Plan)
    fixed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = sorted(set(self.fixed) - set(AXES))
        if unknown or self.batch < 1 or not self.ranks or min(self.ranks) < 1:
            raise UsageError(
                f"'{unknown[0]}' is no axis of the search" if unknown else "nothing to search",
                where="CapturedSpace",
                fix=f"Give a batch and numbers of ranks from 1; axes are {', '.join(AXES)}",
            )
        wanted = self.fixed.get("recompute", "none")
        if wanted != "none" and not (self.recomputes and wanted == "full"):
            raise UsageError(
                f"no step of this model recomputes '{wanted}'",
                where="CapturedSpace",
                why="layers are elements of sequences, without batch normalisation"
                if wanted == "full"
                else "layers of a captured model are computed again as a whole",
                fix="Leave recompute out, or give none" + ", or full" * self.recomputes,
            )

    def plans(self) -> tuple[Plan, ...]:
        """Return each plan.

        Raises:
            UsageError: there is none.
        """
        found = tuple(itertools.chain.from_iterable(map(self._of_ranks, self._ranks())))
        if not found:
            raise UsageError(
                f"no plan divides a batch of {self.batch} over {self.ranks} ranks",
                where="paceline plan --search",
                why=", ".join(f"{name} is fixed at {value}" for name, value in self.fixed.items()),
                fix="Give a batch with more divisors, or fewer fixed values",
            )
        return found

    def _ranks(self) -> list[int]:
        return [ranks for ranks in self._values("ranks", self.ranks) if not self.batch % ranks]

    def _of_ranks(self, ranks: int) -> Iterator[Plan]:
        share = self.batch // ranks
        axes = itertools.product(
            self._values("threads", self._threads(ranks)),
            [count for count in self._values("microbatch", PASSES) if not share % count],
            self._values("recompute", ("none", "full") if self.recomputes else ("none",)),
            self._values("collectives", ("torch", "paceline") if ranks > 1 else ("torch",)),
            self._values("bucket", self._buckets(ranks)),
        )
        for threads, count, recompute, collectives, bucket in axes:
            yield replace(
                self.base,
                mesh=Mesh(data=ranks),
                threads=threads,
                microbatches=count if count > 1 else 0,
                recompute=recompute,
                collectives=collectives,
                **(
                    {} if bucket is None else {"bucket_bytes": bucket, "first_bucket_bytes": bucket}
                ),
            )

    def _values(self, name: str, found: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else found

    def _threads(self, ranks: int) -> tuple[int, ...]:
        if ranks > self.cores:
            return (1,)
        share = self.cores // ranks
        return tuple(
            count
            for count in dict.fromkeys((share, share // 2, 2 * share))
            if 1 <= count <= self.cores
        )

    def _buckets(self, ranks: int) -> tuple[int | None, ...]:
        """Return sizes; None: those of the base plan. Sizes that hold all alike are not varied."""
        if ranks == 1 or self.trained_bytes <= self.base.first_bucket_bytes:
            return (None,)
        smaller = [size for size in BUCKETS if size < self.trained_bytes]
        larger = [size for size in BUCKETS if size >= self.trained_bytes][:1]
        return (None, *smaller, *larger)


def best_of(estimates: Sequence[Estimate], batch: int, seconds: float) -> PlanSearch:
    """Return the outcome of a search that priced each plan.

    Of plans that are predicted equally fast, the smallest wins, and of equal ones the first.

    Args:
        estimates: of each plan, with the same samples in a step.
        batch: these samples.
        seconds: that the search took.
    """
    fitting = [estimate for estimate in estimates if estimate.fits]
    front = plan_front([_priced(estimate, batch) for estimate in fitting])
    smallest = min(estimates, key=lambda estimate: estimate.needed_memory_bytes)
    best = min(
        fitting,
        key=lambda estimate: (estimate.step_time_s, estimate.needed_memory_bytes),
        default=smallest,
    )
    needed = smallest.needed_memory_bytes / 2**30
    return PlanSearch(
        compared=len(estimates),
        fitting=len(fitting),
        priced=len(estimates),
        left_out=0,
        seconds=seconds,
        front=front,
        best=best,
        alternatives=_alternatives(estimates, best) if fitting else (),
        cheapest_change="" if fitting else f"{needed:.1f} GiB of memory, or a smaller batch",
    )


def _priced(estimate: Estimate, batch: int) -> PricedPlan:
    step_s, nodes = estimate.step_time_s, estimate.plan.nodes
    return PricedPlan(
        plan=estimate.plan,
        step_s=step_s,
        memory_bytes=estimate.needed_memory_bytes,
        devices=nodes,
        node_hours=nodes * step_s * MILLION / batch / 3600,
    )


def _alternatives(estimates: Sequence[Estimate], winner: Estimate) -> tuple[Alternative, ...]:
    """Return for each axis the best plan with each other value, by axis and time."""

    def best(axis: str, value: str, members: list[int]) -> Alternative:
        return _alternative(axis, value, [estimates[index] for index in members], winner)

    return other_values(AXES, [estimate.plan for estimate in estimates], winner.plan, best)


def _alternative(axis: str, value: str, estimates: list[Estimate], winner: Estimate) -> Alternative:
    fitting = [estimate for estimate in estimates if estimate.fits]
    if not fitting:
        missing = min(each.needed_memory_bytes - each.available_memory_bytes for each in estimates)
        return Alternative(axis=axis, value=value, slower=None, missing_bytes=max(1, missing))
    best = min(fitting, key=lambda estimate: estimate.step_time_s)
    return Alternative(
        axis=axis,
        value=value,
        slower=best.step_time_s / winner.step_time_s - 1,
        why=grown_phase(winner.breakdown, best.breakdown),
    )
