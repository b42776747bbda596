"""What does it cost to count calls for files? CPU time of a call, with and without the library.

    python bench/file_calls.py --json [--quick]

A process stats, opens, reads and closes small files that are in the page cache, as a loader of
samples in files does. Processes with and without the library take turns, in an order drawn for each
pair; each gives the least CPU time of its blocks, which is what the work takes where nothing else
disturbs it. The estimate is the median over pairs of the difference, with its bootstrapped 95 %
interval. The bar is of a step of 50 ms that reads a batch of 64 such files in its main thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, median_interval, options

STEP_S, BATCH, BAR = 0.050, 64, 0.01
FILES, FILE_BYTES = 200, 16 << 10
DEADLINE_S = 60
CHILD = """
import os, sys, time, json
from paceline.native import Recorder
folder, run, blocks = sys.argv[1], sys.argv[2], int(sys.argv[3])
recorder = Recorder(run + "/trace/rank-00000.trace", 0, 1)
attached = recorder.attach_io()
paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
def sample(path):
    os.stat(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.read(descriptor, 1 << 20)
    os.close(descriptor)
def read(descriptor):
    os.pread(descriptor, 4096, 0)
one = os.open(paths[0], os.O_RDONLY)
def block(function, items):
    begin = time.thread_time()
    for item in items:
        function(item)
    return (time.thread_time() - begin) / len(items)
found = {"sample": [], "read": []}
for _ in range(blocks):
    found["sample"].append(block(sample, paths))
    found["read"].append(block(read, [one] * 2000))
recorder.detach_io()
recorder.close()
print(json.dumps({"attached": attached, **{name: min(own) for name, own in found.items()}}))
"""


def least_s(folder, blocks, *, counted):
    """Return the least CPU seconds of a sample, and of a read, in a process of its own."""
    from paceline.launch.file_calls import file_call_variables

    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        (run / "trace").mkdir()
        environ = {**os.environ, **(file_call_variables(run, os.environ) if counted else {})}
        command = [sys.executable, "-c", CHILD, str(folder), str(run), str(blocks)]
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
        )
    if done.returncode:
        sys.exit(f"the process ended with {done.returncode}: {done.stderr}")
    found = json.loads(done.stdout)
    if found.pop("attached") != counted:
        sys.exit("the library is not where it should be")
    return found


def main():
    flags = options(__doc__)
    report = Report("file_calls", flags.json)
    pairs, blocks = (5, 20) if flags.quick else (15, 50)
    random = np.random.default_rng(0)
    times = {True: [], False: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FILES):
            (Path(folder) / f"{number:04d}").write_bytes(bytes(FILE_BYTES))
        for _ in range(pairs):
            for counted in random.permutation([False, True]).tolist():
                times[counted].append(least_s(folder, blocks, counted=counted))
    for what, name in (("sample", "stat, open, read, close"), ("read", "pread of 4 KiB")):
        added = [
            with_it[what] - plain[what] for with_it, plain in zip(*times.values(), strict=True)
        ]
        median, low, high = median_interval([[value] for value in added])
        plain_s = float(np.median([plain[what] for plain in times[False]]))
        report.row(
            what=name,
            plain_us=1e6 * plain_s,
            added_us=1e6 * median,
            low_us=1e6 * low,
            high_us=1e6 * high,
        )
        if what == "sample":
            share = BATCH * median / STEP_S
            report.bar(f"share of a step of 50 ms with {BATCH} files", share, BAR)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
