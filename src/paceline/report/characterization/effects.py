"""What one change of a setting does to throughput and scores, by a profile's curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.core.scaling_profile import (
        RankPoint,
        RepeatedFigure,
        ScalingCurve,
        ScalingProfile,
    )


class SettingEffect(NamedTuple):
    """A curve beside its baseline, on the most ranks that both have.

    Attributes:
        axis: that is changed.
        value: that it has.
        baseline: that it has otherwise.
        ranks: of both.
        ratio: throughput over that of the baseline.
        low: lower end of the ratio's interval; equal to `high` without repeats.
        high: upper end.
        point: of the curve.
        base: of the baseline.
    """

    axis: str
    value: str
    baseline: str
    ranks: int
    ratio: float
    low: float
    high: float
    point: RankPoint
    base: RankPoint

    @property
    def is_known(self) -> bool:
        """Whether there are repeats to tell a difference from chance."""
        return self.high > self.low

    @property
    def is_clear(self) -> bool:
        """Whether the interval excludes that nothing changes."""
        return self.is_known and not self.low <= 1 <= self.high


def effects(profile: ScalingProfile) -> list[SettingEffect]:
    """Return the effect of each change of one axis, in the order of the axes.

    Where a sweep has several models, each is compared with its own baseline.
    """
    return list(_effects(profile))


def _effects(profile: ScalingProfile) -> Iterator[SettingEffect]:
    first = {axis: values[0] for axis, values in profile.axes.items()}
    for axis in profile.axes:
        for curve in profile.curves:
            base = _baseline(profile, curve, axis, first)
            if base is None:
                continue
            common = [point.ranks for point in curve.points if base.point(point.ranks)]
            if common:
                yield _effect(axis, curve, base, max(common))


def _baseline(
    profile: ScalingProfile, curve: ScalingCurve, axis: str, first: Mapping[str, str]
) -> ScalingCurve | None:
    """Return the curve that differs in `axis` alone, if all else is the baseline's."""
    changed = [name for name, value in curve.settings.items() if value != first.get(name)]
    own = [name for name in changed if name != "model"]
    if (axis == "model" and changed != ["model"]) or (axis != "model" and own != [axis]):
        return None
    wanted = {**curve.settings, axis: first[axis]}
    return next((other for other in profile.curves if other.settings == wanted), None)


def _effect(axis: str, curve: ScalingCurve, base: ScalingCurve, ranks: int) -> SettingEffect:
    point, other = curve.point(ranks), base.point(ranks)
    assert point is not None
    assert other is not None
    ratio = point.throughput.value / other.throughput.value
    width = math.hypot(half_width(point.throughput), half_width(other.throughput))
    return SettingEffect(
        axis=axis,
        value=curve.settings[axis],
        baseline=base.settings[axis],
        ranks=ranks,
        ratio=ratio,
        low=ratio * math.exp(-width),
        high=ratio * math.exp(width),
        point=point,
        base=other,
    )


def half_width(figure: RepeatedFigure) -> float:
    """Return half the interval's width on the logarithmic scale; 0 where repeats do not give it.

    Intervals of predictions rest on the same figures of a machine, which cancel in a ratio.
    """
    if not figure.repeats or not figure.low or not figure.high:
        return 0.0
    return math.log(figure.high / figure.low) / 2
