"""One reader for all ranks of a node against a reader in each rank, where memory is short.

The ranks of one node read one shuffled epoch of a data set that is four times as large as the
memory cgroup that all of them, and the reader of the node, run in. Every rank takes its share of
each step in the same order, whatever process reads: it goes once through the bytes of its samples,
a page at a time. Bytes read are those of /proc/PID/io, of all processes together.

- sources: by 4 ranks, from an LMDB database and from a pack: py-lmdb in each rank with
  readahead=False, as is customary, and with the kernel's read-ahead (for a part of the epoch: it
  reads the data many times over); a pack in each rank; the reader of the node, from either source.
- techniques: LMDBIO's, switched on in turn, by 1, 2, 4 and 8 ranks, from the database: a cursor of
  its own in each rank; one reader with a cursor, which copies into memory that ranks share (these
  two are slow, and read a quarter of the epoch); exact offsets, so that the reader reads past
  mapping and page cache; coalescing: windows of many steps, sorted; staggering: turns over TCP, of
  which one node is always given its own. And coalescing for shuffle="block" with blocks and windows
  that the reader's windows hold. Copied are the bytes that processors copied, of ranks and reader.
- cache: one rank, with all data in the page cache and no cgroup: py-lmdb; the database in place by
  the rank itself, which is what a loader does there (node_reader="auto"); and through a reader.
- turns: four emulated nodes (each a reader and a rank in processes of their own) read one pack
  through FUSE (seek_fuse.py), where each read that does not continue the last one costs 5 ms. They
  read blocks of 64 samples: all at once, one at a time, and as many as the tuner finds.

    python bench/store_node.py --json [--quick] [--only SECTION ...] [--data FOLDER] [--rounds N]
                               [--ranks N ...]

Needs root (a memory cgroup of version 1) and py-lmdb; turns also Debian's fuse3, and mfusepy in an
environment of its own (`scripts/peers fuse`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import Report, await_ranks, options, run_sections, tell
from memory_cgroup import MemoryCgroup
from node_ranks import DEADLINE_S, SAMPLES_PER_RANK
from store_data import listing, make_files, make_lmdb, make_pack

from paceline.store import SampleOrder, open_pack
from paceline.store.feed.node.reader import ReadSettings
from paceline.store.feed.node.ring import PAGE_BYTES, NodeConfig, Ring, Word
from paceline.store.feed.node.turns import TurnServer, TurnTuner

HERE = Path(__file__).parent
PACELINE = Path(sys.executable).with_name("paceline")
FUSE_PYTHON = HERE.parent / "build" / "peers" / "fuse" / "bin" / "python"
MEMORY_PART = 4  # the data set is as many times as large as the cgroup's memory
RING_PART = 4  # of the memory that the ring takes
CACHED_RING_BYTES = 64 << 20  # as a loader makes it for steps of this size
TECHNIQUES = ("own cursor", "one reader", "exact offsets", "coalescing", "staggering")
BLOCK_SAMPLES, WINDOW_BLOCKS = 32, 4  # 14 MB: half a window of the reader
NODES = 4
SEEK_S = 0.005
TURN_BATCH = 64  # samples of a step and node: one block of the order
TURN_RING_BYTES = 40 << 20  # a window has one block of some 7 MB


@dataclasses.dataclass(frozen=True)
class Data:
    """One data set, as a pack and as a database."""

    places: dict
    count: int
    size_bytes: int

    @classmethod
    def make(cls, folder, name):
        places = {"pack": make_pack(folder, name, PACELINE), "lmdb": lmdb_of(folder, name)}
        for place in places.values():
            with open_pack(place) as pack:  # indexes the database once
                count, size_bytes = len(pack), int(pack.lengths.sum())
        return cls(places, count, size_bytes)


def lmdb_of(folder, name):
    """Return the set as an LMDB database; it is made once."""
    place = folder / name / "lmdb-in-place"
    if not (place / "data.mdb").exists():
        tell(f"making {place}")
        make_lmdb(listing(make_files(folder, name)), place)
        os.sync()
    return place


def main():
    flags = options(__doc__, "--data", "--rounds", "--ranks", "--only")
    report = Report("store_node", flags.json)
    folder = Path(flags.data[0] if flags.data else HERE.parent / "build" / "bench-data").absolute()
    # When quick the memory of a quarter of the set must still hold four ranks.
    data = Data.make(folder, "half-107KB" if flags.quick else "107KB")
    run_sections(flags.only or SECTIONS, lambda name: SECTIONS[name](report, data, flags), report)
    return report.print()


def rounds_of(flags):
    return int(flags.rounds[0]) if flags.rounds else (1 if flags.quick else 3)


def medians(found):
    return {key: statistics.median(row[key] for row in found) for key in found[0]}


def speed(found):
    return found["samples_per_s"]


# --- sections ------------------------------------------------------------------------------------


def sources(report, data, flags):
    part = 4 if flags.quick else 1
    forms = {  # source, form, part of the epoch
        "py-lmdb": ("lmdb", "lmdb", 16 if flags.quick else 1),
        "py-lmdb with read-ahead": ("lmdb", "lmdb-ahead", 16),
        "pack in each rank": ("pack", "pack", part),
        "node, pack": ("pack", "node", part),
        "node, LMDB in place": ("lmdb", "node", part),
    }
    if flags.quick:
        del forms["py-lmdb with read-ahead"], forms["pack in each rank"]
    found = {name: [] for name in forms}
    for seed in range(rounds_of(flags)):
        for name, (source, form, part) in forms.items():
            found[name].append(NodeRun(data, source, form, ranks=4, seed=seed, part=part).measure())
    found = {name: medians(measured) for name, measured in found.items()}
    for name, measured in found.items():
        report.row(section="sources", ranks=4, form=name, **measured)
    slow = found["py-lmdb"]
    best = max(slow, found.get("py-lmdb with read-ahead", slow), key=speed)
    for source in ("pack", "LMDB in place"):
        node = found[f"node, {source}"]
        bar = report.bar
        bar(f"{source}: bytes read / data set", node["bytes_read"] / node["data_bytes"], 1.1)
        ratio = speed(node) / speed(slow)
        bar(f"{source}: samples/s / py-lmdb readahead=False", ratio, 3, at_least=True)
        bar(f"{source}: samples/s / py-lmdb's best", speed(node) / speed(best), 1.5, at_least=True)


def techniques(report, data, flags):
    counts = list(map(int, flags.ranks or ([4] if flags.quick else [1, 2, 4, 8])))
    parts = dict.fromkeys(("own cursor", "one reader"), 16 if flags.quick else 4)
    fast_part = 4 if flags.quick else 1
    gains = {}
    for ranks in counts:
        found = {name: [] for name in (*TECHNIQUES, "coalescing, block shuffle")}
        for seed in range(rounds_of(flags)):
            for name, measured in found.items():
                form = "lmdb" if name == "own cursor" else "node"
                technique, _, shuffle = name.partition(", ")
                run = NodeRun(
                    data,
                    "lmdb",
                    form,
                    ranks=ranks,
                    seed=seed,
                    part=parts.get(name, fast_part),
                    technique=technique,
                    shuffle="block" if shuffle else "global",
                )
                measured.append(run.measure())
        own = medians(found["own cursor"])
        for name, measured in found.items():
            middle = medians(measured)
            gain = speed(middle) / speed(own)
            report.row(section="techniques", ranks=ranks, technique=name, gain=gain, **middle)
            if name.startswith("coalescing") and fast_part == 1:  # else the reader is ahead
                over = max(row["reads_over"] for row in measured)
                label = f"{ranks} ranks, {name}: read calls beyond ceil(bytes / target) + gaps"
                report.bar(label, over, 0)
        gains[ranks] = gain_of(found)
    if len(gains) > 1:
        least, most = min(gains), max(gains)
        name = f"gain over own cursors: {most} ranks / {least} rank"
        report.bar(name, gains[most] / gains[least], 1, at_least=True)


def gain_of(found):
    """Return how much faster all techniques together are, as the median over the rounds."""
    pairs = zip(found["staggering"], found["own cursor"], strict=True)
    return statistics.median(speed(node) / speed(own) for node, own in pairs)


def cache(report, data, flags):
    for source in data.places.values():
        subprocess.run(["cat", *map(str, sorted(source.iterdir()))], stdout=subprocess.DEVNULL)
    forms = {"own cursor": "lmdb", "auto: in place, no reader": "pack", "reader": "node"}
    found = {name: [] for name in forms}
    for seed in range(rounds_of(flags)):
        for name, form in forms.items():
            run = NodeRun(data, "lmdb", form, ranks=1, seed=seed, cached=True)
            found[name].append(run.measure())
    for name, measured in found.items():
        report.row(section="cache", ranks=1, form=name, **medians(measured))
    for name in list(forms)[1:]:
        pairs = zip(found[name], found["own cursor"], strict=True)
        gain = statistics.median(speed(other) / speed(own) for other, own in pairs)
        report.bar(f"1 rank, in cache, {name}: samples/s / own cursor", gain, 1, at_least=True)


def turns(report, data, flags):
    if not FUSE_PYTHON.exists():
        reason = "scripts/peers fuse was not run"
        report.bar("four nodes: turns were measured", None, 1, at_least=True, reason=reason)
        return
    steps = 4 if flags.quick else 60
    modes = {"all at once": None, "one at a time": 1, "tuned": NODES}
    if flags.quick:
        del modes["tuned"]
    found = {}
    for name, most in modes.items():
        found[name] = turn_run(data, most, steps)
        report.row(section="turns", nodes=NODES, readers=name, **found[name])
    for name in list(modes)[1:]:
        gain = found["all at once"]["seconds"] / found[name]["seconds"]
        report.bar(f"four nodes, {name}: time of all at once / time", gain, 1, at_least=True)


SECTIONS = {"sources": sources, "techniques": techniques, "cache": cache, "turns": turns}


# --- one node ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shape:
    ranks: int
    seed: int
    part: int = 1
    technique: str = "coalescing"
    shuffle: str = "global"
    cached: bool = False


class NodeRun:
    """The ranks of one node, which read an epoch or a part of it in one form.

    Args:
        data: what they read.
        source: ``lmdb`` or ``pack``.
        form: of a rank (node_ranks.py).
        shape: of the node, its order, and what its reader does.
    """

    def __init__(self, data, source, form, **shape):
        self._data = data
        self._form = form
        self._place = str(data.places[source])
        self._shape = shape = _Shape(**shape)
        batch = SAMPLES_PER_RANK * shape.ranks
        self._steps = data.count // shape.part // batch
        order = SampleOrder(
            sample_count=data.count,
            seed=shape.seed,
            shuffle=shape.shuffle,
            block_samples=BLOCK_SAMPLES,
            window_blocks=WINDOW_BLOCKS,
        )
        self._order = order_fields(order)
        self._memory_bytes = 0 if shape.cached else int(data.size_bytes / MEMORY_PART)
        self._config = NodeConfig(
            **pack_fields(self._place),
            verify="first",
            order=self._order,
            global_batch_size=batch,
            world_size=shape.ranks,
            last="drop",
            window_bytes=self._ring_bytes() // 4,
            direct=not shape.cached,
        )

    def _ring_bytes(self):
        ring_bytes = self._memory_bytes // RING_PART or CACHED_RING_BYTES
        return ring_bytes // PAGE_BYTES * PAGE_BYTES

    def measure(self):
        """Return what the part of the epoch took all ranks."""
        if not self._shape.cached:
            drop_cache()
        with contextlib.ExitStack() as stack:
            limit_bytes = self._memory_bytes
            cgroup = stack.enter_context(MemoryCgroup(limit_bytes)) if limit_bytes else None
            config, words = self._config, None
            if self._shape.technique == "staggering":
                server = TurnServer(TurnTuner(1))
                stack.callback(server.close)
                config = dataclasses.replace(config, turns=server.address("127.0.0.1"))
            asked = {
                "form": self._form,
                "count": self._data.count,
                "order": {**self._order, "epoch": 0},
                "steps": self._steps,
                "batch": config.global_batch_size,
                "world_size": config.world_size,
                "place": self._place,
            }
            started, descriptors = [], ()
            if self._form == "node":
                ring = Ring.create(config, self._shape.ranks, self._ring_bytes())
                words, descriptors = ring.words, (ring.descriptor,)
                asked |= {"descriptor": ring.descriptor, "technique": self._shape.technique}
            for rank in range(self._shape.ranks):
                numbers = {"rank": rank, "local_rank": rank}
                started.append(start(cgroup, "rank", asked | numbers, descriptors))
            processes = list(started)
            stack.callback(kill, processes)
            await_ready(started)
            if words:
                processes.append(start(cgroup, "reader", asked, descriptors))
                await_reader(ring, processes[-1])
            before = [counters(process.pid) for process in processes]
            took, said = go(started)
            after = [counters(process.pid) for process in processes]
            end(processes)
        used = {
            key: sum(end[key] - begin[key] for end, begin in zip(after, before, strict=True))
            for key in before[0]
        }
        calls = after[-1]["calls"] - before[-1]["calls"] if words else 0
        return self._result(said, took, used, words, calls)

    def _result(self, said, took, used, words, calls):
        samples = sum(rank["samples"] for rank in said)
        size = sum(rank["bytes"] for rank in said)
        copied = sum(rank["copied"] for rank in said)
        result = {
            "samples_per_s": samples / took,
            "bytes_read": used["bytes_read"],
            "data_bytes": size,
            "faults_per_sample": used["faults"] / samples,
            "switches_per_sample": used["switches"] / samples,
        }
        if words:
            target = ReadSettings().read_bytes
            # Out of the page cache, or of the mapping, the reader's processor copies.
            is_copied = self._shape.cached or self._shape.technique == "one reader"
            copied += size if is_copied else 0
            gaps = words.load(Word.RANGES)
            result |= {
                "read_calls": calls,
                "reads_over": calls - (-(-words.load(Word.BYTES_READ) // target) + gaps),
                "gaps": gaps,
                "read_by_rank": sum(rank["own_reads"] for rank in said),
                "depth": words.load(Word.DEPTH),
                "window_bytes": words.load(Word.WINDOW_BYTES),
            }
        return result | {"copied_per_sample": copied / samples}


def order_fields(order):
    """Return what a `NodeConfig` says of an order."""
    fields = dataclasses.asdict(order)
    del fields["epoch"], fields["sample_count"]
    return fields


def pack_fields(place):
    """Return what a `NodeConfig` says of a pack, or of data in place."""
    with open_pack(place) as pack:
        side_file = None if pack.side_file is None else str(pack.side_file)
        return {"pack": str(pack.path), "side_file": side_file, "identity": pack.identity}


def start(cgroup, role, asked, descriptors):
    """Start a process of node_ranks.py in a cgroup; None: in none."""
    command = [sys.executable, str(HERE / "node_ranks.py"), role, json.dumps(asked)]
    return subprocess.Popen(
        command if cgroup is None else cgroup.command(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=descriptors,
    )


def kill(processes):
    for process in processes:
        process.kill()
        process.wait()


def await_ready(started):
    for process in started:
        assert process.stdout.readline() == "ready\n"


def await_reader(ring, process):
    """Wait until a reader serves a ring. Its ranks must have come: without any it ends."""
    while not ring.is_locked(0):
        assert process.poll() is None, "the reader has ended"
        ring.words.wait(Word.READER_CHANGED, ring.words.load(Word.READER_CHANGED), 0.01)


def go(started):
    """Let ranks read; return the seconds that took, and what each says."""
    begin = time.perf_counter()
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = [json.loads(process.stdout.readline()) for process in started]
    return time.perf_counter() - begin, said


def end(processes):
    for process in processes:
        process.stdin.close()
    await_ranks(processes, DEADLINE_S)


def drop_cache():
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def counters(process):
    """Return what a process has used so far, all of its threads together."""
    folder = Path(f"/proc/{process}")
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    numbers = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
    switches = 0
    for task in (folder / "task").iterdir():
        for line in (task / "status").read_text().splitlines():
            switches += int(line.split()[1]) if "ctxt_switches" in line else 0
    return {
        "bytes_read": int(numbers["read_bytes"]),
        "calls": int(numbers["syscr"]),
        "faults": int(fields[7]) + int(fields[9]),  # minor and major ones, proc(5)
        "switches": switches,
    }


# --- four nodes ----------------------------------------------------------------------------------


@contextlib.contextmanager
def slow_folder(source, counts):
    """Mount a folder through FUSE; what it has counted is in the file `counts` afterwards."""
    with tempfile.TemporaryDirectory() as point:
        command = [FUSE_PYTHON, HERE / "seek_fuse.py", source, point, str(SEEK_S), counts]
        process = subprocess.Popen(command)
        try:
            for _ in range(200):
                if os.path.ismount(point) or process.poll() is not None:
                    break
                threading.Event().wait(0.05)
            assert os.path.ismount(point), "the folder could not be mounted"
            yield Path(point)
        finally:
            subprocess.run(["fusermount3", "-u", point], check=False)
            process.wait(DEADLINE_S)


def turn_run(data, most, steps):
    """Return what `steps` steps of four nodes took, which take `most` turns at a time at most."""
    order = SampleOrder(
        sample_count=data.count, shuffle="block", block_samples=TURN_BATCH, window_blocks=1
    )
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        counts, server = Path(scratch) / "counts", None
        drop_cache()
        with slow_folder(data.places["pack"], counts) as place:
            if most is not None:
                server = TurnServer(tuner := TurnTuner(most))
                stack.callback(server.close)
            rings, asked_of, processes = [], [], []
            stack.callback(kill, processes)
            for node in range(NODES):
                config = NodeConfig(
                    **pack_fields(place),
                    verify="first",
                    order=order_fields(order),
                    global_batch_size=TURN_BATCH * NODES,
                    world_size=NODES,
                    last="drop",
                    window_bytes=TURN_RING_BYTES // 4,
                    direct=True,
                    turns=server.address("127.0.0.1") if server else "",
                )
                ring = Ring.create(config, 1, TURN_RING_BYTES)
                rings.append(ring)
                asked = {
                    "form": "node",
                    "count": data.count,
                    "order": {**order_fields(order), "epoch": 0},
                    "steps": steps,
                    "batch": TURN_BATCH * NODES,
                    "world_size": NODES,
                    "place": str(place),
                    "descriptor": ring.descriptor,
                    "technique": "staggering",
                    "rank": node,
                    "local_rank": 0,
                }
                processes.append(start(None, "rank", asked, (ring.descriptor,)))
                asked_of.append(asked)
            started = list(processes)
            await_ready(started)
            for ring, asked in zip(rings, asked_of, strict=True):
                processes.append(start(None, "reader", asked, (ring.descriptor,)))
                await_reader(ring, processes[-1])
            took, said = go(started)
            end(processes)
            missed = sum(ring.words.load(Word.MISSED_TURNS) for ring in rings)
        found = json.loads(counts.read_text())
    size = sum(rank["bytes"] for rank in said)
    result = {
        "seconds": took,
        "bytes_per_s": size / took,
        "seeks": found["seeks"],
        "requests": found["reads"],
        "data_bytes": size,
        "bytes_read": found["bytes"],
        "missed_turns": missed,
    }
    return result | ({"turns": tuner.best} if server else {})


if __name__ == "__main__":
    sys.exit(main())
