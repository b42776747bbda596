"""Predicts a user's model on a probed machine: captures in a process with torch, estimates here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.plan import Mesh, Plan
from paceline.core.plan_file import PlanFile
from paceline.perf import estimate
from paceline.probe.machine_file import load_machine
from paceline.training.capture_process import capture_file

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.allocator import AllocatorChoice
    from paceline.core.plan import CollectivesChoice, EngineChoice


def predict(
    target: str,
    *,
    ranks: int,
    threads: int | None = None,
    machine_path: Path | None = None,
    allocator: AllocatorChoice = "keep",
    collectives: CollectivesChoice = "torch",
    engine: EngineChoice = "ddp",
) -> PlanFile:
    """Return the plan of a model on one node, with its estimate and the model's Workload.

    Args:
        target: ``FILE.py:FUNCTION``; the function returns what a training step needs.
        ranks: that train, data-parallel.
        threads: of each; by default an equal share of the machine's cores.
        machine_path: a Machine as JSON; by default what ``paceline probe`` wrote on this host.
        allocator: of the ranks, as ``paceline run`` will set it.
        collectives: of the ranks, likewise.
        engine: that reduces their gradients, as `paceline.training.prepare` will choose it.

    Raises:
        NotFound: there is no such file, or no machine was probed.
        UsageError: the model cannot be captured or the plan not predicted.
        PacelineError: the capture failed, see `capture_file`.
    """
    machine = load_machine(machine_path)
    workload = capture_file(target)
    cores = machine.devices[0].cores if machine.devices else 1
    plan = Plan(
        mesh=Mesh(data=ranks),
        threads=threads or max(1, cores // ranks),
        allocator=allocator,
        collectives=collectives,
        engine=engine,
    )
    return PlanFile(plan=plan, estimate=estimate(machine, workload, plan), workload=workload)
