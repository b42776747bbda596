"""Feeds PyTorch from a pack. Imports torch, as batches.py and dataset.py do.

`Loader` joins the sample order (order.py), this rank's share of it (sampler.py), reading in batches
without the GIL, and workers that decode and collate ahead of the loop (workers.py). Its state is
(epoch, position), where position counts the samples that were *delivered* to all ranks.
`PackDataset` works with torch's own `DataLoader`, with `PackSampler` or any other sampler.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
import torch.utils.data

from paceline.core.affinity import place_loader_workers
from paceline.core.config import environment
from paceline.core.errors import (
    DeadlineExceeded,
    PacelineError,
    ScriptFailed,
    UsageError,
)
from paceline.store.feed.batches import Batch, BatchMaker, RawSamples
from paceline.store.feed.capacity import check_shared_memory, pins_memory, worker_count
from paceline.store.feed.dataset import PackDataset
from paceline.store.feed.draws import seed_worker
from paceline.store.feed.node.join import join
from paceline.store.feed.options import NAMES_KEPT, LoaderOptions, LoaderStats, StageTimes
from paceline.store.feed.order import SampleOrder
from paceline.store.feed.paced_workers import is_paced, pace
from paceline.store.feed.pacing import Pacer
from paceline.store.feed.phases import PHASES
from paceline.store.feed.sampler import batches_of, load_state, save_state
from paceline.store.feed.tasks import (
    BatchTask,
    coming_samples,
    divide_tasks,
    fetch_ahead,
    plan_tasks,
)
from paceline.store.feed.workers import Bounds, OrderedThreads
from paceline.store.in_place.opening import open_pack
from paceline.store.read.pack import Pack

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    from paceline.store.feed.node.client import NodeClient

_LOG = logging.getLogger(__name__)

__all__ = ["Loader", "LoaderIterator", "PackDataset", "RawSamples"]

_MEASURED_SAMPLES = 1024


class Loader:
    """Batches of a pack for this rank, as ``(samples, labels)``, epoch after epoch.

    ::

        loader = Loader("train.pack", 256, transform=augment, options=LoaderOptions(seed=7))
        for epoch in range(loader.epoch, 90):
            for images, labels in loader:
                ...

    The state of a loader is (`epoch`, `position`), which moves when a batch is delivered. Iterating
    continues from there to the end of the epoch; then the state is the beginning of the next epoch.
    So a loop that was left early resumes where it was, as does one that loaded the state of another
    run, on any number of ranks.

    `samples` is what `collate` makes of the transformed samples; without decode, transform and
    collate it is a `RawSamples`: views of one buffer. Labels are an int64 tensor, -1 = no class.

    Args:
        pack: an open pack, or the path of one.
        global_batch_size: samples of a step over all ranks, a multiple of the world size. It stays
            the same when the number of ranks changes.
        transform: called with a sample's bytes as a memoryview, or the decoded image. On threads it
            must be thread-safe; for processes it must be picklable where they are not forked.
        collate: called with the list of transformed samples; by default torch's `default_collate`.
        rank: by default this process's (torch.distributed, then the environment's RANK).
        world_size: likewise.
        options: everything else.

    Attributes:
        stats: what was delivered so far (`LoaderStats`).
        part_of_batch: called for each batch of a pass, in order, maybe by a worker thread; returns
            the first and the end of this rank's samples within the global batch, or None for its
            equal part. None: all parts are equal, as they are where the node's reader reads.
            `paceline run --rebalance` sets it before a pass.

    Raises:
        UsageError: the ranks cannot share the batch; or as `open_pack`.
        Missing: `decode` without Pillow.
    """

    def __init__(
        self,
        pack: Pack | str | os.PathLike[str],
        global_batch_size: int,
        *,
        transform: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        options: LoaderOptions | None = None,
    ) -> None:
        self.pack = pack if isinstance(pack, Pack) else open_pack(pack)
        self.options = options or LoaderOptions()
        self.stats = LoaderStats()
        self.position = 0
        self.order = SampleOrder(
            sample_count=len(self.pack),
            seed=self.options.seed,
            shuffle=self.options.shuffle,
            block_samples=self.options.block_samples,
            window_blocks=self.options.window_blocks,
        )
        self.batches = batches_of(self.pack, global_batch_size, rank, world_size, self.options.last)
        self.maker = BatchMaker(
            self.pack,
            self.options,
            transform,
            collate,
            # A DataLoader pins what its processes send, by a thread of its own.
            pin=self.options.worker_kind == "thread" and pins_memory(self.options),
            ranks=self.batches.world_size,
        )
        self.part_of_batch: Callable[[], tuple[int, int] | None] | None = None
        self._node: NodeClient | None = None
        self._has_joined = False  # whether the node's ranks have agreed on a reader, or on none
        self._running: weakref.ref[LoaderIterator] | None = None
        self._processes: Any = None  # a DataLoader, kept with its workers from epoch to epoch

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of, from 0."""
        return self.order.epoch

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self.batches.count()

    def __iter__(self) -> LoaderIterator:
        self._halt()
        if not self._has_joined:  # not before all ranks iterate, so that no rank waits for others
            self._node = join(self.pack, self.order, self.batches, self.options)
            self._has_joined = True
        running = LoaderIterator(self)
        self._running = weakref.ref(running)
        return running

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set_epoch(self, epoch: int, position: int | None = None) -> None:
        """Go to `position` of an epoch; by default to its beginning, or stay in this epoch."""
        if position is None:
            position = self.position if epoch == self.epoch else 0
        if not 0 <= position <= len(self.pack) or epoch < 0:
            raise UsageError(
                f"position {position} is not in epoch {epoch}",
                fix=f"Give an epoch from 0 and a position from 0 to {len(self.pack)}",
            )
        if (epoch, position) != (self.epoch, self.position):
            self._halt()
            self._move(epoch, position)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data: batches that were made but not delivered do not count."""
        return save_state(self.order, self.pack, self.position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken, on this or another number of ranks.

        Raises:
            UsageError: it is the state of another pack or order.
        """
        order, position = load_state(state, self.order, self.pack)
        self._halt()
        self._move(order.epoch, position)

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        self._halt(join_s=self.options.timeout_s)
        workers = getattr(self._processes, "_iterator", None)
        if workers is not None:
            workers._shutdown_workers()  # noqa: SLF001  # else they end when nothing refers to them
        self._processes = None
        if self._node is not None:
            self._node.leave()
        self._node, self._has_joined = None, False

    def tasks(self) -> Iterator[BatchTask]:
        """Return the batches to make, from the current position to the end of the epoch."""
        if self._node is not None:
            self.part_of_batch = None
            node = self._node.begin(self.epoch, self.position)
            return plan_tasks(self.order, self.batches, self.position, self.pack, node)
        planned = plan_tasks(self.order, self.batches, self.position, self.pack)
        self.pack.expect(coming_samples(self.order, self.batches, self.position))
        tasks = fetch_ahead(planned, self.pack, self.options)
        if self.part_of_batch is None:
            return tasks
        # After what is fetched ahead, so that parts can change until a batch is made.
        return divide_tasks(
            tasks, self.part_of_batch, self.order, self.batches, self.position, self.pack
        )

    def _move(self, epoch: int, position: int) -> None:
        if 0 < position >= len(self.pack):
            epoch, position = epoch + 1, 0
        self.order = dataclasses.replace(self.order, epoch=epoch)
        self.position = position

    def _halt(self, join_s: float = 0.0) -> None:
        running = self._running() if self._running is not None else None
        if running is not None:
            running.close(join_s)
        self._running = None

    def start_threads(self) -> OrderedThreads[BatchTask, Batch]:
        """Return threads that make the rest of the epoch, each with one of torch's own threads."""
        options, count = self.options, worker_count(self.options)
        torch_threads, prepared = torch.get_num_threads(), threading.Semaphore(0)
        paced = is_paced(options.uses_pace)

        def prepare() -> None:
            torch.get_num_threads()  # the first call in a thread overwrites what was set before
            torch.set_num_threads(1)
            place_loader_workers(environment(), [threading.get_native_id()])
            prepared.release()

        threads = OrderedThreads(
            self.tasks(),
            self.maker.make,
            threads=count,
            bounds=Bounds(
                ahead=options.batches_ahead,
                bytes_ahead=options.bytes_ahead,
                timeout_s=options.timeout_s,
            ),
            name="paceline-loader",
            describe=self.maker.describe,
            prepare=prepare,
            pacer=Pacer(options.batches_ahead, options.bytes_ahead) if paced else None,
        )
        if paced:
            PHASES.add(threads)
        for _ in range(count):
            prepared.acquire(timeout=options.timeout_s)
        # It holds for the thread that calls it and for threads not yet started: restore it there.
        torch.set_num_threads(torch_threads)
        return threads

    def start_processes(self) -> Iterator[Batch | Exception]:
        """Return the rest of the epoch from the worker processes of torch's DataLoader."""
        if self._processes is None:
            options, workers = self.options, worker_count(self.options)
            share = self.batches.global_batch_size / self.batches.world_size
            batch_bytes = share * _mean_length(self.pack)
            ahead = min(options.batches_ahead, options.bytes_ahead / max(1.0, batch_bytes))
            check_shared_memory(int(batch_bytes * (max(1, int(ahead / workers)) * workers + 1)))
            self._processes = torch.utils.data.DataLoader(
                self.maker,
                batch_size=None,
                sampler=_TaskSource(weakref.ref(self)),
                collate_fn=_unchanged,
                num_workers=workers,
                prefetch_factor=max(1, int(ahead / workers)),
                timeout=options.timeout_s,
                worker_init_fn=functools.partial(seed_worker, self.batches.rank),
                multiprocessing_context=options.start_method,
                persistent_workers=True,
                pin_memory=pins_memory(options),
            )
        batches: Iterator[Batch | Exception] = iter(self._processes)
        if is_paced(self.options.uses_pace):
            pace(batches, self.options.bytes_ahead)
        return batches

    def delivered(self, made: Batch, waited_s: float) -> None:
        """Advance by a batch that is delivered to the loop, and count it."""
        self.position = self.batches.after(self.position)
        stats = self.stats
        stats.batches += 1
        stats.samples += made.sample_count
        stats.bytes += made.stored_bytes
        stats.waited_s += waited_s
        stats.read_by_node += made.is_from_node
        stats.stages.add(made.stages)
        stats.skipped += len(made.skipped)
        stats.skipped_names += made.skipped[: NAMES_KEPT - len(stats.skipped_names)]
        if made.lacks_simplejpeg:
            _advise_simplejpeg()

    def next_batch(self) -> str:
        """Return what to call the next batch in an error."""
        planned = self.batches.positions(self.position)
        if not planned:
            return "the end of the epoch"
        number = int(self.order.samples(planned[0][:1])[0])
        return f"the batch that begins with sample {number} {self.pack.names[number]!a}"

    def ended(self) -> None:
        """Move on to the next epoch."""
        self._running = None
        self._move(self.epoch + 1, 0)


class LoaderIterator:
    """The rest of an epoch, batch by batch. Dropping it stops the threads that work ahead.

    Attributes:
        delivered_bytes: stored bytes of the last batch. The recorder of a run reads all of these.
        delivered_samples: its samples; 0 at the end.
        delivered_stages: where the time of its worker went.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._ended = self._closed = False
        self._threads: OrderedThreads[BatchTask, Batch] | None = None
        self._processes: Any = None
        self.delivered_bytes = self.delivered_samples = 0
        self.delivered_stages = StageTimes()
        if loader.options.worker_kind == "thread":
            self._threads = loader.start_threads()
            weakref.finalize(self, self._threads.close)
        else:
            self._processes = loader.start_processes()

    @property
    def skipped_count(self) -> int:
        """Damaged samples that the loader has left out so far, for the recorder as well."""
        return self._loader.stats.skipped

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Any, ...]:
        if self._closed:
            raise UsageError(
                "this pass over the loader has ended",
                where=str(self._loader.pack.path),
                why="the loader's position was set anew (load_state_dict, set_epoch), it was "
                "closed, or loading a batch failed",
                fix="Start a new iteration over the loader",
            )
        begin_s = time.perf_counter()
        self.delivered_bytes = self.delivered_samples = 0
        self.delivered_stages = StageTimes()
        if self._ended:
            raise StopIteration
        try:
            made = self._next()
        except StopIteration:
            self._ended = True
            self._loader.ended()
            raise
        self._loader.delivered(made, time.perf_counter() - begin_s)
        self.delivered_bytes, self.delivered_stages = made.stored_bytes, made.stages
        self.delivered_samples = made.sample_count
        return made.content

    def close(self, join_s: float = 0.0) -> None:
        """Stop the workers of this iterator."""
        self._closed = True
        if self._threads is not None:
            self._threads.close(join_s)

    def _next(self) -> Batch:
        if self._threads is not None:
            try:
                return self._threads.next()
            except (StopIteration, DeadlineExceeded):
                raise
            except Exception:
                self.close()
                raise
        try:
            made: Batch | Exception = next(self._processes)
        except RuntimeError as error:  # torch has no classes for these
            raise self._lost(error) from error
        if isinstance(made, Exception):
            self._loader.close()
            raise made
        return made

    def _lost(self, error: RuntimeError) -> PacelineError:
        loader = self._loader
        where, worker = f"{loader.pack.path}: {loader.next_batch()}", _awaited(self._processes)
        loader.close()  # the next pass starts new workers
        if "timed out" in str(error):
            return DeadlineExceeded(
                f"{worker} did not deliver within {loader.options.timeout_s:g} s",
                where=where,
                why=str(error),
                fix="Look at the transform and the storage, or raise timeout_s",
            )
        return ScriptFailed(
            f"{worker} was waited for when a process of the loader ended",
            where=where,
            why=str(error),
            fix="Look at what the transform printed, and whether memory ran out (dmesg)",
        )


class _TaskSource:
    """The rest of a loader's epoch as a `sampler`; does not keep the loader alive."""

    def __init__(self, loader: weakref.ref[Loader]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[BatchTask]:
        loader = self._loader()
        assert loader is not None  # whatever iterates over this holds the loader
        return loader.tasks()

    def __len__(self) -> int:
        loader = self._loader()
        return 0 if loader is None else loader.batches.count(loader.position)


def _mean_length(pack: Pack) -> float:
    """Return the mean of samples' bytes, of a large pack from some that lie far apart."""
    count = min(len(pack), _MEASURED_SAMPLES)
    if not count:
        return 0.0
    return float(pack.lengths_of(np.linspace(0, len(pack) - 1, count, dtype=np.int64)).mean())


@functools.cache
def _advise_simplejpeg() -> None:
    """Say once in a process that JPEGs are decoded slowly."""
    _LOG.warning(
        "JPEG images are decoded by Pillow; simplejpeg takes about half the time: "
        "pip install 'paceline[images]'"
    )


def _awaited(batches: Any) -> str:
    """Name the process that a DataLoader's iterator waits for, from its private state."""
    try:
        worker = batches._task_info[batches._rcvd_idx][0]  # noqa: SLF001
        return f"worker process {worker} (pid {batches._workers[worker].pid})"  # noqa: SLF001
    except (AttributeError, LookupError):  # another torch
        return "a worker process"


def _unchanged(made: Any) -> Any:
    return made
