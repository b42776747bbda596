"""Runs any Schedule on one rank, over messages between ranks: `torch.distributed`, MPI or threads.

    Schedule --steps_of(rank)--> ScheduleExecutor --sends, receives--> Transport   moves memory
                                        |
                                        +-------- reduces, divides --> Arrays      NumPy or torch

An executor is made once per schedule and group and run many times; a run takes one buffer per rank,
of any size. Each rank makes its executor of the same schedule with the same `scratch_bytes`.

What a rank receives to reduce goes to scratch memory first. To bound that memory, messages to be
reduced are exchanged in segments: segment i of all messages of a step, then segment i + 1. Both
ends compute the same segments, so the proof that no Schedule deadlocks holds for pairs
(step, segment) as it does for steps.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, get_args

from paceline.collectives.arrays import arrays_for
from paceline.core.clock import SystemClock
from paceline.core.errors import RankLost, UsageError
from paceline.schedules import check
from paceline.schedules.schedule import REDUCING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.collectives.arrays import Arrays
    from paceline.core.clock import Clock
    from paceline.schedules import Schedule, Transfer

ReductionName = Literal["sum", "average", "min", "max", "product"]
SCRATCH_BYTES = 4 * 1024 * 1024


class Transport(Protocol):
    """Moves memory between the ranks of a group; used by one thread at a time.

    Attributes:
        rank: this process's number in the group.
        ranks: size of the group.
    """

    rank: int
    ranks: int

    def exchange(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        timeout_s: float,
    ) -> None:
        """Start all messages, and return when all of them have ended.

        Args:
            sends: (peer, array) to send; messages to one peer arrive in this order.
            receives: (peer, array) to fill; arrays are contiguous, and of the sent size.
            timeout_s: from now until the end of all messages.

        Raises:
            DeadlineExceeded: a message did not end in time; names the peer.
            RankLost: the connection to a peer failed; names the peer.
        """


class ScheduleExecutor:
    """One rank's part of a Schedule; used by one thread at a time."""

    def __init__(
        self,
        schedule: Schedule,
        transport: Transport,
        *,
        scratch_bytes: int = SCRATCH_BYTES,
        clock: Clock | None = None,
    ) -> None:
        """Prepare to run `schedule`, after proving that it is correct.

        Args:
            schedule: equal on all ranks.
            transport: of a group with as many ranks as the schedule.
            scratch_bytes: most memory that a run takes beside the buffer; equal on all ranks.
            clock: for deadlines.

        Raises:
            InvalidSchedule: the schedule does not perform its operation.
            UsageError: the group has another number of ranks, or `scratch_bytes` is too small.
        Cost: that of `check`.
        """
        if transport.ranks != schedule.ranks:
            raise UsageError(
                f"the schedule is for {schedule.ranks} ranks, the group has {transport.ranks}",
                where=f"rank {transport.rank}, {_name(schedule)}",
                fix="Make the schedule for the group's number of ranks",
            )
        check(schedule)
        # Of any rank, not of this one alone: both ends of a message must cut the same segments.
        counts = Counter((t.step, t.destination) for t in schedule.transfers if t.reduce)
        self._share_bytes = scratch_bytes // max(counts.values(), default=1)
        if self._share_bytes < 16:  # the largest element: complex128
            raise UsageError(
                f"{scratch_bytes} bytes of scratch memory are too few",
                where=_name(schedule),
                fix=f"Give at least {16 * max(counts.values(), default=1)}",
            )
        self._schedule = schedule
        self._transport = transport
        self._clock = clock or SystemClock()
        self._steps = schedule.steps_of(transport.rank)
        self._broken = ""

    def run(self, buffer: Any, op: ReductionName = "sum", *, timeout_s: float) -> None:
        """Perform the operation on this rank's buffer, in place.

        Args:
            buffer: NumPy array or CPU tensor, contiguous, of any shape; of the same number of
                elements and dtype on all ranks. Chunk i of C begins at element i * size // C.
            op: reduction; a broadcast or all_gather ignores it. Sums of float16 and bfloat16 are
                rounded at each rank that they pass; averages of integers round towards zero.
            timeout_s: until this rank is done.

        Raises:
            DeadlineExceeded: a peer did not send or receive in time; names peer and step.
            RankLost: the connection to a peer failed; names peer and step.
            UsageError: the buffer is not contiguous, `op` is unknown, an earlier run failed, or
                ranks passed buffers of different sizes (as far as the transport notices it).

        After an error the buffer holds parts of the result, messages may still be on their way, and
        neither this executor nor its transport can be used again.
        """
        if self._broken:
            raise UsageError(
                "an earlier run failed, and its messages may still be on their way",
                where=self._where(),
                why=self._broken,
                fix="Make a new process group or communicator, and executors on it",
            )
        if op not in get_args(ReductionName):
            raise UsageError(
                f"unknown reduction '{op}'",
                where=self._where(),
                fix="Use one of " + ", ".join(get_args(ReductionName)),
            )
        arrays = arrays_for(buffer)
        flat = arrays.flat(buffer)
        self._broken = "it was interrupted"  # until it has ended, whatever is raised
        self._execute(arrays, flat, op, self._clock.now_s() + timeout_s)
        self._broken = ""

    def _execute(self, arrays: Arrays, flat: Any, op: ReductionName, deadline_s: float) -> None:
        segment = self._share_bytes // flat.itemsize
        needed = max(
            (self._scratch_count(step, len(flat), segment) for step in self._steps), default=0
        )
        work = _Work(arrays, flat, arrays.scratch(flat, needed), segment, op)
        for step in self._steps:
            try:
                self._run_step(step, work, deadline_s)
            except RankLost as problem:
                raise self._broken_off(problem, step[0].step) from problem
        if op == "average" and self._schedule.operation in REDUCING:
            arrays.divide(flat[self._result(len(flat))], self._schedule.ranks)

    def _run_step(self, step: Sequence[Transfer], work: _Work, deadline_s: float) -> None:
        """Exchange and reduce the step's messages, segment by segment."""
        for index in range(self._segments(step, len(work.flat), work.segment)):
            sends, receives, reductions = self._messages(step, work, index)
            if sends or receives:
                remaining_s = deadline_s - self._clock.now_s()
                self._transport.exchange(sends, receives, max(remaining_s, 0.0))
            for target, values in reductions:
                work.arrays.combine(work.op, target, values)

    def _messages(self, step: Sequence[Transfer], work: _Work, index: int) -> _SegmentMessages:
        """Return what to send, to receive, and then to reduce, of one segment of the step."""
        sends, receives, reductions = [], [], []
        used = 0
        for transfer in step:
            bounds = self._segment(transfer, len(work.flat), work.segment, index)
            part = work.flat[bounds]
            count = bounds.stop - bounds.start
            if not count:  # a chunk of nothing, or a message with fewer segments
                continue
            if transfer.source == self._transport.rank:
                sends.append((transfer.destination, part))
            elif not transfer.reduce:
                receives.append((transfer.source, part))
            else:
                values = work.scratch[used : used + count]
                used += count
                receives.append((transfer.source, values))
                reductions.append((part, values))
        return _SegmentMessages(sends, receives, reductions)

    def _elements(self, transfer: Transfer, count: int) -> slice:
        """Return the elements of a buffer of `count` that the transfer's chunks have."""
        chunks = self._schedule.chunks
        return slice(transfer.begin * count // chunks, transfer.end * count // chunks)

    def _segment(self, transfer: Transfer, count: int, segment: int, index: int) -> slice:
        """Return the elements of one segment; what is not reduced is one segment."""
        whole = self._elements(transfer, count)
        size = segment if transfer.reduce else max(count, 1)
        begin = min(whole.start + index * size, whole.stop)
        return slice(begin, min(begin + size, whole.stop))

    def _segments(self, step: Sequence[Transfer], count: int, segment: int) -> int:
        """Return the number of segments of the step's longest message."""
        reduced = (self._elements(transfer, count) for transfer in step if transfer.reduce)
        longest = max((whole.stop - whole.start for whole in reduced), default=0)
        return max(1, -(-longest // segment))

    def _scratch_count(self, step: Sequence[Transfer], count: int, segment: int) -> int:
        """Return the elements of scratch memory that the step takes."""
        first = (
            self._segment(transfer, count, segment, 0)
            for transfer in step
            if transfer.reduce and transfer.destination == self._transport.rank
        )
        return sum(part.stop - part.start for part in first)

    def _result(self, count: int) -> slice:
        """Return the elements that hold the result on this rank."""
        if self._schedule.operation == "reduce":
            return slice(0, count if self._transport.rank == self._schedule.root else 0)
        if self._schedule.operation == "reduce_scatter":
            owned = self._schedule.owned(self._transport.rank)
            chunks = self._schedule.chunks
            return slice(owned.start * count // chunks, owned.stop * count // chunks)
        return slice(0, count)

    def _broken_off(self, problem: RankLost, step: int) -> RankLost:
        """Return the transport's error with the place in the schedule, and refuse further runs."""
        self._broken = problem.what
        where = f"rank {self._transport.rank}, step {step} of {_name(self._schedule)}"
        return type(problem)(problem.what, where=where, why=problem.why, fix=problem.fix)

    def _where(self) -> str:
        return f"rank {self._transport.rank}, {_name(self._schedule)}"


class _Work(NamedTuple):
    """What a run works on: segments are in elements."""

    arrays: Arrays
    flat: Any
    scratch: Any
    segment: int
    op: ReductionName


class _SegmentMessages(NamedTuple):
    """Of one segment: (peer, array) to send and receive, then (target, values) to reduce."""

    sends: list[tuple[int, Any]]
    receives: list[tuple[int, Any]]
    reductions: list[tuple[Any, Any]]


def _name(schedule: Schedule) -> str:
    return f"{schedule.algorithm} {schedule.operation}"
