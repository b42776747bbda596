"""What a run's traces say, counted in the plainest way: for `true_sentences.py` to judge words by.

Nothing of `paceline.report` or `paceline.trace.analysis` is used: traces are decoded, merged to one
clock, and their steps are those that the merge found. All else is summed up here anew, by loops
over events.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

import numpy as np

from paceline.trace.format.events import MAIN, Kind
from paceline.trace.merge import load_run

# Kinds of the main thread that take time of a step, and how a reader would call them.
PHASES = {
    Kind.INPUT: "input",
    Kind.COPY: "copy",
    Kind.COMPILATION: "compilation",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.OPTIMIZER: "optimizer",
    Kind.WAIT: "blocked",
    Kind.CHECKPOINT: "checkpoint",
    Kind.WRITE: "checkpoint",
    Kind.READ: "input",
    Kind.EVALUATION: "evaluation",
    Kind.HOST: "named",
}


class RankFacts:
    """One rank: its steps, and its seconds by phase in each of them."""

    def __init__(self, trace):
        self.trace = trace
        marks = trace.events_of(Kind.STEP)
        main = trace.events[
            (trace.events["location"] == MAIN) & np.isin(trace.events["kind"], list(PHASES))
        ]
        main = self._drained(main)
        order = np.lexsort((-main["end_ns"].astype(np.int64), main["begin_ns"].astype(np.int64)))
        self.main = main[order]
        ends = np.sort(marks["end_ns"].astype(np.int64))
        begin = marks["begin_ns"].min() if len(marks) else 0
        self.bounds = np.concatenate([[int(begin)], ends])

    def _drained(self, main):
        """Return the events, drains cut where the last collective that they wait for ends.

        What is left of a drain is DDP's own work, or a thread that got no core.
        """
        if "drain" not in self.trace.names:
            return main
        calls = self.trace.events_of(Kind.COLLECTIVE)
        begins, last = calls["begin_ns"], np.maximum.accumulate(calls["end_ns"])
        main = main.copy()
        drains = main["name"] == self.trace.names.index("drain")
        at = np.searchsorted(begins, main["end_ns"][drains]) - 1
        ends = np.where(at >= 0, last[np.maximum(at, 0)], 0)
        main["end_ns"][drains] = np.clip(ends, main["begin_ns"][drains], main["end_ns"][drains])
        return main

    @property
    def steps(self):
        return len(self.bounds) - 1

    @cached_property
    def step_s(self):
        return np.diff(self.bounds) / 1e9

    @cached_property
    def seconds(self):
        """Seconds of each phase by step: an event without the events within it, cut at steps."""
        found = defaultdict(lambda: np.zeros(self.steps))
        open_events = []  # (end, phase), the innermost last
        now = int(self.main["begin_ns"][0]) if len(self.main) else 0

        def spend(until):
            nonlocal now
            if open_events and until > now:
                self._add(found[open_events[-1][1]], now, until)
            now = max(now, until)

        for begin, end, kind in zip(
            *(self.main[name].tolist() for name in ("begin_ns", "end_ns", "kind")), strict=True
        ):
            while open_events and open_events[-1][0] <= begin:
                spend(open_events[-1][0])
                open_events.pop()
            spend(begin)
            open_events.append((end, PHASES[Kind(kind)]))
        while open_events:
            spend(open_events[-1][0])
            open_events.pop()
        return found

    @cached_property
    def evaluation_s(self):
        """Seconds of evaluations by step, with all that is done within them."""
        sums = np.zeros(self.steps)
        rows = self.main[self.main["kind"] == Kind.EVALUATION]
        for begin, end in zip(rows["begin_ns"].tolist(), rows["end_ns"].tolist(), strict=True):
            self._add(sums, begin, end)
        return sums

    def _add(self, sums, begin, end):
        first, last = np.searchsorted(self.bounds, [begin, end - 1], side="right") - 1
        for step in range(max(first, 0), min(last, self.steps - 1) + 1):
            inside = min(end, self.bounds[step + 1]) - max(begin, self.bounds[step])
            sums[step] += max(0, inside) / 1e9

    def total(self, phase, first=0, stop=None):
        return float(self.seconds[phase][first:stop].sum()) if phase in self.seconds else 0.0

    def wall_s(self, first=0, stop=None):
        return float(self.step_s[first:stop].sum())

    def share(self, phase, first=0, stop=None):
        return self.total(phase, first, stop) / max(self.wall_s(first, stop), 1e-12)

    def counter(self, name):
        """Return the values of a counter."""
        if name not in self.trace.names:
            return np.zeros(0)
        rows = self.trace.events_of(Kind.COUNTER)
        return rows["amount"][rows["name"] == self.trace.names.index(name)].astype(float)

    def named(self, kind, *names):
        """Return the events of a kind in the loop, of these names if there are any."""
        rows = self.trace.events_of(kind)
        rows = rows[(rows["begin_ns"] >= self.bounds[0]) & (rows["end_ns"] <= self.bounds[-1])]
        if names:
            numbers = [number for number, name in enumerate(self.trace.names) if name in names]
            rows = rows[np.isin(rows["name"], numbers)]
        return rows

    def seconds_named(self, kind, *names):
        rows = self.named(kind, *names)
        return float(
            (rows["end_ns"].astype(np.int64) - rows["begin_ns"].astype(np.int64)).sum() / 1e9
        )

    def evaluations(self):
        """Return how often forward passes without training follow one that trains."""
        rows = self.trace.events_of(Kind.EVALUATION, Kind.BACKWARD)
        kinds = rows["kind"][rows["location"] == MAIN] == Kind.EVALUATION
        return int(np.sum(kinds[1:] & ~kinds[:-1]) + (len(kinds) > 0 and kinds[0]))


class RunFacts:
    """A run of one or more ranks."""

    def __init__(self, folder):
        self.trace = load_run(folder)
        self.ranks = [RankFacts(rank) for rank in self.trace.ranks]

    @property
    def steps(self):
        return min((rank.steps for rank in self.ranks), default=0)

    def step_time_s(self):
        """Return the median over steps of what the slowest rank takes, evaluations left out."""
        each = [(rank.step_s - rank.evaluation_s)[: self.steps] for rank in self.ranks]
        return float(np.median(np.max(each, axis=0)))

    def mean_share(self, phase, first=0, stop=None):
        """Return the mean seconds of a phase over ranks as a share of their mean wall time."""
        spent = np.mean([rank.total(phase, first, stop) for rank in self.ranks])
        return float(spent / max(np.mean([rank.wall_s(first, stop) for rank in self.ranks]), 1e-12))

    def per_step_s(self, phase):
        """Return the mean over ranks of a phase's seconds in a step."""
        return float(np.mean([rank.total(phase) / max(1, rank.steps) for rank in self.ranks]))

    def counters(self, name):
        return [rank.counter(name) for rank in self.ranks]

    def reduced_bytes(self):
        """Return the bytes that a rank gives to all-reduces in a step, the most of any rank."""
        found = []
        for rank in self.ranks:
            rows = rank.named(Kind.COLLECTIVE, "all_reduce")
            found.append(float(rows["amount"].sum()) / max(1, rank.steps))
        return max(found, default=0.0)
