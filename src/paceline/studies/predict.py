"""Predicts a user's model on a probed machine: captures in a process with torch, estimates here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from paceline.core.errors import DeadlineExceeded, NotFound, ScriptFailed, UsageError
from paceline.core.plan import Mesh, Plan
from paceline.core.plan_file import PlanFile
from paceline.core.workload import Workload
from paceline.perf import estimate
from paceline.probe.machine_file import load_machine

CAPTURE_DEADLINE_S = 300.0


def predict(
    target: str, *, ranks: int, threads: int | None = None, machine_path: Path | None = None
) -> PlanFile:
    """Return the plan of a model on one node, with its estimate and the model's Workload.

    Args:
        target: ``FILE.py:FUNCTION``; the function returns what a training step needs.
        ranks: that train, data-parallel.
        threads: of each; by default an equal share of the machine's cores.
        machine_path: a Machine as JSON; by default what ``paceline probe`` wrote on this host.

    Raises:
        NotFound: there is no such file, or no machine was probed.
        UsageError: the model cannot be captured or the plan not predicted.
        ScriptFailed: the user's code raised; its traceback went to stderr.
    """
    machine = load_machine(machine_path)
    workload = capture_file(target)
    cores = machine.devices[0].cores if machine.devices else 1
    plan = Plan(mesh=Mesh(data=ranks), threads=threads or max(1, cores // ranks))
    return PlanFile(plan=plan, estimate=estimate(machine, workload, plan), workload=workload)


def capture_file(target: str, *, deadline_s: float = CAPTURE_DEADLINE_S) -> Workload:
    """Return the Workload of the training step that ``FILE.py:FUNCTION`` returns.

    Raises:
        NotFound, UsageError, ScriptFailed: as in `predict`.
        DeadlineExceeded: the user's code did not end in time.
    """
    name, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        raise UsageError(
            f"'{target}' is not FILE.py:FUNCTION", fix="For example: paceline plan model.py:step"
        )
    path = Path(name)
    if not path.exists():
        raise NotFound("no such file", where=str(path), fix="Check the path before the colon")
    command = [sys.executable, "-m", "paceline.training.capture_worker", str(path), function]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            "the model was not captured in time",
            where=target,
            why=f"{deadline_s:g} s passed",
            fix="Make the function return without training or loading data",
        ) from None
    if done.returncode:
        raise ScriptFailed(
            "the model's code failed",
            where=target,
            why="its traceback stands above",
            fix="Mend what it names; the function must run by itself",
        )
    try:
        answer = json.loads(done.stdout.strip().rpartition("\n")[2])  # others may print before it
    except json.JSONDecodeError:
        raise ScriptFailed(
            "the model's code ended the process",
            where=target,
            why="no answer came",
            fix="Take out what exits, forks or prints when the interpreter ends",
        ) from None
    if "error" in answer:
        problem = answer["error"]
        raise UsageError(
            problem["what"], where=problem["where"], why=problem["why"], fix=problem["fix"]
        )
    return Workload.from_json(answer, where=target)
