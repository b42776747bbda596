"""Which shard a node copies next, and when. Pure.

A shard is read from the source by one node only, its first owner; the other owners wait until that
node holds it and copy it from there, so that the shared file system is read once however many
replicas there are. An owner that is lost is replaced by placement, and with it the right to read.
A bucket of bytes limits the rate of reading from the source; copies from peers are not limited.
Shards that a reader has asked for come first.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.store.serve.membership import CopyShard

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.store.serve.placement import NodePlacement


_LONGEST_REST_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageShard:
    """Copy a shard to local storage now, from a peer, or from the source if `peer` is empty."""

    shard: int
    peer: str = ""


@dataclass(kw_only=True)
class Staging:
    """What a node still has to copy.

    Args:
        self_name: of this node.
        shard_bytes: length of each shard.
        source_bytes_per_s: limit for reading from the source; 0: none.
        burst_bytes: that may be read at once after a pause; at least one shard goes through.
        at_once: copies under way at most.
        retry_s: before a copy that failed is tried again; twice as long after each failure.
    """

    self_name: str
    shard_bytes: Sequence[int]
    source_bytes_per_s: float = 0.0
    burst_bytes: int = 64 << 20
    at_once: int = 2
    retry_s: float = 1.0
    _wanted: dict[int, CopyShard] = field(default_factory=dict, init=False)
    _running: set[int] = field(default_factory=set, init=False)
    _urgent: dict[int, None] = field(default_factory=dict, init=False)
    _failed: dict[int, set[str]] = field(default_factory=dict, init=False)
    _failures: dict[int, int] = field(default_factory=dict, init=False)  # by shard, in a row
    _resting_s: dict[int, float] = field(default_factory=dict, init=False)  # by shard: until when
    _level_bytes: float = field(default=0.0, init=False)  # below 0: the source rests until it is 0
    _level_s: float | None = field(default=None, init=False)

    @property
    def left(self) -> int:
        """Shards that are not here yet."""
        return len(self._wanted)

    def want(self, copies: Iterable[CopyShard]) -> None:
        """Take the shards that this node has to get, in place of what it had to get before."""
        self._wanted = {copy.shard: copy for copy in copies}

    def ask(self, shard: int) -> None:
        """Take note that a reader wants a shard that is not here yet."""
        if shard in self._wanted:
            self._urgent[shard] = None

    def start(self, placement: NodePlacement, now_s: float) -> list[StageShard]:
        """Return the copies to begin now; each counts as under way until `done` or `failed`."""
        self._refill(now_s)
        begun: list[StageShard] = []
        for shard in [
            *self._urgent,
            *(shard for shard in self._wanted if shard not in self._urgent),
        ]:
            if len(self._running) >= self.at_once:
                break
            copy = self._wanted.get(shard)
            is_resting = now_s < self._resting_s.get(shard, now_s)
            if copy is None or shard in self._running or is_resting:
                continue
            stage = self._stage(copy, placement)
            if stage is not None:
                self._running.add(shard)
                begun.append(stage)
        return begun

    def done(self, shard: int) -> None:
        """Take note that a shard is here."""
        self._running.discard(shard)
        self._wanted.pop(shard, None)
        self._urgent.pop(shard, None)
        for notes in (self._failed, self._failures, self._resting_s):
            notes.pop(shard, None)

    def failed(self, stage: StageShard, now_s: float) -> None:
        """Take note that a copy failed: it is tried again, not from the same peer at first."""
        self._running.discard(stage.shard)
        self._failed.setdefault(stage.shard, set()).add(stage.peer)
        count = self._failures[stage.shard] = self._failures.get(stage.shard, 0) + 1
        rest_s = min(self.retry_s * 2 ** min(count - 1, 16), _LONGEST_REST_S)
        self._resting_s[stage.shard] = now_s + rest_s

    def _stage(self, copy: CopyShard, placement: NodePlacement) -> StageShard | None:
        failed = self._failed.get(copy.shard, set())
        peers = [name for name in copy.holders if name not in failed]
        if peers:
            return StageShard(shard=copy.shard, peer=peers[self._choice(copy.shard, len(peers))])
        is_first = placement.owners_of(copy.shard)[0] == self.self_name
        if not is_first and not failed:
            return None  # its first owner reads it
        if self.source_bytes_per_s > 0:
            if self._level_bytes < 0:
                return None
            self._level_bytes -= self.shard_bytes[copy.shard]
        self._failed.pop(copy.shard, None)  # should the source fail, all are tried again
        return StageShard(shard=copy.shard)

    def _choice(self, shard: int, count: int) -> int:
        """Return which of `count` peers to copy from: not all nodes the same one."""
        return zlib.crc32(f"{self.self_name} {shard}".encode()) % count

    def _refill(self, now_s: float) -> None:
        since_s = 0.0 if self._level_s is None else now_s - self._level_s
        self._level_s = now_s
        self._level_bytes = min(
            float(self.burst_bytes), self._level_bytes + since_s * self.source_bytes_per_s
        )
