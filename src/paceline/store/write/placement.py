"""How large shards get, and which one takes the next sample: a decision about lengths alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.store.format.layout import HEADER_BYTES, padding
from paceline.store.write.sources import BATCH_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLimits:
    """How large shards get.

    Attributes:
        shard_bytes: a shard is closed before it would grow beyond this.
        growth_shards: for sources of unknown size, the limit doubles after so many shards; 0 =
            never. So the number of shards grows with the logarithm of what comes.
        max_bytes: that growth ends at.
    """

    shard_bytes: int
    growth_shards: int = 0
    max_bytes: int = 16 << 30

    def limit(self, shard: int) -> int:
        """Return the limit of the `shard`-th shard, in bytes."""
        if not self.growth_shards:
            return self.shard_bytes
        doubled = self.shard_bytes << min(shard // self.growth_shards, 40)
        return max(min(doubled, self.max_bytes), self.shard_bytes)


class ShardPlacement:
    """Decides which shard takes each sample; knows lengths only, so it also plans a dry run.

    Args:
        limits: of the shards.
        first_shard: the number of the first.
        closed: lengths of the shards that are there already, from the first on.
    """

    def __init__(
        self, limits: ShardLimits, first_shard: int = 0, closed: Sequence[int] = ()
    ) -> None:
        self._limits = limits
        self._first = first_shard
        self.closed = list(closed)  # lengths of the shards that are closed
        self.length = 0  # of the open one; 0 = there is none

    @property
    def shard(self) -> int:
        """The number of the open shard, or of the next."""
        return self._first + len(self.closed)

    @property
    def limit(self) -> int:
        """Bytes that the open shard may have."""
        return self._limits.limit(self.shard)

    @property
    def large_bytes(self) -> int:
        """The length above which a sample comes alone and is read in chunks."""
        return min(BATCH_BYTES, self.limit - HEADER_BYTES)

    def is_chunked(self, length: int) -> bool:
        """Return whether a sample is larger than a shard of its own."""
        return length > self.limit - HEADER_BYTES

    def fits(self, lengths: NDArray[np.uint64], begins: NDArray[np.uint64]) -> int:
        """Return how many of the next samples the open shard takes.

        Args:
            lengths: stored bytes of each.
            begins: where each lies relative to the first, shape (n + 1,).
        """
        base = self.length or HEADER_BYTES
        room = self.limit - base
        over = np.flatnonzero(begins[:-1] + lengths > room) if room >= 0 else np.zeros(1, int)
        return int(over[0]) if len(over) else len(lengths)

    def plan(self, lengths: NDArray[np.uint64], begins: NDArray[np.uint64]) -> int:
        """Place samples without writing them; return how many extents they take."""
        if len(lengths) == 1 and self.is_chunked(int(lengths[0])):
            return self._plan_chunks(int(lengths[0]))
        first = 0
        while first < len(lengths):
            count = self.fits(lengths[first:], begins[first:] - begins[first])
            if count == 0:
                self.close()
                continue
            self.take(int(begins[first + count] - begins[first]))
            first += count
        return len(lengths)

    def take(self, byte_count: int) -> int:
        """Count bytes, padding included, that go to the open shard; return their offset."""
        if self.length == 0:
            self.length = HEADER_BYTES
        offset = self.length
        self.length += byte_count
        return offset

    def close(self) -> None:
        """Close the open shard, if there is one."""
        if self.length:
            self.closed.append(self.length)
            self.length = 0

    def _plan_chunks(self, length: int) -> int:
        self.close()
        extents = 0
        while length:
            if extents:
                self.close()
            size = min(length, self.limit - HEADER_BYTES)
            self.take(size + padding(size))
            length -= size
            extents += 1
        return extents
