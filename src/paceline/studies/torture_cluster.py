"""Kills the nodes that serve a pack, again and again, while a client reads: does it notice?

With two copies of each shard, and one node down at a time, each read has to return the right bytes.
A node that was killed is started again with its files, and every fifth time without: then the
others send it its share. The next one is killed when all copies are there again.
"""

from __future__ import annotations

import functools
import random
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline import store
from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError
from paceline.core.record import Record
from paceline.store.format.layout import INDEX_NAME
from paceline.store.serve.remote_pack import open_remote
from paceline.studies.server_processes import ServerProcesses

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.store.serve.remote_pack import RemotePack

_SAMPLES = 120
_MOST_BYTES = 40_000
_SHARD_BYTES = 200_000
_BATCH = 16
_BATCHES_AFTER = 8  # that are read while a node is down
_WIPED_EVERY = 5
_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """How much to do."""

    kills: int = 200
    nodes: int = 3
    replicas: int = 2
    seed: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterReport(Record):
    """What a client saw while nodes were killed.

    Attributes:
        kills: nodes that were killed.
        wiped: of these, came back without their files.
        batches: that were read.
        failed: batches that could not be read.
        wrong: batches with wrong bytes.
        problems: the first errors.
        read_s_p50: of a batch, as are the next two.
        read_s_p99: a stall.
        read_s_max: the longest one.
        elapsed_s: of it all.
    """

    kills: int
    wiped: int
    batches: int
    failed: int
    wrong: int
    problems: tuple[str, ...]
    read_s_p50: float
    read_s_p99: float
    read_s_max: float
    elapsed_s: float

    @property
    def ok(self) -> bool:
        """Whether each read returned the right bytes."""
        return not self.failed and not self.wrong


class _Reader:
    """A thread that reads random batches and compares them, until it is stopped."""

    def __init__(self, pack: RemotePack, bodies: list[bytes], seed: int) -> None:
        self.times_s: list[float] = []
        self.failed = self.wrong = 0
        self.problems: list[str] = []
        self._pack = pack
        self._bodies = bodies
        self._random = np.random.default_rng(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_on, name="torture-reader", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the batch that is being read."""
        self._stop.set()
        self._thread.join()

    @property
    def done(self) -> int:
        """Batches that were read, or could not be."""
        return len(self.times_s)

    def has_done(self, count: int) -> bool:
        """Return whether so many batches are behind it."""
        return self.done >= count

    def _read_on(self) -> None:
        clock = SystemClock()
        while not self._stop.is_set():
            ids = self._random.integers(0, len(self._bodies), _BATCH)
            wanted = b"".join(self._bodies[sample] for sample in ids.tolist())
            begin_s = clock.now_s()
            try:
                found = self._pack.read_batch(ids)[0].tobytes()
            except PacelineError as problem:
                self.failed += 1
                self.problems.append(str(problem))
            else:
                self.wrong += found != wanted
            self.times_s.append(clock.now_s() - begin_s)


def torture_cluster(
    folder: Path,
    options: ClusterOptions | None = None,
    *,
    on_progress: Callable[[str], None] | None = None,
) -> ClusterReport:
    """Run the campaign in a new folder below `folder`, which is removed at the end.

    Args:
        folder: for the nodes' local storage.
        options: how many kills.
        on_progress: is given a line for each kill.

    Raises:
        DeadlineExceeded: a node did not come back, or its copies did not.
    """
    options = options or ClusterOptions()
    work = Path(tempfile.mkdtemp(prefix="paceline-torture-", dir=folder)).absolute()
    clock = SystemClock()
    begin_s = clock.now_s()
    try:
        bodies = _make_pack(work, options.seed)
        with ServerProcesses(
            pack=work / "pack", folder=work, nodes=options.nodes, replicas=options.replicas
        ) as servers:
            servers.wait_until(servers.is_whole, "all shards are staged")
            with open_remote(
                work / "index", servers.names, replicas=options.replicas, maps_files=False
            ) as remote:
                reader = _Reader(remote, bodies, options.seed)
                reader.start()
                try:
                    wiped = _kill_nodes(servers, reader, options, on_progress)
                finally:
                    reader.stop()
        times_s = np.array(reader.times_s)
        return ClusterReport(
            kills=options.kills,
            wiped=wiped,
            batches=reader.done,
            failed=reader.failed,
            wrong=reader.wrong,
            problems=tuple(reader.problems[:_SHOWN]),
            read_s_p50=float(np.quantile(times_s, 0.5)),
            read_s_p99=float(np.quantile(times_s, 0.99)),
            read_s_max=float(times_s.max()),
            elapsed_s=clock.now_s() - begin_s,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _kill_nodes(
    servers: ServerProcesses,
    reader: _Reader,
    options: ClusterOptions,
    on_progress: Callable[[str], None] | None,
) -> int:
    """Kill nodes, one at a time; return how many of them came back without their files."""
    chance = random.Random(options.seed)
    wiped = 0
    for number in range(options.kills):
        victim = chance.randrange(options.nodes)
        is_wiped = number % _WIPED_EVERY == _WIPED_EVERY - 1
        servers.kill(victim, and_wipe=is_wiped)
        wiped += is_wiped
        enough = reader.done + _BATCHES_AFTER
        servers.wait_until(functools.partial(reader.has_done, enough), "batches are read")
        servers.start(victim)
        servers.wait_until(servers.is_whole, "all copies are there again")
        if on_progress is not None:
            on_progress(
                f"{number + 1:,} of {options.kills:,} nodes killed, {reader.done:,} batches read, "
                f"{reader.failed:,} failed, {reader.wrong:,} wrong"
            )
    return wiped


def _make_pack(work: Path, seed: int) -> list[bytes]:
    """Make a pack and a copy of its index; return its samples."""
    random_bytes = np.random.default_rng(seed)
    lengths = random_bytes.integers(0, _MOST_BYTES, _SAMPLES).tolist()
    bodies = [random_bytes.bytes(length) for length in lengths]
    named = [(f"{number:04}", body) for number, body in enumerate(bodies)]
    options = store.PackOptions(shard_bytes=_SHARD_BYTES)
    store.pack(store.Samples(named), work / "pack", options=options)
    (work / "index").mkdir()
    shutil.copyfile(work / "pack" / INDEX_NAME, work / "index" / INDEX_NAME)
    return bodies
