"""The top of the page: what the run came to, what would help, and its key figures."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from paceline.report.page.markup import Html, figures, header
from paceline.report.units import format_bytes, format_seconds, format_share, plural
from paceline.runs.folder import RunState

if TYPE_CHECKING:
    from paceline.report.model import Report


def head(report: Report) -> str:
    """Return what must be known before the verdict, the verdict, and how the run ended."""
    script = str(report.config.get("script", report.run))
    return header(script, report.cautions, report.verdict, Html(_state(report)))


def _state(report: Report) -> str:
    ranks = plural(report.world_size, "rank")
    if report.result is None:
        if _recorded_itself(report):
            return f"recorded by the script itself on {ranks}."
        return f'<span class="bad">not finished</span>: no result.json. {ranks}.'
    code = report.result.exit_code
    if code == 0:
        return f'<span class="good">finished</span> on {ranks}, exit code 0.'
    if report.state is RunState.STOPPED:
        return f'<span class="bad">stopped</span> on {ranks}, exit code {code}.'
    return f'<span class="bad">failed</span> on {ranks}, exit code {code}.'


def _recorded_itself(report: Report) -> bool:
    """Return whether the run had no launcher to write a result, and its traces are closed."""
    has_launcher = isinstance(report.config.get("launcher"), dict)
    is_closed = all(rank.complete for rank in report.trace.ranks)
    return report.state is RunState.UNKNOWN and not has_launcher and is_closed


def advice(report: Report) -> str:
    """Return what would make the run faster, the largest saving first, each with its figures."""
    if not report.advice:
        return ""
    items = "".join(
        f"<li><p><strong>{escape(advice.action)}</strong></p>"
        f'<p class="note">{escape(advice.saving)} {escape(advice.evidence)}</p></li>'
        for advice in report.advice
    )
    return f'<section class="advice"><h2>What would help</h2><ol>{items}</ol></section>'


def key_figures(report: Report) -> str:
    """Return the run in a handful of numbers."""
    total = report.total
    wall_s = total.total_s
    low, high = _step_range_s(report)
    spread = f"median; {format_seconds(low, 2)} to {format_seconds(high, 2)} in 9 of 10 steps"
    items = [
        ("Step time", format_seconds(report.step_time_s), spread if report.steps else "no step"),
        ("Ranks", f"{report.world_size:,}", _missing_words(report)),
        ("Steps", f"{report.steps:,}", f"in {format_seconds(wall_s)} of training loop"),
    ]
    if report.world_size > 1:
        waiting, transfer = total.waiting / max(wall_s, 1e-12), total.transfer / max(wall_s, 1e-12)
        items.append(("Waiting", format_share(waiting), "of the loop, for ranks that come later"))
        items.append(
            ("Communication", format_share(transfer), "of the loop, not hidden by compute")
        )
    if total.evaluation:
        share = format_share(total.evaluation / max(wall_s, 1e-12))
        items.append(("Evaluation", share, "of the loop"))
    memory = format_bytes(report.peak_memory_bytes)
    items.append(("Peak memory", memory, "resident, the largest rank"))
    error = report.comparison.step_time_error
    if report.comparison.predicted_step_s is not None:
        predicted = format_seconds(report.comparison.predicted_step_s)
        items.append(("Prediction error", format_share(error), f"{predicted} predicted"))
    return figures(items)


def _step_range_s(report: Report) -> tuple[float, float]:
    if not report.steps:
        return 0.0, 0.0
    slowest = np.max([rank.train_s[: report.steps] for rank in report.rank_phases], axis=0)
    low, high = np.percentile(slowest, [5, 95])
    return float(low), float(high)


def _missing_words(report: Report) -> str:
    missing = report.missing_ranks
    return f"{plural(len(missing), 'rank')} left no trace" if missing else "all left a trace"
