"""The tables of a queue, as rows of text that terminal and page share."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.report.units import format_share, plural, significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.report.queue.model import QueueFigures

BOUND = "lower bound"
_ALIKE = 1.01  # of the best: what differs by less is a tie, in a trace that is one sample
_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))


class Unit(NamedTuple):
    """A unit in which all times of a table are shown."""

    seconds: float
    name: str

    def show(self, seconds: float) -> str:
        """Return a time in this unit, without its name."""
        return significant(seconds / self.seconds)


def unit_for(times_s: Iterable[float]) -> Unit:
    """Return the largest unit of which the longest time has at least two.

    >>> unit_for([30, 7300.0]).name, unit_for([90.0]).name, unit_for([]).name
    ('h', 's', 's')
    """
    longest_s = max(times_s, default=0.0)
    return next((Unit(*unit) for unit in _UNITS if longest_s >= 2 * unit[0]), Unit(1.0, "s"))


def comparison(rows: Sequence[QueueFigures]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of policies; its last row is the lower bound."""
    unit = unit_for([row.makespan_s for row in rows])
    heads = [
        "policy",
        *(f"JCT {name}, {unit.name}" for name in ("mean", "p50", "p99")),
        f"makespan, {unit.name}",
        *("rho worst", "rho p99", "rho > 1.1"),
        *("allocated", "useful", "restarts"),
    ]
    lines = [
        [
            row.policy,
            *(unit.show(value) for value in (row.jct_mean_s, row.jct_p50_s, row.jct_p99_s)),
            unit.show(row.makespan_s),
            significant(row.rho_worst),
            significant(row.rho_p99),
            format_share(row.rho_above_1_1),
            format_share(row.allocated),
            format_share(row.useful),
            f"{row.restarts:,}",
        ]
        for row in rows
    ]
    first = rows[0]
    bound = [BOUND, unit.show(first.jct_bound_s), "-", "-", unit.show(first.makespan_bound_s)]
    return heads, [*lines, bound + ["-"] * (len(heads) - len(bound))]


def waiting(rows: Sequence[QueueFigures]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows of the table of waiting: a column for each number of devices.

    A cell has the mean and the 99th percentile.
    """
    unit = unit_for(wait.p99_s for row in rows for wait in row.waits)
    jobs: dict[int, int] = {}
    for row in rows:
        for wait in row.waits:
            jobs[wait.devices] = max(wait.jobs, jobs.get(wait.devices, 0))
    sizes = sorted(jobs)
    heads = [f"mean / p99, {unit.name}", *(f"{plural(size, 'device')}" for size in sizes)]
    lines = []
    for row in rows:
        shown = {
            wait.devices: f"{unit.show(wait.mean_s)} / {unit.show(wait.p99_s)}"
            for wait in row.waits
        }
        lines.append([row.policy, *(shown.get(size, "-") for size in sizes)])
    return heads, [*lines, ["jobs", *(f"{jobs[size]:,}" for size in sizes)]]


def soonest(rows: Sequence[QueueFigures]) -> list[str]:
    """Return the policies under which jobs complete soonest on average, ties included."""
    best_s = min(row.jct_mean_s for row in rows)
    return [row.policy for row in rows if row.jct_mean_s <= _ALIKE * best_s]


def verdict(rows: Sequence[QueueFigures]) -> str:
    """Return which policies are best at what, in a sentence or two."""
    fastest = min(rows, key=lambda row: row.jct_mean_s)
    if len(rows) == 1:
        return (
            f"Under {fastest.policy} a job takes {fastest.jct_mean_s / 3600:.3g} h on average, of "
            f"at least {fastest.jct_bound_s / 3600:.3g} h; all are done after "
            f"{fastest.makespan_s / 3600:.3g} h."
        )
    first, shortest = soonest(rows), min(row.makespan_s for row in rows)
    sentence = (
        f"Jobs complete soonest under {_listed(first)}: {fastest.jct_mean_s / 3600:.3g} h on "
        f"average{', within 1 %' if len(first) > 1 else ''}, of at least "
        f"{fastest.jct_bound_s / 3600:.3g} h."
    )
    done = [row.policy for row in rows if row.makespan_s <= _ALIKE * shortest]
    if not set(done) & set(first):
        sentence += f" All work is done soonest under {_listed(done)}."
    return sentence


def _listed(names: Sequence[str]) -> str:
    """Return names as a clause.

    >>> _listed(["las"]), _listed(["srtf", "srsf", "muri"])
    ('las', 'srtf, srsf and muri')
    """
    *some, last = names
    return f"{', '.join(some)} and {last}" if some else last
