"""A client waits for a daemon that is not there as long as it is asked to, and no longer."""

import contextlib
import json
import socket
import threading

import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import Missing
from paceline.scheduler.local.paths import QueuePaths
from paceline.scheduler.local.protocol.client import ask
from paceline.scheduler.local.protocol.messages import Reply, Request


@pytest.fixture
def paths(tmp_path):
    return QueuePaths(folder=tmp_path, socket=tmp_path / "s")


def answer_once(path):
    """Be a daemon for one request, from when this returns."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve():
        with listener, listener.accept()[0] as connection:
            request = b""
            while not request.endswith(b"\n"):
                request += connection.recv(4096)
            connection.sendall(json.dumps(Reply(text="here").to_json()).encode() + b"\n")

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


class StartsLater(ManualClock):
    """A clock during whose waits somebody starts the daemon."""

    def __init__(self, at_s, start):
        super().__init__()
        self._at_s, self._start = at_s, start

    def wait(self, event, timeout_s):
        found = super().wait(event, timeout_s)
        if self._start is not None and self.now >= self._at_s:
            start, self._start = self._start, None
            start()
        return found


def test_a_daemon_that_starts_in_time_is_asked(paths):
    with contextlib.ExitStack() as stack:
        clock = StartsLater(5.0, lambda: stack.callback(answer_once(paths.socket).join))
        assert ask(paths, Request(verb="list"), clock, absent_s=10.0).text == "here"
        assert 5.0 <= clock.now < 6.0


@pytest.mark.parametrize("absent_s", [0.0, 10.0])
def test_one_that_does_not_is_missing(paths, absent_s):
    clock = ManualClock()
    with pytest.raises(Missing, match="no daemon serves this queue") as missing:
        ask(paths, Request(verb="list"), clock, absent_s=absent_s)
    assert absent_s <= clock.now < absent_s + 1
    assert ("10 s" in str(missing.value)) == bool(absent_s)
