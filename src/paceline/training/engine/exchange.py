"""Rows and columns of a matrix that ranks exchange, with gradients the same way back.

    by rows       rank r has its own n_r rows, of all columns: the samples of its batch
    by columns    rank r has its own c_r columns, of all rows: what its part of a layer computes
    whole         every rank has all rows and all columns

    method        from          to            message        its gradient is
    gather        by rows       whole         all-gather     sum
    sum           whole, parts  by rows       reduce-scatter gather
    to_columns    by rows       by columns    all-to-all     to_rows
    to_rows       by columns    by rows       all-to-all     to_columns

All ranks call the same methods in the same order. Rows may be unequal over the ranks: before a
layer's exchange, and before that of its gradient, they say in one small message how many each has,
and which layer it is, so that ranks which have left each other's way get an error in place of each
other's numbers. The messages have a process group of their own: those of the engine may pass them
on other ranks.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from paceline.core.errors import DeadlineExceeded, RankLost, UsageError, first_line
from paceline.training.engine.modes import all_gather, reduce_scatter, reduces_by_exchange
from paceline.training.engine.ranks import new_group

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.training.engine.ranks import Ranks

_KINDS = (
    *("saves {}", "computes {} without gradients", "computes {} with gradients"),
    *("computes the gradient of {}", "reduces the gradient of {}", "updates {}"),
)
SAVING, EVALUATING, TRAINING, BACKWARD, REDUCING, UPDATING = range(len(_KINDS))
_FIRST_VALUES = 256  # with the call: 2 KiB, which a network sends at once


class RowExchange:
    """The ranks that exchange rows and columns; all of them make this object together.

    Args:
        ranks: of the job.
        members: ranks of each group, in their order; every rank is in one of them. None: all ranks
            are one group.
        deadline_s: the longest wait for another rank.

    Attributes:
        group: of this rank.
        rank, size: in the group.
    """

    def __init__(
        self, ranks: Ranks, members: Sequence[Sequence[int]] | None = None, *, deadline_s: float
    ) -> None:
        self._job_rank = ranks.rank
        self._deadline = timedelta(seconds=deadline_s)
        self._ranks = list(range(ranks.size))
        for chosen in members or [self._ranks]:
            group = new_group(ranks, chosen, self._deadline)
            if ranks.rank in chosen:
                self.group, self._ranks = group, list(chosen)
        self.rank, self.size = self._ranks.index(ranks.rank), len(self._ranks)

    # --- messages ----------------------------------------------------------------------------

    def meet(
        self, rows: int, call: tuple[int, int], names: Sequence[str], device: torch.device
    ) -> list[int]:
        """Return the rows of each rank; an error unless all ranks have come for the same.

        Args:
            rows: of this rank.
            call: number of the layer, and what for.
            names: of the layers.
            device: of the group's messages.

        Raises:
            UsageError: they have not; the error names what two of them do.
        """
        own = torch.tensor([*call, rows], dtype=torch.int64, device=device)
        every = own.new_empty(self.size * len(own))
        self.run(all_gather, every, own, what=names[call[0]])
        found: list[list[int]] = every.view(self.size, -1).tolist()
        self._check_calls([(number, kind) for number, kind, _ in found], names)
        return [count for *_, count in found]

    def values(self, own: torch.Tensor, call: tuple[int, int], names: Sequence[str]) -> Any:
        """Return the values of all ranks, a row for each; an error unless all came for the same.

        The first message has the same length for all calls, so that it arrives whatever the others
        call; longer values follow in a second one.

        Args:
            own: of this rank, flat, of floating point; equally many on all ranks.
            call: number of the layer, and what for.
            names: of the layers.

        Raises:
            UsageError: ranks call different layers; the error names what two of them do.
        """
        if self.size == 1:
            return own.view(1, -1)
        first = own.new_zeros(len(call) + _FIRST_VALUES, dtype=torch.float64)
        for place, value in enumerate(call):
            first[place] = value
        count = min(len(own), _FIRST_VALUES)
        first[len(call) : len(call) + count] = own[:count]
        every = first.new_empty(self.size * len(first))
        self.run(all_gather, every, first, what=names[call[0]])
        every = every.view(self.size, -1)
        calls = every[:, : len(call)].tolist()
        self._check_calls([(int(number), int(kind)) for number, kind in calls], names)
        values = every[:, len(call) : len(call) + count].to(own.dtype)
        if count == len(own):
            return values
        rest = own.new_empty(self.size * (len(own) - count))
        self.run(all_gather, rest, own[count:].contiguous(), what=names[call[0]])
        return torch.cat([values, rest.view(self.size, -1)], dim=1)

    def _check_calls(self, calls: Sequence[tuple[int, int]], names: Sequence[str]) -> None:
        """Raise an error on all ranks unless they have come for the same."""
        for place, call in enumerate(calls):
            if call == calls[0]:
                continue
            does, others = (_KINDS[kind].format(names[number]) for number, kind in (call, calls[0]))
            raise UsageError(
                f"rank {self._ranks[place]} {does} while rank {self._ranks[0]} {others}",
                where=f"rank {self._job_rank}; {names[calls[self.rank][0]]}",
                why="the ranks share these layers, and each needs the others to compute them",
                fix="Have all ranks call the model equally often and in the same modes, also for "
                "an evaluation, have all go backwards, and all save the state",
            )

    def run(self, collective: Callable[..., Any], *args: Any, what: str, **kwargs: Any) -> None:
        """Run a collective of torch's, and wait for it.

        Raises:
            DeadlineExceeded: a rank did not answer.
            RankLost: a rank ended.
        """
        with _naming(self._job_rank, what, self._deadline):
            work = collective(*args, group=self.group, async_op=True, **kwargs)
            if work is not None:
                work.wait(self._deadline)

    def gathered(self, own: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks, shape (sum(rows), columns)."""
        most = max(rows)
        whole = own.new_empty(self.size * most, own.shape[1])
        self.run(all_gather, whole, _padded(own, most), what="the rows of all ranks")
        if min(rows) == most:
            return whole
        parts = whole.split(most)
        return torch.cat([part[:count] for part, count in zip(parts, rows, strict=True)])

    def summed(self, whole: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return this rank's rows, added over the ranks."""
        what, count = "the sums of all ranks", rows[self.rank]
        if reduces_by_exchange(whole.device, self.group):
            parts = self._exchanged(
                whole, (self.size * count, whole.shape[1]), rows, [count] * self.size, what
            )
            return parts.view(self.size, count, whole.shape[1]).sum(0)
        most = max(rows)
        if min(rows) < most:
            whole = torch.cat([_padded(part, most) for part in whole.split(list(rows))])
        own = whole.new_empty(most, whole.shape[1])
        self.run(reduce_scatter, own, whole.contiguous(), what=what)
        return own if count == len(own) else own[:count].clone()

    def columns(
        self, own: torch.Tensor, rows: Sequence[int], widths: Sequence[int]
    ) -> torch.Tensor:
        """Return this rank's columns of all rows, shape (sum(rows), widths[rank])."""
        width = widths[self.rank]
        given = torch.cat([part.reshape(-1) for part in own.split(list(widths), dim=1)])
        sends = [len(own) * other for other in widths]
        receives = [count * width for count in rows]
        flat = self._exchanged(given, (sum(receives),), sends, receives, "columns of all ranks")
        return flat.view(-1, width)

    def rows(self, whole: torch.Tensor, rows: Sequence[int], widths: Sequence[int]) -> torch.Tensor:
        """Return this rank's rows of all columns, shape (rows[rank], sum(widths))."""
        count = rows[self.rank]
        sends = [other * whole.shape[1] for other in rows]
        receives = [count * width for width in widths]
        flat = self._exchanged(
            whole.reshape(-1), (sum(receives),), sends, receives, "rows of all ranks"
        )
        parts = zip(flat.split(receives), widths, strict=True)
        return torch.cat([part.view(count, width) for part, width in parts], dim=1)

    def _exchanged(
        self,
        given: torch.Tensor,
        shape: tuple[int, ...],
        sends: Sequence[int],
        receives: Sequence[int],
        what: str,
    ) -> torch.Tensor:
        """Return what all ranks send this one; sizes are along the first dim."""
        received = given.new_empty(shape)
        self.run(
            dist.all_to_all_single,
            received,
            given.contiguous(),
            output_split_sizes=list(receives),
            input_split_sizes=list(sends),
            what=what,
        )
        return received


@contextlib.contextmanager
def _naming(rank: int, what: str, deadline: timedelta) -> Iterator[None]:
    """Turn a backend's error into one that says which exchange failed."""
    try:
        yield
    except RankLost:
        raise  # of Paceline's backend, which names the rank
    except RuntimeError as problem:
        text = first_line(problem)
        is_late = "imed out" in text or "imeout" in text
        kind = DeadlineExceeded if is_late else RankLost
        raise kind(
            "a rank did not answer" if is_late else "a rank ended",
            where=f"rank {rank}; {what}",
            why=f"waited {deadline.total_seconds():g} s" if is_late else text,
            fix="Look at the ends of the logs of all ranks: each must call the model equally often",
        ) from problem


def _padded(rows: torch.Tensor, most: int) -> torch.Tensor:
    if len(rows) == most:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(most - len(rows), rows.shape[1])])


# --- with gradients ------------------------------------------------------------------------------


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """What an exchange returns, whose gradient goes another way: `apply(x, there, back)`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        there: Callable[[torch.Tensor], torch.Tensor],
        back: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient.contiguous()), None, None


@dataclass(frozen=True, slots=True)
class SharedRows:
    """The rows that all ranks bring to a layer, and their ways between ranks; see above.

    Attributes:
        exchange: between the ranks.
        counts: rows of each rank.
        number: of the layer.
        names: of all layers.
    """

    exchange: RowExchange
    counts: list[int]
    number: int
    names: list[str]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks."""
        return self._exchanged(own, self.exchange.gathered, self.exchange.summed)

    def sum(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, added over the ranks."""
        return self._exchanged(whole, self.exchange.summed, self.exchange.gathered)

    def to_columns(self, own: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return this rank's columns of all rows; ranks have `widths` columns."""
        return self._exchanged(own, self.exchange.columns, self.exchange.rows, widths)

    def to_rows(self, whole: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return this rank's rows of all columns; ranks have `widths` columns."""
        return self._exchanged(whole, self.exchange.rows, self.exchange.columns, widths)

    def _exchanged(
        self,
        x: torch.Tensor,
        there: Callable[..., torch.Tensor],
        back: Callable[..., torch.Tensor],
        *sizes: Sequence[int],
    ) -> torch.Tensor:
        def met_back(gradient: torch.Tensor) -> torch.Tensor:
            own, call = self.counts[self.exchange.rank], (self.number, BACKWARD)
            self.exchange.meet(own, call, self.names, gradient.device)
            return back(gradient, self.counts, *sizes)

        found: torch.Tensor = _Exchanged.apply(x, lambda x: there(x, self.counts, *sizes), met_back)
        return found
