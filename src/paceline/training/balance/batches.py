"""Batches of unequal sizes from an unchanged DataLoader with a DistributedSampler.

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
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
    """The shares of one batch sampler, over all of its epochs.

    Attributes:
        batch_sampler: of the loader.
        batch: samples of a rank's batch, as the script asks for it.
        ranks: number of ranks.
        rank: this one.
        epochs: how many iterators it has had.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        sampler = batch_sampler.sampler
        assert isinstance(sampler, DistributedSampler)
        self.batch_sampler = batch_sampler
        self.batch = batch_sampler.batch_size
        self.ranks = sampler.num_replicas
        self.rank = sampler.rank
        self.epochs = 0
        self._begins: list[tuple[BatchPlace, Shares]] = [(BatchPlace(0, 0), Shares())]

    def batches(self, original: Iterator[list[Any]]) -> BalancedBatches:
        """Return the batches of the next epoch.

        Args:
            original: the script's own batches of this rank.
        """
        self.epochs += 1
        sampler: DistributedSampler[Any] = self.batch_sampler.sampler
        return BalancedBatches(self, self.epochs, original, copy.copy(sampler))

    def put_in_force(self, shares: Shares, place: BatchPlace) -> None:
        """Have shares hold from a batch on, which no rank has drawn."""
        latest = self._begins[-1][0]
        assert place >= latest, (place, latest)
        if place == latest:  # decided twice before a batch was drawn
            self._begins.pop()
        self._begins.append((place, shares))
        # What is before the batches of the current epoch is never asked for again.
        while len(self._begins) > 1 and self._begins[1][0] <= BatchPlace(self.epochs, 0):
            self._begins.pop(0)

    def shares_at(self, place: BatchPlace) -> Shares:
        """Return the shares of a batch of the current epoch or a later one."""
        if len(self._begins) == 1:  # mostly, and asked for several times in each step
            return self._begins[0][1]
        return next(shares for begin, shares in reversed(self._begins) if begin <= place)


class BalancedBatches:
    """The batches of one epoch, as an iterator over lists of indices.

    Attributes:
        loader: whose they are.
        drawn: how many were taken, also ahead by loader workers.
        delivered: how many the script got.
    """

    def __init__(
        self,
        loader: BalancedLoader,
        epoch: int,
        original: Iterator[list[Any]],
        sampler: DistributedSampler[Any],
    ) -> None:
        self.loader = loader
        self.drawn = 0
        self.delivered = 0
        self._epoch = epoch
        self._original: Iterator[list[Any]] | None = original
        self._sampler = sampler  # as it was at the beginning: the script may set the next epoch
        self._of_ranks: list[Sequence[Any]] = []
        self._drop_last = loader.batch_sampler.drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        return self

    def __next__(self) -> list[Any]:
        """Return the indices of this rank's next batch."""
        shares = self.loader.shares_at(BatchPlace(self._epoch, self.drawn))
        if self._original is not None and shares.samples:
            self._original = None
            self._of_ranks = lists_of_ranks(self._sampler)
        batch = next(self._original) if self._original is not None else self._divided(shares)
        self.drawn += 1
        return batch

    def place(self) -> BatchPlace:
        """Return the batch that is drawn next."""
        return BatchPlace(self._epoch, self.drawn)

    def current(self) -> Shares:
        """Return the shares of the batch that the script got last; none of one that is not full."""
        number = max(0, self.delivered - 1)
        shares = self.loader.shares_at(BatchPlace(self._epoch, number))
        is_full = (number + 1) * self.loader.batch <= len(self._sampler)
        return shares if is_full else Shares(shares.generation)

    def _divided(self, shares: Shares) -> list[Any]:
        batch, ranks = self.loader.batch, self.loader.ranks
        begin = self.drawn * batch
        size = min(batch, len(self._sampler) - begin)
        if size <= 0 or (size < batch and self._drop_last):
            raise StopIteration
        if size < batch or not shares.samples:  # the last batch, which is not full, stays as it is
            own = self._of_ranks[self.loader.rank]
            return [_plain(index) for index in own[begin : begin + size]]
        first = sum(shares.samples[: self.loader.rank])
        places = range(first, first + shares.samples[self.loader.rank])
        assert sum(shares.samples) == ranks * batch
        return [_plain(self._of_ranks[place // batch][begin + place % batch]) for place in places]


def _plain(index: Any) -> Any:
    return int(index) if isinstance(index, torch.Tensor) else index


def why_not_balanced(batch_sampler: Any) -> str:
    """Return why a loader's batches stay as they are; empty if they can be divided anew."""
    if not isinstance(batch_sampler, BatchSampler) or not _is_plain(batch_sampler):
        return f"its batches come from a {type(batch_sampler).__name__}"
    sampler = batch_sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return f"its samples come from a {type(sampler).__name__}, not from a DistributedSampler"
    if not dist.is_initialized():
        return "there is no process group"
    own = (sampler.num_replicas, sampler.rank)
    if own != (dist.get_world_size(), dist.get_rank()):
        return f"its DistributedSampler is for rank {own[1]} of {own[0]}"
    if not _is_whole(sampler):
        return f"its {type(sampler).__name__} orders samples by more than epoch and rank"
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
