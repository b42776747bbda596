"""A worker that misbehaves as its request says; run with ``python -m support.worker_calls``."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from paceline.core import errors
from paceline.core.worker_process import WorkerMessage, serve


@dataclass(frozen=True, kw_only=True, slots=True)
class Request(WorkerMessage):
    """What to do, and with what."""

    act: str
    text: str = ""
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply(WorkerMessage):
    """What came of it."""

    text: str = ""
    numbers: tuple[int, ...] = ()


def connection_descriptor():
    return int(sys.argv[1])


def run(request):
    return ACTS[request.act](request)


def echo(request):
    return Reply(text=request.text, numbers=(os.getpid(), os.getpgid(0), os.getsid(0)))


def variable(request):
    return Reply(text=os.environ.get(request.text, ""))


def noisy(request):
    os.write(1, b'{"answer": {"text": "not this"}}\n')
    print("nor this")
    subprocess.run([sys.executable, "-c", "print('nor this of a child')"], check=True)
    return echo(request)


def huge(request):
    return Reply(text="x" * request.count)


def fail(request):
    raise getattr(errors, request.text)("it broke", where="rank 3", why="too hot", fix="Cool it")


def foreign(request):
    raise ZeroDivisionError(request.text)


def leave(request):
    os.write(2, b"an earlier line\n" + request.text.encode() + b"\n\n")
    os._exit(request.count)


def killed(request):
    os.write(2, request.text.encode())
    os.kill(os.getpid(), request.count)
    signal.pause()


def hang(_request):
    threading.Event().wait()


def garbage(request):
    os.write(connection_descriptor(), bytes.fromhex(request.text))
    os._exit(0)


def wrong(_request):
    return Request(act="this is another type")


def child(request):
    """Start a child that outlives its parent and holds whatever it inherited."""
    pid = os.fork()
    if not pid:
        os.write(2, b"")
        threading.Event().wait()
    if request.text == "answer":
        return Reply(numbers=(pid,))
    os.write(2, json.dumps(pid).encode())
    if request.text == "leave":
        os._exit(3)
    return hang(request)


def threads(request):
    """Meet another worker of the same call: whoever is alone hangs."""
    with open(request.text, "w") as file:  # noqa: PTH123  # a FIFO
        file.write("here")
    return Reply(text="met")


def reads(request):
    with open(request.text) as file:  # noqa: PTH123  # a FIFO
        return Reply(text=file.read())


def tidies(request):
    """Leave a thread and an exit handler that write, one after the other."""
    written = Path(request.text)

    def write():
        threading.main_thread().join()
        written.write_text("thread")

    atexit.register(lambda: written.write_text(written.read_text() + ", then the handler"))
    threading.Thread(target=write).start()
    return Reply()


ACTS = {
    function.__name__: function
    for function in (
        *(echo, variable, noisy, huge, fail, foreign, leave, killed, hang, garbage, wrong, child),
        *(threads, reads, tidies),
    )
}

if __name__ == "__main__":
    serve(Request, run)
