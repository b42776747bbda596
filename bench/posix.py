"""How fast does an unchanged program read a pack as files, against the files themselves?

2,000 files of log-normal size (mean 107 KB) and 10,000 files of 2 KB, all in memory, each read
whole from Python in random order: `os.open`, `os.fstat`, `os.read`, `os.close`. One process reads
the files of the file system, one the same names through a mount (`paceline store exec --mount`),
with the default checksum policy, and one the files with the library preloaded, for what it costs a
program outside of the mount. They take turns in an order that is drawn anew each round; a ratio is
the median over the rounds of the ratio within a round. First rounds do not count: they bring
everything into memory.

    python bench/posix.py --json [--quick] [--data FOLDER]

The data is built where it is missing, in build/bench-data or FOLDER. A mount by FUSE is not
measured: Paceline has none yet, and so its rows and bars are absent.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, options, tell
from store_data import listing, make_files, make_pack

from paceline.store.posix.mounts import parse_mounts, variables

HERE = Path(__file__).parent
PACELINE = Path(sys.executable).parent / "paceline"
MOUNT = "/paceline-bench"
UNCOUNTED = 2
BARS = {("107KB", "read"): 3.0, ("2KB", "read"): 2.5, ("2KB", "stat"): 1.5}
WORDS = {
    "read": "open, fstat, read, close",
    "open": "open().read()",
    "stat": "stat",
}


class Reader:
    """A process that waits for its turn."""

    def __init__(self, root, names, environ):
        asked = json.dumps({"root": str(root), "names": str(names)})
        self.process = subprocess.Popen(
            [sys.executable, HERE / "posix_reader.py", asked],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def turn(self, do, seed):
        print(json.dumps({"do": do, "seed": seed}), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a reader ended with {self.process.wait()}")
        return json.loads(line)

    def end(self):
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def measure(report, folder, size, rounds):
    """Let the readers take turns over one set of files."""
    name = f"quick-{size}"
    files = make_files(folder, name)
    place = make_pack(folder, name, PACELINE)
    paths = [os.path.relpath(path, files) for path in listing(files)]
    mounted = {**os.environ, **variables(parse_mounts([f"{place}:{MOUNT}"]), os.environ)}
    with tempfile.NamedTemporaryFile("w") as names, contextlib.ExitStack() as stack:
        names.write("\n".join(paths))
        names.flush()
        readers = {
            "files": Reader(files, names.name, None),
            "mount": Reader(MOUNT, names.name, mounted),
            "files, library preloaded": Reader(files, names.name, mounted),
        }
        for reader in readers.values():
            stack.callback(reader.end)
        for do in WORDS:
            compare(report, readers, size, do, rounds)


def compare(report, readers, size, do, rounds):
    rng = np.random.default_rng(0)
    times = {name: [] for name in readers}
    for number in range(UNCOUNTED + rounds):
        totals = set()
        for name in rng.permutation(list(readers)).tolist():
            found = readers[name].turn(do, number)
            totals.add(found["bytes"])
            if number >= UNCOUNTED:
                times[name].append(found["seconds"] / found["files"])
        if len(totals) != 1:
            sys.exit(f"{size}, {do}: the readers found {totals} bytes")
    for name, found in times.items():
        report.row(
            set=size,
            what=WORDS[do],
            through=name,
            us_per_file=statistics.median(found) * 1e6,
            lowest=min(found) * 1e6,
            highest=max(found) * 1e6,
            rounds=rounds,
        )
    ratio = {
        name: statistics.median(a / b for a, b in zip(times["files"], found, strict=True))
        for name, found in times.items()
        if name != "files"
    }
    report.row(set=size, what=f"{WORDS[do]}: times as fast as files", **ratio)
    if (size, do) in BARS:
        title = f"{size}, {WORDS[do]}: mount / files"
        report.bar(title, ratio["mount"], BARS[size, do], at_least=True)


def main():
    flags = options(__doc__, "--data", "--rounds")
    folder = Path(flags.data[0] if flags.data else HERE.parent / "build" / "bench-data")
    rounds = int(flags.rounds[0]) if flags.rounds else 5 if flags.quick else 21
    report = Report("posix", flags.json)
    kind = subprocess.run(["stat", "-f", "-c", "%T", HERE], capture_output=True, text=True).stdout
    tell(f"file system of the files: {kind.strip()}")
    report.row(what="file system of the files", kind=kind.strip())
    for size in ("107KB", "2KB"):
        measure(report, folder, size, rounds)
    report.row(what="FUSE", absent="Paceline has no mount by FUSE yet")
    sys.exit(report.print())


if __name__ == "__main__":
    main()
