"""A member's shell: connects to the root, carries messages, and wakes the waiting task.

One thread owns the state machine and the link. The task's thread passes events to it through
`_inbox`, and waits for `changed`.
"""

from __future__ import annotations

import logging
import select
import threading
from typing import TYPE_CHECKING

from paceline.core.handshake import TokenRefused
from paceline.launch.rendezvous.inbox import Inbox
from paceline.launch.rendezvous.links import connect
from paceline.launch.rendezvous.member import (
    Connect,
    Hangup,
    Leave,
    LinkDown,
    LinkUp,
    MemberState,
    Noticed,
    SendReport,
    StartRank,
    StopRank,
)
from paceline.launch.rendezvous.messages import BadMessage
from paceline.launch.rendezvous.root import Tick

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.clock import Clock
    from paceline.launch.rendezvous.links import RootLink
    from paceline.launch.rendezvous.member import MemberAction, MemberEvent
    from paceline.launch.rendezvous.messages import StartInfo
    from paceline.launch.task_placement import TaskPlacement

_POLL_INTERVAL_S = 0.25  # between two reads of a link that is a file
_LOG = logging.getLogger(__name__)


class MemberClient:
    """Runs a member in a thread of its own until the member leaves the rendezvous.

    Attributes:
        changed: set whenever one of the following is.
        start_info: how to start the rank.
        stop_reason: why the rank is to end.
        refusal: why the root that it reached last did not take this task; empty if it did.
        has_other_token: whether what listens where the root should has another token.
        leave: how the run ended, as far as the member knows, once it has left.
    """

    def __init__(
        self, state: MemberState, task: TaskPlacement, run: Path, clock: Clock, token: str
    ) -> None:
        self.changed = threading.Event()
        self.start_info: StartInfo | None = None
        self.stop_reason: str = ""
        self.refusal: str = ""
        self.has_other_token = False
        self.leave: Leave | None = None
        self._token = token
        self._state = state
        self._task = task
        self._run_folder = run
        self._clock = clock
        self._inbox: Inbox[MemberEvent] = Inbox()
        self._link: RootLink | None = None
        self._thread = threading.Thread(target=self._run, name="paceline-member", daemon=True)

    def start(self) -> None:
        """Begin to connect to the root."""
        self._thread.start()

    def put(self, event: MemberEvent) -> None:
        """Hand an event to the state machine; any thread may call this."""
        self._inbox.put(event)

    def join(self, timeout_s: float) -> None:
        """Wait until this member has left."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self.leave is None:
                self._wait()
                self._receive()
                for event in self._inbox.take():
                    self._handle(event)
                self._handle(Tick())
        finally:
            if self.leave is None:
                self.leave = Leave(problem="the rendezvous ended unexpectedly")
            self.changed.set()
            if self._link is not None:
                self._link.close()
            self._inbox.close()

    def _wait(self) -> None:
        timeout_s = max(0.0, min(self._state.wakeup_s() - self._clock.now_s(), 60.0))
        waiting = [self._inbox.fileno()]
        if self._link is not None:
            if self._link.fileno() >= 0:
                waiting.append(self._link.fileno())
            else:
                timeout_s = min(timeout_s, _POLL_INTERVAL_S)
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(timeout_s * 1000)}
        self._is_ready = self._link is not None and (
            self._link.fileno() < 0 or self._link.fileno() in ready
        )

    _is_ready = False

    def _receive(self) -> None:
        if self._link is None or not self._is_ready:
            return
        try:
            for notice in self._link.receive():
                self._handle(Noticed(notice))
                self._note_refusal()
        except (OSError, BadMessage):
            self._break()

    def _note_refusal(self) -> None:
        """Say at once why this task waits: it may be of no use to wait for the deadline."""
        refusal = self._state.refusal
        if refusal and refusal != self.refusal:
            _LOG.warning("%s %d waits: %s", self._task.noun, self._task.task_number, refusal)
        self.refusal = refusal

    def _break(self) -> None:
        self._hang_up()
        self._handle(LinkDown())

    def _hang_up(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _connect(self, attempt: int) -> RootLink | None:
        job = self._state.identity.job
        try:
            link = connect(self._task, job, self._run_folder, attempt, self._token)
        except TokenRefused as problem:
            if not self.has_other_token:
                _LOG.warning("%s %d waits: %s", self._task.noun, self._task.task_number, problem)
            self.has_other_token = True
            return None
        self.has_other_token = False
        return link

    def _handle(self, event: MemberEvent) -> None:
        for action in self._state.handle(event, self._clock.now_s()):
            self._do(action)

    def _do(self, action: MemberAction) -> None:
        match action:
            case Connect():
                self._hang_up()
                self._link = self._connect(action.attempt)
                self._handle(LinkUp() if self._link is not None else LinkDown())
            case SendReport():
                if self._link is not None:
                    try:
                        self._link.send(action.report)
                    except OSError:
                        self._break()
            case Hangup():
                self._hang_up()
            case StartRank():
                self.start_info = action.start
                self.changed.set()
            case StopRank():
                self.stop_reason = action.reason
                self.changed.set()
            case Leave():
                self.leave = action
                self.changed.set()
