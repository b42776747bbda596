"""The analysis on arrays says what the rules on objects said, on random traces and golden ones."""

from pathlib import Path

import numpy as np
import pytest
from oracles import object_rules
from support.examples import examples
from support.traces import MS, Event, set_boot_id, write_run

from paceline.trace.analysis import analyse
from paceline.trace.format.events import COMMUNICATION, DRAIN, MAIN, Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run

GOLDEN = Path(__file__).parents[1] / "golden"
OPERATIONS = ("all_reduce", "all_gather", "barrier", "broadcast", "scatter", "reduce", "gather")
ROOTED = OPERATIONS[3:]
TRACES = 10 * examples(100)


def _assert_equal(trace):
    analysis = analyse(trace)
    met = object_rules.encounters(trace)
    for found, expected in zip(analysis.waits, met.blocked, strict=True):
        for field in ("begin_ns", "ready_ns", "end_ns", "synchronises"):
            assert found[field].tolist() == [getattr(wait, field) for wait in expected], field
    for i, phases in enumerate(analysis.phases):
        seconds = object_rules.phase_seconds(trace.ranks[i], met.blocked[i])
        assert phases.seconds == pytest.approx(seconds, rel=1e-9, abs=1e-12)
    skew = object_rules.lateness_s(trace, analysis.steps, met)
    assert analysis.skew_s == pytest.approx(skew, rel=1e-9, abs=1e-12)
    traffic = object_rules.communication(trace, met)

    def place(line):
        return line.operation, line.group, line.size_class_bytes

    assert sorted(analysis.traffic, key=place) == sorted(traffic, key=place)
    assert analysis.mismatches == ()


class _Generator:
    """Makes the events of a small run in which anything may happen but messages.

    The old rules knew roots only where all ranks took part and left a trace.
    """

    def __init__(self, seed, *, rooted):
        self.random = np.random.default_rng(seed)
        self.rooted = rooted
        self.ranks = int(self.random.integers(1, 5))
        self.now = [10**9 + self.some_ns() for _ in range(self.ranks)]
        self.events = [[] for _ in range(self.ranks)]
        self.sequences = {}

    def some_ns(self, most_ms=5):
        return int(self.random.integers(0, most_ms * MS))

    def groups(self):
        yield "group 0", tuple(range(self.ranks))
        if self.ranks > 2:
            yield "group 1", tuple(range(1, self.ranks))

    def run(self):
        for step in range(int(self.random.integers(1, 5))):
            begins = list(self.now)
            for _ in range(int(self.random.integers(0, 6))):
                self.phase(step)
                self.collective(step)
            self.backward(step)
            for rank in range(self.ranks):
                self.now[rank] += self.some_ns()
                self.add(rank, Kind.STEP, begins[rank], self.now[rank], step)
        return self.events

    def add(self, rank, kind, begin, end, step, name="", **more):
        self.events[rank].append(Event(kind, begin, end, name, step, **more))

    def phase(self, step):
        for rank in range(self.ranks):
            begin = self.now[rank]
            self.now[rank] += self.some_ns()
            kind = Kind(int(self.random.choice([1, 2, 3, 5, 8])))
            self.add(rank, kind, begin, self.now[rank], step, "phase")
            if self.random.random() < 0.5:
                middle = (begin + self.now[rank]) // 2
                self.add(rank, Kind.COPY, begin, middle, step, "nested")

    def collective(self, step):
        groups = list(self.groups())
        group, members = groups[int(self.random.integers(len(groups)))]
        rooted = self.rooted and len(members) == self.ranks
        name = str(self.random.choice(OPERATIONS if rooted else OPERATIONS[:3]))
        root = int(self.random.choice(members)) if name in ROOTED else -1
        amount = int(self.random.integers(0, 5000))
        sequence = self.sequences[group] = self.sequences.get(group, 0) + 1
        lost = name not in ROOTED and self.random.random() < 0.1
        ends = max(self.now[rank] for rank in members) + self.some_ns(1)
        shared = {"group": group, "sequence": sequence, "peer": root, "members": members}
        for rank in members:
            issued = self.now[rank]
            waited_from = issued + self.some_ns(2) * int(self.random.integers(0, 2))
            end = max(ends, waited_from) if self.random.random() < 0.8 else issued + self.some_ns(1)
            if not (lost and rank == members[0] and len(members) > 1):
                self.add(
                    *(rank, Kind.COLLECTIVE, issued, end, step, name),
                    amount=amount,
                    location=COMMUNICATION,
                    **shared,
                )
            if self.random.random() < 0.8 and end >= waited_from:
                self.add(rank, Kind.WAIT, waited_from, end, step, name, **shared)
            self.now[rank] = max(end, waited_from)

    def backward(self, step):
        """Buckets that are reduced while computing goes on, and a drain for them."""
        group, members = next(self.groups())
        buckets = int(self.random.integers(0, 3))
        issues = {rank: [] for rank in members}
        begins = {rank: self.now[rank] for rank in members}
        for rank in members:
            for _ in range(buckets):
                self.now[rank] += 1 + self.some_ns()
                issues[rank].append(self.now[rank])
            self.now[rank] += self.some_ns(1)
        computed = dict(enumerate(self.now))
        at = 0
        for bucket in range(buckets):
            at = max(at, *(issues[rank][bucket] for rank in members)) + self.some_ns(2)
            sequence = self.sequences[group] = self.sequences.get(group, 0) + 1
            for rank in members:
                self.add(
                    *(rank, Kind.COLLECTIVE, issues[rank][bucket], at, step, "all_reduce"),
                    amount=64 << bucket,
                    group=group,
                    sequence=sequence,
                    members=members,
                    location=COMMUNICATION,
                )
        for rank in members:
            self.now[rank] = max(self.now[rank], at) + self.some_ns(1)
            self.add(rank, Kind.WAIT, computed[rank], self.now[rank], step, DRAIN, location=MAIN)
            self.add(rank, Kind.BACKWARD, begins[rank], self.now[rank], step, "backward")


@pytest.mark.parametrize("part", range(10))
def test_random_traces_are_analysed_alike(tmp_path, part):
    for seed in range(part * TRACES // 10, (part + 1) * TRACES // 10):
        run = write_run(tmp_path / str(seed), _Generator(seed, rooted=seed % 7 != 0).run())
        if seed % 5 == 0:
            for path in sorted((run / "trace").iterdir())[1:]:
                set_boot_id(path, "another node")
        if seed % 7 == 0:
            (run / "trace" / trace_name(0)).unlink()
        if any((run / "trace").iterdir()):
            _assert_equal(load_run(run))


@pytest.mark.parametrize("run", ["v1/ddp", "v1/killed", "v2/ddp", "v2/killed"])
def test_golden_traces_are_analysed_alike(run):
    _assert_equal(load_run(GOLDEN / f"trace-{run}"))
