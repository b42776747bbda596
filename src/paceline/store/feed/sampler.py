"""Which samples a rank takes at each step, and the position of a run in its epoch.

A global batch is the next `global_batch_size` positions of the epoch (order.py), and rank r of W
takes the r-th W-th of it. So the batches of all ranks, side by side, are the same whatever W is;
and the position in the epoch is one integer, the samples that all ranks have consumed::

    epoch      |---- batch ----|---- batch ----|---- batch ----| ...
    W = 2      | rank 0| rank 1| rank 0| rank 1|
    W = 4                                      | 0 | 1 | 2 | 3 |     after a restart

Nothing here needs torch.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from paceline.core.config import environment
from paceline.core.errors import UsageError
from paceline.store.feed.order import SampleOrder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from paceline.store.read.pack import Pack

LastBatch = Literal["pad", "drop", "join"]

STATE_VERSION = 1

_POSITIONS_AT_ONCE = 8192  # whose samples are computed by one call


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBatches:
    """One rank's share of every global batch of an epoch.

    Attributes:
        sample_count: number of samples in the pack.
        global_batch_size: samples of a step over all ranks; a multiple of `world_size`.
        rank: from 0.
        world_size: ranks that share each batch.
        last: how to treat the epoch's last global batch if it is not full. ``pad``: fill it up from
            the epoch's start, so that some samples come twice. ``drop``: leave it out. ``join``:
            share it as evenly as possible, so that ranks' last batches differ by one sample, and
            some ranks have none when there are fewer samples than ranks: for
            ``torch.distributed.algorithms.Join``. Under ``pad`` and ``drop`` all ranks have equally
            many batches of equal size.

    Raises:
        UsageError: the batch cannot be shared, or a number is out of range.
    """

    sample_count: int
    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    last: LastBatch = "pad"

    def __post_init__(self) -> None:
        if self.last not in get_args(LastBatch):
            raise UsageError(
                f"unknown policy {self.last!r} for the last batch",
                fix=f"Choose from {', '.join(get_args(LastBatch))}",
            )
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} is not in a world of {self.world_size} ranks",
                fix="Give a rank from 0 to world_size - 1",
            )
        if self.global_batch_size < 1:
            raise UsageError(
                f"global_batch_size must be at least 1 for each rank, got {self.global_batch_size}",
                fix="Give 1 or more"
                if self.world_size == 1
                else f"Give {self.world_size} or a multiple of it",
            )
        if self.global_batch_size % self.world_size:
            raise UsageError(
                f"{self.world_size} ranks cannot share a batch of {self.global_batch_size}",
                why="each rank takes an equal part of every global batch",
                fix=f"Make global_batch_size a multiple of {self.world_size}",
            )

    def count(self, position: int = 0) -> int:
        """Return how many batches this rank has from `position` to the end of the epoch."""
        full, rest = divmod(self.sample_count - position, self.global_batch_size)
        has_last = {"pad": rest > 0, "drop": False, "join": rest > self.rank}
        return full + has_last[self.last]

    def require_batches(self) -> None:
        """Raise UsageError if no rank has a batch in any epoch: a loop would do nothing."""
        if self.sample_count < (self.global_batch_size if self.last == "drop" else 1):
            raise UsageError(
                f"an epoch of {self.sample_count} samples has no batch",
                why=f"a batch is {self.global_batch_size} samples over all ranks, and the policy "
                f"for the last one is {self.last!r}",
                fix="Give a smaller global_batch_size, or last='pad'"
                if self.sample_count
                else "Pack some samples",
            )

    def at_once(self, ranks: int = 1) -> int:
        """Return of how many batches to compute the samples of `ranks` ranks by one call.

        A call for each batch would cost more than all else that is done to plan it.
        """
        return max(1, _POSITIONS_AT_ONCE * self.world_size // (self.global_batch_size * ranks))

    def positions(self, position: int, batches: int = 1) -> list[NDArray[np.int64]]:
        """Return this rank's positions in each of the next `batches` global batches.

        Args:
            position: position at which the first batch begins.
            batches: the most batches to return; fewer at the epoch's end.
        """
        batches = min(batches, self.count(position))
        full = min(batches, (self.sample_count - position) // self.global_batch_size)
        share = self.global_batch_size // self.world_size
        begin = position + self.rank * share
        starts = begin + self.global_batch_size * np.arange(full, dtype=np.int64)
        shares = list(starts[:, None] + np.arange(share, dtype=np.int64))
        if batches > full:
            at = position + full * self.global_batch_size
            shares.append(self._last_share(at))
        return shares

    def after(self, position: int, batches: int = 1) -> int:
        """Return the position that follows `batches` global batches: the end, if no batch does."""
        end = position + batches * self.global_batch_size
        rest = self.sample_count - end
        is_last = rest <= 0 or (self.last == "drop" and rest < self.global_batch_size)
        return self.sample_count if is_last else end

    def _last_share(self, begin: int) -> NDArray[np.int64]:
        rest = self.sample_count - begin
        if self.last == "join":
            # The first ranks have one more, so that rank 0, which saves, has a part of each batch.
            each, more = divmod(rest, self.world_size)
            first = begin + self.rank * each + min(self.rank, more)
            return np.arange(first, first + each + (self.rank < more), dtype=np.int64)
        share = self.global_batch_size // self.world_size
        places = np.arange(share, dtype=np.int64) + begin + self.rank * share
        return places % self.sample_count


def resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return rank and world size: as given, or torch.distributed's, or the environment's."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise UsageError("rank and world_size must be given together", fix="Give both, or neither")
    distributed = sys.modules.get("torch.distributed")  # never loads torch by itself
    if distributed and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    environ = environment()
    return int(environ.get("RANK", 0)), int(environ.get("WORLD_SIZE", 1))


def batches_of(
    pack: Pack,
    global_batch_size: int,
    rank: int | None,
    world_size: int | None,
    last: LastBatch,
) -> RankBatches:
    """Return a rank's share of the batches of a pack; `resolve_rank` completes rank and world size.

    Raises:
        UsageError: the ranks cannot share the batch, or no epoch would have one.
    """
    rank, world_size = resolve_rank(rank, world_size)
    batches = RankBatches(
        sample_count=len(pack),
        global_batch_size=global_batch_size,
        rank=rank,
        world_size=world_size,
        last=last,
    )
    batches.require_batches()
    return batches


def order_of(pack: Pack, order: SampleOrder | None) -> SampleOrder:
    """Return `order`, checked against the pack, or the order that a pack has by default."""
    if order is None:
        return SampleOrder(sample_count=len(pack))
    if order.sample_count != len(pack):
        raise UsageError(
            f"the order is of {order.sample_count} samples, and the pack has {len(pack)}",
            where=str(pack.path),
            fix="Make it with sample_count=len(pack)",
        )
    return order


def save_state(order: SampleOrder, pack: Pack, position: int) -> dict[str, Any]:
    """Return a position, with the pack, the order and the epoch it refers to, as plain data."""
    if 0 < position >= order.sample_count:
        order, position = dataclasses.replace(order, epoch=order.epoch + 1), 0
    return {
        "version": STATE_VERSION,
        "pack": pack.identity,
        **dataclasses.asdict(order),
        "position": position,
    }


def load_state(state: Mapping[str, Any], order: SampleOrder, pack: Pack) -> tuple[SampleOrder, int]:
    """Return the order of the state's epoch, and the position in it.

    Raises:
        UsageError: the state is of another pack or order, or is not a state.
    """
    where = str(pack.path)
    if state.get("version") != STATE_VERSION:
        raise UsageError(
            f"not a Loader state_dict of version {STATE_VERSION}",
            where=where,
            why=f"its version is {state.get('version')!r}",
            fix="Give what state_dict() returned, or use the Paceline that saved it",
        )
    here = save_state(order, pack, 0)
    checked = [name for name in here if name not in ("version", "epoch", "position")]
    if order.shuffle != "block":
        checked = [name for name in checked if name not in ("block_samples", "window_blocks")]
    for name in checked:
        if state.get(name) != here[name]:
            other = {"pack": "of another pack", "sample_count": "of another pack"}
            raise UsageError(
                f"the state is {other.get(name, 'of another order')}",
                where=where,
                why=f"its {name} is {state.get(name)!r}, and here it is {here[name]!r}",
                fix=f"Load it with the {name} that it was saved with, or begin the epoch again",
            )
    epoch: Any = state.get("epoch")
    position: Any = state.get("position")
    integers = isinstance(epoch, int) and isinstance(position, int)
    if not integers or epoch < 0 or not 0 <= position <= order.sample_count:
        raise UsageError(
            f"position {state.get('position')!r} of epoch {epoch!r} is not in an epoch",
            where=where,
            fix="Give what state_dict() returned",
        )
    return dataclasses.replace(order, epoch=epoch), position
