"""Rows and columns of a matrix that ranks exchange, with gradients the same way back.

    by rows       rank r has its own n_r rows, of all columns: the samples of its batch
    by columns    rank r has its own c_r columns, of all rows: what its part of a layer computes
    whole         every rank has all rows and all columns

    function      from          to            message        its gradient is
    gather_rows   by rows       whole         all-gather     sum_rows
    sum_rows      whole, parts  by rows       reduce-scatter gather_rows
    to_columns    by rows       by columns    all-to-all     to_rows
    to_rows       by columns    by rows       all-to-all     to_columns

All ranks call the same functions in the same order. Rows may be unequal over the ranks: before a
layer's exchange they say in one small message how many each has, and which layer it is, so that
ranks which have left each other's way get an error in place of each other's numbers. The messages
have a process group of their own: those of the engine may pass them on other ranks.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from paceline.core.errors import DeadlineExceeded, RankLost, UsageError, first_line
from paceline.training.engine.modes import all_gather, reduce_scatter, reduces_by_exchange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.training.engine.ranks import Ranks

_KINDS = ("saves its state", "computes without gradients", "computes with gradients")
SAVING, EVALUATING, TRAINING = range(len(_KINDS))


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
        whole = ranks.group or dist.group.WORLD
        for chosen in members or [self._ranks]:
            world = [dist.get_global_rank(whole, rank) for rank in chosen]
            if ranks.rank in chosen or ranks.group is None:  # a group of all needs all to form it
                group = dist.new_group(
                    world,
                    timeout=self._deadline,
                    use_local_synchronization=ranks.group is not None,
                )
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
        own = torch.tensor([rows, *call], dtype=torch.int64, device=device)
        every = own.new_empty(self.size * len(own))
        self.run(all_gather, every, own, what=names[call[0]])
        found = [tuple(entry) for entry in every.view(self.size, -1).tolist()]
        for place, (_, number, kind) in enumerate(found):
            if (number, kind) != found[0][1:]:
                first, other = self._ranks[0], self._ranks[place]
                raise UsageError(
                    f"rank {other} {_KINDS[kind]} while rank {first} {_KINDS[found[0][2]]}"
                    if kind != found[0][2]
                    else f"rank {other} computes {names[number]} while rank {first} computes "
                    f"{names[found[0][1]]}",
                    where=f"rank {self._job_rank}; {names[call[0]]}",
                    why="the ranks share this layer, and each needs the others to compute it",
                    fix="Have all ranks call the model equally often and in the same modes, also "
                    "for an evaluation, and all ranks save the state",
                )
        return [entry[0] for entry in found]

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


class GatherRows(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """The rows of all ranks: `apply(own, exchange, rows)`."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, exchange: RowExchange, rows: Sequence[int]
    ) -> torch.Tensor:
        """Exchange the values."""
        ctx.exchange, ctx.rows = exchange, rows
        return exchange.gathered(own, rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Exchange the gradient back."""
        return ctx.exchange.summed(gradient.contiguous(), ctx.rows), None, None


class SumRows(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """This rank's rows, added over the ranks: `apply(whole, exchange, rows)`."""

    @staticmethod
    def forward(
        ctx: Any, whole: torch.Tensor, exchange: RowExchange, rows: Sequence[int]
    ) -> torch.Tensor:
        """Exchange the values."""
        ctx.exchange, ctx.rows = exchange, rows
        return exchange.summed(whole, rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Exchange the gradient back."""
        return ctx.exchange.gathered(gradient.contiguous(), ctx.rows), None, None


class ToColumns(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """This rank's columns of all rows: `apply(own, exchange, rows, widths)`."""

    @staticmethod
    def forward(
        ctx: Any,
        own: torch.Tensor,
        exchange: RowExchange,
        rows: Sequence[int],
        widths: Sequence[int],
    ) -> torch.Tensor:
        """Exchange the values."""
        ctx.exchange, ctx.sizes = exchange, (rows, widths)
        return exchange.columns(own, rows, widths)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Exchange the gradient back."""
        return ctx.exchange.rows(gradient, *ctx.sizes), None, None, None


class ToRows(torch.autograd.Function):  # type: ignore[misc]  # torch has no types here
    """This rank's rows of all columns: `apply(whole, exchange, rows, widths)`."""

    @staticmethod
    def forward(
        ctx: Any,
        whole: torch.Tensor,
        exchange: RowExchange,
        rows: Sequence[int],
        widths: Sequence[int],
    ) -> torch.Tensor:
        """Exchange the values."""
        ctx.exchange, ctx.sizes = exchange, (rows, widths)
        return exchange.rows(whole, rows, widths)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Exchange the gradient back."""
        return ctx.exchange.columns(gradient, *ctx.sizes), None, None, None
