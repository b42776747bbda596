"""Replays the programs of ranks, each until it has to wait: a message wakes one, a meeting all.

A rank's clock only goes on, so the order in which ranks are taken does not change what happens:
each message arrives, and each meeting is complete, at a time that depends on programs alone. A link
between two ranks carries one message after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import InvalidSchedule
from paceline.core.randomness import make_generator
from paceline.perf.simulator.actors import Actors
from paceline.perf.simulator.disturbances import Disturbances
from paceline.perf.simulator.program import OperationKind, RankOperation

if TYPE_CHECKING:
    from collections.abc import Iterator


_COMPUTE, _SEND, _RECEIVE, _LAYERS, _REPLICAS, _LOAD, _FETCH = OperationKind
_DRAWN_AT_ONCE = 4096


class Happening(NamedTuple):
    """What a rank did or waited for.

    Attributes:
        operation: of its program.
        step: number, from 0.
        begin_s: when it began, or began to wait.
        ready_s: when the others were there, or the message was sent.
        end_s: when it went on.
    """

    operation: RankOperation
    step: int
    begin_s: float
    ready_s: float
    end_s: float


@dataclass(slots=True)
class ReplayedRanks:
    """What was replayed, by actor.

    Attributes:
        ends_s: when each step of each actor ended; shape (actors, steps).
        happenings: of each actor, in order; empty unless recorded.
    """

    ends_s: np.ndarray
    happenings: list[list[Happening]]


@dataclass(slots=True)
class _OpenCollective:
    latest_s: float = 0.0
    there: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RankReplay:
    """The state of a replay.

    Attributes:
        actors: who is replayed.
        programs: of each pipeline rank.
        disturbances: what goes wrong.
        steps: how many.
        records: whether to keep what happened.
    """

    actors: Actors
    programs: Sequence[tuple[RankOperation, ...]]
    disturbances: Disturbances
    steps: int
    records: bool = False
    _clock: list[float] = field(init=False)
    _at: list[int] = field(init=False)
    _step: list[int] = field(init=False)
    _loaded_s: list[float] = field(init=False)  # when each actor's next batch is made
    _factor: list[float] = field(init=False)
    _outages: list[tuple[tuple[float, float], ...]] = field(init=False)
    _arrivals: dict[tuple[object, ...], tuple[float, float]] = field(default_factory=dict)
    _awaited: dict[int, tuple[object, ...]] = field(default_factory=dict)
    _meetings: dict[tuple[int, int, int, int], _OpenCollective] = field(default_factory=dict)
    _link_free_s: dict[tuple[int, int], float] = field(default_factory=dict)
    _ready: deque[int] = field(init=False)
    _found: ReplayedRanks = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.actors.ranks)
        self._clock, self._at, self._step = [0.0] * count, [0] * count, [0] * count
        self._loaded_s = [0.0] * count
        self._factor = [self.disturbances.factor_of(rank) for rank in self.actors.ranks]
        self._outages = [self.disturbances.outages_of(rank) for rank in self.actors.ranks]
        self._ready = deque(range(count))
        self._found = ReplayedRanks(np.zeros((count, self.steps)), [[] for _ in range(count)])

    def run(self) -> ReplayedRanks:
        """Replay all steps.

        Raises:
            InvalidSchedule: ranks wait for each other.
        """
        jitter = self._jitter()
        while self._ready:
            self._go_on(self._ready.popleft(), jitter)
        waiting = [actor for actor, step in enumerate(self._step) if step < self.steps]
        if waiting:
            first = waiting[0]
            operation = self.programs[self.actors.stages[first]][self._at[first]]
            raise InvalidSchedule(
                f"{len(waiting)} ranks wait for each other",
                where=f"rank {self.actors.ranks[first]}, {operation.kind.name.lower()}",
                fix="Report this plan: its order has a cycle",
            )
        return self._found

    def _jitter(self) -> Iterator[float]:
        """Yield the factor of each pass."""
        if not self.disturbances.jitter:
            while True:
                yield 1.0
        random = make_generator(self.disturbances.seed, "simulated passes")
        spread = float(np.sqrt(np.log1p(self.disturbances.jitter**2)))
        while True:
            yield from random.lognormal(-(spread**2) / 2, spread, _DRAWN_AT_ONCE).tolist()

    def _go_on(self, actor: int, jitter: Iterator[float]) -> None:
        """Perform an actor's operations until it has to wait, or has ended."""
        program = self.programs[self.actors.stages[actor]]
        factor = self._factor[actor]
        at, now_s = self._at[actor], self._clock[actor]
        while True:
            if at == len(program):
                self._found.ends_s[actor, self._step[actor]] = now_s
                self._step[actor] += 1
                at = 0
                if self._step[actor] == self.steps:
                    break
            operation = program[at]
            kind = operation.kind
            if kind in (_COMPUTE, _LOAD):
                end_s = now_s + operation.seconds * factor * next(jitter)
                if self.records:
                    self._record(actor, operation, now_s, now_s, end_s)
                now_s = end_s
            elif kind == _FETCH:
                now_s = self._fetch(actor, operation, now_s)
            elif kind == _SEND:
                self._send(actor, operation, now_s)
            elif kind == _RECEIVE:
                key = actor, operation.action, self._step[actor]
                arrival = self._arrivals.pop(key, None)
                if arrival is None:
                    self._awaited[actor] = key
                    break
                sent_s, arrived_s = arrival
                end_s = max(now_s, arrived_s)
                if self.records:
                    self._record(actor, operation, now_s, min(sent_s, end_s), end_s)
                now_s = end_s
            else:
                self._at[actor], self._clock[actor] = at, now_s
                met_s = self._meet(actor, operation)
                if met_s is None:
                    return
                now_s = met_s
            at += 1
        self._at[actor], self._clock[actor] = at, now_s

    def _fetch(self, actor: int, operation: RankOperation, now_s: float) -> float:
        """Return when the actor has its batch; the loaders then have room to begin another one.

        They are a batch ahead: the first one is there when the first step begins.
        """
        end_s = max(now_s, self._loaded_s[actor])
        if self.records:
            self._record(actor, operation, now_s, end_s, end_s)
        self._loaded_s[actor] = max(now_s, self._loaded_s[actor]) + operation.seconds
        return end_s

    def _send(self, actor: int, operation: RankOperation, now_s: float) -> None:
        peer = self.actors.peers[actor][operation.peer]
        link = actor, peer
        begin_s = max(now_s, self._link_free_s.get(link, 0.0))
        begin_s = self._after_outages(peer, self._after_outages(actor, begin_s))
        arrival_s = begin_s + operation.seconds
        self._link_free_s[link] = arrival_s
        key = peer, operation.action, self._step[actor]
        self._arrivals[key] = now_s, arrival_s
        if self.records:
            self._record(actor, operation, now_s, begin_s, now_s)
        if self._awaited.get(peer) == key:
            del self._awaited[peer]
            self._ready.append(peer)

    def _meet(self, actor: int, operation: RankOperation) -> float | None:
        """Return when a meeting ends; None if others are missing, who will wake the actor."""
        is_layers = operation.kind == _LAYERS
        groups, sizes = (
            (self.actors.layers, self.actors.layers_sizes)
            if is_layers
            else (self.actors.replicas, self.actors.replicas_sizes)
        )
        group = groups[actor]
        key = int(operation.kind), group, self._step[actor], self._at[actor]
        meeting = self._meetings.setdefault(key, _OpenCollective())
        meeting.there.append(actor)
        meeting.latest_s = max(meeting.latest_s, self._clock[actor])
        if len(meeting.there) < sizes[group]:
            return None
        del self._meetings[key]
        begin_s = meeting.latest_s
        for other in meeting.there:
            if self._outages[other]:
                begin_s = self._after_outages(other, begin_s)
        end_s = begin_s + operation.seconds
        for other in meeting.there:
            if self.records:
                self._record(other, operation, self._clock[other], meeting.latest_s, end_s)
            if other != actor:
                self._clock[other] = end_s
                self._at[other] += 1
                self._ready.append(other)
        return end_s

    def _after_outages(self, actor: int, begin_s: float) -> float:
        for start_s, end_s in self._outages[actor]:
            if start_s <= begin_s < end_s:
                begin_s = end_s
        return begin_s

    def _record(
        self, actor: int, operation: RankOperation, begin_s: float, ready_s: float, end_s: float
    ) -> None:
        happening = Happening(operation, self._step[actor], begin_s, ready_s, end_s)
        self._found.happenings[actor].append(happening)
