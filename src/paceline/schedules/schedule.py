"""The Schedule: a collective algorithm as plain data, which checker, cost model and executor share.

The message is a buffer on each rank, divided into equal chunks, so that one Schedule serves every
size. A transfer sends a range of chunks from one rank's buffer to the same range of another's::

    step   source -> destination   chunks     the destination
       0        1 -> 0             [0, 4)     reduces: adds (or takes the minimum of ...) its own
       1        0 -> 1             [0, 4)     overwrites its own

The rules by which a rank follows a Schedule:

1. It takes the transfers in which it is source or destination, in the order of their steps.
   Transfers of one step proceed at the same time; the rank begins its next step when all of them
   have ended. Steps in which it has no transfer do not exist for it: nothing synchronises ranks
   that exchange no data.
2. A send transmits what the buffer held before the step. Received chunks are reduced after the
   sends of the step, in the order of the transfers.

Both ends of a message are one transfer with one step, hence **no Schedule can deadlock**, even if
every send waits for its receive: among the ranks that are not done, take those at the lowest step.
All messages of that step have both ends posted, for no end of them is still at an earlier step, so
the step completes; by induction every step does. What remains to be proved is that the result is
right: `paceline.schedules.check`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from paceline.core.errors import ConfigError
from paceline.core.record import Record

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"]
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("reduce", "broadcast")


class Transfer(NamedTuple):
    """One message: what `source` sends to `destination` in a step.

    A named tuple rather than a Record, because a Schedule for 160 ranks has 50,000 of them.

    Attributes:
        step: when, counted from 0.
        source: rank that sends.
        destination: rank that receives.
        begin: first chunk.
        end: chunk after the last one.
        reduce: whether the destination reduces the chunks into its own, or overwrites its own.
    """

    step: int
    source: int
    destination: int
    begin: int
    end: int
    reduce: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule(Record):
    """Who sends what to whom, and when, so that all ranks together perform one collective.

    Each rank has one buffer, which the operation changes in place. The operations of MPI, with
    `MPI_IN_PLACE`: before a reduce_scatter each rank holds a full vector, after it the reduced
    chunks that `owned` gives it; an all_gather begins with those. Elsewhere the buffers of a
    reduce_scatter, and of the ranks of a reduce that are not its root, hold partial results.

    Attributes:
        operation: the collective.
        algorithm: its name and parameters, for example ``ring`` or ``chain-binomial-8``.
        ranks: that take part, numbered from 0.
        chunks: equal parts of the message; an element more or less where they do not divide it.
        root: of a reduce or broadcast.
        transfers: in the order of rising steps.
    """

    operation: Operation
    algorithm: str
    ranks: int
    chunks: int
    root: int | None = None
    transfers: tuple[Transfer, ...] = ()

    def __post_init__(self) -> None:
        where = f"{self.algorithm} {self.operation}"
        if self.operation not in get_args(Operation):
            raise ConfigError(
                f"unknown operation '{self.operation}'",
                where=where,
                fix="Use one of " + ", ".join(get_args(Operation)),
            )
        if self.ranks < 1 or self.chunks < 1:
            raise ConfigError(
                f"a schedule has at least 1 rank and 1 chunk, got {self.ranks} and {self.chunks}",
                where=where,
                fix="Give 1 or more of both",
            )
        if (self.operation in ROOTED) != (self.root is not None):
            raise ConfigError(
                f"root is {self.root}",
                where=where,
                fix="Give a root to reduce and broadcast, and to no other operation",
            )
        if self.root is not None and not 0 <= self.root < self.ranks:
            raise ConfigError(
                f"root {self.root} is not among {self.ranks} ranks",
                where=where,
                fix=f"Give a root from 0 to {self.ranks - 1}",
            )
        if self.operation in ("reduce_scatter", "all_gather") and self.chunks % self.ranks:
            raise ConfigError(
                f"{self.chunks} chunks cannot be divided among {self.ranks} ranks equally",
                where=where,
                fix=f"Give a multiple of {self.ranks} chunks",
            )

    @property
    def steps(self) -> int:
        """Number of steps, from the first transfer to the last."""
        return self.transfers[-1].step + 1 if self.transfers else 0

    def owned(self, rank: int) -> range:
        """Return the chunks that a reduce_scatter leaves with `rank`, an all_gather takes of it."""
        each = self.chunks // self.ranks
        return range(rank * each, (rank + 1) * each)

    def steps_of(self, rank: int) -> tuple[tuple[Transfer, ...], ...]:
        """Return the transfers of `rank`, step by step, without steps in which it has none.

        Cost: one pass over all transfers.
        """
        by_step: dict[int, list[Transfer]] = {}
        for transfer in self.transfers:
            if rank in (transfer.source, transfer.destination):
                by_step.setdefault(transfer.step, []).append(transfer)
        return tuple(tuple(by_step[step]) for step in sorted(by_step))
