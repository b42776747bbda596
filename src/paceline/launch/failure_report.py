"""The report that a rank leaves when its script raises: written by the rank, read by its launcher.

It lies beside the trace as ``trace/rank-00000.failure``, one object of JSON.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Any

from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError, StorageError
from paceline.core.files import commit_text
from paceline.launch.lost_children import lost_child

if TYPE_CHECKING:
    import types
    from collections.abc import Collection
    from pathlib import Path

_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:|$)")  # the line after the frames, which are indented
_CAUGHT = re.compile(r"Caught \w+ in (.*?)\.?\n")  # as torch words it
COLLECTOR = "paceline.trace.collectors.torch"
_SPAWN = "torch.multiprocessing.spawn"


def write_report(
    error: BaseException,
    run: Path,
    rank: int,
    *,
    exit_code: int = 0,
    own_files: Collection[str] = (),
) -> None:
    """Write what ended a rank's script; if that fails, write its traceback to stderr.

    Args:
        error: the exception.
        run: folder of the run.
        rank: the global rank.
        exit_code: of a script that called `sys.exit`: it has no traceback, as under python.
        own_files: files of the outermost frames that are not the script's: the traceback leaves
            these frames out.
    """
    _take_no_more_signals()
    child = None if exit_code else lost_child(error)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in own_files:
        frames = frames.tb_next
    collector = sys.modules.get(COLLECTOR)
    if type(error).__module__ == _SPAWN:  # the process that failed is a child, and numbered
        rank = getattr(error, "error_index", rank)
    named = f"exit code {exit_code}{_place(frames)}" if exit_code else _named(error)
    report = {
        "rank": rank,
        "at_ns": int(SystemClock().wall_s() * 1e9),  # comparable between nodes
        "phase": collector.phase_of(error) if collector else "",
        "traceback": "" if exit_code else f"{type(error).__name__}: {error}",
        "error": named,
        "child": child._asdict() if child else None,
    }
    path = run / "trace" / f"rank-{rank:05d}.failure"
    if not exit_code:
        # Formatting the traceback reads source files. Meanwhile the launcher may stop this rank for
        # the failure of another: without any report it would pass for the rank that failed first.
        with contextlib.suppress(StorageError):
            commit_text(path, json.dumps(report))
        text = "".join(traceback.format_exception(type(error), error, frames))
        report["traceback"] = text
    try:
        commit_text(path, json.dumps(report))
    except StorageError:
        with contextlib.suppress(OSError):
            sys.stderr.write(str(report["traceback"]))


def _take_no_more_signals() -> None:
    """Have torch's handler raise no more: it does at each end of a worker, also amid a report."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def read_reports(run: Path) -> list[dict[str, Any]]:
    """Return the reports of ranks whose script raised, the first to fail first."""
    reports = []
    for path in (run / "trace").glob("rank-*.failure"):
        try:
            reports.append(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError):  # cut short by a full disk
            continue
    return sorted(reports, key=lambda report: int(report["at_ns"]))


def _named(error: BaseException) -> str:
    """Return the exception in one line.

    Of an exception that carries another process's traceback as text, as those of a loader's
    workers do, the one in that traceback, and the process.
    """
    text = str(error)
    if (inner := _carried(text)) is not None:
        return inner
    # The repr of the first holds the source line and numbers without names, that of the second
    # neither the reason nor what to do.
    if isinstance(error, SyntaxError | PacelineError):
        return f"{type(error).__name__}: {error}"
    lines = text.strip().splitlines()
    if len(lines) > 1:
        return f"{type(error).__name__}: {lines[0]}"
    return repr(error)


def _carried(text: str) -> str | None:
    """Return the last exception of a traceback within a message; None if there is none."""
    before, found, after = text.rpartition(_TRACEBACK)
    if not found:
        return None
    raised = next((line for line in after.splitlines() if _EXCEPTION.match(line)), None)
    if raised is None:
        return None
    where = _CAUGHT.search(before)
    return f"{raised.strip()} (in {where[1]})" if where else raised.strip()


def _place(frames: types.TracebackType | None) -> str:
    """Return in words which line of the script raised the exception, or called what raised it."""
    if frames is None:
        return ""
    stack = traceback.extract_tb(frames)
    lines = [frame.lineno for frame in stack if frame.filename == stack[0].filename]
    return f", at line {lines[-1]}"
