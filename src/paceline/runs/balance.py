"""What rebalancing did in a run: ``RUN/balance.jsonl``, ``slow_nodes.json``, and the summary.

Rank 0 writes an action when it is taken, with the figures that it rests on, and later what it
brought; the launcher puts the summary into ``result.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigError
from paceline.core.record import Record

if TYPE_CHECKING:
    from pathlib import Path

ACTIONS_NAME = "balance.jsonl"  # an action a line
SLOW_NODES_NAME = "slow_nodes.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceAction(Record):
    """A finding or a change of the ranks' shares of a batch; lists have a value for each rank.

    Attributes:
        kind: ``found`` (a rank is slower than the others), ``rebalanced`` (shares changed),
            ``measured`` (what the change brought), ``undone`` (it made steps longer), ``restored``
            (shares of before, or those that were asked for, are in force from the start).
        step: batches that each rank had got when it was decided.
        from_step: the first batch with the new shares.
        rank: the slowest, by the seconds that it takes for a sample.
        ratio: that time, compared with the median of the other ranks'.
        cause: where most of its extra time goes, as `paceline.trace.analysis.causes` names it.
        busy_s: median seconds of a step from the end of one exchange of gradients to the time at
            which all gradients of the next are there, without waiting for other ranks.
        samples: of a batch, before.
        new_samples: of a batch, after.
        step_s: median seconds of a step, before.
        predicted_step_s: seconds of a step that the change was expected to bring.
        measured_step_s: median seconds of a step after it; 0 if not measured.
    """

    kind: Literal["found", "rebalanced", "measured", "undone", "restored"]
    step: int
    from_step: int = 0
    rank: int = 0
    ratio: float = 1.0
    cause: str = ""
    busy_s: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()
    new_samples: tuple[int, ...] = ()
    step_s: float = 0.0
    predicted_step_s: float = 0.0
    measured_step_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowNode(Record):
    """A rank that stays slower than the others, and where it runs.

    Attributes:
        host: name of its node.
        rank: the global rank.
        ratio: the time that it takes for a sample, compared with the median of the other ranks'.
        cause: where most of its extra time goes; empty if that is not known.
        since_step: batches that it had got when it was found.
    """

    host: str
    rank: int
    ratio: float
    cause: str
    since_step: int

    @property
    def sentence(self) -> str:
        """What a scheduler's log should say: one line that a program can read."""
        return (
            f"slow node: host={self.host} rank={self.rank} ratio={self.ratio:.2f} "
            f"cause={self.cause or 'unknown'} since_step={self.since_step}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowNodes(Record):
    """The slow nodes of a run, as ``slow_nodes.json`` has them while the run goes on."""

    nodes: tuple[SlowNode, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance(Record):
    """What rebalancing came to in a run.

    Attributes:
        samples: of each rank in a batch at the end; empty where no loader could be rebalanced.
        actions: in their order.
        slow_nodes: that were slow at the end.
    """

    samples: tuple[int, ...] = ()
    actions: tuple[BalanceAction, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()


def read_balance(run: Path) -> Balance | None:
    """Return what rebalancing did in the run of a folder; None if it was not asked for.

    A last line that is not whole, of a rank that was killed, is left out.

    Raises:
        ConfigError: a file is damaged.
    """
    try:
        lines = (run / ACTIONS_NAME).read_text().splitlines()
    except FileNotFoundError:
        return None
    actions = []
    for number, line in enumerate(lines):
        try:
            actions.append(
                BalanceAction.from_text(line, where=f"{run / ACTIONS_NAME}:{number + 1}")
            )
        except ConfigError:
            if number < len(lines) - 1:
                raise
    samples = next((done.new_samples for done in reversed(actions) if done.new_samples), ())
    return Balance(samples=samples, actions=tuple(actions), slow_nodes=_slow_nodes(run))


def _slow_nodes(run: Path) -> tuple[SlowNode, ...]:
    path = run / SLOW_NODES_NAME
    try:
        return SlowNodes.from_json(json.loads(path.read_bytes()), where=str(path)).nodes
    except (FileNotFoundError, ValueError):  # written whole, so only a disk's fault damages it
        return ()
