"""A scaling study as a drawing of its own file, for a proposal: throughput above, efficiency below.

Both axes of the throughput are logarithmic, so that perfect scaling is a straight line. The band is
the 90 % interval of the prediction.
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

from paceline.report.page import svg
from paceline.report.scaling import knee_in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.perf.planner.scaling import ScalingPoint, ScalingStudy
    from paceline.report.page.svg import Point

_WIDTH, _HEIGHT = 720.0, 560.0
_LEFT, _RIGHT = 86.0, 700.0
_RATE = (44.0, 330.0)  # upper and lower end of the panel of throughput
_SHARE = (368.0, 504.0)  # of the panel of efficiency
_STYLE = """
text{font:13px system-ui,sans-serif;fill:#1d2733}
.small{font-size:12px;fill:#55606e}.name{font-size:15px;font-weight:600}
.grid{stroke:#d9dee5;stroke-width:1}.rule{stroke:#55606e;stroke-width:1}
.band{fill:#1f6feb;opacity:.16}.line{fill:none;stroke:#1f6feb;stroke-width:2.2}
.ideal{fill:none;stroke:#55606e;stroke-width:1.4;stroke-dasharray:5 4}
.knee{stroke:#b4540a;stroke-width:1.4;stroke-dasharray:3 3}.knee-name{fill:#b4540a}
.dot{fill:#1f6feb}
"""


def scaling_svg(study: ScalingStudy) -> str:
    """Return the drawing as a whole SVG file."""
    points = study.points
    x = _logarithmic(points[0].nodes, points[-1].nodes, _LEFT, _RIGHT)
    parts = [
        svg.text(_LEFT, 24, f"{study.workload} on {study.machine}, "
                 f"{study.batch:,} samples per step", "name"),
        *_throughput(study, x),
        *_efficiency(study, x),
        *_nodes_axis(points, x),
        *_knee(study, x),
    ]  # fmt: skip
    title = escape(f"Predicted scaling of {study.workload} on {study.machine}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" '
        f'width="{_WIDTH:g}" height="{_HEIGHT:g}" role="img"><title>{title}</title>'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _throughput(study: ScalingStudy, x: Callable[[float], float]) -> list[str]:
    points = study.points
    factor = [point.samples_per_s * point.step_s for point in points]
    low = [rate / point.high_s for rate, point in zip(factor, points, strict=True)]
    high = [rate / point.low_s for rate, point in zip(factor, points, strict=True)]
    first = points[0]
    ideal = [first.samples_per_s * point.nodes / first.nodes for point in points]
    bottom, top = min(low), max(*high, *ideal)
    y = _logarithmic(bottom * 0.9, top * 1.1, _RATE[1], _RATE[0])
    parts = []
    for value in _round_numbers(bottom * 0.9, top * 1.1):
        parts += [svg.line(_LEFT, y(value), _RIGHT, y(value), "grid"),
                  svg.text(_LEFT - 8, y(value) + 4, f"{value:,.6g}", "small", "end")]  # fmt: skip
    band = [(x(p.nodes), y(v)) for p, v in zip(points, high, strict=True)]
    band += [(x(p.nodes), y(v)) for p, v in zip(points[::-1], low[::-1], strict=True)]
    line: list[Point] = [(x(point.nodes), y(point.samples_per_s)) for point in points]
    straight: list[Point] = [(x(p.nodes), y(v)) for p, v in zip(points, ideal, strict=True)]
    parts += [
        svg.polygon(band, "band"),
        svg.polyline(straight, "ideal"),
        svg.polyline(line, "line"),
        *(_dot(place) for place in line),
        svg.turned_text(22, sum(_RATE) / 2, "samples per second", "small"),
        svg.text(_RIGHT, _RATE[1] - 10, "dashed: perfect scaling; band: 90 %", "small", "end"),
    ]
    return parts


def _efficiency(study: ScalingStudy, x: Callable[[float], float]) -> list[str]:
    top = max(1.0, *(point.efficiency for point in study.points))

    def y(share: float) -> float:
        return _SHARE[1] - (_SHARE[1] - _SHARE[0]) * share / top

    parts = []
    for share in svg.ticks(top, 4):
        parts += [svg.line(_LEFT, y(share), _RIGHT, y(share), "grid"),
                  svg.text(_LEFT - 8, y(share) + 4, f"{share:.0%}", "small", "end")]  # fmt: skip
    line: list[Point] = [(x(point.nodes), y(point.efficiency)) for point in study.points]
    parts += [
        svg.polyline(line, "line"),
        *(_dot(place) for place in line),
        svg.turned_text(22, sum(_SHARE) / 2, "efficiency", "small"),
    ]
    return parts


def _nodes_axis(points: tuple[ScalingPoint, ...], x: Callable[[float], float]) -> list[str]:
    parts = [svg.line(_LEFT, _SHARE[1], _RIGHT, _SHARE[1], "rule")]
    parts += [
        svg.text(x(point.nodes), _SHARE[1] + 18, f"{point.nodes:,}", "small", "middle")
        for point in points
    ]
    return [*parts, svg.text(_RIGHT, _SHARE[1] + 38, "nodes", "small", "end")]


def _knee(study: ScalingStudy, x: Callable[[float], float]) -> list[str]:
    at = x(study.knee)
    limit = next(point.limit for point in study.points if point.nodes == study.knee)
    anchor = "end" if at > (_LEFT + _RIGHT) / 2 else "start"
    beside = at + (-6 if anchor == "end" else 6)
    words = f"{knee_in_words(study)}, limited by {limit}"
    return [svg.line(at, _RATE[0], at, _SHARE[1], "knee"),
            svg.text(beside, _SHARE[1] - 10, words, "knee-name", anchor)]  # fmt: skip


def _dot(place: Point) -> str:
    return svg.rect(place[0] - 3, place[1] - 3, 6, 6, "dot")


def _logarithmic(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
    """Return the scale that maps low to `begin` and high to `end`."""
    span = math.log(high / low) or 1.0
    return lambda value: begin + (end - begin) * math.log(value / low) / span


def _round_numbers(low: float, high: float) -> Iterator[float]:
    """Yield 1, 2 and 5 times powers of ten within a range; powers alone over a wide one."""
    factors = (1, 2, 5) if high / low < 200 else (1,)
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for factor in factors:
            value = factor * 10.0**power
            if low <= value <= high:
                yield value
