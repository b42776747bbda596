"""How a member reaches the root: a TCP connection, or files in the run's folder where TCP fails."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import StorageError
from paceline.core.files import commit_bytes
from paceline.core.handshake import TokenRefused, prove
from paceline.launch.rendezvous.addresses import (
    FOLDER,
    known_addresses,
    read_address,
    read_run_token,
)
from paceline.launch.rendezvous.messages import (
    MAX_MESSAGE_BYTES,
    BadMessage,
    Notice,
    TaskReport,
    parse_notice,
)

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from paceline.launch.task_placement import TaskPlacement

CONNECT_S = 3.0  # a firewall that drops packets would stall a connection attempt for minutes
_PROVE_S = 0.5  # for the root to prove the token at the first attempt; longer at later ones
_FILE_FROM_ATTEMPT = 3  # with known addresses, the file is looked for only after so many attempts
_FOLDER_FROM_ATTEMPT = 8  # and messages go through files only after so many


class RootLink(Protocol):
    """A connection of a member; only the member's thread uses it."""

    def fileno(self) -> int:
        """Return the descriptor to select on; -1 for a link that must be polled."""

    def send(self, report: TaskReport) -> None:
        """Send a report.

        Raises:
            OSError: the link is broken.
        """

    def receive(self) -> list[Notice]:
        """Return the notices that have arrived.

        Raises:
            OSError: the link is broken.
            BadMessage: the line is not a notice.
        """

    def close(self) -> None:
        """Close it."""


class TcpLink:
    """A connection to the root; messages are lines."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = b""
        connection.settimeout(CONNECT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self._socket.fileno()

    def send(self, report: TaskReport) -> None:
        """Send a report; the root reads at once, or is gone."""
        self._socket.sendall(report.to_line())

    def receive(self) -> list[Notice]:
        """Return the notices that have arrived, after `fileno` became readable."""
        chunk = self._socket.recv(MAX_MESSAGE_BYTES)
        if not chunk:
            raise ConnectionError("the root closed the connection")
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        if len(self._buffer) > MAX_MESSAGE_BYTES:
            raise BadMessage("a line without an end")
        return [parse_notice(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class FolderLink:
    """Files in the run's folder: the newest report of this rank, and the newest notice for it."""

    def __init__(self, run: Path, rank: int) -> None:
        self._report = run / FOLDER / f"rank-{rank:05d}.report"
        self._notice = run / FOLDER / f"rank-{rank:05d}.notice"
        self._seen = b""

    def fileno(self) -> int:
        """Return -1: files must be polled."""
        return -1

    def send(self, report: TaskReport) -> None:
        """Write the report, which replaces the last one."""
        try:
            commit_bytes(self._report, report.to_line())
        except StorageError as problem:
            raise ConnectionError(str(problem)) from problem

    def receive(self) -> list[Notice]:
        """Return the notice if it is new."""
        try:
            line = self._notice.read_bytes()
        except FileNotFoundError:
            return []
        if line == self._seen:
            return []
        self._seen = line
        return [parse_notice(line)]

    def close(self) -> None:
        """Do nothing: the last report must stay until the root has read it."""


def connect(task: TaskPlacement, job: str, run: Path, attempt: int, token: str) -> RootLink | None:
    """Return a link to the root, which has proved that it has the token; None: not found now.

    Early attempts do not read the run's folder if the address is known without it.

    Raises:
        TokenRefused: what listens there has another token than this task and the run's folder.
    """
    known = known_addresses(task, job)
    turn = attempt % max(1, len(known))  # an agreed port may be in use by something else
    written = read_address(run) if not known or attempt >= _FILE_FROM_ATTEMPT else ()
    wait_s = min(CONNECT_S, _PROVE_S * (attempt + 1))
    link = _connect_tcp((*written, *known[turn:], *known[:turn]), token, run, wait_s)
    if link is not None or not written or attempt < _FOLDER_FROM_ATTEMPT:
        return link
    return FolderLink(run, task.task_number)  # the root is there, but TCP does not reach it


def _connect_tcp(
    addresses: Iterable[tuple[str, int]], token: str, run: Path, wait_s: float
) -> TcpLink | None:
    refusal: TokenRefused | None = None
    for address in addresses:
        try:
            return _greet(address, token, wait_s)
        except TokenRefused as problem:  # by the root of another user, or on a node without a home
            refusal = problem
        except TimeoutError:  # something else listens there, and waits: others at the next attempt
            return None
        except OSError:
            continue
        with contextlib.suppress(OSError):
            if run_token := read_run_token(run):
                return _greet(address, run_token, wait_s)
    if refusal is not None:
        raise refusal
    return None


def _greet(address: tuple[str, int], token: str, wait_s: float) -> TcpLink:
    connection = socket.create_connection(address, timeout=CONNECT_S)
    try:
        prove(connection, token, wait_s)
        return TcpLink(connection)
    except BaseException:
        connection.close()
        raise
