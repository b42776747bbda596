"""A bounded cache of shards that knows the future, and the order in which to fill it. Pure.

The order of samples is a function of the seed, so the uses of each shard are known in advance.
Evicted is the shard whose next use is farthest away, which no other policy can beat; a shard whose
next use is farther away than that of all that is cached is not taken at all.

Source: L. Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems
Journal 5 (1966).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

NEVER = 1 << 62


class Future:
    """When each shard is used: positions in the order of samples.

    Args:
        shards: of the samples in the order in which they will be read, shape (n,).
    """

    def __init__(self, shards: NDArray[np.integer]) -> None:
        self._shards = np.asarray(shards)
        order = np.argsort(self._shards, kind="stable")
        found, begins = np.unique(self._shards[order], return_index=True)
        ends = [*begins[1:], len(order)]
        places = zip(found.tolist(), begins, ends, strict=False)  # of nothing: one end too many
        self._uses = {shard: order[begin:end] for shard, begin, end in places}

    def __len__(self) -> int:
        return len(self._shards)

    def next_use(self, shard: int, position: int) -> int:
        """Return the first position from `position` on that reads a shard; `NEVER`: none does."""
        uses = self._uses.get(shard)
        if uses is None:
            return NEVER
        at = bisect_left(uses, position)
        return int(uses[at]) if at < len(uses) else NEVER

    def count(self, shard: int, begin: int, end: int) -> int:
        """Return how many of the samples at positions [begin, end) are read from a shard."""
        uses = self._uses.get(shard)
        return 0 if uses is None else bisect_left(uses, end) - bisect_left(uses, begin)

    def upcoming(self, position: int, count: int) -> Iterator[int]:
        """Yield the shards of the next `count` samples, each once, by their first use."""
        window = self._shards[position : position + count]
        found, first = np.unique(window, return_index=True)
        yield from found[np.argsort(first)].tolist()


@dataclass(kw_only=True)
class ShardCache:
    """Which shards are cached.

    Args:
        capacity_bytes: of all cached shards together; never exceeded.
        shard_bytes: length of each shard.
        future: when each is used.
    """

    capacity_bytes: int
    shard_bytes: Sequence[int]
    future: Future
    cached: set[int] = field(default_factory=set)

    @property
    def used_bytes(self) -> int:
        """Bytes of the cached shards."""
        return sum(self.shard_bytes[shard] for shard in self.cached)

    def admit(self, shard: int, position: int) -> list[int] | None:
        """Return the shards to evict so that `shard` is cached; None: better to leave it out.

        Args:
            shard: was read from elsewhere, or is about to be.
            position: in the order of samples from which on uses count.
        """
        if shard in self.cached:
            return []
        size, use = self.shard_bytes[shard], self.future.next_use(shard, position)
        if size > self.capacity_bytes or use == NEVER:
            return None
        by_use = sorted(self.cached, key=lambda held: (-self.future.next_use(held, position), held))
        free, evicted = self.capacity_bytes - self.used_bytes, []
        for held in by_use:
            if free >= size:
                break
            if self.future.next_use(held, position) <= use:
                return None
            free += self.shard_bytes[held]
            evicted.append(held)
        self.cached.difference_update(evicted)
        self.cached.add(shard)
        return evicted

    def prefetch(
        self,
        position: int,
        ahead: int,
        *,
        first: int | None = None,
        worth: Callable[[int], bool] = lambda _: True,
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield what to fetch for `ahead` samples, in the order of first use.

        Each with what to evict for it. Ends at the first shard that does not fit any more: what
        comes behind is used later.

        Args:
            position: from which on uses count: what was read before is not needed any more.
            ahead: samples to fetch for.
            first: position of the first of these; by default `position`.
            worth: shards for which it returns False are left out.
        """
        for shard in self.future.upcoming(position if first is None else first, ahead):
            if shard in self.cached or not worth(shard):
                continue
            evicted = self.admit(shard, position)
            if evicted is None:
                return
            yield shard, evicted
