"""A sparse all-reduce: the sum over ranks of tensors of which each rank sends some entries.

::

    gather     each rank sends its k entries to all:                   (N - 1) k entries per rank
    scatter    each rank owns 1/N of the elements: entries go to their owner, who adds them up,
               keeps the k/N largest sums, and sends these to all:     2 k (N - 1) / N per rank

The volume of `scatter` is below 2 k however many ranks there are. What an owner cuts off goes back
to the caller, who keeps it for the next step, so that nothing is lost. Both send the same for two
ranks, and `gather` then sends it in one message and cuts nothing off.

Ownership is cyclic by blocks of each parameter, so that all owners get about as many entries.

Source of the idea: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning,
PPoPP 2022, whose ranges follow the distribution of the entries instead.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training.compression.selection import Entries, add_entries, largest
from paceline.training.compression.wire import Codec, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

Method = Literal["gather", "scatter"]
_BLOCKS_PER_OWNER = 64


def all_gather(target: Tensor, own: Tensor, group: ProcessGroup | None) -> None:
    """Gather equally long flat tensors of all ranks into one."""
    # all_gather_into_tensor is deprecated from torch 2.13 on, which calls it all_gather_single.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(target, own, group=group)


def method_for(ranks: int) -> Method:
    """Return the method that sends less, and of equals the one with fewer messages."""
    return "gather" if ranks <= 2 else "scatter"


class Part(NamedTuple):
    """A parameter in a flat tensor: where it begins, its elements, the most entries of a rank."""

    start: int
    length: int
    wanted: int


class Ownership:
    """Which rank owns which elements: blocks of each parameter, dealt to the ranks in turn.

    An owner numbers what it owns, parameter by parameter (`to_local`). Nothing depends on which
    parameters share a tensor, so that a run may resume with other buckets.

    Args:
        parts: the parameters, by start.
        ranks: that own them.
        device: of indices.
    """

    def __init__(self, parts: Sequence[Part], ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        blocks = [max(1, part.length // (ranks * _BLOCKS_PER_OWNER)) for part in parts]
        lengths = [
            -(-part.length // (block * ranks)) * block
            for part, block in zip(parts, blocks, strict=True)
        ]
        bases = [0, *itertools.accumulate(lengths)]
        self.local_length = bases[-1]  # elements that a rank owns, at most
        self._starts = torch.tensor([part.start for part in parts], device=device)
        self._blocks = torch.tensor(blocks, device=device)
        self._bases = torch.tensor(bases[:-1], device=device)
        shares = [-(-part.wanted // ranks) for part in parts]
        self.shares = [min(both) for both in zip(shares, lengths, strict=True)]

    def owner(self, indices: Tensor) -> Tensor:
        """Return the rank that owns each element."""
        part = torch.searchsorted(self._starts, indices, right=True) - 1
        return (indices - self._starts[part]) // self._blocks[part] % self.ranks

    def to_local(self, indices: Tensor) -> Tensor:
        """Return the place of each element among its owner's; keeps the order of an owner's."""
        part = torch.searchsorted(self._starts, indices, right=True) - 1
        block, place = self._blocks[part], indices - self._starts[part]
        return self._bases[part] + place // (block * self.ranks) * block + place % block

    def to_global(self, local: Tensor, rank: int) -> Tensor:
        """Return the elements that `rank` has at some places."""
        part = torch.searchsorted(self._bases, local, right=True) - 1
        block, place = self._blocks[part], local - self._bases[part]
        return self._starts[part] + (place // block * self.ranks + rank) * block + place % block

    def largest(self, local: Tensor, magnitudes: Tensor) -> Tensor:
        """Return which of an owner's sums it sends: of each parameter, a share of the largest."""
        ends = [*torch.searchsorted(local, self._bases).tolist(), local.numel()]
        chosen = [
            largest(magnitudes[begin:end], share) + begin
            for (begin, end), share in zip(itertools.pairwise(ends), self.shares, strict=True)
        ]
        return torch.cat(chosen)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseAllReduce:
    """The plan of a sparse all-reduce, equal on all ranks.

    Attributes:
        ranks: that take part.
        length: elements of the tensor.
        parts: the parameters in it, by start; at least one.
        dtype: of the values on the wire.
        method: see the module.
    """

    ranks: int
    length: int
    parts: tuple[Part, ...]
    dtype: torch.dtype
    method: Method

    @property
    def result_bytes(self) -> int:
        """Size of the block of messages that `run` returns."""
        return self.ranks * self._result_codec().max_bytes

    def run(self, entries: Entries, group: ProcessGroup | None) -> tuple[Tensor, Entries]:
        """Exchange entries; return all ranks' messages, and what this rank is to keep.

        Args:
            entries: of this rank, at most as wanted, rounded to what the wire carries.
            group: of the ranks; None for one rank.

        Returns:
            Messages for `entries_of`, uint8, equal on all ranks; and the part of the sum of all
            ranks' entries that those do not have and this rank owns.

        Cost: see the module.
        """
        kept = Entries(entries.indices[:0], entries.values[:0])
        if self.method == "scatter":
            entries, kept = self._own_sums(entries, group)
        message = self._result_codec().padded(entries)
        if group is None:
            return message, kept
        block = message.new_empty(self.result_bytes)
        all_gather(block, message, group)
        return block, kept

    def entries_of(self, block: Tensor) -> list[Entries]:
        """Return the entries of each rank's message, in the order of the ranks."""
        codec = self._result_codec()
        found = [codec.decode(message) for message in block.view(self.ranks, -1)]
        if self.method == "gather":
            return found
        owned = self._ownership(block.device)
        return [
            Entries(owned.to_global(indices, rank), values)
            for rank, (indices, values) in enumerate(found)
        ]

    def _ownership(self, device: torch.device) -> Ownership:
        return Ownership(self.parts, self.ranks, device)

    def _result_codec(self) -> Codec:
        if self.method == "gather":
            wanted = sum(part.wanted for part in self.parts)
            return Codec(length=self.length, capacity=wanted, dtype=self.dtype)
        owned = self._ownership(torch.device("cpu"))
        return Codec(length=owned.local_length, capacity=sum(owned.shares), dtype=self.dtype)

    def _own_sums(self, entries: Entries, group: ProcessGroup | None) -> tuple[Entries, Entries]:
        """Return the largest sums of what this rank owns (local), and the rest of them (global)."""
        owned, codec = self._ownership(entries.indices.device), self._result_codec()
        rank = 0 if group is None else dist.get_rank(group)
        found = [codec.decode(message) for message in self._to_owners(entries, group)]
        sums = entries.values.new_zeros(owned.local_length)
        for each in found:
            add_entries(sums, each, 1.0)
        touched = torch.cat([indices for indices, _ in found]).unique()
        totals = sums[touched]
        chosen = owned.largest(touched, totals.abs())
        sent = rounded(totals[chosen], self.dtype)
        totals[chosen] -= sent
        rest = totals.nonzero().squeeze(1)
        kept = Entries(owned.to_global(touched[rest], rank), totals[rest])
        return Entries(touched[chosen], sent), kept

    def _to_owners(self, entries: Entries, group: ProcessGroup | None) -> list[Tensor]:
        """Send each owner its entries; return the messages to this rank, by sender."""
        owned, codec = self._ownership(entries.indices.device), self._result_codec()
        owners = owned.owner(entries.indices)
        order = owners.argsort(stable=True)
        local = owned.to_local(entries.indices)[order]
        counts = torch.bincount(owners, minlength=self.ranks).tolist()
        pieces = zip(local.split(counts), entries.values[order].split(counts), strict=True)
        messages = [codec.encode(Entries(*piece)) for piece in pieces]
        if group is None:
            return messages
        sizes = torch.tensor([message.numel() for message in messages], device=local.device)
        own_sizes = torch.empty_like(sizes)
        dist.all_to_all_single(own_sizes, sizes, group=group)
        given, taken = sizes.tolist(), own_sizes.tolist()
        received = messages[0].new_empty(sum(taken))
        dist.all_to_all_single(received, torch.cat(messages), taken, given, group=group)
        return list(received.split(taken))
