"""The core of the scheduler: events change the state, the policy answers with actions.

    decide(policy, state, events) -> decisions        no clock, no input or output, no randomness

The simulator, the local executor and the tests call this function and nothing else, so what was
simulated is what runs. Each decision carries a digest of everything that came before it, so that a
replay of the events can be compared with the log, decision by decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from paceline.core.record import Record
from paceline.scheduler.events import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Event
    from paceline.scheduler.state.state import State


class Policy(Protocol):
    """Chooses what runs where."""

    @property
    def name(self) -> str:
        """Name, as users give it."""

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield actions, one by one; the state has changed by each when the next is asked for.

        Args:
            state: may be read, never changed. Events have changed it already.
            events: of this instant.
        """

    def wake_s(self, state: State) -> float | None:
        """Return the time at which to be asked again although nothing happened, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision(Record):
    """One action, when and why.

    Attributes:
        at_s: time of the events that it answers.
        inputs: digest of all events and actions before it.
        action: with its reason and the best rejected alternative.
    """

    at_s: float
    inputs: str
    action: Action


def decide(policy: Policy, state: State, events: Sequence[Event]) -> list[Decision]:
    """Apply the events of one instant, and return and apply the policy's answer.

    Args:
        policy: asked once, after all events.
        state: changed in place.
        events: in order, all of one time.
    """
    for event in events:
        state.apply(event)
    decisions = []
    for action in policy.choose(state, events):
        decisions.append(Decision(at_s=state.now_s, inputs=state.inputs, action=action))
        state.act(action)
    return decisions
