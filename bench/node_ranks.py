"""The processes of store_node.py: ranks that read their share of an epoch, and readers for them.

    python bench/node_ranks.py rank JSON      says "ready", reads on "go", says what it took
    python bench/node_ranks.py reader JSON    reads for the ranks of a node, until they have left

What is measured of a process (bytes, faults, switches) its parent reads from /proc.
"""

from __future__ import annotations

import itertools
import json
import mmap
import struct
import sys
from dataclasses import dataclass

import numpy as np

SAMPLES_PER_RANK = 16  # of a step, unless the parent says otherwise
DEADLINE_S = 600


# --- ranks ---------------------------------------------------------------------------------------


def rank_main(asked):
    """Read this rank's part of the epoch on "go", and say what that took."""
    from paceline.store import SampleOrder
    from paceline.store.feed.sampler import RankBatches

    order = SampleOrder(sample_count=asked["count"], **asked["order"])
    batches = RankBatches(
        sample_count=asked["count"],
        global_batch_size=asked["batch"],
        rank=asked["rank"],
        world_size=asked["world_size"],
        last="drop",
    )
    planned = batches.positions(0, asked["steps"])
    steps = [order.samples(places) for places in planned]
    form = {"node": NodeForm, "pack": PackForm}.get(asked["form"], LmdbForm)(asked)
    print("ready", flush=True)
    sys.stdin.readline()
    samples = size = 0
    for step, numbers in enumerate(steps):
        for body in form.take(step, numbers):
            look_at(body)
            samples += 1
            size += len(body)
    said = {"samples": samples, "bytes": size, "own_reads": form.own_reads()}
    print(json.dumps({**said, "copied": form.copied}), flush=True)
    sys.stdin.readline()
    form.end()
    return 0


def look_at(body):
    """Go through the bytes a page at a time, as decoding goes through them all."""
    np.frombuffer(body, np.uint8)[:: mmap.PAGESIZE].sum()


class LmdbForm:
    """A cursor of this rank's own: py-lmdb, with or without the kernel's read-ahead."""

    def __init__(self, asked):
        import lmdb

        ahead = asked["form"] == "lmdb-ahead"
        self._store = lmdb.open(asked["place"], readonly=True, lock=False, readahead=ahead)
        self.copied = 0

    def take(self, _, numbers):
        with self._store.begin() as transaction:
            # A batch, as all forms give it: values that are dropped one by one are copied to where
            # the one before was, in the processor's cache.
            bodies = [transaction.get(struct.pack(">Q", number)) for number in numbers.tolist()]
        self.copied += sum(map(len, bodies))
        return bodies

    def own_reads(self):
        return 0

    def end(self):
        self._store.close()


class PackForm:
    """A pack, or data in place, that this rank reads by itself."""

    def __init__(self, asked):
        from paceline.store import open_pack

        self._pack = open_pack(asked["place"], threads=1)
        self.copied = 0

    def take(self, _, numbers):
        buffer, offsets = self._pack.read_batch(numbers)
        self.copied += len(buffer)
        return [buffer[begin:end] for begin, end in itertools.pairwise(offsets)]

    def own_reads(self):
        return 0

    def end(self):
        self._pack.close()


class NodeForm:
    """Views of what the reader of the node has read."""

    def __init__(self, asked):
        from paceline.store import open_pack
        from paceline.store.feed.node.client import NodeClient
        from paceline.store.feed.node.ring import Ring

        ring = Ring(asked["descriptor"])
        self._client = NodeClient(ring, asked["local_rank"], asked["rank"], DEADLINE_S)
        self._pack = open_pack(asked["place"], threads=1)
        self._pass = None
        self.copied = 0  # by this rank

    def take(self, step, numbers):
        if self._pass is None:
            self._pass = self._client.begin(0, 0)
        taken = self._pass.take(step, len(numbers))
        return taken if taken is not None else self._pack.views(numbers)

    def own_reads(self):
        return self._client.own_reads

    def end(self):
        self._client.leave()


# --- readers -------------------------------------------------------------------------------------


@dataclass
class CursorPlan:
    """What `CursorReads` would read; as `paceline.native.SortedPlan`."""

    ids: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray
    target_bytes: int
    storage_bytes: int
    reads: int = 0
    range_count: int = 0


class CursorReads:
    """Reads of the node's reader through LMDB: each record is copied out of the mapping."""

    def __init__(self, place, pack):
        import lmdb

        self._store = lmdb.open(place, readonly=True, lock=False, readahead=False)
        self._pack = pack

    def plan(self, ids):
        lengths = self._pack.lengths_of(ids).astype(np.int64)
        ends = np.cumsum(lengths)
        size = int(ends[-1])
        return CursorPlan(ids, ends - lengths, lengths, size, size)

    def read(self, plan, target, _):
        with self._store.begin(buffers=True) as transaction:
            for number, begin, length in zip(
                plan.ids.tolist(), plan.begins.tolist(), plan.lengths.tolist(), strict=True
            ):
                body = transaction.get(struct.pack(">Q", number))
                target[begin : begin + length] = np.frombuffer(body, np.uint8)


def reader_main(asked):
    """Serve a ring, as `paceline.store.feed.node.reader` does, with a part of what it does off."""
    from paceline.store.feed.node.reader import ReadSettings, RingReader
    from paceline.store.feed.node.ring import Ring

    ring = Ring(asked["descriptor"])
    assert ring.lock(0)
    settings = {
        "one reader": ReadSettings(most_steps=1),
        "exact offsets": ReadSettings(most_steps=1, gap_bytes=0),
    }
    reader = RingReader(ring, settings.get(asked["technique"], ReadSettings()))
    if asked["technique"] == "one reader":
        reader.sorted = CursorReads(asked["place"], reader.pack)
    reader.serve()
    return 0


if __name__ == "__main__":
    mains = {"rank": rank_main, "reader": reader_main}
    sys.exit(mains[sys.argv[1]](json.loads(sys.argv[2])))
