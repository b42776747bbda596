"""Schedules over MPI: Isend and Irecv of mpi4py, for sites whose MPI is tuned to their network.

Messages are sent as bytes, since ranks reduce them on their own: any dtype serves, bfloat16 too,
which MPI does not know. MPI has no wait with a deadline, so the requests are polled, with pauses
that grow to a millisecond: a rank that waits leaves its core to others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, Missing, PacelineError, RankLost, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.clock import Clock

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as problem:  # RuntimeError: it finds no MPI library
    raise Missing(
        "mpi4py cannot be loaded",
        why=str(problem),
        fix="Install it with an MPI library: pip install mpi4py mpich, or load your site's MPI",
    ) from problem

EAGER_POLLS = 200  # without a pause: some 50 microseconds
FIRST_PAUSE_S, LAST_PAUSE_S = 20e-6, 1e-3


class MpiTransport:
    """One rank of a communicator; takes NumPy arrays and CPU tensors."""

    def __init__(
        self, communicator: MPI.Intracomm | None = None, *, tag: int = 0, clock: Clock | None = None
    ) -> None:
        """Send and receive in `communicator`.

        Args:
            communicator: None is COMM_WORLD.
            tag: of all messages; other messages in the communicator must use another one.
            clock: for deadlines.
        """
        self._communicator = communicator or MPI.COMM_WORLD
        self._tag = tag
        self._clock = clock or SystemClock()
        self._never = threading.Event()
        self.rank = self._communicator.Get_rank()
        self.ranks = self._communicator.Get_size()
        self._abandoned: list[_Started] = []

    def exchange(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        timeout_s: float,
    ) -> None:
        """Start all messages, and return when all of them have ended; see `Transport`."""
        deadline_s = self._clock.now_s() + timeout_s
        started: list[_Started] = []
        peer = -1
        try:
            for peer, array in receives:
                request = self._communicator.Irecv(_as_bytes(array), peer, self._tag)
                started.append(_Started(request, peer, "send", array))
            for peer, array in sends:
                request = self._communicator.Isend(_as_bytes(array), peer, self._tag)
                started.append(_Started(request, peer, "receive", array))
            for request, peer, verb, _ in started:
                if not has_ended(request, deadline_s, self._clock, self._never):
                    raise DeadlineExceeded(
                        f"rank {peer} did not {verb} within {timeout_s:.3g} s",
                        where=f"rank {self.rank}",
                        fix="See what that rank does, or allow more time",
                    )
        except DeadlineExceeded:
            self._abandon(started)
            raise
        except MPI.Exception as problem:
            self._abandon(started)
            where = f"rank {self.rank}"
            raise error_of(problem, f"rank {peer}", self.rank, where) from problem

    def _abandon(self, started: list[_Started]) -> None:
        """Cancel what is to be received, and keep the memory of what cannot be cancelled."""
        for request, _, verb, _ in started:
            if verb == "send" and not request.Test():
                request.Cancel()
        self._abandoned += started


def has_ended(request: MPI.Request, deadline_s: float, clock: Clock, stop: threading.Event) -> bool:
    """Poll a request until it has ended; return false if the deadline, or `stop`, came first.

    Args:
        request: of MPI.
        deadline_s: by `clock`.
        clock: for the deadline and the pauses.
        stop: ends the wait when it is set.
    """
    for _ in range(EAGER_POLLS):
        if request.Test():
            return True
    pause_s = FIRST_PAUSE_S
    while not request.Test():
        if stop.is_set() or clock.now_s() >= deadline_s:
            return False
        clock.wait(stop, pause_s)
        pause_s = min(2 * pause_s, LAST_PAUSE_S)
    return True


def error_of(problem: MPI.Exception, peer: str, rank: int, where: str) -> PacelineError:
    """Return what a failed message means.

    Args:
        problem: of MPI.
        peer: names the rank at the other end.
        rank: of this process.
        where: it failed.
    """
    why = problem.Get_error_string()
    if problem.Get_error_class() == MPI.ERR_TRUNCATE:
        return UsageError(
            f"{peer} sent more bytes than rank {rank} expected",
            where=where,
            why=why,
            fix="Pass buffers of the same size and dtype on all ranks",
        )
    return RankLost(
        f"communication with {peer} failed",
        where=where,
        why=why,
        fix="See why that rank ended, in its own output",
    )


def new_communicator(ranks: Sequence[int]) -> MPI.Intracomm:
    """Return a communicator of some ranks of the job; all of them call this.

    Args:
        ranks: their ranks in COMM_WORLD, in the order of their ranks in the new one.
    """
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(list(ranks)))


class _Started(NamedTuple):
    """A message that was started, and what its peer has to do."""

    request: MPI.Request
    peer: int
    verb: str
    array: Any


def _as_bytes(array: Any) -> list[Any]:
    return [array, array.nbytes, MPI.BYTE]
