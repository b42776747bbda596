"""Which files a run used, in words and as rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_bytes, format_seconds, plural
from paceline.trace.analysis.files import FileUse, file_uses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.merge import Trace

HEADS = ("ranks", "calls", "time", "read", "written", "at once")
_FILES_CAUSES = frozenset({"data", "checkpoint"})
_NOTABLE = 0.05  # of the time in all files
_NAMED = 3  # operations of a file in a sentence


def file_words(trace: Trace, stragglers: Sequence[Straggler]) -> str:
    """Return which file took the late rank longest; empty if files are not why it was late.

    Args:
        trace: of the run.
        stragglers: who was late, the costliest first.
    """
    if not stragglers or stragglers[0].cause not in _FILES_CAUSES:
        return ""
    late = stragglers[0].rank
    uses = [use for use in file_uses([rank for rank in trace.ranks if rank.rank == late])
            if not use.path.startswith("(")]  # fmt: skip
    if not uses:
        return ""
    use = uses[0]
    longest = sorted(use.seconds.items(), key=lambda item: -item[1])[:_NAMED]
    calls = ", ".join(
        f"{plural(use.calls[word], word + ' call')} of {format_seconds(seconds)} together"
        for word, seconds in longest
    )
    return f"Of its files {use.path} took rank {late} longest: {calls}."


def shown_files(files: Sequence[FileUse]) -> list[FileUse]:
    """Return the files without those that were only looked at, if that took little of the time.

    A program that starts stats each folder of the paths in which it looks for its parts.
    """
    total_s = sum(use.total_s for use in files)
    return [use for use in files if set(use.calls) != {"stat"} or use.total_s > _NOTABLE * total_s]


def file_rows(files: Sequence[FileUse]) -> tuple[list[str], list[list[str]]]:
    """Return the names and the cells of a table of files, under `HEADS`."""
    rows = [
        [
            ", ".join(map(str, use.ranks[:4])) + ("..." if len(use.ranks) > 4 else ""),
            f"{sum(use.calls.values()):,}",
            format_seconds(use.total_s),
            format_bytes(use.read_bytes),
            format_bytes(use.written_bytes),
            str(use.at_once),
        ]
        for use in files
    ]
    return [use.path for use in files], rows
