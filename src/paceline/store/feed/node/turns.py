"""Readers of different nodes take turns on a file system that they share.

A parallel file system serves few long sequential reads faster than many at a time, whose pieces
alternate on its disks. LMDBIO let groups of readers pass a token on. Here one process of the job
grants turns over TCP: a reader asks before it reads a window, and says afterwards how much it read.
From that the server finds how many turns at a time move most bytes (`TurnTuner`).

The server listens for other nodes. Its address has a token that readers prove (`core.handshake`).

A reader never depends on the server: without an answer it reads after `PATIENCE_S`, and the turn of
a reader that is gone is free again when its connection ends.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.handshake import Entrance, prove
from paceline.store.feed.node.tuning import HillClimb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 5.0  # for a turn; then the reader reads without one
_RETRY_S = 30.0  # before a server that did not answer is asked again
_CONNECT_S = 2.0
_LOOK_S = 1.0  # between two looks for strangers whose time is over
_SAMPLES = 4  # windows of each reader between two decisions of the tuner
_ASK = b"?"
_DONE = b"!"
_GRANT = b"+"
_DONE_MESSAGE = struct.Struct("<cQ")  # and the bytes that were read


@dataclass(slots=True)
class TurnTuner:
    """Finds how many turns at a time move most bytes, by trying neighbours of the best so far.

    Attributes:
        most: readers there are; all of them read at a time at the start.
    """

    most: int
    _climb: HillClimb = field(init=False)
    _bytes: int = field(default=0, init=False)
    _count: int = field(default=0, init=False)
    _began_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._climb = HillClimb(self.most)

    @property
    def turns(self) -> int:
        """How many may read at a time now."""
        return self._climb.value

    @property
    def best(self) -> int:
        """The number that moved most bytes so far."""
        return self._climb.best

    def start_at(self, turns: int) -> None:
        """Begin with so many turns at a time."""
        self._climb.start_at(turns)

    def begin(self, now_s: float) -> None:
        """Note that a reader begins to read."""
        if self._began_s is None:
            self._began_s = now_s

    def record(self, read_bytes: int, now_s: float) -> None:
        """Note that a reader has read a window; change `turns` after enough of them."""
        self._bytes += read_bytes
        self._count += 1
        began_s = self._began_s
        if self._count < _SAMPLES * self.most or began_s is None or now_s <= began_s:
            return
        self._climb.decide(self._bytes / (now_s - began_s))
        self._bytes = self._count = 0
        self._began_s = now_s


class TurnServer:
    """Grants turns to the readers of a job, from a thread of its own.

    Args:
        tuner: says how many at a time.
        clock: seconds; for tests.
    """

    def __init__(self, tuner: TurnTuner, clock: Callable[[], float] = time.monotonic) -> None:
        self._tuner = tuner
        self._clock = clock
        self._listener = socket.create_server(("", 0), backlog=1024)
        self._port: int = self._listener.getsockname()[1]
        self._token = secrets.token_hex(16)
        self._waiting: deque[socket.socket] = deque()
        self._reading: set[socket.socket] = set()
        self._received: dict[socket.socket, bytes] = {}
        self._ends, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="paceline-turns", daemon=True)
        self._thread.start()

    def address(self, host: str) -> str:
        """Return what `Turns` wants, of readers that reach this host by that name."""
        return f"{self._token}@{host}:{self._port}"

    def close(self) -> None:
        """End the thread; readers that wait read without a turn."""
        with contextlib.suppress(OSError):
            self._end.send(b"x")
        self._thread.join(PATIENCE_S)
        self._end.close()

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector, self._ends:
            entrance = Entrance(self._listener, selector, (self._token,))
            selector.register(self._ends, selectors.EVENT_READ)
            while True:
                admitted, events = entrance.select(_LOOK_S)
                for reader in admitted:
                    selector.register(reader.connection, selectors.EVENT_READ)
                    self._received[reader.connection] = b""
                for key, _ in events:
                    if key.fileobj is self._ends:
                        for connection in list(self._received):
                            connection.close()
                        entrance.close()
                        return
                    if isinstance(key.fileobj, socket.socket):
                        self._receive(selector, key.fileobj)
                self._grant(selector)

    def _receive(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        try:
            received = connection.recv(4096)
        except OSError:
            received = b""
        if not received:
            self._forget(selector, connection)
            return
        rest = self._received[connection] + received
        while rest:
            if rest[:1] == _ASK:
                self._waiting.append(connection)
                rest = rest[1:]
            elif rest[:1] == _DONE and len(rest) >= _DONE_MESSAGE.size:
                _, read_bytes = _DONE_MESSAGE.unpack_from(rest)
                if connection in self._reading:
                    self._reading.remove(connection)
                    self._tuner.record(read_bytes, self._clock())
                rest = rest[_DONE_MESSAGE.size :]
            elif rest[:1] == _DONE:
                break  # the other part of it is still under way
            else:
                self._forget(selector, connection)  # not one of our readers
                return
        self._received[connection] = rest

    def _grant(self, selector: selectors.BaseSelector) -> None:
        while self._waiting and len(self._reading) < self._tuner.turns:
            connection = self._waiting.popleft()
            try:
                connection.send(_GRANT)
            except OSError:
                self._forget(selector, connection)
                continue
            self._tuner.begin(self._clock())
            self._reading.add(connection)

    def _forget(self, selector: selectors.BaseSelector, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(connection)
        self._received.pop(connection, None)
        self._reading.discard(connection)
        self._waiting = deque(other for other in self._waiting if other is not connection)
        connection.close()


class Turns:
    """A reader's side: asks for turns at a server.

    Args:
        address: as `TurnServer.address` returns it.
    """

    def __init__(self, address: str) -> None:
        self._token, _, place = address.partition("@")
        host, _, port = place.rpartition(":")
        self._address = (host, int(port))
        self._connection: socket.socket | None = None
        self._again_s = 0.0
        self.missed = 0  # windows that were read without a turn

    @contextlib.contextmanager
    def turn(self, size_bytes: int) -> Iterator[None]:
        """Wait for a turn to read so many bytes, but not for ever; give it back afterwards."""
        has_turn = self._ask()
        self.missed += not has_turn
        try:
            yield
        finally:
            if self._connection is not None and has_turn:
                try:
                    self._connection.sendall(_DONE_MESSAGE.pack(_DONE, size_bytes))
                except OSError:
                    self._give_up()

    def close(self) -> None:
        """End the connection, and with it a turn."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self) -> bool:
        if time.monotonic() < self._again_s:
            return False
        try:
            if self._connection is None:
                self._connection = socket.create_connection(self._address, _CONNECT_S)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                prove(self._connection, self._token, _CONNECT_S)
                self._connection.settimeout(PATIENCE_S)
            self._connection.sendall(_ASK)
            if self._connection.recv(1) == _GRANT:
                return True
        except OSError:  # also a timeout
            pass
        self._give_up()
        return False

    def _give_up(self) -> None:
        # Closed, so that a late grant is not taken for the answer to the next question.
        self.close()
        self._again_s = time.monotonic() + _RETRY_S
