"""The interval of a predicted step: 9 of 10 measured steps are expected in it.

It grows with what the prediction rests on::

    measured steps     the spread of the medians of blocks of whole steps, and RUN_SPREAD
    operator classes   CLASS_SPREAD of each class's seconds, independent of each other, and
                       COMMON_SPREAD of all of them
    communication      the spread of the probe's rounds, and COMMUNICATION_SPREAD; an
                       extrapolation in ranks or hosts adds to it
    foreign work       other processes that used cores while it was measured, upwards and downwards

Parts are independent of each other, so that their half widths add as squares.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.breakdown import Breakdown
    from paceline.core.machine import Machine
    from paceline.core.measured_step import StepMeasurement
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload
    from paceline.perf.costs import CostModel

# Relative half widths that hold 9 of 10 rows of bench/predict_unseen.py; bench/LOG.md says when
# they were taken. Medians of two processes that run the same steps differ by so much:
RUN_SPREAD = 0.07
# A class's predicted seconds differ from its measured ones by so much: its kernels are measured at
# a few sizes, and in no model's company.
CLASS_SPREAD = {
    "matmul": 0.35,
    "convolution": 0.5,
    "convolution_1d": 0.5,
    "depthwise": 0.5,
    "transposed": 0.5,
    "attention": 0.5,
    "recurrent": 0.5,
    "elementwise": 0.5,
    "view": 0.4,
}
OTHER_SPREAD = 0.6
# What operators of a step have in common (Python, what is in the cache) moves all one way:
COMMON_SPREAD = 0.3
COMMUNICATION_SPREAD = 0.3
EXTRAPOLATED_SPREAD = 0.5  # per doubling of ranks, or of hosts, beyond those that were measured
FOREIGN_SPREAD = 0.5  # of a step, per foreign core that a measurement had beside it
QUIET_CORES = 0.25


class Interval(NamedTuple):
    """Seconds between which a step is expected."""

    low_s: float
    high_s: float


def step_interval(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    costs: CostModel,
    breakdown: Breakdown,
    measured: StepMeasurement | None,
) -> Interval:
    """Return the interval of a step that was predicted as `breakdown`.

    Args:
        machine: on which it was predicted.
        workload: the model.
        plan: how it is spread.
        costs: of operator classes.
        breakdown: the prediction.
        measured: the step from which compute was predicted; None: from operator classes.
    """
    step_s = breakdown.total_s
    if measured is not None:
        below, above = measured_spreads_s(measured)
        foreign = measured.foreign_cores
    else:
        below = above = class_spreads_s(workload, costs)
        foreign = max((part.foreign_cores for part in machine.disturbed), default=0.0)
    others = communication_spread(machine, plan) * breakdown.transfer
    disturbed_s = FOREIGN_SPREAD * foreign * step_s if foreign > QUIET_CORES else 0.0
    low_s = step_s - math.hypot(below, others, disturbed_s)
    return Interval(
        low_s=max(0.1 * step_s, low_s), high_s=step_s + math.hypot(above, others, disturbed_s)
    )


def measured_spreads_s(measured: StepMeasurement) -> tuple[float, float]:
    """Return the half widths below and above the compute of a measured step."""
    phases = measured.phases.values()
    total_s = sum(phase.total_s for phase in phases)
    below_s = sum(phase.total_s - phase.low_s for phase in phases)
    above_s = sum(phase.high_s - phase.total_s for phase in phases)
    run_s = RUN_SPREAD * total_s
    return math.hypot(max(0.0, below_s), run_s), math.hypot(max(0.0, above_s), run_s)


def class_spreads_s(workload: Workload, costs: CostModel) -> float:
    """Return the half width of compute that is predicted from operator classes."""
    seconds: dict[str, float] = {}
    for layer in workload.layers:
        for operator, cost_s in costs.layer(layer.operations).classes.items():
            seconds[operator] = seconds.get(operator, 0.0) + cost_s
    return math.hypot(
        COMMON_SPREAD * sum(seconds.values()),
        *(CLASS_SPREAD.get(name, OTHER_SPREAD) * total for name, total in seconds.items()),
    )


def communication_spread(machine: Machine, plan: Plan) -> float:
    """Return the relative half width of exposed communication."""
    if plan.mesh.data == 1:
        return 0.0
    cost = machine.collective(
        "all_reduce", plan.mesh.data, collectives=plan.collectives, hosts=plan.nodes
    )
    if cost is None:
        return 1.0
    probed = max(
        ((point.seconds.high or 0.0) - (point.seconds.low or 0.0)) / (2 * point.seconds.value)
        for point in cost.points
    )
    doublings = abs(math.log2(plan.mesh.data / cost.ranks))
    doublings += abs(math.log2(plan.nodes / cost.hosts))
    return math.hypot(COMMUNICATION_SPREAD, probed, EXTRAPOLATED_SPREAD * doublings)


def check_measured(measured: StepMeasurement, plan: Plan) -> None:
    """Raise an error for a measured step that is not the plan's.

    Raises:
        UsageError: it had other threads or processes, or the plan divides the model.
    """
    asked = (plan.threads, plan.ranks_per_node)
    has = (measured.threads, measured.processes)
    if asked == has and plan.mesh.pipeline == 1 and plan.mesh.tensor == 1:
        return
    raise UsageError(
        "the measured step is not that of the plan",
        where=f"{asked[1]} processes of {asked[0]} threads planned, {has[1]} of {has[0]} measured",
        fix="Measure the step with the plan's ranks and threads, or predict from rates",
    )
