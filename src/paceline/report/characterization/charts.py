"""Throughput and efficiency over ranks, a line for each combination of settings.

A vertical bar is the interval of a point; the dashed grey line is perfect scaling of the baseline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.scaling_profile import EFFICIENT
from paceline.report.page import svg
from paceline.report.page.chart import (
    FIELD,
    Chart,
    line_sample,
    numbered_line,
    vertical_scale,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.scaling_profile import RankPoint, ScalingProfile
    from paceline.report.page.svg import Point

_HEIGHT_PX = 260.0
_MARGIN = 1.08  # of the scales, beyond the largest value
_TICK = 5.0  # half the width of the end of an interval's bar, of `FIELD`


def throughput_chart(profile: ScalingProfile) -> Chart:
    """Return throughput by ranks, with intervals."""
    points = [point for curve in profile.curves for point in curve.points]
    first = profile.curves[0].points
    most = max(point.ranks for point in points)
    unit = first[0].throughput.value / first[0].ranks
    top = _MARGIN * max(
        unit * first[-1].ranks, *(point.throughput.high or point.throughput.value
                                  for point in points)
    )  # fmt: skip
    marks, labels = vertical_scale(top, 5, _HEIGHT_PX, f"{profile.unit} per second", ",.6g")
    x, y = _horizontal(most), _vertical(top)
    for i, curve in enumerate(profile.curves):
        marks.append(_line([(point.ranks, point.throughput.value) for point in curve.points], x, y,
                           numbered_line(i)))  # fmt: skip
        for point in curve.points:
            marks += _bar(point, x, y, numbered_line(i))
    ideal = [(first[0].ranks, first[0].throughput.value), (first[-1].ranks, unit * first[-1].ranks)]
    marks.append(_line(ideal, x, y, "line bound"))
    return Chart(
        name="throughput",
        title="Throughput by ranks",
        description="Throughput of all ranks together, for each combination of settings.",
        unit="ranks",
        end=most * _MARGIN,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=[*_legend(profile), (line_sample("line bound"), "perfect scaling of the first")],
    )


def efficiency_chart(profile: ScalingProfile) -> Chart:
    """Return efficiency by ranks, and where a rank counts as wasted."""
    points = [point for curve in profile.curves for point in curve.points]
    most = max(point.ranks for point in points)
    top = 100 * _MARGIN * max(1.0, *(point.efficiency for point in points))
    marks, labels = vertical_scale(top, 5, _HEIGHT_PX, "efficiency, %", ".0f")
    x, y = _horizontal(most), _vertical(top)
    marks.append(svg.line(0, y(100 * EFFICIENT), FIELD, y(100 * EFFICIENT), "line bound"))
    for i, curve in enumerate(profile.curves):
        places = [(point.ranks, 100 * point.efficiency) for point in curve.points]
        marks.append(_line(places, x, y, numbered_line(i)))
    wasted = (line_sample("line bound"), "below: ranks are wasted")
    return Chart(
        name="efficiency",
        title="Efficiency by ranks",
        description="Throughput of a rank over that on the fewest ranks, for each combination.",
        unit="ranks",
        end=most * _MARGIN,
        height_px=_HEIGHT_PX,
        marks=marks,
        labels=labels,
        legend=[*_legend(profile), wasted],
    )


def _horizontal(most: int) -> Callable[[float], float]:
    return lambda ranks: FIELD * ranks / (most * _MARGIN)


def _vertical(top: float) -> Callable[[float], float]:
    return lambda value: _HEIGHT_PX * (1 - value / top)


def _line(
    places: list[tuple[int, float]],
    x: Callable[[float], float],
    y: Callable[[float], float],
    style: str,
) -> str:
    line: list[Point] = [(x(ranks), y(value)) for ranks, value in places]
    return svg.polyline(line, style)


def _bar(
    point: RankPoint, x: Callable[[float], float], y: Callable[[float], float], style: str
) -> list[str]:
    low, high = point.throughput.low, point.throughput.high
    at = x(point.ranks)
    if low is None or high is None:
        value = y(point.throughput.value)
        return [svg.line(at - _TICK, value, at + _TICK, value, style)]
    return [
        svg.line(at, y(low), at, y(high), style),
        *(svg.line(at - _TICK, y(end), at + _TICK, y(end), style) for end in (low, high)),
    ]


def _legend(profile: ScalingProfile) -> list[tuple[str, str]]:
    return [(line_sample(numbered_line(i)), curve.name) for i, curve in enumerate(profile.curves)]
