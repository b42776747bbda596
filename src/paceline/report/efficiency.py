"""The efficiency of a run, and the comparison of two, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.report.fitting_table import FittingTable
from paceline.report.units import format_bytes, format_seconds, format_share, plural, significant
from paceline.report.words import phase_label, printable
from paceline.trace.efficiency.comparison import FASTER, SLOWER, UNCHANGED
from paceline.trace.efficiency.what_if import RECORDED

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.trace.efficiency import RunComparison, RunEfficiency
    from paceline.trace.efficiency.comparison import Change
    from paceline.trace.efficiency.matrix import CommunicationMatrix
    from paceline.trace.efficiency.metrics import EfficiencyMetrics

TableRows = tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]  # headings, cells of each row

_ROWS = 10
_NO_ROWS: frozenset[int] = frozenset()
_MOST_CHANGES = 24
_LEAST_GAIN = 0.001  # of a step, to be worth a word
_LEAST_P_VALUE = 1e-4  # smaller ones say no more
_SHOWN_ERROR = 0.01  # of a replay, from which on it is shown


def render_efficiency(found: RunEfficiency) -> Group:
    """Return what ``paceline trace efficiency`` shows."""
    steps = plural(found.steps, "step")
    parts: list[RenderableType] = [
        Text(efficiency_sentence(found), style="bold"),
        Text(
            f"{steps} ({found.first_step:,} to {found.last_step:,}) of "
            f"{format_seconds(found.what_ifs[0].step_s)}; {plural(len(found.overlap), 'rank')}"
        ),
        Text(),
        _table(factor_rows(found.metrics), names=2, bold=frozenset([0])),
        Text(),
        _table(what_if_rows(found)),
        Text(),
        _table(path_rows(found), names=2),
    ]
    if found.waits.calls:
        parts += [Text(), _table(call_rows(found), names=4)]
        parts += [Text(), _table(delay_rows(found), names=2)]
    parts += [*_overlap(found), *_matrix(found)]
    if words := replay_words(found):
        parts += [Text(), Text(words, style="yellow")]
    return Group(*parts)


def replay_words(found: RunEfficiency) -> str:
    """Return how far scenarios can be trusted, where that is worth a word; else nothing."""
    if abs(found.replay_error) <= _SHOWN_ERROR and not found.cut_count:
        return ""
    words = (
        f"The replay of these steps differs from the trace by "
        f"{format_share(abs(found.replay_error))}"
    )
    if found.cut_count:
        count = plural(found.cut_count, "dependency").replace("dependencys", "dependencies")
        words += f", and {count} contradicted others"
    return f"{words}: scenarios are no better than that."


def efficiency_sentence(found: RunEfficiency) -> str:
    """Return what limits a run, and what would help, as a sentence."""
    metrics = found.metrics
    factors = {
        "load balance": metrics.load_balance,
        "serialisation": metrics.serialisation,
        "transfer": metrics.transfer,
        "I/O": metrics.io,
    }
    least = min(factors, key=lambda name: factors[name])
    words = f"The ranks compute {format_share(metrics.overall)} of their time"
    if factors[least] < 1:
        words += f"; {least} costs most ({format_share(factors[least])})"
    gains = [item for item in found.what_ifs[1:4] if item.shorter >= _LEAST_GAIN]
    if not gains:
        return f"{words}."
    scenarios = "; ".join(
        f"with {item.scenario} {format_share(item.shorter)}"
        for item in sorted(gains, key=lambda item: -item.shorter)
    )
    return f"{words}. A step would be shorter: {scenarios}."


def _table(found: TableRows, *, names: int = 1, bold: frozenset[int] = _NO_ROWS) -> FittingTable:
    heads, rows = found
    return FittingTable(heads=heads, rows=rows, names=names, bold=bold)


def factor_rows(metrics: EfficiencyMetrics) -> TableRows:
    """Return headings and rows of the factors of efficiency."""
    rows = (
        ("overall", metrics.overall, "parallel efficiency x I/O efficiency"),
        ("  I/O efficiency", metrics.io, "outside communication, without input and checkpoints"),
        ("  parallel efficiency", metrics.parallel, "load balance x communication efficiency"),
        ("    load balance", metrics.load_balance, "mean over longest rank's work"),
        ("    communication", metrics.communication, "serialisation x transfer"),
        ("      serialisation", metrics.serialisation, "ranks wait for each other in turn"),
        ("      transfer", metrics.transfer, "data take time to move"),
    )
    shown = tuple((name, words, format_share(value)) for name, value, words in rows)
    return ("efficiency", "which is", "share"), shown


def what_if_rows(found: RunEfficiency) -> TableRows:
    """Return headings and rows of what a step takes in each scenario."""
    rows = tuple(
        (
            item.scenario,
            format_seconds(item.step_s),
            "" if item.scenario == RECORDED else format_share(max(0.0, item.shorter)),
        )
        for item in found.what_ifs
    )
    return ("a step", "takes", "shorter by"), rows


def path_rows(found: RunEfficiency) -> TableRows:
    """Return headings and rows of what is on the critical path, the longest first."""
    rows = tuple(
        (
            f"rank {part.rank}",
            printable(f"{phase_label(part.phase)} {part.operation}".strip()),
            format_seconds(part.seconds / found.steps),
            format_share(part.seconds / max(found.path.seconds, 1e-12)),
        )
        for part in found.path.parts[:_ROWS]
    )
    return ("critical path", "phase", "in a step", "of it"), rows


def call_rows(found: RunEfficiency) -> TableRows:
    """Return headings and rows of wait states by call, the costliest first."""
    rows = tuple(
        (
            call.state,
            printable(call.operation),
            printable(call.group.removeprefix("group ")),
            phase_label(call.phase),
            f"{call.count:,}",
            format_seconds(call.seconds),
            format_seconds(call.longest_s),
        )
        for call in found.waits.calls[:_ROWS]
    )
    return ("wait state", "call", "group", "phase", "waits", "all ranks", "longest"), rows


def delay_rows(found: RunEfficiency) -> TableRows:
    """Return headings and rows of who caused waits, by phase, the costliest first."""
    rows = tuple(
        (
            f"rank {cost.rank}",
            phase_label(cost.phase),
            format_seconds(cost.direct_s),
            format_seconds(cost.indirect_s),
            format_share(cost.seconds / max(found.waits.seconds, 1e-12)),
        )
        for cost in found.waits.delays[:_ROWS]
    )
    return ("caused by", "phase", "direct", "indirect", "of all waiting"), rows


def _overlap(found: RunEfficiency) -> list[RenderableType]:
    moving = [rank for rank in found.overlap if rank.moving_s > 0]
    if not moving:
        return []
    rows = tuple(
        (
            f"rank {rank.rank}",
            format_seconds(rank.moving_s),
            format_seconds(rank.exposed_s),
            format_share(rank.hidden_share),
        )
        for rank in moving[:_ROWS]
    )
    return [Text(), FittingTable(heads=("overlap", "data move", "exposed", "hidden"), rows=rows)]


def _matrix(found: RunEfficiency) -> list[RenderableType]:
    matrix = found.matrix
    if not matrix.pairs:
        return []
    rows = tuple(
        (
            f"{pair.source} to {pair.target}",
            f"{pair.messages:,}",
            format_bytes(pair.message_bytes),
            format_bytes(pair.collective_bytes),
        )
        for pair in matrix.pairs[:_ROWS]
    )
    heads = ("ranks", "messages", "of messages", "of collectives")
    parts: list[RenderableType] = [
        Text(),
        FittingTable(heads=heads, rows=rows),
        Text(),
        FittingTable(heads=("links", *heads[1:]), rows=level_rows(matrix)),
    ]
    if words := matrix_words(matrix):
        parts.append(Text(words))
    return parts


def level_rows(matrix: CommunicationMatrix) -> tuple[tuple[str, ...], ...]:
    """Return rows of volume by level of links: level, messages, their bytes, collectives' bytes."""
    return tuple(
        (
            f"within a {level.level}" if level.level == "node" else level.level,
            f"{level.messages:,}",
            format_bytes(level.message_bytes),
            format_bytes(level.collective_bytes),
        )
        for level in matrix.levels
    )


def matrix_words(matrix: CommunicationMatrix) -> str:
    """Return how bytes of collectives were laid on pairs; nothing without collectives."""
    if not matrix.algorithms:
        return ""
    known = ", ".join(f"{name} as {how}" for name, how in sorted(matrix.algorithms.items()))
    return printable(f"Bytes of collectives between pairs are computed: {known}.")


def render_run_comparison(found: RunComparison) -> Group:
    """Return what ``paceline trace compare`` shows."""
    step_s = found.step.a_s
    shown = [
        change
        for change in found.changes
        if change.verdict != UNCHANGED
        or (
            change.part in ("step", "phase") and max(change.a_s, change.b_s) >= _LEAST_GAIN * step_s
        )
    ]
    rows = tuple(_change_row(change) for change in shown[:_MOST_CHANGES])
    left = len(found.changes) - len(rows)
    heads = ("a step", "A", "B", "change", "95 %: +-", "p-value", "is")
    parts: list[RenderableType] = [Text(comparison_sentence(found), style="bold")]
    if found.unlike:
        words = f"These are unlike programs or models, not one that has changed: {found.unlike}."
        parts.append(Text(printable(words), style="yellow"))
    parts += [
        Text(
            f"A: {plural(found.a_steps, 'step')} of {plural(found.a_ranks, 'rank')}; "
            f"B: {plural(found.b_steps, 'step')} of {plural(found.b_ranks, 'rank')}"
        ),
        Text(),
        FittingTable(heads=heads, rows=rows, bold=frozenset([0])),
    ]
    if left:
        parts.append(Text(f"and {plural(left, 'part')} more"))
    if any(change.p_value is None for change in found.changes):
        words = "A run has too few steps to tell a change from noise: record 20 or more."
        parts += [Text(), Text(words, style="yellow")]
    return Group(*parts)


def comparison_sentence(found: RunComparison) -> str:
    """Return what became slower from run A to run B, as a sentence."""
    step = found.step
    words = f"A step of B takes {format_seconds(step.b_s)}, of A {format_seconds(step.a_s)}"
    if step.verdict == UNCHANGED:
        return f"{words}: no significant change."
    share = format_share(abs(step.change_s) / max(step.a_s, 1e-12))
    words += f": {share} {step.verdict}"
    parts = [c for c in found.changes[1:] if c.part == "phase" and c.verdict == step.verdict]
    parts.sort(key=lambda change: change.name == "waiting")  # it follows from the others
    ranks = [c for c in found.changes[1:] if c.part == "rank" and c.verdict == step.verdict]
    if parts:
        words += f", most of it in {phase_label(parts[0].name)}"
    if ranks and len(ranks) < max(2, found.a_ranks // 2):
        words += f" of rank {ranks[0].name}"
    return f"{words}."


def _p_value(value: float | None) -> str:
    if value is None:
        return ""
    return f"< {_LEAST_P_VALUE:.4f}" if value < _LEAST_P_VALUE else significant(value, 2)


def _change_row(change: Change) -> tuple[str, ...]:
    label = phase_label(change.name) if change.part == "phase" else printable(change.name)
    sign = "+" if change.change_s > 0 else "-" if change.change_s < 0 else ""
    return (
        f"rank {label}" if change.part == "rank" else label or change.part,
        format_seconds(change.a_s),
        format_seconds(change.b_s),
        f"{sign}{format_seconds(abs(change.change_s))}",
        "" if change.error_s is None else format_seconds(change.error_s),
        _p_value(change.p_value),
        change.verdict if change.verdict in (SLOWER, FASTER) else "",
    )
