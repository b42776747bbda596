"""The ActionGraph: which action of a PipelineSchedule waits for which, over all ranks.

Checker and replay read the same graph. An arc leads from an action to one that waits for it::

    forward(source)        -> forward(destination)     for each edge: activations
    backward*(destination) -> backward*(source)        for each edge: gradients
    forward(stage)         -> backward*(stage)         the activations that the stage saved
    backward_input(stage)  -> backward_weight(stage)
    each action of a rank  -> the next one in the rank's order; not stored

all for the same microbatch; backward* is ``backward`` or, where it is split, ``backward_input``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import InvalidSchedule
from paceline.schedules.pipeline.schedule import PipelineAction

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.schedules.pipeline.schedule import PipelineSchedule, StageEdge

_ABSENT = -1
_FORWARD, _BACKWARD, _INPUT, _WEIGHT = range(4)
_CODES = {
    "forward": _FORWARD,
    "backward": _BACKWARD,
    "backward_input": _INPUT,
    "backward_weight": _WEIGHT,
}


class Arc(NamedTuple):
    """One action waits for another one's data.

    Attributes:
        after: number of the action that waits.
        bytes: that are sent to it; 0 for data that stay on the stage.
    """

    after: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionGraph:
    """The actions of all ranks, numbered rank by rank in their order, and who waits for whom.

    Attributes:
        actions: by number.
        rank: of each action.
        begins: number of each rank's first action; after the last rank the number of actions.
        arcs: of each action: who waits for its data.
        waits: of each action: for how many others it waits, the one before it on its rank included.
    """

    actions: list[PipelineAction]
    rank: list[int]
    begins: list[int]
    arcs: list[list[Arc]]
    waits: list[int]

    @classmethod
    def of(cls, schedule: PipelineSchedule, edges: Sequence[StageEdge]) -> ActionGraph:
        """Return the graph of a schedule for a model with these edges.

        Raises:
            InvalidSchedule: an action is missing, is there twice, is on another rank than its
                stage, or is not of this model; or an edge is not.
        """
        _check_edges(schedule, edges)
        numbers = _numbers(schedule)
        actions = [action for order in schedule.actions for action in order]
        lengths = [len(order) for order in schedule.actions]
        begins = [0, *np.cumsum(lengths).tolist()]
        graph = cls(
            actions=actions,
            rank=np.repeat(np.arange(schedule.ranks), lengths).tolist(),
            begins=begins,
            arcs=[[] for _ in actions],
            waits=[1] * len(actions),
        )
        for begin, length in zip(begins, lengths, strict=False):
            if length:
                graph.waits[begin] = 0
        graph._connect(numbers, edges)
        return graph

    def _connect(self, numbers: NDArray[np.int64], edges: Sequence[StageEdge]) -> None:
        """Add the arcs for data; `numbers` as `_numbers` returns them."""
        forward, weight = numbers[_FORWARD], numbers[_WEIGHT]
        backward = np.where(numbers[_BACKWARD] == _ABSENT, numbers[_INPUT], numbers[_BACKWARD])
        split = weight != _ABSENT
        self._add(forward.ravel(), backward.ravel(), 0)
        self._add(backward[split], weight[split], 0)
        for source, destination, size in edges:
            self._add(forward[source], forward[destination], size)
            self._add(backward[destination], backward[source], size)

    def _add(self, before: NDArray[np.int64], after: NDArray[np.int64], size: int) -> None:
        for first, second in zip(before.tolist(), after.tolist(), strict=True):
            self.arcs[first].append(Arc(second, size))
            self.waits[second] += 1

    def followers(self, number: int) -> Iterator[int]:
        """Yield who waits for the action: the next one of its rank, and those that use its data."""
        following = number + 1
        if following < len(self.rank) and self.rank[following] == self.rank[number]:
            yield following
        for arc in self.arcs[number]:
            yield arc.after

    def cycle(self) -> list[int]:
        """Return actions each of which waits for the next one, and the last for the first.

        Empty if there is no cycle: then every action can be performed.

        Cost: one pass over all arcs. Source: Kahn, Topological sorting of large networks, CACM
        5(11), 1962.
        """
        waits = list(self.waits)
        ready = [number for number, count in enumerate(waits) if count == 0]
        while ready:
            for follower in self.followers(ready.pop()):
                waits[follower] -= 1
                if waits[follower] == 0:
                    ready.append(follower)
        stuck = {number for number, count in enumerate(waits) if count}
        return self._shortest_cycle(stuck) if stuck else []

    def _shortest_cycle(self, stuck: set[int]) -> list[int]:
        """Return a cycle among actions each of which waits for another one of them."""
        waits_for: dict[int, list[int]] = {number: [] for number in stuck}
        for number in stuck:
            for follower in self.followers(number):
                waits_for[follower].append(number)
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
