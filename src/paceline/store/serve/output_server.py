"""The server of one output on one node of a run. Started with ``-m`` by the launcher.

::

    launcher ---stdin: OutputSpec---> guard ---fork---> server   drains until stdin ends
             <--stdout: a line when it is ready, then an OutputReport-------+

A server that is killed is forked anew and goes on: what is to be drained lies on local storage.
When stdin ends, what is left is drained; that ends without a result only if no byte could be
copied for as long as the launcher says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.core.processes import die_with_parent, signal_name
from paceline.core.record import Record
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.drain import ROOM, TARGET, Drain, DrainRoom
from paceline.store.serve.output_node import OutputNode, leader_of

_STEP_S = 0.1  # between two looks at what is new
_STALE_S = 2.0  # between two looks for what killed writers left
_NICENESS = 10
_PROGRESS_S = 5.0  # between two lines on what is left at the end
_RETRY_S = 0.5  # at the end, between two attempts
_MOST_SHORT, _STEADY_S = 3, 2.0  # so many servers in a row that live shorter are enough
READY = "ready"
_LOG = logging.getLogger(__name__)
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSpec:
    """What a server of an output has to know.

    Attributes:
        target: folder of the shared file system.
        folder: on local storage, with the room.
        end_s: at the end, the longest time without progress.
        leftovers: folders of runs that were killed, each with a lock of the launcher's.
        nodes: addresses of the servers of all nodes; fewer than two: programs write here only.
        number: of this node in these.
        token: of all nodes.
        listener: descriptor of the socket that listens at this node's address.
    """

    target: str
    folder: str
    end_s: float
    leftovers: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    number: int = 0
    token: str = ""
    listener: int = -1

    def to_line(self) -> bytes:
        """Return it as it travels."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return what `to_line` wrote."""
        fields: dict[str, Any] = json.loads(line)
        lists = {name: tuple(fields[name]) for name in ("leftovers", "nodes")}
        return cls(**{**fields, **lists})


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputReport(Record):
    """What became of the files that programs wrote on one node.

    Attributes:
        target: folder of the shared file system.
        files: that were copied there; a new version counts as a file.
        bytes: of these.
        renamed: in the target.
        removed: from the target.
        problems: files that are not drained, each with the reason.
    """

    target: str
    files: int
    bytes: int
    renamed: int
    removed: int
    problems: dict[str, str]


def main() -> int:
    """Drain until stdin ends, and what is left then; return the exit code."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # the run ended before it began
        return 0
    logging.basicConfig(format="paceline: output: %(message)s")
    return _guard(OutputSpec.from_line(line))


def _guard(spec: OutputSpec) -> int:
    """Keep a server running until one has ended by itself; return its exit code."""
    lifetimes_s = [_STEADY_S] * _MOST_SHORT
    while True:
        begin_s = time.monotonic()
        child = _fork(spec)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code >= 0:
            return code
        lifetimes_s = [*lifetimes_s[1:], time.monotonic() - begin_s]
        is_steady = max(lifetimes_s) >= _STEADY_S
        _LOG.warning(
            "the server that drains to %s was killed by %s; %s",
            spec.target,
            signal_name(-code),
            "it is started again" if is_steady else "not started again, it ends too often",
        )
        if not is_steady:
            return 1


def _fork(spec: OutputSpec) -> int:
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(guard)
        code = _serve(spec)
    except OSError as problem:
        _LOG.error("%s", problem)  # the message says it all
    except BaseException:
        _LOG.exception("it failed")
        raise
    finally:
        os._exit(code)
    return code


def _serve(spec: OutputSpec) -> int:
    folder = Path(spec.folder)
    leads = not spec.nodes or leader_of(spec.target, len(spec.nodes)) == spec.number
    room = DrainRoom(folder / ROOM)
    drain = Drain(folder, Path(spec.target), room, leads=leads)
    for leftover in spec.leftovers:
        _salvage(Path(leftover))
    drain.begin()
    node = _share(spec) if len(spec.nodes) > 1 else None
    # This thread drains: programs that compute, and threads that answer them, go first.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    _say(READY)
    stale_s = time.monotonic() + _STALE_S
    while not select.select([sys.stdin], [], [], _STEP_S)[0]:
        drain.step()
        if time.monotonic() >= stale_s:
            drain.remove_stale()
            stale_s = time.monotonic() + _STALE_S
    if node is not None:
        node.close()
    threading.Thread(target=_say_progress, args=(spec, room), daemon=True).start()
    _finish(drain, spec.end_s)
    counts = drain.counts
    report = OutputReport(
        target=spec.target,
        files=counts.files,
        bytes=counts.bytes,
        renamed=counts.renamed,
        removed=counts.removed,
        problems={name: str(problem) for name, problem in drain.problems.items()},
    )
    _say(json.dumps(report.to_json()))
    return 0


def _share(spec: OutputSpec) -> OutputNode:
    return OutputNode(
        Path(spec.folder),
        Path(spec.target),
        [NodeAddress.parse(name) for name in spec.nodes],
        spec.number,
        spec.token,
        socket.socket(fileno=os.dup(spec.listener)),
    )


def _salvage(folder: Path) -> None:
    """Drain what a run that was killed had published, unless its target has later files."""
    try:
        target = Path((folder / TARGET).read_text())
        drain = Drain(folder, target, DrainRoom(folder / ROOM), keeps_later=True)
        drain.step()
    except (OSError, ValueError) as problem:
        _LOG.warning("%s, which a run left, is not drained: %s", folder, problem)
        return
    if drain.problems:
        name, why = next(iter(drain.problems.items()))
        _LOG.warning("%s/%s, which a run left in %s, is not drained: %s", target, name, folder, why)
        return
    shutil.rmtree(folder, ignore_errors=True)


def _finish(drain: Drain, end_s: float) -> None:
    """Drain what is left; give up after so long without progress."""
    drain.step()
    drain.verify()
    since_s, before = time.monotonic(), -1
    while drain.step():
        if drain.counts.bytes != before:
            since_s, before = time.monotonic(), drain.counts.bytes
        if time.monotonic() - since_s >= end_s:
            return
        select.select([], [], [], _RETRY_S)


def _say_progress(spec: OutputSpec, room: DrainRoom) -> None:
    never = threading.Event()
    while not never.wait(_PROGRESS_S):
        left = room.published_bytes - room.settled_bytes
        _LOG.warning("%.1f MiB are left to drain to %s", left / (1 << 20), spec.target)


def _say(line: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
