"""One reader for all ranks of a node against a reader in each rank, where memory is short.

The ranks of one node read one shuffled epoch of a data set that is four times as large as the
memory cgroup that all of them, and the reader of the node, run in. Every rank takes its share of
each step in the same order, whoever reads: it goes once through the bytes of its samples, a page at
a time.

    lmdb           py-lmdb in each rank, readahead=False, as is customary
    lmdb-ahead     py-lmdb in each rank, with the kernel's read-ahead
    pack           a mapped pack in each rank
    node           one reader of the node, ranks get views

    python bench/store_node.py --json [--quick] [--data FOLDER] [--rounds N] [--ranks N ...]

Needs root (a memory cgroup of version 1) and py-lmdb. Bytes read are those of /proc/PID/io, of all
processes together.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import os
import resource
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from harness import Report, await_ranks, options, tell
from store_data import listing, make_files, make_lmdb, make_pack

HERE = Path(__file__).parent
PACELINE = Path(sys.executable).with_name("paceline")
SAMPLES_PER_RANK = 16  # of a step
MEMORY_PART = 4  # the data set is as many times as large as the cgroup's memory
RING_PART = 4  # of the memory that the ring takes
DEADLINE_S = 300
FORMS = ("lmdb", "lmdb-ahead", "pack", "node")


def main():
    flags = options(__doc__, "--data", "--rounds", "--ranks", "--rank")
    if flags.rank:
        return rank_main(json.loads(flags.rank[0]))
    report = Report("store_node", flags.json)
    folder = Path(flags.data[0] if flags.data else HERE.parent / "build" / "bench-data").absolute()
    name = "107KB"  # also when quick: the memory of a quarter of it must hold the ranks
    rounds = int(flags.rounds[0]) if flags.rounds else (1 if flags.quick else 3)
    counts = [int(n) for n in flags.ranks] if flags.ranks else [4] if flags.quick else [1, 2, 4, 8]
    places = {"pack": make_pack(folder, name, PACELINE), "lmdb": lmdb_of(folder, name)}
    for ranks in counts:
        found = {form: [] for form in FORMS}
        # With read-ahead py-lmdb reads the data many times over, which takes minutes.
        forms = [form for form in FORMS if form != "lmdb-ahead" or not flags.quick]
        for number in range(rounds):
            for form in forms:
                measured = measure(places, form, ranks, seed=number)
                found[form].append(measured)
        for form in forms:
            report.row(ranks=ranks, form=form, **medians(found[form]))
        if ranks == 4:
            add_bars(report, {form: medians(found[form]) for form in forms})
    return report.print()


def medians(found):
    return {key: statistics.median(row[key] for row in found) for key in found[0]}


def add_bars(report, found):
    node = found["node"]
    report.bar("pack: bytes read / data set", node["bytes_read"] / node["data_bytes"], 1.1)
    slow = found["lmdb"]
    best = max(slow, found.get("lmdb-ahead", slow), key=speed)
    report.bar(
        "pack: samples/s / py-lmdb readahead=False", speed(node) / speed(slow), 3, at_least=True
    )
    report.bar("pack: samples/s / py-lmdb's best", speed(node) / speed(best), 1.5, at_least=True)


def speed(found):
    return found["samples_per_s"]


def lmdb_of(folder, name):
    """Return the set as an LMDB database; it is made once."""
    place = folder / name / "lmdb-in-place"
    if not (place / "data.mdb").exists():
        tell(f"making {place}")
        make_lmdb(listing(make_files(folder, name)), place)
        os.sync()
    return place


class Cgroup:
    """A memory cgroup of version 1 below this process's own."""

    def __init__(self, limit_bytes):
        own = next(
            line.split(":", 2)[2]
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if "memory" in line.split(":")[1].split(",")
        )
        self.folder = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"bench-{os.getpid()}"
        self.folder.mkdir()
        (self.folder / "memory.limit_in_bytes").write_text(str(limit_bytes))

    def enter(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def close(self):
        self.folder.rmdir()


def measure(places, form, ranks, seed):
    """Return what one epoch of all ranks took."""
    from paceline.store import SampleOrder, open_pack
    from paceline.store.feed.node.ring import PAGE_BYTES, NodeConfig, Ring

    with open_pack(places["pack"]) as pack:
        data_bytes, count, identity = int(pack.lengths.sum()), len(pack), pack.identity
        pack.evict()
    order = dataclasses.asdict(SampleOrder(sample_count=count, seed=seed))
    memory = data_bytes // MEMORY_PART
    drop_cache()
    cgroup = Cgroup(memory)
    asked = {"form": form, "ranks": ranks, "seed": seed, "count": count}
    asked["place"] = str(places["pack" if form in ("pack", "node") else "lmdb"])
    descriptors = ()
    if form == "node":
        del order["epoch"], order["sample_count"]
        ring_bytes = memory // RING_PART // PAGE_BYTES * PAGE_BYTES
        config = NodeConfig(
            pack=asked["place"],
            side_file=None,
            identity=identity,
            verify="first",
            order=order,
            global_batch_size=SAMPLES_PER_RANK * ranks,
            world_size=ranks,
            last="drop",
            window_bytes=ring_bytes // 4,
            direct=True,
        )
        ring = Ring.create(config, ranks, ring_bytes)
        asked["descriptor"] = ring.descriptor
        descriptors = (ring.descriptor,)
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", json.dumps({**asked, "rank": rank})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=descriptors,
            preexec_fn=cgroup.enter,  # the parent has no threads
        )
        for rank in range(ranks)
    ]
    for process in started:  # all are ready
        assert process.stdout.readline() == "ready\n"
    begin = time.perf_counter()
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [json.loads(process.stdout.readline()) for process in started]
    took = time.perf_counter() - begin
    for process in started:
        process.stdin.close()
    await_ranks(started, DEADLINE_S)
    cgroup.close()
    samples = sum(rank["samples"] for rank in said)
    return {
        "samples_per_s": samples / took,
        "bytes_read": sum(rank["bytes_read"] for rank in said),
        "data_bytes": sum(rank["bytes"] for rank in said),
        "reads": sum(rank["reads"] for rank in said),
        "faults_per_sample": sum(rank["faults"] for rank in said) / samples,
        "switches_per_sample": sum(rank["switches"] for rank in said) / samples,
        "read_by_rank": sum(rank["own_reads"] for rank in said),
    }


def drop_cache():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def rank_main(asked):
    """Read this rank's part of the epoch when told to, and say what that took."""
    from paceline.store import SampleOrder
    from paceline.store.feed.sampler import RankBatches

    ranks, rank = asked["ranks"], asked["rank"]
    order = SampleOrder(sample_count=asked["count"], seed=asked["seed"])
    batches = RankBatches(
        sample_count=asked["count"],
        global_batch_size=SAMPLES_PER_RANK * ranks,
        rank=rank,
        world_size=ranks,
        last="drop",
    )
    steps = [order.samples(places) for places in batches.positions(0, asked["count"])]
    take, end = {"node": node_form, "pack": pack_form}.get(asked["form"], lmdb_form)(asked)
    print("ready", flush=True)
    sys.stdin.readline()
    before = counters()
    samples = size = 0
    for step, numbers in enumerate(steps):
        for body in take(step, numbers):
            look_at(body)
            samples += 1
            size += len(body)
    after = counters()
    reads, bytes_read, own_reads = end()
    print(
        json.dumps(
            {
                "samples": samples,
                "bytes": size,
                "bytes_read": after["bytes_read"] - before["bytes_read"] + bytes_read,
                "reads": reads,
                "own_reads": own_reads,
                "faults": after["faults"] - before["faults"],
                "switches": after["switches"] - before["switches"],
            }
        ),
        flush=True,
    )
    sys.stdin.readline()
    return 0


def look_at(body):
    """Go through the bytes a page at a time, as whoever decodes them goes through them all."""
    np.frombuffer(body, np.uint8)[:: mmap.PAGESIZE].sum()


def counters():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "bytes_read": bytes_read_by(os.getpid()),
        "faults": used.ru_minflt + used.ru_majflt,
        "switches": used.ru_nvcsw + used.ru_nivcsw,
    }


def bytes_read_by(process):
    lines = Path(f"/proc/{process}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def lmdb_form(asked):
    import lmdb

    ahead = asked["form"] == "lmdb-ahead"
    store = lmdb.open(asked["place"], readonly=True, lock=False, readahead=ahead)

    def take(_, numbers):
        with store.begin() as transaction:
            for number in numbers.tolist():
                yield transaction.get(struct.pack(">Q", number))

    return take, lambda: (0, 0, 0)


def pack_form(asked):
    from paceline.store import open_pack

    pack = open_pack(asked["place"], threads=1)

    def take(_, numbers):
        buffer, offsets = pack.read_batch(numbers)
        for begin, end in itertools.pairwise(offsets):
            yield buffer[begin:end]

    return take, lambda: (0, 0, 0)


def node_form(asked):
    from paceline.store import open_pack
    from paceline.store.feed.node.client import NodeClient
    from paceline.store.feed.node.ring import Ring, Word

    ring = Ring(asked["descriptor"])
    client = NodeClient(ring, asked["rank"], asked["rank"], DEADLINE_S)
    pack = open_pack(asked["place"], threads=1)
    if asked["rank"] == 0:
        client.start_reader()
    passes = []

    def take(step, numbers):
        if not passes:
            passes.append(client.begin(0, 0))
        taken = passes[0].take(step, len(numbers))
        yield from taken if taken is not None else pack.views(numbers)

    def end():
        found = (0, 0, client.own_reads)
        if asked["rank"] == 0:
            words = ring.words
            found = (words.load(Word.READS), bytes_read_by(client.reader_pid), client.own_reads)
        client.leave()
        return found

    return take, end


if __name__ == "__main__":
    sys.exit(main())
