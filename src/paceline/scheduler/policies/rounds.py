"""A policy that acts at fixed intervals only, as the simulators of published schedulers do."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.scheduler.decide import Policy
from paceline.scheduler.events import Event, Timer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action
    from paceline.scheduler.state.state import State


@dataclass(slots=True)
class Rounds:
    """Asks another policy at the multiples of an interval; devices that become free between idle.

    Attributes:
        policy: that decides.
        round_s: the interval.
    """

    policy: Policy
    round_s: float
    _since: list[Event] = field(default_factory=list)  # events since the last round

    @property
    def name(self) -> str:
        """Name of the other policy."""
        return self.policy.name

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield the other policy's actions if a round begins now."""
        self._since.extend(events)
        if state.now_s % self.round_s == 0 or any(isinstance(event, Timer) for event in events):
            of_round, self._since = self._since, []
            yield from self.policy.choose(state, of_round)

    def wake_s(self, state: State) -> float | None:
        """Return the begin of the next round, while there are jobs."""
        if not state.waiting and not state.running:
            return None
        return (math.floor(state.now_s / self.round_s + 1e-9) + 1) * self.round_s
