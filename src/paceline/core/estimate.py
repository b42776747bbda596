"""The Estimate: a predicted step, with its Plan and the digests of its Workload and Machine.

`perf` makes an Estimate, a plan file holds it, a run keeps it, and the report compares it with the
measurement. An Estimate has the names and digests of its Workload and Machine, so that it is never
compared with a run of another model or on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.breakdown import Breakdown
from paceline.core.plan import Plan
from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpricedOperator(Record):
    """An operator whose rate was not measured: its predicted time is that of moving its bytes.

    Attributes:
        name: of the operator.
        count: calls per step.
        share: of the predicted step, 0 to 1, that rests on the assumption.
    """

    name: str
    count: int
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate(Record):
    """A predicted step of one rank.

    Attributes:
        workload: its name.
        workload_digest: `Record.digest` of it; empty in a file of version 1, which had none.
        machine: its name.
        machine_digest: `Record.digest` of it; empty in a file of version 1.
        plan: how the Workload is spread over the Machine.
        breakdown: seconds of a step by phase.
        step_time_s: sum of these seconds.
        low_s: lower end of the interval in which the step time is expected.
        high_s: upper end of this interval.
        memory_bytes: per rank, by kind.
        link_bytes: that a rank sends per step, by level of link.
        trained_parameter_bytes: of the parameters that get a gradient.
        limit: the bottleneck of the step, in words.
        shares: the resources' parts of the step, which decided `limit`.
        sources: for each phase, the source of its figure.
        fits: whether the ranks of a node fit into the memory of the machine's device.
        needed_memory_bytes: of all ranks that share a device; 0 in a file of before.
        available_memory_bytes: of that device; 0 in a file of before.
        unpriced: operators whose rate was not measured, the largest share first.
        warnings: sentences that say what makes the prediction less certain: too little memory, a
            machine that was busy while it was probed, operators whose rate was not measured, an
            extrapolation.
    """

    version: ClassVar[int] = 2
    workload: str
    workload_digest: str = ""
    machine: str
    machine_digest: str = ""
    plan: Plan
    breakdown: Breakdown
    step_time_s: float
    low_s: float
    high_s: float
    memory_bytes: dict[str, int]
    link_bytes: dict[str, int]
    trained_parameter_bytes: int
    limit: str
    shares: dict[str, float]
    sources: dict[str, str]
    fits: bool = True
    needed_memory_bytes: int = 0
    available_memory_bytes: int = 0
    unpriced: tuple[UnpricedOperator, ...] = ()
    warnings: tuple[str, ...] = ()

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 named ranks and threads only, and took every parameter for a trained one."""
        ranks, threads = data.pop("world_size"), data.pop("threads")
        plan = {"mesh": {"data": ranks}, "threads": threads}
        trained = data["memory_bytes"].get("gradients", 0)
        return {**data, "plan": plan, "trained_parameter_bytes": trained}
