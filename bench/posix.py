"""How fast does an unchanged program read a pack as files, against the files and against FUSE?

2,000 files of log-normal size (mean 107 KB) and 10,000 files of 2 KB, all in memory, each read
whole from Python in random order: `os.open`, `os.fstat`, `os.read`, `os.close`. Each way is a
process that reads the same names:

    files                     of the file system
    mount                     by library (`paceline store exec --mount`), default checksum policy
    FUSE                      by `paceline store mount`
    FUSE pass-through, ...    the files through libfuse (fuse_pass_through.c): its defaults, or with
                              everything kept in the kernel
    files, library preloaded  what the library costs a program outside of the mount

They take turns in an order that is drawn anew each round; a ratio is the median over the rounds of
the ratio within a round. First rounds do not count: they bring everything into memory. What they
cost is a set of rows of its own, "first": mounts that are new in each round read all files once.

Writes are a section of their own: posix_writes.py.

Storms are many processes (posix_storm.c) that begin at once, each with 200 calls of stat, of open
and close, or of listing a folder. Before each, the mounts by FUSE are new, as at a job's start.

    python bench/posix.py --json [--quick] [--data FOLDER]

The data is built where it is missing, in build/bench-data or FOLDER. The pass-through needs a C
compiler, pkg-config and libfuse (Debian: libfuse3-dev, fuse3), mounts need /dev/fuse.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, options, tell
from posix_writes import measure_writes
from store_data import listing, make_files, make_pack

from paceline.store.posix.mounts import parse_mounts, variables

HERE = Path(__file__).parent
PACELINE = Path(sys.executable).parent / "paceline"
MOUNT = "/paceline-bench"
UNCOUNTED = 2
PASS_THROUGH = "FUSE pass-through"
PEERS = {f"{PASS_THROUGH}, default": "default", f"{PASS_THROUGH}, kept": "kept"}
BARS = [  # set, what, the two ways of which the first must be so many times as fast
    ("107KB", "read", "mount", "files", 3.0),
    ("107KB", "read", "mount", f"{PASS_THROUGH}, default", 14.0),
    ("2KB", "read", "mount", "files", 2.5),
    ("2KB", "stat", "mount", "files", 1.5),
]
FUSE_BAR = 1.3  # times the pass-through's time
STORM_BAR = 10.0
STORM_CALLS = 200
MOUNT_WAIT_S = 60
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


@contextlib.contextmanager
def mounted(place, point):
    """Mount a pack by FUSE."""
    command = [PACELINE, "store", "mount", f"{place}:{point}", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            select.select([process.stdout], [], [], MOUNT_WAIT_S)
            json.loads(process.stdout.readline())["pid"]
            yield
        finally:
            process.terminate()
            process.wait(MOUNT_WAIT_S)


@functools.cache
def compiled(name, *flags):
    """Compile a program of this folder, once."""
    program = HERE.parent / "build" / name
    program.parent.mkdir(exist_ok=True)
    subprocess.run(["cc", "-O2", HERE / f"{name}.c", "-o", program, *flags], check=True)
    return program


def fuse_flags():
    """Return how to compile with libfuse, or None where it is not."""
    if shutil.which("pkg-config") is None or not Path("/dev/fuse").exists():
        return None
    asked = ["pkg-config", "--cflags", "--libs", "fuse3"]
    found = subprocess.run(asked, capture_output=True, text=True)
    return found.stdout.split() if found.returncode == 0 else None


@contextlib.contextmanager
def passed_through(files, kind, point):
    """Mount the pass-through."""
    program = compiled("fuse_pass_through", *fuse_flags())
    command = [program, files, kind, point, "-f", "-o", "ro"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + MOUNT_WAIT_S
            while not os.path.ismount(point):
                if time.monotonic() > deadline or process.poll() is not None:
                    sys.exit("the pass-through did not start")
                os.sched_yield()
            yield
        finally:
            unmount = ["umount"] if os.geteuid() == 0 else ["fusermount3", "-u"]
            subprocess.run([*unmount, point], check=True)
            process.wait(MOUNT_WAIT_S)


class Ways:
    """The ways to the same files: for each a root, and a program's variables."""

    def __init__(self, files, place):
        self.files, self.place = files, place
        preloaded = {**os.environ, **variables(parse_mounts([f"{place}:{MOUNT}"]), os.environ)}
        self.plain = {
            "files": (files, None),
            "mount": (MOUNT, preloaded),
            "files, library preloaded": (files, preloaded),
        }
        self.fuse = []
        if Path("/dev/fuse").exists():
            self.fuse.append("FUSE")
        if fuse_flags() is not None:
            self.fuse += PEERS

    @contextlib.contextmanager
    def mount(self):
        """Mount all that is by FUSE anew; yields all ways."""
        with contextlib.ExitStack() as stack:
            top = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            found = dict(self.plain)
            for name in self.fuse:
                point = top / str(len(found))
                point.mkdir()
                kind = PEERS.get(name)
                stack.enter_context(
                    passed_through(self.files, kind, point) if kind else mounted(self.place, point)
                )
                found[name] = (point, None)
            yield found


@contextlib.contextmanager
def readers_of(ways, names):
    """Start a reader for each way."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, (root, environ) in ways.items():
            found[name] = Reader(root, names, environ)
            stack.callback(found[name].end)
        yield found


def measure(report, folder, size, rounds):
    """Let the readers take turns over one set of files."""
    name = f"quick-{size}"
    files = make_files(folder, name)
    ways = Ways(files, make_pack(folder, name, PACELINE))
    paths = [os.path.relpath(path, files) for path in listing(files)]
    with tempfile.NamedTemporaryFile("w") as names:
        names.write("\n".join(paths))
        names.flush()
        with ways.mount() as found, readers_of(found, names.name) as readers:
            for do in WORDS:
                compare(report, readers, size, do, rounds)
        measure_first(report, ways, size, names.name, max(rounds // 3, 2))
    if size == "2KB":
        for processes in (64, 256):
            measure_storms(report, ways, paths, processes, max(rounds // 3, 2))


def medians(times):
    """Return the median of each way."""
    return {name: statistics.median(found) for name, found in times.items()}


def ratio(times, faster, slower):
    """Return the median over the rounds of how many times as fast one way is as another."""
    if not times.get(faster) or not times.get(slower):
        return None
    pairs = zip(times[faster], times[slower], strict=True)
    return statistics.median(slow / fast for fast, slow in pairs)


def absent(value):
    """Return why a bar has no value."""
    return {} if value is not None else {"reason": "libfuse or /dev/fuse is absent"}


def measure_first(report, ways, size, names, rounds):
    """Read all files once, right after mounting."""
    times = {}
    for number in range(rounds):
        with ways.mount() as found, readers_of(found, names) as readers:
            for name, reader in readers.items():
                turn = reader.turn("read", number)
                times.setdefault(name, []).append(turn["seconds"] / turn["files"])
    for name in ways.fuse:
        us = statistics.median(times[name]) * 1e6
        report.row(set=size, what=f"first {WORDS['read']}", through=name, us_per_file=us)


def measure_storms(report, ways, paths, processes, rounds):
    """Let many processes begin at once."""
    program = compiled("posix_storm")
    folders = sorted({str(Path(path).parent) for path in paths})
    for what, below in (("stat", paths), ("open", paths), ("list", folders)):
        times, failed = {}, {}
        for number in range(rounds):
            with ways.mount() as found, tempfile.NamedTemporaryFile("w+") as names:
                for name, (root, environ) in found.items():
                    if name == "files, library preloaded":
                        continue
                    names.seek(0)
                    names.truncate()
                    names.write("\n".join(f"{root}/{path}" for path in below))
                    names.flush()
                    words = [what, names.name, processes, STORM_CALLS, number]
                    done = subprocess.run(
                        [program, *map(str, words)], env=environ, capture_output=True, text=True
                    )
                    if done.returncode != 0:
                        why = done.stderr.strip().splitlines()[-1:]
                        failed[name] = f"{name} failed: {''.join(why)}"
                        if not name.startswith(PASS_THROUGH):  # one of ours must not
                            sys.exit(f"a storm of {what}: {failed[name]}")
                        continue
                    seconds = float(done.stdout) / (processes * STORM_CALLS)
                    times.setdefault(name, []).append(seconds)
        title = f"{processes}-way storm of {what}"
        us = {name: seconds * 1e6 for name, seconds in medians(times).items()}
        report.row(what=title, us_per_call=us, rounds=rounds, failed=sorted(failed.values()))
        peer = f"{PASS_THROUGH}, default"
        times = {name: seconds for name, seconds in times.items() if name not in failed}
        found = ratio(times, "mount", peer)
        name = f"{title}: mount / {peer}"
        reason = {"reason": failed[peer]} if peer in failed else absent(found)
        if found is not None and found < STORM_BAR:
            reason = {
                "reason": f"the files without a mount reach {ratio(times, 'files', peer):.1f}"
            }
        report.bar(name, found, STORM_BAR, at_least=True, **reason)


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
    faster = {name: ratio(times, name, "files") for name in times if name != "files"}
    report.row(set=size, what=f"{WORDS[do]}: times as fast as files", **faster)
    for where, what, way, other, limit in BARS:
        if (where, what) == (size, do):
            found = ratio(times, way, other)
            title = f"{size}, {WORDS[do]}: {way} / {other}"
            report.bar(title, found, limit, at_least=True, **absent(found))
    if (size, do) == ("107KB", "read"):
        peer = f"{PASS_THROUGH}, kept"
        found = ratio(times, peer, "FUSE")
        title = f"{size}, {WORDS[do]}: time of FUSE / that of the {peer}"
        report.bar(title, found, FUSE_BAR, **absent(found))


def main():
    flags = options(__doc__, "--data", "--rounds", switches={"--writes": "measure writes only"})
    folder = Path(flags.data[0] if flags.data else HERE.parent / "build" / "bench-data")
    rounds = int(flags.rounds[0]) if flags.rounds else 5 if flags.quick else 21
    report = Report("posix", flags.json)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # the pass-through's are closed late
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kind = subprocess.run(["stat", "-f", "-c", "%T", HERE], capture_output=True, text=True).stdout
    tell(f"file system of the files: {kind.strip()}")
    report.row(what="file system of the files", kind=kind.strip())
    for size in () if flags.writes else ("107KB", "2KB"):
        measure(report, folder, size, rounds)
    folder.mkdir(parents=True, exist_ok=True)
    measure_writes(report, folder, rounds)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
