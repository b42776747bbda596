"""Which batches a loader's workers make next, and which ones storage fetches at the same time."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.store.feed.node.client import NodePass

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.store.feed.options import LoaderOptions
    from paceline.store.feed.order import SampleOrder
    from paceline.store.feed.sampler import RankBatches
    from paceline.store.read.pack import Pack

_FETCHED_PER_MADE = 4  # batches that are requested from storage, for each that is made ahead


@dataclass(frozen=True, slots=True)
class BatchTask:
    """A batch to make.

    Attributes:
        numbers: sample numbers.
        size_bytes: their bytes in the pack.
        epoch: that they belong to.
        step: of the pass over the loader, from 0.
        node: what the node's reader reads for that pass; None: there is none.
    """

    numbers: NDArray[np.int64]
    size_bytes: int
    epoch: int = 0
    step: int = 0
    node: NodePass | None = None


def plan_tasks(
    order: SampleOrder,
    batches: RankBatches,
    position: int,
    pack: Pack,
    node: NodePass | None = None,
) -> Iterator[BatchTask]:
    """Yield a rank's batches from a position to the epoch's end.

    Args:
        order: order of the epoch.
        batches: this rank's share.
        position: position at which the first global batch begins.
        pack: the pack, for the bytes of its samples.
        node: what the node's reader reads for this pass.
    """
    step = 0
    while planned := batches.positions(position, batches.at_once()):
        numbers = order.samples(np.concatenate(planned))
        sizes = pack.lengths_of(numbers)
        begin = 0
        for positions in planned:
            batch = slice(begin, begin + len(positions))
            yield BatchTask(numbers[batch], int(sizes[batch].sum()), order.epoch, step, node)
            step += 1
            begin += len(positions)
        position = batches.after(position, len(planned))


def divide_tasks(
    tasks: Iterator[BatchTask],
    part_of_batch: Callable[[], tuple[int, int] | None],
    order: SampleOrder,
    batches: RankBatches,
    position: int,
    pack: Pack,
) -> Iterator[BatchTask]:
    """Yield `tasks`, with other parts of their global batches.

    Args:
        tasks: of a pass, from its first step on.
        part_of_batch: called for each task; returns the first and the end of this rank's samples in
            the global batch, which is full, or None if the task stays as it is.
        order: order of the epoch.
        batches: this rank's equal share.
        position: position at which the first global batch begins.
        pack: the pack, for the bytes of its samples.
    """
    for task in tasks:
        part = part_of_batch()
        if part is None:
            yield task
            continue
        begin = batches.after(position, task.step)
        numbers = order.samples(np.arange(begin + part[0], begin + part[1], dtype=np.int64))
        size_bytes = int(pack.lengths_of(numbers).sum())
        yield dataclasses.replace(task, numbers=numbers, size_bytes=size_bytes)


def coming_samples(
    order: SampleOrder, batches: RankBatches, position: int
) -> Iterator[NDArray[np.int64]]:
    """Yield the samples that a rank reads from a position on, in chunks, this epoch and the next.

    Args:
        order: order of the epoch.
        batches: this rank's share.
        position: position at which the first global batch begins.
    """
    for epoch in (order.epoch, order.epoch + 1):
        of_epoch = dataclasses.replace(order, epoch=epoch)
        while planned := batches.positions(position, batches.at_once()):
            yield of_epoch.samples(np.concatenate(planned))
            position = batches.after(position, len(planned))
        position = 0


def fetch_ahead(
    tasks: Iterator[BatchTask], pack: Pack, options: LoaderOptions
) -> Iterator[BatchTask]:
    """Yield `tasks`, each after the tasks that follow it were requested from storage.

    A disk needs more requests at a time than it is good to make batches ahead: batches that are
    made and not yet used evict each other from the processor's caches.
    """
    most = _FETCHED_PER_MADE * options.batches_ahead
    ahead, ahead_bytes = deque[BatchTask](), 0
    for task in tasks:
        pack.prefetch(task.numbers)
        ahead.append(task)
        ahead_bytes += task.size_bytes
        while ahead and (len(ahead) > most or ahead_bytes > options.bytes_ahead):
            ahead_bytes -= ahead[0].size_bytes
            yield ahead.popleft()
    yield from ahead
