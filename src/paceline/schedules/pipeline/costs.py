"""What the stages of a pipeline cost: seconds of their actions for one microbatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.record import Record

if TYPE_CHECKING:
    from paceline.schedules.pipeline.schedule import ActionKind


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCosts(Record):
    """Seconds that each stage takes for one microbatch on its rank.

    Attributes:
        forward_s: by stage.
        backward_s: of a whole backward, by stage.
        backward_input_s: of the gradients of a stage's inputs, by stage; None: half the backward,
            as of a matrix product, whose two gradients are products of the same size.
        backward_weight_s: of the gradients of a stage's parameters, by stage; None: what is left of
            the backward.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...] | None = None
    backward_weight_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for kind in ("backward", "backward_input", "backward_weight"):
            values = getattr(self, f"{kind}_s")
            if values is not None and len(values) != len(self.forward_s):
                raise ConfigError(
                    f"{kind}_s has {len(values)} values for {len(self.forward_s)} stages",
                    where="StageCosts",
                    fix="Give as many as for forward_s",
                )
        for kind, seconds in self.by_kind().items():
            if any(value < 0 for value in seconds):
                raise ConfigError(
                    f"{kind}_s has a value below 0", where="StageCosts", fix="Give seconds"
                )

    @classmethod
    def uniform(cls, stages: int, forward_s: float, backward_s: float) -> StageCosts:
        """Return the costs of stages that are equal."""
        return cls(forward_s=(forward_s,) * stages, backward_s=(backward_s,) * stages)

    def by_kind(self) -> dict[ActionKind, tuple[float, ...]]:
        """Return the seconds of each stage, by kind of action."""
        inputs = self.backward_input_s
        weights = self.backward_weight_s
        if inputs is None:
            if weights is None:
                inputs = tuple(whole / 2 for whole in self.backward_s)
            else:
                inputs = _rest(self.backward_s, weights)
        if weights is None:
            weights = _rest(self.backward_s, inputs)
        return {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "backward_input": inputs,
            "backward_weight": weights,
        }


def _rest(whole: tuple[float, ...], part: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(max(0.0, all_s - part_s) for all_s, part_s in zip(whole, part, strict=True))
