"""What remedies against imbalance would bring, and what they brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.page.markup import details, markup, section, table
from paceline.report.remedies import (
    assumption_words,
    outcome_sentence,
    remedy_rows,
    remedy_sentence,
)

if TYPE_CHECKING:
    from paceline.report.model import Report


def remedies(report: Report) -> str:
    """Return gains of remedies by number of ranks, forecast from this run."""
    found, came = report.remedies
    parts = []
    if came is not None:
        parts.append(f"<p><strong>{markup(outcome_sentence(came))}</strong></p>")
    if found is not None:
        heads, rows = remedy_rows(found)
        items = "".join(f"<li>{markup(words)}</li>" for words in assumption_words(found))
        parts += [table(heads, rows), details("What this rests on", f"<ul>{items}</ul>")]
    if not parts:
        return ""
    note = (
        ""
        if found is None
        else (
            f"{remedy_sentence(found)} Forecast from this run's steps: share of a step that each "
            "remedy would save, with its 95 % band."
        )
    )
    return section("What remedies against imbalance would bring", note, *parts)
