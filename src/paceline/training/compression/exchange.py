"""A sparse all-reduce: the sum over ranks of tensors of which each rank sends some entries.

::

    gather     each rank sends its k entries to all:                   (N - 1) k entries per rank
    scatter    each rank owns 1/N of the elements: entries go to their owner, who adds them up,
               keeps the k/N largest sums, and sends these to all:     2 k (N - 1) / N per rank

The volume of `scatter` is below 2 k however many ranks there are. What an owner cuts off goes back
to the caller, who keeps it for the next step, so that nothing is lost. Both send the same for two
ranks, and `gather` then sends it in one message and cuts nothing off.

Ownership is cyclic by blocks, so that a layer with many entries is spread over all owners.

Source of the idea: Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning,
PPoPP 2022, whose ranges follow the distribution of the entries instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.training.compression.selection import Entries, largest
from paceline.training.compression.wire import Codec, rounded

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Method = Literal["gather", "scatter"]
_BLOCKS_PER_OWNER = 64


def method_for(ranks: int) -> Method:
    """Return the method that sends less, and of equals the one with fewer messages."""
    return "gather" if ranks <= 2 else "scatter"


@dataclass(frozen=True, kw_only=True, slots=True)
class Ownership:
    """Which rank owns which elements: blocks of elements, dealt to the ranks in turn.

    Attributes:
        length: elements of the tensor.
        ranks: that own them.
    """

    length: int
    ranks: int

    @property
    def block(self) -> int:
        """Elements of a block."""
        return max(1, self.length // (self.ranks * _BLOCKS_PER_OWNER))

    @property
    def local_length(self) -> int:
        """Elements that a rank owns, at most."""
        round_length = self.block * self.ranks
        return -(-self.length // round_length) * self.block

    def owner(self, indices: Tensor) -> Tensor:
        """Return the rank that owns each element."""
        return indices // self.block % self.ranks

    def to_local(self, indices: Tensor) -> Tensor:
        """Return the place of each element among its owner's; keeps the order of an owner's."""
        return indices // (self.block * self.ranks) * self.block + indices % self.block

    def to_global(self, local: Tensor, rank: int) -> Tensor:
        """Return the elements that `rank` has at some places."""
        return (local // self.block * self.ranks + rank) * self.block + local % self.block


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseAllReduce:
    """The plan of a sparse all-reduce, equal on all ranks.

    Attributes:
        ranks: that take part.
        length: elements of the tensor.
        wanted: the most entries that a rank gives.
        dtype: of the values on the wire.
        method: see the module.
    """

    ranks: int
    length: int
    wanted: int
    dtype: torch.dtype
    method: Method

    @property
    def result_bytes(self) -> int:
        """Size of the block of messages that `run` returns."""
        return self.ranks * self._result_codec().max_bytes

    def run(self, entries: Entries, group: ProcessGroup | None) -> tuple[Tensor, Entries]:
        """Exchange entries; return all ranks' messages, and what this rank is to keep.

        Args:
            entries: of this rank, at most `wanted`, rounded to what the wire carries.
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
        dist.all_gather_into_tensor(block, message, group=group)
        return block, kept

    def entries_of(self, block: Tensor) -> list[Entries]:
        """Return the entries of each rank's message, in the order of the ranks."""
        codec = self._result_codec()
        found = [codec.decode(message) for message in block.view(self.ranks, -1)]
        if self.method == "gather":
            return found
        owned = self._ownership()
        return [
            Entries(owned.to_global(indices, rank), values)
            for rank, (indices, values) in enumerate(found)
        ]

    def _ownership(self) -> Ownership:
        return Ownership(length=self.length, ranks=self.ranks)

    def _result_codec(self) -> Codec:
        if self.method == "gather":
            return Codec(length=self.length, capacity=self.wanted, dtype=self.dtype)
        share = -(-self.wanted // self.ranks)
        length = self._ownership().local_length
        return Codec(length=length, capacity=min(share, length), dtype=self.dtype)

    def _own_sums(self, entries: Entries, group: ProcessGroup | None) -> tuple[Entries, Entries]:
        """Return the largest sums of what this rank owns (local), and the rest of them (global)."""
        owned, codec = self._ownership(), self._result_codec()
        rank = 0 if group is None else dist.get_rank(group)
        found = [codec.decode(message) for message in self._to_owners(entries, group)]
        sums = entries.values.new_zeros(owned.local_length)
        for indices, values in found:
            sums.index_add_(0, indices, values)
        touched = torch.cat([indices for indices, _ in found]).unique()
        totals = sums[touched]
        chosen = largest(totals.abs(), codec.capacity)
        sent = rounded(totals[chosen], self.dtype)
        totals[chosen] -= sent
        rest = totals.nonzero().squeeze(1)
        kept = Entries(owned.to_global(touched[rest], rank), totals[rest])
        return Entries(touched[chosen], sent), kept

    def _to_owners(self, entries: Entries, group: ProcessGroup | None) -> list[Tensor]:
        """Send each owner its entries; return the messages to this rank, by sender."""
        owned, codec = self._ownership(), self._result_codec()
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
