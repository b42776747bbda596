"""What a run that tried two values of a setting found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.record import Record

TUNE_NAME = "tune.json"


class TunedPair(NamedTuple):
    """A pair of blocks: the median step of the slowest rank with either value.

    Attributes:
        first_step: of the earlier block.
        first_s: with the first value, seconds.
        second_s: with the second value, seconds.
    """

    first_step: int
    first_s: float
    second_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult(Record):
    """Two values of a setting, tried by turns.

    Attributes:
        setting: its name.
        first: the value that is kept unless the other is better.
        second: the other one.
        verdict: ``first`` or ``second``, which makes steps shorter; ``equal``, no difference that
            is worth a change; ``undecided``, the run ended before; ``stopped``, see `reason`.
        kept: the value after that.
        step: number of the step from which on it was kept; that of the last pair while undecided.
        change: of the step with the second value, a share; below 0 is shorter. None before the
            first look.
        low: of its interval.
        high: of the same.
        p_value: probability of such a difference, or a larger one, between equal values.
        pairs: that were measured.
        reason: why it stopped; empty if it did not.
    """

    setting: str
    first: int
    second: int
    verdict: str
    kept: int
    step: int
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    pairs: tuple[TunedPair, ...] = ()
    reason: str = ""
