"""Fits a Machine to the measured step of a run.

Machine + Workload + Plan + measured step -> better Machine. A phase of a run gives one number, the
seconds that a typical step spent in it, so one factor per phase is what can be learned. It is
applied to the figures that this phase was predicted from, at the run's own threads and processes;
figures that the run did not exercise keep their prior.

How far a factor moves is a matter of precision. On the logarithmic scale, with

    x     = log(measured / predicted)
    tau   = standard deviation of x that the prior had (`PRIOR_LOG_SD`)
    s     = standard deviation of what was measured: of the median over the steps of this run, and
            of the machine between this run and the next one (`DRIFT_LOG_SD`)

the posterior is normal with::

    weight = tau^2 / (tau^2 + s^2)          mean = weight * x          sd = sqrt(weight) * s

so a long quiet run nearly replaces the prior (weight near 1), and a run of a few unequal steps, or
none, leaves it (weight near 0). Phases that the prior calls zero get seconds instead of a factor,
by the same rule on the plain scale.
Source: Gelman et al., Bayesian Data Analysis, 3rd edition, section 2.5, normal mean with known
variance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.machine import Quantity
from paceline.core.record import Record
from paceline.perf.communication import MODELLED, collective_s
from paceline.perf.compute import COMPUTE_PHASES, RESIDUALS
from paceline.perf.estimate import step_breakdown
from paceline.perf.refit import (
    add_residual,
    scale_collectives,
    scale_compute,
    scale_ddp,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.machine import Machine, StepPhase
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload

# Of log(predicted / measured) on 24 models that the estimate was not tuned on: 1.48 times the
# median absolute error of each phase. Communication was not measured separately and gets the
# largest.
PRIOR_LOG_SD = {"forward": 0.44, "backward": 0.21, "optimizer": 0.36, "transfer": 0.44}
# Of log(step time) between runs of one script on one machine, a minute apart: bench/calibrate.py
# found 0.07 for pairs of runs within 25 % of each other; with other work on the machine it was
# 0.15 and more.
DRIFT_LOG_SD = 0.08
# Seconds that a phase predicted as zero may take, as a share of the predicted step.
RESIDUAL_SHARE = 0.25
INTERVAL_SD = 1.96  # 95 % of a normal distribution lie within
LARGEST_FACTOR = 32.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """Typical seconds of a phase, step or collective of a run.

    Attributes:
        seconds: the median.
        error_s: standard error of the median; infinite if it is not known.
    """

    seconds: float
    error_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedCollective:
    """Collectives of one operation and size class.

    Attributes:
        operation: name of the operation, for example ``all_reduce``.
        ranks: number of ranks that took part.
        bytes: bytes that a rank sent, the median over the collectives.
        duration: seconds from the last rank's call to the last completion.
    """

    operation: str
    ranks: int
    bytes: float
    duration: Observed


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Measurements of a run's undisturbed steps (docs/glossary.md).

    Attributes:
        phases: seconds per step by the names of `Breakdown`.
        step: the whole step of the slowest rank.
        collectives: the costliest first.
        steps: number of undisturbed steps that were measured.
        source: the run's folder, for errors.
    """

    phases: Mapping[str, Observed]
    step: Observed
    collectives: tuple[ObservedCollective, ...]
    steps: int
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseFit(Record):
    """One phase before and after calibration, seconds per step.

    Attributes:
        name: name of the phase.
        prior_s: seconds that the prior machine predicts.
        measured_s: seconds measured in the run; ``other`` is what the step takes beyond the other
            phases, since the median step is not the sum of its phases' medians.
        weight: weight of the measurement, 0 (the prior is kept) to 1.
        fitted_s: seconds that the calibrated machine predicts.
    """

    name: str
    prior_s: float
    measured_s: float
    weight: float
    fitted_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration(Record):
    """A calibrated machine and how it came about.

    Attributes:
        machine: name of the machine.
        steps: number of undisturbed steps that it was fitted to.
        prior_step_s: step time that the prior machine predicts.
        measured_step_s: step time measured in the run.
        fitted_step_s: step time that the calibrated machine predicts.
        phases: the fits of the phases, in the order of a step.
    """

    machine: str
    steps: int
    prior_step_s: float
    measured_step_s: float
    fitted_step_s: float
    phases: tuple[PhaseFit, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Posterior:
    """A target for a phase: its mean, relative interval, and the weight of the measurement."""

    seconds: float
    low: float
    high: float
    weight: float


def calibrate(
    machine: Machine, workload: Workload, plan: Plan, evidence: Evidence
) -> tuple[Machine, Calibration]:
    """Return a machine that predicts the run better, and the record of its changes.

    Args:
        machine: the prior; it is not changed.
        workload: the workload that the run trained.
        plan: the plan that the run followed.
        evidence: measurements of the run's undisturbed steps.

    Raises:
        UsageError: no step was undisturbed, or the plan cannot be predicted on the machine.
    """
    if evidence.steps < 1:
        raise UsageError(
            "the run has no step to calibrate from in which no rank was late",
            where=evidence.source or machine.name,
            why="every step is in the warm-up or in a straggler's step range, or lost events",
            fix="Calibrate from a longer run, or one without a straggler",
        )
    if plan.mesh.pipeline > 1:
        raise UsageError(
            "a run of a model in stages cannot be calibrated from",
            where=evidence.source or machine.name,
            why="its phases differ from rank to rank",
            fix="Calibrate from a data-parallel run on the same machine",
        )
    prior = step_breakdown(machine, workload, plan)
    fitter = _Fitter(machine, workload, plan)
    weights = {phase: fitter.fit_compute(phase, evidence.phases[phase]) for phase in COMPUTE_PHASES}
    if plan.mesh.data > 1:
        for collective in evidence.collectives:
            fitter.fit_collective(collective)
        weights["transfer"] = fitter.fit_transfer(evidence.phases["transfer"])
    measured = {**evidence.phases, "other": _rest_of_step(evidence)}
    for phase in RESIDUALS:
        weights[phase] = fitter.fit_residual(phase, measured[phase])
    fitted = step_breakdown(fitter.machine, workload, plan)
    fits = tuple(
        PhaseFit(
            name=name,
            prior_s=seconds,
            measured_s=measured[name].seconds,
            weight=weights.get(name, 0.0),
            fitted_s=getattr(fitted, name),
        )
        for name, seconds in prior.items()
    )
    return fitter.machine, Calibration(
        machine=machine.name,
        steps=evidence.steps,
        prior_step_s=prior.total_s,
        measured_step_s=evidence.step.seconds,
        fitted_step_s=fitted.total_s,
        phases=fits,
    )


def _rest_of_step(evidence: Evidence) -> Observed:
    """Return the median step minus the medians of its phases other than ``other``.

    The step is that of training: evaluations are no part of it.
    """
    not_known = ("other", "compilation", "evaluation")
    known_s = sum(phase.seconds for name, phase in evidence.phases.items() if name not in not_known)
    rest_s = max(0.0, evidence.step.seconds - known_s)
    return Observed(seconds=rest_s, error_s=evidence.step.error_s)


class _Fitter:
    """Holds the machine while one phase after the other is fitted."""

    def __init__(self, machine: Machine, workload: Workload, plan: Plan) -> None:
        self.machine = machine
        self.workload = workload
        self.plan = plan

    def _predicted_s(self, machine: Machine, phase: str) -> float:
        seconds: float = getattr(step_breakdown(machine, self.workload, self.plan), phase)
        return seconds

    def fit_compute(self, phase: str, observed: Observed) -> float:
        """Scale rates and overheads of a phase; return the weight of the measurement."""
        predicted_s = self._predicted_s(self.machine, phase)
        target = log_posterior(predicted_s, observed, PRIOR_LOG_SD[phase])
        interval = (target.low, target.high)

        def scaled(factor: float) -> Machine:
            return scale_compute(
                self.machine, self.workload, self.plan, phase, factor, interval=interval
            )

        if target.weight > 0:
            self._solve(scaled, phase, target.seconds)
        return target.weight

    def fit_collective(self, observed: ObservedCollective) -> None:
        """Scale the cost of an operation to the duration of the run's collectives."""
        collectives = self.plan.collectives
        cost = self.machine.collective(
            observed.operation, observed.ranks, collectives=collectives, hosts=self.plan.nodes
        )
        if cost is None or observed.operation not in MODELLED:
            return
        predicted_s = collective_s(cost, observed.bytes, observed.ranks)
        target = log_posterior(predicted_s, observed.duration, PRIOR_LOG_SD["transfer"])
        if target.weight > 0:
            self.machine = scale_collectives(
                self.machine,
                self.plan,
                observed.operation,
                target.seconds / predicted_s,
                interval=(target.low, target.high),
            )

    def fit_transfer(self, observed: Observed) -> float:
        """Scale DDP's overhead of collectives, then the collectives if that is not enough."""
        predicted_s = self._predicted_s(self.machine, "transfer")
        target = log_posterior(predicted_s, observed, PRIOR_LOG_SD["transfer"])
        if target.weight <= 0:
            return 0.0
        interval = (target.low, target.high)

        def framework_scaled(factor: float) -> Machine:
            return scale_ddp(self.machine, self.workload, self.plan, factor, interval=interval)

        def collectives_scaled(factor: float) -> Machine:
            machine = self.machine
            for operation in MODELLED:
                machine = scale_collectives(
                    machine, self.plan, operation, factor, interval=interval
                )
            return machine

        self._solve(framework_scaled, "transfer", target.seconds)
        self._solve(collectives_scaled, "transfer", target.seconds)
        return target.weight

    def fit_residual(self, phase: StepPhase, observed: Observed) -> float:
        """Add seconds to a phase that rates do not explain; return the measurement's weight."""
        before = step_breakdown(self.machine, self.workload, self.plan)
        predicted_s = getattr(before, phase)
        prior_sd = RESIDUAL_SHARE * before.total_s
        error_s = math.hypot(observed.error_s, DRIFT_LOG_SD * observed.seconds)
        if not math.isfinite(error_s) or (phase == "input" and self.plan.loader_workers > 0):
            return 0.0
        weight = prior_sd**2 / max(prior_sd**2 + error_s**2, 1e-300)
        added_s = weight * (observed.seconds - predicted_s)
        spread_s = INTERVAL_SD * math.sqrt(weight) * error_s
        seconds = Quantity(
            value=added_s, source="fit", low=added_s - spread_s, high=added_s + spread_s
        )
        if added_s:
            self.machine = add_residual(self.machine, self.plan, phase, seconds)
        return weight

    def _solve(self, scaled: Callable[[float], Machine], phase: str, target_s: float) -> None:
        """Keep the machine whose factor brings the predicted phase nearest to `target_s`.

        The prediction grows with the factor, but not in proportion: some costs are not scaled, and
        compute hides communication. Hence bisection, on the logarithm of the factor.
        """
        if abs(self._predicted_s(self.machine, phase) - target_s) <= 1e-3 * target_s:
            return
        low, high = 1 / LARGEST_FACTOR, LARGEST_FACTOR
        for _ in range(30):
            middle = math.sqrt(low * high)
            if self._predicted_s(scaled(middle), phase) < target_s:
                low = middle
            else:
                high = middle
        self.machine = scaled(math.sqrt(low * high))


def log_posterior(predicted_s: float, observed: Observed, prior_log_sd: float) -> _Posterior:
    """Return where a phase's seconds lie after the run, by the rule in the module's docstring.

    ``low`` and ``high`` are relative to ``seconds``: the ends of the 95 % interval.
    """
    if predicted_s <= 0 or observed.seconds <= 0 or not math.isfinite(observed.error_s):
        return _Posterior(seconds=predicted_s, low=1.0, high=1.0, weight=0.0)
    deviation = math.hypot(observed.error_s / observed.seconds, DRIFT_LOG_SD)
    weight = prior_log_sd**2 / (prior_log_sd**2 + deviation**2)
    mean = weight * math.log(observed.seconds / predicted_s)
    spread = math.exp(INTERVAL_SD * math.sqrt(weight) * deviation)
    return _Posterior(
        seconds=predicted_s * math.exp(mean), low=1 / spread, high=spread, weight=weight
    )
