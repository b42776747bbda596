"""How a client and a server prove a token to each other, and where connections wait until then.

::

    client                                                server
      <------ 32 random bytes -------------------------------
      ------- 32 random bytes, the client's proof ---------->   else: 32 zeros, and it closes
      <------ the server's proof -----------------------------

A proof is the HMAC-SHA-256, by the token, of the side's name and both random numbers: mutual
authentication in three passes (ISO/IEC 9798-4). The token never travels, and one connection's
proofs are of no use on another. What follows is as the protocol of the server has it, in the clear.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import math
import secrets
import selectors
import socket
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.clock import Clock

NONCE_BYTES = PROOF_BYTES = 32
REFUSED = bytes(PROOF_BYTES)
MOST_STRANGERS = 256
PATIENCE_S = 5.0  # for a connection to prove the token, in all
_ACCEPTED_AT_ONCE = 64
_LISTEN_AGAIN_S = 1.0  # after there was no descriptor left
_TELL_S = 60.0  # between two lines about refused connections: a flood must not fill a log
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_LOG = logging.getLogger(__name__)


class _Side(StrEnum):
    """Who proves; within the proof, so that nobody can send a side's own proof back to it."""

    CLIENT = "client"
    SERVER = "server"


class TokenRefused(ConnectionError):
    """The server has another token than this client."""


class NotTheServer(ConnectionError):
    """Something listens there that does not have the token, or is no server of Paceline."""


def proof(token: str, side: str, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Return what one side sends to prove that it has the token: `PROOF_BYTES`."""
    said = side.encode() + b"\0" + client_nonce + server_nonce
    return hmac.new(token.encode(), said, hashlib.sha256).digest()


def prove(connection: socket.socket, token: str, wait_s: float) -> None:
    """Prove the token to a server, and see that it has the token, too.

    Args:
        connection: that was opened just now; its timeout is changed.
        token: of both.
        wait_s: for all of it.

    Raises:
        TokenRefused: the server has another token.
        NotTheServer: the server did not prove the token.
        OSError: the connection ended, or the time did.
    """
    end_s = time.monotonic() + wait_s
    server_nonce = _receive(connection, NONCE_BYTES, end_s)
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.sendall(nonce + proof(token, _Side.CLIENT, nonce, server_nonce))
    said = _receive(connection, PROOF_BYTES, end_s)
    if hmac.compare_digest(said, proof(token, _Side.SERVER, nonce, server_nonce)):
        return
    if said == REFUSED:
        raise TokenRefused("the server has another token")
    raise NotTheServer("what listens there does not have the token")


def _receive(connection: socket.socket, size: int, end_s: float) -> bytes:
    data = b""
    while len(data) < size:
        connection.settimeout(max(end_s - time.monotonic(), 1e-3))
        piece = connection.recv(size - len(data))
        if not piece:
            raise ConnectionError("it closed the connection")
        data += piece
    return data


@dataclass(eq=False, slots=True)
class _Stranger:
    """A connection that has not proved the token.

    Attributes:
        connection: does not block.
        host: from which it comes.
        deadline_s: when it is closed.
    """

    connection: socket.socket
    host: str
    deadline_s: float
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    received: bytes = b""


class Admitted(NamedTuple):
    """A connection that has proved the token, and the host from which it comes."""

    connection: socket.socket
    host: str


class Entrance:
    """Accepts connections, and hands out those that have proved the token.

    Connections that have not are strangers: there is room for a few, the oldest of which makes way
    for a new one, and each has a deadline. So strangers shut out strangers only. All of it belongs
    to the thread that calls `select`, in place of the selector's.

    Args:
        listener: that listens already.
        selector: of the server.
        tokens: any of which suffices.
        most: strangers at a time.
        clock: for deadlines.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        tokens: Sequence[str],
        *,
        most: int = MOST_STRANGERS,
        clock: Clock | None = None,
    ) -> None:
        if not all(tokens):
            raise ValueError("a server without a token")
        listener.setblocking(False)
        self._listener = listener
        self._selector = selector
        self._tokens = tuple(tokens)
        self._most = most
        self._clock: Clock = clock or SystemClock()
        self._strangers: dict[_Stranger, None] = {}  # the oldest first
        self._refused = 0  # since the last line about them
        self._tell_s = -math.inf
        self._listen_s: float | None = None  # when to listen again; None: it listens
        selector.register(listener, selectors.EVENT_READ, self)

    def select(
        self, timeout_s: float
    ) -> tuple[list[Admitted], list[tuple[selectors.SelectorKey, int]]]:
        """Wait for events; deal with those of the listener and of strangers.

        Returns:
            Connections that have proved the token, not registered any more, which do not block; and
            the events of all other files, as the selector's `select` has them.
        """
        admitted: list[Admitted] = []
        others: list[tuple[selectors.SelectorKey, int]] = []
        for key, mask in self._selector.select(timeout_s):
            if key.data is self:
                self._accept()
            elif not isinstance(key.data, _Stranger):
                others.append((key, mask))
            elif self._has_proved(key.data):
                admitted.append(Admitted(key.data.connection, key.data.host))
        self._close_late()
        return admitted, others

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except OSError as problem:
                if problem.errno in _FULL:
                    self._make_room(problem)
                return
            if len(self._strangers) >= self._most:
                self._close(next(iter(self._strangers)))
            connection.setblocking(False)
            host = str(address[0]).removeprefix("::ffff:")  # of IPv4 on a socket for both
            stranger = _Stranger(connection, host, self._clock.now_s() + PATIENCE_S)
            self._strangers[stranger] = None
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.send(stranger.nonce)
            except OSError:
                self._close(stranger)

    def _has_proved(self, stranger: _Stranger) -> bool:
        """Read from a stranger; return whether it has the token: then it is none any more."""
        if stranger not in self._strangers:  # it made way in this turn
            return False
        try:
            piece = stranger.connection.recv(NONCE_BYTES + PROOF_BYTES - len(stranger.received))
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        stranger.received += piece
        if piece and len(stranger.received) < NONCE_BYTES + PROOF_BYTES:
            return False
        nonce, said = stranger.received[:NONCE_BYTES], stranger.received[NONCE_BYTES:]
        for token in self._tokens if piece else ():
            if hmac.compare_digest(said, proof(token, _Side.CLIENT, nonce, stranger.nonce)):
                del self._strangers[stranger]
                self._selector.unregister(stranger.connection)
                with contextlib.suppress(OSError):  # the server hears of it when it reads
                    stranger.connection.send(proof(token, _Side.SERVER, nonce, stranger.nonce))
                return True
        if piece:
            with contextlib.suppress(OSError):
                stranger.connection.send(REFUSED)
            self._tell(stranger.host)
        self._close(stranger)
        return False

    def _close_late(self) -> None:
        """Close strangers whose time is over, and listen again if there was no descriptor left."""
        now_s = self._clock.now_s()
        while self._strangers and next(iter(self._strangers)).deadline_s <= now_s:
            self._close(next(iter(self._strangers)))
        if self._listen_s is not None and self._listen_s <= now_s:
            self._selector.register(self._listener, selectors.EVENT_READ, self)
            self._listen_s = None

    def close(self) -> None:
        """Close the listener and all strangers."""
        for stranger in list(self._strangers):
            self._close(stranger)
        if self._listen_s is None:
            self._selector.unregister(self._listener)
        self._listener.close()

    def _make_room(self, problem: OSError) -> None:
        if self._strangers:
            self._close(next(iter(self._strangers)))
            return
        _LOG.warning("cannot accept a connection: %s", problem)
        self._selector.unregister(self._listener)  # it stays readable: do not spin
        self._listen_s = self._clock.now_s() + _LISTEN_AGAIN_S

    def _close(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.connection)
        stranger.connection.close()

    def _tell(self, host: str) -> None:
        self._refused += 1
        now_s = self._clock.now_s()
        if now_s - self._tell_s < _TELL_S:
            return
        _LOG.warning(
            "refused %d connection(s) without the token, the last one from %s", self._refused, host
        )
        self._refused, self._tell_s = 0, now_s
