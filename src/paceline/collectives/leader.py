"""Collectives of a group on hosts with different numbers of ranks: leaders exchange between hosts.

All-reduce of n bytes on H hosts::

    host A   rank 0  rank 1        host B   rank 2
    1        reduce to rank 0      shared memory: the host's first rank, its leader, has its sum
    2        rank 0 <----------------> rank 2     all-reduce of n bytes between the leaders
    3        broadcast from rank 0 shared memory: each rank has all n bytes

A link carries 2 n (H-1)/H bytes each way, as with shards (`sharded`), but through one rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._C import _distributed_c10d as c10d

from paceline.collectives.tensors import size_bytes
from paceline.collectives.two_level import TwoLevelPath, gloo_reduction, later, timed

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_LEADER = 0


class LeaderPath(TwoLevelPath):
    """The collectives of a group on any hosts; arguments as `TwoLevelPath`."""

    def _speaker(self, index: int) -> int:
        del index  # a root that is no leader has its data pass through the leader
        return _LEADER

    def _all_reduce_chunk(self, chunk: torch.Tensor, op: Any, timeout_s: float) -> Iterator[Any]:
        self._reduce_inside(chunk, op, _LEADER, timeout_s)
        sent = work = None
        if self._place.local_rank == _LEADER:
            sent = self._for_wire(chunk, op)
            options = timed(c10d.AllreduceOptions(), timeout_s)
            options.reduceOp = gloo_reduction(op)
            work = self._cross.allreduce([sent], options)
        yield work
        if sent is not None:
            chunk.copy_(sent)
            self._average(chunk, op)
        self._group.broadcast(chunk.data_ptr(), size_bytes(chunk), _LEADER, later(timeout_s))
