"""What each remedy would bring at other numbers of ranks, with a band, from one measured run.

The run's nodes are copied; each copy goes through the measured steps independently of the others,
in step with them only where a longer step comes again and again (`BusyParts.period`)::

    step at N ranks = expected slowest of N / measured ranks copies of each node  +  communication
    gain of a remedy = 1 - step with it / step without it

Communication stays what it was between the measured ranks: what it costs among more of them is what
`perf.estimate` and `perf.simulator` predict. The band is what other steps and other nodes of the
same kind would have given: blocks of steps, long enough to be independent of each other, and whole
nodes are drawn again and again from the measured ones. It does not hold what was not measured: how
a second node differs if there was one alone, and steps slower than all that were seen (unless
`tail` extends them).

Source: block bootstrap: H. Künsch, The jackknife and the bootstrap for general stationary
observations (1989).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError, UsageError
from paceline.core.randomness import make_generator
from paceline.core.record import Record
from paceline.perf.imbalance.maxima import Maxima, Tail, slowest
from paceline.perf.imbalance.parts import BusyParts, correlation_steps
from paceline.perf.imbalance.remedies import (
    at_least,
    node_maxima,
    rebalanced,
    with_paced_input,
    without_core_waits,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

NO_REMEDY = "none"
BUDGET, PACING, REBALANCING, TOGETHER = "budget", "pacing", "rebalancing", "together"
REMEDIES = (BUDGET, PACING, REBALANCING, TOGETHER)
WORLD_SIZES = (6, 48, 384, 3_072, 24_576)  # of nodes of 6 ranks, to the published study's size
_LEAST_BLOCK_STEPS = 4
_LEAST_BLOCKS = 6  # in a run: longer blocks would leave too few to draw from
_BAND = (0.025, 0.975)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForecastSettings(Record):
    """What a forecast assumes.

    Attributes:
        window_steps: steps over which rebalancing measures before it changes shares.
        least_gain: share of the step that new shares must promise.
        noise_factor: standard errors of the noisiest rank's median that they must promise, too.
        least_share: of the batch, that a rank keeps; 1 is an equal share.
        most_share: that a rank gets.
        tail: whether ranks can be slower than all that were measured: ``measured``, no, so that
            gains at many ranks are cautious; ``pareto``, as the largest tenth of values suggests.
        draws: of the bootstrap.
        seed: of its random numbers.
    """

    window_steps: int = 10
    least_gain: float = 0.05
    noise_factor: float = 2.0
    least_share: float = 0.25
    most_share: float = 3.0
    tail: Tail = "measured"
    draws: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "window_steps": self.window_steps >= 2,
            "least_gain": 0 <= self.least_gain < 1,
            "noise_factor": self.noise_factor >= 0,
            "least_share": 0 <= self.least_share <= 1,
            "most_share": self.most_share >= 1,
            "draws": self.draws >= 2,
        }
        for name, holds in limits.items():
            if not holds:
                raise ConfigError(
                    f"{name} cannot be {getattr(self, name)}",
                    fix="Give 2 or more steps and draws, a gain below 1, and shares around 1",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyGain(Record):
    """A step with a remedy; intervals are 95 % bands.

    Attributes:
        remedy: one of `REMEDIES`, or ``none``.
        step_s: expected step time, seconds.
        low_s: of it.
        high_s: of it.
        p95_s: which 95 of 100 steps do not exceed.
        gain: share of the step without remedy that is saved; negative if it would be longer.
        gain_low: of it.
        gain_high: of it.
    """

    remedy: str
    step_s: float
    low_s: float
    high_s: float
    p95_s: float
    gain: float
    gain_low: float
    gain_high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldForecast(Record):
    """A step of so many ranks.

    Attributes:
        ranks: how many.
        imbalance: time of the slowest rank over the mean of all, without communication.
        waiting: share of the step that the mean rank waits for others, 0 to 1.
        gains: without remedy, and with each that can be judged.
    """

    ranks: int
    imbalance: float
    waiting: float
    gains: tuple[RemedyGain, ...]

    def gain_of(self, remedy: str) -> RemedyGain | None:
        """Return the step with a remedy; None if it could not be judged."""
        return next((gain for gain in self.gains if gain.remedy == remedy), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyForecast(Record):
    """What remedies would bring a run, at its own and at other numbers of ranks.

    Attributes:
        settings: what it assumes.
        ranks: that were measured.
        nodes: on which they ran.
        steps: that were measured, without the warm-up.
        step_s: measured, the mean.
        communication_s: of it, after the slowest rank was there.
        rank_effect: by which the slowest rank is slower than the mean one over all steps, a share
            of the mean.
        noise: standard deviation of the rest, a share of the mean.
        burst_steps: for how many steps noise lasts.
        period: after how many steps a longer step comes again; 1: none does.
        no_core: share of busy time in which the main thread was ready without a core; None if not
            known.
        replay_error: of the replay at the measured ranks over the measured step, minus 1; of one
            node 0, whose ranks stay together.
        held_out_error: of a forecast from every other block of steps over what the other blocks
            took, minus 1.
        independent_error: of a forecast that takes ranks of a node for independent, over the
            measured slowest rank, minus 1; 0 for one rank. It says how far ranks of a node are late
            together (above 0) or in turn (below 0).
        worlds: the forecasts, fewest ranks first.
        not_judged: why a remedy is not in them, by remedy.
        cautions: what is not known, in sentences.
    """

    settings: ForecastSettings
    ranks: int
    nodes: int
    steps: int
    step_s: float
    communication_s: float
    rank_effect: float
    noise: float
    burst_steps: int
    period: int
    no_core: float | None
    replay_error: float
    held_out_error: float
    independent_error: float
    worlds: tuple[WorldForecast, ...]
    not_judged: dict[str, str]
    cautions: tuple[str, ...]


def forecast_remedies(
    parts: BusyParts,
    world_sizes: Sequence[int] | None = None,
    settings: ForecastSettings | None = None,
) -> RemedyForecast:
    """Return what each remedy would bring at so many ranks.

    Args:
        parts: of a measured run.
        world_sizes: numbers of ranks besides the measured ones, and no less; None: those of
            `WORLD_SIZES` that are more.
        settings: None for the defaults.

    Raises:
        UsageError: a number of ranks is below what was measured.
    Cost: draws x remedies sorts of the measured values, a second or so, whatever the ranks.
    """
    settings = settings or ForecastSettings()
    sizes = _sizes(parts, world_sizes)
    not_judged = _not_judged(parts)
    remedies = [NO_REMEDY, *(name for name in REMEDIES if name not in not_judged)]
    copies = [size / parts.ranks for size in sizes]
    expected = _steps(parts, remedies, copies, settings)
    random = make_generator(settings.seed, "imbalance", "bootstrap")
    block = block_steps(parts)
    drawn_s = np.empty((settings.draws, len(remedies), len(sizes)))
    for draw in range(settings.draws):
        steps = _steps(resampled(parts, block, random), remedies, copies, settings)
        drawn_s[draw] = [found.mean_s for found in steps]
    mean_busy_s = max(float(parts.busy_s.mean()), 1e-12)
    slowest_s = expected[0].mean_s - parts.communication_s
    waiting = np.maximum(0.0, slowest_s - mean_busy_s) / np.maximum(expected[0].mean_s, 1e-12)
    worlds = tuple(
        WorldForecast(
            ranks=size,
            imbalance=float(slowest_s[i]) / mean_busy_s,
            waiting=float(waiting[i]),
            gains=_gains(remedies, expected, i, drawn_s[:, :, i]),
        )
        for i, size in enumerate(sizes)
    )
    by_rank_s = parts.busy_s.mean(axis=1)
    rest_s = parts.busy_s - by_rank_s[:, None]
    return RemedyForecast(
        settings=settings,
        ranks=parts.ranks,
        nodes=parts.node_count,
        steps=parts.steps,
        step_s=parts.step_s,
        communication_s=parts.communication_s,
        rank_effect=float(by_rank_s.max() / mean_busy_s - 1),
        noise=float(rest_s.std() / mean_busy_s),
        burst_steps=max(correlation_steps(series) for series in parts.busy_s),
        period=parts.period,
        no_core=None if parts.no_core_s is None else float(parts.no_core_s.mean() / mean_busy_s),
        replay_error=float(expected[0].mean_s[0]) / parts.step_s - 1,
        held_out_error=_held_out_error(parts, block),
        independent_error=_independent_error(parts),
        worlds=worlds,
        not_judged=not_judged,
        cautions=tuple(_cautions(parts, sizes, not_judged)),
    )


# --- steps -----------------------------------------------------------------------------------


def _steps(
    parts: BusyParts, remedies: Sequence[str], copies: Sequence[float], settings: ForecastSettings
) -> list[Maxima]:
    """Return the step with each remedy, for each number of copies."""
    return [_with_remedy(parts, remedy, copies, settings) for remedy in remedies]


def _with_remedy(
    parts: BusyParts, remedy: str, copies: Sequence[float], settings: ForecastSettings
) -> Maxima:
    if remedy == PACING:
        parts = at_least(with_paced_input(parts), parts)
    if remedy in (BUDGET, TOGETHER) and parts.no_core_s is not None:
        parts = at_least(without_core_waits(parts), parts)
    places = np.arange(parts.steps) % parts.period
    unshared = node_maxima(parts.busy_s, parts.nodes)
    found = _slowest(unshared, places, copies, settings.tail)
    if remedy in (REBALANCING, TOGETHER) and parts.ranks > 1:
        busy_s, steps = rebalanced(
            parts,
            window_steps=settings.window_steps,
            least_gain=settings.least_gain,
            noise_factor=settings.noise_factor,
            least_share=settings.least_share,
            most_share=settings.most_share,
        )
        shared = node_maxima(busy_s, parts.nodes)
        tried = _slowest(shared, steps % parts.period, copies, settings.tail)
        kept = tried.mean_s < found.mean_s  # what makes steps longer is undone
        found = Maxima(*(np.where(kept, *pair) for pair in zip(tried, found, strict=True)))
    least_s = parts.least_step_s if remedy in (BUDGET, PACING, TOGETHER) else 0.0
    return Maxima(*(np.maximum(least_s, value + parts.communication_s) for value in found))


def _slowest(
    nodes: Sequence[np.ndarray], places: np.ndarray, copies: Sequence[float], tail: Tail
) -> Maxima:
    """Return the slowest of all copies: its mean, and the longest p95, over places in the period.

    Args:
        nodes: what the slowest rank of each node takes, shaped as `places`.
        places: of each step in the period.
        copies: of each node.
        tail: as of `slowest`.
    """
    by_place = [
        slowest([values[places == place] for values in nodes], copies, tail)
        for place in np.unique(places).tolist()
    ]
    return Maxima(
        np.mean([found.mean_s for found in by_place], axis=0),
        np.quantile([found.p95_s for found in by_place], 0.95, axis=0),
    )


def _gains(
    remedies: Sequence[str], steps: Sequence[Maxima], at: int, drawn_s: np.ndarray
) -> tuple[RemedyGain, ...]:
    """Return a row for each remedy, of the number of ranks with index `at`.

    Args:
        remedies: the first of them is none.
        steps: with each remedy.
        at: index of the number of ranks.
        drawn_s: steps of the bootstrap, shape (draws, remedies).
    """
    lows_s, highs_s = np.quantile(drawn_s, _BAND, axis=0).tolist()
    gain_lows, gain_highs = np.quantile(1 - drawn_s / drawn_s[:, :1], _BAND, axis=0).tolist()
    rows = []
    for i, remedy in enumerate(remedies):
        step_s = float(steps[i].mean_s[at])
        gain = 1 - step_s / float(steps[0].mean_s[at])
        rows.append(
            RemedyGain(
                remedy=remedy,
                step_s=step_s,
                low_s=min(lows_s[i], step_s),
                high_s=max(highs_s[i], step_s),
                p95_s=float(steps[i].p95_s[at]),
                gain=gain,
                gain_low=min(gain_lows[i], gain),
                gain_high=max(gain_highs[i], gain),
            )
        )
    return tuple(rows)


# --- resampling ------------------------------------------------------------------------------


def block_steps(parts: BusyParts) -> int:
    """Return the steps of a block: longer than noise lasts, and a multiple of the period."""
    lasts = max(correlation_steps(series) for series in parts.busy_s)
    wanted = max(_LEAST_BLOCK_STEPS, 2 * lasts)
    longest = max(1, parts.steps // _LEAST_BLOCKS)
    whole = max(1, min(wanted, longest) // parts.period)
    return min(whole * parts.period, parts.steps)


def resampled(parts: BusyParts, block: int, random: np.random.Generator) -> BusyParts:
    """Return a run that might have been measured: blocks of steps and nodes drawn with repetition.

    Args:
        parts: the measured run.
        block: steps of a block, from `block_steps`.
        random: draws.
    """
    places = (parts.steps - block) // parts.period + 1
    count = -(-parts.steps // block)
    starts = random.integers(places, size=count) * parts.period
    steps = (starts[:, None] + np.arange(block)).ravel()[: parts.steps]
    nodes = random.integers(parts.node_count, size=parts.node_count)
    members = [np.flatnonzero(parts.nodes == node) for node in nodes.tolist()]
    ranks = np.concatenate(members)
    rows = np.ix_(ranks, steps)
    return replace(
        parts,
        busy_s=parts.busy_s[rows],
        sharable_s=parts.sharable_s[rows],
        no_core_s=None if parts.no_core_s is None else parts.no_core_s[rows],
        free_s=parts.free_s[rows],
        nodes=np.repeat(np.arange(len(members)), [len(own) for own in members]),
    )


def _held_out_error(parts: BusyParts, block: int) -> float:
    """Return the error of a forecast from every other block for the blocks between them."""
    is_even = np.arange(parts.steps) // block % 2 == 0
    if is_even.all():
        return 0.0
    forecast = slowest(node_maxima(parts.busy_s[:, is_even], parts.nodes), [1.0])
    measured_s = float(parts.busy_s[:, ~is_even].max(axis=0).mean())
    return float(forecast.mean_s[0]) / max(measured_s, 1e-12) - 1


def _independent_error(parts: BusyParts) -> float:
    """Return the error of a forecast in which each rank is a node of its own."""
    if parts.ranks == 1:
        return 0.0
    alone = _slowest(list(parts.busy_s), np.arange(parts.steps) % parts.period, [1.0], "measured")
    measured_s = float(parts.busy_s.max(axis=0).mean())
    return float(alone.mean_s[0]) / max(measured_s, 1e-12) - 1


# --- words -----------------------------------------------------------------------------------


def _sizes(parts: BusyParts, world_sizes: Sequence[int] | None) -> list[int]:
    if world_sizes is None:
        return [parts.ranks, *(size for size in WORLD_SIZES if size > parts.ranks)]
    if least := [size for size in world_sizes if size < parts.ranks]:
        raise UsageError(
            f"a forecast for {least[0]} ranks from a run of {parts.ranks}",
            why="nodes are copied, not divided",
            fix=f"Ask for {parts.ranks} ranks or more, or record a smaller run",
        )
    return sorted({parts.ranks, *world_sizes})


def _not_judged(parts: BusyParts) -> dict[str, str]:
    """Return why remedies cannot be judged, by remedy."""
    reasons: dict[str, str] = {}
    if parts.no_core_s is None:
        unknown = "the traces do not say for how long main threads were ready without a core"
        reasons[BUDGET] = reasons[PACING] = unknown
    elif not parts.loader_workers:
        known = parts.loader_workers == 0
        reasons[PACING] = (
            "the script loads without workers" if known else "the loader's workers are not known"
        )
    if parts.ranks < 2:
        reasons[REBALANCING] = "one rank was measured"
    return reasons


def _cautions(parts: BusyParts, sizes: Sequence[int], not_judged: dict[str, str]) -> list[str]:
    found = []
    if parts.node_count == 1 and max(sizes) > parts.ranks:
        found.append(
            "One node was measured: how nodes differ from each other is not known, and not in the "
            "figures."
        )
    if max(sizes) / parts.ranks > parts.steps:
        found.append(
            "More nodes than measured steps: the slowest of them takes what the slowest measured "
            "step took, unless the tail is extended."
        )
    if BUDGET not in not_judged and parts.loader_workers and not parts.workers_counted:
        found.append(
            "The CPU time of loader workers is not in the traces: if they keep all cores busy, a "
            "budget brings less."
        )
    return found
