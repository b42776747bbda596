"""The plan that a cell's run follows: ranks, threads, precision, and its prediction.

With a prediction the run can correct the machine's figures afterwards (`paceline plan --from`). The
model is captured once for each batch; the estimates of all cells follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from paceline.core.errors import NotFound, UsageError
from paceline.core.machine import Machine
from paceline.core.plan import CollectivesChoice, EngineChoice, Mesh, Plan, PrecisionChoice
from paceline.core.plan_file import PlanFile
from paceline.core.workload import Workload
from paceline.perf import estimate
from paceline.probe.machine_file import load_machine
from paceline.studies.characterize.axes import BATCH, CHECKPOINTING, PRECISION, WORKERS
from paceline.studies.predict import StrategyOptions, predict

if TYPE_CHECKING:
    from paceline.studies.characterize.axes import Cell

# Axes whose values a prediction knows; with another value of any other axis there is none.
_PREDICTED = ("model", BATCH, "storage", WORKERS)


@dataclass(kw_only=True, slots=True)
class CellPlans:
    """Makes the plans of a sweep's cells.

    Attributes:
        threads: of each rank, equal on all numbers of ranks: a rank is the same device.
        engine: that reduces gradients in scripts that call `paceline.training.prepare`.
        collectives: of all runs.
        predicted: values with which the step is that of the target, by the axis's name.
        recomputes: whether the axis checkpointing reaches the program by its plan.
        target: ``FILE.py:FUNCTION`` of the training step, with ``{model}`` for the axis's value;
            empty: nothing is predicted.
        machine_path: on which it is predicted; None: this host's probe.
        why_not: why nothing is predicted although there is a target; empty if it is.
    """

    threads: int
    engine: EngineChoice
    collectives: CollectivesChoice
    predicted: Mapping[str, str]
    recomputes: bool = False
    target: str = ""
    machine_path: Path | None = None
    why_not: str = ""
    _machine: Machine | None = None
    _workloads: dict[tuple[str, int | None], Workload] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.target:
            return
        try:
            self._machine = load_machine(self.machine_path)
        except NotFound as problem:
            if self.machine_path is not None:
                raise
            self.why_not = f"{problem.what}: run `paceline probe` before"
            return
        if not self._machine.devices or not self._machine.devices[0].rates:
            self.why_not = f"the machine {self._machine.name} has no measured rates"
            self._machine = None

    def plan(self, cell: Cell) -> PlanFile:
        """Return the plan of a cell.

        Raises:
            UsageError: a value of the precision is unknown.
            PacelineError: the capture of the model failed.
        """
        plan = Plan(
            mesh=Mesh(data=cell.ranks),
            threads=self.threads,
            engine=self.engine,
            collectives=self.collectives,
            precision=precision_of(cell.settings.get(PRECISION)),
            recompute="full"
            if self.recomputes and cell.settings.get(CHECKPOINTING) == "on"
            else "none",
            loader_workers=_whole(cell.settings.get(WORKERS), 0),
        )
        is_known = all(
            value == self.predicted.get(axis)
            for axis, value in cell.settings.items()
            if axis not in _PREDICTED
        )
        if self._machine is None or not is_known:
            return PlanFile(plan=plan)
        batch = cell.settings.get(BATCH)
        workload = self._workload(cell, int(batch) if batch and batch.isdecimal() else None)
        return PlanFile(
            plan=plan, estimate=estimate(self._machine, workload, plan), workload=workload
        )

    def _workload(self, cell: Cell, batch: int | None) -> Workload:
        target = self.target.replace("{model}", cell.settings.get("model", ""))
        if (target, batch) not in self._workloads:
            options = StrategyOptions(batch=batch, compute="rates")
            planned = predict(
                target,
                ranks=1,
                threads=self.threads,
                machine_path=self.machine_path,
                engine=self.engine,
                collectives=self.collectives,
                strategy=options,
            )
            assert planned.workload is not None
            self._workloads[target, batch] = planned.workload
        return self._workloads[target, batch]


def precision_of(value: str | None) -> PrecisionChoice:
    """Return the precision of a cell; float32 where no axis has it.

    Raises:
        UsageError: there is none of that name.
    """
    if value is None:
        return "float32"
    if value not in get_args(PrecisionChoice):
        raise UsageError(
            f"there is no precision {value!r}",
            where="paceline characterize --precision",
            fix=f"Give some of {', '.join(get_args(PrecisionChoice))}",
        )
    return cast("PrecisionChoice", value)


def _whole(value: str | None, otherwise: int) -> int:
    return int(value) if value is not None and value.isdecimal() else otherwise
