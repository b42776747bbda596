"""The plan of a run: ``plan.json``, or what an earlier Paceline kept in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.estimate import Estimate
from paceline.core.plan_file import PlanFile
from paceline.runs.result import load_record

if TYPE_CHECKING:
    from pathlib import Path

PLAN_NAME, ESTIMATE_NAME = "plan.json", "estimate.json"


def load_plan(run: Path) -> PlanFile | None:
    """Return what the run in folder `run` was planned to be; None for a run without a plan.

    A folder of an earlier Paceline holds the Estimate alone, as ``estimate.json``.

    Raises:
        NewerFormat: a newer Paceline wrote it.
        CorruptData: it cannot be understood.
    """
    if (run / PLAN_NAME).exists():
        return load_record(PlanFile, run / PLAN_NAME)
    if (run / ESTIMATE_NAME).exists():
        estimate = load_record(Estimate, run / ESTIMATE_NAME)
        return PlanFile(plan=estimate.plan, estimate=estimate)
    return None
