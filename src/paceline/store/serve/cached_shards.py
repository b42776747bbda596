"""Shards of other nodes, kept in a bounded folder for as long as the order of samples needs them.

A thread of its own copies them ahead of the reads, from nodes or from the source, in the order of
their first use, and evicts by the known future (cache.py). Reads take what is complete and go on
elsewhere with the rest: nothing waits for the cache, and a disk that is full only ends the copying.

Whether a whole shard is worth its way: with a global shuffle, a batch needs a few samples from each
of many shards, and copying these whole would send many times the bytes. So a shard is copied when
at least half of its samples are read within the known future if there is room, and within the reach
of the cache if another one has to go for it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import CorruptPack, PacelineError
from paceline.store.serve.cache import Future, ShardCache
from paceline.store.serve.links import MISSING
from paceline.store.serve.local_shards import LocalShards

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.native import ExtentPlan
    from paceline.store.read.pack import Pack

_LOG = logging.getLogger(__name__)
_WORTH = 0.5  # of a shard's samples
_ON_THEIR_WAY = 64  # batches, at most, between the one that is announced and the one that is read
_MOST_KNOWN = 1 << 22  # positions of the order that are looked ahead: 32 MiB


class CachedShards:
    """The cache of one process. `fetch` may be called from many threads, and in forked children.

    Args:
        folder: of its own.
        capacity_bytes: of all shards in it.
        pack: with the index.
        pieces_of: yields the bytes of a shard, wherever they come from; raises PacelineError.
        is_near: whether a shard's file is mapped anyway, and need not be copied.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        pack: Pack,
        pieces_of: Callable[[int], Iterator[bytes]],
        is_near: Callable[[int], bool],
    ) -> None:
        self._shards = LocalShards(folder, pack)
        self._shards.open()
        self._pack = pack
        self._pieces_of = pieces_of
        self._is_near = is_near
        self.capacity_bytes = capacity_bytes
        counts = np.bincount(pack.shards, minlength=pack.shard_count)
        self._sample_counts: NDArray[np.int64] = counts.astype(np.int64)
        self._mean_bytes = max(1.0, sum(self._shards.lengths) / max(1, len(pack)))
        self._process = os.getpid()
        self._condition = threading.Condition()  # of what follows
        self._cache = ShardCache(
            capacity_bytes=capacity_bytes,
            shard_bytes=self._shards.lengths,
            future=Future(np.empty(0, np.int64)),
        )
        # Of the order: samples that were read, and those that are on their way besides.
        self._read = self._announced = 0
        self._announcements: deque[int] = deque(maxlen=_ON_THEIR_WAY)
        self._is_closed = self._is_idle = False
        self._is_full = False
        self._failed: set[int] = set()
        self._filler: threading.Thread | None = None
        self.copied_bytes = 0
        for shard in self._shards.present():
            if self._cache.used_bytes + self._shards.lengths[shard] <= capacity_bytes:
                self._cache.cached.add(shard)
            else:
                self._shards.remove(shard)

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self._shards.folder

    @property
    def shards(self) -> frozenset[int]:
        """The shards that are cached, or are being copied."""
        with self._condition:
            return frozenset(self._cache.cached)

    def expect(self, order: Iterator[NDArray[np.int64]]) -> None:
        """Take the samples that are read from now on, in this order; begin to copy their shards."""
        known, count = [], 0
        for samples in order:
            known.append(self._pack.shards[samples].astype(np.int64))
            count += len(samples)
            if count >= _MOST_KNOWN:
                break
        future = Future(np.concatenate(known) if known else np.empty(0, np.int64))
        with self._condition:
            self._cache.future = future
            self._read = self._announced = 0
            self._announcements.clear()
            self._failed.clear()
            if self._filler is None:
                self._filler = threading.Thread(
                    target=self._fill, name="paceline-cache", daemon=True
                )
                self._filler.start()
            self._look_again()

    def announce(self, count: int) -> None:
        """Take note that the next `count` samples of the order are about to be read.

        From there on shards are copied: what is read before does not come in time. Where reads are
        not seen, in forked workers, what was announced long ago counts as read.
        """
        with self._condition:
            if len(self._announcements) == _ON_THEIR_WAY:
                self._read = max(self._read, self._announced - sum(self._announcements))
            self._announced += count
            self._announcements.append(count)
            self._look_again()

    def note_read(self, count: int) -> None:
        """Take note that so many samples of the order were read."""
        if self._process != os.getpid():
            return
        with self._condition:
            self._read = min(self._read + count, self._announced)
            self._look_again()

    def fetch(
        self, plan: ExtentPlan, items: NDArray[np.int64], out: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Bring the extents whose shards are cached to their places in `out`.

        Returns:
            What became of each of `items`, in their order; `MISSING`: it is not here.
        """
        outcomes = np.full(len(items), MISSING, np.uint8)
        shards, offsets, lengths = plan.shards[items], plan.shard_offsets, plan.stored_lengths
        wanted = set(np.unique(shards).tolist())
        # A forked child knows only the folder: its lock may be one that was taken at the fork.
        here = wanted & self.shards if self._process == os.getpid() else wanted
        for shard in here:
            try:
                file = os.open(self._shards.path(shard), os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # still being copied, or evicted
                continue
            try:
                for at in np.flatnonzero(shards == shard).tolist():
                    item = int(items[at])
                    stored = os.pread(file, int(lengths[item]), int(offsets[item]))
                    outcomes[at] = plan.deliver(item, stored, out)
            except OSError as problem:
                _LOG.warning("shard %d cannot be read from the cache: %s", shard, problem)
            finally:
                os.close(file)
        return outcomes

    def wait_until_filled(self, timeout_s: float) -> bool:
        """Return whether there is nothing left to copy for now, waiting for it this long."""
        with self._condition:
            return self._condition.wait_for(lambda: self._is_idle, timeout_s)

    def close(self) -> None:
        """End the copying. The shards stay, for the next process that opens the folder."""
        if self._process != os.getpid():
            return
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        if self._filler is not None:
            self._filler.join()
        self._shards.close()

    def _look_again(self) -> None:
        """Have the filler see what changed; until it has, nobody knows that nothing is left."""
        self._is_idle = False
        self._condition.notify_all()

    def _fill(self) -> None:
        while (step := self._wait_for_step()) is not None:
            self._take(*step)

    def _wait_for_step(self) -> tuple[int, list[int]] | None:
        with self._condition:
            while not self._is_closed:
                step = self._next_step()
                self._is_idle = step is None
                if step is not None:
                    return step
                self._condition.notify_all()
                self._condition.wait()
            return None

    def _next_step(self) -> tuple[int, list[int]] | None:
        """Return the next shard to copy, and those to evict for it."""
        if self._is_full:
            return None
        reach = max(1, int(self.capacity_bytes / self._mean_bytes))
        steps = self._cache.prefetch(self._read, reach, first=self._announced, worth=self._is_worth)
        return next(steps, None)

    def _is_worth(self, shard: int) -> bool:
        if shard in self._failed or self._is_near(shard):
            return False
        cache, begin = self._cache, self._announced
        has_room = cache.used_bytes + self._shards.lengths[shard] <= cache.capacity_bytes
        reach = int(self.capacity_bytes / self._mean_bytes)
        end = len(cache.future) if has_room else begin + reach
        return cache.future.count(shard, begin, end) >= _WORTH * float(self._sample_counts[shard])

    def _take(self, shard: int, evicted: list[int]) -> None:
        for other in evicted:
            self._shards.remove(other)
        try:
            self._shards.write(shard, self._counted(shard), f"shard {shard}")
        except (PacelineError, OSError) as problem:
            with self._condition:
                self._cache.cached.discard(shard)
                self._failed.add(shard)
                # A shard that no node has may come; a disk that is full stays full.
                self._is_full = isinstance(problem, OSError) and not isinstance(
                    problem, ConnectionError | CorruptPack
                )
            ends = "; nothing more is cached" if self._is_full else ""
            _LOG.warning("shard %d is not cached: %s%s", shard, problem, ends)

    def _counted(self, shard: int) -> Iterator[bytes]:
        for piece in self._pieces_of(shard):
            if self._is_closed:
                raise PacelineError("the cache was closed", fix="Read before the pack is closed")
            self.copied_bytes += len(piece)
            yield piece
