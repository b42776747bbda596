"""How large a run can be analysed? From trace files to the verdict: seconds and peak memory.

    python bench/analysis.py --json [--quick]

A run of 256 ranks under DDP with BatchNorm is generated: each step waits for data, broadcasts
buffers, computes, reduces two buckets behind the backward pass and drains them; times vary, and
one rank is late for a part of the run. Its events are written as trace files of version 2, one per
rank. What is measured is `load_run` (reading, checksums, matching, clocks) and `analyse`, in a
process of its own.

Beside it stands the code before the analysis was on arrays, commit 0deccb6, on the same run in
files of version 1, which both read. Both must come to the same answer.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import harness
import numpy as np

RANKS = 256
EVENTS = 10_000_000
QUICK_EVENTS = 1_000_000
LATE_RANK, LATE_NS = 137, 15_000_000
COMMIT = "0deccb6"
MAX_S, MAX_BYTES = 60.0, 2_000_000_000
MS = 1_000_000
NAMES = (
    *("", "step", "running_ns", "not_running_ns", "next", "forward", "loss", "backward"),
    *("zero_grad", "broadcast", "all_reduce", "drain", "group 0"),
)
MAIN, COMMUNICATION = 0, 1


# --- the run -------------------------------------------------------------------------------------


class Run:
    """Times of a generated run: arrays of shape (ranks, steps), nanoseconds."""

    def __init__(self, steps):
        random = np.random.default_rng(7)
        shape = (RANKS, steps)
        self.steps = steps
        self.data = random.integers(MS, 2 * MS, shape)
        self.data[LATE_RANK, steps // 4 : steps // 2] += LATE_NS
        self.forward = random.integers(3 * MS, 4 * MS, shape)
        self.backward = random.integers(6 * MS, 8 * MS, shape)
        self.update = random.integers(MS // 2, MS, shape)
        self.begin = np.empty(shape, dtype=np.int64)
        self.received = np.empty(shape, dtype=np.int64)
        self.first_done, self.done = (np.empty(steps, dtype=np.int64) for _ in range(2))
        now = np.full(RANKS, 10**12, dtype=np.int64)
        for step in range(steps):
            self.begin[:, step] = now
            entered = now + self.data[:, step]
            received = np.maximum(entered, entered[0]) + MS // 4
            computed = received + self.forward[:, step] + self.backward[:, step]
            self.received[:, step] = received
            self.first_done[step] = (computed - self.backward[:, step] // 2).max() + MS
            self.done[step] = max(self.first_done[step], computed.max()) + MS
            now = self.done[step] + self.update[:, step]

    def events(self, rank, dtype, step_kind):
        """Return a rank's events; fields that a version lacks are left out."""
        begin, received = self.begin[rank], self.received[rank]
        entered = begin + self.data[rank]
        forward = received + self.forward[rank]
        computed = forward + self.backward[rank]
        first_issue = computed - self.backward[rank] // 2
        end = self.done + self.update[rank]
        middle = self.done + self.update[rank] // 3
        small, large = 64 << 10, 4 << 20
        collective, wait = 6, 7
        # kind, name, begin, end, amount, number in the step's collectives, root, location
        rows = [
            (1, "next", begin, entered, 0, 0, -1, MAIN),
            (collective, "broadcast", entered, received, small, 1, 0, COMMUNICATION),
            (wait, "broadcast", entered, received, 0, 1, 0, MAIN),
            (3, "forward", received, forward - MS // 2, 0, 0, -1, MAIN),
            (3, "loss", forward - MS // 2, forward, 0, 0, -1, MAIN),
            (collective, "all_reduce", first_issue, self.first_done, large, 2, -1, COMMUNICATION),
            (collective, "all_reduce", computed, self.done, small, 3, -1, COMMUNICATION),
            (wait, "drain", computed, self.done, 0, 0, -1, MAIN),
            (4, "backward", forward, self.done, 0, 0, -1, MAIN),
            (5, "step", self.done, middle, 0, 0, -1, MAIN),
            (5, "zero_grad", middle, end, 0, 0, -1, MAIN),
            (step_kind, "step", begin, end, 0, 0, -1, MAIN),
            (9, "running_ns", begin, end, computed - begin, 0, -1, MAIN),
            (9, "not_running_ns", begin, end, self.data[rank] // 100, 0, -1, MAIN),
        ]
        events = np.zeros((self.steps, len(rows)), dtype)
        steps = np.arange(self.steps)
        place = "location" if "location" in dtype.names else "lane"
        group = 1 if "location" in dtype.names else NAMES.index("group 0")
        for i, (kind, name, since, until, amount, number, root, location) in enumerate(rows):
            column = events[:, i]
            column["kind"], column["name"], column[place] = kind, NAMES.index(name), location
            column["begin_ns"], column["end_ns"], column["amount"] = since, until, amount
            column["step"], column["peer"] = steps, root
            if number:
                column["group"], column["sequence"] = group, 3 * steps + number
        return events.reshape(-1)


EVENTS_A_STEP = 14


def write(folder, version, event_count):
    """Write the run's traces; return how many events they hold."""
    from paceline.native import crc32c
    from paceline.trace.format.events import EVENT_DTYPE, Kind
    from paceline.trace.format.files import trace_name
    from paceline.trace.format.header import (
        FIXED_CHECKSUM_AT,
        FIXED_END,
        HEADER,
        HEADER_BYTES,
        LIVE_END,
    )
    from paceline.trace.format.version1 import EVENT_DTYPE_V1

    steps = -(-event_count // RANKS // EVENTS_A_STEP)
    run = Run(steps)
    dtype, step_kind = (EVENT_DTYPE, Kind.STEP) if version == 2 else (EVENT_DTYPE_V1, 0)
    (folder / "trace").mkdir(parents=True)
    for rank in range(RANKS):
        events = run.events(rank, dtype, step_kind)
        texts = b"".join(struct.pack("<I", len(name)) + name.encode() for name in NAMES)
        blocks = [(2, len(NAMES), texts)]
        if version == 2:
            members = struct.pack(f"<{RANKS}I", *range(RANKS))
            world = struct.pack("<II", NAMES.index("group 0"), RANKS) + members
            blocks.append((3, 2, struct.pack("<II", 0, 0) + world))
            blocks.append(
                (4, 2, struct.pack("<IIII", 2, 0, 1, 1) + struct.pack("<IIII", 4, 0, 1, 0))
            )
        parts = np.array_split(events, max(1, len(events) // 30_000))
        blocks += [(1, len(part), part.tobytes()) for part in parts]
        body = b""
        for kind, count, payload in blocks:
            head = struct.pack("<III", kind, count, len(payload))
            body += head + struct.pack("<I", crc32c(payload, crc32c(head))) + payload
        numbers = (version, rank, RANKS, 0, 1, 1, b"node", steps, 0, 1, 0, len(events), 0, 1)
        header = bytearray(HEADER.pack(b"PACETRCE", *numbers, HEADER_BYTES + len(body), 0))
        if version == 2:
            at = FIXED_CHECKSUM_AT
            fixed = crc32c(header[at + 4 : FIXED_END], crc32c(header[:at]))
            header[at : at + 4] = struct.pack("<I", fixed)
            header[LIVE_END : LIVE_END + 4] = struct.pack("<I", crc32c(header[FIXED_END:LIVE_END]))
        path = folder / "trace" / trace_name(rank)
        path.write_bytes(bytes(header).ljust(HEADER_BYTES, b"\0") + body)
    return steps * EVENTS_A_STEP * RANKS


# --- in a process of its own ---------------------------------------------------------------------


def answers(phases, skew, stragglers, traffic):
    """Return what both codes must agree on; later code knows more phases and says more of ranks."""
    from paceline.core.breakdown import PHASES

    return {
        "seconds": [
            dict(zip(PHASES, rank.seconds.sum(axis=0).tolist(), strict=True)) for rank in phases
        ],
        "skew_s": skew.sum(axis=1).tolist(),
        "stragglers": [{"rank": late.rank, "cause": late.cause} for late in stragglers],
        "traffic": sorted(
            [
                *(line.operation, line.group, line.ranks, line.size_class_bytes, line.count),
                *(line.bytes, line.typical_bytes, line.transfer_s, line.spread_s),
            ]
            for line in traffic
        ),
    }


def analyse_now(folder):
    from paceline.trace.analysis import analyse
    from paceline.trace.merge import load_run

    begin = time.perf_counter()
    trace = load_run(folder)
    loaded = time.perf_counter()
    analysis = analyse(trace)
    end = time.perf_counter()
    events = sum(len(rank.events) for rank in trace.ranks)
    found = answers(analysis.phases, analysis.skew_s, analysis.stragglers, analysis.traffic)
    return loaded - begin, end - loaded, events, found


def analyse_before(folder):
    from paceline.trace.arrivals import encounters
    from paceline.trace.blame import blame, lateness_s
    from paceline.trace.communication import communication
    from paceline.trace.phases import phases

    from paceline.trace.merge import load_run

    begin = time.perf_counter()
    trace = load_run(folder)
    loaded = time.perf_counter()
    met = encounters(trace)
    parts = phases(trace, met)
    late = lateness_s(trace, min(part.steps for part in parts), met)
    found = answers(parts, late, blame(trace, parts, late_s=late), communication(trace, met))
    events = sum(len(rank.events) for rank in trace.ranks)
    return loaded - begin, time.perf_counter() - loaded, events, found


def measure(which, folder):
    """Analyse in this process; print what it took, and the answer."""
    load_s, analyse_s, events, found = (analyse_now if which == "now" else analyse_before)(
        Path(folder)
    )
    result = {
        "events": events,
        "load_s": load_s,
        "analyse_s": analyse_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "answers": found,
    }
    print(json.dumps(result))


# --- in the benchmark ----------------------------------------------------------------------------

# The committed package takes the compiled module of this one: what it needs of it has not changed.
SHIM = """
import importlib.util, os
spec = importlib.util.spec_from_file_location("current._native", os.environ["PACELINE_NATIVE"])
current = importlib.util.module_from_spec(spec)
spec.loader.exec_module(current)
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(current, name, None)
"""


def committed_code(folder):
    """Return the environment in which the committed package is imported; None without git."""
    from paceline import native

    command = ["git", "archive", COMMIT, "src/paceline"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, timeout=60, check=False
    )
    if done.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "src/paceline/_native.py").write_text(SHIM)
    return {
        **os.environ,
        "PYTHONPATH": str(folder / "src"),
        "PACELINE_NATIVE": native._native.__file__,  # noqa: SLF001  # its path
    }


def run(which, folder, env=None):
    """Measure in a process of its own."""
    flags = ["-S"] if env else []  # an editable installation would be found first
    site = [path for path in sys.path if path.endswith("site-packages")]
    if env:
        env = {**env, "PYTHONPATH": os.pathsep.join([env["PYTHONPATH"], *site])}
    done = subprocess.run(
        [sys.executable, *flags, __file__, "--measure", which, str(folder)],
        env=env,
        stdout=subprocess.PIPE,
        check=True,
        timeout=1800,
    )
    return json.loads(done.stdout)


def differences(now, before):
    """Return how many numbers of two answers differ by more than rounding."""
    if isinstance(now, dict):
        if not now.keys() >= before.keys():
            return 1
        return sum(differences(now[key], before[key]) for key in before)
    if isinstance(now, list):
        if len(now) != len(before):
            return 1
        return sum(differences(*pair) for pair in zip(now, before, strict=True))
    if isinstance(now, float):
        return int(abs(now - before) > 1e-9 * max(1.0, abs(before)))
    return int(now != before)


def main():
    options = harness.options(__doc__, "--measure")
    if options.measure:
        measure(*options.measure)
        return 0
    report = harness.Report("analysis", options.json)
    count = QUICK_EVENTS if options.quick else EVENTS
    with tempfile.TemporaryDirectory(prefix="paceline-analysis-") as name:
        folder = Path(name)
        events = write(folder / "large", 2, count)
        harness.tell(f"{events:,} events of {RANKS} ranks written")
        large = run("now", folder / "large")
        found = large.pop("answers")
        report.row(code="now", ranks=RANKS, **large)
        shutil.rmtree(folder / "large")
        write(folder / "old", 1, count)
        now = run("now", folder / "old")
        ours = now.pop("answers")
        report.row(code="now, files of version 1", ranks=RANKS, **now)
        env = committed_code(folder / "committed")
        if env is not None:
            before = run("before", folder / "old", env)
            theirs = before.pop("answers")
            report.row(code=f"{COMMIT}, files of version 1", ranks=RANKS, **before)
    what = f"{large['events']:,} events of {RANKS} ranks"
    report.bar(
        f"{what}: read, merged and analysed, seconds", large["load_s"] + large["analyse_s"], MAX_S
    )
    report.bar(f"{what}: peak memory, bytes", large["peak_bytes"], MAX_BYTES)
    accused = [late["rank"] for late in found["stragglers"]]
    report.bar(f"{what}: late ranks missed or accused wrongly", int(accused != [LATE_RANK]), 0)
    if env is not None:
        report.bar(f"numbers that differ from {COMMIT}'s", differences(ours, theirs), 0)
        ratio = (before["load_s"] + before["analyse_s"]) / (now["load_s"] + now["analyse_s"])
        report.bar(f"{what}: {COMMIT} / now, time", ratio, 1.0, at_least=True)
        memory = before["peak_bytes"] / now["peak_bytes"]
        report.bar(f"{what}: {COMMIT} / now, peak memory", memory, 1.0, at_least=True)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
