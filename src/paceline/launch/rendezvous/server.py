"""The root's shell: carries messages between TCP connections or files and the state machine.

::

    member --TCP, a line per message--> selector --+
                                                   +--> RootState.handle -----> notices, AllEnded
    member --RUN/rendezvous/*.report--> listing ---+

One thread owns the state machine, all sockets and the folder. Other threads pass events to it
through `_inbox`, and wait for `ended`. Who connects proves the token first (`core.handshake`);
invalid input closes its connection and has no other effect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import PacelineError
from paceline.core.files import commit_bytes
from paceline.core.handshake import Entrance
from paceline.core.processes import allow_descriptors
from paceline.launch.rendezvous.addresses import FOLDER, choose_address
from paceline.launch.rendezvous.inbox import Inbox
from paceline.launch.rendezvous.messages import MAX_MESSAGE_BYTES, BadMessage, parse_report
from paceline.launch.rendezvous.root import (
    AddressChosen,
    AllEnded,
    ChooseAddress,
    Disconnected,
    Drop,
    Finished,
    Received,
    RootState,
    SendNotice,
    Tick,
)

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.clock import Clock
    from paceline.core.handshake import Admitted
    from paceline.launch.rendezvous.messages import Notice
    from paceline.launch.rendezvous.root import Peer, RootAction, RootEvent
    from paceline.launch.task_placement import TaskPlacement

_TICK_S = 0.25
_POLL_INTERVAL_S = 1.0  # between two searches for reports in the folder
_SPARE_CONNECTIONS = 64  # for members that connect again, in addition to one per task
_SPARE_DESCRIPTORS = 512  # that this process needs in addition to one for each task
_MAX_UNSENT_BYTES = 1 << 20
_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Connection:
    """One TCP connection; serves as the state machine's `Peer`."""

    socket: socket.socket
    address: str = ""
    received: bytes = b""
    unsent: bytes = b""
    closing: bool = False


@dataclass(frozen=True, slots=True)
class _FolderPeer:
    """A member that reports through a file."""

    rank: int  # number of its task


class RootServer:
    """Runs the root in a thread of its own until no task still expects the result.

    Attributes:
        ended: set when `outcome` is known.
        outcome: how all ranks ended.
    """

    def __init__(
        self,
        state: RootState,
        listener: socket.socket,
        run: Path,
        task: TaskPlacement,
        clock: Clock,
        tokens: tuple[str, ...],
    ) -> None:
        self.ended = threading.Event()
        self.outcome: AllEnded | None = None
        self._state = state
        self._folder = run / FOLDER
        self._task = task
        self._clock = clock
        self._inbox: Inbox[RootEvent] = Inbox()
        self._selector = selectors.DefaultSelector()
        self._entrance = Entrance(listener, self._selector, tokens, clock=clock)
        self._connections: set[_Connection] = set()
        self._seen_reports: dict[str, tuple[int, int]] = {}
        self._finished = False
        self._thread = threading.Thread(target=self._run, name="paceline-root", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        allow_descriptors(self._state.world_size + _SPARE_DESCRIPTORS)
        self._selector.register(self._inbox, selectors.EVENT_READ)
        self._thread.start()

    def put(self, event: RootEvent) -> None:
        """Hand an event to the state machine; any thread may call this."""
        self._inbox.put(event)

    def join(self, timeout_s: float) -> None:
        """Wait until no task still expects the result."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        look_s = 0.0
        try:
            while not self._finished:
                self._serve(_TICK_S)
                now_s = self._clock.now_s()
                if now_s >= look_s:
                    look_s = now_s + _POLL_INTERVAL_S
                    self._read_folder()
                self._handle(Tick())
        finally:
            self._close()

    def _serve(self, timeout_s: float) -> None:
        admitted, events = self._entrance.select(timeout_s)
        for member in admitted:
            self._admit(member)
        for key, mask in events:
            if key.fileobj is not self._inbox:
                self._exchange(key.data, mask)
        for event in self._inbox.take():
            self._handle(event)

    def _handle(self, event: RootEvent) -> None:
        for action in self._state.handle(event, self._clock.now_s()):
            self._do(action)

    def _do(self, action: RootAction) -> None:
        match action:
            case SendNotice():
                self._send(action.peer, action.notice)
            case Drop():
                if isinstance(action.peer, _Connection):
                    action.peer.closing = True
                    self._flush(action.peer)
            case ChooseAddress():
                self._choose_address()
            case AllEnded():
                self.outcome = action
                self.ended.set()
            case Finished():
                self._finished = True

    def _choose_address(self) -> None:
        try:
            address, port = choose_address(self._task)
        except PacelineError as problem:  # torch says so again, with the address that it tried
            _LOG.warning("%s", problem)
            address, port = socket.gethostname(), 0
        self._handle(AddressChosen(address, port))

    # --- TCP ------------------------------------------------------------------------------------

    def _admit(self, member: Admitted) -> None:
        if len(self._connections) >= self._state.world_size + _SPARE_CONNECTIONS:
            member.connection.close()
            return
        connection = _Connection(member.connection, member.host)
        self._connections.add(connection)
        self._selector.register(member.connection, selectors.EVENT_READ, connection)

    def _exchange(self, connection: _Connection, mask: int) -> None:
        if connection not in self._connections:
            return
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ or connection not in self._connections:
            return
        try:
            chunk = connection.socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            self._hang_up(connection)
            return
        *lines, connection.received = (connection.received + chunk).split(b"\n")
        try:
            if len(connection.received) > MAX_MESSAGE_BYTES:
                raise BadMessage("a line without an end")
            for line in lines:
                report = parse_report(line)
                self._handle(Received(connection, report, connection.address))
        except BadMessage as problem:
            _LOG.info("closing a connection: %s", problem)
            self._hang_up(connection)

    def _send(self, peer: Peer, notice: Notice) -> None:
        if isinstance(peer, _FolderPeer):
            path = self._folder / f"rank-{peer.rank:05d}.notice"
            with contextlib.suppress(PacelineError):  # full: the next one may find room
                commit_bytes(path, notice.to_line())
        elif isinstance(peer, _Connection) and peer in self._connections:
            peer.unsent += notice.to_line()
            self._flush(peer)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                count = connection.socket.send(connection.unsent)
                connection.unsent = connection.unsent[count:]
        except BlockingIOError:
            pass
        except OSError:
            self._hang_up(connection)
            return
        too_slow = len(connection.unsent) > _MAX_UNSENT_BYTES
        if too_slow or (connection.closing and not connection.unsent):
            self._hang_up(connection)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _hang_up(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._handle(Disconnected(connection))

    # --- files ----------------------------------------------------------------------------------

    def _read_folder(self) -> None:
        """Read the new reports; only this task lists the folder, once a second."""
        try:
            with os.scandir(self._folder) as entries:
                reports = [entry for entry in entries if entry.name.endswith(".report")]
        except OSError:
            return
        for entry in reports[: self._state.world_size]:
            with contextlib.suppress(OSError, BadMessage):
                status = entry.stat()
                stamp = (status.st_ino, status.st_mtime_ns)  # each report is a new file
                if self._seen_reports.get(entry.name) == stamp:
                    continue
                if status.st_size <= MAX_MESSAGE_BYTES:
                    report = parse_report((self._folder / entry.name).read_bytes())
                    self._handle(Received(_FolderPeer(report.rank), report))
                self._seen_reports[entry.name] = stamp

    def _close(self) -> None:
        for connection in self._connections:
            connection.socket.close()
        self._entrance.close()
        self._selector.close()
        self._inbox.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self.ended.set()
