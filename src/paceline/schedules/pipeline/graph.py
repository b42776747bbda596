"""The ActionGraph: which action of a PipelineSchedule waits for which, over all ranks.

Checker and replay read the same graph. An arc leads from an action to one that waits for it::

    forward(source)        -> forward(destination)     for each edge: activations
    backward*(destination) -> backward*(source)        for each edge: gradients
    forward(stage)         -> backward*(stage)         the activations that the stage saved
    backward_input(stage)  -> backward_weight(stage)
    each action of a rank  -> the next one in the rank's order

the first four for the same microbatch; backward* is ``backward`` or, where it is split,
``backward_input``. Arcs are kept as columns, in the order of the actions that they leave: there are
some three per action, of which a schedule can have a million.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import InvalidSchedule
from paceline.schedules.pipeline.schedule import PipelineAction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.schedules.pipeline.schedule import PipelineSchedule, StageEdge

_ABSENT = -1
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
_CODES = {
    "forward": _FORWARD,
    "backward": _BACKWARD,
    "backward_input": _INPUT,
    "backward_weight": _WEIGHT,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionGraph:
    """The actions of all ranks, numbered rank by rank in their order, and who waits for whom.

    Attributes:
        actions: by number.
        rank: of each action.
        begins: number of each rank's first action; after the last rank the number of actions.
        first: of each action, its first arc; after the last action the number of arcs.
        before: of each arc, the action that is waited for, in rising order.
        after: of each arc, the action that waits.
        bytes: of each arc, the bytes that are sent; 0 for data that stay on the stage.
    """

    actions: list[PipelineAction]
    rank: NDArray[np.int64]
    begins: list[int]
    first: list[int]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    bytes: NDArray[np.int64]

    @classmethod
    def of(cls, schedule: PipelineSchedule, edges: Sequence[StageEdge]) -> ActionGraph:
        """Return the graph of a schedule for a model with these edges.

        Raises:
            InvalidSchedule: an action is missing, is there twice, is on another rank than its
                stage, or is not of this model; or an edge is not.
        """
        _check_edges(schedule, edges)
        numbers = _numbers(schedule)
        lengths = [len(order) for order in schedule.actions]
        rank = np.repeat(np.arange(schedule.ranks), lengths)
        before, after, sizes = _arcs(numbers, rank, edges)
        order = np.argsort(before, kind="stable")
        counts = np.bincount(before, minlength=len(rank))
        return cls(
            actions=[action for order in schedule.actions for action in order],
            rank=rank,
            begins=[0, *np.cumsum(lengths).tolist()],
            first=[0, *np.cumsum(counts).tolist()],
            before=before[order],
            after=after[order],
            bytes=sizes[order],
        )

    def waits(self) -> list[int]:
        """Return for how many others each action waits."""
        counts: list[int] = np.bincount(self.after, minlength=len(self.actions)).tolist()
        return counts

    def cycle(self) -> list[int]:
        """Return actions each of which waits for the next one, and the last for the first.

        Empty if there is no cycle: then every action can be performed.

        Cost: one pass over all arcs. Source: Kahn, Topological sorting of large networks, CACM
        5(11), 1962.
        """
        waits, after, first = self.waits(), self.after.tolist(), self.first
        ready = [number for number, count in enumerate(waits) if count == 0]
        while ready:
            number = ready.pop()
            for follower in after[first[number] : first[number + 1]]:
                waits[follower] -= 1
                if waits[follower] == 0:
                    ready.append(follower)
        stuck = {number for number, count in enumerate(waits) if count}
        return self._shortest_cycle(stuck) if stuck else []

    def _shortest_cycle(self, stuck: set[int]) -> list[int]:
        """Return a cycle among actions each of which waits for another one of them."""
        waits_for: dict[int, list[int]] = {number: [] for number in stuck}
        for awaited, number in zip(self.before.tolist(), self.after.tolist(), strict=True):
            if awaited in stuck:
                waits_for[number].append(awaited)
        # Whoever follows the waits long enough is on a cycle: there are finitely many actions.
        member = min(stuck)
        seen: set[int] = set()
        while member not in seen:
            seen.add(member)
            member = waits_for[member][0]
        reached_from = {member: member}
        queue = deque([member])
        while True:  # breadth first, until the search is back where it began
            number = queue.popleft()
            for following in waits_for[number]:
                if following == member:
                    return _path(reached_from, member, number)
                if following not in reached_from:
                    reached_from[following] = number
                    queue.append(following)


def _arcs(
    numbers: NDArray[np.int64], rank: NDArray[np.int64], edges: Sequence[StageEdge]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the columns before, after and bytes; `numbers` as `_numbers` returns them."""
    forward, weight = numbers[_FORWARD], numbers[_WEIGHT]
    backward = np.where(numbers[_BACKWARD] == _ABSENT, numbers[_INPUT], numbers[_BACKWARD])
    split = weight != _ABSENT
    table = np.array(edges, np.int64).reshape(-1, 3)
    source, destination = table[:, 0], table[:, 1]
    sent = np.repeat(table[:, 2], forward.shape[1])
    following = np.flatnonzero(rank[1:] == rank[:-1])
    stays = np.zeros(forward.size + int(split.sum()) + len(following), np.int64)
    before = [forward[source], backward[destination], forward, backward[split], following]
    after = [forward[destination], backward[source], backward, weight[split], following + 1]
    return (
        np.concatenate([part.ravel() for part in before]),
        np.concatenate([part.ravel() for part in after]),
        np.concatenate([sent, sent, stays]),
    )


def _path(reached_from: dict[int, int], first: int, last: int) -> list[int]:
    path = [last]
    while path[-1] != first:
        path.append(reached_from[path[-1]])
    return path[::-1]


def describe(action: PipelineAction) -> str:
    """Return an action in words.

    >>> from paceline.schedules.pipeline import PipelineAction
    >>> describe(PipelineAction("backward_input", 1, 0))
    'backward_input of stage 1, microbatch 0'
    """
    return f"{action.kind} of stage {action.stage}, microbatch {action.microbatch}"


def error(
    schedule: PipelineSchedule,
    what: str,
    why: str = "",
    fix: str = "Correct the order, or take one of paceline.schedules.pipeline",
) -> InvalidSchedule:
    """Return the error of a schedule."""
    sizes = f"stages={schedule.stages}, microbatches={schedule.microbatches}"
    return InvalidSchedule(what, where=f"{schedule.name}, {sizes}", why=why, fix=fix)


def _check_edges(schedule: PipelineSchedule, edges: Sequence[StageEdge]) -> None:
    for source, destination, size in edges:
        for stage in (source, destination):
            if not 0 <= stage < schedule.stages:
                raise error(
                    schedule,
                    f"there is no stage {stage}, to which an edge from stage {source} to stage "
                    f"{destination} belongs",
                )
        if size < 0:
            raise error(schedule, f"{size} bytes go from stage {source} to stage {destination}")


def _numbers(schedule: PipelineSchedule) -> NDArray[np.int64]:
    """Return the number of each action, by kind, stage and microbatch; _ABSENT where there is none.

    Raises:
        InvalidSchedule: an action is missing, there twice, on the wrong rank, or unknown.
    """
    stages, microbatches, rank_of = schedule.stages, schedule.microbatches, schedule.rank_of
    numbers = [_ABSENT] * (len(_CODES) * stages * microbatches)
    number = 0
    for rank, order in enumerate(schedule.actions):
        for action in order:
            kind, stage, microbatch = action
            if not (
                kind in _CODES
                and 0 <= stage < stages
                and 0 <= microbatch < microbatches
                and rank_of[stage] == rank
            ):
                raise _misplaced(schedule, rank, action)
            place = (_CODES[kind] * stages + stage) * microbatches + microbatch
            if numbers[place] != _ABSENT:
                raise error(schedule, f"rank {rank} performs {describe(action)} twice")
            numbers[place] = number
            number += 1
    table = np.array(numbers, np.int64).reshape(len(_CODES), stages, microbatches)
    _check_all_there(schedule, table != _ABSENT)
    return table


def _misplaced(schedule: PipelineSchedule, rank: int, action: PipelineAction) -> InvalidSchedule:
    """Return the error of an action that the rank cannot perform."""
    performs = f"rank {rank} performs {describe(action)}"
    if action.kind not in _CODES:
        return error(schedule, f"{performs}: there is no such kind of action")
    if not 0 <= action.stage < schedule.stages:
        return error(schedule, f"{performs}: there is no such stage")
    if not 0 <= action.microbatch < schedule.microbatches:
        return error(schedule, f"{performs}: there is no such microbatch")
    return error(schedule, f"{performs}: the stage is on rank {schedule.rank_of[action.stage]}")


def _check_all_there(schedule: PipelineSchedule, there: NDArray[np.bool_]) -> None:
    """Refuse missing actions; `there` by kind, stage and microbatch."""
    forward, backward, inputs, weight = there
    for missing, what in (
        (~forward, "has no forward"),
        (~(backward | inputs | weight), "has no backward"),
        (backward & (inputs | weight), "has a whole backward and a part of it"),
        (inputs & ~weight, "has a backward_input but no backward_weight"),
        (weight & ~inputs, "has a backward_weight but no backward_input"),
    ):
        if missing.any():
            stage, microbatch = np.argwhere(missing)[0].tolist()
            rank = schedule.rank_of[stage]
            raise error(schedule, f"rank {rank}: stage {stage}, microbatch {microbatch} {what}")
