"""What remedies against imbalance would bring a run, and what they brought one that has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.text import Text

from paceline.core.errors import NotFound
from paceline.core.machine import Machine
from paceline.core.record import Record
from paceline.perf.imbalance import (
    REMEDIES,
    ForecastSettings,
    RemedyForecast,
    busy_parts,
    forecast_remedies,
)
from paceline.perf.imbalance.forecast import (
    BUDGET,
    NO_REMEDY,
    PACING,
    REBALANCING,
    TOGETHER,
    RemedyGain,
)
from paceline.report.advice.gather import gather_facts
from paceline.report.fitting_table import FittingTable
from paceline.report.units import format_seconds, format_share, plural
from paceline.report.words import printable
from paceline.runs.folder import RunFolder
from paceline.trace.analysis import analyse
from paceline.trace.efficiency import compare_runs
from paceline.trace.efficiency.comparison import UNCHANGED, Change
from paceline.trace.merge import load_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from paceline.report.advice.facts import Facts
    from paceline.trace.analysis import Analysis

LABELS = {
    BUDGET: "CPU budget",
    PACING: "paced input",
    REBALANCING: "rebalancing",
    TOGETHER: "together",
}
_LEAST_GAIN = 0.01  # of a step, to be worth a remedy
# Settings of `paceline run` that are remedies.
_SETTING = {"budget": BUDGET, "pace": PACING, "rebalance": REBALANCING}
_UNSET = {"pace": "auto"}  # what it means that a setting is not set, if not off


@dataclass(frozen=True, kw_only=True, slots=True)
class RemedyOutcome(Record):
    """What settings brought a run, against a former run without them.

    Attributes:
        before: folder of the former run.
        settings: that differ, by name: ``off -> auto``.
        step: how the step time changed.
        gain: share of the former step that is saved; negative if steps are longer.
        error: half the width of its 95 % interval; None with too few steps.
        expected: what the former run let expect of the remedies that these settings are; None if
            they are none, or could not be judged.
    """

    before: str
    step: Change
    gain: float
    error: float | None
    expected: RemedyGain | None = None
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RemedyQuestion:
    """What to say of remedies.

    Attributes:
        world_sizes: as of `forecast_remedies`.
        settings: as of `forecast_remedies`.
        before: folder of a former run, against which this one is measured; None for none.
    """

    world_sizes: tuple[int, ...] | None = None
    settings: ForecastSettings | None = None
    before: Path | None = None


class RemedyAnswer(NamedTuple):
    """What remedies would bring a run, and what its settings brought; None where not known."""

    forecast: RemedyForecast | None = None
    outcome: RemedyOutcome | None = None


NO_ANSWER = RemedyAnswer()


def run_forecast(
    analysis: Analysis,
    facts: Facts,
    world_sizes: Sequence[int] | None = None,
    settings: ForecastSettings | None = None,
) -> RemedyForecast:
    """Return what remedies would bring an analysed run.

    Args:
        analysis: of the run.
        facts: of the run.
        world_sizes: as of `forecast_remedies`.
        settings: as of `forecast_remedies`.

    Raises:
        NotFound: the run has too few steps.
        UsageError: a number of ranks is below what was measured.
    """
    # The store's loader works in threads of the rank, whose time is counted with the rank's.
    in_threads = bool(facts.loader_stages_s)
    parts = busy_parts(
        analysis,
        loader_workers=facts.loader_workers,
        cores=facts.cores,
        worker_cpu_s=0.0 if in_threads else None,
    )
    return forecast_remedies(parts, world_sizes, settings)


def advised_forecast(analysis: Analysis, facts: Facts) -> RemedyForecast | None:
    """Return the forecast that a report shows; None of one rank, and where there is none."""
    if len(analysis.phases) < 2:
        return None
    try:
        return run_forecast(analysis, facts)
    except NotFound:
        return None


def ask_remedies(
    analysis: Analysis, facts: Facts, config: dict[str, Any], question: RemedyQuestion
) -> RemedyAnswer:
    """Return what remedies would bring a run, and what its settings brought.

    Args:
        analysis: of the run.
        facts: of the run.
        config: the run's ``config.json``.
        question: what to ask.

    Raises:
        NotFound: the run has too few steps, or there is no former run.
        UsageError: a number of ranks is below what was measured.
    """
    found = run_forecast(analysis, facts, question.world_sizes, question.settings)
    return RemedyAnswer(found, _outcome_of(analysis, config, question))


def _outcome_of(
    analysis: Analysis, config: dict[str, Any], question: RemedyQuestion
) -> RemedyOutcome | None:
    if question.before is None:
        return None
    folder = RunFolder.open(question.before)
    former = analyse(load_run(folder.path))
    former_config = folder.read_config()
    machine = folder.read_record(Machine, "machine.json")
    return outcome(
        former,
        analysis,
        folder=str(question.before),
        expected=advised_forecast(
            former, gather_facts(former, config=former_config, machine=machine)
        ),
        configs=(former_config, config),
    )


def outcome(
    before: Analysis,
    now: Analysis,
    *,
    folder: str,
    expected: RemedyForecast | None,
    configs: tuple[dict[str, Any], dict[str, Any]],
) -> RemedyOutcome:
    """Return what a run's settings brought, against a former run.

    Args:
        before: analysis of the former run.
        now: analysis of the run.
        folder: of the former run.
        expected: forecast from the former run.
        configs: ``config.json`` of the former run and of the run.

    Raises:
        NotFound: a run has no step that all its ranks completed.
    """
    step = compare_runs(before, now).step
    before_s = max(step.a_s, 1e-12)
    settings = changed_settings(*configs)
    remedies = {_SETTING[name] for name in settings if name in _SETTING}
    remedy = next(iter(remedies)) if len(remedies) == 1 else TOGETHER
    same_ranks = len(before.phases) == len(now.phases)
    world = expected.worlds[0] if expected is not None and remedies and same_ranks else None
    return RemedyOutcome(
        before=folder,
        step=step,
        gain=-step.change_s / before_s,
        error=None if step.error_s is None else step.error_s / before_s,
        expected=world.gain_of(remedy) if world is not None else None,
        settings=settings,
    )


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """Return the settings of two runs that differ, by name: ``off -> auto``."""
    values = [config.get("values") for config in (before, now)]
    first, second = (
        {name: _value(name, setting) for name, setting in found.items()}
        if isinstance(found, dict)
        else {}
        for found in values
    )
    names = sorted(name for name in first.keys() & second.keys() if first[name] != second[name])
    return {name: f"{first[name]} -> {second[name]}" for name in names}


def _value(name: str, setting: object) -> str:
    value = setting.get("value") if isinstance(setting, dict) else setting
    if value is None:
        return _UNSET.get(name, "off")
    return "off" if value is False else "on" if value is True else str(value)


# --- words and rows ---------------------------------------------------------------------------


def remedy_sentence(found: RemedyForecast) -> str:
    """Return what remedies would bring at the measured ranks and at the most, as a sentence."""
    few, many = found.worlds[0], found.worlds[-1]
    best = max(few.gains, key=lambda gain: gain.gain)
    most = max(many.gains, key=lambda gain: gain.gain)
    if max(best.gain, most.gain) < _LEAST_GAIN:
        return (
            "No remedy against imbalance would make steps 1 % shorter, neither at "
            f"{plural(few.ranks, 'rank')} nor at {many.ranks:,}."
        )
    words = f"At {plural(few.ranks, 'rank')} {_gain_words(best)}"
    if many is not few:
        words += f"; at {many.ranks:,} {_gain_words(most)}"
    return f"{words}."


def _gain_words(gain: RemedyGain) -> str:
    if gain.gain < _LEAST_GAIN:
        return "no remedy against imbalance would make steps 1 % shorter"
    label = "all remedies together" if gain.remedy == TOGETHER else LABELS[gain.remedy]
    return (
        f"{label} would save {format_share(gain.gain)} of a step (95 %: {_band(gain)} %): "
        f"{format_seconds(gain.step_s)}"
    )


def _band(gain: RemedyGain) -> str:
    return f"{_percent(gain.gain_low)} to {_percent(gain.gain_high)}"


def _percent(share: float) -> str:
    return f"{100 * share + 0.0:.1f}".replace("-0.0", "0.0")


def remedy_rows(found: RemedyForecast) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return headings and rows of gains: one row for each number of ranks."""
    judged = [remedy for remedy in REMEDIES if remedy not in found.not_judged]
    rows = []
    for world in found.worlds:
        gains = {gain.remedy: gain for gain in world.gains}
        none = gains[NO_REMEDY]
        cells = [f"{_percent(gains[name].gain)} ({_band(gains[name])})" for name in judged]
        waiting = format_share(world.waiting)
        rows.append((f"{world.ranks:,}", format_seconds(none.step_s), waiting, *cells))
    heads = ("ranks", "a step", "ranks wait", *(f"{LABELS[name]}, %" for name in judged))
    return heads, tuple(rows)


def assumption_words(found: RemedyForecast) -> list[str]:
    """Return on what a forecast rests, and what it does not know, in sentences."""
    used = found.settings
    sentences = [
        f"Measured: {plural(found.steps, 'step')} of {plural(found.ranks, 'rank')} on "
        f"{plural(found.nodes, 'node')}; {format_seconds(found.communication_s)} of a step is "
        "communication, and stays so. The slowest rank takes "
        f"{format_share(found.rank_effect)} longer than the mean one over all steps; the rest "
        f"varies by {format_share(found.noise)}, in bursts of {plural(found.burst_steps, 'step')}.",
        f"Held-out steps: {_signed(found.held_out_error)}; replay at the measured ranks: "
        f"{_signed(found.replay_error)}; ranks of a node taken for independent: "
        f"{_signed(found.independent_error)}.",
        f"Rebalancing measures {plural(used.window_steps, 'step')}, changes shares for a gain of "
        f"{format_share(used.least_gain)} or more, to between {used.least_share:g} and "
        f"{used.most_share:g} of an equal share, and undoes what makes steps longer.",
    ]
    if found.period > 1:
        sentences.append(f"Every {found.period}th step is longer, on all ranks at once.")
    sentences += [
        f"Not judged: {LABELS[remedy]}, since {reason}."
        for remedy, reason in found.not_judged.items()
    ]
    return [*sentences, *found.cautions]


def _signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def outcome_sentence(found: RemedyOutcome) -> str:
    """Return what a run's settings brought, and what was expected of them, as a sentence."""
    step = found.step
    names = ", ".join(f"{name} {change}" for name, change in found.settings.items())
    words = f"Against {found.before}{f' ({names})' if names else ''} a step takes "
    words += f"{format_seconds(step.b_s)} in place of {format_seconds(step.a_s)}"
    if found.error is not None:
        low, high = _percent(found.gain - found.error), _percent(found.gain + found.error)
        words += f": {_percent(found.gain)} % saved (95 %: {low} to {high} %)"
    if step.verdict == UNCHANGED:
        words += ", no significant change"
    if found.expected is not None:
        words += (
            f"; {_percent(found.expected.gain)} % was expected of {LABELS[found.expected.remedy]}"
            f" ({_band(found.expected)} %)"
        )
    return f"{words}."


def render_remedies(found: RemedyForecast | None, came: RemedyOutcome | None) -> Group:
    """Return what ``paceline why --remedies`` shows: gains, and what they rest on."""
    words = assumption_words(found) if found is not None else []
    rest = [Text(printable(sentence)) for sentence in words]
    return Group(render_gains(found, came), *([Text(), *rest] if rest else []))


def render_gains(found: RemedyForecast | None, came: RemedyOutcome | None) -> Group:
    """Return what remedies brought and would bring, as sentences and a table."""
    parts: list[RenderableType] = []
    if came is not None:
        parts.append(Text(printable(outcome_sentence(came)), style="bold"))
    if found is not None:
        heads, rows = remedy_rows(found)
        parts += [Text(printable(remedy_sentence(found)), style="bold"), Text()]
        parts.append(FittingTable(heads=heads, rows=rows))
    return Group(*parts)
