"""How the nodes of a run that write to one output talk: one request at a time on a connection.

::

    client                                     server
      <-- handshake (core.handshake) ------------>   else the server closes the connection
      --- frame: {"do": "apply", ...} ----------->
      <-- frame: {"error": 0, ...} ---------------   an errno
      <-- bytes of a file, if it says so ---------

A frame is a length of 4 bytes (little endian) and a JSON object.

A server's connections wait in one thread, and a thread of a pool answers each request: thousands of
nodes may keep theirs open.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import socket
import struct
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from paceline.core.handshake import Entrance, prove
from paceline.core.processes import allow_descriptors
from paceline.native import peer_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.store.serve.card import NodeAddress

    Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], int | None]]

_LOG = logging.getLogger(__name__)
_MOST_FRAME = 1 << 20
_MOST_CONNECTIONS = 16384
_MOST_AT_ONCE = 256  # requests that are answered at a time
_FRAME_S = 30.0  # for a request to come whole, and for each piece of its answer to be taken
_LOOK_S = 1.0
_PIECE_BYTES = 8 << 20
_MALFORMED = (ValueError, TypeError, KeyError, RecursionError)  # of a message: no answer


class OutputLink:
    """Connections to one node, each used by one thread at a time and kept for the next."""

    def __init__(self, address: NodeAddress, token: str) -> None:
        self.name = str(address)
        self._address = (address.host, address.port)
        self._token = token
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def call(self, message: dict[str, Any], wait_s: float) -> dict[str, Any]:
        """Return the answer to a message.

        Raises:
            RankLost: the node cannot be reached, or did not answer in time.
        """
        return self._on_connection(lambda connection: _ask(connection, message), wait_s)

    def fetch(self, message: dict[str, Any], file: int, wait_s: float) -> dict[str, Any]:
        """Write the bytes that come with the answer to a file.

        Args:
            message: to send.
            file: descriptor, written from its start on.
            wait_s: for each piece.

        Raises:
            RankLost: the node cannot be reached, or did not go on in time.
            OSError: the file cannot be written.
        """

        def work(connection: socket.socket) -> dict[str, Any]:
            answer = _ask(connection, message)
            left, done = int(answer.get("size", 0)), 0
            buffer = memoryview(bytearray(min(left, 1 << 20)))
            while left:
                count = connection.recv_into(buffer[: min(left, len(buffer))])
                if not count:
                    raise ConnectionError("it closed the connection")
                _write_all(file, buffer[:count], done)
                left, done = left - count, done + count
            return answer

        return self._on_connection(work, wait_s)

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _on_connection(
        self, work: Callable[[socket.socket], dict[str, Any]], wait_s: float
    ) -> dict[str, Any]:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        try:
            if connection is None:
                connection = self._connect(wait_s)
            connection.settimeout(wait_s)
            answer = work(connection)
        except (_WriteFailed, ValueError) as problem:
            if connection is not None:
                connection.close()
            if isinstance(problem, _WriteFailed):
                raise problem.problem from None
            raise peer_error("protocol", str(problem), self.name) from None
        except OSError as problem:
            if connection is not None:
                connection.close()
            self.close()
            kind = "deadline" if isinstance(problem, TimeoutError) else "lost"
            raise peer_error(kind, str(problem), self.name) from None
        with self._lock:
            self._idle.append(connection)
        return answer

    def _connect(self, wait_s: float) -> socket.socket:
        connection = socket.create_connection(self._address, wait_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            prove(connection, self._token, wait_s)
        except BaseException:
            connection.close()
            raise
        return connection


class OutputListener:
    """Answers the other nodes, from here on until the process ends.

    Args:
        listener: that listens already.
        token: of all nodes.
        handle: returns the answer to a message, and a descriptor whose bytes follow it, or None.
            Called from many threads.
    """

    def __init__(self, listener: socket.socket, token: str, handle: Handler) -> None:
        allow_descriptors(_MOST_CONNECTIONS)
        self._handle = handle
        self._selector = selectors.DefaultSelector()
        self._entrance = Entrance(listener, self._selector, (token,))
        self._count = 0  # of connections that have proved the token; of the thread that waits
        # What threads of the pool give back: a connection to wait for, or None for one that ended.
        self._back: deque[socket.socket | None] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, "paceline-output")
        threading.Thread(target=self._wait, name="paceline-output-wait", daemon=True).start()

    def _wait(self) -> None:
        while True:
            admitted, events = self._entrance.select(_LOOK_S)
            for peer in admitted:
                self._admit(peer.connection)
            for key, _ in events:
                if isinstance(key.fileobj, socket.socket):
                    self._selector.unregister(key.fileobj)
                    self._pool.submit(self._answer, key.fileobj)
                else:
                    self._take_back()

    def _admit(self, connection: socket.socket) -> None:
        if self._count >= _MOST_CONNECTIONS:
            connection.close()
            return
        self._count += 1
        self._selector.register(connection, selectors.EVENT_READ)

    def _take_back(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._back:
            connection = self._back.popleft()
            if connection is None:
                self._count -= 1
            else:
                self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> None:
        """Answer one request, in a thread of the pool, and give the connection back."""
        back: socket.socket | None = None
        try:
            connection.settimeout(_FRAME_S)
            answer, file = self._handle(_receive_frame(connection))
            try:
                _send_frame(connection, answer)
                if file is not None:
                    _send_file(connection, file, int(answer["size"]))
            finally:
                if file is not None:
                    os.close(file)
            back = connection
        except (OSError, *_MALFORMED) as problem:
            _LOG.debug("a connection ends: %s", problem)
        except Exception:  # noqa: BLE001  # of a handler: this thread answers other requests, too
            _LOG.exception("a request of another node failed")
        finally:
            if back is None:
                connection.close()
            self._back.append(back)
            os.eventfd_write(self._wake, 1)


class _WriteFailed(Exception):
    """A file that bytes are fetched into cannot be written."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


def _write_all(file: int, piece: memoryview, position: int) -> None:
    try:
        while piece:
            count = os.pwrite(file, piece, position)
            piece, position = piece[count:], position + count
    except OSError as problem:
        raise _WriteFailed(problem) from None


def _ask(connection: socket.socket, message: dict[str, Any]) -> dict[str, Any]:
    _send_frame(connection, message)
    return _receive_frame(connection)


def _send_frame(connection: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message, separators=(",", ":")).encode()
    connection.sendall(struct.pack("<I", len(data)) + data)


def _receive_frame(connection: socket.socket) -> dict[str, Any]:
    (size,) = struct.unpack("<I", _receive(connection, 4))
    if size > _MOST_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    message = json.loads(_receive(connection, size))
    if not isinstance(message, dict):
        raise ValueError("a frame that is no object")  # of a peer, not of a caller
    return message


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return bytes(data)


def _send_file(connection: socket.socket, file: int, size: int) -> None:
    done = 0
    connection.setblocking(True)
    patience = struct.pack("ll", int(_FRAME_S), 0)  # struct timeval
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    while done < size:
        count = os.sendfile(connection.fileno(), file, done, min(size - done, _PIECE_BYTES))
        if not count:
            raise ConnectionError("the file is shorter than it was")
        done += count
    connection.settimeout(_FRAME_S)
