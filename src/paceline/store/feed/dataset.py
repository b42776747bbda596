"""A pack as a torch data set, and its batches for a rank, to use with torch's own DataLoader.

Under fork and under spawn, workers map the same page cache; nothing but the path is pickled.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from paceline.core.errors import UsageError
from paceline.store.feed.sampler import (
    LastBatch,
    batches_of,
    load_state,
    order_of,
    save_state,
)
from paceline.store.in_place.opening import open_pack
from paceline.store.read.pack import Pack

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from paceline.store.feed.order import SampleOrder

_FRAMES = 12  # between a pass of a batch sampler and what shares its batches out


class PackDataset(torch.utils.data.Dataset):  # type: ignore[misc]  # torch is untyped to mypy here
    """Samples of a pack as ``(transform(bytes), label)``, for any `DataLoader`.

    Args:
        pack: an open pack, or the path of one.
        transform: turns a sample's bytes into what the model trains on; None leaves the bytes.
    """

    def __init__(
        self,
        pack: Pack | str | os.PathLike[str],
        transform: Callable[[bytes], Any] | None = None,
    ) -> None:
        self.pack = pack if isinstance(pack, Pack) else open_pack(pack)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, sample: int) -> tuple[Any, int]:
        return self._item(self.pack.read(sample), int(self.pack.labels_of([sample])[0]))

    def __getitems__(self, samples: Sequence[int]) -> list[tuple[Any, int]]:
        """Return a whole batch by one call into C++; `DataLoader` prefers this."""
        ids = np.asarray(samples, np.int64)
        buffer, offsets = self.pack.read_batch(ids)
        labels = self.pack.labels_of(ids)
        return [
            self._item(buffer[offsets[k] : offsets[k + 1]].tobytes(), int(labels[k]))
            for k in range(len(ids))
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return which pack this is; the position in the epoch is the sampler's."""
        return {"version": 1, "pack": self.pack.identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that `state` is of the same pack.

        Raises:
            UsageError: it is not.
        """
        if dict(state) != self.state_dict():
            raise UsageError(
                "the state is of another pack",
                where=str(self.pack.path),
                why=f"it is {dict(state)}, and here it is {self.state_dict()}",
                fix="Open the pack that it was saved with",
            )

    def _item(self, body: bytes, label: int) -> tuple[Any, int]:
        return (body if self.transform is None else self.transform(body)), label


class PackSampler(torch.utils.data.BatchSampler):  # type: ignore[misc]  # untyped, as above
    """Batches of sample numbers for this rank: the ``batch_sampler`` of torch's `DataLoader`.

    ::

        order = SampleOrder(sample_count=len(pack), seed=7)
        sampler = PackSampler(pack, global_batch_size=256, order=order)
        loader = DataLoader(PackDataset(pack), batch_sampler=sampler, num_workers=2)

    Each pass is one epoch; a pass that was taken to its end moves on to the next epoch. The state
    says how far batches were *asked for*, which is ahead of what a DataLoader with workers has
    delivered; give `state_dict` the number of batches that your loop has seen. (torchdata's
    StatefulDataLoader keeps the right one by itself.)

    Each rank has its own batches already, so a framework must not share them out once more: a pass
    through accelerate's `BatchSamplerShard` and its kin is refused. Lightning's injected sampler is
    taken for its ranks.

    Attributes:
        batch_size: samples of a full batch of this rank.
        drop_last: whether an incomplete last batch is left out.
        sampler: this rank's samples, one by one.

    Args:
        pack: an open pack, or the path of one.
        global_batch_size: samples of a step over all ranks.
        order: shuffle and seed; its `sample_count` must be the pack's. By default a global shuffle
            of seed 0.
        rank: by default this process's (torch.distributed, then the environment's RANK).
        world_size: likewise.
        last: how to treat an incomplete last batch (`RankBatches`).
        sampler: a `DistributedSampler` that a framework injects: its rank and its number of ranks
            are taken, unless they are given; its order is not.

    Raises:
        UsageError: the batch cannot be shared, `order` is another pack's, or `sampler` is not one
            of ranks.
    """

    def __init__(
        self,
        pack: Pack | str | os.PathLike[str],
        global_batch_size: int,
        *,
        order: SampleOrder | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        last: LastBatch = "pad",
        sampler: torch.utils.data.Sampler[int] | None = None,
    ) -> None:
        self.pack = pack if isinstance(pack, Pack) else open_pack(pack)
        self.order = order_of(self.pack, order)
        if sampler is not None and rank is None and world_size is None:
            rank, world_size = _ranks_of(sampler)
        self.batches = batches_of(self.pack, global_batch_size, rank, world_size, last)
        self.batch_size = global_batch_size // self.batches.world_size
        self.drop_last = last == "drop"
        self.sampler = _Samples(self)
        self._start = 0
        self._asked = 0  # batches, since the last pass began at `_start`
        # Where the last pass began; stays when it ends, for a DataLoader has then delivered less.
        self._pass = (self.order, self._start)

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self.batches.count()

    def __iter__(self) -> Iterator[list[int]]:
        if self.batches.world_size > 1:
            _refuse_sharding(self.pack)
        return self._pass_through()

    def _pass_through(self) -> Iterator[list[int]]:
        self._asked = 0
        order, start = self.order, self._start
        self._pass = (order, start)
        for number in range(self.batches.count(start)):
            begin = self.batches.after(start, number)
            (positions,) = self.batches.positions(begin)
            samples = order.samples(positions).tolist()
            self._asked = number + 1
            yield samples
        self._go_to(order.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch, unless this is it."""
        self._go_to(epoch)
        self._pass = (self.order, self._start)

    def _go_to(self, epoch: int) -> None:
        if epoch != self.order.epoch:
            self.order = dataclasses.replace(self.order, epoch=epoch)
            self._start = self._asked = 0

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the position of the pass.

        Args:
            batches: number of batches that the last pass has delivered; by default the number that
                was requested from it.
        """
        if batches is None:
            order, start, batches = self.order, self._start, self._asked
        else:
            order, start = self._pass
        return save_state(order, self.pack, self.batches.after(start, batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the next pass at the position of `state`, on any number of ranks.

        Raises:
            UsageError: it is the state of another pack or order.
        """
        self.order, self._start = load_state(state, self.order, self.pack)
        self._asked = 0
        self._pass = (self.order, self._start)


class _Samples(torch.utils.data.Sampler):  # type: ignore[misc]  # untyped, as above
    """The samples of a `PackSampler`, one by one; `set_epoch` is its own."""

    def __init__(self, batches: PackSampler) -> None:
        self.batches = batches

    def __len__(self) -> int:
        share = self.batches.batches
        return sum(map(len, share.positions(0, share.count())))

    def __iter__(self) -> Iterator[int]:
        return (sample for batch in self.batches for sample in batch)

    def set_epoch(self, epoch: int) -> None:
        self.batches.set_epoch(epoch)


def _ranks_of(sampler: torch.utils.data.Sampler[int]) -> tuple[int, int]:
    rank, ranks = getattr(sampler, "rank", None), getattr(sampler, "num_replicas", None)
    if not isinstance(rank, int) or not isinstance(ranks, int):
        raise UsageError(
            f"PackSampler takes a DistributedSampler, got {type(sampler).__name__}",
            why="samples and their order are the pack's; a sampler gives a rank alone",
            fix="Leave `sampler` out, and give `order`, or `rank` and `world_size`",
        )
    return rank, ranks


def _refuse_sharding(pack: Pack) -> None:
    """Raise if what asks for a pass shares its batches out among ranks, as accelerate does.

    A framework that wraps a batch sampler tells it nothing, so the callers are looked at.
    """
    frame = inspect.currentframe()
    for _ in range(_FRAMES):
        if frame is None:
            return
        caller = frame.f_locals.get("self")
        is_sampler = isinstance(caller, torch.utils.data.Sampler)
        if is_sampler and not isinstance(caller, PackSampler | _Samples):
            ranks = getattr(caller, "num_processes", getattr(caller, "num_replicas", 1))
        else:  # rank 0 asks for the batches of all
            dispatches = any("Dispatcher" in kind.__name__ for kind in type(caller).__mro__)
            state = getattr(caller, "state", None)
            is_loader = isinstance(caller, torch.utils.data.DataLoader)
            ranks = getattr(state, "num_processes", 1) if dispatches and is_loader else 1
        if isinstance(ranks, int) and ranks > 1:
            raise UsageError(
                f"{type(caller).__name__} would share the batches of one rank among {ranks} ranks",
                where=str(pack.path),
                why="PackSampler gives each rank its own batches, so most samples would be lost",
                fix="Leave this DataLoader out of accelerator.prepare(), or give it a "
                "paceline.store.Loader; or make the sampler with rank=0, world_size=1",
            )
        frame = frame.f_back
