"""Asks the daemon of a queue."""

from __future__ import annotations

import json
import socket
import threading
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, DeadlineExceeded, Missing, PacelineError
from paceline.scheduler.local.protocol.messages import MAX_BYTES, Reply, Request

if TYPE_CHECKING:
    from paceline.core.clock import Clock
    from paceline.scheduler.local.paths import QueuePaths

ANSWER_S = 30.0  # the daemon answers at once, unless its disk hangs
RETRY_S = 30.0  # for a daemon that was killed while it answered, and is started again
_PAUSE_S = 0.1
_CHUNK = 1 << 16
_WAIT_S = 60.0  # a wait is asked again and again: a daemon that dies is noticed


def ask(paths: QueuePaths, request: Request, clock: Clock, *, absent_s: float = 0.0) -> Reply:
    """Return the daemon's answer.

    A request may be sent twice when the daemon dies meanwhile: all are made so that it makes no
    difference.

    Args:
        paths: of the queue.
        request: to send.
        clock: for deadlines.
        absent_s: how long to wait for a daemon where there is none, since it is being started.

    Raises:
        Missing: no daemon serves the queue.
        DeadlineExceeded: it did not answer in time, or was killed and not started again.
        PacelineError: it refused; the error is its own.
    """
    lost = False
    begin_s = clock.now_s()
    until_s = begin_s + absent_s + request.timeout_s + ANSWER_S
    never = threading.Event()
    while True:
        try:
            reply = _ask(paths, request, until_s - clock.now_s())
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if not lost and clock.now_s() >= begin_s + absent_s:
                waited = f", also after {absent_s:g} s" if absent_s else ""
                raise Missing(
                    f"no daemon serves this queue{waited}",
                    where=str(paths.folder),
                    fix=f"Start one: paceline queue serve --dir {paths.folder}",
                ) from None
        except ConnectionError:  # it was killed
            until_s = until_s if lost else clock.now_s() + RETRY_S
            lost = True
        except TimeoutError:
            raise DeadlineExceeded(
                "the daemon did not answer",
                where=str(paths.socket),
                fix="Look at its output; end it and start it again, its jobs go on meanwhile",
            ) from None
        if clock.now_s() >= until_s:
            raise DeadlineExceeded(
                "the daemon ended before it answered",
                where=str(paths.socket),
                why="the request may have been carried out",
                fix=f"Start it: paceline queue serve --dir {paths.folder}; then paceline queue ls",
            )
        clock.wait(never, _PAUSE_S)
    if reply.error is not None:  # not above: the daemon's errors are no errors of the connection
        raise PacelineError.from_json({"error": reply.error})
    return reply


def wait_for_end(paths: QueuePaths, name: str, clock: Clock) -> Reply:
    """Return a job when it has ended; errors as in `ask`."""
    while True:  # a job takes as long as it takes; each request has its own deadline
        reply = ask(paths, Request(verb="wait", name=name, timeout_s=_WAIT_S), clock)
        if reply.jobs[0].ended_s is not None:
            return reply


def _ask(paths: QueuePaths, request: Request, timeout_s: float) -> Reply:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.1, timeout_s))
        connection.connect(str(paths.socket))
        connection.sendall(json.dumps(request.to_json()).encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            chunk = connection.recv(_CHUNK)
            if not chunk or len(received) > MAX_BYTES:
                raise ConnectionResetError
            received += chunk
    try:
        return Reply.from_text(received.decode(), where=str(paths.socket))
    except (ConfigError, UnicodeDecodeError) as problem:
        raise PacelineError(
            "the daemon's answer cannot be read",
            where=str(paths.socket),
            why=str(problem),
            fix="Use the same Paceline for the daemon and for commands",
        ) from problem
