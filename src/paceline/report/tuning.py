"""Says what a run that tried two values of a setting found."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_share, plural, significant

if TYPE_CHECKING:
    from paceline.runs.tuning import TuneResult


def tune_words(found: TuneResult | None) -> str:
    """Return a sentence on what was found; empty if no setting was tried."""
    if found is None:
        return ""
    name, pairs = found.setting, plural(len(found.pairs), "pair")
    if found.verdict == "stopped":
        return f"Trying {name} {found.first} against {found.second} stopped: {found.reason}."
    if found.change is None or found.low is None or found.high is None or found.p_value is None:
        return f"Trying {name} {found.first} against {found.second} has no result yet."
    interval = f"{100 * found.low:+.1f} to {100 * found.high:+.1f} %"
    figures = f"{pairs} of blocks of steps, p = {significant(found.p_value, 2)}"
    if found.verdict in ("first", "second"):
        better, other = found.first, found.second
        if found.verdict == "second":
            better, other = other, better
        by = format_share(abs(found.change))
        how = "shorter" if found.verdict == "second" else "longer"
        return (
            f"{name} {better} is better than {other}, and was kept from step {found.step} on: "
            f"steps with {found.second} are {by} {how} than with {found.first} ({interval}; "
            f"{figures})."
        )
    ended = "" if found.verdict == "equal" else " when the run ended"
    return (
        f"No difference between {name} {found.first} and {found.second} that is worth a change was "
        f"found{ended}: steps with {found.second} change by {interval} ({figures}); {found.first} "
        "was kept."
    )
