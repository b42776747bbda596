"""What each rank did when: a strip of phases per rank, to zoom into."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.report.page import svg
from paceline.report.page.chart import FIELD, LABEL_X, Chart, render
from paceline.report.page.markup import section
from paceline.report.words import phase_label

if TYPE_CHECKING:
    from paceline.report.model import Report
    from paceline.trace.efficiency import PhaseStrips


def timeline(report: Report) -> str:
    """Return the phases of each rank in time."""
    strips = report.strips
    if strips is None:
        return ""
    shown = strips.last_step - strips.first_step + 1
    note = f"Steps {strips.first_step:,} to {strips.last_step:,}"
    note += ", the longest step of the run among them" if shown < report.steps else ", all"
    if len(strips.ranks) < report.world_size:
        note += f"; {len(strips.ranks)} of {report.world_size:,} ranks, the late ones among them"
    note += (
        ". Each strip is what the rank's main thread did; lines mark the ends of steps of the "
        "first rank shown. Time is divided into columns, each with the phase that takes most of it."
    )
    return section("Timeline", note, render(strip_chart(strips)))


def strip_chart(strips: PhaseStrips) -> Chart:
    """Return one strip per rank, its phases as areas; steps of the first rank end at lines."""
    rows, columns = strips.phases.shape
    row_px, gap_px = (26.0, 6.0) if rows <= 8 else (max(6.0, 260.0 / rows), 1.0)
    bottom = rows * (row_px + gap_px)
    present = [i for i in range(len(PHASES)) if (strips.phases == i).any()]
    areas = [
        svg.path(_areas(strips.phases == i, row_px, gap_px), f"strip {PHASES[i]}") for i in present
    ]
    scale = f"scale({FIELD / columns:.6g} 1)"
    marks = [svg.group(areas, "strips", scale)]
    marks += [
        svg.line(x, 0, x, bottom, "step-end")
        for x in (strips.step_ends_s / max(strips.seconds, 1e-12) * FIELD).tolist()
    ]
    every = max(1, -(-rows // 16))
    return Chart(
        name="timeline",
        title="Phases of each rank in time",
        description="A strip per rank, divided into the phases of the legend as they followed each "
        "other. The table of time by phase has their sums.",
        unit="s",
        end=strips.seconds or 1.0,
        height_px=bottom,
        marks=marks,
        labels=[
            svg.text(
                LABEL_X,
                row * (row_px + gap_px) + row_px / 2 + 4,
                f"rank {strips.ranks[row]}",
                "label",
                "end",
            )
            for row in range(0, rows, every)
        ],
        legend=[
            (svg.swatch([svg.rect(0, 0, 14, 12, f"phase {PHASES[i]}")]), phase_label(PHASES[i]))
            for i in present
        ],
    )


def _areas(chosen: np.ndarray, row_px: float, gap_px: float) -> str:
    """Return the runs of chosen columns of each row as one path; x in columns, y in pixels."""
    padded = np.pad(chosen, ((0, 0), (1, 1)))
    rows, edges = np.nonzero(padded[:, 1:] != padded[:, :-1])
    shape = []
    for row, begin, end in zip(rows[::2], edges[::2], edges[1::2], strict=True):
        y = f"{row * (row_px + gap_px) + gap_px / 2:.6g}"
        shape.append(f"M{begin} {y}h{end - begin}v{row_px:.6g}h{begin - end}z")
    return "".join(shape)
