"""The outcome of a search of plans, for a terminal: the front, why the winner wins, what if."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from paceline.core.plan import Plan
from paceline.report.fitting_table import FittingTable
from paceline.report.transformer import mesh_in_words
from paceline.report.units import format_bytes, format_seconds, format_share, plural
from paceline.report.words import phase_label

if TYPE_CHECKING:
    from rich.console import RenderableType

    from paceline.perf.planner import PlanSearch
    from paceline.perf.planner.result import Alternative, PricedPlan

MOST_ROWS = 12
PER_AXIS = 2  # other values of an axis that are shown


def render_search(search: PlanSearch, best: RenderableType) -> Group:
    """Return what ``paceline plan --search`` shows.

    Args:
        search: its outcome.
        best: what is shown of its best plan's estimate.
    """
    parts: list[RenderableType] = [Text(_head(search)), Text(), best]
    if search.front:
        parts += [_front(search), Text()]
    if search.alternatives:
        parts += [_alternatives(search.alternatives), Text()]
    parts += [Text(line) for line in _what_if(search)]
    return Group(*parts)


def _head(search: PlanSearch) -> str:
    text = (
        f"{search.compared:,} plans compared, {search.fitting:,} may fit, {search.priced:,} priced "
        f"in full, in {format_seconds(search.seconds)}"
    )
    if search.left_out:
        text += f"; {plural(search.left_out, 'plan')} that may be faster left out for time"
    if not search.front:
        text += "; none fits, the smallest:"
    return text


def plan_in_words(plan: Plan, *, precision: bool = False) -> str:
    """Return a plan's mesh and choices, shortly.

    Args:
        plan: of a transformer, or of a captured model.
        precision: whether to say it: plans that are compared may share one.

    >>> from paceline.core.plan import Mesh
    >>> plan_in_words(Plan(mesh=Mesh(data=4, tensor=8), microbatches=2, zero=1))
    '4 data x 8 tensor, 2 microbatches, zero 1'
    """
    mesh = plan.mesh
    words = [mesh_in_words(mesh)]
    words.append(plural(plan.microbatch_count, "microbatch"))
    if plan.stages_per_rank > 1:
        words.append(f"{plan.stages_per_rank} stages per rank")
    elif mesh.pipeline > 1:
        words.append(plan.schedule)
    if plan.zero:
        words.append(f"zero {plan.zero}")
    if plan.recompute != "none":
        words.append(f"recompute {plan.recompute}")
    if plan.compression > 1:
        words.append(f"compression {plan.compression:g}")
    if plan.loader_workers:
        words.append(plural(plan.loader_workers, "loader worker"))
    if precision:
        words.append(plan.precision)
    if plan.threads > 1:
        words.append(plural(plan.threads, "thread"))
    if plan.collectives != "torch":
        words.append(f"collectives {plan.collectives}")
    if plan.bucket_bytes != Plan().bucket_bytes:
        words.append(f"buckets of {format_bytes(plan.bucket_bytes)}")
    return ", ".join(words)


def _front(search: PlanSearch) -> FittingTable:
    shown = _spread(search.front)
    precisions_differ = len({priced.plan.precision for priced in search.front}) > 1
    costs_differ = len({priced.plan.nodes for priced in search.front}) > 1
    rows = tuple(
        (
            f"{priced.plan.nodes:,}",
            plan_in_words(priced.plan, precision=precisions_differ),
            format_seconds(priced.step_s),
            format_bytes(priced.memory_bytes),
            f"{priced.node_hours:,.1f}" if costs_differ else "",
        )
        for priced in shown
    )
    left = len(search.front) - len(shown)
    more = f" ({left} of {len(search.front)} left out)" if left else ""
    return FittingTable(
        heads=("nodes", f"no plan beats these{more}", "step", "memory", "node-h per 1M samples"),
        rows=rows,
        names=2,
        bold=frozenset([0]),
    )


def _spread(front: tuple[PricedPlan, ...]) -> list[PricedPlan]:
    """Return at most `MOST_ROWS` of the front: the first, the last, and some between."""
    if len(front) <= MOST_ROWS:
        return list(front)
    chosen = sorted({round(k * (len(front) - 1) / (MOST_ROWS - 1)) for k in range(MOST_ROWS)})
    return [front[k] for k in chosen]


def _alternatives(alternatives: tuple[Alternative, ...]) -> FittingTable:
    """Return the best other values of each axis; they come sorted by axis and time."""
    shown: dict[str, list[Alternative]] = {}
    for item in alternatives:
        shown.setdefault(item.axis, []).append(item)
    return FittingTable(
        heads=("in place of the winner's", "value", "step", "what grows"),
        rows=tuple(_alternative_row(item) for found in shown.values() for item in found[:PER_AXIS]),
        names=2,
    )


def _alternative_row(item: Alternative) -> tuple[str, str, str, str]:
    if item.slower is None:
        return item.axis, item.value, "does not fit", f"{format_bytes(item.missing_bytes)} too much"
    sign = ">= " if item.is_bound else ""
    grown = phase_label(item.why) if item.why else ""
    return item.axis, item.value, f"{sign}+{format_share(max(0.0, item.slower))}", grown


def _what_if(search: PlanSearch) -> list[str]:
    lines = []
    for item in search.what_if:
        if not item.is_other:
            lines.append(f"{item.change}: the same plan wins")
            continue
        words = plan_in_words(item.plan)
        if item.faster < 0:
            slower = format_share(1 / (1 + item.faster) - 1)
            lines.append(f"{item.change}: this one does not fit; {words} wins, {slower} slower")
        else:
            lines.append(f"{item.change}: {words} wins, {format_share(item.faster)} faster")
    return lines
