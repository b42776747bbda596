"""Does a pack feed training faster than files and the formats that people use?

Random whole epochs over 20,000 files of log-normal size (mean 107 KB, 2.14 GB) in batches of 64,
and over 100,000 files of 2 KB in batches of 256, with the default checksum policy. Each contender
sits in a process of its own (store_contenders.py), peers in their own environments
(scripts/peers), and sleeps until it is its turn. They take turns in rounds, in an order that is
drawn anew; all that can read in a given order get the same. A ratio is the median over the rounds
of the ratio within a round; first rounds do not count, they bring everything into memory.

    python bench/store_read.py --json [--quick] [--data FOLDER] [--only SECTION ...] [--rounds N]

Sections: warm, small, processes, loader, metadata, cold, packing. The data is built where it is
missing, in build/bench-data or FOLDER, and takes 17 GB there. `--quick` reads a tenth of it,
without peers and nothing cold. A peer that is missing, or that fails, has a bar without a value:
not met. Cold needs root, for dropping the page cache.

What stands against each other:

- copying: `read_batch` against a file's open, fstat, read and close, or a peer's own iterator.
  Zero-copy: `views`, which touch each page themselves. Slices of an mmap are `mapped[begin:end]` of
  the pack's own shards: the least that Python can do, with places that are known and no checks.
- two processes: each on a core, with one thread, over the first 4,000 samples (430 MB), for a
  second at a time. The limit is memcpy of samples of the same lengths, in the same order, from
  memory into a buffer that stays in the cache; a row shows the same from a mapped file.
- loader: `store.Loader` as it comes against torch's DataLoader with two workers that stay up, over
  files; the better of handing tensors over and handing bytes over.
- cold: the page cache dropped before each turn, whole epochs in random order; the pack is opened
  within the time, and asked for 1,024 samples ahead. The disk's rate is the better of buffered
  reads (8 MiB) and direct ones (1 MiB, eight at a time) over the same shards.
- packing: `paceline pack` against `tar c` into a file, both to the same disk and synced to it
  within the time, from sources that are not in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from harness import Report, options, run_sections, tell
from store_data import (
    ENVIRONMENTS,
    environment_python,
    listing,
    make_files,
    make_format,
    make_pack,
    peer_environment,
)

HERE = Path(__file__).parent
PACELINE = Path(sys.executable).parent / "paceline"
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
SUBSET = 4000  # samples of the two processes
TURN_S = 300.0  # no turn takes as long
BATCH = {"107KB": 64, "2KB": 256}


class Failed(Exception):
    """A contender is missing, or it broke down."""


class Process:
    """A contender that waits for its turn."""

    def __init__(self, place, kind, **more):
        asked = {"contender": kind, **place.asked, **more}
        python = sys.executable
        if kind in ENVIRONMENTS:
            python = environment_python(kind)
            if python is None:
                raise Failed("missing; make it with scripts/peers")
            if kind not in place.asked:
                raise Failed("its data could not be made")
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lives as long as the process
        self.process = subprocess.Popen(
            [python, place.contender_script, json.dumps(asked)],
            env=peer_environment(place.folder) if kind in ENVIRONMENTS else None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,
        )
        try:
            self._answer()
        except Failed:
            self.end()
            raise

    def begin(self, do, seed, **more):
        """Let the process go; what came of it is told by `result`."""
        with contextlib.suppress(OSError):  # it has ended: `result` says so
            print(json.dumps({"do": do, "seed": seed, **more}), file=self.process.stdin, flush=True)

    def result(self):
        return self._answer()

    def turn(self, do, seed=0, **more):
        self.begin(do, seed, **more)
        return self.result()

    def _answer(self):
        limit = threading.Timer(TURN_S, self.process.kill)
        limit.start()
        line = self.process.stdout.readline()
        limit.cancel()
        if not line:
            self.process.wait(10)
            self.log.seek(0)
            last = (self.log.read().strip().splitlines() or ["no word"])[-1]
            raise Failed(f"ended with {self.process.returncode}: {last[:200]}")
        return json.loads(line)

    def end(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.log.close()


class Place:
    """A set of files and its formats, as contenders are told of them."""

    contender_script = HERE / "store_contenders.py"

    def __init__(self, folder, size, flags, kinds=()):
        name = f"quick-{size}" if flags.quick else size
        self.folder = folder
        self.size = size
        self.files = make_files(folder, name)
        paths = listing(self.files)
        self.count = len(paths)
        self.bytes = sum(Path(path).stat().st_size for path in paths)
        self.pack = make_pack(folder, name, PACELINE)
        self.asked = {
            "files": str(self.files),
            "batch": BATCH[size],
            "pack": str(self.pack),
            "count": self.count,
            "bytes": self.bytes,
        }
        for kind in () if flags.quick else kinds:
            try:
                made = make_format(folder, name, kind)
            except subprocess.CalledProcessError as problem:
                tell(f"{kind} was not made: {problem}")
                continue
            if made is not None:
                self.asked[kind] = str(made)


class Contest:
    """Contenders that take turns; ends them when left."""

    def __init__(self, report, place, *, of_bytes=True):
        self.report = report
        self.place = place
        self.of_bytes = of_bytes
        self.entries = {}  # name: (process, what it does)
        self.problems = {}
        self.rates = {}  # name: samples/s by round
        self.processes = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.end()

    def enter(self, name, kind, do, *, key=None, **more):
        """Let a contender in; those of one kind share a process, unless their keys differ."""
        key = key or kind
        try:
            if key not in self.processes:
                self.processes[key] = Process(self.place, kind, **more)
            self.entries[name] = (self.processes[key], do)
        except Failed as problem:
            self.problems[name] = str(problem)

    def run(self, rounds, before=None, uncounted=1):
        """Let all take turns; `before` prepares each turn."""
        rng = np.random.default_rng(0)
        self.rates = {name: [] for name in self.entries}
        for number in range(uncounted + rounds):
            for name in rng.permutation(list(self.entries)).tolist():
                if name not in self.problems:
                    self._turn(name, number, counts=number >= uncounted, before=before)
        for name, rates in self.rates.items():
            if name not in self.problems:
                self._row(name, rates)

    def _turn(self, name, number, *, counts, before):
        process, do = self.entries[name]
        try:
            if before is not None:
                before()
            found = process.turn(do, number)
            if (found["samples"], found["bytes"]) != (self.place.count, self.place.bytes):
                raise Failed(f"delivered {found} instead of {self.place.count} samples")
        except Failed as problem:
            self.problems[name] = str(problem)
            return
        if counts:
            self.rates[name].append(found["samples"] / found["seconds"])

    def _row(self, name, rates):
        middle = statistics.median(rates)
        mean_bytes = self.place.bytes / self.place.count
        self.report.row(
            what=name,
            set=self.place.size,
            samples_per_s=round(middle),
            **({"MB_per_s": round(middle * mean_bytes / 1e6)} if self.of_bytes else {}),
            lowest=round(min(rates)),
            highest=round(max(rates)),
            rounds=len(rates),
        )

    def ratio(self, mine, theirs):
        """Return the typical ratio of two rates within a round; the problem, if there is none."""
        for name in (mine, theirs):
            if not self.rates.get(name) or name in self.problems:
                return None, f"{name}: {self.problems.get(name, 'not measured')}"
        pairs = zip(self.rates[mine], self.rates[theirs], strict=True)
        return statistics.median(a / b for a, b in pairs), ""

    def compare(self, mine, theirs):
        """Add a row with a ratio that has no bar."""
        value, _ = self.ratio(mine, theirs)
        if value is not None:
            self.report.row(what=f"{mine} / {theirs}", set=self.place.size, ratio=value)

    def bar(self, title, mine, theirs, limit):
        value, reason = self.ratio(mine, theirs)
        self.report.bar(title, value, limit, at_least=True, reason=reason)


def least(ratios):
    """Return the least of several ratios; none, and why, if one of them is missing."""
    reason = "; ".join(reason for _, reason in ratios if reason)
    return (None if reason else min(value for value, _ in ratios)), reason


# --- the sections --------------------------------------------------------------------------------


def _rounds(flags, usual):
    """Return how many rounds count."""
    if flags.rounds:
        return int(flags.rounds[0])
    return min(usual, 5) if flags.quick else usual


def warm(report, folder, flags):
    """Read 107 KB in one process, from memory."""
    peers = ("lmdb", "webdataset", "mds", "litdata")
    place = Place(folder, "107KB", flags, peers)
    with Contest(report, place) as contest:
        contest.enter("raw files", "raw", "copy")
        contest.enter("pack, copying", "pack", "copy")
        contest.enter("pack, views", "pack", "views")
        contest.enter("pack, views touched again", "pack", "touched_views")
        contest.enter("pack, copying, 1 thread", "pack", "copy", key="pack of one", threads=1)
        contest.enter("slices of an mmap", "slices", "copy")
        if not flags.quick:
            contest.enter("py-lmdb get", "lmdb", "copy")
            contest.enter("WebDataset iterator", "webdataset", "iterate")
            contest.enter("MDS iterator", "mds", "iterate")
            contest.enter("MDS by index", "mds", "index")
            contest.enter("LitData iterator", "litdata", "iterate")
        contest.run(_rounds(flags, 7), uncounted=2)
        copying = "pack, copying"
        for other in ("raw files", "py-lmdb get"):
            contest.compare("pack, copying, 1 thread", other)
        name = "107 KB, copying, 1 thread / bytes slices of an mmap"
        contest.bar(name, "pack, copying, 1 thread", "slices of an mmap", 0.95)
        contest.bar("107 KB, copying / raw files", copying, "raw files", 2.5)
        contest.bar("107 KB, zero-copy / raw files", "pack, views", "raw files", 5.0)
        if not flags.quick:
            contest.bar("107 KB, copying / py-lmdb get", copying, "py-lmdb get", 1.1)
            contest.bar("107 KB, copying / WebDataset", copying, "WebDataset iterator", 15.0)
            contest.bar("107 KB, copying / MDS iterator", copying, "MDS iterator", 30.0)
            contest.bar("107 KB, copying / MDS by index", copying, "MDS by index", 7.0)
            contest.bar("107 KB, copying / LitData", copying, "LitData iterator", 10.0)


def small(report, folder, flags):
    """Read 2 KB in one process, from memory."""
    place = Place(folder, "2KB", flags, ("lmdb",))
    with Contest(report, place) as contest:
        contest.enter("raw files", "raw", "copy")
        contest.enter("pack, copying", "pack", "copy")
        contest.enter("pack, views", "pack", "views")
        contest.enter("pack, copying, 1 thread", "pack", "copy", key="pack of one", threads=1)
        contest.enter("pack, sample by sample", "pack", "single", key="pack of one", threads=1)
        contest.enter("slices of an mmap", "slices", "copy")
        if not flags.quick:
            contest.enter("py-lmdb get", "lmdb", "copy")
        contest.run(_rounds(flags, 7), uncounted=2)
        for other in ("raw files", "py-lmdb get"):
            contest.compare("pack, copying, 1 thread", other)
        name = "2 KB, Pack.read / bytes slices of an mmap"
        contest.bar(name, "pack, sample by sample", "slices of an mmap", 0.8)
        contest.bar("2 KB, copying / raw files", "pack, copying", "raw files", 12.0)
        if not flags.quick:
            contest.bar("2 KB, copying / py-lmdb get", "pack, copying", "py-lmdb get", 2.0)


def processes(report, folder, flags):
    """Let two processes read at once, against two that only copy."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for size in ("107KB", "2KB"):
        place = Place(folder, size, flags)
        subset = min(SUBSET if size == "107KB" else place.count, place.count)
        rates = {"pack": [], "memory": [], "mapping": []}
        with contextlib.ExitStack() as stack:
            pairs = {}
            for kind in rates:
                pairs[kind] = []
                for core in cores:
                    more = {"threads": 1, "subset": subset, "core": core}
                    process = Process(place, kind, **more)
                    stack.callback(process.end)
                    pairs[kind].append(process)
            rng = np.random.default_rng(0)
            limit_s = 0.2 if flags.quick else 1.0
            for number in range(2 + _rounds(flags, 7)):
                for kind in rng.permutation(list(rates)).tolist():
                    found = _at_once(pairs[kind], number, limit_s)
                    if number >= 2:
                        rates[kind].append(found)
        for kind, found in rates.items():
            report.row(
                what=f"two processes, {kind}",
                set=size,
                samples=subset,
                samples_per_s=round(statistics.median(found)),
                lowest=round(min(found)),
                highest=round(max(found)),
                rounds=len(found),
            )
        mine = rates["pack"]
        ratio = {
            kind: statistics.median(a / b for a, b in zip(mine, rates[kind], strict=True))
            for kind in ("memory", "mapping")
        }
        report.row(what="two processes, pack / memcpy", set=size, **ratio)
        if size == "107KB":
            name = "107 KB, two processes / two that memcpy"
            reason = "" if len(cores) == 2 else "needs two cores"
            report.bar(name, ratio["memory"], 0.9, at_least=True, reason=reason)


def _at_once(pair, number, limit_s):
    """Return the samples/s of processes that run at the same time, together."""
    for rank, process in enumerate(pair):
        process.begin("copy", 2 * number + rank, limit_s=limit_s)
    found = [process.result() for process in pair]
    return sum(turn["samples"] / turn["seconds"] for turn in found)


def loader(report, folder, flags):
    """Deliver batches of tensors to a training loop."""
    place = Place(folder, "107KB", flags)
    with Contest(report, place) as contest:
        contest.enter("store.Loader", "loader", "tensors")
        contest.enter("DataLoader, 2 workers, tensors", "dataloader", "tensors")
        contest.enter("DataLoader, 2 workers, bytes", "dataloader", "bytes")
        contest.run(_rounds(flags, 5))
        ratios = [
            contest.ratio("store.Loader", f"DataLoader, 2 workers, {form}")
            for form in ("tensors", "bytes")
        ]
        value, reason = least(ratios)
        name = "107 KB, store.Loader / torch DataLoader with 2 workers over files"
        report.bar(name, value, 5.0, at_least=True, reason=reason)


def metadata(report, folder, flags):
    """Walk 100,000 entries with their sizes, modes and times."""
    place = Place(folder, "2KB", flags)
    with Contest(report, place, of_bytes=False) as contest:
        contest.enter("os.walk, os.stat", "raw", "walk")
        contest.enter("os.scandir, stat", "raw", "scandir")
        contest.enter("pack.walk", "pack", "walk")
        contest.run(_rounds(flags, 7))
        contest.bar("walk and stat / os.walk and os.stat", "pack.walk", "os.walk, os.stat", 10.0)


def cold(report, folder, flags):
    """Read what is not in memory, against files and against the disk itself."""
    names = (
        "107 KB cold / raw files",
        "107 KB cold, bytes/s / the disk's sequential rate",
    )
    bars = dict(zip(names, (2.5, 0.9), strict=True))
    if not os.access(DROP_CACHES, os.W_OK):
        for name, limit in bars.items():
            reason = "not measured: only root may drop the page cache"
            report.bar(name, None, limit, at_least=True, reason=reason)
        return
    place = Place(folder, "107KB", flags)
    left = []

    def prepare():
        for process in contest.processes.values():
            process.turn("forget")  # what a process maps stays in memory
        drop_caches()
        left.append(resident_share(place.pack))

    with Contest(report, place) as contest:
        contest.enter("cold, raw files", "raw", "copy")
        contest.enter("cold, pack", "pack", "ahead", cold=True)
        contest.enter("cold, buffered sequential", "disk", "buffered")
        contest.enter("cold, direct sequential", "disk", "direct")
        contest.run(_rounds(flags, 5), prepare, uncounted=0)
        report.row(what="share of the pack in memory before a cold turn", highest=max(left))
        contest.bar(names[0], "cold, pack", "cold, raw files", bars[names[0]])
        ratios = [
            contest.ratio("cold, pack", f"cold, {how} sequential") for how in ("buffered", "direct")
        ]
        value, reason = least(ratios)
        report.bar(names[1], value, bars[names[1]], at_least=True, reason=reason)


def packing(report, folder, flags):
    """Write a pack, and a tar file, of files that are not in memory."""
    is_cold = not flags.quick and os.access(DROP_CACHES, os.W_OK)
    rounds = _rounds(flags, 5)
    for size in ("107KB", "2KB"):
        place = Place(folder, size, flags)
        out = Path(folder) / "packing"
        seconds = {"paceline pack": [], "tar": []}
        rng = np.random.default_rng(0)
        for _ in range(rounds):
            for name in rng.permutation(list(seconds)).tolist():
                shutil.rmtree(out, ignore_errors=True)
                out.mkdir()
                os.sync()
                if is_cold:
                    drop_caches()
                seconds[name].append(_pack_s(name, place.files, out))
        shutil.rmtree(out)
        for name, found in seconds.items():
            report.row(
                what=f"{name}, {'cold' if is_cold else 'warm'} source",
                set=size,
                files_per_s=round(place.count / statistics.median(found)),
                MB_per_s=round(place.bytes / statistics.median(found) / 1e6),
                shortest_s=min(found),
                longest_s=max(found),
                rounds=rounds,
            )
        pairs = zip(seconds["tar"], seconds["paceline pack"], strict=True)
        ratio = statistics.median(theirs / mine for theirs, mine in pairs)
        report.row(what="paceline pack / tar, rate", set=size, ratio=ratio)
        if size == "107KB":
            report.bar("107 KB, paceline pack / tar c", ratio, 0.8, at_least=True)


def _pack_s(name, files, out):
    """Return the seconds until the files are packed, and on the disk."""
    begin = time.perf_counter()
    if name == "tar":
        subprocess.run(["tar", "-cf", out / "all.tar", "-C", files, "."], check=True)
        file = os.open(out / "all.tar", os.O_RDONLY)
        os.fsync(file)
        os.close(file)
    else:
        command = [PACELINE, "pack", files, out / "pack"]
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def drop_caches():
    os.sync()
    DROP_CACHES.write_text("3")


def resident_share(pack):
    """Return which share of a pack's shards is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = resident = 0
    for path in sorted(pack.glob("shard-*")):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            body = np.frombuffer(mapped, np.uint8)
            found = np.zeros(-(-len(body) // mmap.PAGESIZE), np.uint8)
            address = ctypes.c_void_p(body.ctypes.data)
            if libc.mincore(
                address, ctypes.c_size_t(len(body)), ctypes.c_void_p(found.ctypes.data)
            ):
                raise OSError(ctypes.get_errno(), "mincore")
            pages += len(found)
            resident += int((found & 1).sum())
            del body
    return resident / pages


SECTIONS = {
    "warm": warm,
    "small": small,
    "processes": processes,
    "loader": loader,
    "metadata": metadata,
    "cold": cold,
    "packing": packing,
}
COLD = ("cold", "packing")


def main():
    flags = options(__doc__, "--data", "--only", "--rounds")
    folder = Path(flags.data[0] if flags.data else HERE.parent / "build" / "bench-data").absolute()
    wanted = flags.only or [name for name in SECTIONS if not flags.quick or name not in COLD]
    report = Report("store_read", flags.json)
    run_sections(
        wanted,
        lambda name: SECTIONS[name](report, folder, flags),
        report,
        failures=(Failed, subprocess.CalledProcessError),
    )
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
