"""How bytes of shards travel between nodes: one interface, over TCP and within a process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.token import find_token
from paceline.native import PeerLink, peer_error, tls_context
from paceline.store.serve.card import NodeAddress, NodeCard, digest, host_identity

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.native import ExtentPlan, TlsContext

T = TypeVar("T")

# Characters: who took part in a handshake may try tokens for as long as there is time.
_SHORTEST_TOKEN = 16

# What became of an extent (RangeOutcome, peer_link.hpp).
MISSING, GOOD, DAMAGED, NOT_HELD = range(4)


class NodeLink(Protocol):
    """The way to one node. May be used from many threads at once."""

    name: str

    def card(self, wait_s: float, caller: str = "", damaged: int = -1) -> NodeCard:
        """Return what the node says of itself now.

        Args:
            wait_s: for the answer.
            caller: name of the node that asks, which the other one then takes as a peer.
            damaged: a shard of which it sent damaged bytes, so that it looks at it; -1: none.

        Raises:
            RankLost: it cannot be reached.
            DeadlineExceeded: it did not answer in time.
            UsageError: it refused the token, or serves another pack.
        """

    def fetch(
        self, plan: ExtentPlan, items: NDArray[np.int64], out: NDArray[np.uint8], wait_s: float
    ) -> NDArray[np.uint8]:
        """Bring extents of a plan to their places in `out`, decoded and compared with checksums.

        Args:
            plan: of a batch.
            items: the extents of the plan to fetch, shape (n,).
            out: buffer of the batch.
            wait_s: for all of them.

        Returns:
            What became of each extent of the plan: `MISSING` for those not asked for.

        Raises:
            As `card`; `out` then holds nothing of use at the places of these extents.
        """

    def fetch_range(self, shard: int, offset: int, out: NDArray[np.uint8], wait_s: float) -> int:
        """Fill `out` with the bytes of a shard's file from `offset` on, unchecked.

        Returns:
            `GOOD`, or `NOT_HELD`.

        Raises:
            As `card`.
        """

    def close(self) -> None:
        """Close the connections that are not in use."""


Connector = Callable[[str], NodeLink]


class TcpNodeLink:
    """Connections to one node, each used by one thread at a time and kept for the next.

    Args:
        address: of the node.
        pack: identity of the pack.
        token: of the node.
        tls: of this token; None: nothing is encrypted.
    """

    def __init__(
        self, address: NodeAddress, pack: str, token: str, tls: TlsContext | None = None
    ) -> None:
        self.name = str(address)
        self._address = address
        self._digests = digest(token), digest(pack)
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: list[PeerLink] = []
        self._process = os.getpid()

    def card(self, wait_s: float, caller: str = "", damaged: int = -1) -> NodeCard:
        """See `NodeLink`."""

        def work(link: PeerLink, left_s: float) -> NodeCard:
            kind, why, card = link.ask_card(left_s, caller.encode(), damaged)
            if kind:
                raise peer_error(kind, why, self.name)
            return NodeCard.from_bytes(card, self.name)

        return self._on_connection(work, wait_s)

    def fetch(
        self, plan: ExtentPlan, items: NDArray[np.int64], out: NDArray[np.uint8], wait_s: float
    ) -> NDArray[np.uint8]:
        """See `NodeLink`."""

        def work(link: PeerLink, left_s: float) -> NDArray[np.uint8]:
            kind, why, outcomes = link.fetch(plan, items, out, left_s)
            if kind:
                raise peer_error(kind, why, self.name)
            return outcomes

        return self._on_connection(work, wait_s)

    def fetch_range(self, shard: int, offset: int, out: NDArray[np.uint8], wait_s: float) -> int:
        """See `NodeLink`."""

        def work(link: PeerLink, left_s: float) -> int:
            kind, why, outcome = link.fetch_range(shard, offset, out, left_s)
            if kind:
                raise peer_error(kind, why, self.name)
            return outcome

        return self._on_connection(work, wait_s)

    def close(self) -> None:
        """See `NodeLink`."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def _on_connection(self, work: Callable[[PeerLink, float], T], wait_s: float) -> T:
        """Return what `work` does on a kept connection, or where that has ended, on a new one."""
        end_s = time.monotonic() + wait_s
        kept = self._take()
        if kept is not None:
            try:
                result = work(kept, wait_s)
            except ConnectionError:  # the node may have been started again since
                self.close()
                if time.monotonic() >= end_s:
                    raise
            else:
                self._keep(kept)
                return result
        link = PeerLink()
        left_s = max(end_s - time.monotonic(), 0.0)
        host, port = self._address.host, self._address.port
        kind, why, _ = link.connect(host, port, *self._digests, left_s, self._tls)
        if kind:
            raise peer_error(kind, why, self.name)
        result = work(link, max(end_s - time.monotonic(), 0.0))
        self._keep(link)
        return result

    def _take(self) -> PeerLink | None:
        if self._process != os.getpid():  # forked: the parent's connections; a lock may be taken
            self._process, self._lock, self._idle = os.getpid(), threading.Lock(), []
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _keep(self, link: PeerLink) -> None:
        with self._lock:
            self._idle.append(link)


def encryption(token: str) -> TlsContext:
    """Return TLS between those who have this token.

    Raises:
        UsageError: it is too short.
        Missing: there is no OpenSSL.
    """
    if len(token) < _SHORTEST_TOKEN:
        raise UsageError(
            f"TLS needs a token of at least {_SHORTEST_TOKEN} characters, got {len(token)}",
            why="its key follows from the token, and a short one can be guessed",
            fix="Write a random one: openssl rand -hex 32 > token",
        )
    return tls_context(digest(token))


def tcp_connector(pack: str, token: str, *, tls: bool = False) -> Connector:
    """Return what makes the link to a node of this pack from its name, ``HOST:PORT``.

    Without a `token`, links prove the user's (`core.token`).

    Raises:
        UsageError: the token is too short for TLS, or the user's cannot be read or made.
        Missing: there is no OpenSSL.
    """
    token = token or find_token()
    context = encryption(token) if tls else None

    def connect(name: str) -> NodeLink:
        return TcpNodeLink(NodeAddress.parse(name), pack, token, context)

    return connect


class LocalNode:
    """A node within this process, for tests and simulations: shards as bytes.

    Args:
        name: of the node.
        shards: content of the shards that it holds.
        peers: names of the nodes that its card names.
    """

    def __init__(self, name: str, shards: dict[int, bytes], peers: tuple[str, ...] = ()) -> None:
        self.name = name
        self.shards = shards
        self.peers = peers
        self.is_down = False


class LocalNodeLink:
    """The way to a `LocalNode`."""

    def __init__(self, node: LocalNode) -> None:
        self.name = node.name
        self._node = node

    def card(self, wait_s: float, caller: str = "", damaged: int = -1) -> NodeCard:
        """See `NodeLink`."""
        self._check(wait_s)
        held = tuple(sorted(self._node.shards))
        node = self._node
        return NodeCard(
            node=self.name, host=host_identity(), folder="", held=held, peers=node.peers
        )

    def fetch(
        self, plan: ExtentPlan, items: NDArray[np.int64], out: NDArray[np.uint8], wait_s: float
    ) -> NDArray[np.uint8]:
        """See `NodeLink`."""
        self._check(wait_s)
        shards, offsets, lengths = plan.shards, plan.shard_offsets, plan.stored_lengths
        outcomes = np.full(len(shards), MISSING, np.uint8)
        for item in items.tolist():
            content = self._node.shards.get(int(shards[item]))
            if content is None:
                outcomes[item] = NOT_HELD
                continue
            begin = int(offsets[item])
            stored = memoryview(content)[begin : begin + int(lengths[item])]
            if len(stored) != lengths[item]:
                raise peer_error("protocol", "a range lies beyond the end of its shard", self.name)
            outcomes[item] = plan.deliver(item, stored, out)
        return outcomes

    def fetch_range(self, shard: int, offset: int, out: NDArray[np.uint8], wait_s: float) -> int:
        """See `NodeLink`."""
        self._check(wait_s)
        content = self._node.shards.get(shard)
        if content is None:
            return NOT_HELD
        if offset + len(out) > len(content):
            raise peer_error("protocol", "a range lies beyond the end of its shard", self.name)
        out[:] = np.frombuffer(content, np.uint8, len(out), offset)
        return GOOD

    def close(self) -> None:
        """See `NodeLink`."""

    def _check(self, wait_s: float) -> None:
        if self._node.is_down:
            raise peer_error("lost", "it was stopped", self.name)
        if wait_s <= 0:
            raise peer_error("deadline", "no time was given", self.name)
