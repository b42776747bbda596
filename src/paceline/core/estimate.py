"""The Estimate: a predicted step, with its Plan and the digests of its Workload and Machine.

`perf` makes an Estimate, a plan file holds it, a run keeps it, and the report compares it with the
measurement. An Estimate has the names and digests of its Workload and Machine, so that it is never
compared with a run of another model or on another machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.breakdown import Breakdown
from paceline.core.plan import Mesh, Plan
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
class MemoryFit(Record):
    """What of a step is kept, computed again and spilled, so that it stays within a budget.

    Attributes:
        budget_bytes: of a rank's process.
        least_bytes: the smallest budget that there is a plan for.
        peak_bytes: of the process under the plan, without freed memory that it keeps.
        in_core_peak_bytes: of a process that keeps everything.
        step_s: predicted.
        in_core_step_s: of a step that keeps everything.
        exposed_s: seconds of a step in which it waits for transfers.
        spilled_bytes: written in a step; as many are read.
        recomputed: names of the modules that are computed again.
        kinds: bytes by kind of tensor, and by ``keep``, ``recompute`` or ``spill``.
        disk_bytes_per_s: rate of the disk.
        disk_source: where that rate is from.
    """

    budget_bytes: int
    least_bytes: int
    peak_bytes: int
    in_core_peak_bytes: int
    step_s: float
    in_core_step_s: float
    exposed_s: float
    spilled_bytes: int
    recomputed: tuple[str, ...] = ()
    kinds: dict[str, dict[str, int]]
    disk_bytes_per_s: float
    disk_source: str

    @property
    def slowdown(self) -> float:
        """The predicted time of a step, over that of a step which keeps everything."""
        return self.step_s / self.in_core_step_s if self.in_core_step_s else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEstimate(Record):
    """A stage of a pipeline, on each of the ranks that hold a replica of it.

    Attributes:
        layers: how many it has.
        first: name of its first layer.
        last: name of its last layer.
        parameter_bytes: of its parameters.
        trained_bytes: of those that get a gradient.
        forward_s: seconds for one microbatch.
        backward_s: the same of the backward pass.
        reduce_s: of reducing its gradients over the replicas, once per step.
        optimizer_s: of the update, once per step.
        live_microbatches: whose activations it keeps at the same time, at most.
        memory_bytes: that the rank needs at its peak.
        memory_fit: with a memory budget, what goes where in a step of its own passes; None without.
    """

    layers: int
    first: str
    last: str
    parameter_bytes: int
    trained_bytes: int
    forward_s: float
    backward_s: float
    reduce_s: float
    optimizer_s: float
    live_microbatches: int
    memory_bytes: int
    memory_fit: MemoryFit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCandidate(Record):
    """One of the plans that were compared.

    Attributes:
        mesh: ranks per axis.
        microbatches: of a pipeline's batch; 1 without a pipeline.
        batch: samples of a step on all ranks together.
        step_time_s: predicted.
        memory_bytes: that a rank needs, the fullest one.
        fits: whether the ranks of a node fit into the memory of the machine's device.
        limit: the bottleneck of the step, in words.
    """

    mesh: Mesh
    microbatches: int
    batch: int
    step_time_s: float
    memory_bytes: int
    fits: bool
    limit: str

    @property
    def samples_per_s(self) -> float:
        """Samples that all ranks together train on per second."""
        return self.batch / self.step_time_s


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
        stages: of a pipeline; the breakdown is that of the rank that ends last, and the memory
            that of the fullest one. Empty without a pipeline.
        bubble_share: of a pipeline: idle time of all ranks over their time from the first forward
            to the last backward pass, 0 to 1.
        candidates: plans that were compared with this one, the fastest first; empty if none were.
        unpriced: operators whose rate was not measured, the largest share first.
        warnings: sentences that say what makes the prediction less certain: too little memory, a
            machine that was busy while it was probed, operators whose rate was not measured, an
            extrapolation.
        memory_fit: with a memory budget, what goes where; None without one.
        fitted_step_s: of a pipeline with a memory budget: the step of stages that keep it; else 0.
        fullest_rank: of the pipeline, whose memory `memory_bytes` has.
        batch: samples of a step over all replicas; 0: that of the captured step.
        checkpoint_interval_s: between two checkpoints, where failures were given; else 0.
        useful_share: of the time that failures and checkpoints leave, 0 to 1.
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
    stages: tuple[StageEstimate, ...] = ()
    bubble_share: float = 0.0
    candidates: tuple[PlanCandidate, ...] = ()
    unpriced: tuple[UnpricedOperator, ...] = ()
    warnings: tuple[str, ...] = ()
    memory_fit: MemoryFit | None = None
    fitted_step_s: float = 0.0
    fullest_rank: int = 0
    batch: int = 0
    checkpoint_interval_s: float = 0.0
    useful_share: float = 1.0

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 named ranks and threads only, and took every parameter for a trained one."""
        ranks, threads = data.pop("world_size"), data.pop("threads")
        plan = {"mesh": {"data": ranks}, "threads": threads}
        trained = data["memory_bytes"].get("gradients", 0)
        return {**data, "plan": plan, "trained_parameter_bytes": trained}
