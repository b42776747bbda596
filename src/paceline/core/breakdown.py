"""Where the seconds of a step or a run went, for predictions and measurements alike."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown(Record):
    """Seconds by phase. The phases exclude each other, so they add up to wall time.

    Attributes:
        input: the training loop waits for data.
        copy: between host and device, and offload.
        compilation: torch.compile makes code of the model's functions.
        forward: model and loss.
        backward: gradients, without the communication that is left exposed.
        optimizer: the update, and clearing gradients.
        transfer: inside a collective, data moving.
        waiting: inside a collective, for ranks that are not there yet.
        checkpoint: writing state.
        evaluation: forward passes without training, with the input and the metrics between them.
        host: the script's own work between phases that has a name, for example logging.
        other: all else.
    """

    input: float = 0.0
    copy: float = 0.0
    compilation: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    optimizer: float = 0.0
    transfer: float = 0.0
    waiting: float = 0.0
    checkpoint: float = 0.0
    evaluation: float = 0.0
    host: float = 0.0
    other: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all phases together."""
        return sum(seconds for _, seconds in self.items())

    def items(self) -> Iterator[tuple[str, float]]:
        """Yield each phase's name and seconds, in the order of a step."""
        for name in PHASES:
            yield name, getattr(self, name)

    @staticmethod
    def mean(breakdowns: Collection[Breakdown]) -> Breakdown:
        """Return the mean of each phase; 0 where there is nothing to take it of."""
        return sum(breakdowns, Breakdown()).scaled(1 / max(1, len(breakdowns)))

    def scaled(self, factor: float) -> Breakdown:
        """Return each phase times `factor`."""
        return Breakdown(**{name: seconds * factor for name, seconds in self.items()})

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(**{name: getattr(self, name) + getattr(other, name) for name in PHASES})


PHASES: tuple[str, ...] = tuple(field.name for field in fields(Breakdown))
