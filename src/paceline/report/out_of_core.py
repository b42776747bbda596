"""Training out of core: bytes that a step spills, and the seconds of it that computing hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptData, PacelineError
from paceline.core.record import Record
from paceline.report.units import format_bytes, format_seconds, format_share
from paceline.schedules.memory import MemoryPlan, SpillTier, StepProfile, replay

if TYPE_CHECKING:
    from paceline.runs.folder import RunFolder
    from paceline.runs.result import MemoryUse, RunResult
    from paceline.schedules.memory import Replayed


@dataclass(frozen=True, kw_only=True, slots=True)
class Spilling(Record):
    """What holding the budget took on the rank that waited longest for its transfers; per step.

    Attributes:
        rank: the global rank.
        budget_bytes: of its process.
        peak_bytes: of its process, measured.
        spilled_bytes: written; as many are read.
        hidden_s: seconds of transfers while it computed.
        exposed_s: seconds in which it waited for transfers.
        step_s: of a step.
        in_core_peak_bytes: predicted of a step that spills nothing; 0 if not known.
    """

    rank: int
    budget_bytes: int
    peak_bytes: int
    spilled_bytes: int
    hidden_s: float
    exposed_s: float
    step_s: float
    in_core_peak_bytes: int = 0

    @property
    def exposed_share(self) -> float:
        """The exposed part of a step, 0 to 1."""
        return min(1.0, self.exposed_s / self.step_s) if self.step_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """A step of a rank as its memory plan has it; `replayed` says when what happens."""

    rank: int
    profile: StepProfile
    plan: MemoryPlan
    tier: SpillTier

    @property
    def replayed(self) -> Replayed:
        """The step under the plan, as predicted."""
        names = {module.name: i for i, module in enumerate(self.profile.modules)}
        again = [names[name] for name in self.plan.recomputed if name in names]
        return replay(self.profile, self.plan.actions, self.tier, again)


def spilling(result: RunResult | None, step: PlannedStep | None) -> Spilling | None:
    """Return what a memory budget took; None where no step was under a plan that spills.

    Args:
        result: of the run.
        step: that was planned, of any rank.
    """
    if result is None:
        return None
    found = [
        (rank, rank.memory)
        for rank in result.ranks
        if rank.memory is not None and rank.memory.planned_steps and rank.memory.spilled_bytes
    ]
    if not found:
        return None
    rank, memory = max(found, key=lambda pair: pair[1].exposed_s)
    return Spilling(
        rank=rank.rank,
        budget_bytes=memory.budget_bytes,
        peak_bytes=rank.peak_memory_bytes,
        spilled_bytes=memory.spilled_bytes,
        hidden_s=hidden_s(memory),
        exposed_s=memory.exposed_s,
        step_s=result.step_time_s,
        in_core_peak_bytes=step.plan.in_core_peak_bytes if step else 0,
    )


def hidden_s(memory: MemoryUse) -> float:
    """Return the seconds of a step's transfers that it did not wait for."""
    return max(0.0, memory.transfer_s - memory.exposed_s)


def planned_step(folder: RunFolder, rank: int) -> PlannedStep | None:
    """Return the step that a rank planned; None where its file does not say.

    Raises:
        CorruptData: the file cannot be understood.
    """
    name = f"memory/rank-{rank:05}.json"
    data = folder.read_object(name).get("planned_step")
    if not data:
        return None
    try:
        return PlannedStep(
            rank=rank,
            profile=StepProfile.from_json(data["profile"]),
            plan=MemoryPlan.from_json(data["plan"]),
            tier=SpillTier.from_json(data["tier"]),
        )
    except (KeyError, PacelineError) as problem:
        raise CorruptData(
            "the planned step cannot be read",
            where=str(folder.file(name)),
            why=str(problem),
            fix="Move the file away to see the rest of the report",
        ) from problem


def spilling_words(found: Spilling | None) -> str:
    """Return what the budget took, as a sentence; empty without one."""
    if found is None:
        return ""
    return (
        f"To stay within {format_bytes(found.budget_bytes)}, a step spills "
        f"{format_bytes(found.spilled_bytes)} and reads them back: "
        f"{format_seconds(found.hidden_s)} of that are hidden behind computing, "
        f"{format_seconds(found.exposed_s)} ({format_share(found.exposed_share)} of a step) "
        "exposed."
    )
