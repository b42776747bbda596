"""Who is there, who holds what, and what this node has to copy because of it. Pure.

::

    Heard(node, held) --.                            .--> CopyShard(shard, holders), without holders
    Silent(node) -------+--> Membership.handle(now) -+        from the source
    TimePassed ---------'                            '--> DropShard(shard)

A node that stays silent for `grace_s` is lost: its shards are placed on the others, who copy what
they lack from the replicas, or from the source. When it is heard again, or a new node is heard
for the first time, it gets its share back. Nothing is read from the source before all peers were
heard, or were silent for `grace_s`: one of them may hold it. A copy that is no longer placed here
is dropped only when all owners by placement hold the shard: at no time are there fewer copies than
before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.store.serve.placement import NodePlacement, place


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A node answered, and said what it holds."""

    node: str
    held: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Silent:
    """A node did not answer, or refused a connection."""

    node: str


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Time has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyShard:
    """This node has to get a shard from one of these nodes, or without any, from the source."""

    shard: int
    holders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DropShard:
    """This node need not hold a shard any longer."""

    shard: int


Event = Heard | Silent | TimePassed
Action = CopyShard | DropShard


@dataclass(kw_only=True)
class _Peer:
    held: frozenset[int] = frozenset()
    silent_since_s: float | None = None  # None: it answered last time
    is_lost: bool = False
    was_heard: bool = False


@dataclass(kw_only=True)
class Membership:
    """The view of one node, or of a client, which holds nothing.

    Args:
        self_name: of this node; "" of a client.
        peers: names of the other nodes.
        shard_count: of the pack.
        replicas: copies of each shard.
        grace_s: silence after which a node is lost.
        everywhere: shards that all nodes hold.
        start_s: silence after which a node that was never heard is lost, if that is longer: nodes
            of a job do not start at the same time.
    """

    self_name: str
    peers: Collection[str]
    shard_count: int
    replicas: int
    grace_s: float = 10.0
    everywhere: frozenset[int] = frozenset()
    start_s: float = 0.0
    held: set[int] = field(default_factory=set)  # by this node; the shell keeps it up to date
    _peers: dict[str, _Peer] = field(init=False)
    _placement: NodePlacement = field(init=False)
    _holders: dict[int, list[str]] = field(default_factory=dict, init=False)  # until news come

    def __post_init__(self) -> None:
        self._peers = {name: _Peer() for name in self.peers}
        self._placement = self._place()

    @property
    def placement(self) -> NodePlacement:
        """Where shards lie, of the nodes that are not lost."""
        return self._placement

    def live(self) -> list[str]:
        """Return the other nodes that are not lost."""
        return [name for name, peer in self._peers.items() if not peer.is_lost]

    def unsure(self) -> list[str]:
        """Return the other nodes that are not lost, and were not heard yet or not last time."""
        return [
            name
            for name, peer in self._peers.items()
            if not peer.is_lost and (not peer.was_heard or peer.silent_since_s is not None)
        ]

    def heard(self) -> list[str]:
        """Return the other nodes that have answered and are not lost."""
        return [name for name, peer in self._peers.items() if peer.was_heard and not peer.is_lost]

    def is_silent(self, node: str) -> bool:
        """Return whether a node did not answer when it was last asked."""
        return self._peers[node].silent_since_s is not None

    def holders(self, shard: int) -> list[str]:
        """Return the other nodes to read a shard from, the best first.

        First those that said they hold it, in the order of placement; then owners that were never
        heard. Nodes that are silent come last: they may be back.
        """
        found = self._holders.get(shard)
        if found is None:
            found = self._holders[shard] = self._find_holders(shard)
        return found

    def _find_holders(self, shard: int) -> list[str]:
        owners = self._placement.owners_of(shard)
        order = [*owners, *(name for name in list(self._peers) if name not in owners)]
        known = [name for name in order if name in self._peers and not self._peers[name].is_lost]
        holding = [name for name in known if shard in self._peers[name].held]
        unheard = [name for name in known if name in owners and not self._peers[name].was_heard]
        return sorted([*holding, *unheard], key=self.is_silent)

    def is_lost(self, node: str) -> bool:
        """Return whether a node was silent for too long."""
        return self._peers[node].is_lost

    def owners(self, shard: int) -> list[str]:
        """Return the other nodes that a shard is placed on, the first owner first."""
        return [name for name in self._placement.owners_of(shard) if name in self._peers]

    def holds_all(self, node: str) -> bool:
        """Return whether a node said that it holds every shard."""
        return len(self._peers[node].held) == self.shard_count

    def add(self, node: str) -> None:
        """Take a node as a member that was not heard yet."""
        self._peers.setdefault(node, _Peer())
        self._placement = self._place()
        self._holders.clear()

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take note of an event; return what this node has to do now."""
        self.note(event, now_s)
        return self._actions(now_s) if self.self_name else []

    def note(self, event: Event, now_s: float) -> None:
        """Take note of an event, one of many: what to do is asked for after the last one."""
        self._holders.clear()
        if isinstance(event, TimePassed):
            changed = [self._lose_if_due(peer, now_s) for peer in self._peers.values()]
            is_changed = any(changed)
        elif isinstance(event, Heard):
            is_changed = event.node not in self._peers or self._peers[event.node].is_lost
            peer = self._peers.setdefault(event.node, _Peer())
            peer.held, peer.silent_since_s = event.held, None
            peer.is_lost, peer.was_heard = False, True
        elif event.node in self._peers:
            peer = self._peers[event.node]
            if peer.silent_since_s is None:
                peer.silent_since_s = now_s
            is_changed = self._lose_if_due(peer, now_s)
        else:
            is_changed = False
        if is_changed:
            self._placement = self._place()

    def note_held(self, node: str, shard: int) -> None:
        """Take note that a node sent bytes of a shard."""
        peer = self._peers[node]
        peer.held, peer.was_heard = peer.held | {shard}, True
        self._holders.clear()

    def forget(self, node: str, shard: int) -> None:
        """Take note that a node said it does not hold a shard."""
        peer = self._peers[node]
        peer.held, peer.was_heard = peer.held - {shard}, True
        self._holders.clear()

    def _lose_if_due(self, peer: _Peer, now_s: float) -> bool:
        """Give a peer up that was silent for too long; return whether it was still there."""
        since_s = peer.silent_since_s
        grace_s = self.grace_s if peer.was_heard else max(self.grace_s, self.start_s)
        if peer.is_lost or since_s is None or now_s - since_s < grace_s:
            return False
        peer.is_lost, peer.held = True, frozenset()
        return True

    def _place(self) -> NodePlacement:
        names = {name for name, peer in self._peers.items() if not peer.is_lost}
        names |= {self.self_name} - {""}
        if not names:  # a client that lost all nodes: any of them may come back
            names = set(self._peers)
        if hasattr(self, "_placement") and names == set(self._placement.nodes):
            return self._placement
        return place(names, self.shard_count, self.replicas, self.everywhere)

    def _actions(self, now_s: float) -> list[Action]:
        mine = set(self._placement.shards_of(self.self_name).tolist())
        copies = [
            CopyShard(shard=shard, holders=tuple(self._live_holders(shard)))
            for shard in sorted(mine - self.held)
        ]
        if any(self._may_hold(peer, now_s) for peer in self._peers.values()):
            copies = [copy for copy in copies if copy.holders]
        drops = [
            DropShard(shard=shard) for shard in sorted(self.held - mine) if self._owners_hold(shard)
        ]
        return [*copies, *drops]

    def _may_hold(self, peer: _Peer, now_s: float) -> bool:
        """Return whether a peer was not heard yet, but may be soon, and hold what seems to lack."""
        since_s = peer.silent_since_s
        is_silent = since_s is not None and now_s - since_s >= self.grace_s
        return not peer.was_heard and not is_silent

    def _live_holders(self, shard: int) -> list[str]:
        """Return who is known to hold it; until all owners were heard, they may."""
        return [
            name
            for name in self.holders(shard)
            if shard in self._peers[name].held and not self.is_silent(name)
        ]

    def _owners_hold(self, shard: int) -> bool:
        owners = self._placement.owners_of(shard)
        return all(
            shard in self._peers[name].held and not self.is_silent(name)
            for name in owners
            if name != self.self_name
        )
