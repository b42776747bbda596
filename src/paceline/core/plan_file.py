"""The plan file, which `paceline plan --out` writes and `paceline run --plan` reads.

::

    {"version": 1,
     "plan": {...},            how to train: all that a file written by hand needs
     "estimate": {...},        the prediction under that plan, or null
     "workload": {...}}        the model that was predicted, or null
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.estimate import Estimate
from paceline.core.file_kind import FileKind, refuse_other_kind
from paceline.core.files import read_text
from paceline.core.plan import Plan
from paceline.core.record import Record
from paceline.core.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFile(Record):
    """A Plan with the Estimate and the Workload from which it was made.

    Attributes:
        plan: how to train.
        estimate: the predicted step under the plan; None in a file written by hand.
        workload: the predicted model; None in a file written by hand.
    """

    plan: Plan
    estimate: Estimate | None = None
    workload: Workload | None = None

    def __post_init__(self) -> None:
        if self.estimate is not None and self.estimate.plan != self.plan:
            raise ConfigError(
                "the estimate is not for the plan in this file",
                where="PlanFile",
                fix="Delete 'estimate' from the file, or run `paceline plan` again",
            )


def load_plan_file(path: Path) -> PlanFile:
    """Return the plan at `path`: a plan file, a Plan alone, or an Estimate of version 1 or later.

    Raises:
        NotFound: there is no such file.
        ConfigError: it is none of these.
    """
    text, where = read_text(path), str(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return PlanFile.from_text(text, where=where)  # says where the JSON ends
    refuse_other_kind(data, FileKind.PLAN, where)
    if (
        isinstance(data, dict) and "breakdown" in data
    ):  # an Estimate, as earlier versions of `paceline plan --out` wrote
        estimate = Estimate.from_json(data, where=where)
        return PlanFile(plan=estimate.plan, estimate=estimate)
    if isinstance(data, dict) and not data.keys() - {"version"}:  # of which a Plan has no field
        raise ConfigError(
            "this is no plan",
            where=where,
            why="it has none of a plan's fields",
            fix="Make one: paceline plan ... --out plan.json",
        )
    if isinstance(data, dict) and "plan" not in data:
        return PlanFile(plan=Plan.from_json(data, where=where))
    return PlanFile.from_json(data, where=where)
