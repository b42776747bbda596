"""Work in another process: a typed request goes in, a typed answer or a Paceline error comes out.

Work gets a process of its own when it loads torch, runs the user's code, needs fresh thread pools,
or may hang or crash. The caller and the worker share two record types and nothing else::

    caller                                      worker: python -m MODULE DESCRIPTOR PARENT
    ------                                      ------
    call(WorkerCall(module, request, Answer),   serve(Request, function)
         deadline_s=60)
       |-- spawn, in a session of its own ------> dies with its parent
       |-- length, JSON of the request ---------> function(request) -> answer
       <-- length, JSON ------------------------- {"answer"} | {"error"} | {"raised"}
       |-- kill its process group

Messages travel over a socket pair that carries nothing else, so whatever torch or the user's code
prints cannot be taken for the answer. What they print goes to the caller's stderr if
`WorkerCall.show_output` is set; its last line is part of the error if no answer comes.

A call ends in an answer; the worker's own PacelineError, raised again as the same class;
`DeadlineExceeded`; or `WorkerFailed` for any other exception, a crash, a kill, an invalid answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar

from paceline.core.errors import ConfigError, DeadlineExceeded, PacelineError, WorkerFailed
from paceline.core.processes import die_with_parent, signal_name
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Q = TypeVar("Q", bound=Record)
A = TypeVar("A", bound=Record)

MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct(">Q")
_CHUNK_BYTES = 1 << 20
_OUTPUT_BYTES = 8 << 10  # the end of what a worker printed
# A worker's end closes the socket, which is seen at once. Only a child that it forked can hold the
# socket open beyond that; then the next look at the process finds out.
_LOOK_S = 0.2
_EXIT_GRACE_S = 2.0  # a worker that has answered may run its exit handlers


class WorkerMessage(Record):
    """A request or an answer. It is never stored: both sides run the same version of Paceline."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerCall(Generic[A]):
    """One request to a worker.

    Attributes:
        module: run with ``python -m``; it calls `serve`.
        request: the record type that its `serve` names.
        answer: the record type that comes back.
        name: of this work in errors, for example ``capture of model.py:step``.
        show_output: whether what the worker prints is copied to this process's stderr.
        pass_fds: descriptors that the worker inherits under the same numbers.
        environment: variables that the worker has besides those of this process.
    """

    module: str
    request: Record
    answer: type[A]
    name: str
    show_output: bool = False
    pass_fds: tuple[int, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def call(work: WorkerCall[A], *, deadline_s: float) -> A:
    """Return the worker's answer; see `call_all`."""
    return call_all((work,), deadline_s=deadline_s)[0]


def call_all(works: Sequence[WorkerCall[A]], *, deadline_s: float) -> tuple[A, ...]:
    """Return the answers of workers that run at the same time, in the order of `works`.

    The first worker that fails ends the others. When this returns or raises, no worker and nothing
    in a worker's process group is left.

    Args:
        works: the requests, each with its worker's module.
        deadline_s: for all of them together, their start included.

    Raises:
        PacelineError: the worker raised it: the same class, what, where, why and fix.
        WorkerFailed: a worker raised something else, was killed, or ended without an answer.
        DeadlineExceeded: no answer in time.
    """
    deadline_at_s = time.monotonic() + deadline_s
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        workers = [stack.enter_context(WorkerProcess(work)) for work in works]
        for worker in workers:
            worker.send(deadline_at_s - time.monotonic())
            selector.register(worker.connection, selectors.EVENT_READ, worker)
        waiting = list(workers)
        while waiting:
            left_s = deadline_at_s - time.monotonic()
            if left_s <= 0:
                raise _late(waiting[0].work, deadline_s)
            selector.select(min(left_s, _LOOK_S))
            for worker in [worker for worker in waiting if worker.receive()]:
                selector.unregister(worker.connection)
                waiting.remove(worker)
        return tuple(worker.answer() for worker in workers)


def serve(request: type[Q], function: Callable[[Q], Record]) -> None:
    """Answer the one request of the process that started this one; the worker's ``main``."""
    descriptor, parent = map(int, sys.argv[1:3])
    die_with_parent(parent)
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)  # a program that the work starts must not hold it open
        message = _outcome(request, function, _read_message(connection))
        text = json.dumps(message).encode()
        connection.sendall(_LENGTH.pack(len(text)) + text)
    _end()


def _end() -> NoReturn:
    """End this process without freeing each module: after torch, that takes half a second.

    Threads are joined and exit handlers run as at the interpreter's end, by the functions that it
    calls: CPython 3.11 to 3.14 has no public ones.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _outcome(request: type[Q], function: Callable[[Q], Record], text: bytes) -> dict[str, Any]:
    try:
        return {"answer": function(request.from_json(json.loads(text))).to_json()}
    except PacelineError as error:
        return error.to_json()
    except Exception as error:  # noqa: BLE001  # whatever the work raises is sent to the caller
        traceback.print_exc()
        return {"raised": f"{type(error).__name__}: {error}"}


def _read_message(connection: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_read_exactly(connection, _LENGTH.size))
    return _read_exactly(connection, length)


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = connection.recv(min(_CHUNK_BYTES, count - len(data)))
        if not chunk:
            raise ConnectionError("the caller has gone")
        data += chunk
    return bytes(data)


class WorkerProcess(Generic[A]):
    """A worker that runs: started by the constructor, ended by `close`.

    All methods belong to the thread that made it. The kernel ends the worker when that thread ends
    (PR_SET_PDEATHSIG follows the thread, not the process).
    """

    def __init__(self, work: WorkerCall[A]) -> None:
        self.work = work
        self.connection, theirs = socket.socketpair()
        # -u: what it printed before an error must not come after the error.
        command = [sys.executable, "-u", "-m", work.module]
        command += [str(theirs.fileno()), str(os.getpid())]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(theirs.fileno(), *work.pass_fds),
                    start_new_session=True,
                    env={**os.environ, **work.environment},
                )
        except OSError as problem:
            self.connection.close()
            raise WorkerFailed(
                f"{work.name} could not be started",
                where=work.module,
                why=problem.strerror or str(problem),
                fix="Check the limits on processes and memory (ulimit -u, ulimit -v)",
            ) from problem
        self._output = _Output(self._process, show=work.show_output)
        self._received = bytearray()
        self._answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, timeout_s: float) -> None:
        """Send the request; a worker that is gone already is left to `receive` to report."""
        text = json.dumps(self.work.request.to_json()).encode()
        self.connection.settimeout(max(0.001, timeout_s))
        try:
            self.connection.sendall(_LENGTH.pack(len(text)) + text)
        except TimeoutError:
            raise _late(self.work, timeout_s) from None
        except ConnectionError:
            pass
        self.connection.setblocking(False)

    def receive(self) -> bool:
        """Read the bytes that have arrived; return whether the answer is complete.

        Raises:
            WorkerFailed: the worker ended, or sent something that is not an answer.
        """
        ended = (
            self._has_ended()
        )  # before reading: bytes that it sent before its end are still read
        closed = False
        try:
            while not closed and not self._is_complete():
                chunk = self.connection.recv(_CHUNK_BYTES)
                self._received += chunk
                closed = not chunk
        except BlockingIOError:
            pass
        except ConnectionError:  # it ended before it had read the request
            closed = True
        self._answered = self._is_complete()
        if not self._answered and (ended or closed):
            raise self._failure()
        return self._answered

    def answer(self) -> A:
        """Return the answer after `receive` said that it is complete; errors as in `call_all`."""
        message = self._message()
        if "error" in message:
            raise PacelineError.from_json(message)
        if "raised" in message:
            raise WorkerFailed(
                f"{self.work.name} failed",
                where=self.work.module,
                why=str(message["raised"]),
                fix="Fix the error that it names",
            )
        try:
            return self.work.answer.from_json(message.get("answer"), where=self.work.name)
        except ConfigError as problem:
            raise self._garbage(str(problem)) from problem

    def _message(self) -> dict[str, Any]:
        try:
            message = json.loads(self._received[_LENGTH.size :])
        except ValueError as problem:
            raise self._garbage(str(problem)) from problem
        if not isinstance(message, dict):
            raise self._garbage("not a JSON object")
        return message

    def close(self) -> None:
        """End the worker and all that it started in its process group."""
        self.connection.close()
        self._output.wait(_EXIT_GRACE_S if self._answered else 0.0)
        # Not reaped yet, so the number of its group cannot belong to anybody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def _is_complete(self) -> bool:
        if len(self._received) < _LENGTH.size:
            return False
        length: int = _LENGTH.unpack_from(self._received)[0]
        if length > MAX_MESSAGE_BYTES:
            raise self._garbage(f"a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
        if len(self._received) > _LENGTH.size + length:
            raise self._garbage("bytes after the end of the message")
        return len(self._received) == _LENGTH.size + length

    def _has_ended(self) -> bool:
        return self._status() is not None

    def _status(self) -> os.waitid_result | None:
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG  # reaped in `close` only
        return os.waitid(os.P_PID, self._process.pid, flags)

    def _failure(self) -> WorkerFailed:
        self._output.wait(_EXIT_GRACE_S)  # its last words
        status = self._status()
        how = "closed its connection without an answer"
        if status is not None and status.si_code == os.CLD_EXITED:
            how = f"ended without an answer, with exit code {status.si_status}"
        elif status is not None:
            how = f"was killed by {signal_name(status.si_status)}"
        return WorkerFailed(
            f"{self.work.name} {how}",
            where=self.work.module,
            why=self._output.last_line() or "it printed nothing",
            fix="See the output of the process"
            if self.work.show_output
            else "Run the code alone to see its output",
        )

    def _garbage(self, why: str) -> WorkerFailed:
        return WorkerFailed(
            f"{self.work.name} sent no valid answer",
            where=self.work.module,
            why=why,
            fix="Keep the code that runs there from writing to descriptors that it did not open",
        )


class _Output:
    """Keeps the last bytes that a worker prints.

    Its own thread is the only reader of the pipe, and the only writer of `_tail`.
    """

    def __init__(self, process: subprocess.Popen[bytes], *, show: bool) -> None:
        assert process.stdout is not None
        self._stream: IO[bytes] = process.stdout
        self._pid = process.pid
        self._show = show
        self._tail = b""
        self._thread = threading.Thread(target=self._read, name="paceline-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        descriptor = self._stream.fileno()
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            self._tail = (self._tail + chunk)[-_OUTPUT_BYTES:]
            if self._show:
                sys.stderr.write(chunk.decode(errors="replace"))
                sys.stderr.flush()
        # A process closes its descriptors shortly before its status can be asked for.
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)

    def wait(self, timeout_s: float) -> None:
        """Wait until the worker has ended, and its children have closed the pipe."""
        self._thread.join(timeout_s)

    def last_line(self) -> str:
        """Return the last line that is not empty."""
        lines = self._tail.decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Stop reading; a child in a session of its own may still hold the pipe."""
        self._thread.join(_EXIT_GRACE_S)
        if not self._thread.is_alive():
            self._stream.close()


def _late(work: WorkerCall[Any], deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{work.name} did not end in time",
        where=work.module,
        why=f"{deadline_s:g} s passed",
        fix="Check that it does not wait for input, and that the machine is not overloaded",
    )
