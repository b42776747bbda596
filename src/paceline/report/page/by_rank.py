"""Charts with a row per rank and time along the axis: where each rank's seconds went."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.breakdown import PHASES
from paceline.report.page import svg
from paceline.report.page.chart import FIELD, LABEL_X, Chart
from paceline.report.units import format_seconds, format_share, shown_parts
from paceline.report.words import phase_label

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.breakdown import Breakdown

# A share is written into its bar if the bar is this wide, as a share of the longest bar: on a wide
# page, and on a narrow one.
_ROOM, _NARROW_ROOM = 0.05, 0.15
_LEAST = 0.0002  # of the longest bar: narrower ones would not be seen


def time_bars(ranks: Sequence[int], times: Sequence[Breakdown]) -> Chart:
    """Return one stacked bar per rank: seconds by phase, shares written where they fit."""
    end = max((spent.total_s for spent in times), default=0.0) or 1.0
    height, gap = (22.0, 6.0) if len(ranks) <= 16 else (11.0, 3.0)
    bottom = len(ranks) * (height + gap)
    marks = [
        svg.line(at / end * FIELD, 0, at / end * FIELD, bottom, "grid") for at in svg.ticks(end, 7)
    ]
    labels, over = [], []
    for row, (rank, spent) in enumerate(zip(ranks, times, strict=True)):
        y = row * (height + gap) + gap / 2
        labels.append(svg.text(LABEL_X, y + height / 2 + 4, f"rank {rank}", "label", "end"))
        begin_s = 0.0
        for name, seconds in spent.items():
            width, share = seconds / end, format_share(seconds / max(spent.total_s, 1e-12))
            if width >= _LEAST:
                title = f"rank {rank}, {phase_label(name)}: {format_seconds(seconds)}, {share}"
                x = begin_s / end * FIELD
                marks.append(svg.rect(x, y, width * FIELD, height, f"phase {name}", title))
            if width >= _ROOM and height > 15:
                style = f"on-{name}" if width >= _NARROW_ROOM else f"on-{name} spare"
                middle = svg.percent((begin_s + seconds / 2) / end)
                over.append(svg.text(middle, y + height / 2 + 4, share, style, "middle"))
            begin_s += seconds
    present = shown_parts(PHASES, [dict(spent.items()) for spent in times])
    return Chart(
        name="time-by-phase",
        title="Time of each rank by phase",
        description="A bar per rank, divided into the seconds of each phase, in the order of the "
        "legend. The table below has the numbers.",
        unit="s",
        end=end,
        height_px=bottom,
        marks=marks,
        labels=labels,
        over=over,
        legend=[
            (svg.swatch([svg.rect(0, 0, 14, 12, f"phase {name}")]), phase_label(name))
            for name in present
        ],
    )
