"""The daemon's end of the socket: lines in, lines out, nobody waits for a slow client.

Everything runs in the daemon's one thread. A client that does not send its request, or does not
take its answer, within `PATIENCE_S` is dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, PacelineError, storage_errors
from paceline.scheduler.local.protocol.messages import MAX_BYTES, Reply, Request

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 10.0
_CHUNK = 1 << 16
_CLIENTS = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred of unix(7): pid, uid, gid


@dataclass(eq=False, slots=True)
class Peer:
    """A connected client."""

    connection: socket.socket
    deadline_s: float
    received: bytearray = field(default_factory=bytearray)
    to_send: bytes = b""
    asked: bool = False


class Connections:
    """All clients of a daemon."""

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        """Listen at `path`; a file there is a dead daemon's, as the caller holds the queue's lock.

        Raises:
            StorageError: the socket cannot be made there.
        """
        self._path = path
        self._selector = selector
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        fix = "Give a --dir on a local file system that you may write to"
        with storage_errors("cannot listen", where=path, fix=fix):
            path.unlink(missing_ok=True)
            before = os.umask(0o177)
            try:
                self._listener.bind(str(path))
            finally:
                os.umask(before)
            self._listener.listen(_CLIENTS)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self)
        self._peers: dict[Peer, None] = {}

    @property
    def busy(self) -> bool:
        """Whether somebody has not got an answer in full."""
        return any(peer.to_send for peer in self._peers)

    def accept(self, now_s: float) -> None:
        """Take a new client, of the same user."""
        try:
            connection, _ = self._listener.accept()
        except OSError:  # it has left again
            return
        level, name = socket.SOL_SOCKET, socket.SO_PEERCRED
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(level, name, _CREDENTIALS.size))
        if uid != os.geteuid() or len(self._peers) >= _CLIENTS:
            connection.close()
            return
        connection.setblocking(False)
        peer = Peer(connection, now_s + PATIENCE_S)
        self._peers[peer] = None
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def receive(self, peer: Peer, now_s: float) -> Request | None:
        """Read what a client sent; return its request when it is complete."""
        try:
            chunk = peer.connection.recv(_CHUNK)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            self.drop(peer)
            return None
        if peer.asked:  # one request for a connection
            return None
        peer.received += chunk
        line, end, _ = peer.received.partition(b"\n")
        if not end:
            if len(line) > MAX_BYTES:
                self.drop(peer)
            return None
        peer.asked = True
        peer.deadline_s = float("inf")  # it is our turn
        try:
            return Request.from_text(line.decode(errors="replace"), where="request")
        except ConfigError as problem:
            self.refuse(peer, problem, now_s)
            return None

    def reply(self, peer: Peer, reply: Reply, now_s: float) -> None:
        """Answer a client; it is dropped when it has the answer."""
        if peer not in self._peers:
            return
        peer.to_send = json.dumps(reply.to_json()).encode() + b"\n"
        peer.deadline_s = now_s + PATIENCE_S
        self._selector.modify(peer.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)

    def refuse(self, peer: Peer, problem: PacelineError, now_s: float) -> None:
        """Answer a client with an error."""
        self.reply(peer, Reply(error=problem.to_json()["error"]), now_s)

    def send(self, peer: Peer) -> None:
        """Send as much of an answer as the client takes now."""
        if not peer.to_send:
            return
        try:
            sent = peer.connection.send(peer.to_send[: 1 << 20])
        except BlockingIOError:
            return
        except OSError:
            self.drop(peer)
            return
        peer.to_send = peer.to_send[sent:]
        if not peer.to_send:
            self.drop(peer)

    def alive(self, peer: Peer) -> bool:
        """Whether a client is still there."""
        return peer in self._peers

    def drop_late(self, now_s: float) -> None:
        """Drop clients that did not send or take in time."""
        for peer in [peer for peer in self._peers if peer.deadline_s <= now_s]:
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """Close the connection of a client."""
        if self._peers.pop(peer, ...) is None:
            self._selector.unregister(peer.connection)
            peer.connection.close()

    def close(self) -> None:
        """Close all connections, and remove the socket."""
        for peer in list(self._peers):
            self.drop(peer)
        self._selector.unregister(self._listener)
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()
