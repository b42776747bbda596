"""Chooses the sizes of gradient buckets by prediction.

A small bucket is ready early, and the backward pass hides its reduction; each one pays the latency
of a collective. What the machine measured of its collectives, and calibration with a trace of the
backward pass, decides between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.perf.estimate import step_breakdown

if TYPE_CHECKING:
    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.core.workload import Workload

_MIB = 1 << 20
_SIZES = tuple(_MIB << power for power in range(9))  # 1 to 256 MiB
_LEAST_GAIN = 0.005  # of the step, for which other sizes than the plan's are worth a word


def choose_buckets(machine: Machine, workload: Workload, plan: Plan) -> Plan:
    """Return the plan with the bucket sizes of the shortest predicted step.

    Its own sizes stay where others gain less than half a percent of the step, and where ranks
    reduce no gradients in buckets of a choice: one rank, or a pipeline.

    Args:
        machine: on which ranks train.
        workload: of a rank's step.
        plan: of data-parallel training.

    Raises:
        UsageError: as for `estimate`.
    """
    if plan.mesh.data == 1 or plan.mesh.pipeline > 1:
        return plan
    plans = [
        plan,
        *(
            replace(plan, bucket_bytes=size, first_bucket_bytes=first)
            for size in _SIZES
            for first in sorted({min(size, plan.first_bucket_bytes), size})
        ),
    ]
    seconds = [step_breakdown(machine, workload, each).total_s for each in plans]
    best = min(range(len(plans)), key=seconds.__getitem__)
    return plans[best] if seconds[best] < seconds[0] * (1 - _LEAST_GAIN) else plan
