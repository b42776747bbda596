"""Advice from a profile, in sentences: how many ranks pay, and which settings."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from paceline.core.scaling_profile import EFFICIENT
from paceline.report.characterization.effects import effects, half_width
from paceline.report.units import format_seconds, format_share, plural, significant
from paceline.report.words import DOING

if TYPE_CHECKING:
    from paceline.core.scaling_profile import (
        RankPoint,
        RepeatedFigure,
        ScalingCurve,
        ScalingProfile,
    )
    from paceline.report.characterization.effects import SettingEffect

_QUIET_CORES = 0.1  # of other processes, from which a sweep counts as disturbed
_GROWN = 0.02  # of a step, from which the growth of a phase is worth a word
NOTED = 0.05  # change of the throughput that is worth a word
_SCORE_CHANGE = 0.005


def advice(profile: ScalingProfile) -> list[str]:
    """Return what follows from a profile, the number of ranks first."""
    sentences = [scaling_words(profile.curves[0])]
    first = profile.curves[0].efficient_ranks
    others = [curve for curve in profile.curves[1:] if _differs(curve, first)]
    sentences += [f"{curve.name}: {scaling_words(curve)}" for curve in others]
    changes = effects(profile)
    clear = [change for change in changes if _is_noted(change) or _score_words(change)]
    sentences += [effect_words(change) for change in sorted(clear, key=lambda e: -e.ratio)]
    same = [change for change in changes if change.is_known and change not in clear]
    if same:
        names = ", ".join(f"{_axis(change.axis)} {change.value}" for change in same)
        sentences.append(f"No clear difference in throughput: {names}.")
    spread = spread_words(profile)
    return [*sentences, spread] if spread else sentences


def cautions(profile: ScalingProfile) -> list[str]:
    """Return what must be known before the figures."""
    found = []
    if profile.source == "predicted":
        found.append("Nothing was run: all figures are predicted from the machine's description.")
    elif all(point.throughput.repeats < 2 for curve in profile.curves for point in curve.points):
        found.append("No cell was run twice: small differences may be chance.")
    if profile.failed:
        names = ", ".join(f"{cell.name} on {plural(cell.ranks, 'rank')}" for cell in profile.failed)
        found.append(f"Did not run to the end: {names}.")
    if profile.left_out:
        found.append(
            f"The time budget left out {plural(len(profile.left_out), 'cell')}, in whole or in "
            "part; repeat the command to go on."
        )
    if profile.foreign_cores is not None and profile.foreign_cores > _QUIET_CORES:
        found.append(
            f"Other processes used {profile.foreign_cores:.1f} cores meanwhile, on average."
        )
    return found


def scaling_words(curve: ScalingCurve) -> str:
    """Return how many ranks pay, and what the others wait for."""
    most = curve.efficient_ranks
    fewest = curve.points[0]
    beyond = next((point for point in curve.points if point.ranks > most), None)
    if len(curve.points) == 1:
        return f"All runs had {plural(fewest.ranks, 'rank')}: nothing is known of scaling."
    if beyond is None:
        last = curve.points[-1]
        return (
            f"Up to {plural(last.ranks, 'rank')} per job none is wasted: on {last.ranks} a rank "
            f"does {format_share(last.efficiency)}{_efficiency_interval(last, fewest)} of what it "
            f"does on {fewest.ranks}."
        )
    return (
        f"More than {plural(most, 'rank')} per job {'waste' if most > 1 else 'wastes'} "
        f"{format_share(beyond.wasted)} here: on {beyond.ranks} a rank does "
        f"{format_share(beyond.efficiency)}{_efficiency_interval(beyond, fewest)} of what it does "
        f"on {fewest.ranks}{_why(fewest, beyond)}."
    )


def _efficiency_interval(point: RankPoint, fewest: RankPoint) -> str:
    width = math.hypot(half_width(point.throughput), half_width(fewest.throughput))
    if not width:
        return ""
    low, high = (point.efficiency * math.exp(sign * width) for sign in (-1, 1))
    return f" ({format_share(low)} to {format_share(high)})"


def _why(fewest: RankPoint, point: RankPoint) -> str:
    """Return which phases of a step grew, the largest growth first."""
    step_s = sum(fewest.phases.values())
    grown = {name: seconds - fewest.phases.get(name, 0.0) for name, seconds in point.phases.items()}
    named = sorted(
        (name for name, more in grown.items() if more > _GROWN * step_s),
        key=lambda name: -grown[name],
    )[:2]
    if not named:
        return ""
    parts = [f"{DOING.get(name, name)} takes {format_seconds(grown[name])} more" for name in named]
    return f", as in each step {' and '.join(parts)}"


def effect_words(change: SettingEffect) -> str:
    """Return what a change does, in a sentence."""
    what = f"{_axis(change.axis).capitalize()} {change.value} in place of {change.baseline}: "
    if not _is_noted(change):
        return f"{what}no clear difference in throughput{_score_words(change)}."
    known = f" ({significant(change.low)} to {significant(change.high)})"
    interval = known if change.is_known else ""
    return (
        f"{what}{significant(change.ratio)} times the throughput on {plural(change.ranks, 'rank')}"
        f"{interval}{_score_words(change)}."
    )


def _score_words(change: SettingEffect) -> str:
    parts = [
        f"{name} {significant(figure.value)} against {significant(change.base.scores[name].value)}"
        for name, figure in change.point.scores.items()
        if name in change.base.scores and _is_other(figure, change.base.scores[name])
    ]
    return f"; at equal epochs {', '.join(parts)}" if parts else ""


def _is_other(first: RepeatedFigure, second: RepeatedFigure) -> bool:
    """Return whether two scores differ, by more than their repeats do."""
    widths = [
        (figure.high - figure.low) / 2
        for figure in (first, second)
        if figure.low is not None and figure.high is not None
    ]
    return abs(first.value - second.value) > max(_SCORE_CHANGE, math.hypot(*widths))


def spread_words(profile: ScalingProfile) -> str:
    """Return what the distance of devices costs on the baseline; empty if that is not known."""
    known = [point for point in profile.curves[0].points if point.spread is not None]
    if not known:
        return ""
    point = max(known, key=lambda point: abs((point.spread or 1.0) - 1))
    spread = point.spread or 1.0
    if abs(spread - 1) < NOTED:
        return "Where the devices of a job lie makes no difference of 5 % or more."
    return (
        f"On nodes of their own {plural(point.ranks, 'device')} do {format_share(spread)} of what "
        "they do close together."
    )


def _differs(curve: ScalingCurve, efficient_ranks: int) -> bool:
    return len(curve.points) > 1 and curve.efficient_ranks != efficient_ranks


def _is_noted(change: SettingEffect) -> bool:
    is_clear = change.is_clear or (not change.is_known and change.ratio != 1)
    return is_clear and abs(change.ratio - 1) >= NOTED


def _axis(name: str) -> str:
    return name.replace("_", " ")


def threshold_words() -> str:
    """Return when ranks count as wasted."""
    return (
        f"Ranks count as wasted where one does less than {format_share(EFFICIENT)} of what it does "
        "on the fewest ranks."
    )
