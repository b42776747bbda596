"""Which rank holds which stage of which replica.

    rank = place in the pipeline x replicas + replica         3 x 2:    0 1 | 2 3 | 4 5

The replicas of a stage are neighbours, so that they share a host where a host has several ranks:
gradients are larger than the activations of a few microbatches, and stay within the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.training.engine.ranks import Ranks, new_group

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(slots=True, eq=False)
class StageMesh:
    """The ranks of a pipeline and its replicas.

    Attributes:
        ranks: all of them.
        rank_of: place in the pipeline of each stage.
        replicas: of the model.
        is_sharded: whether replicas have parts of their stage, and not each the whole of it.
    """

    ranks: Ranks
    rank_of: tuple[int, ...]
    replicas: int
    is_sharded: bool = False
    _groups: dict[tuple[int, ...], Any] = field(default_factory=dict)

    @property
    def place(self) -> int:
        """Place of this rank in its pipeline."""
        return self.ranks.rank // self.replicas

    @property
    def replica(self) -> int:
        """Number of the replica that this rank is part of."""
        return self.ranks.rank % self.replicas

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages that this rank holds."""
        return tuple(n for n, place in enumerate(self.rank_of) if place == self.place)

    @property
    def pipeline(self) -> list[int]:
        """The ranks of this rank's pipeline, by their places."""
        places = self.ranks.size // self.replicas
        return [place * self.replicas + self.replica for place in range(places)]

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks, of all replicas, that hold any of these stages."""
        places = sorted({self.rank_of[stage] for stage in stages})
        return tuple(
            place * self.replicas + replica for place in places for replica in range(self.replicas)
        )

    def column(self, stages: Iterable[int], replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica that hold any of these stages."""
        return self.ranks_of(stages)[replica :: self.replicas]

    def groups(self, wanted: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Return a process group for each set of several ranks; all ranks call this with the same.

        Sets that this rank is not part of have groups that it cannot use.
        """
        for ranks in sorted(wanted):
            if len(ranks) > 1 and ranks not in self._groups:
                self._groups[ranks] = new_group(self.ranks, ranks)
        return self._groups
