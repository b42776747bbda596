"""Answers the requests of programs on this node for bytes of shards that are not here.

Programs see a pack through the library for mounts (native/posix). What lies on this node they map;
for the rest they ask in memory that they share with this process (range_requests.hpp). A request
goes to those that have the bytes, in this order, until one of them sends them::

    this node      a copy may have come in the meantime: the program maps it
    other nodes    that hold the shard
    the source     if no node has the shard after a wait in which its owner may copy it

A node that did not answer through such a wait is given up: for its other shards nobody waits, and
it is asked again every few seconds.

The program compares what it gets with checksums, and asks again, from the next in this order, for
what was damaged.
"""

from __future__ import annotations

import logging
import math
import threading
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError
from paceline.native import ServedCount
from paceline.store.serve.link_rates import LinkRates
from paceline.store.serve.links import GOOD
from paceline.store.serve.node import StoreNode

if TYPE_CHECKING:
    import os

    import numpy as np
    from numpy.typing import NDArray

    from paceline.core.clock import Clock
    from paceline.native import RangeRequests
    from paceline.store.serve.node import NodeOptions

_LOG = logging.getLogger(__name__)
_TAKE_S = 1.0
_LOOK_S = 0.02  # between two questions whether a shard has come to its owner
_AVOID_S = 5.0  # for which a node that did not answer is asked last, or not if it is given up
_SELF, _SOURCE = "", "/"  # among the names of nodes, which are addresses


class ServerState(IntEnum):
    """Of the memory of requests (range_requests.hpp)."""

    STARTING, SERVING, ENDED = range(3)


class RequestOutcome(IntEnum):
    """What a program hears (range_requests.hpp)."""

    GOOD, NOBODY, HERE = range(1, 4)


class RangeRequest(NamedTuple):
    """What a program asks for: bytes of a shard's file, and how often it got them damaged."""

    slot: int
    shard: int
    offset: int
    length: int
    attempt: int


class SharingNode(StoreNode):
    """A node that also says in the memory of requests which shards are here."""

    def __init__(
        self,
        pack: str | os.PathLike[str],
        options: NodeOptions,
        requests: RangeRequests,
        clock: Clock | None = None,
    ) -> None:
        self._requests = requests
        self._shown: set[int] | None = None
        self._sent_bytes = 0  # of those that are counted
        super().__init__(pack, options, clock)

    def _on_copied(self, count: int, from_source: bool) -> None:
        staged = ServedCount.STAGED_SOURCE_BYTES if from_source else ServedCount.STAGED_PEER_BYTES
        self._requests.count(staged, count)

    def note_load(self) -> None:
        """Bring the counts that are kept elsewhere up to date; by one thread at a time."""
        sent = self.stats().bytes
        self._requests.count(ServedCount.SENT_BYTES, sent - self._sent_bytes)
        self._sent_bytes = sent
        self._requests.raise_to(ServedCount.PEAK_COPIES, self.staging.left)

    def _say(self) -> None:
        super()._say()
        held = self.members.held
        if self._shown is None:  # a server before this one may have said something else
            shards = range(len(self._lengths))
            self._shown = {shard for shard in shards if self._requests.is_held(shard)}
        for shard in held - self._shown:
            self._requests.set_held(shard, is_held=True)
        for shard in self._shown - held:
            self._requests.set_held(shard, is_held=False)
        self._shown = set(held)


class RequestService:
    """Threads that answer requests, from `start` to `close`.

    Args:
        node: of which this serves the programs.
        requests: the memory.
        threads: each answers one request at a time.
        stage_wait_s: for a shard that no node has yet, before the source is read.
        clock: for waits.
    """

    def __init__(
        self,
        node: StoreNode,
        requests: RangeRequests,
        *,
        threads: int = 16,
        stage_wait_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        self._node = node
        self._lengths = [int(length) for length in node.pack.index.shard_lengths]
        self._requests = requests
        self._stage_wait_s = stage_wait_s
        self._clock: Clock = clock or SystemClock()
        self._stop = threading.Event()
        self._rates = LinkRates(self._clock)
        self._lock = threading.Lock()  # of what follows
        self._failed_s: dict[str, float] = {}  # when a node last did not answer
        self._overdue: set[int] = set()  # shards that were waited for in vain
        self._given_up: set[str] = set()  # nodes that did not answer through such a wait
        self._threads = [
            threading.Thread(target=self._serve, name=f"paceline-requests-{k}", daemon=True)
            for k in range(threads)
        ]

    def start(self) -> None:
        """Begin to answer, also what a server before this one was asked and did not answer."""
        self._requests.count(ServedCount.SERVER_STARTS, 1)
        self._requests.recover()
        self._requests.set_state(ServerState.SERVING)
        for thread in self._threads:
            thread.start()

    def beat(self) -> None:
        """Show that the server is there, and free what ended programs held; about each second."""
        self._requests.beat()
        self._requests.reap()

    def close(self) -> None:
        """End; programs that wait read from the source."""
        self._stop.set()
        self._requests.set_state(ServerState.ENDED)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while not self._stop.is_set():
            taken = self._requests.take(_TAKE_S)
            if taken is None:
                continue
            request = RangeRequest(*taken)
            outcome = RequestOutcome.NOBODY
            try:
                outcome = self.answer(request, self._requests.room(request.slot, request.length))
            except (PacelineError, OSError) as problem:
                _LOG.warning("shard %d cannot be read: %s", request.shard, problem)
            finally:
                self._requests.finish(request.slot, outcome)

    def answer(self, request: RangeRequest, out: NDArray[np.uint8]) -> RequestOutcome:
        """Fill `out` with what a program asked for; return the outcome.

        Raises:
            OSError: no node has the bytes, and the source cannot be read.
        """
        if request.offset + request.length > self._lengths[request.shard]:
            return RequestOutcome.NOBODY  # a program that follows another index
        end_s = self._clock.now_s() + self._stage_wait_s
        if request.attempt:
            self._note_damaged(request)
        while True:
            places = self._places(request.shard)[request.attempt :]
            for place in places:
                if place == _SELF:
                    return RequestOutcome.HERE
                if place != _SOURCE:
                    if not self._is_given_up(place) and self._fetch(place, request, out):
                        return RequestOutcome.GOOD
                elif request.attempt or self._is_overdue(request.shard, places[:-1], end_s):
                    self._read_source(request, out)
                    return RequestOutcome.GOOD
            if self._stop.is_set() or not places:
                return RequestOutcome.NOBODY
            self._node.ask(request.shard)
            self._clock.wait(self._stop, _LOOK_S)

    def _note_damaged(self, request: RangeRequest) -> None:
        """Take note that the place before the one that is asked for now sent damaged bytes."""
        places = self._places(request.shard)
        if request.attempt <= len(places):
            place = places[request.attempt - 1]
            if place != _SOURCE:
                self._node.note_damaged(place or self._node.name, request.shard)

    def _places(self, shard: int) -> list[str]:
        """Return where a shard's bytes may be, the best place first."""
        members = self._node.members
        # Where programs look: what they do not see there yet, they would ask for again, in vain.
        here = [_SELF] if self._requests.is_held(shard) else []
        holders = members.holders(shard)
        # Owners that do not hold it yet are asked as well: then they copy it before others.
        owners = [
            name
            for name in members.placement.owners_of(shard)
            if name != self._node.name and name not in holders
        ]
        with self._lock:
            others = sorted([*self._rates.order(holders), *owners], key=self._is_avoided)
        return [*here, *others, _SOURCE]

    def _fetch(self, name: str, request: RangeRequest, out: NDArray[np.uint8]) -> bool:
        wait_s = self._node.options.wait_s
        try:
            link, begin_s = self._node.link(name), self._clock.now_s()
            is_good = link.fetch_range(request.shard, request.offset, out, wait_s) == GOOD
            self._rates.note(name, len(out) * is_good, self._clock.now_s() - begin_s)
        except PacelineError as problem:
            with self._lock:
                was_lost = self._is_avoided(name, 2 * _AVOID_S)
                self._failed_s[name] = self._clock.now_s()
            if not was_lost:
                _LOG.warning("%s; reading from replicas or the source instead", problem)
            return False
        with self._lock:  # it answered, though it may not hold the shard yet
            self._failed_s.pop(name, None)
            self._given_up.discard(name)
        if is_good:
            self._requests.count(ServedCount.PEER_BYTES, len(out))
        return is_good

    def _is_avoided(self, name: str, span_s: float = _AVOID_S) -> bool:
        """Return whether a node did not answer so short a time ago; the caller has the lock."""
        return self._clock.now_s() - self._failed_s.get(name, -math.inf) < span_s

    def _is_given_up(self, name: str) -> bool:
        """Return whether a node is not asked now: it was given up, and asked a moment ago."""
        with self._lock:
            return name in self._given_up and self._is_avoided(name)

    def _is_overdue(self, shard: int, nodes: list[str], end_s: float) -> bool:
        """Return whether to read the source for a shard that one of `nodes` may hold soon."""
        with self._lock:
            if self._clock.now_s() >= end_s:
                self._overdue.add(shard)
                self._given_up.update(name for name in nodes if name in self._failed_s)
            is_hopeless = bool(nodes) and self._given_up.issuperset(nodes)
            return is_hopeless or shard in self._overdue or self._stop.is_set()

    def _read_source(self, request: RangeRequest, out: NDArray[np.uint8]) -> None:
        path = self._node.pack.index.shard_path(request.shard)
        with path.open("rb", buffering=0) as file:
            file.seek(request.offset)
            view = memoryview(out.data)
            while view:
                count = file.readinto(view)
                if not count:
                    raise OSError(f"{path} is shorter than the pack's index says")
                view = view[count:]
        self._requests.count(ServedCount.REQUEST_SOURCE_BYTES, len(out))
