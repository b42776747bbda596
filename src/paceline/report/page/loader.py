"""What limits the loader of a run: the ceiling of each of its stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.loader import HEADS, loader_rows, loader_words
from paceline.report.page.markup import section, table

if TYPE_CHECKING:
    from paceline.report.model import Report


def ceilings(report: Report) -> str:
    """Return how fast each stage of the loader could deliver; nothing without a loader."""
    if report.loader is None:
        return ""
    names, rows = loader_rows(report.loader)
    lines = [[name, *cells] for name, cells in zip(names, rows, strict=True)]
    return section("Loader", loader_words(report.loader), table(["stage", *HEADS], lines))
