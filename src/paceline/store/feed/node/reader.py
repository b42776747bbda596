"""The process that reads for all ranks of a node.

Started as ``python -m paceline.store.feed.node.reader DESCRIPTOR NUMBER``.

What it reads is a pure function of what the ring's config says and of the pass that the ranks ask
for. So it keeps no state of its own: a reader that takes over from a dead one looks at the ring,
and goes on behind what was published.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.affinity import SERVER_CORES_VARIABLE, bind_threads, parse_core_list
from paceline.core.config import environment
from paceline.core.errors import PacelineError
from paceline.native import SortedReader
from paceline.store.feed.node.ring import (
    PAGE_BYTES,
    SLOTS,
    RankWord,
    Ring,
    Word,
    index_bytes,
)
from paceline.store.feed.node.tuning import HillClimb, ReadTuner
from paceline.store.feed.node.turns import Turns
from paceline.store.feed.order import SampleOrder
from paceline.store.feed.sampler import RankBatches
from paceline.store.read.pack import Pack, read_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from paceline.native import SortedPlan

_MOST_DEPTH = 8  # reads that are under way at a time: a disk needs several
_WINDOW_PARTS = 4  # the smallest window is so many times smaller than the largest
_LOOK_S = 0.5  # how often it looks whether the ranks are alive
_NO_SAMPLES = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSettings:
    """How a reader reads. Changes speed.

    Attributes:
        read_bytes: of one read at most: what parallel file systems and disks are fast with.
        gap_bytes: between samples, read rather than left out: storage is read in pages anyway.
        most_steps: of one window.
        most_depth: reads at a time; None: 8 past the page cache, where threads that read sleep, and
            as many as there are cores for this process where they copy out of it.
    """

    read_bytes: int = 4 << 20
    gap_bytes: int = 4096
    most_steps: int = 4096
    most_depth: int | None = None


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over the data that all ranks of the node ask for."""

    number: int
    epoch: int
    position: int


class RingReader:
    """Fills the ring of a node, until all of its ranks have left.

    It runs on the cores of all ranks of the node, and computes with as many threads as one of them
    has cores: what it takes from each rank is the same, and no more than the job may use.

    Attributes:
        pack: what it reads.
        sorted: how it plans and reads a window.
    """

    def __init__(self, ring: Ring, settings: ReadSettings | None = None) -> None:
        self._ring = ring
        self._words = ring.words
        self._gone: set[int] = set()  # ranks that died without a word
        config = ring.config
        options = read_options(verify=config.verify)
        side_file = Path(config.side_file) if config.side_file else None
        self.pack = Pack(config.pack, options, side_file, config.identity)
        self._settings = settings or ReadSettings()
        cores = len(os.sched_getaffinity(0))  # of the rank that started this process
        depth = self._settings.most_depth or (_MOST_DEPTH if config.direct else cores)
        self.sorted = SortedReader(
            self.pack.native_reader,
            gap_bytes=self._settings.gap_bytes,
            read_bytes=self._settings.read_bytes,
            threads=depth,
            cores=cores,
            direct=config.direct,
        )
        self._tuner = ReadTuner(HillClimb(depth), HillClimb(_WINDOW_PARTS))
        if config.turns:
            # Turns are for long reads, one after another. If nodes and reads both began with many
            # at a time, neither alone could be found to be better as one at a time.
            self._tuner.depth.start_at(1)
        self._go_on_as_before()
        self._turns = Turns(config.turns) if config.turns else None

    def _go_on_as_before(self) -> None:
        """Begin with what the reader before this one had found."""
        depth, window_bytes = self._words.load(Word.DEPTH), self._words.load(Word.WINDOW_BYTES)
        if depth:
            self._tuner.depth.start_at(depth)
            largest = self._ring.config.window_bytes
            self._tuner.windows.start_at(max(1, window_bytes * _WINDOW_PARTS // max(1, largest)))

    def _spread(self) -> None:
        """Run on the cores of all ranks, rather than on those of the rank that started this.

        Where the run has a budget, it says which these are.
        """
        if budgeted := environment().get(SERVER_CORES_VARIABLE):
            bind_threads(parse_core_list(budgeted))
            return
        with contextlib.suppress(OSError):  # a rank has ended, or may not be asked
            ranks = range(self._ring.ranks)
            cores = [
                os.sched_getaffinity(self._ring.rank(rank, RankWord.PROCESS)) for rank in ranks
            ]
            os.sched_setaffinity(0, set().union(*cores))

    def serve(self) -> None:
        """Read pass after pass."""
        while (wanted := self._await_pass()) is not None:
            self._spread()
            if wanted.number != self._words.load(Word.SERVED):
                self._words.store(Word.PASS_FIRST, self._words.load(Word.PUBLISHED))
                self._words.store(Word.SERVED, wanted.number)
                self._words.notify(Word.READER_CHANGED)
            self._read_pass(wanted)

    def _here(self) -> list[int]:
        """Return the local ranks that have come and not left."""
        return [
            rank
            for rank in range(self._ring.ranks)
            if self._ring.rank(rank, RankWord.RANK)
            and not self._ring.rank(rank, RankWord.LEFT)
            and rank not in self._gone
        ]

    def _look(self, seen: int) -> None:
        """Sleep until a rank changes something, or for a while; then look who is alive."""
        self._words.wait(Word.RANKS_CHANGED, seen, _LOOK_S)
        if self._words.load(Word.RANKS_CHANGED) == seen:
            self._gone |= {rank for rank in self._here() if not self._ring.is_locked(1 + rank)}

    def _await_pass(self) -> Pass | None:
        """Return the pass that all ranks ask for, once it is not over; None: all have left."""
        while True:
            seen = self._words.load(Word.RANKS_CHANGED)
            here = self._here()
            if not here:
                return None
            served = self._words.load(Word.SERVED)
            refused = self._words.load(Word.REFUSED)
            asked = {self._asked(rank) for rank in here}
            numbers = {wanted.number for wanted in asked}
            is_asked = self._all_came() and len(numbers) == 1 and max(numbers) > refused
            if is_asked and len(asked) > 1:
                self._words.store(Word.REFUSED, max(numbers))
                self._words.notify(Word.READER_CHANGED)
            elif is_asked:
                (wanted,) = asked
                if wanted.number > served or not self._is_whole(wanted):
                    return wanted
            self._look(seen)

    def _all_came(self) -> bool:
        return all(self._ring.rank(rank, RankWord.RANK) for rank in range(self._ring.ranks))

    def _asked(self, rank: int) -> Pass:
        while True:  # at most twice: a rank sets PASS to 0 before it changes the others
            number = self._ring.rank(rank, RankWord.PASS)
            epoch = self._ring.rank(rank, RankWord.EPOCH)
            position = self._ring.rank(rank, RankWord.POSITION)
            if number == self._ring.rank(rank, RankWord.PASS):
                return Pass(number, epoch, position)

    def _is_over(self, wanted: Pass) -> bool:
        """Return whether no rank is in this pass any more."""
        return all(self._ring.rank(rank, RankWord.PASS) != wanted.number for rank in self._here())

    def _is_whole(self, wanted: Pass) -> bool:
        """Return whether all of a pass was published."""
        batches = self._batches()
        return self._first_step() >= max(share.count(wanted.position) for share in batches)

    def _batches(self) -> list[RankBatches]:
        config = self._ring.config
        return [
            RankBatches(
                sample_count=len(self.pack),
                global_batch_size=config.global_batch_size,
                rank=self._ring.rank(rank, RankWord.RANK) - 1,
                world_size=config.world_size,
                last=config.last,  # type: ignore[arg-type]  # as a rank's own RankBatches had it
            )
            for rank in range(self._ring.ranks)
        ]

    def _first_step(self) -> int:
        """Return the first step of the served pass that is not published."""
        published = self._words.load(Word.PUBLISHED)
        if published == self._words.load(Word.PASS_FIRST):
            return 0
        return self._ring.window(published - 1).end_step

    def _read_pass(self, wanted: Pass) -> None:
        order = SampleOrder(
            sample_count=len(self.pack), epoch=wanted.epoch, **self._ring.config.order
        )
        step = self._first_step()
        waiting: deque[list[NDArray[np.int64]]] = deque()
        steps = self._steps(order, wanted.position, step)
        most = 1  # steps of the next window: the first batch must not wait for a whole window
        while True:
            while len(waiting) < most and (one := next(steps, None)) is not None:
                waiting.append(one)
            if not waiting:
                return
            taken = self._window_steps(waiting, most)
            numbers = [waiting.popleft() for _ in range(taken)]
            if not self._publish(wanted, step, numbers):
                return
            step += taken
            most = (
                min(2 * taken, self._settings.most_steps)
                if taken == most
                else min(taken + 1, self._settings.most_steps)
            )

    def _window_steps(self, waiting: deque[list[NDArray[np.int64]]], most: int) -> int:
        """Return how many of the waiting steps make one window."""
        total, taken, window_bytes = 0, 0, self._window_bytes()
        for step in waiting:
            numbers = np.concatenate(step)
            try:
                total += int(self.pack.lengths_of(numbers).sum())
            except PacelineError:  # the index is damaged there: a window of its own (`_publish`)
                return max(1, taken)
            if taken and total > window_bytes:
                break
            taken += 1
            if taken == most:
                break
        return taken

    def _window_bytes(self) -> int:
        windows = self._tuner.windows
        return self._ring.config.window_bytes * windows.value // windows.most

    def _steps(
        self, order: SampleOrder, position: int, first: int
    ) -> Iterator[list[NDArray[np.int64]]]:
        """Yield for each step the samples of each local rank, from step `first` of the pass on."""
        batches = self._batches()
        at_once = batches[0].at_once(len(batches))
        position = batches[0].after(position, first) if first else position
        while position < order.sample_count:
            planned = [own.positions(position, at_once) for own in batches]
            count = max(map(len, planned))
            if not count:
                return
            for step in range(count):
                # Under `join` a rank may have fewer batches than another.
                places = [
                    positions[step] if step < len(positions) else _NO_SAMPLES
                    for positions in planned
                ]
                numbers = order.samples(np.concatenate(places))
                ends = np.cumsum([len(place) for place in places])[:-1]
                yield np.split(numbers, ends)
            position = batches[0].after(position, count)

    def _publish(self, wanted: Pass, step: int, numbers: list[list[NDArray[np.int64]]]) -> bool:
        """Read a window and publish it; False: the pass is over, or nobody is left."""
        ring = self._ring
        by_part = [part for parts in numbers for part in parts]
        ids = np.concatenate(by_part)
        head = index_bytes(len(numbers), ring.ranks, len(ids))
        try:
            plan = self.sorted.plan(ids)
        except (PacelineError, MemoryError):
            plan = None  # the index is damaged: ranks read this window, and say of which sample
        # Whole pages, so that the next window begins with one: reads past the page cache need it.
        size = head + -(-plan.target_bytes // PAGE_BYTES) * PAGE_BYTES if plan is not None else 0
        # A quarter fits beside any window that ranks still hold, wherever in the ring that is.
        if size > ring.data_bytes // 4 and len(numbers) > 1:
            half = len(numbers) // 2
            return self._publish(wanted, step, numbers[:half]) and self._publish(
                wanted, step + half, numbers[half:]
            )
        if size > ring.data_bytes:
            size = 0
        begin = self._await_room(wanted, size)
        if begin is None:
            return False
        if plan is not None and size:
            try:
                self._fill(begin, head, plan, by_part)
            except PacelineError:
                size = 0  # the index was changed: ranks say how
        number = self._words.load(Word.PUBLISHED)
        fields = (step, len(numbers), begin, size)
        for word, value in enumerate(fields):
            self._words.store(ring.slot_word(number, word), value)
        self._words.store(Word.PUBLISHED, number + 1)
        self._words.notify(Word.READER_CHANGED)
        return True

    def _fill(
        self, begin: int, head: int, plan: SortedPlan, by_part: list[NDArray[np.int64]]
    ) -> None:
        ring = self._ring
        body = begin + head
        turn = self._turns.turn(plan.storage_bytes) if self._turns else contextlib.nullcontext()
        with turn:
            began_s = time.perf_counter()
            target = ring.data[body : body + plan.target_bytes]
            self.sorted.read(plan, target, self._tuner.depth.value)
            took_s = time.perf_counter() - began_s
        index = ring.data[begin:body].view(np.int64)
        parts = len(by_part)
        index[0] = 0
        np.cumsum([len(part) for part in by_part], out=index[1 : parts + 1])
        table = index[parts + 1 :][: 2 * len(plan.begins)].reshape(2, -1)
        table[0] = plan.begins
        table[0] += body
        table[1] = plan.lengths
        self._words.add(Word.BYTES_READ, plan.storage_bytes)
        self._words.add(Word.READS, plan.reads)
        self._words.add(Word.RANGES, plan.range_count)
        self._tune(plan.storage_bytes, took_s)

    def _tune(self, read_bytes: int, took_s: float) -> None:
        if self._turns is not None:
            self._words.store(Word.MISSED_TURNS, self._turns.missed)
        if 2 * read_bytes < self._window_bytes():
            return  # the first windows of a pass, and the last one, say little
        self._tuner.record(read_bytes, took_s)
        largest, windows = self._ring.config.window_bytes, self._tuner.windows
        self._words.store(Word.DEPTH, self._tuner.depth.best)
        self._words.store(Word.WINDOW_BYTES, largest * windows.best // windows.most)

    def _await_room(self, wanted: Pass, size: int) -> int | None:
        """Return where in the data there is room; None: the pass is over, or nobody is left."""
        words = self._words
        try:
            while True:
                seen = words.load(Word.RANKS_CHANGED)
                here = self._here()
                if not here or self._is_over(wanted):
                    return None
                begin = self._room(here, size)
                if begin is not None:
                    return begin
                if not words.load(Word.WAITS_FOR_ROOM):
                    words.store(Word.WAITS_FOR_ROOM, 1)
                    words.notify(Word.READER_CHANGED)
                self._look(seen)
        finally:
            words.store(Word.WAITS_FOR_ROOM, 0)

    def _room(self, here: list[int], size: int) -> int | None:
        published = self._words.load(Word.PUBLISHED)
        needed = [self._ring.still_needed(rank) for rank in here]
        oldest = min((number for number in needed if number is not None), default=published)
        if published - oldest >= SLOTS:
            return None
        live = [self._ring.window(number) for number in range(min(oldest, published), published)]
        live = [window for window in live if window.size_bytes]
        if not live:
            return 0
        first, end = live[0].begin, live[-1].begin + live[-1].size_bytes
        if live[-1].begin >= first:  # in one piece: behind it, or before it
            if self._ring.data_bytes - end >= size:
                return end
            return 0 if first >= size else None
        return end if first - end >= size else None


def main(descriptor: int, number: int) -> int:
    """Serve the ring at a descriptor, as its reader of that number. Returns the exit code."""
    # A user's Ctrl-C is for the ranks: they leave, and then this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ring = Ring(descriptor)
    if not ring.lock(0):
        return 0  # there is one
    ring.words.store(Word.READY, number)
    try:
        reader = RingReader(ring)
    except PacelineError as problem:
        logging.getLogger(__name__).warning("the node's reader cannot read: %s", problem)
        ring.words.store(Word.HOPELESS, 1)
        ring.words.notify(Word.READER_CHANGED)
        return 1
    reader.serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
