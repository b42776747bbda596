"""How the ranks of a node come to share a reader.

The first local rank decides whether there is one, makes the ring, and says through the store of
torch.distributed where it is; the others open it through ``/proc/PID/fd/N``. What the launcher
says about a node's ranks (LOCAL_RANK, LOCAL_WORLD_SIZE) is taken as it is: ranks in containers with
process ids of their own cannot open the ring, and then read by themselves.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.core import node
from paceline.core.config import environment
from paceline.core.errors import DeadlineExceeded, StorageError, UsageError, first_line
from paceline.core.processes import boot_id
from paceline.store.feed.node.client import NodeClient
from paceline.store.feed.node.ring import PAGE_BYTES, NodeConfig, Ring

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.store.feed.options import LoaderOptions
    from paceline.store.feed.order import SampleOrder
    from paceline.store.feed.sampler import RankBatches
    from paceline.store.read.pack import Pack

_LOG = logging.getLogger(__name__)
_NUMBERS = (
    itertools.count()
)  # of the loaders of this process, in the order in which ranks make them
_WINDOWS_IN_RING = 4  # one is filled and one is used, and each may be cut at the ring's end
_STEPS_IN_RING = 8
_LEAST_RING_BYTES = 64 << 20
_MOST_OF_MEMORY = 0.25  # that a ring may take


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
    """Return this rank's side of its node's reader; None: the rank reads by itself.

    Raises:
        UsageError: ``node_reader="on"``, and there cannot be one; or the ranks' loaders differ.
        DeadlineExceeded: ``node_reader="on"``, and another rank of the node made no loader.
        StorageError: ``node_reader="on"``, and there is too little memory for the ring.
    """
    place = NodePlace.find(environment())
    store = _store()
    choice = options.uses_node_reader
    why = _why_not(pack, place, store, batches, options)
    if why:
        if choice == "on":
            raise UsageError(
                "there can be no reader for the node",
                where=str(pack.path),
                why=why,
                fix='Give node_reader="auto" or "off"',
            )
        return None
    assert place is not None
    config = _config(pack, order, batches, options)
    topic = f"paceline/node-reader/{place.node}/{next(_NUMBERS)}"
    ring: Ring | None
    try:
        if place.local_rank == 0:
            ring = _offer(store, topic, config, pack, place, batches)
        else:
            ring = _accept(store, topic, config, options)
    except (DeadlineExceeded, StorageError, OSError, ValueError) as problem:
        if choice == "on":
            raise
        _LOG.warning("ranks read by themselves, not by one reader of the node: %s", problem)
        return None
    if ring is None:  # said by local rank 0
        return None
    client = NodeClient(ring, place.local_rank, batches.rank, options.timeout_s)
    if place.local_rank == 0:
        client.start_reader()
    return client


def _why_not(
    pack: Pack,
    place: NodePlace | None,
    store: Any,
    batches: RankBatches,
    options: LoaderOptions,
) -> str:
    """Return why there is no reader: the same on all ranks of a node, which do not ask each other.

    So a loader that only some ranks iterate over waits for nobody, unless its data are large.
    """
    choice = options.uses_node_reader
    if choice == "off" or batches.world_size == 1:
        return "one rank has nothing to share" if batches.world_size == 1 else "it is off"
    if options.worker_kind != "thread":
        return "worker processes read by themselves"
    if place is None:
        return "the launcher did not set LOCAL_RANK and LOCAL_WORLD_SIZE"
    if choice == "auto" and place.local_ranks == 1:
        return "the node has one rank"
    if choice == "auto" and not _is_larger_than_memory(pack):
        return "the data fit into memory"
    return "" if store is not None else "torch.distributed has no process group yet"


def _store() -> Any:
    """Return the store of the default process group; None if there is none."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return None
    # Public only as an argument of init_process_group; groups of torch find it in this way as well.
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


def _config(
    pack: Pack, order: SampleOrder, batches: RankBatches, options: LoaderOptions
) -> NodeConfig:
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


def _is_larger_than_memory(pack: Pack) -> bool:
    """Return whether the page cache would forget most of the data before they come again."""
    memory_bytes = node.memory_bytes()
    return 0 < memory_bytes / 2 < _data_bytes(pack)


def _data_bytes(pack: Pack) -> int:
    return int(pack.index.shard_lengths.sum())


def _offer(
    store: Any,
    topic: str,
    config: NodeConfig,
    pack: Pack,
    place: NodePlace,
    batches: RankBatches,
) -> Ring:
    """Make the ring and say where it is."""
    memory_bytes = node.memory_bytes()
    # Samples that lie alone are read with the pages that they begin and end in.
    sample_bytes = _data_bytes(pack) / max(1, len(pack)) + 2 * PAGE_BYTES
    share = batches.global_batch_size // batches.world_size
    step_bytes = sample_bytes * share * place.local_ranks
    ring_bytes = max(_LEAST_RING_BYTES, int(_STEPS_IN_RING * step_bytes))
    most = int(memory_bytes * _MOST_OF_MEMORY) if memory_bytes else ring_bytes
    ring_bytes = min(ring_bytes, most) // PAGE_BYTES * PAGE_BYTES
    if ring_bytes < _WINDOWS_IN_RING * step_bytes:
        problem = StorageError(
            "there is too little memory for the ring of the node's reader",
            where=config.pack,
            why=f"{_WINDOWS_IN_RING} steps of all local ranks take "
            f"{_WINDOWS_IN_RING * step_bytes / 2**20:,.0f} MiB, a quarter of the memory that "
            f"this job may use is {most / 2**20:,.0f} MiB",
            fix='Use smaller batches, or node_reader="off"',
        )
        store.set(topic, json.dumps({"off": str(problem)}))
        raise problem
    config = replace(config, window_bytes=ring_bytes // _WINDOWS_IN_RING)
    ring = Ring.create(config, place.local_ranks, ring_bytes)
    path = f"/proc/{os.getpid()}/fd/{ring.descriptor}"
    store.set(topic, json.dumps({"path": path, "config": asdict(config)}))
    return ring


def _accept(store: Any, topic: str, config: NodeConfig, options: LoaderOptions) -> Ring | None:
    """Open the ring that local rank 0 has made; None: there is none."""
    try:
        store.wait([topic], timedelta(seconds=options.timeout_s))
        said = json.loads(store.get(topic))
    except RuntimeError as problem:  # torch's own classes
        raise DeadlineExceeded(
            f"local rank 0 made no loader within {options.timeout_s:g} s",
            where=config.pack,
            why=first_line(problem),
            fix='Let all ranks of a node make their loaders in the same order, or "off"',
        ) from problem
    if "off" in said:
        return None
    theirs = NodeConfig(**said["config"])
    own = replace(config, window_bytes=theirs.window_bytes)
    for name, value in asdict(own).items():
        if name != "pack" and value != getattr(theirs, name):
            raise UsageError(
                "the loaders of this node's ranks differ",
                where=config.pack,
                why=f"{name} is {value!r} here and {getattr(theirs, name)!r} on local rank 0",
                fix="Make the loaders of all ranks alike, and in the same order",
            )
    ring = Ring(os.open(said["path"], os.O_RDWR | os.O_CLOEXEC))
    if ring.config != theirs:
        raise ValueError("local rank 0 has process ids of its own: its ring cannot be opened")
    return ring
