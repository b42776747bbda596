"""Searches the plan of a user's model on this machine: captures, measures, prices, compares.

What plans have in common is captured and measured once. A plan is first priced from the machine's
rates of operator classes; where it may win (`WORTH`), its form of the step runs here, in as many
processes as the plan has ranks, and the plan is priced from that. Whether smaller passes fit the
cache, what threads beyond the cores cost, or computing a layer again, no rate says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import UsageError
from paceline.core.machine import Machine
from paceline.core.measured_step import ComputeChoice, StepMeasurement
from paceline.core.plan import Plan
from paceline.core.workload import Workload
from paceline.perf import estimate
from paceline.perf.planner.captured import PASSES, CapturedSpace, best_of
from paceline.studies.measured_estimate import (
    NO_STEP,
    reason_not_to_measure,
    refuse_to_measure,
    with_warning,
)
from paceline.training.capture_process import BatchDivision, capture_splits
from paceline.training.measured.process import measure_forms
from paceline.training.measured.protocol import StepForm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.estimate import Estimate
    from paceline.perf.planner import PlanSearch

WORTH = 2.0  # times the fastest plan by rates: rates miss a step by less


class _RunForm(NamedTuple):
    """A form of the step, in as many processes at once."""

    ranks: int
    form: StepForm


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetPlans:
    """Plans of one model and batch, on one machine; made by `capture_target`.

    Attributes:
        machine: that was probed.
        target: ``FILE.py:FUNCTION``.
        batch: samples of a step on all ranks together.
        ranks: numbers of ranks that were captured.
        workloads: by how the batch is divided.
        recomputes: whether the model has layers that can compute their forward pass again.
        measured: steps that ran, by form.
    """

    machine: Machine
    target: str
    batch: int
    ranks: tuple[int, ...]
    workloads: dict[BatchDivision, Workload]
    recomputes: bool
    measured: dict[_RunForm, StepMeasurement] = field(default_factory=dict)

    def space(self, base: Plan | None = None, **fixed: Any) -> CapturedSpace:
        """Return the space of the model's plans.

        Args:
            base: what they have in common; None: the defaults.
            fixed: axes that are not varied.
        """
        return CapturedSpace(
            batch=self.batch,
            ranks=self.ranks,
            cores=self.machine.devices[0].cores,
            trained_bytes=next(iter(self.workloads.values())).trained_bytes,
            recomputes=self.recomputes,
            base=base or Plan(),
            fixed=fixed,
        )

    def workload(self, plan: Plan) -> Workload:
        """Return the step of a rank under a plan."""
        return self.workloads[_division(plan)]

    def estimates(
        self,
        plans: Sequence[Plan],
        compute: ComputeChoice = "auto",
        on_progress: Callable[[str], None] = lambda _: None,
    ) -> list[Estimate]:
        """Return the prediction of each plan, in order.

        Args:
            plans: of this batch and these numbers of ranks.
            compute: ``rates``: nothing runs. ``measured``: forms of steps run, or it is an error.
                ``auto``: they run where they can.
            on_progress: called with what runs.

        Raises:
            UsageError: a plan cannot be predicted; or, with ``measured``, no step measured here.
            PacelineError: with ``measured``, the measurement failed: see `measure_forms`.
        """
        by_rates = [estimate(self.machine, self.workload(plan), plan) for plan in plans]
        if compute == "rates":
            return self._said(by_rates)
        worth = WORTH * min(each.step_time_s for each in by_rates)
        wanted = [each for each in by_rates if each.step_time_s <= worth]
        why_not = self._reason_not_to_measure(wanted)
        if why_not:
            if compute == "measured":
                raise refuse_to_measure(self.machine, why_not)
            return self._said(by_rates)
        try:
            return self._said(self._until_fastest_ran(by_rates, wanted, on_progress))
        except NO_STEP as problem:
            if compute == "measured":
                raise
            return self._said([with_warning(each, problem) for each in by_rates])

    def _until_fastest_ran(
        self, by_rates: list[Estimate], wanted: list[Estimate], on_progress: Callable[[str], None]
    ) -> list[Estimate]:
        """Measure forms until no plan that is priced from rates alone is as fast as one that ran.

        Rates may promise more than steps that run take: a plan that did not run must not win by it.
        """
        while wanted:
            self._measure(wanted, on_progress)
            priced = [self._priced(each) for each in by_rates]
            ran = [self._form(each.plan) in self.measured for each in by_rates]
            pairs = list(zip(priced, ran, strict=True))
            fastest_s = min(each.step_time_s for each, is_measured in pairs if is_measured)
            wanted = [
                each for each, is_measured in pairs
                if not is_measured and each.step_time_s <= fastest_s
            ]  # fmt: skip
        return priced

    def _priced(self, by_rates: Estimate) -> Estimate:
        plan = by_rates.plan
        measured = self.measured.get(self._form(plan))
        if measured is None:
            return by_rates
        return estimate(self.machine, self.workload(plan), plan, measured)

    def _said(self, estimates: list[Estimate]) -> list[Estimate]:
        return [replace(each, batch=self.batch) for each in estimates]

    def _reason_not_to_measure(self, wanted: list[Estimate]) -> str:
        """Return why the forms of plans do not run on this host; empty if they can.

        All forms of as many ranks are in memory at the same time, in one process for each rank.
        """
        needed: dict[_RunForm, int] = {}
        for each in wanted:
            needed[self._form(each.plan)] = each.needed_memory_bytes
        for each in wanted:
            ranks = each.plan.mesh.data
            together = sum(size for key, size in needed.items() if key.ranks == ranks)
            if reason := reason_not_to_measure(self.machine, each.plan, together):
                return reason
        if any(self.workload(each.plan).optimizer == "LBFGS" for each in wanted):
            return "LBFGS runs the model as often as the values of the loss ask for"
        return ""

    def _measure(self, wanted: list[Estimate], on_progress: Callable[[str], None]) -> None:
        keys = dict.fromkeys(self._form(each.plan) for each in wanted)
        missing = [key for key in keys if key not in self.measured]
        for ranks in sorted({key.ranks for key in missing}):
            forms = [key.form for key in missing if key.ranks == ranks]
            on_progress(f"{len(forms)} forms of the step on {ranks} ranks")
            allocator = wanted[0].plan.allocator
            found = measure_forms(self.target, forms, ranks=ranks, allocator=allocator)
            for form, measured in zip(forms, found, strict=True):
                self.measured[_RunForm(ranks, form)] = measured

    def _form(self, plan: Plan) -> _RunForm:
        passes = plan.microbatch_count
        form = StepForm(
            threads=plan.threads,
            samples=self.batch // plan.mesh.data // passes,
            passes=passes,
            recompute=plan.recompute == "full",
        )
        return _RunForm(plan.mesh.data, form)


def capture_target(
    machine: Machine,
    target: str,
    *,
    batch: int,
    ranks: tuple[int, ...],
    passes: tuple[int, ...] = PASSES,
) -> TargetPlans:
    """Return what all plans of a model and batch have in common.

    Args:
        machine: that was probed.
        target: ``FILE.py:FUNCTION``.
        batch: samples of a step on all ranks together.
        ranks: numbers of ranks to plan for; those that do not divide the batch are left out.
        passes: before an update; those that do not divide a rank's share are left out.

    Raises:
        UsageError: no number of ranks divides the batch, or the model cannot be captured.
        PacelineError: the capture failed, see `capture_splits`.
    """
    dividing = tuple(count for count in ranks if batch % count == 0)
    if not dividing:
        raise UsageError(
            f"no number of ranks divides a batch of {batch}",
            where="paceline plan --search",
            fix=f"Give a batch that is a multiple of one of {', '.join(map(str, ranks))}",
        )
    divisions = [
        BatchDivision(count, 0, number, recompute)
        for count in dividing
        for number in passes
        if (batch // count) % number == 0
        for recompute in (False, True)
    ]
    captured = capture_splits(target, divisions, batch=batch)
    return TargetPlans(
        machine=machine,
        target=target,
        batch=batch,
        ranks=dividing,
        workloads=dict(zip(divisions, captured.splits, strict=True)),
        recomputes=captured.recomputes,
    )


def search_target(
    plans: TargetPlans,
    space: CapturedSpace,
    compute: ComputeChoice = "auto",
    on_progress: Callable[[str], None] = lambda _: None,
) -> PlanSearch:
    """Return the best plans of a space; errors as of `TargetPlans.estimates`.

    Args:
        plans: of the model.
        space: of them.
        compute: as for `TargetPlans.estimates`.
        on_progress: likewise.
    """
    begin_s = time.monotonic()
    estimates = plans.estimates(space.plans(), compute, on_progress)
    return best_of(estimates, plans.batch, time.monotonic() - begin_s)


def _division(plan: Plan) -> BatchDivision:
    return BatchDivision(plan.mesh.data, 0, plan.microbatch_count, plan.recompute == "full")
