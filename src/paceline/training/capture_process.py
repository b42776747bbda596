"""Captures the Workload of a user's model from a process without torch: asks `capture_worker`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.core.allocator import allocator_setting
from paceline.core.config import environment
from paceline.core.errors import DeadlineExceeded, NotFound, ScriptFailed, UsageError, WorkerFailed
from paceline.core.worker_process import WorkerCall, WorkerMessage, call
from paceline.core.workload import Workload

CAPTURE_DEADLINE_S = 300.0
_WORKER = "paceline.training.capture_worker"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest(WorkerMessage):
    """Which function to call: it returns what a training step needs.

    Attributes:
        path: of the Python file.
        function: its name in that file.
    """

    path: str
    function: str


def capture_file(target: str, *, deadline_s: float = CAPTURE_DEADLINE_S) -> Workload:
    """Return the Workload of the training step that ``FILE.py:FUNCTION`` returns.

    Args:
        target: ``FILE.py:FUNCTION``; the function takes no argument.
        deadline_s: for the import of torch, the user's function and the capture together.

    Raises:
        NotFound: there is no such file.
        UsageError: the function does not exist, or does not return what a training step needs.
        ScriptFailed: the user's code raised or ended the process; its output went to stderr.
        DeadlineExceeded: the user's code did not end in time.
        PacelineError: the user's code met it, for example CorruptPack.
    """
    name, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        raise UsageError(
            f"'{target}' is not FILE.py:FUNCTION", fix="For example: paceline plan model.py:step"
        )
    path = Path(name)
    if not path.exists():
        raise NotFound("no such file", where=str(path), fix="Check the path before the colon")
    work = WorkerCall(
        module=_WORKER,
        request=CaptureRequest(path=str(path), function=function),
        answer=Workload,
        name=f"capture of {target}",
        show_output=True,
        # Code of the user's that times its data set does so as the ranks will run it.
        environment=allocator_setting("keep", environment()).variables,
    )
    try:
        return call(work, deadline_s=deadline_s)
    except WorkerFailed as problem:
        raise ScriptFailed(
            "the model's code ended the process",
            where=target,
            why=f"{problem.what}: {problem.why}",
            fix="Remove the code that exits or crashes; the function must return",
        ) from problem
    except DeadlineExceeded as problem:
        raise DeadlineExceeded(
            "the model was not captured in time",
            where=target,
            why=problem.why,
            fix="Make the function return without training or loading data",
        ) from None
