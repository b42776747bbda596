"""Many tiny samples: packing and loading must not grow with their number.

Samples are made on the fly in an order that is not that of their names, and packed in a process of
their own; its largest resident memory is the system's own account (ru_maxrss). The pack is then
opened and some of its samples are read back.

The largest pack is dropped from the page cache and loaded, shuffled, in a process of its own: how
long the first batch takes, from the path of the pack on, and how much more memory is resident than
in a process that loads the same batches of a small pack. Pages of the shards count as well; what
lies in the index is found in /proc/self/smaps. What follows for a hundred million samples is
computed: the first batch touches as many blocks of the index, and a shuffled epoch all of what
reading a sample needs.

    python bench/pack_scale.py --json      20 million samples, a tenth of them, and a hundredth
    python bench/pack_scale.py --quick     200,000 samples, a tenth of them, and a hundredth
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

SAMPLES = 20_000_000
QUICK_SAMPLES = 200_000
EXTRAPOLATED_SAMPLES = 100_000_000
BATCH_SAMPLES = 256
MORE_BATCHES = 1000  # after the first: what an epoch comes to
# Sections that reading a sample takes, by their numbers.
SAMPLE_SECTIONS = (1, 2, 3, 4, 5, 15, 16)
MAX_FIRST_BATCH_S = 1.0
MAX_LOADER_BYTES = 300e6
BODY_BYTES = 64
MAX_BYTES = 1 << 30
MAX_GROWTH = 6.0  # for ten times the samples; columns that were held would make it ten
MAX_SAMPLE_S = 15e-6


def name_of(sample):
    """Return the name of the sample-th sample: in no order, in a thousand folders."""
    mixed = sample * 2654435761 % (1 << 32)
    return b"c%03d/%08x-%d.txt" % (mixed % 1000, mixed, sample)


def samples(count):
    """Yield samples that differ, without the cost of making them random."""
    filler = bytes(BODY_BYTES)
    for sample in range(count):
        yield name_of(sample), b"%d" % sample + filler


def measure(count, folder):
    """Pack in this process; print what it took as JSON."""
    from paceline import store

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start_s = time.perf_counter()
    summary = store.pack(store.Samples(samples(count)), Path(folder, "pack"))
    pack_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    for _ in samples(count):
        pass
    make_s = time.perf_counter() - start_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    check(count, Path(folder, "pack"))
    print(
        json.dumps(
            {
                "what": "pack",
                "samples": summary.sample_count,
                "pack_s": pack_s,
                "make_s": make_s,
                "peak_bytes": peak,
                "grown_bytes": peak - before,
                "pack_bytes": summary.pack_bytes,
                "index_bytes": Path(folder, "pack", "index.pace").stat().st_size,
            }
        )
    )


def resident_bytes(name=None):
    """Return the memory of this process that is resident, or that of a file's mapping."""
    if name is None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    total, is_wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            is_wanted = line.endswith(name)
        elif is_wanted and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def drop(path):
    """Drop a pack from the page cache; its files are on storage, and nothing maps them."""
    for file in path.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load(path):
    """Load batches in this process; print what it took as JSON."""
    from paceline.store import Loader, LoaderOptions
    from paceline.store.format.header import parse_sections

    drop(Path(path))
    options = LoaderOptions(workers=1, seed=1)
    start_s = time.perf_counter()
    loader = Loader(path, BATCH_SAMPLES, rank=0, world_size=1, options=options)
    batches = iter(loader)
    bodies, labels = next(batches)
    first_batch_s = time.perf_counter() - start_s
    assert len(bodies) == len(labels) == BATCH_SAMPLES
    measured = {
        "what": "load",
        "samples": len(loader.pack),
        "first_batch_s": first_batch_s,
        "resident_bytes": resident_bytes(),
        "resident_index_bytes": resident_bytes("/index.pace"),
    }
    for _ in range(MORE_BATCHES):
        if next(batches, None) is None:
            batches = iter(loader)
    measured["later_resident_index_bytes"] = resident_bytes("/index.pace")
    with Path(path, "index.pace").open("rb") as file:
        places = parse_sections(file.read(4096))
    measured["sample_sections_bytes"] = sum(
        places[number].length for number in SAMPLE_SECTIONS if number in places
    )
    loader.close()
    print(json.dumps(measured))


def check(count, path):
    """Read some samples back by name."""
    from paceline.store import open_pack

    with open_pack(path) as pack:
        assert len(pack) == count
        for sample in range(0, count, max(count // 1000, 1)):
            body = pack.read(pack.find(name_of(sample)))
            assert body == b"%d" % sample + bytes(BODY_BYTES)


def main():
    options = harness.options(__doc__, "--measure", "--load")
    if options.measure:
        measure(int(options.measure[0]), options.measure[1])
        return 0
    if options.load:
        load(options.load[0])
        return 0
    report = harness.Report("pack_scale", options.json)
    largest = QUICK_SAMPLES if options.quick else SAMPLES
    results, loaded = [], []
    for count in (largest // 100, largest // 10, largest):
        folder = tempfile.mkdtemp(prefix="paceline-scale-")
        try:
            measured = run("--measure", str(count), folder)
            measured["sample_us"] = (measured["pack_s"] - measured["make_s"]) / count * 1e6
            loaded.append(run("--load", str(Path(folder, "pack"))))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        report.row(**measured)
        report.row(**loaded[-1])
        results.append(measured)
    _, small, large = results
    what = f"packing {largest:,} tiny samples"
    report.bar(f"{what}: peak memory, bytes", large["peak_bytes"], MAX_BYTES)
    if not options.quick:  # less than what is collected before it goes to disk says nothing
        growth = large["grown_bytes"] / max(small["grown_bytes"], 1)
        report.bar("packing ten times the tiny samples: growth of memory", growth, MAX_GROWTH)
    report.bar(f"{what}: seconds a sample", large["sample_us"] / 1e6, MAX_SAMPLE_S)
    without, last = loaded[0], loaded[-1]
    what = f"loading {largest:,} tiny samples"
    report.bar(f"{what}: first batch cold, seconds", last["first_batch_s"], MAX_FIRST_BATCH_S)
    more = last["resident_bytes"] - without["resident_bytes"]
    report.bar(f"{what}: more resident memory at the first batch, bytes", more, MAX_LOADER_BYTES)
    report.bar(
        f"{what}: resident of the index after {MORE_BATCHES + 1:,} shuffled batches, bytes",
        last["later_resident_index_bytes"],
        MAX_LOADER_BYTES,
    )
    scale = EXTRAPOLATED_SAMPLES / largest
    report.row(
        what="extrapolated",
        samples=EXTRAPOLATED_SAMPLES,
        index_bytes=int(large["index_bytes"] * scale),
        sample_sections_bytes=int(last["sample_sections_bytes"] * scale),
        why="the first batch touches at most a block of 64 KiB for each sample and section, "
        "however many samples there are; a shuffled epoch touches all of the sections that "
        "reading a sample takes",
    )
    return report.print()


def run(*words):
    """Run this script in a process of its own; return what it printed."""
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1800)
    return json.loads(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
