"""How fast are files written and read back through an output, against the local disk?

A section of bench/posix.py. Both folders lie on one disk. Each turn creates, writes, closes, opens
and reads 100 files of 107 KB, or 3 of 64 MB, from Python. The output's server drains to /dev/shm
meanwhile, as in a run; the next turn waits until nothing is left to drain. With nodes that share
the output (here two servers on this machine), each close asks them.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from paceline.store.posix.mounts import variables
from paceline.store.serve.drain import ROOM, DrainRoom
from paceline.store.serve.output_server import OutputSpec

HERE = Path(__file__).parent
POINT = "/paceline-bench-out"
SIZES = {"107KB": (107_000, 100), "64MB": (64_000_000, 3)}
BAR = 0.8
UNCOUNTED = 2
WAIT_S = 120
WAYS = {"files": 0, "output": 1, "output, 2 nodes": 2}  # servers


class Writer:
    """A process that waits for its turn."""

    def __init__(self, root, size, count, environ=None):
        asked = json.dumps({"root": str(root), "size": size, "count": count})
        self.process = subprocess.Popen(
            [sys.executable, HERE / "posix_writer.py", asked],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def turn(self):
        print(file=self.process.stdin, flush=True)
        return self._answer()["seconds"]

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a writer ended with {self.process.wait()}")
        return json.loads(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


class Server:
    """The server of an output, on one node."""

    def __init__(self, folder, target, nodes, number, listener):
        folder.mkdir()
        self.room = DrainRoom(folder / ROOM, 0, 0.0)
        spec = OutputSpec(
            target=str(target),
            folder=str(folder),
            end_s=WAIT_S,
            nodes=nodes,
            number=number,
            token="bench",
            listener=listener,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.store.serve.output_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[listener],
        )
        self.process.stdin.write(spec.to_line())
        self.process.stdin.flush()

    def await_ready(self):
        if self.process.stdout.readline() != b"ready\n":
            sys.exit("the server of an output did not start")

    def await_drained(self):
        deadline = time.monotonic() + WAIT_S
        while self.room.settled_bytes < self.room.published_bytes:
            if time.monotonic() > deadline:
                sys.exit("an output is not drained")
            time.sleep(0.01)  # outside of what is timed

    def end(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


@contextlib.contextmanager
def servers(top, target, count):
    """Start the servers of an output that so many nodes share."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        nodes = tuple(f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners)
        found = []
        for number, listener in enumerate(listeners):
            found.append(Server(top / str(number), target, nodes, number, listener.fileno()))
            stack.callback(found[-1].end)
        for server in found:
            server.await_ready()
        yield found


def measure_writes(report, folder, rounds):
    """Let writers take turns, on the disk that a folder lies on."""
    for size, (byte_count, count) in SIZES.items():
        with contextlib.ExitStack() as stack:
            top = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
            shared = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            writers, drains = {}, {}
            for name, nodes in WAYS.items():
                place = top / str(nodes)
                place.mkdir()
                root, environ = place, None
                drains[name] = []
                if nodes:
                    drains[name] = stack.enter_context(servers(place, shared / str(nodes), nodes))
                    outputs = [(str(place / "0"), POINT, nodes > 1)]
                    environ = {**os.environ, **variables((), os.environ, outputs=outputs)}
                    root = POINT
                writers[name] = Writer(root, byte_count, count, environ)
                stack.callback(writers[name].end)
            compare(report, size, count, writers, drains, rounds)


def compare(report, size, count, writers, drains, rounds):
    rng = np.random.default_rng(0)
    times = {name: [] for name in writers}
    for number in range(UNCOUNTED + rounds):
        for name in rng.permutation(list(writers)).tolist():
            seconds = writers[name].turn()
            for server in drains[name]:
                server.await_drained()
            if number >= UNCOUNTED:
                times[name].append(seconds / count)
    for name, found in times.items():
        report.row(
            set=size,
            what="write, close, read back",
            through=name,
            us_per_file=statistics.median(found) * 1e6,
            lowest=min(found) * 1e6,
            highest=max(found) * 1e6,
            rounds=rounds,
        )
        if name != "files":
            pairs = zip(times["files"], found, strict=True)
            ratio = statistics.median(files / output for files, output in pairs)
            title = f"{size}, write, close, read back: {name} / files"
            if name == "output":
                report.bar(title, ratio, BAR, at_least=True)
            else:
                report.row(what=title, ratio=ratio)
