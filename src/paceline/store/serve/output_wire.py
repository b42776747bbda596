"""How the nodes of a run that write to one output talk: one request at a time on a connection.

::

    client                                     server
      <-- 32 random bytes ------------------------
      --- HMAC-SHA-256 of these, by the token --->   else it closes the connection
      --- frame: {"do": "apply", ...} ----------->
      <-- frame: {"error": 0, ...} ---------------   an errno
      <-- bytes of a file, if it says so ---------

A frame is a length of 4 bytes (little endian) and a JSON object. The token itself never travels.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

from paceline.native import peer_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.store.serve.card import NodeAddress

    Handler = Callable[[dict[str, Any]], tuple[dict[str, Any], int | None]]

_LOG = logging.getLogger(__name__)
_NONCE_BYTES = 32
_MOST_FRAME = 1 << 20
_MOST_CONNECTIONS = 2048
_IDLE_S = 3600.0
_HELLO_S = 10.0
_PIECE_BYTES = 8 << 20
_MALFORMED = (ValueError, TypeError, KeyError, RecursionError)  # of a message: no answer


class OutputLink:
    """Connections to one node, each used by one thread at a time and kept for the next."""

    def __init__(self, address: NodeAddress, token: str) -> None:
        self.name = str(address)
        self._address = (address.host, address.port)
        self._token = token.encode()
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
            nonce = _receive(connection, _NONCE_BYTES)
            connection.sendall(_digest(self._token, nonce))
        except BaseException:
            connection.close()
            raise
        return connection


class OutputListener:
    """Answers the other nodes, each connection in a thread of its own.

    Args:
        listener: that listens already.
        token: of all nodes.
        handle: returns the answer to a message, and a descriptor whose bytes follow it, or None.
    """

    def __init__(self, listener: socket.socket, token: str, handle: Handler) -> None:
        self._listener = listener
        self._token = token.encode()
        self._handle = handle
        self._room = threading.Semaphore(_MOST_CONNECTIONS)
        threading.Thread(target=self._accept, name="paceline-output", daemon=True).start()

    def _accept(self) -> None:
        while True:
            self._room.acquire()  # released by the connection's thread
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="paceline-output", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, *_MALFORMED):
                self._answer_all(connection)
        finally:
            self._room.release()

    def _answer_all(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_HELLO_S)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        said = _receive(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(said, _digest(self._token, nonce)):
            _LOG.warning("a connection without the token of this run was refused")
            return
        connection.settimeout(_IDLE_S)
        while True:
            answer, file = self._handle(_receive_frame(connection))
            try:
                _send_frame(connection, answer)
                if file is not None:
                    _send_file(connection, file, int(answer["size"]))
            finally:
                if file is not None:
                    os.close(file)


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


def _digest(token: bytes, nonce: bytes) -> bytes:
    return hmac.new(token, nonce, hashlib.sha256).digest()


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
    while done < size:
        count = os.sendfile(connection.fileno(), file, done, min(size - done, _PIECE_BYTES))
        if not count:
            raise ConnectionError("the file is shorter than it was")
        done += count
    connection.settimeout(_IDLE_S)
