"""How the ranks of a node come to share a reader.

They meet in the store of torch.distributed, twice: each says what it would read, and the first
local rank where the ring is; then each says whether it could open the ring, through
``/proc/PID/fd/N``. There is a reader for all of them, or for none: a rank that waited for a window
while another did not take its part would wait until its deadline.

What the launcher says about a node's ranks (LOCAL_RANK, LOCAL_WORLD_SIZE) is taken as it is: ranks
in containers with process ids of their own cannot open the ring, and then all read by themselves.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import weakref
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.core import node
from paceline.core.config import environment, resolve
from paceline.core.errors import (
    DeadlineExceeded,
    PacelineError,
    StorageError,
    UsageError,
    first_line,
)
from paceline.core.processes import boot_id
from paceline.store.feed.node.client import NodeClient
from paceline.store.feed.node.ring import PAGE_BYTES, NodeConfig, Ring
from paceline.store.feed.node.turns import TurnServer, TurnTuner
from paceline.store.feed.options import LoaderConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.store.feed.options import LoaderOptions
    from paceline.store.feed.order import SampleOrder
    from paceline.store.feed.sampler import RankBatches
    from paceline.store.read.pack import Pack

_LOG = logging.getLogger(__name__)
_NUMBERS = itertools.count()  # of this process's loaders, in the order in which ranks make them
_WINDOWS_IN_RING = 4  # one is filled and one is used, and each may be cut at the ring's end
_STEPS_IN_RING = 8
_LEAST_RING_BYTES = 64 << 20
_MOST_OF_MEMORY = 0.25  # that a ring may take
_SHARED_FILE_SYSTEMS = frozenset(
    {"lustre", "gpfs", "beegfs", "nfs", "nfs4", "ceph", "cephfs", "panfs", "pvfs2", "wekafs"}
    | {"afs", "cifs", "smb3", "glusterfs", "fuse"}
)
_OR_NONE = ', or give node_reader="auto" or "off"'


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a process stands among the ranks of its node."""

    local_rank: int
    local_ranks: int
    node: str  # tells it from other nodes of the job

    @classmethod
    def find(cls, environ: Mapping[str, str]) -> NodePlace | None:
        """Return what the launcher says; None: it says nothing."""
        try:
            local_rank, local_ranks = int(environ["LOCAL_RANK"]), int(environ["LOCAL_WORLD_SIZE"])
        except (KeyError, ValueError):
            return None
        # Emulated nodes have one boot id, and nodes with cloned images one name.
        return cls(local_rank, local_ranks, f"{socket.gethostname()}/{boot_id()}")


def join(
    pack: Pack, order: SampleOrder, batches: RankBatches, options: LoaderOptions
) -> NodeClient | None:
    """Return this rank's side of its node's reader; None: the ranks read by themselves.

    Raises:
        UsageError: ``node_reader="on"``, and there cannot be a reader, or the loaders of the
            node's ranks differ.
        DeadlineExceeded: ``node_reader="on"``, and another rank of the node did not iterate.
        StorageError: ``node_reader="on"``, and there is too little memory for the ring.
    """
    is_wanted = options.uses_node_reader == "on"
    place, store = NodePlace.find(environment()), _store()
    refusal = _refusal(pack, place, store, batches, options)
    if refusal is not None:
        if is_wanted:
            raise refusal
        return None
    assert place is not None
    number = next(_NUMBERS)
    meeting = _Meeting(
        store, f"paceline/node-reader/{place.node}/{number}", place, options.timeout_s
    )
    turns = _TurnPlace(store, f"paceline/node-reader/turns/{number}", options.timeout_s)
    try:
        config = _config(pack, order, batches)
        nodes = -(-batches.world_size // place.local_ranks)
        if place.local_rank == 0 and _takes_turns(pack, nodes):
            config = replace(config, turns=turns.find(batches.rank, nodes))
        ring = _common_ring(meeting, pack, config, batches)
    except PacelineError as problem:
        meeting.say("offer", json.dumps({"problem": str(problem)}))
        meeting.say("opened", str(problem))
        if turns.server is not None:
            turns.server.close()
        if is_wanted:
            raise
        _LOG.warning("ranks read by themselves, not by one reader of the node: %s", problem)
        return None
    client = NodeClient(ring, place.local_rank, batches.rank, options.timeout_s)
    if turns.server is not None:
        client.turns = turns.server
        weakref.finalize(client, turns.server.close).atexit = False
    if place.local_rank == 0:
        client.start_reader()
    return client


def _common_ring(meeting: _Meeting, pack: Pack, config: NodeConfig, batches: RankBatches) -> Ring:
    """Return the ring that all local ranks have opened.

    Raises:
        UsageError: their loaders differ.
        StorageError: one of them cannot have or open the ring.
        DeadlineExceeded: one of them did not come.
    """
    own: Ring | None = None
    offer: dict[str, Any] = {"config": asdict(config)}
    if meeting.place.local_rank == 0:
        own = _make_ring(config, pack, meeting.place, batches)
        offer["path"] = f"/proc/{os.getpid()}/fd/{own.descriptor}"
        offer["ring"] = asdict(own.config)
    offers = [json.loads(text) for text in meeting.exchange("offer", json.dumps(offer))]
    _refuse_problems([said.get("problem", "") for said in offers], config.pack)
    _compare([said["config"] for said in offers], config.pack)
    ring = own or _open(offers[0]["path"], NodeConfig(**offers[0]["ring"]))
    _refuse_problems(meeting.exchange("opened", ""), config.pack)
    return ring


def _refuse_problems(problems: list[str], where: str) -> None:
    for rank, problem in enumerate(problems):
        if problem:
            raise StorageError(
                "not all ranks of this node can share a reader",
                where=f"{where}, local rank {rank}",
                why=problem,
                fix="Correct it there" + _OR_NONE,
            )


@dataclass(frozen=True, slots=True)
class _Meeting:
    """The local ranks of one node, in the store that all ranks of the job share."""

    store: Any
    topic: str
    place: NodePlace
    timeout_s: float

    def say(self, what: str, text: str) -> None:
        """Say something to the other local ranks."""
        self.store.set(f"{self.topic}/{what}/{self.place.local_rank}", text)

    def exchange(self, what: str, text: str) -> list[str]:
        """Say something, and return what each local rank says.

        Raises:
            DeadlineExceeded: one of them says nothing.
        """
        self.say(what, text)
        keys = [f"{self.topic}/{what}/{rank}" for rank in range(self.place.local_ranks)]
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as problem:  # torch's own classes
            raise DeadlineExceeded(
                "not all ranks of this node iterate over their loaders "
                f"within {self.timeout_s:g} s",
                where=f"local rank {self.place.local_rank} of {self.place.local_ranks}",
                why=first_line(problem),
                fix="Let all ranks make and use their loaders in the same order" + _OR_NONE,
            ) from problem
        return [self.store.get(key).decode() for key in keys]


class _TurnPlace:
    """Where the readers of all nodes ask for turns: at the job's first rank."""

    def __init__(self, store: Any, key: str, timeout_s: float) -> None:
        self._store = store
        self._key = key
        self._timeout_s = timeout_s
        self.server: TurnServer | None = None

    def find(self, rank: int, nodes: int) -> str:
        """Return the address of the server, which the first rank of the job starts.

        Raises:
            DeadlineExceeded: it did not.
        """
        if rank == 0:
            self.server = TurnServer(TurnTuner(nodes))
            host = environment().get("MASTER_ADDR") or socket.gethostname()
            self._store.set(self._key, self.server.address(host))
        try:
            self._store.wait([self._key], timedelta(seconds=self._timeout_s))
        except RuntimeError as problem:  # torch's own classes
            raise DeadlineExceeded(
                f"rank 0 did not begin to read within {self._timeout_s:g} s",
                where=self._key,
                why=first_line(problem),
                fix="Let all ranks make and use their loaders in the same order" + _OR_NONE,
            ) from problem
        return str(self._store.get(self._key).decode())


def _takes_turns(pack: Pack, nodes: int) -> bool:
    """Return whether readers of several nodes share the storage of a pack."""
    choice = resolve(LoaderConfig).config.read_turns
    if choice != "auto" or nodes == 1:
        return choice == "on" and nodes > 1
    mount = node.mount_of(os.path.realpath(pack.path), node.read_mounts())
    return mount is not None and mount.kind.split(".")[0] in _SHARED_FILE_SYSTEMS


def _refusal(
    pack: Pack,
    place: NodePlace | None,
    store: Any,
    batches: RankBatches,
    options: LoaderOptions,
) -> UsageError | None:
    """Return why there is no reader: the same on all ranks of a node, which do not ask each other.

    So a loader that only some ranks iterate over waits for nobody, unless its data are large.
    """
    choice = options.uses_node_reader
    why, fix = "", ""
    if choice == "off":
        why = "it is off"
    elif batches.world_size == 1:
        why, fix = "one rank has nothing to share", "Start several ranks"
    elif options.worker_kind != "thread":
        why, fix = "worker processes read by themselves", 'Give worker_kind="thread"'
    elif not pack.is_here:
        why, fix = "the pack lies on other nodes", "Open it where its shards lie"
    elif place is None:
        why = "the launcher did not set LOCAL_RANK and LOCAL_WORLD_SIZE"
        fix = "Start the ranks with paceline run or torchrun"
    elif choice == "auto" and place.local_ranks == 1:
        why = "the node has one rank"
    elif choice == "auto" and not _is_larger_than_memory(pack):
        why = "the data fit into memory"
    elif store is None:
        why = "torch.distributed has no process group yet"
        fix = "Call init_process_group before the first pass over the loader"
        if choice == "auto":  # a reader would pay here
            _LOG.warning(
                "ranks read by themselves, not by one reader of the node: %s. %s", why, fix
            )
    if not why:
        return None
    return UsageError(
        "there can be no reader for the node", where=str(pack.path), why=why, fix=fix + _OR_NONE
    )


def _store() -> Any:
    """Return the store of the default process group; None if there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    # Public only as an argument of init_process_group; groups of torch find it in this way as well.
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def _config(pack: Pack, order: SampleOrder, batches: RankBatches) -> NodeConfig:
    fields = asdict(order)
    del fields["epoch"], fields["sample_count"]
    return NodeConfig(
        pack=str(pack.path),
        side_file=None if pack.side_file is None else str(pack.side_file),
        identity=pack.identity,
        verify=pack.verify_policy,
        order=fields,
        global_batch_size=batches.global_batch_size,
        world_size=batches.world_size,
        last=batches.last,
        window_bytes=0,
        direct=_is_larger_than_memory(pack),
    )


def _compare(configs: list[dict[str, Any]], where: str) -> None:
    for rank, config in enumerate(configs):
        for name, value in configs[0].items():
            if name not in ("pack", "side_file", "turns") and config[name] != value:
                raise UsageError(
                    "the loaders of this node's ranks differ",
                    where=where,
                    why=f"{name} is {config[name]!r} on local rank {rank} and {value!r} on 0",
                    fix="Make the loaders of all ranks alike, and in the same order",
                )


def _is_larger_than_memory(pack: Pack) -> bool:
    """Return whether the page cache would forget most of the data before they come again."""
    memory_bytes = node.memory_bytes()
    return 0 < memory_bytes / 2 < _data_bytes(pack)


def _data_bytes(pack: Pack) -> int:
    return int(pack.index.shard_lengths.sum())


def _make_ring(config: NodeConfig, pack: Pack, place: NodePlace, batches: RankBatches) -> Ring:
    """Return a new ring.

    Raises:
        StorageError: there is too little memory for it.
    """
    memory_bytes = node.memory_bytes()
    # Samples that lie alone are read with the pages that they begin and end in.
    sample_bytes = _data_bytes(pack) / max(1, len(pack)) + 2 * PAGE_BYTES
    share = batches.global_batch_size // batches.world_size
    step_bytes = sample_bytes * share * place.local_ranks
    ring_bytes = max(_LEAST_RING_BYTES, int(_STEPS_IN_RING * step_bytes))
    most = int(memory_bytes * _MOST_OF_MEMORY) if memory_bytes else ring_bytes
    ring_bytes = min(ring_bytes, most) // PAGE_BYTES * PAGE_BYTES
    if ring_bytes < _WINDOWS_IN_RING * step_bytes:
        raise StorageError(
            "there is too little memory for the ring of the node's reader",
            where=config.pack,
            why=f"{_WINDOWS_IN_RING} steps of all local ranks take "
            f"{_WINDOWS_IN_RING * step_bytes / 2**20:,.0f} MiB, a quarter of the memory that "
            f"this job may use is {most / 2**20:,.0f} MiB",
            fix="Use smaller batches" + _OR_NONE,
        )
    config = replace(config, window_bytes=ring_bytes // _WINDOWS_IN_RING)
    return Ring.create(config, place.local_ranks, ring_bytes)


def _open(path: str, expected: NodeConfig) -> Ring:
    """Return the ring that the first local rank has made.

    Raises:
        StorageError: it cannot be opened from here.
    """
    why = "another process has that id here: this rank has process ids of its own"
    try:
        ring = Ring(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        if ring.config == expected:
            return ring
    except (OSError, ValueError, TypeError) as problem:
        why = f"{why}; {problem}"
    raise StorageError(
        "the ring of local rank 0 cannot be opened",
        where=path,
        why=why,
        fix="Start the ranks of a node in one container" + _OR_NONE,
    )
