"""The table of strategies, as rows of text that terminal and page share."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from paceline.report.units import format_share, significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.report.federation.model import FederationReport, FederationRun


def seconds_to_target(runs: Sequence[FederationRun]) -> float | None:
    """Return the median simulated seconds to the target over the seeds.

    None where fewer than half of the seeds reached it: the median is unknown then.
    """
    reached = sorted(run.to_target_s for run in runs if run.to_target_s is not None)
    if 2 * len(reached) <= len(runs):
        return None
    return statistics.median([*reached, *[float("inf")] * (len(runs) - len(reached))])


def comparison(report: FederationReport) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows: medians over the seeds of each strategy."""
    target = format_share(report.target)
    heads = ["strategy", f"s to {target}", f"reached {target}", "accuracy", "worst class"]
    heads += ["fairness", "never used", "never online", "wasted", "GB sent"]
    rows = []
    for name, runs in report.by_strategy.items():

        def median(field: str, runs: Sequence[FederationRun] = runs) -> float:
            return float(statistics.median(getattr(run, field) for run in runs))

        seconds = seconds_to_target(runs)
        reached = sum(run.to_target_s is not None for run in runs)
        rows.append(
            [
                name,
                "-" if seconds is None else significant(seconds, 4),
                f"{reached} of {len(runs)}",
                *(format_share(median(field)) for field in ("final", "worst_class")),
                f"{median('fairness'):.2f}",
                *(format_share(median(field)) for field in ("never_used", "never_online", "waste")),
                significant(median("sent_bytes") / 1e9),
            ]
        )
    return heads, rows


def verdict(report: FederationReport) -> str:
    """Return which strategy is best at what, in a sentence or two."""
    target = format_share(report.target)
    times = {name: seconds_to_target(runs) for name, runs in report.by_strategy.items()}
    reached = {name: seconds for name, seconds in times.items() if seconds is not None}
    if not reached:
        return f"No strategy reached {target} within {significant(report.budget_s)} s."
    fastest = min(reached, key=lambda name: reached[name])
    sentence = f"{target} is reached soonest by {fastest}: after {reached[fastest]:,.0f} s."
    others = [name for name in reached if name != fastest]
    if others:
        second = min(others, key=lambda name: reached[name])
        ratio = reached[second] / reached[fastest]
        sentence += f" Next is {second}, which takes {ratio:.2f} times as long."
    return sentence
