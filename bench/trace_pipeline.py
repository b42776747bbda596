"""From events to figures: how fast, in how many bytes, and in how much memory?

    python bench/trace_pipeline.py --json [--quick]

- recorder: events a second of one rank, from C++ and from Python: recorded, packed and written.
- generated run: 1,024 ranks of a training loop (a message to the neighbour, an all-gather in groups
  of 8, two all-reduces behind the backward pass), written by the real recorder; bytes an event.
- merge and analysis: `measure_run` on it, in a process of its own: seconds and peak memory.
- export: events a second into OTF2.
- clocks: ranks of four nodes whose clocks are off by 2 s and drift by 50 ppm: how far corrected
  times are from the true ones, in least message latencies; receives before their send. The same
  with clocks that change amid the run: one drifts the other way, one is set by 2 s, one does both.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from harness import Report, options, tell

RANKS, GROUP = 1024, 8
EVENTS, QUICK_EVENTS = 64_000_000, 500_000
RATE_EVENTS, ROUNDS = 2_000_000, 5
MAX_BYTES, LEAST_CPP, LEAST_PYTHON, MAX_EVENT_BYTES = 1e9, 2e6, 0.5e6, 16
LEAST_EXPORT = 1e6
US, MS = 1_000, 1_000_000
START_NS = 10**12
DEADLINE_S = 7200


# --- the run -------------------------------------------------------------------------------------


def play(ranks, steps, latency_ns=20 * US):
    """Return times of a generated run by name, arrays of shape (ranks, steps), nanoseconds."""
    random = np.random.default_rng(7)
    shape = (ranks, steps)

    def spans(low, high):
        return random.integers(low, high, shape, dtype=np.int64)

    data, forward, part, backward, update = (
        spans(*bounds)
        for bounds in (
            (100 * US, 300 * US),
            (2 * MS, 3 * MS),
            (200 * US, 300 * US),
            (4 * MS, 6 * MS),
            (300 * US, 500 * US),
        )
    )
    flight = latency_ns + random.exponential(10 * US, shape).astype(np.int64)
    names = ("begin", "fed", "received", "gathering", "gathered", "passed", "first", "computed")
    found = {name: np.empty(shape, dtype=np.int64) for name in names}
    found |= {name: np.empty(shape, dtype=np.int64) for name in ("first_done", "done", "end")}
    now = np.full(ranks, START_NS, dtype=np.int64)
    for step in range(steps):
        fed = now + data[:, step]
        received = np.maximum(fed + US, np.roll(fed, 1) + flight[:, step])
        gathering = received + part[:, step]
        by_group = gathering.reshape(-1, GROUP)
        gathered = np.repeat(by_group.max(axis=1), GROUP) + flight[:, step] + 50 * US
        passed = gathered + forward[:, step]
        first = passed + backward[:, step] // 2
        computed = passed + backward[:, step]
        first_done = first.max() + 400 * US + flight[:, step]
        done = np.maximum(first_done.max(), computed.max()) + 100 * US + flight[:, step]
        end = done + update[:, step]
        for name, value in (
            *(("begin", now), ("fed", fed), ("received", received), ("gathering", gathering)),
            *(("gathered", gathered), ("passed", passed), ("first", first)),
            *(("computed", computed), ("first_done", first_done), ("done", done), ("end", end)),
        ):
            found[name][:, step] = value
        now = end
    return found


# kind, name, begin, end, amount, group, its number in the step, peer, whether on the main thread
ROWS = (
    ("INPUT", "next", "begin", "fed", 0, 0, 0, None, True),
    ("SEND", "send", "fed", "fed+", 65_536, 1, 1, 1, False),
    ("RECV", "recv", "fed", "received", 65_536, 1, 1, -1, False),
    ("WAIT", "recv", "fed", "received", 0, 1, 1, -1, True),
    ("COLLECTIVE", "all_gather", "gathering", "gathered", 1 << 20, 2, 1, None, False),
    ("WAIT", "all_gather", "gathering", "gathered", 0, 2, 1, None, True),
    ("FORWARD", "forward", "received", "passed", 0, 0, 0, None, True),
    ("COLLECTIVE", "all_reduce", "first", "first_done", 4 << 20, 1, 1, None, False),
    ("COLLECTIVE", "all_reduce", "computed", "done", 1 << 16, 1, 2, None, False),
    ("WAIT", "drain", "computed", "done", 0, 0, 0, None, True),
    ("BACKWARD", "backward", "passed", "done", 0, 0, 0, None, True),
    ("OPTIMIZER", "step", "done", "updated", 0, 0, 0, None, True),
    ("OPTIMIZER", "zero_grad", "updated", "end", 0, 0, 0, None, True),
    ("STEP", "step", "begin", "end", 0, 0, 0, None, True),
    ("COUNTER", "running_ns", "end", "end", None, 0, 0, None, True),
    ("COUNTER", "not_running_ns", "end", "end", None, 0, 0, None, True),
)
A_STEP = {1: 2, 2: 1}  # collectives of a group


def events_of(times, rank, numbers, groups, clock=lambda ns: ns):
    """Return a rank's events, with numbers of names and groups as its recorder gave them."""
    from paceline.trace.format.events import EVENT_DTYPE, Kind

    ranks, steps = times["begin"].shape
    own = {name: value[rank] for name, value in times.items()}
    own["fed+"] = own["fed"] + US
    own["updated"] = own["done"] + (own["end"] - own["done"]) // 2
    own = {name: clock(value) for name, value in own.items()}
    events = np.zeros((steps, len(ROWS)), EVENT_DTYPE)
    count = np.arange(steps)
    for i, (kind, name, begin, end, amount, group, number, peer, on_main) in enumerate(ROWS):
        column = events[:, i]
        column["kind"], column["name"], column["group"] = Kind[kind], numbers[name], groups[group]
        column["begin_ns"], column["end_ns"], column["step"] = own[begin], own[end], count
        column["location"] = 0 if on_main else 1
        busy = own["computed"] - own["begin"]
        column["amount"] = busy // (1 if name == "running_ns" else 50) if amount is None else amount
        column["peer"] = -1 if peer is None else (rank + peer) % ranks
        if number:
            a_step = 1 if peer is not None else A_STEP[group]
            column["sequence"] = a_step * count + number
    return events.reshape(-1)


def write(folder, ranks, steps, times, clocks=None):
    """Write the run's traces with the recorder; return their bytes and the seconds it took."""
    from paceline.native import Recorder
    from paceline.trace.format.files import trace_name

    (folder / "trace").mkdir(parents=True)
    seconds = total = 0
    for rank in range(ranks):
        path = folder / "trace" / trace_name(rank)
        recorder = Recorder(str(path), rank, ranks, flush_interval_s=60.0)
        numbers = {name: recorder.intern(name) for _, name, *_ in ROWS}
        first = rank // GROUP * GROUP
        groups = [0, recorder.define_group("group 0", range(ranks))]
        groups.append(recorder.define_group("group 1", range(first, first + GROUP)))
        clock = clocks[rank] if clocks else lambda ns: ns
        events = events_of(times, rank, numbers, groups, clock)
        begin = time.perf_counter()
        recorder.record_events(events)
        recorder.close()
        seconds += time.perf_counter() - begin
        assert recorder.dropped_count == 0
        total += path.stat().st_size
    return total, seconds


# --- sections ------------------------------------------------------------------------------------


def recorder(report, folder, quick):
    """Measure what recording an event takes, in C++ and in Python, until it is on the disk."""
    from paceline.native import Recorder

    count = RATE_EVENTS // (8 if quick else 1)
    steps = -(-count // len(ROWS))
    names = {name: number for number, (_, name, *_) in enumerate(ROWS)}
    events = events_of(play(GROUP, steps), 0, names, [0, 0, 0])[:count]
    rates = {"C++": [], "Python": []}
    for turn in range(ROUNDS):
        for language, found in rates.items():
            path = folder / f"rate-{language}-{turn}"
            own = Recorder(str(path), 0, 1, buffer_events=1 << 20)
            own.define_group("", [])
            for name in names:
                own.intern(name)
            rows = events[: count if language == "C++" else count // 4]
            fields = [rows[name].tolist() for name in FIELDS]
            begin = time.perf_counter()
            if language == "C++":
                own.record_events(rows)
            else:
                record = own.record
                for values in zip(*fields, strict=True):
                    record(*values)
            own.close()
            found.append(len(rows) / (time.perf_counter() - begin))
            assert own.dropped_count == 0
            path.unlink()
    for language, found in rates.items():
        report.row(section="recorder", language=language, events_per_s=statistics.median(found),
                   least=min(found), most=max(found))  # fmt: skip
    rate = statistics.median(rates["C++"])
    report.bar("recorder, C++, events/s", rate, LEAST_CPP, at_least=True)
    rate = statistics.median(rates["Python"])
    report.bar("recorder, Python, events/s", rate, LEAST_PYTHON, at_least=True)


FIELDS = ("kind", "location", "name", "begin_ns", "end_ns", "amount", "group", "sequence", "peer",
          "tag", "step")  # fmt: skip


def generated(report, folder, quick):
    """Write the run of 1,024 ranks, and measure the bytes of an event."""
    steps = -(-(QUICK_EVENTS if quick else EVENTS) // RANKS // len(ROWS))
    begin = time.perf_counter()
    total, seconds = write(folder / "run", RANKS, steps, play(RANKS, steps))
    events = RANKS * steps * len(ROWS)
    report.row(section="generated run", ranks=RANKS, events=events, bytes=total,
               bytes_per_event=total / events, record_events_per_s=events / seconds,
               s=time.perf_counter() - begin)  # fmt: skip
    if quick:  # headers of 4 KiB and members of the group of all count in a short run
        small, _ = write(folder / "long", GROUP, 20_000, play(GROUP, 20_000))
        total, events = small, GROUP * 20_000 * len(ROWS)
        report.row(section="generated run", ranks=GROUP, bytes_per_event=total / events)
    report.bar("bytes an event on disk", total / events, MAX_EVENT_BYTES)


def analysed(report, folder, quick):
    """Merge and analyse the generated run in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--measure", str(folder / "run")],
        stdout=subprocess.PIPE, check=True, timeout=DEADLINE_S,
    )  # fmt: skip
    found = json.loads(done.stdout)
    steps = -(-(QUICK_EVENTS if quick else EVENTS) // RANKS // len(ROWS))
    events = RANKS * steps * len(ROWS)
    report.row(section="merge and analysis", ranks=RANKS, events=events,
               us_per_event=found["s"] / events * 1e6, **found)  # fmt: skip
    what = f"{events / 1e6:.1f} M events of {RANKS} ranks merged and analysed"
    report.bar(f"{what}, peak memory, bytes", found["peak_bytes"], MAX_BYTES)


def measure(run):
    """Analyse a run in this process; print what it took, and what tells it was right."""
    from paceline.trace.efficiency import measure_run

    begin = time.perf_counter()
    found = measure_run(Path(run))
    result = {
        "s": time.perf_counter() - begin,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parallel": found.metrics.parallel,
        "waits_s": found.waits.seconds,
        "path_parts": len(found.path.parts),
        "replay_error": found.replay_error,
        "pairs": found.matrix.pair_count,
    }
    print(json.dumps(result))


def export(report, folder, quick):
    """Export the events of a few ranks to OTF2."""
    what = "OTF2 export, events/s of one core"
    if importlib.util.find_spec("paceline.trace.export") is None:
        report.row(section="export", missing="paceline.trace.export is not there")
        report.bar(what, None, LEAST_EXPORT, at_least=True, reason="there is no export yet")
        return
    steps = 500 if quick else 5_000
    write(folder / "export", GROUP, steps, play(GROUP, steps))
    from paceline.core.errors import PacelineError
    from paceline.trace.merge import load_run

    write_otf2 = importlib.import_module("paceline.trace.export").write_otf2

    trace = load_run(folder / "export")
    begin = time.process_time()
    try:
        write_otf2(trace, folder / "otf2")
    except PacelineError as problem:  # OTF2's library is not there
        report.row(section="export", missing=str(problem))
        report.bar(what, None, LEAST_EXPORT, at_least=True, reason="the export failed")
        return
    seconds = time.process_time() - begin
    rate = GROUP * steps * len(ROWS) / seconds
    report.row(section="export", events=GROUP * steps * len(ROWS), s=seconds, events_per_s=rate)
    report.bar(what, rate, LEAST_EXPORT, at_least=True)


NODES, OFFSET_NS, DRIFT, LATENCY_NS = 4, 2 * 10**9, 50e-6, 20 * US


def clocks(report, folder, quick):
    """Put ranks on nodes with clocks of their own; compare corrected times with the true ones."""
    from paceline.trace.merge import load_run

    # A drift that changes by 100 ppm leaves bounds of 100 us after some seconds.
    ranks, steps = 4 * GROUP, 1000 if quick else 20_000
    times = play(ranks, steps, LATENCY_NS)
    for changes in (False, True):
        run = folder / ("changing clocks" if changes else "clocks")
        true = node_clocks(times, changes)
        node_of = [rank * NODES // ranks for rank in range(ranks)]
        write(run, ranks, steps, times, [true[node] for node in node_of])
        for rank in range(ranks):
            set_node(run / "trace" / f"rank-{rank:05d}.trace", f"node {node_of[rank]}")
        begin = time.perf_counter()
        trace = load_run(run)
        seconds = time.perf_counter() - begin
        worst = stated = 0
        for rank, (own, clock) in enumerate(zip(trace.ranks, trace.clocks, strict=True)):
            marks = own.events_of(10)
            off = np.abs(clock.to_run_ns(marks["end_ns"]) - times["end"][rank])
            worst = max(worst, int(off.max()))
            stated = max(stated, clock.error_ns if clock.error_ns is not None else 2**62)
        messages = trace.matches.messages
        received = messages[~messages["sends"] & (messages["partner"] >= 0)]
        sent = messages[received["partner"]]
        early = int((received["exit_ns"] < sent["enter_ns"]).sum())
        run_s = float(times["end"].max() - START_NS) / 1e9
        report.row(section=run.name, nodes=NODES, ranks=ranks, run_s=run_s, load_s=seconds,
                   changes=[len(clock.later) for clock in trace.clocks[:: ranks // NODES]],
                   error_us=worst / US, stated_error_us=stated / US, latency_us=LATENCY_NS / US,
                   repaired_messages=trace.violations.messages,
                   repaired_collectives=trace.violations.collectives)  # fmt: skip
        report.bar(f"{run.name}: residual error / least message latency", worst / LATENCY_NS, 3)
        report.bar(f"{run.name}: receives before their send", early, 0)


def node_clocks(times, changes):
    """Return each node's clock, off and drifting; with `changes`, set or slewed amid the run."""
    random = np.random.default_rng(5)
    middle = int(times["end"][0, times["end"].shape[1] // 2])
    found = {0: lambda ns: ns}
    for node in range(1, NODES):
        offset = OFFSET_NS * random.choice([-1, 1])
        drift = DRIFT * random.choice([-1, 1])
        change = -2 * drift if changes and node != 2 else 0.0  # node 2 is set
        step = OFFSET_NS if changes and node >= 2 else 0  # node 3 is set, and drifts otherwise

        def clock(ns, offset=offset, drift=drift, change=change, step=step):
            ns = np.asarray(ns)
            moved = drift * (ns - START_NS) + change * np.maximum(0, ns - middle)
            return ns + offset + np.rint(moved).astype(np.int64) + np.where(ns >= middle, step, 0)

        found[node] = clock
    return found


def set_node(path, name):
    """Make the trace look as if it came from another node."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.traces import set_boot_id

    set_boot_id(path, name)


SECTIONS = {"recorder": recorder, "generated run": generated, "merge and analysis": analysed,
            "export": export, "clocks": clocks}  # fmt: skip


def main():
    asked = options(__doc__, "--measure")
    if asked.measure:
        measure(asked.measure[0])
        return 0
    report = Report("trace_pipeline", asked.json)
    with tempfile.TemporaryDirectory(prefix="paceline-trace-") as name:
        for section, run in SECTIONS.items():
            tell(section)
            run(report, Path(name), asked.quick)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
