"""The server of a node: a thin shell around membership and staging, over TCP.

Bytes are served by threads of the core (peer_server.hpp). One thread here asks the peers what they
hold, some of them every `beat_s`, and lets the state machines say what to copy and drop; between
the beats it takes note of copies that have ended, and of shards that readers asked for and that are
not here yet: these are copied first. A shard is served once it lies complete, and with the digest
of the index, in local storage.

A node that asks says its name, and a card names the peers of a node. So one peer that is up is
enough to join: the others hear of the new node, and give it its share.
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
import logging
import math
import os
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError, RankLost, UsageError, storage_errors
from paceline.core.processes import allow_descriptors
from paceline.core.token import find_token
from paceline.native import PeerServer, PeerStats
from paceline.store.read.pack import open_packed
from paceline.store.serve.card import NodeAddress, NodeCard, NodeLoad, digest, host_identity
from paceline.store.serve.links import encryption, tcp_connector
from paceline.store.serve.local_shards import LocalShards
from paceline.store.serve.membership import (
    Action,
    CopyShard,
    DropShard,
    Event,
    Heard,
    Membership,
    Silent,
    TimePassed,
)
from paceline.store.serve.shard_copier import ShardCopier
from paceline.store.serve.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from paceline.core.clock import Clock
    from paceline.store.read.pack import Pack
    from paceline.store.serve.links import NodeLink

_LOG = logging.getLogger(__name__)
_AT_ONCE = 2  # copies
_ASKED_AT_ONCE = 8  # peers
_ASKED_PER_BEAT = 64  # peers that answered last time: how many there are costs nothing more
_DESCRIPTORS = 20_000  # of connections, or as many as the system allows

_LOOK_AGAIN_S = 60.0  # at a shard that readers say is damaged
_TICK_S = 0.05  # between two looks at copies that are under way


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """How a node serves.

    Attributes:
        listen: address to listen on; also the node's name, by which its peers know it.
        peers: addresses of the other nodes.
        local: folder on local storage for this node's shards; None: serve all from the pack.
        replicas: copies of each shard, the same on all nodes.
        everywhere: patterns of sample names, as `fnmatch` has them: all nodes hold the shards of
            these samples; the same on all nodes.
        token: the same for all nodes and their clients; empty: the user's (`core.token`).
        tls: whether to encrypt what travels, with a key that follows from the token.
        source_bytes_per_s: limit for reading from the pack; 0: none.
        threads: that send.
        name: by which peers know this node, if that is not the address it listens on.
        listener: descriptor of a socket that listens at `listen` already; -1: none.
        beat_s: between two questions to each peer.
        grace_s: silence after which a peer is lost.
        start_s: silence after which a peer that was never heard is.
        wait_s: for an answer of a peer.
    """

    listen: NodeAddress
    peers: tuple[NodeAddress, ...] = ()
    local: Path | None = None
    replicas: int = 1
    everywhere: tuple[str, ...] = ()
    token: str = ""
    tls: bool = False
    source_bytes_per_s: float = 0.0
    threads: int = 1
    name: str = ""
    listener: int = -1
    beat_s: float = 1.0
    grace_s: float = 10.0
    start_s: float = 60.0
    wait_s: float = 5.0

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.listen.host)
        except ValueError:
            raise UsageError(
                f"cannot listen on {self.listen.host!a}",
                where=str(self.listen),
                why="it is not a numeric address",
                fix="Give the address of an interface, for example 127.0.0.1 or 10.0.0.7",
            ) from None
        if self.peers and self.local is None:
            raise UsageError(
                "a node with peers needs local storage for its shards",
                where=str(self.listen),
                fix="Give --local FOLDER",
            )


class StoreNode:
    """One node, from `start` to `close`.

    Args:
        pack: the whole pack, which is the source.
        options: everything else.
        clock: for beats and limits.
    """

    def __init__(
        self, pack: str | os.PathLike[str], options: NodeOptions, clock: Clock | None = None
    ) -> None:
        self.options = options
        self._token = options.token or find_token()
        self.pack = open_packed(pack, index_only=options.local is not None)
        self._clock: Clock = clock or SystemClock()
        self._lengths = [int(length) for length in self.pack.index.shard_lengths]
        everywhere = shards_of(self.pack, options.everywhere)
        self.shards = LocalShards(options.local or self.pack.path, self.pack)
        if options.local is not None:
            self.shards.open()
        try:
            self.server = self._listen()
        except PacelineError:
            self.shards.close()
            raise
        address = NodeAddress(host=options.listen.host, port=self.server.port)
        self.name = options.name or str(address)
        self._connect = tcp_connector(self.pack.identity, self._token, tls=options.tls)
        self._links: dict[str, NodeLink] = {}
        self.members = Membership(
            self_name=self.name,
            peers=(),
            shard_count=len(self._lengths),
            replicas=options.replicas,
            everywhere=everywhere,
            grace_s=options.grace_s,
            start_s=options.start_s,
        )
        self.staging = Staging(
            self_name=self.name,
            shard_bytes=self._lengths,
            source_bytes_per_s=options.source_bytes_per_s,
            at_once=_AT_ONCE,
        )
        self.copier = ShardCopier(
            self.pack,
            self.shards,
            self._links.__getitem__,
            options.wait_s,
            _AT_ONCE,
            self._on_copied,
        )
        self._missed = self._failed_copies = 0
        self._turn = 0  # which peer to ask next
        self._asked: set[int] = set()  # shards that readers here want
        self._suspects: set[int] = set()  # shards here that readers of this node got damaged
        self._looked_s: dict[int, float] = {}  # when a shard was last looked at, on a reader's word
        self._looks: dict[int, Future[bool]] = {}  # that are under way
        self._refused: set[str] = set()  # peers that refuse this node
        self._stop = threading.Event()
        self._problem: Exception | None = None  # that ended the thread
        self._askers = ThreadPoolExecutor(_ASKED_AT_ONCE, "paceline-ask")
        self._beats: threading.Thread | None = None
        self.join(map(str, options.peers))
        self._take_what_is_here()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def start(self) -> None:
        """Begin to stage and to follow the peers, in a thread."""
        self._beats = threading.Thread(target=self._follow, name="paceline-node", daemon=True)
        self._beats.start()

    @property
    def source_bytes(self) -> int:
        """Bytes read from the source so far."""
        return self.copier.source_bytes

    def join(self, peers: Iterable[str]) -> None:
        """Take these nodes as peers, too: addresses as `NodeAddress.parse` reads them."""
        for name in peers:
            if name not in self._links and name != self.name:
                self._links[name] = self._connect(name)
                self.members.add(name)

    def link(self, name: str) -> NodeLink:
        """Return the way to a peer."""
        return self._links[name]

    def ask(self, shard: int) -> None:
        """Have a shard copied before others, if it is this node's to copy; from any thread."""
        self._asked.add(shard)

    def note_damaged(self, place: str, shard: int) -> None:
        """Take note that a shard was read damaged from a node, or from this one; any thread."""
        if place == self.name:
            self._suspects.add(shard)
            return

        def tell() -> None:
            with contextlib.suppress(PacelineError):
                self.link(place).card(self.options.wait_s, self.name, damaged=shard)

        self._askers.submit(tell)

    def finish_copies(self) -> None:
        """Wait for the copies that are under way."""
        self.copier.wait()
        self._collect()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the node was closed within this time.

        Raises:
            Exception: what ended the thread that follows the peers; the node is of no use then.
        """
        is_closed = self._clock.wait(self._stop, timeout_s)
        if self._problem is not None:
            raise self._problem
        return is_closed

    def stats(self) -> PeerStats:
        """Return what was served so far."""
        return self.server.stats()

    def close(self) -> None:
        """End all connections and copies."""
        self._stop.set()
        if self._beats is not None:
            self._beats.join()
        self.copier.close()
        self._askers.shutdown(cancel_futures=True)
        self.server.stop()
        for link in self._links.values():
            link.close()
        self.shards.close()
        self.pack.close()

    def beat(self) -> None:
        """Ask the peers, and begin what is to be done. Called by one thread at a time."""
        names = self._due_peers()
        for name, card in zip(names, self._askers.map(self._ask, names), strict=True):
            event: Event = Silent(node=name)
            if card is not None:
                event = Heard(node=name, held=frozenset(card.held))
                self.join(card.peers)
            self.members.note(event, self._clock.now_s())
        actions = self.members.handle(TimePassed(), self._clock.now_s())
        if self.options.local is not None:
            self._act(actions)
        self.tick()
        self._say()

    def tick(self) -> None:
        """Do what is due without asking the peers. Called by one thread at a time."""
        self._collect()
        for caller in self.server.take_callers():
            self._meet(caller)
        self._look_at_damaged()
        missed = self.server.take_missed()
        self._missed += len(missed)
        asked, self._asked = self._asked, set()
        for shard in [*asked, *missed]:
            self.staging.ask(shard)
        now_s = self._clock.now_s()
        for stage in self.staging.start(self.members.placement, now_s):
            self.copier.start(stage)

    def _look_at_damaged(self) -> None:
        """Look at shards that readers say they got damaged; copy those again that are."""
        now_s = self._clock.now_s()
        suspects, self._suspects = self._suspects, set()
        for shard in suspects.union(self.server.take_damaged()):
            is_due = now_s - self._looked_s.get(shard, -math.inf) >= _LOOK_AGAIN_S
            if is_due and shard in self.members.held and shard not in self._looks:
                self._looked_s[shard] = now_s
                self._looks[shard] = self._askers.submit(self.shards.is_right, shard)
        for shard in [shard for shard, look in self._looks.items() if look.done()]:
            look = self._looks.pop(shard)
            if look.exception() is None and look.result():
                _LOG.warning("a reader got shard %d damaged; here it is right", shard)
            elif self.options.local is None:
                _LOG.warning(
                    "shard %d of the pack is damaged: paceline store repair %s",
                    shard,
                    self.pack.path,
                )
            elif shard in self.members.held:
                _LOG.warning(
                    "shard %d in %s is damaged: it is copied again", shard, self.shards.folder
                )
                self._drop(shard)

    def _on_copied(self, count: int, from_source: bool) -> None:
        """Take note of bytes that a copy has brought; from any thread."""

    def _due_peers(self) -> list[str]:
        """Return the peers to ask now: those that may be there or not, and some others in turn."""
        unsure = [name for name in self.members.unsure() if name in self._links]
        others = sorted(set(self._links).difference(unsure))
        first = self._turn % len(others) if others else 0
        self._turn = first + _ASKED_PER_BEAT
        return [*unsure, *(others[first:] + others[:first])[:_ASKED_PER_BEAT]]

    def _act(self, actions: list[Action]) -> None:
        here = self.members.held
        self.staging.want(
            action
            for action in actions
            if isinstance(action, CopyShard) and action.shard not in here
        )
        for action in actions:
            if isinstance(action, DropShard):
                self._drop(action.shard)

    def _collect(self) -> None:
        """Take note of the copies that have ended."""
        for stage, problem in self.copier.finished():
            if problem is None:
                self.staging.done(stage.shard)
                self._hold(stage.shard)
            elif isinstance(problem, PacelineError | OSError):
                self._failed_copies += 1
                _LOG.warning("shard %d could not be copied: %s", stage.shard, problem)
                self.staging.failed(stage, self._clock.now_s())
            else:
                raise problem

    def _ask(self, name: str) -> NodeCard | None:
        """Return the card of a peer; None: there is no answer, or not one for this node."""
        try:
            card = self._links[name].card(self.options.wait_s, self.name)
        except RankLost as problem:
            _LOG.debug("%s", problem)
            return None
        except PacelineError as problem:  # another token, another pack
            if name not in self._refused:
                self._refused.add(name)
                _LOG.warning("%s", problem)
            return None
        self._refused.discard(name)
        return card

    def _meet(self, caller: bytes) -> None:
        """Take a node that asked as a peer."""
        try:
            self.join([str(NodeAddress.parse(caller.decode()))])
        except ValueError as problem:  # no text, or no address
            _LOG.warning("a node that asked for the card has no address: %s", problem)

    def _follow(self) -> None:
        try:
            self._beat_on()
        except Exception as problem:  # noqa: BLE001  # `wait` raises it
            _LOG.exception("it follows its peers no longer")
            self._problem = problem
            self._stop.set()

    def _beat_on(self) -> None:
        due_s = self._clock.now_s()
        while not self._stop.is_set():
            is_due = self._clock.now_s() >= due_s
            try:
                self.beat() if is_due else self.tick()
            except (PacelineError, OSError) as problem:
                _LOG.warning("%s", problem)
            now_s = self._clock.now_s()
            if is_due:
                due_s = now_s + self.options.beat_s
            left_s = max(0.0, due_s - now_s)
            is_busy = len(self.copier) > 0 or self.staging.left > 0
            self._clock.wait(self._stop, min(left_s, _TICK_S) if is_busy else left_s)

    def _listen(self) -> PeerServer:
        listen, token = self.options.listen, self._token
        allow_descriptors(_DESCRIPTORS)
        tls = encryption(token) if self.options.tls else None
        with storage_errors(
            "a node cannot listen", where=str(listen), fix="Give another address or port"
        ):
            return PeerServer(
                listen.host,
                listen.port,
                digest(token),
                digest(self.pack.identity),
                self.options.threads,
                self.options.listener,
                tls,
            )

    def _take_what_is_here(self) -> None:
        """Serve the shards that are in the folder already: written completely, or not there."""
        for shard in self.shards.present():
            self.server.hold(shard, os.fsencode(self.shards.path(shard)))
            self.members.held.add(shard)
        self._say()

    def _hold(self, shard: int) -> None:
        self.server.hold(shard, os.fsencode(self.shards.path(shard)))
        self.members.held.add(shard)
        self._say()

    def _drop(self, shard: int) -> None:
        self.members.held.discard(shard)
        self._say()
        self.server.drop(shard)
        self.shards.remove(shard)

    def _say(self) -> None:
        """Bring the card up to date."""
        stats, held = self.server.stats(), sorted(self.members.held)
        load = NodeLoad(
            held_bytes=sum(self._lengths[shard] for shard in held),
            source_bytes=self.copier.source_bytes,
            peer_bytes=self.copier.peer_bytes,
            sent_bytes=stats.bytes,
            reads=stats.reads,
            ranges=stats.ranges,
            missed=self._missed,
            connections=stats.connections,
            refused_connections=stats.refused_connections,
            waiting_shards=self.staging.left,
            copying_shards=len(self.copier),
            failed_copies=self._failed_copies,
        )
        card = NodeCard(
            node=self.name,
            host=host_identity(),
            folder=str(self.shards.folder.absolute()),
            held=tuple(held),
            peers=tuple(self.members.heard()),
            load=load,
        )
        self.server.set_card(card.to_bytes())


def shards_of(pack: Pack, patterns: Sequence[str]) -> frozenset[int]:
    """Return the shards with samples whose names match one of the patterns.

    Raises:
        UsageError: no name matches a pattern.
    """
    found: set[int] = set()
    for pattern in patterns:
        matches = re.compile(fnmatch.translate(pattern)).match
        samples = [sample for sample, name in enumerate(pack.names) if matches(name)]
        if not samples:
            raise UsageError(
                f"no sample's name matches {pattern!a}",
                where=str(pack.path),
                fix="List the names: paceline store ls -r",
            )
        for sample in samples:
            found.update(_shards_of_sample(pack, sample))
    return frozenset(found)


def _shards_of_sample(pack: Pack, sample: int) -> set[int]:
    return {int(extent.shard) for extent in pack.extents(sample)}
