"""Schedules over `torch.distributed`: isend and irecv of any backend. Imports torch.

The messages of a step are given to torch as one batch, which NCCL needs to proceed with them at the
same time; gloo starts them one by one, and matches messages of one tag in their order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, RankLost, UsageError, first_line

if TYPE_CHECKING:
    from collections.abc import Sequence


class TorchTransport:
    """One rank of a process group; takes tensors, and NumPy arrays on a CPU backend."""

    def __init__(self, group: dist.ProcessGroup | None = None, *, tag: int = 0) -> None:
        """Send and receive in `group`.

        Args:
            group: a process group of which this process is a member; None is the default one.
            tag: of all messages; other sends and receives in the group must use another one.

        Raises:
            UsageError: this process is not a member of the group.
        """
        self._group = group
        self._tag = tag
        self._clock = SystemClock()
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self._abandoned: list[Any] = []
        if self.rank < 0:
            raise UsageError(
                "this process is not a member of the group", fix="Call it on the group's ranks"
            )

    def exchange(
        self,
        sends: Sequence[tuple[int, Any]],
        receives: Sequence[tuple[int, Any]],
        timeout_s: float,
    ) -> None:
        """Start all messages, and return when all of them have ended; see `Transport`."""
        deadline_s = self._clock.now_s() + timeout_s
        messages = [(dist.irecv, peer, array) for peer, array in receives]
        messages += [(dist.isend, peer, array) for peer, array in sends]
        waits = [
            f"rank {peer} did not {'send' if call is dist.irecv else 'receive'}"
            for call, peer, _ in messages
        ]
        try:
            works = dist.batch_isend_irecv([self._operation(*message) for message in messages])
        except RuntimeError as problem:
            raise lost_rank(problem, self.rank, "cannot start to communicate") from problem
        if len(works) < len(waits):  # a backend that makes one work of the batch
            waits = [", ".join(waits)]
        for work, wait in zip(works, waits, strict=True):
            remaining_s = max(deadline_s - self._clock.now_s(), 0.001)
            try:
                work.wait(timedelta(seconds=remaining_s))
            except RuntimeError as problem:
                # A late message may still be written to its array: never free that memory.
                self._abandoned += [works, messages]
                raise lost_rank(problem, self.rank, f"{wait} within {timeout_s:.3g} s") from problem

    def _operation(self, call: Any, peer: int, array: Any) -> dist.P2POp:
        tensor = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
        return dist.P2POp(call, tensor, group=self._group, tag=self._tag, group_peer=peer)


def lost_rank(problem: RuntimeError, rank: int, what: str) -> RankLost:
    """Return torch's error as ours: gloo and NCCL name a timeout in words only.

    Args:
        problem: what torch raised.
        rank: that it was raised on.
        what: what failed; names the ranks that `rank` waited for.
    """
    text = first_line(problem)
    late = "timed out" in text.lower() or "timeout" in text.lower()
    return (DeadlineExceeded if late else RankLost)(
        what,
        where=f"rank {rank}",
        why=text,
        fix="See what that rank does, or allow more time"
        if late
        else "See why that rank ended, in its own output",
    )
