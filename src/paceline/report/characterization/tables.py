"""The tables of a profile, as rows of text that terminal and page share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.characterization.effects import effects
from paceline.report.units import (
    format_bytes,
    format_rate,
    format_seconds,
    format_share,
    significant,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.scaling_profile import (
        RankPoint,
        RepeatedFigure,
        ScalingCurve,
        ScalingProfile,
    )

TableRows = tuple[list[str], list[list[str]]]


def scaling(profile: ScalingProfile) -> TableRows:
    """Return heads and rows of throughput and efficiency by curve and ranks."""
    scores = _score_names(profile)
    heads = [
        *("settings", "ranks", f"{profile.unit}/s", "interval", "varies", "efficiency", "step"),
        *("limited by", *scores),
    ]
    rows = [
        [
            curve.name,
            f"{point.ranks:,}",
            significant(point.throughput.value),
            interval(point.throughput),
            _share(point.throughput.variation),
            format_share(point.efficiency),
            format_seconds(point.step_s),
            point.limit,
            *(_score(point, name) for name in scores),
        ]
        for curve, point in _points(profile)
    ]
    return heads, rows


def use(profile: ScalingProfile) -> TableRows:
    """Return heads and rows of what a step takes of the machine: cores, memory, transfers."""
    heads = [
        *("settings", "ranks", "step, p95", "cores busy", "computing", "peak memory"),
        *("exchanged/step", "at", "data in", "apart"),
    ]
    rows = [
        [
            curve.name,
            f"{point.ranks:,}",
            format_seconds(point.step_s_p95) if point.step_s_p95 else "",
            f"{point.busy_cores:.2f}" if point.busy_cores else "",
            _computing(point),
            format_bytes(point.peak_memory_bytes) if point.peak_memory_bytes else "",
            format_bytes(point.reduced_bytes) if point.reduced_bytes else "",
            format_rate(point.reduced_bytes_per_s) if point.reduced_bytes_per_s else "",
            format_rate(point.input_bytes_per_s) if point.input_bytes_per_s else "",
            _share(point.spread),
        ]
        for curve, point in _points(profile)
    ]
    return heads, rows


def changes(profile: ScalingProfile) -> TableRows:
    """Return heads and rows of the effect of each single change; none without a change."""
    scores = _score_names(profile)
    heads = ["change", "from", "to", "ranks", "throughput x", "interval", *scores]
    rows = [
        [
            change.axis.replace("_", " "),
            change.baseline,
            change.value,
            f"{change.ranks:,}",
            significant(change.ratio),
            f"{significant(change.low)} to {significant(change.high)}" if change.is_known else "",
            *(
                f"{_score(change.base, name)} -> {_score(change.point, name)}"
                if name in change.point.scores and name in change.base.scores
                else ""
                for name in scores
            ),
        ]
        for change in effects(profile)
    ]
    return heads, rows


def interval(figure: RepeatedFigure) -> str:
    """Return the interval of a figure; empty without one."""
    if figure.low is None or figure.high is None:
        return ""
    return f"{significant(figure.low)} to {significant(figure.high)}"


def _points(profile: ScalingProfile) -> Iterator[tuple[ScalingCurve, RankPoint]]:
    for curve in profile.curves:
        for point in curve.points:
            yield curve, point


def _score_names(profile: ScalingProfile) -> list[str]:
    return list(dict.fromkeys(name for _, point in _points(profile) for name in point.scores))


def _score(point: RankPoint, name: str) -> str:
    figure = point.scores.get(name)
    return significant(figure.value) if figure else ""


def _share(share: float | None) -> str:
    return "" if share is None else format_share(share)


def _computing(point: RankPoint) -> str:
    """Return the share of a step in which a rank computes."""
    total = sum(point.phases.values())
    phases = ("forward", "backward", "optimizer")
    computing = sum(point.phases.get(name, 0.0) for name in phases)
    return format_share(computing / total) if total else ""
