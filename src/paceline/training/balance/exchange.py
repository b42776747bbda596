"""The exchange of windows between ranks: a small all-gather in the background, every few steps.

It has a gloo connection of its own, below torch's process groups: nothing that the script
communicates waits for it or is numbered by it, and it is in no trace. A rank starts it and comes
for the result at its next batch: by then all ranks have reduced their gradients, and so have
started theirs, and nobody waits.
"""

from __future__ import annotations

import datetime
import itertools
import math
import socket
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from paceline.core.errors import DeadlineExceeded

if TYPE_CHECKING:
    from collections.abc import Sequence

_TIMEOUT_S = 60.0
_NUMBERS = itertools.count()  # a name in a store serves once


class WindowExchange(Protocol):
    """Gathers equally many numbers of all ranks."""

    def start(self, values: Sequence[float]) -> None:
        """Give this rank's numbers."""

    def finish(self) -> list[list[float]]:
        """Return the numbers of all ranks, by rank."""

    def host(self, rank: int) -> str:
        """Return the name of a rank's node."""


class GlooExchange:
    """An all-gather of gloo, one at a time; all ranks make it together.

    Raises:
        RuntimeError: the ranks cannot connect.
    """

    def __init__(self) -> None:
        self._ranks = dist.get_world_size()
        world = dist.group.WORLD
        assert world is not None
        store = dist.PrefixStore(f"paceline-balance-{next(_NUMBERS)}", world.get_group_store())
        self._timeout = datetime.timedelta(seconds=_TIMEOUT_S)
        store.set(f"host-{dist.get_rank()}", socket.gethostname())
        self._store = store
        self._hosts: dict[int, str] = {}
        self._gloo = dist.ProcessGroupGloo(store, dist.get_rank(), self._ranks, self._timeout)
        self._work: dist.Work | None = None
        self._gathered: list[torch.Tensor] = []

    def start(self, values: Sequence[float]) -> None:
        """Start to gather."""
        assert self._work is None
        own = torch.tensor(values, dtype=torch.float64)
        self._gathered = [torch.empty_like(own) for _ in range(self._ranks)]
        self._work = self._gloo.allgather([self._gathered], [own])

    def finish(self) -> list[list[float]]:
        """Return what was gathered.

        Raises:
            DeadlineExceeded: a rank did not take part.
        """
        assert self._work is not None
        work, self._work = self._work, None
        try:
            work.wait(self._timeout)
        except RuntimeError as problem:
            raise DeadlineExceeded(
                "a rank did not exchange its times",
                where="rebalancing",
                why=str(problem),
                fix="Let all ranks iterate over equally many batches, or leave --rebalance out",
            ) from problem
        rows = [row.tolist() for row in self._gathered]
        assert all(math.isfinite(value) for row in rows for value in row)
        return rows

    def host(self, rank: int) -> str:
        """Return the name of a rank's node, or ``unknown`` without the script's store."""
        if rank not in self._hosts:
            try:
                self._hosts[rank] = self._store.get(f"host-{rank}").decode()
            except (
                RuntimeError
            ):  # the script has destroyed its process group, and the store with it
                return "unknown"
        return self._hosts[rank]
