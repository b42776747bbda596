"""Starts the recorder in a process that has turned out to be a rank, and ends it with the process.

Three ways lead here:

- `worker`, the process of each rank of ``paceline run``, before it runs the script;
- `startup.sitecustomize`, in any other Python process below ``paceline run`` and ``record``, once
  it has joined a process group or runs its first backward pass;
- `paceline.record`, a line in the script.

A rank has one trace: whichever process creates ``trace/rank-00000.trace`` first is the rank, and a
helper process that the rank starts, with the rank's environment variables, stays unrecorded.
"""

from __future__ import annotations

import atexit
import importlib
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.config import environment
from paceline.core.errors import DestinationExists, PacelineError
from paceline.launch.failure_report import COLLECTOR, write_report
from paceline.launch.lost_children import note_lost_children
from paceline.native import Recorder
from paceline.store.serve.run_data import served_packs
from paceline.trace.format.files import read_status, trace_name

if TYPE_CHECKING:
    import types

    from paceline.trace.format.header import Status

VARIABLE = "_PACELINE_RECORD"  # not PACELINE_: that would be a setting of the user's
_STARTUP = Path(__file__).parent / "startup"
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recording:
    """The recording of this process: made by its main thread, ended by the same.

    Attributes:
        pid: the process that it belongs to; a forked child inherits the object, not the recording.
    """

    pid: int
    run: Path
    rank: int
    collector: Any
    recorder: Any


_recording: _Recording | None = None


def child_environment(run: Path, profile_steps: int = 0) -> dict[str, str]:
    """Return the variables that make Python processes record themselves in folder `run`.

    Args:
        run: the folder.
        profile_steps: see `start`.
    """
    before = environment().get("PYTHONPATH")
    return {
        VARIABLE: json.dumps({"run": str(run.absolute()), "profile_steps": profile_steps}),
        "PYTHONPATH": f"{_STARTUP}{os.pathsep}{before}" if before else str(_STARTUP),
    }


def is_recorded() -> bool:
    """Whether this process is recorded."""
    return _recording is not None and _recording.pid == os.getpid()


def start(run: Path, rank: int, world_size: int, profile_steps: int = 0) -> None:
    """Record this process as a rank from now on, until `close`.

    Args:
        run: folder of the run.
        rank: of this process.
        world_size: number of ranks.
        profile_steps: steps of which torch.profiler adds operators and kernels.

    Raises:
        DestinationExists: another process is recorded as this rank, or another job in this folder.
        StorageError: the trace cannot be created.
    """
    global _recording  # a process is one rank
    recorder = _open(run, rank, world_size)
    # importlib, because this module imports torch: only a rank may load it, and only after its
    # threads and cores are set.
    collector = importlib.import_module(COLLECTOR).TorchCollector(
        recorder, profile_steps=profile_steps
    )
    collector.install()
    recorder.attach_io()  # nothing without the library that sees calls for files
    recorder.count_node(os.fsencode(run / "trace"))
    served = served_packs(environment())
    if served and environment().get("LOCAL_RANK", "0") == "0":  # counts are those of the node
        collector.see_served_data(pack.requests for pack in served)
    note_lost_children(run, rank)
    _recording = _Recording(os.getpid(), run, rank, collector, recorder)


def close() -> None:
    """Write what is left, and close the trace; nothing in a process that is not recorded."""
    global _recording  # a process is one rank
    if _recording is None or _recording.pid != os.getpid():
        return
    recording, _recording = _recording, None
    recording.collector.close()
    recording.recorder.detach_io()
    recording.recorder.close()


def on_training() -> None:
    """Record this process if it is a rank of a recorded run; whatever fails, training goes on."""
    settings = environment().get(VARIABLE)
    if not settings or is_recorded():
        return
    if _recording is not None:
        _LOG.warning(
            "this process is not recorded: it was forked by a process that had trained, and has "
            "the recorder of that one; start ranks before the first step, or by spawn"
        )
        return
    try:
        given = json.loads(settings)
        start_here(Path(given["run"]), given.get("profile_steps", 0))
    except Exception as problem:  # noqa: BLE001  # whatever a changed torch or a full disk raises
        _LOG.warning("this process is not recorded: %s", problem)


def start_here(run: Path, profile_steps: int = 0) -> None:
    """Record this process as the rank that torch or its environment says it is, until it ends.

    Args:
        run: folder of the run.
        profile_steps: see `start`.

    Raises:
        DestinationExists: another process is recorded as this rank, or another job in this folder.
        StorageError: the trace cannot be created.
    """
    start(run, *place(), profile_steps)
    atexit.register(close)
    if multiprocessing.parent_process() is not None:  # a forked child ends without exit handlers
        multiprocessing.util.Finalize(None, close, exitpriority=0)
    original = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, frames: types.TracebackType | None
    ) -> None:
        # A forked child inherits this hook; what it raises is not the failure of its parent's rank.
        if is_recorded() and not isinstance(error, KeyboardInterrupt):
            assert _recording is not None
            try:
                write_report(error, _recording.run, _recording.rank)
            except Exception:  # noqa: BLE001  # of torch's handler, as one more worker ended just now
                write_report(error, _recording.run, _recording.rank)
        original(kind, error, frames)

    sys.excepthook = report


def place() -> tuple[int, int]:
    """Return this process's rank and world size: its process group's, or the environment's."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank()), int(distributed.get_world_size())
    environ = environment()
    try:
        rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world_size) if 0 <= rank < world_size else (0, 1)


def _open(run: Path, rank: int, world_size: int) -> Recorder:
    path = run / "trace" / trace_name(rank)
    _refuse_other_job(path.parent, world_size)
    try:
        return _create(path, rank, world_size)
    except FileExistsError:
        if world_size > 1 and _is_idle(path):
            path.unlink(missing_ok=True)
            return _create(path, rank, world_size)
        raise DestinationExists(
            f"another process is recorded as rank {rank}",
            where=str(path),
            why="it was the first to train with this rank",
            fix="Give each process of a run its own RANK",
        ) from None


def _refuse_other_job(folder: Path, world_size: int) -> None:
    """Refuse to record a job beside another one: a script may train twice, with other ranks.

    The traces of a folder agree on the number of ranks, so one of them tells.
    """
    for other in folder.glob("rank-*.trace"):
        try:
            status = read_status(other)
        except (PacelineError, OSError):  # another rank is just creating it
            continue
        if _took_no_step_alone(status):
            continue
        if status.world_size == world_size:
            return
        raise DestinationExists(
            f"a job with world size {status.world_size} is recorded in the run's folder",
            where=str(other),
            why=f"this rank is of a job with world size {world_size}",
            fix="Record each job by a command of its own, to see both",
        )


def _create(path: Path, rank: int, world_size: int) -> Recorder:
    """Create the trace; through its folder's descriptor where its path is not valid UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
        try:
            return Recorder(f"/proc/self/fd/{folder}/{path.name}", rank, world_size)
        finally:
            os.close(folder)
    return Recorder(str(path), rank, world_size)


def _is_idle(path: Path) -> bool:
    """Whether a trace is there that `_took_no_step_alone`."""
    try:
        return _took_no_step_alone(read_status(path))
    except (PacelineError, OSError):
        return False


def _took_no_step_alone(status: Status) -> bool:
    """Whether a trace is of a single process that takes no steps.

    It is the parent of the ranks: a script under ``paceline run`` that starts its ranks itself,
    with `torch.multiprocessing.spawn`.
    """
    return status.world_size == 1 and status.step == 0
