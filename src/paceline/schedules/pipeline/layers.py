"""The layers of a model before they are cut into stages: what they cost, and what they exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.record import Record
from paceline.core.workload import LayerEdge
from paceline.schedules.pipeline.costs import StageCosts
from paceline.schedules.pipeline.schedule import StageEdge

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts(Record):
    """What the layers of a model cost, in an order in which data flow to later layers only.

    Attributes:
        forward_s: of one microbatch on a device of speed 1, by layer.
        backward_s: the same of the backward.
        parameter_bytes: of each layer, with all that is kept per parameter: gradients and the
            optimizer's state.
        activation_bytes: that each layer saves for the backward of one microbatch.
        edges: between layers.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    edges: tuple[LayerEdge, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "parameter_bytes", "activation_bytes"):
            values = getattr(self, name)
            if len(values) != self.layers:
                raise ConfigError(
                    f"{name} has {len(values)} values for {self.layers} layers",
                    where="LayerCosts",
                    fix="Give a value for each layer",
                )
            if any(value < 0 for value in values):
                raise ConfigError(
                    f"{name} has a value below 0", where="LayerCosts", fix="Give 0 or more"
                )
        for edge in self.edges:
            ends = (edge.source, *edge.destinations)
            rises = all(edge.source < layer < self.layers for layer in edge.destinations)
            if not (rises and len(ends) > 1 and edge.source >= 0 and edge.bytes >= 0):
                raise ConfigError(
                    f"{edge} does not lead to later layers of {self.layers}",
                    where="LayerCosts",
                    fix="Order the layers so that data flow to later layers only",
                )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.forward_s)


def stage_costs(costs: LayerCosts, cuts: Sequence[int], speeds: Sequence[float] = ()) -> StageCosts:
    """Return the seconds of the stages that `cuts` make, on devices of `speeds`.

    Args:
        costs: of the layers.
        cuts: first layer of each stage but the first.
        speeds: of each stage's device; empty: 1 each.
    """
    begins = [0, *cuts]
    speed = np.asarray(speeds or [1.0] * len(begins))
    return StageCosts(
        forward_s=tuple((np.add.reduceat(costs.forward_s, begins) / speed).tolist()),
        backward_s=tuple((np.add.reduceat(costs.backward_s, begins) / speed).tolist()),
    )


def stage_edges(edges: Sequence[LayerEdge], cuts: Sequence[int]) -> tuple[StageEdge, ...]:
    """Return what the stages that `cuts` make exchange: a tensor is sent once to each stage.

    Args:
        edges: between layers.
        cuts: first layer of each stage but the first.

    Returns:
        An edge for each tensor and stage that uses it, other than the stage that computes it.
    """
    found = []
    for source, destinations, size in edges:
        stages = np.searchsorted(cuts, [source, *destinations], side="right").tolist()
        users = sorted(set(stages[1:]) - {stages[0]})
        found += [StageEdge(stages[0], user, size) for user in users]
    return tuple(found)
