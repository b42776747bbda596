"""What the benchmarks share: the machine, bars, intervals, and one shape of output.

    {"name", "machine", "load": [before, after], "rows": [...], "bars": [{"name", "value", "bar",
     "met"}]}

A bar is met by a value up to it; with "at_least": true, by a value from it on.
`load` is the load average over a minute: what else ran can be told from what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import numpy as np


def options(doc, *more, switches=None):
    """Return the parsed flags: those of every benchmark, `more` hidden ones, and `switches`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="within a minute, rougher")
    for name, text in (switches or {}).items():
        parser.add_argument(name, action="store_true", help=text)
    for name in more:
        parser.add_argument(name, nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def tell(text):
    """Say something that is no result."""
    print(text, file=sys.stderr, flush=True)


def run_sections(names, run, report, *, failures=()):
    """Run the sections of a benchmark, and say how long each took.

    Args:
        names: of the sections.
        run: called with each name.
        report: gets a bar without a value for a section that ends with one of `failures`.
        failures: classes of exceptions that do not end the benchmark.
    """
    for name in names:
        begin = time.perf_counter()
        tell(f"{name}:")
        try:
            run(name)
        except failures as problem:
            report.bar(f"{name} was measured", None, 1, at_least=True, reason=str(problem))
        tell(f"{name}: {time.perf_counter() - begin:.0f} s")


def await_ranks(ranks, deadline_s):
    """Wait for the processes of a job; end the benchmark if one failed. None runs on."""
    try:
        codes = [rank.wait(timeout=deadline_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")


def bar(name, value, limit, *, at_least=False, reason=""):
    """Return a bar: a value that must not exceed its limit, or must reach it. None is not met."""
    met = value is not None and bool(value >= limit if at_least else value <= limit)
    return {
        "name": name,
        "value": value,
        "bar": limit,
        "met": met,
        **({"at_least": True} if at_least else {}),
        **({"reason": reason} if reason else {}),
    }


def median_interval(groups, *, seed=0, draws=4000):
    """Return the median of all values, and its bootstrapped 95 % interval.

    Values of one group have something in common, for example their processes: groups are drawn
    first, then values within each.
    """
    groups = [np.asarray(group) for group in groups]
    rng = np.random.default_rng(seed)
    medians = []
    for _ in range(draws):
        drawn = [groups[i] for i in rng.integers(len(groups), size=len(groups))]
        medians.append(
            np.median(np.concatenate([rng.choice(group, len(group)) for group in drawn]))
        )
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(np.median(np.concatenate(groups))), float(low), float(high)


class Report:
    """Collects rows and bars, and prints them; made before the measuring begins."""

    def __init__(self, name, as_json):
        self.name = name
        self.as_json = as_json
        self.machine = None  # by default as this host was probed before
        self.load = [os.getloadavg()[0]]
        self.rows = []
        self.bars = []

    def row(self, **values):
        self.rows.append(values)
        tell("  " + ", ".join(f"{key} {_short(value)}" for key, value in values.items()))

    def bar(self, *args, **kwargs):
        self.bars.append(bar(*args, **kwargs))

    def print(self):
        """Print the outcome; return the exit code: 1 when a bar is not met."""
        from paceline.probe.machine_file import known_machine
        from paceline.runs.versions import versions

        self.load.append(os.getloadavg()[0])
        for bar in self.bars:
            verdict = "met" if bar["met"] else "NOT MET"
            reason = f" ({bar['reason']})" if "reason" in bar else ""
            sign = ">=" if "at_least" in bar else "<="
            tell(f"{verdict:>8}: {bar['name']}: {_short(bar['value'])} {sign} {bar['bar']}{reason}")
        if self.as_json:
            result = {
                "name": self.name,
                "machine": (self.machine or known_machine(None)).to_json(),
                "versions": versions(),
                "load": self.load,
                "rows": self.rows,
                "bars": self.bars,
            }
            print(json.dumps(result))
        return 0 if all(bar["met"] for bar in self.bars) else 1


def _short(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {_short(one)}" for key, one in value.items() if one) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_short, value)) + "]"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
