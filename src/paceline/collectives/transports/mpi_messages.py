"""Messages between two ranks over MPI: sends and receives that go on while the ranks compute.

MPI moves a long message only while a process is in one of its calls. So a thread polls what is
under way, with pauses that grow to a millisecond, and waits without polling when nothing is.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from paceline.collectives.tensors import copy_back, dense_of, room_for
from paceline.collectives.transports.mpi import (
    FIRST_PAUSE_S,
    LAST_PAUSE_S,
    MPI,
    error_of,
    new_communicator,
)
from paceline.collectives.transports.mpi_exchange import bytes_of
from paceline.collectives.works import PendingWork
from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, RankLost, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

_CLOSE_S = 5.0


class MpiMessageWork(PendingWork):
    """A send or receive that MPI has started."""

    path = "mpi"

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__([tensor])
        self.source = -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is sent, or received.

        Raises:
            DeadlineExceeded: the other rank did nothing before the deadline.
            RankLost: the communication failed, or the group was closed.
        """
        if timeout and not self._over.wait(timeout.total_seconds()):
            raise DeadlineExceeded(
                f"a message over MPI was not over after {timeout.total_seconds():g} s",
                fix="See what the other rank does, or allow more time",
            )
        return super().wait()

    def source_rank(self) -> int:
        """Return the group rank of the sender of a received message; -1 before it has come."""
        return self.source

    _source_rank = source_rank


class _MpiMessage(NamedTuple):
    """A message under way; `dense` is the memory that MPI reads or writes."""

    work: MpiMessageWork
    request: MPI.Request
    deadline_s: float
    tensor: torch.Tensor
    dense: torch.Tensor
    is_receive: bool
    peer: int | None


class MpiMessages:
    """Messages between some ranks of the job; any thread may call.

    Args:
        members: their global ranks, in the order of their rank here; all of them call this.
    """

    def __init__(self, members: Sequence[int]) -> None:
        # Of its own: collectives between hosts use another communicator with the same tags.
        self._communicator = new_communicator(members)
        self._members = tuple(members)
        self._rank = members[self._communicator.Get_rank()]
        self._most = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
        self._clock = SystemClock()
        self._condition = threading.Condition()  # guards what follows
        self._started: list[_MpiMessage] = []
        self._end = ""  # why no message moves any more
        # MPI may still write to the memory of what was given up.
        self._abandoned: list[_MpiMessage] = []
        self._thread = threading.Thread(
            target=self._progress, name="paceline-mpi-messages", daemon=True
        )
        self._thread.start()

    def send(self, tensor: torch.Tensor, peer: int, tag: int, timeout_s: float) -> MpiMessageWork:
        """Start to send a tensor to a rank.

        Raises:
            UsageError: MPI has no such tag.
            RankLost: the group has ended.
        """
        dense = dense_of(tensor)
        self._check(tag)
        request = self._communicator.Isend(bytes_of(dense), peer, tag)
        return self._watch(request, tensor, dense, peer, timeout_s, is_receive=False)

    def receive(
        self, tensor: torch.Tensor, peer: int | None, tag: int, timeout_s: float
    ) -> MpiMessageWork:
        """Start to receive a tensor from a rank, or with `peer` None from any.

        Raises:
            UsageError, RankLost: as for `send`.
        """
        dense = room_for(tensor)
        self._check(tag)
        sender = MPI.ANY_SOURCE if peer is None else peer
        request = self._communicator.Irecv(bytes_of(dense), sender, tag)
        return self._watch(request, tensor, dense, peer, timeout_s, is_receive=True)

    def abort(self, reason: str) -> None:
        """End all messages that are under way here with an error."""
        with self._condition:
            self._end = reason
            self._condition.notify()

    def close(self) -> None:
        """End the thread; messages that are under way fail."""
        self.abort("the group was closed")
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)
        if not self._abandoned:
            self._communicator.Free()

    def _check(self, tag: int) -> None:
        if not 0 <= tag <= self._most:
            raise UsageError(
                f"MPI has no tag {tag}",
                where="a message with between_hosts = mpi",
                fix=f"Give tags from 0 to {self._most}",
            )

    def _watch(
        self,
        request: MPI.Request,
        tensor: torch.Tensor,
        dense: torch.Tensor,
        peer: int | None,
        timeout_s: float,
        *,
        is_receive: bool,
    ) -> MpiMessageWork:
        work = MpiMessageWork(tensor)
        deadline_s = self._clock.now_s() + timeout_s
        message = _MpiMessage(work, request, deadline_s, tensor, dense, is_receive, peer)
        with self._condition:
            if self._end:
                self._abandoned.append(message)
                raise self._ended(message)
            self._started.append(message)
            self._condition.notify()
        return work

    # --- the thread --------------------------------------------------------------------------

    def _progress(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            with self._condition:
                while not self._started and not self._end:
                    self._condition.wait()
                if self._end:
                    break
                watched = list(self._started)
            ended = [message for message in watched if self._poll(message)]
            with self._condition:
                self._started = [message for message in self._started if message not in ended]
                pause_s = FIRST_PAUSE_S if ended else min(2 * pause_s, LAST_PAUSE_S)
                if not self._end:
                    self._condition.wait(pause_s)  # a new message ends the pause
        with self._condition:
            left, self._started = self._started, []
        for message in left:
            self._give_up(message, self._ended(message))

    def _poll(self, message: _MpiMessage) -> bool:
        """Complete the work of a message that has ended, or that took too long."""
        status = MPI.Status()
        try:
            has_ended = message.request.Test(status)
        except MPI.Exception as problem:
            self._fail(message, self._failed(message, problem))
            return True
        if has_ended:
            message.work.source = status.Get_source() if message.is_receive else -1
            message.work.run(lambda: _finish(message))
        elif self._clock.now_s() >= message.deadline_s:
            self._give_up(message, self._late(message))
        else:
            return False
        return True

    def _give_up(self, message: _MpiMessage, problem: Exception) -> None:
        if message.is_receive:
            message.request.Cancel()
        self._abandoned.append(message)
        self._fail(message, problem)

    def _fail(self, message: _MpiMessage, problem: Exception) -> None:
        def fail() -> None:
            raise problem

        message.work.run(fail)

    def _ended(self, message: _MpiMessage) -> RankLost:
        return RankLost(self._end, where=self._named(message), fix="See the error before it")

    def _late(self, message: _MpiMessage) -> DeadlineExceeded:
        did = "send" if message.is_receive else "receive"
        return DeadlineExceeded(
            f"{self._peer(message)} did not {did} before the deadline",
            where=self._named(message),
            fix="See what that rank does, or allow more time",
        )

    def _failed(self, message: _MpiMessage, problem: MPI.Exception) -> Exception:
        return error_of(problem, self._peer(message), self._rank, self._named(message))

    def _peer(self, message: _MpiMessage) -> str:
        return "any rank" if message.peer is None else f"rank {self._members[message.peer]}"

    def _named(self, message: _MpiMessage) -> str:
        way = "from" if message.is_receive else "to"
        return f"rank {self._rank}, a message over MPI {way} {self._peer(message)}"


def _finish(message: _MpiMessage) -> None:
    if message.is_receive:
        # A tensor of the caller's inference mode can only be written to in that mode.
        with torch.inference_mode():
            copy_back(message.dense, message.tensor)
