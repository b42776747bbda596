"""Periodic delays: every k-th step is late, as when one rank alone writes checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from paceline.trace.analysis.p_values import divergence
from paceline.trace.analysis.shapes import MIN_CYCLES, Pattern, PatternRules

_ALL_PERIODS = 64  # periods up to here are all tried, longer ones if the series repeats after them
_LONG_PERIODS = 12


def periodic(series: np.ndarray, rules: PatternRules) -> Pattern | None:
    """Return the period whose steps are late while the steps between them are not.

    The steps are taken modulo each period (phase folding). If n of N steps belong to a place in the
    period, and L of all N steps are late, then noise makes a share s of these n steps late with a
    probability of at most exp(-n KL(s, L/N)): W. Hoeffding, Probability inequalities for sums of
    bounded random variables (1963), section 6: it holds for draws without replacement.
    """
    best: tuple[float, int, int] | None = None
    tried = 0
    positive = series[series > rules.late_threshold_s]
    if len(positive) < MIN_CYCLES:
        return None
    for level_s in {rules.late_threshold_s, float(np.quantile(positive, 0.9)) / 2}:
        is_late = series > max(level_s, rules.late_threshold_s)
        for period in _periods(series, rules.late_threshold_s):
            tried += period
            place, log_p_value = _best_place(is_late, period)
            if best is None or log_p_value < best[0] - 1e-9:
                best = (log_p_value, period, place)
    if best is None:
        return None
    log_p_value, period, place = best
    pattern = _comb(series, period, place, rules)
    if pattern is None:
        return None
    p_value = math.exp(min(0.0, log_p_value + math.log(tried * rules.series)))
    return replace(pattern, p_value=p_value)


def _periods(series: np.ndarray, late_threshold_s: float) -> list[int]:
    """Return the periods to try: all short ones, and those after which the series repeats most.

    Source: autocorrelation by Fourier transform, A. Khinchin (1934).
    """
    longest = (len(series) - 1) // MIN_CYCLES
    short = list(range(2, min(longest, _ALL_PERIODS) + 1))
    if longest <= _ALL_PERIODS:
        return short
    late = np.where(series > late_threshold_s, series, 0.0)
    spectrum = np.fft.rfft(late - late.mean(), 2 * len(late))
    repeats = np.fft.irfft(np.abs(spectrum) ** 2)[: longest + 1]
    repeats[: _ALL_PERIODS + 1] = -np.inf
    longer: list[int] = np.argsort(-repeats)[:_LONG_PERIODS].tolist()
    return short + [period for period in longer if period > _ALL_PERIODS]


def _best_place(is_late: np.ndarray, period: int) -> tuple[int, float]:
    """Return the place in the period that is late most clearly, and its p-value's logarithm."""
    steps = np.arange(len(is_late)) % period
    counts = np.bincount(steps, minlength=period)
    hits = np.bincount(steps, weights=is_late, minlength=period)
    rate = min(0.999, (is_late.sum() + 1) / (len(is_late) + 2))
    logs = -counts * divergence(hits / counts, float(rate))
    place = int(np.argmin(logs))
    return place, float(logs[place])


def _comb(series: np.ndarray, period: int, place: int, rules: PatternRules) -> Pattern | None:
    """Return every `period`-th step from `place` on as a pattern, if these are the late steps."""
    teeth = np.arange(place, len(series), period)
    level = float(np.median(series[teeth]))
    is_late = series[teeth] > max(rules.late_threshold_s, level / 3)
    if is_late.sum() < MIN_CYCLES:
        return None
    ends = np.flatnonzero(is_late)[[0, -1]]
    teeth = teeth[ends[0] : ends[1] + 1]
    late = np.zeros(len(series), dtype=bool)
    late[teeth] = True
    between = series[teeth[0] : teeth[-1] + 1][~late[teeth[0] : teeth[-1] + 1]]
    usual = float(np.median(between))
    level = float(np.median(series[teeth]))
    if (
        float(np.mean(is_late[ends[0] : ends[1] + 1])) < rules.min_late_steps
        or level - usual < rules.late_threshold_s
        or usual > level / 2
    ):
        return None
    return Pattern(
        shape="periodic",
        first=int(teeth[0]),
        last=int(teeth[-1]),
        late=late,
        fitted_s=np.where(late, level, 0.0),
        parameters=3,
        p_value=1.0,
        period=period,
    )
