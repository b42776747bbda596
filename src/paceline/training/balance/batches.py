"""Batches of unequal sizes from the loader of an unchanged script.

That is a DataLoader with a DistributedSampler or with accelerate's BatchSamplerShard, as Hugging
Face's Trainer has it, or the store's Loader.

The samples of a step are those of the script's own sampler: the union of all ranks' batches, rank
after rank. A rank takes as many of them as its share says, so that equal shares are the batches of
the script itself, and with any shares a step trains on the same samples as without::

    sampler's batches   rank 0: a b c d    rank 1: e f g h
    samples (4, 4)              a b c d            e f g h
    samples (6, 2)              a b c d e f        g h

Loader workers draw batches ahead. New shares hold from a batch on that no rank has drawn; the ranks
exchange how far each has come.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ACCELERATE = "accelerate.data_loader"  # the module of BatchSamplerShard
_SEVERAL_PASSES = 64  # ranks up to which a sampler of one's own is asked once for each of them


class BatchPlace(NamedTuple):
    """A batch of a loader: its epoch, counted by iterators from 1, and its number from 0 in it."""

    epoch: int
    number: int


class Shares(NamedTuple):
    """The samples of each rank in a batch, and their generation; none: as the script divides."""

    generation: int = 0
    samples: tuple[int, ...] = ()

    def weight(self, rank: int) -> float:
        """Return the factor of a rank's gradients whose average over ranks is that over samples."""
        if not self.samples:
            return 1.0
        return len(self.samples) * self.samples[rank] / sum(self.samples)


class BalancedLoader:
    """The shares of one loader, over all of its epochs.

    Args:
        batch: samples of a rank's batch, as the script asks for it.
        ranks: number of ranks.
        rank: this one.

    Attributes:
        epochs: how many iterators it has had.
    """

    def __init__(self, batch: int, ranks: int, rank: int) -> None:
        self.batch = batch
        self.ranks = ranks
        self.rank = rank
        self.epochs = 0
        self._begins: list[tuple[BatchPlace, Shares]] = [(BatchPlace(0, 0), Shares())]

    @classmethod
    def of(cls, batch_sampler: Any) -> BalancedLoader:
        """Return that of a DataLoader, by its batch sampler (`why_not_balanced`)."""
        if not is_shard(batch_sampler):
            sampler = batch_sampler.sampler
            return cls(batch_sampler.batch_size, sampler.num_replicas, sampler.rank)
        ranks = batch_sampler.num_processes
        batch = batch_sampler.batch_size // (ranks if batch_sampler.split_batches else 1)
        return cls(batch, ranks, batch_sampler.process_index)

    @classmethod
    def of_store(cls, loader: Any) -> BalancedLoader:
        """Return that of the store's Loader (`why_not_store`)."""
        equal = loader.batches
        return cls(equal.global_batch_size // equal.world_size, equal.world_size, equal.rank)

    def batches(
        self, batch_sampler: Any, original: Callable[[Any], Iterator[list[Any]]]
    ) -> BalancedBatches:
        """Return the batches of the next epoch of a DataLoader.

        Args:
            batch_sampler: of the loader.
            original: returns the batches of a batch sampler, as its class iterates over them.
        """
        if is_shard(batch_sampler):
            return BalancedBatches(self, ShardEpoch(batch_sampler, original), ahead=1)
        return BalancedBatches(self, SamplerEpoch(batch_sampler, original))

    def put_in_force(self, shares: Shares, place: BatchPlace) -> None:
        """Have shares hold from a batch on, which no rank has drawn."""
        latest = self._begins[-1][0]
        assert place >= latest, (place, latest)
        # Another list, as threads may draw batches meanwhile; decided twice before a batch was
        # drawn, the latter counts.
        begins = [*(begin for begin in self._begins if begin[0] < place), (place, shares)]
        # What is before the batches of the current epoch is never asked for again.
        while len(begins) > 1 and begins[1][0] <= BatchPlace(self.epochs, 0):
            begins.pop(0)
        self._begins = begins

    def shares_at(self, place: BatchPlace) -> Shares:
        """Return the shares of a batch of the current epoch or a later one."""
        begins = self._begins
        if len(begins) == 1:  # mostly, and asked for several times in each step
            return begins[0][1]
        return next(shares for begin, shares in reversed(begins) if begin <= place)


class EpochBatches(Protocol):
    """An epoch of a batch sampler; each call takes a step.

    Attributes:
        full_steps: how many steps from the first one have full batches on all ranks.
    """

    full_steps: int

    def own(self) -> list[Any]:
        """Return the samples of this rank, as the script divides them."""

    def part(self, begin: int, end: int) -> list[Any]:
        """Return samples `begin` to `end` of all ranks' together; of full batches only."""


class SamplerEpoch:
    """An epoch over a DistributedSampler: the lists of all ranks follow from epoch and rank."""

    def __init__(
        self, batch_sampler: BatchSampler, original: Callable[[Any], Iterator[list[Any]]]
    ) -> None:
        # As it is at the beginning of the epoch: the script may set the next one.
        self._sampler: DistributedSampler[Any] = copy.copy(batch_sampler.sampler)
        self._batch = batch_sampler.batch_size
        self._drop_last = batch_sampler.drop_last
        self._original: Iterator[list[Any]] | None = original(batch_sampler)
        self._of_ranks: list[Sequence[Any]] = []
        self._step = 0
        self.full_steps = len(self._sampler) // self._batch

    def own(self) -> list[Any]:
        """Return the samples of this rank, as the script divides them."""
        if self._original is not None:
            batch = next(self._original)
        else:
            begin = self._step * self._batch
            size = min(self._batch, len(self._sampler) - begin)
            if size <= 0 or (size < self._batch and self._drop_last):
                raise StopIteration
            own = self._of_ranks[self._sampler.rank]
            batch = [_plain(index) for index in own[begin : begin + size]]
        self._step += 1
        return batch

    def part(self, begin: int, end: int) -> list[Any]:
        """Return samples `begin` to `end` of all ranks' together; of full batches only."""
        if self._original is not None:
            self._original = None
            self._of_ranks = lists_of_ranks(self._sampler)
        first, size = self._step * self._batch, self._batch
        self._step += 1
        return [
            _plain(self._of_ranks[place // size][first + place % size])
            for place in range(begin, end)
        ]


class ShardEpoch:
    """An epoch over a BatchSamplerShard: each rank draws the batches of all ranks.

    The shard's own loop and ours read the same batches in step with each other.
    """

    def __init__(self, shard: Any, original: Callable[[Any], Iterator[list[Any]]]) -> None:
        inner = shard.batch_sampler
        theirs, self._all = itertools.tee(iter(inner))
        replayed = copy.copy(shard)
        replayed.batch_sampler = _Replayed(theirs, inner)
        self._original = original(replayed)
        self._drawn_together = 1 if shard.split_batches else shard.num_processes
        self.full_steps = len(inner.sampler) // (self._drawn_together * inner.batch_size)

    def own(self) -> list[Any]:
        """Return the samples of this rank, as the script divides them."""
        batch = next(self._original)
        self._together()
        return batch

    def part(self, begin: int, end: int) -> list[Any]:
        """Return samples `begin` to `end` of all ranks' together; of full batches only."""
        next(self._original)
        return list(itertools.chain.from_iterable(self._together()))[begin:end]

    def _together(self) -> list[list[Any]]:
        return list(itertools.islice(self._all, self._drawn_together))


class _Replayed:
    """A batch sampler over batches that are drawn already."""

    def __init__(self, batches: Iterator[list[Any]], drawn_from: BatchSampler) -> None:
        self._batches = batches
        self.batch_size = drawn_from.batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        return self._batches


class BalancedPass:
    """Which part of each batch this rank takes, in one epoch.

    Args:
        loader: whose it is.
        full_steps: how many steps from the first one have full batches on all ranks.
        ahead: how many batches the loop takes before it uses the first, until there are no more.
        reserved: batches after the last delivered one that threads may draw at any time.

    Attributes:
        loader: whose it is.
        drawn: how many were taken, also ahead by loader workers.
        delivered: how many the script got.
        has_ended: whether the script has found that there are no more.
    """

    def __init__(
        self, loader: BalancedLoader, full_steps: int, *, ahead: int = 0, reserved: int = 0
    ) -> None:
        loader.epochs += 1
        self.loader = loader
        self.drawn = 0
        self.delivered = 0
        self.has_ended = False
        self._full_steps = full_steps
        self._epoch = loader.epochs
        self._ahead = ahead
        self._reserved = reserved

    def draw(self) -> tuple[int, int] | None:
        """Return the first and the end of this rank's samples in the batch that is drawn next.

        They are numbered from 0 through the batches of all ranks; None: as the script divides them.
        """
        samples = self._shares_of(self.drawn).samples
        self.drawn += 1
        if not samples:
            return None
        begin = sum(samples[: self.loader.rank])
        return begin, begin + samples[self.loader.rank]

    def place(self) -> BatchPlace:
        """Return the first batch that is not drawn before the next one is delivered."""
        return BatchPlace(self._epoch, max(self.drawn, self.delivered + self._reserved))

    @property
    def used(self) -> int:
        """The number of the batch that the script uses now, from 0."""
        return max(0, self.delivered - 1 - (0 if self.has_ended else self._ahead))

    def current(self) -> Shares:
        """Return the shares of the batch that the script uses; none of one that is not full."""
        return self._shares_of(self.used)

    def _shares_of(self, number: int) -> Shares:
        shares = self.loader.shares_at(BatchPlace(self._epoch, number))
        return shares if number < self._full_steps else Shares(shares.generation)


class BalancedBatches(BalancedPass):
    """The batches of one epoch of a DataLoader, as an iterator over lists of indices."""

    def __init__(self, loader: BalancedLoader, epoch: EpochBatches, *, ahead: int = 0) -> None:
        super().__init__(loader, epoch.full_steps, ahead=ahead)
        self._batches = epoch

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the indices of this rank's next batch."""
        part = self.draw()
        try:
            return self._batches.own() if part is None else self._batches.part(*part)
        except StopIteration:
            self.drawn -= 1  # there was none
            raise


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, torch.Tensor) else index


def is_shard(batch_sampler: Any) -> bool:
    """Return whether it is accelerate's: whole batches of all ranks, of which it yields its own."""
    kind = type(batch_sampler)
    return (kind.__module__, kind.__qualname__) == (ACCELERATE, "BatchSamplerShard")


def why_not_balanced(batch_sampler: Any) -> str:
    """Return why a loader's batches stay as they are; empty if they can be divided anew."""
    if is_shard(batch_sampler):
        return _why_not_shard(batch_sampler)
    if not isinstance(batch_sampler, BatchSampler) or not _is_plain(batch_sampler):
        return f"its batches come from a {type(batch_sampler).__name__}"
    sampler = batch_sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return f"its samples come from a {type(sampler).__name__}, not from a DistributedSampler"
    if why := _why_not_rank("DistributedSampler", sampler.num_replicas, sampler.rank):
        return why
    if not _is_whole(sampler):
        return f"its {type(sampler).__name__} orders samples by more than epoch and rank"
    return ""


def _why_not_shard(shard: Any) -> str:
    inner = shard.batch_sampler
    if not isinstance(inner, BatchSampler) or not _is_plain(inner):
        return f"its batches come from a {type(inner).__name__}"
    if not shard.even_batches:
        return "its BatchSamplerShard has even_batches=False, so that ranks get unequally many"
    return _why_not_rank("BatchSamplerShard", shard.num_processes, shard.process_index)


def store_pass(balanced: BalancedLoader, loader: Any) -> BalancedPass:
    """Return which parts of its batches a rank takes in the rest of an epoch of the store's loader.

    Threads of the loader draw a batch more than they may have made ahead; processes draw in the
    thread that trains.
    """
    batches, options = loader.batches, loader.options
    full_steps = (batches.sample_count - loader.position) // batches.global_batch_size
    reserved = options.batches_ahead + 1 if options.worker_kind == "thread" else 0
    return BalancedPass(balanced, full_steps, reserved=reserved)


def why_not_store(loader: Any) -> str:
    """Return why batches of the store's loader stay as they are; empty if they can be divided."""
    return _why_not_rank("Loader", loader.batches.world_size, loader.batches.rank)


def _why_not_rank(divides: str, ranks: int, rank: int) -> str:
    """Return why what divides samples among ranks does not do so among those of the script."""
    if not dist.is_initialized():
        return "there is no process group"
    if (ranks, rank) != (dist.get_world_size(), dist.get_rank()):
        return f"its {divides} is for rank {rank} of {ranks}"
    return ""


def _is_plain(batch_sampler: BatchSampler) -> bool:
    """Return whether it only cuts what its sampler yields into batches."""
    return type(batch_sampler).__iter__ is BatchSampler.__iter__


def _is_torchs(sampler: DistributedSampler[Any]) -> bool:
    return type(sampler).__iter__ is DistributedSampler.__iter__


def _is_whole(sampler: DistributedSampler[Any]) -> bool:
    """Return whether the lists of all ranks can be had here.

    Not from a sampler whose order changes from call to call, or whose ranks have unequal lists.
    """
    if not _is_torchs(sampler) and sampler.num_replicas > _SEVERAL_PASSES:
        return False
    own = list(sampler)
    lists = lists_of_ranks(sampler)
    same = [_plain(index) for index in lists[sampler.rank]] == own
    return same and {len(indices) for indices in lists} == {len(sampler)}


def lists_of_ranks(sampler: DistributedSampler[Any]) -> list[Sequence[Any]]:
    """Return the samples of each rank, as the sampler of that rank yields them in this epoch.

    Cost: of torch's own sampler one pass, of another one a pass for each rank.
    """
    other = copy.copy(sampler)
    if not _is_torchs(sampler):
        lists: list[Sequence[Any]] = []
        for other.rank in range(sampler.num_replicas):
            lists.append(list(other))
        return lists
    # It takes every num_replicas-th sample, from `rank` on, of a list with total_size elements.
    other.rank, other.num_replicas, other.num_samples = 0, 1, sampler.total_size
    whole = torch.tensor(list(other), dtype=torch.int64)  # 8 bytes a sample, in place of 36
    return [whole[rank :: sampler.num_replicas] for rank in range(sampler.num_replicas)]
