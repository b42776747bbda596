"""Fits a machine's efficiency to measured steps: one set of figures per machine.

Each measured step gives one equation: the logarithm of predicted over measured time. The figures'
logarithms are varied by Gauss-Newton steps with Levenberg's damping; each figure is held to its
prior by an equation of its own, so that with few steps it stays there. Steps that lie far off count
less (Huber), so that one wrong row does not move the machine.

    minimise  sum of rho((log predicted - log measured) / s)  +  sum of ((x - prior) / width)^2

`s` is the error that the model itself is expected to have. The interval of a figure is that of the
Gaussian around the minimum. Source: Huber, Robust estimation of a location parameter, 1964;
Levenberg 1944; the prior terms are Tikhonov's regularisation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.machine import Efficiency, Quantity
from paceline.core.plan import Plan
from paceline.perf.transformer.architecture import Architecture
from paceline.perf.transformer.efficiency import FIGURES, efficiency_of
from paceline.perf.transformer.network import NETWORK
from paceline.perf.transformer.step import step_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from paceline.core.machine import Machine

MODEL_ERROR = 0.03  # expected of the model, relative
_HUBER = 2.0  # standard deviations from which an equation counts less
_ROUNDS = 12
_STEP = 1e-3  # of a figure's logarithm, for differences
_LIMITS = {name: math.log(0.97) for name in FIGURES if name not in ("layer_s", "network")}


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """A step that somebody measured.

    Attributes:
        model: that was trained.
        plan: how it was spread.
        batch: samples of the step over all replicas.
        step_s: seconds that it took.
        weight: of its equation; less than 1 for a noisy measurement.
    """

    model: Architecture
    plan: Plan
    batch: int
    step_s: float
    weight: float = 1.0


def fit_efficiency(
    machine: Machine, steps: Sequence[TimedStep], prior: Efficiency | None = None
) -> Efficiency:
    """Return the machine's efficiency, fitted to measured steps.

    Args:
        machine: with peaks and links.
        steps: measured on it; with none, the prior is returned.
        prior: figures to start from and to stay at; None: the device's own or its kind's.

    Raises:
        UsageError: a step cannot be predicted on the machine.
    Cost: about 100 predictions of each step.
    """
    start = prior or efficiency_of(machine.devices[0])
    if not steps:
        return start
    if any(step.step_s <= 0 for step in steps):
        raise UsageError(
            "a measured step takes no time", where=machine.name, fix="Leave it out of the fit"
        )
    centre, width = _centre_and_width(start, machine)
    place = centre.copy()
    damping = 1e-3
    errors = _errors(machine, steps, place)
    cost = _cost(errors, place, centre, width)
    hessian = np.diag(width**-2)
    for _ in range(_ROUNDS):
        slopes = _slopes(machine, steps, place, errors)
        hessian, gradient = _normal(errors, slopes, place, centre, width)
        for _ in range(6):
            shift = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
            trial = np.minimum(place + shift, _limits())
            trial_errors = _errors(machine, steps, trial)
            trial_cost = _cost(trial_errors, trial, centre, width)
            if trial_cost < cost:
                break
            damping *= 10
        else:
            break
        done = cost - trial_cost < 1e-6 * cost
        place, errors, cost, damping = trial, trial_errors, trial_cost, damping / 10
        if done:
            break
    spread = np.sqrt(np.diag(np.linalg.inv(hessian)))
    return _efficiency(place, spread, len(steps))


def pooled(prior: Efficiency, found: Sequence[Efficiency]) -> Efficiency:
    """Return what is expected of a machine after others with its kind of device were fitted.

    For each figure the mean of the logarithms, each weighted by the inverse of its own variance
    plus the variance between machines. Of a fitted figure only what its measurements said counts,
    not the prior that is in it. The variance between machines is what the spread exceeds the own
    variances by, at least a quarter of the prior's variance: few machines say little of it. Links
    and the network are no property of the device, and keep their priors.

    Args:
        prior: of the kind of device, from which all of `found` were fitted.
        found: efficiencies of other machines; with none, the prior is returned.

    Source: DerSimonian and Laird, Meta-analysis in clinical trials, 1986.
    """
    figures = {name: getattr(prior, name) for name in FIGURES}
    for name in FIGURES:
        if name not in ("link", "network"):
            others = [getattr(efficiency, name) for efficiency in found]
            figures[name] = _pooled_figure(figures[name], others)
    return Efficiency(**figures)


def _pooled_figure(prior: Quantity, found: Sequence[Quantity]) -> Quantity:
    centre, width = math.log(prior.value), _width(prior)
    places, own = [centre], [width**2]
    for quantity in found:
        information = _width(quantity) ** -2 - width**-2
        if information > 0.1 * width**-2:  # it was measured
            seen = math.log(quantity.value) * _width(quantity) ** -2 - centre * width**-2
            places.append(seen / information)
            own.append(1 / information)
    if len(places) == 1:
        return prior
    weights = 1 / np.array(own)
    mean = float(weights @ places / weights.sum())
    excess = float(weights @ (np.array(places) - mean) ** 2) - (len(places) - 1)
    scale = weights.sum() - (weights**2).sum() / weights.sum()
    between = max(width**2 / 4, excess / scale)
    weights = 1 / (np.array(own) + between)
    mean = float(weights @ places / weights.sum())
    deviation = math.sqrt(between + 1 / weights.sum())
    return Quantity(
        value=math.exp(mean),
        source="fit",
        low=math.exp(mean - 2 * deviation),
        high=math.exp(mean + 2 * deviation),
        reference=f"{len(places) - 1} other machines with its kind of device",
    )


def _width(quantity: Quantity) -> float:
    """Return the standard deviation of a logarithm; the interval is twice that each way."""
    if not quantity.low or not quantity.high:
        return 0.1
    return max(math.log(quantity.high / quantity.low) / 4, 1e-3)


def informative(
    machine: Machine, steps: Sequence[TimedStep], count: int, prior: Efficiency | None = None
) -> tuple[int, ...]:
    """Return the indices of the `count` steps that would tell most about all of them.

    The choice looks at the plans, not at the measured times: each next step is the one after whose
    measurement the predictions of all steps vary least (a greedy I-optimal design at the prior).

    Source: Atkinson, Donev and Tobias, Optimum experimental designs, 2007, chapter 10.
    """
    start = prior or efficiency_of(machine.devices[0])
    centre, width = _centre_and_width(start, machine)
    slopes = _slopes(machine, steps, centre, _errors(machine, steps, centre))
    covariance = np.diag(width**2)
    chosen: list[int] = []
    for _ in range(min(count, len(steps))):
        shared = slopes @ covariance @ slopes.T
        gains = (shared**2).sum(axis=0) / (1 + np.diag(shared))
        gains[chosen] = -1.0
        best = int(np.argmax(gains))
        chosen.append(best)
        seen = covariance @ slopes[best]
        covariance -= np.outer(seen, seen) / (1 + slopes[best] @ seen)
    return tuple(sorted(chosen))


def _centre_and_width(
    start: Efficiency, machine: Machine
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return logarithms of the prior's figures, and the standard deviations of these.

    An interval is taken for two standard deviations to each side. That of the network's bandwidth
    in the machine file adds to that of its efficiency: only their product is seen.
    """
    figures = [getattr(start, name) for name in FIGURES]
    centre = np.array([math.log(figure.value) for figure in figures])
    width = [_width(figure) for figure in figures]
    network = machine.link(NETWORK)
    bandwidth = network.bandwidth_bytes_per_s if network else None
    if bandwidth and bandwidth.low and bandwidth.high:
        index = FIGURES.index("network")
        width[index] = math.hypot(width[index], _width(bandwidth))
    return centre, np.array(width)


def _limits() -> NDArray[np.float64]:
    return np.array([_LIMITS.get(name, math.inf) for name in FIGURES])


def _errors(
    machine: Machine, steps: Sequence[TimedStep], place: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return each step's logarithm of predicted over measured, in expected errors."""
    efficiency = _efficiency(place, np.zeros(len(FIGURES)), 0)
    errors = []
    for step in steps:
        times = step_times(machine, step.model, step.plan, step.batch, efficiency)
        error = math.log(times.breakdown.total_s / step.step_s)
        errors.append(error * step.weight / MODEL_ERROR)
    return np.array(errors)


def _slopes(
    machine: Machine,
    steps: Sequence[TimedStep],
    place: NDArray[np.float64],
    errors: NDArray[np.float64],
) -> NDArray[np.float64]:
    columns = []
    for index in range(len(place)):
        moved = place.copy()
        moved[index] -= _STEP  # downwards: a figure may be at its limit
        columns.append((errors - _errors(machine, steps, moved)) / _STEP)
    return np.stack(columns, axis=1)


def _normal(
    errors: NDArray[np.float64],
    slopes: NDArray[np.float64],
    place: NDArray[np.float64],
    centre: NDArray[np.float64],
    width: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(errors), 1e-12))
    hessian = slopes.T @ (weights[:, None] * slopes) + np.diag(width**-2)
    gradient = slopes.T @ (weights * errors) + (place - centre) / width**2
    return hessian, gradient


def _cost(
    errors: NDArray[np.float64],
    place: NDArray[np.float64],
    centre: NDArray[np.float64],
    width: NDArray[np.float64],
) -> float:
    size = np.abs(errors)
    robust = np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2))
    return float(robust.sum() + (((place - centre) / width) ** 2).sum() / 2)


def _efficiency(place: NDArray[np.float64], spread: NDArray[np.float64], count: int) -> Efficiency:
    figures = {}
    for name, value, deviation in zip(FIGURES, place, spread, strict=True):
        figures[name] = Quantity(
            value=math.exp(value),
            source="fit",
            low=math.exp(value - 2 * deviation),
            high=math.exp(value + 2 * deviation),
            reference=f"{count} measured steps" if count else "",
        )
    return Efficiency(**figures)


def with_efficiency(machine: Machine, efficiency: Efficiency) -> Machine:
    """Return the machine with this efficiency of its first device."""
    device = replace(machine.devices[0], efficiency=efficiency)
    return replace(machine, devices=(device, *machine.devices[1:]))
