"""Captures the Workload of a user's model from a process without torch: asks `capture_worker`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.allocator import allocator_setting
from paceline.core.config import environment
from paceline.core.errors import DeadlineExceeded, NotFound, ScriptFailed, UsageError, WorkerFailed
from paceline.core.plan import PipelineChoice
from paceline.core.worker_process import WorkerCall, WorkerMessage, call
from paceline.core.workload import Workload
from paceline.schedules.memory import StepEvents

if TYPE_CHECKING:
    from collections.abc import Sequence

CAPTURE_DEADLINE_S = 300.0
_WORKER = "paceline.training.capture_worker"


class BatchDivision(NamedTuple):
    """How a batch is divided.

    Attributes:
        replicas: of the model, each with its part of the batch, rounded up.
        microbatches: of a replica's batch; 0: the model is not cut into stages, and its Workload is
            that of the replica's whole batch.
        passes: of a model that is not cut: forward and backward passes, each of an equal part of
            the replica's batch, before an update.
        recompute: whether the elements of its sequences compute their forward pass again.
    """

    replicas: int
    microbatches: int
    passes: int = 1
    recompute: bool = False

    def sizes(self, batch: int) -> tuple[int, int]:
        """Return the microbatches of a replica, at most one per sample, and the largest one."""
        own = -(-batch // self.replicas)
        count = min(own, max(1, self.microbatches, self.passes))
        return count, -(-own // count)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDivision(WorkerMessage):
    """How a model's layers, and the batch of a replica, are divided.

    Attributes:
        layers: number of layers of each stage.
        batch: samples of the replica's batch.
        microbatches: of that batch.
        schedule: order in which the stages compute them.
    """

    layers: tuple[int, ...]
    batch: int
    microbatches: int
    schedule: PipelineChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureRequest(WorkerMessage):
    """Which function to call: it returns what a training step needs.

    Attributes:
        path: of the Python file.
        function: its name in that file.
        batch: samples of all replicas together; 0: the function's batch times `copies`.
        copies: how often the function's batch is in that batch.
        splits: how to divide that batch, in addition to the function's own step.
        memory: whether to capture the order in which the step's tensors are needed, too.
        stages: whose order is captured in place of the step's; None: no stages.
        may_run: whether a step that cannot be captured on fake tensors may run.
    """

    path: str
    function: str
    batch: int = 0
    copies: int = 1
    splits: tuple[BatchDivision, ...] = ()
    memory: bool = False
    stages: StageDivision | None = None
    may_run: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CapturedStep(WorkerMessage):
    """What `capture_splits` captured.

    Attributes:
        workload: of the function's own step.
        batch: that was divided.
        splits: a Workload for each of the request's, with the largest microbatch; with edges
            between layers where the model is cut into stages.
        recomputes: whether the model has layers that can compute their forward pass again.
        events: of the function's own step, if they were asked for.
        stage_events: of a step of each stage, likewise.
    """

    workload: Workload
    batch: int
    splits: tuple[Workload, ...] = ()
    recomputes: bool = False
    events: StepEvents | None = None
    stage_events: tuple[StepEvents, ...] = ()


def split_target(target: str) -> tuple[Path, str]:
    """Return the file and the function that ``FILE.py:FUNCTION`` names.

    Raises:
        NotFound: there is no such file.
        UsageError: it is not of that form.
    """
    name, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier():
        raise UsageError(
            f"'{target}' is not FILE.py:FUNCTION", fix="For example: paceline plan model.py:step"
        )
    path = Path(name)
    if not path.exists():
        raise NotFound("no such file", where=str(path), fix="Check the path before the colon")
    return path, function


def capture_file(target: str, *, deadline_s: float = CAPTURE_DEADLINE_S) -> Workload:
    """Return the Workload of the training step that ``FILE.py:FUNCTION`` returns.

    Errors as of `capture_splits`.

    Args:
        target: ``FILE.py:FUNCTION``; the function takes no argument.
        deadline_s: for the import of torch, the user's function and the capture together.
    """
    return capture_splits(target, (), deadline_s=deadline_s).workload


def capture_splits(
    target: str,
    splits: Sequence[BatchDivision],
    *,
    batch: int = 0,
    copies: int = 1,
    memory: bool = False,
    stages: StageDivision | None = None,
    may_run: bool = False,
    deadline_s: float = CAPTURE_DEADLINE_S,
) -> CapturedStep:
    """Return the Workloads of the training step of ``FILE.py:FUNCTION``, its batch divided.

    Args:
        target: ``FILE.py:FUNCTION``; the function takes no argument.
        splits: how to divide the batch.
        batch: samples of all replicas together; 0: the function's batch times `copies`.
        copies: how often the function's batch is in that batch.
        memory: whether to capture the events of the function's own step, too.
        stages: whose events to capture, too.
        may_run: whether a step that cannot be captured on fake tensors may run, as one of a model
            that branches on values.
        deadline_s: for the import of torch, the user's function and all captures together.

    Raises:
        NotFound: there is no such file.
        UsageError: the function does not exist, or does not return what a training step needs.
        ScriptFailed: the user's code raised or ended the process; its output went to stderr.
        DeadlineExceeded: the user's code did not end in time.
        PacelineError: the user's code met it, for example CorruptPack.
    """
    path, function = split_target(target)
    work = WorkerCall(
        module=_WORKER,
        request=CaptureRequest(
            path=str(path),
            function=function,
            batch=batch,
            copies=copies,
            splits=tuple(splits),
            memory=memory,
            stages=stages,
            may_run=may_run,
        ),
        answer=CapturedStep,
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
