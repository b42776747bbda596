"""The server of a node: a thin shell around membership and staging, over TCP.

Bytes are served by threads of the core (peer_server.hpp). One thread here asks the peers what they
hold, once per `beat_s`, and lets the state machines say what to copy and drop; a few threads copy.
A shard is served once it lies complete, and with the digest of the index, in local storage.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import os
import shutil
import threading
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from paceline.core.clock import SystemClock
from paceline.core.errors import (
    CorruptPack,
    PacelineError,
    RankLost,
    StorageError,
    UsageError,
    storage_errors,
)
from paceline.core.files import commit_chunks
from paceline.native import PeerServer, PeerStats
from paceline.store.format.layout import INDEX_NAME
from paceline.store.read.pack import open_packed
from paceline.store.serve.card import NodeAddress, NodeCard, digest, host_identity
from paceline.store.serve.links import NOT_HELD, TcpNodeLink
from paceline.store.serve.membership import (
    Action,
    CopyShard,
    DropShard,
    Heard,
    Membership,
    Silent,
    TimePassed,
)
from paceline.store.serve.staging import StageShard, Staging

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    from paceline.core.clock import Clock

_LOG = logging.getLogger(__name__)
_PIECE_BYTES = 8 << 20
_AT_ONCE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOptions:
    """How a node serves.

    Attributes:
        listen: address to listen on; also the node's name, by which its peers know it.
        peers: addresses of the other nodes.
        local: folder on local storage for this node's shards; None: serve all from the pack.
        replicas: copies of each shard, the same on all nodes.
        token: needed as soon as `listen` is no address of loopback.
        source_bytes_per_s: limit for reading from the pack; 0: none.
        threads: that send.
        name: by which peers know this node, if that is not the address it listens on.
        listener: descriptor of a socket that listens at `listen` already; -1: none.
        beat_s: between two questions to each peer.
        grace_s: silence after which a peer is lost.
        wait_s: for an answer of a peer.
    """

    listen: NodeAddress
    peers: tuple[NodeAddress, ...] = ()
    local: Path | None = None
    replicas: int = 1
    token: str = ""
    source_bytes_per_s: float = 0.0
    threads: int = 1
    name: str = ""
    listener: int = -1
    beat_s: float = 1.0
    grace_s: float = 10.0
    wait_s: float = 5.0

    def __post_init__(self) -> None:
        try:
            is_loopback = ipaddress.ip_address(self.listen.host).is_loopback
        except ValueError:
            raise UsageError(
                f"cannot listen on {self.listen.host!a}",
                where=str(self.listen),
                why="it is not a numeric address",
                fix="Give the address of an interface, for example 127.0.0.1 or 10.0.0.7",
            ) from None
        if not is_loopback and not self.token:
            raise UsageError(
                "a node that other machines can reach needs a token",
                where=str(self.listen),
                fix="Give all nodes the same secret (--token-file), or listen on 127.0.0.1",
            )
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
        self.pack = open_packed(pack, index_only=options.local is not None)
        self._clock: Clock = clock or SystemClock()
        lengths = [int(length) for length in self.pack.index.shard_lengths]
        self._lengths = lengths
        self._digests = self.pack.index.shard_digests
        self.folder = self._prepare_folder()
        self.server = self._listen()
        address = NodeAddress(host=options.listen.host, port=self.server.port)
        self.name = options.name or str(address)
        self._links = {
            str(peer): TcpNodeLink(peer, self.pack.identity, options.token)
            for peer in options.peers
        }
        self.members = Membership(
            self_name=self.name,
            peers=list(self._links),
            shard_count=len(lengths),
            replicas=options.replicas,
            grace_s=options.grace_s,
        )
        self.staging = Staging(
            self_name=self.name,
            shard_bytes=lengths,
            source_bytes_per_s=options.source_bytes_per_s,
            at_once=_AT_ONCE,
        )
        self.source_bytes = 0  # read from the source so far
        self._asked: set[int] = set()  # shards that readers here want; forgotten at each beat
        self._stop = threading.Event()
        self._copiers = ThreadPoolExecutor(_AT_ONCE, "paceline-stage")
        self._running: dict[Future[int], StageShard] = {}
        self._beats: threading.Thread | None = None
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
        self._beats = threading.Thread(target=self._beat_on, name="paceline-node", daemon=True)
        self._beats.start()

    def join(self, peers: Iterable[str]) -> None:
        """Take these nodes as peers, too: addresses as `NodeAddress.parse` reads them."""
        for name in peers:
            if name not in self._links:
                address = NodeAddress.parse(name)
                self._links[name] = TcpNodeLink(address, self.pack.identity, self.options.token)
                self.members.add(name)

    def link(self, name: str) -> TcpNodeLink:
        """Return the way to a peer."""
        return self._links[name]

    def ask(self, shard: int) -> None:
        """Have a shard copied before others, if it is this node's to copy; from any thread."""
        self._asked.add(shard)

    def finish_copies(self) -> None:
        """Wait for the copies that are under way."""
        futures.wait(list(self._running))
        self._collect()

    def wait(self, timeout_s: float) -> bool:
        """Return whether the node was closed within this time."""
        return self._clock.wait(self._stop, timeout_s)

    def stats(self) -> PeerStats:
        """Return what was served so far."""
        return self.server.stats()

    def close(self) -> None:
        """End all connections and copies."""
        self._stop.set()
        if self._beats is not None:
            self._beats.join()
        self._copiers.shutdown(cancel_futures=True)
        self.server.stop()
        for link in self._links.values():
            link.close()
        self.pack.close()

    def beat(self) -> None:
        """Ask the peers once, and begin what is to be done. Called by one thread at a time."""
        actions = self.members.handle(TimePassed(), self._clock.now_s())
        for name, link in self._links.items():
            try:
                held = frozenset(link.card(self.options.wait_s).held)
            except RankLost as problem:
                _LOG.debug("%s", problem)
                actions = self.members.handle(Silent(node=name), self._clock.now_s())
            else:
                actions = self.members.handle(Heard(node=name, held=held), self._clock.now_s())
        self._collect()
        if self.options.local is not None:
            self._act(actions)

    def _act(self, actions: list[Action]) -> None:
        here = self.members.held
        self.staging.want(
            action
            for action in actions
            if isinstance(action, CopyShard) and action.shard not in here
        )
        asked, self._asked = self._asked, set()
        for shard in [*asked, *self.server.take_missed()]:
            self.staging.ask(shard)
        for stage in self.staging.start(self.members.placement, self._clock.now_s()):
            self._running[self._copiers.submit(self._copy, stage)] = stage
        for action in actions:
            if isinstance(action, DropShard):
                self._drop(action.shard)

    def _collect(self) -> None:
        """Take note of the copies that have ended."""
        for future in [future for future in self._running if future.done()]:
            stage = self._running.pop(future)
            problem = future.exception()
            if problem is None:
                self.source_bytes += future.result()
                self.staging.done(stage.shard)
                self._hold(stage.shard)
            elif isinstance(problem, PacelineError | OSError):
                _LOG.warning("shard %d could not be copied: %s", stage.shard, problem)
                self.staging.failed(stage)
            else:
                raise problem

    def _beat_on(self) -> None:
        while not self._stop.is_set():
            try:
                self.beat()
            except (PacelineError, OSError) as problem:
                _LOG.warning("%s", problem)
            busy = bool(self._running)
            self._clock.wait(self._stop, 0.05 if busy else self.options.beat_s)

    def _listen(self) -> PeerServer:
        listen = self.options.listen
        with storage_errors(
            "a node cannot listen", where=str(listen), fix="Give another address or port"
        ):
            return PeerServer(
                listen.host,
                listen.port,
                digest(self.options.token),
                digest(self.pack.identity),
                self.options.threads,
                self.options.listener,
            )

    def _prepare_folder(self) -> Path:
        """Return the folder of the shards that this node serves, with an index in it."""
        local = self.options.local
        if local is None:
            return self.pack.path
        with storage_errors("cannot prepare local storage", where=local, fix="Give another folder"):
            local.mkdir(parents=True, exist_ok=True)
            index = (self.pack.path / INDEX_NAME).read_bytes()
            if not (local / INDEX_NAME).exists():
                commit_chunks(local / INDEX_NAME, [index])
        if (local / INDEX_NAME).read_bytes() != index:
            raise UsageError(
                "local storage holds another pack",
                where=str(local),
                fix="Give an empty folder, or delete this one",
            )
        return local

    def _path(self, shard: int) -> Path:
        return self.folder / self.pack.index.shard_path(shard).name

    def _take_what_is_here(self) -> None:
        """Serve the shards that are in the folder already: written completely, or not there."""
        for shard, length in enumerate(self._lengths):
            path = self._path(shard)
            if path.exists() and path.stat().st_size == length:
                self.server.hold(shard, os.fsencode(path))
                self.members.held.add(shard)
        self._say()

    def _hold(self, shard: int) -> None:
        self.server.hold(shard, os.fsencode(self._path(shard)))
        self.members.held.add(shard)
        self._say()

    def _drop(self, shard: int) -> None:
        self.members.held.discard(shard)
        self._say()
        self.server.drop(shard)
        self._path(shard).unlink(missing_ok=True)

    def _say(self) -> None:
        card = NodeCard(
            node=self.name,
            host=host_identity(),
            folder=str(self.folder.absolute()),
            held=tuple(sorted(self.members.held)),
        )
        self.server.set_card(card.to_bytes())

    def _copy(self, stage: StageShard) -> int:
        """Copy a shard here, in a thread of its own; return the bytes read from the source."""
        target, length = self._path(stage.shard), self._lengths[stage.shard]
        if shutil.disk_usage(self.folder).free < length:
            raise StorageError(
                "local storage is full",
                where=str(self.folder),
                why=f"shard {stage.shard} has {length} bytes",
                fix="Free space there, or spread the pack over more nodes",
            )
        pieces = self._pieces_of_peer(stage) if stage.peer else self._pieces_of_source(stage)
        commit_chunks(target, self._checked(stage, pieces))
        return 0 if stage.peer else length

    def _pieces_of_source(self, stage: StageShard) -> Iterator[bytes]:
        with self.pack.index.shard_path(stage.shard).open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                yield piece

    def _pieces_of_peer(self, stage: StageShard) -> Iterator[bytes]:
        link, length = self._links[stage.peer], self._lengths[stage.shard]
        for offset in range(0, length, _PIECE_BYTES):
            piece = np.empty(min(_PIECE_BYTES, length - offset), np.uint8)
            if link.fetch_range(stage.shard, offset, piece, self.options.wait_s) == NOT_HELD:
                raise StorageError(
                    "a peer does not hold the shard any longer",
                    where=stage.peer,
                    why=f"shard {stage.shard}",
                    fix="It is copied from elsewhere",
                )
            yield piece.tobytes()

    def _checked(self, stage: StageShard, pieces: Iterator[bytes]) -> Iterator[bytes]:
        """Pass the pieces on; refuse them before they are committed if their digest is wrong."""
        found = hashlib.sha256()
        for piece in pieces:
            found.update(piece)
            yield piece
        if self._digests and found.digest() != self._digests[stage.shard]:
            raise CorruptPack(
                f"shard {stage.shard} was copied damaged",
                where=stage.peer or str(self.pack.index.shard_path(stage.shard)),
                why="its SHA-256 is not the one in the index",
                fix="Repair the pack: paceline store repair",
            )
