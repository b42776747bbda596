"""Packing many tiny samples: memory must not grow with their number, and a sample must cost little.

Samples are made on the fly in an order that is not that of their names, and packed in a process of
their own; its largest resident memory is the system's own account (ru_maxrss). The pack is then
opened and some of its samples are read back.

    python bench/pack_scale.py --json      2 million samples, and a tenth of them
    python bench/pack_scale.py --quick     200,000 samples, and a tenth of them
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

SAMPLES = 2_000_000
QUICK_SAMPLES = 200_000
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
                "samples": summary.sample_count,
                "pack_s": pack_s,
                "make_s": make_s,
                "peak_bytes": peak,
                "grown_bytes": peak - before,
                "pack_bytes": summary.pack_bytes,
            }
        )
    )


def check(count, path):
    """Read some samples back by name."""
    from paceline.store import open_pack

    with open_pack(path) as pack:
        assert len(pack) == count
        for sample in range(0, count, max(count // 1000, 1)):
            body = pack.read(pack.find(name_of(sample)))
            assert body == b"%d" % sample + bytes(BODY_BYTES)


def main():
    options = harness.options(__doc__, "--measure")
    if options.measure:
        measure(int(options.measure[0]), options.measure[1])
        return 0
    report = harness.Report("pack_scale", options.json)
    largest = QUICK_SAMPLES if options.quick else SAMPLES
    results = []
    for count in (largest // 10, largest):
        folder = tempfile.mkdtemp(prefix="paceline-scale-")
        try:
            command = [sys.executable, __file__, "--measure", str(count), folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=1800)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        measured = json.loads(done.stdout)
        measured["sample_us"] = (measured["pack_s"] - measured["make_s"]) / count * 1e6
        report.row(**measured)
        results.append(measured)
    small, large = results
    what = f"packing {largest:,} tiny samples"
    report.bar(f"{what}: peak memory, bytes", large["peak_bytes"], MAX_BYTES)
    if not options.quick:  # less than what is collected before it goes to disk says nothing
        growth = large["grown_bytes"] / max(small["grown_bytes"], 1)
        report.bar("packing ten times the tiny samples: growth of memory", growth, MAX_GROWTH)
    report.bar(f"{what}: seconds a sample", large["sample_us"] / 1e6, MAX_SAMPLE_S)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
