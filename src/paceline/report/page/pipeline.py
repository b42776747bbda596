"""A model in stages: what its ranks did in a batch, why they idled, what they sent each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.page import svg
from paceline.report.page.chart import FIELD, LABEL_X, Chart, render
from paceline.report.page.markup import section, table
from paceline.report.pipeline import cause_rows, rank_rows, transfer_words
from paceline.report.units import format_seconds
from paceline.trace.analysis.pipeline import FORWARD

if TYPE_CHECKING:
    from paceline.report.model import Report
    from paceline.trace.analysis.pipeline import PipelineUse, ShownAction

_ROW_PX, _GAP_PX = 24.0, 6.0
_ROOM = 0.02  # of the batch: narrower passes have no number written into them


def batches(report: Report) -> str:
    """Return how the ranks of a model in stages spend a batch; nothing for other models."""
    use, bubble = report.pipeline, report.bubble
    if use is None or bubble is None:
        return ""
    note = (
        "The batch of median length, with the number of the microbatch in each pass. A rank idles "
        "in warm-up until its first backward pass has what it needs, in drain after its last "
        "forward pass, and between them for ranks that take longer; transfers are values on "
        "their way to a rank that waits for them. The table has the means of "
        f"{use.batches:,} batches. {transfer_words(use)}"
    )
    heads, rows = rank_rows(use)
    causes = table(["idle time of all ranks", "of a batch", "of a step"], cause_rows(use, bubble))
    return section("Pipeline", note, render(batch_chart(use)), table(heads, rows, names=2), causes)


def batch_chart(use: PipelineUse) -> Chart:
    """Return one row per rank of a replica: its passes in the batch that stands for all."""
    ranks = [rank for rank in use.ranks if rank.shown]
    end = max((action.end_s for rank in ranks for action in rank.shown), default=0.0) or 1.0
    bottom = len(ranks) * (_ROW_PX + _GAP_PX)
    marks = [
        svg.line(at / end * FIELD, 0, at / end * FIELD, bottom, "grid") for at in svg.ticks(end, 7)
    ]
    labels, over = [], []
    for row, rank in enumerate(ranks):
        y = row * (_ROW_PX + _GAP_PX) + _GAP_PX / 2
        labels.append(svg.text(LABEL_X, y + _ROW_PX / 2 + 4, f"rank {rank.rank}", "label", "end"))
        for action in rank.shown:
            begin, width = max(0.0, action.begin_s / end), (action.end_s - action.begin_s) / end
            phase = _phase(action)
            marks.append(
                svg.rect(begin * FIELD, y, width * FIELD, _ROW_PX, f"phase {phase}", _said(action))
            )
            if width >= _ROOM:
                middle = svg.percent(begin + width / 2)
                number = f"{action.microbatch}"
                over.append(svg.text(middle, y + _ROW_PX / 2 + 4, number, f"on-{phase}", "middle"))
    return Chart(
        name="pipeline",
        title="A batch in the pipeline",
        description="A row per rank, with the forward and backward passes of each microbatch in "
        "time; between them the rank is idle. The table below has the means.",
        unit="s",
        end=end,
        height_px=bottom,
        marks=marks,
        labels=labels,
        over=over,
        legend=[
            (svg.swatch([svg.rect(0, 0, 14, 12, f"phase {phase}")]), words)
            for phase, words in (("forward", "forward pass"), ("backward", "backward pass"))
        ],
    )


def _phase(action: ShownAction) -> str:
    return "forward" if action.kind == FORWARD else "backward"


def _said(action: ShownAction) -> str:
    kind = action.kind.replace("_", " of the ")
    return (
        f"{kind}, stage {action.stage}, microbatch {action.microbatch}: "
        f"{format_seconds(action.end_s - action.begin_s)}"
    )
