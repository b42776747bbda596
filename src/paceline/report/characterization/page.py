"""The page of a profile: advice, scaling, the effect of single changes, what steps take."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from paceline.report.characterization import tables
from paceline.report.characterization.charts import efficiency_chart, throughput_chart
from paceline.report.characterization.words import advice, cautions, threshold_words
from paceline.report.page.chart import render
from paceline.report.page.document import render_page, write_page
from paceline.report.page.markup import details, header, section, table
from paceline.report.units import plural

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.core.scaling_profile import ScalingProfile

_CHANGES = (
    "A row compares settings that differ in one value, on the same ranks. Throughput x is the "
    "ratio; where its interval holds 1, the repeats do not tell the two apart."
)
_USE = (
    "p95 is the step that one of twenty exceeds. Cores busy are those that the ranks' threads used "
    "together; computing is the share of a step in forward, backward and optimizer. Exchanged "
    "bytes are a rank's in each step, with the rate of the costliest collective. Data in is stored "
    "bytes that all ranks took in. Apart is the throughput on nodes of their own."
)


def write_profile_page(profile: ScalingProfile, path: Path) -> None:
    """Write the page to `path`; an older report there is replaced. Errors as `write_page`."""
    write_page(render_profile_page(profile), path)


def render_profile_page(profile: ScalingProfile) -> str:
    """Return the page."""
    first, *others = advice(profile)
    body = [
        header(
            f"{profile.program} on {profile.machine}", cautions(profile), first, _state(profile)
        ),
        "<main>",
        _advice(others),
        section(
            "Scaling",
            f"{threshold_words()} Bars are intervals: {_interval_words(profile)}",
            render(throughput_chart(profile)),
            render(efficiency_chart(profile)),
            table(*tables.scaling(profile)),
        ),
        _changes(profile),
        section("What steps take", _USE, table(*tables.use(profile))),
        _missing(profile),
        "</main>",
    ]
    footer = (
        "All figures are predicted."
        if profile.source == "predicted"
        else "All figures are measured; the folders of the runs lie beside this page."
    )
    return render_page(f"{profile.program} on {profile.machine}", "\n".join(body), footer)


def _state(profile: ScalingProfile) -> str:
    if profile.source == "predicted":
        return f"{plural(len(profile.curves), 'curve')}, {profile.device}."
    epochs = f" of {plural(profile.epochs, 'epoch')}" if profile.epochs else ""
    minutes = profile.elapsed_s / 60
    return (
        f"{plural(len(profile.curves), 'curve')}, up to {plural(profile.repeats, 'run')} of each "
        f"cell{epochs}, {minutes:.1f} min in all; a rank computes on {profile.device}."
    )


def _interval_words(profile: ScalingProfile) -> str:
    if profile.source == "predicted":
        return "9 of 10 measurements are expected within."
    return (
        "95 % of the mean over repeats; two sweeps differ by up to the root of their squared sum."
    )


def _advice(sentences: list[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li><p>{escape(sentence)}</p></li>" for sentence in sentences)
    return f'<section class="advice"><h2>What to choose</h2><ol>{items}</ol></section>'


def _changes(profile: ScalingProfile) -> str:
    heads, rows = tables.changes(profile)
    return section("One change at a time", _CHANGES, table(heads, rows, names=3)) if rows else ""


def _missing(profile: ScalingProfile) -> str:
    parts = []
    if profile.failed:
        rows = [[cell.name, f"{cell.ranks:,}", cell.why] for cell in profile.failed]
        parts.append(table(["settings", "ranks", "why"], rows))
    if profile.left_out:
        items = "".join(f"<li>{escape(words)}</li>" for words in profile.left_out)
        parts.append(details("Left out by the time budget", f"<ul>{items}</ul>"))
    return section("What is missing", "", *parts) if parts else ""
