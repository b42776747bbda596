"""The folder of a run: where its files lie, and how they are read; see run-folder.md.

`launch` writes the files, `report` and `cli` read them. A file of an older version is upgraded when
it is read; the error for a file of a newer version names the Paceline that wrote it.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.core.errors import ConfigError, CorruptData, Interrupted, NewerFormat, NotFound
from paceline.core.estimate import Estimate
from paceline.core.files import read_text
from paceline.core.plan_file import PlanFile
from paceline.core.record import Record
from paceline.runs.launcher import is_alive
from paceline.runs.result import RunResult

if TYPE_CHECKING:
    from pathlib import Path

R = TypeVar("R", bound=Record)


class RunState(StrEnum):
    """How far a run has come."""

    FINISHED = "finished"  # it has a result
    STOPPED = "stopped"  # it has a result, and a signal ended it, as Ctrl-C and a time limit do
    RUNNING = "running"  # its launcher runs
    LAUNCHER_KILLED = "launcher killed"  # no result, and its launcher is gone
    UNKNOWN = "unknown"  # no result, and its launcher is (or was) on another machine, or unknown


CONFIG_VERSION = 2  # of config.json; 1 named a setting's provenance "origin"
VERSIONS_VERSION = 1  # of versions.json
PLAN_NAME = "plan.json"
BUDGET_NAME = "budget.json"
_ESTIMATE_NAME = "estimate.json"  # which an earlier Paceline kept in place of the plan


class RunFolder:
    """The folder of one run. Nothing is read until a method asks for it.

    Attributes:
        path: of the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Return the folder of an existing run; the demo's folder stands for the run inside it.

        Raises:
            NotFound: there is no such folder.
        """
        if not path.is_dir():
            raise NotFound("no such run", where=str(path), fix="Give the folder of a run")
        inner = path / "run"
        if inner.is_dir() and not (path / "trace").exists():
            kind = _read_object(path / "result.json").get("kind")
            return cls(inner if kind == "demo" else path)
        return cls(path)

    @property
    def trace(self) -> Path:
        """The folder of the ranks' traces and failure reports."""
        return self.path / "trace"

    def file(self, name: str) -> Path:
        """Return the path of the run's file `name`, for example ``result.json``."""
        return self.path / name

    def state(self) -> RunState:
        """Return how far the run has come; a script that recorded itself has no launcher."""
        if self.file("result.json").exists():
            return RunState.STOPPED if self._was_stopped() else RunState.FINISHED
        launcher = _read_object(self.file("config.json")).get("launcher")
        alive = is_alive(launcher) if isinstance(launcher, dict) else None
        if alive is None:
            return RunState.UNKNOWN
        return RunState.RUNNING if alive else RunState.LAUNCHER_KILLED

    def _was_stopped(self) -> bool:
        try:
            result = _read_object(self.file("result.json"))
        except CorruptData:  # `read_result` says so; traces can be read without it
            return False
        return result.get("exit_code") == Interrupted.exit_code and not result.get("failure")

    def state_words(self) -> str:
        """Return a sentence about a run that is not finished; empty for one that is."""
        match self.state():
            case RunState.STOPPED:
                return "The run was stopped by a signal. This is what it had recorded by then."
            case RunState.RUNNING:
                return "The run is still going on: this is what it has recorded so far."
            case RunState.LAUNCHER_KILLED:
                return (
                    "The run did not come to its end: its launcher was killed, and the ranks with "
                    "it. This is what they had recorded by then."
                )
            case RunState.UNKNOWN:
                launcher = _read_object(self.file("config.json")).get("launcher")
                if not isinstance(launcher, dict):
                    return ""
                return (
                    f"The run has no result: it is still going on at {launcher.get('host')}, or "
                    "its launcher was killed. This is what it had recorded by now."
                )
        return ""

    def read_result(self) -> RunResult | None:
        """Return the run's result; None for a run that wrote none. Errors as in `read_record`."""
        return self.read_record(RunResult, "result.json")

    def read_record(self, cls: type[R], name: str) -> R | None:
        """Return the record in file `name`; None without the file.

        Raises:
            CorruptData: it does not hold such a record; nobody writes these files by hand.
            NewerFormat: a newer Paceline wrote it; the error names that Paceline if the run does.
        """
        path = self.file(name)
        if not path.exists():
            return None
        self._refuse_newer(name, _read_object(path), cls.version)
        try:
            return cls.from_text(read_text(path), where=str(path))
        except ConfigError as problem:
            why = f"{problem.what}: {problem.why}" if problem.why else problem.what
            raise _unreadable(problem.where, why) from problem

    def read_plan(self) -> PlanFile | None:
        """Return the plan that the run followed; None without a plan. Errors as `read_record`.

        A folder of an earlier Paceline holds the Estimate alone, as ``estimate.json``.
        """
        plan = self.read_record(PlanFile, PLAN_NAME)
        if plan is not None:
            return plan
        estimate = self.read_record(Estimate, _ESTIMATE_NAME)
        return PlanFile(plan=estimate.plan, estimate=estimate) if estimate else None

    def read_object(self, name: str) -> dict[str, Any]:
        """Return the JSON object in file `name` as it was written; empty without the file.

        Raises:
            CorruptData: it is not JSON.
        """
        return _read_object(self.file(name))

    def read_config(self) -> dict[str, Any]:
        """Return ``config.json``: ``values`` (each with its provenance), ``script``, ``args``, ...

        Empty without the file. Errors as in `read_record`.
        """
        config = _read_object(self.file("config.json"))
        self._refuse_newer("config.json", config, CONFIG_VERSION)
        values = config.get("values")
        for setting in values.values() if isinstance(values, dict) else ():
            if isinstance(setting, dict) and "origin" in setting:  # version 1
                setting["provenance"] = setting.pop("origin")
        return config

    def read_versions(self) -> dict[str, Any]:
        """Return ``versions.json``; empty without the file. Errors as `read_record`."""
        versions = _read_object(self.file("versions.json"))
        self._refuse_newer("versions.json", versions, VERSIONS_VERSION)
        return versions

    def _refuse_newer(self, name: str, data: dict[str, Any], known: int) -> None:
        version = data.get("version")
        if not isinstance(version, int) or version <= known:
            return
        writer = _read_object(self.file("versions.json")).get("paceline")
        needed = f"Use Paceline {writer} or newer" if writer else "Use a newer Paceline"
        raise NewerFormat(
            "a newer Paceline wrote this run",
            where=str(self.file(name)),
            why=f"the file has format version {version}, this Paceline reads up to {known}",
            fix=needed,
        )


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty without the file."""
    if not path.exists():
        return {}
    try:
        data = json.loads(read_text(path))
    except json.JSONDecodeError as problem:
        raise _unreadable(str(path), f"not valid JSON: {problem}") from problem
    return data if isinstance(data, dict) else {}


def _unreadable(where: str, why: str) -> CorruptData:
    return CorruptData(
        "a file of the run is not readable",
        where=where,
        why=why,
        fix="Restore it, or move it away to do without it",
    )
