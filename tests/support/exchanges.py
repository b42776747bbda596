"""Plays ranks that compute and exchange data, with known costs, and makes their traces.

The reference for what replays a trace: a change of costs is played again, and must give the time
that the replay of the first trace predicts.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline.trace.format.events import COMMUNICATION, Kind
from support.traces import Event

GROUP = "group default"
START_NS = 10**12


class Work(NamedTuple):
    """A rank computes in a phase."""

    rank: int
    ns: int
    kind: Kind = Kind.FORWARD


class Message(NamedTuple):
    """A rank sends to another one, which waits; the sender goes on."""

    source: int
    target: int
    ns: int  # from the send to the arrival
    amount: int = 1000


class Collective(NamedTuple):
    """All ranks take part, and wait for the others or for the root."""

    operation: str
    ns: int  # from when the data can move
    root: int = -1
    amount: int = 4000


class EndOfStep(NamedTuple):
    """Each rank ends its step."""


def play(ranks, actions, *, moves=1.0):
    """Return the ranks' events, and the time from the first begin to the last end in nanoseconds.

    Args:
        ranks: how many.
        actions: in an order in which no rank waits for a later action.
        moves: factor of all times in which data move.
    """
    players = [_Player(rank, ranks) for rank in range(ranks)]
    for action in actions:
        if isinstance(action, Work):
            players[action.rank].work(action)
        elif isinstance(action, Message):
            _deliver(players, action, round(action.ns * moves))
        elif isinstance(action, Collective):
            _meet(players, action, round(action.ns * moves))
        else:
            for player in players:
                player.end_step()
    wall_ns = max(player.now for player in players) - START_NS
    return [player.events for player in players], wall_ns


class _Player:
    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks
        self.now = self.step_begin = START_NS
        self.step = self.collectives = 0
        self.messages = {}
        self.events = []

    def work(self, action):
        begin, self.now = self.now, self.now + action.ns
        self.events.append(Event(action.kind, begin, self.now, "work", self.step))

    def end_step(self):
        self.events.append(Event(Kind.STEP, self.step_begin, self.now, "step", self.step))
        self.step_begin, self.step = self.now, self.step + 1

    def number(self, source, target):
        key = source, target
        self.messages[key] = self.messages.get(key, 0) + 1
        return self.messages[key]

    def record(self, kind, name, span, **fields):
        lane = MAIN_LANE if kind == Kind.WAIT else COMMUNICATION
        members = tuple(range(self.ranks))
        self.events.append(
            Event(
                kind, *span, name, self.step, group=GROUP, members=members, location=lane, **fields
            )
        )


MAIN_LANE = 0


def _deliver(players, action, ns):
    source, target = players[action.source], players[action.target]
    number = source.number(action.source, action.target)
    assert target.number(action.source, action.target) == number
    sent = source.now
    place = {"sequence": number, "amount": action.amount}
    source.record(Kind.SEND, "send", (sent, sent), peer=action.target, **place)
    begin, target.now = target.now, max(target.now, sent + ns)
    span = begin, target.now
    target.record(Kind.RECV, "recv", span, peer=action.source, **place)
    target.record(Kind.WAIT, "recv", span, peer=action.source, sequence=number)


def _meet(players, action, ns):
    entered = [player.now for player in players]
    for player in players:
        own = entered[player.rank]
        others = [max(entered)]
        if action.operation == "broadcast":
            others = [own if player.rank == action.root else entered[action.root]]
        if action.operation == "reduce":
            others = [max(entered) if player.rank == action.root else own]
        player.now = max(own, *others) + ns
        player.collectives += 1
        place = {"sequence": player.collectives, "peer": action.root}
        span = own, player.now
        player.record(Kind.COLLECTIVE, action.operation, span, amount=action.amount, **place)
        player.record(Kind.WAIT, action.operation, span, **place)
