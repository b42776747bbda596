"""What limits the loader of a run, in words and as rows of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_seconds, format_share, plural, significant
from paceline.trace.analysis.loader import FETCH, IN_TURN

if TYPE_CHECKING:
    from paceline.trace.analysis.loader import LoaderCeiling

HEADS = ("of a batch", "at once", "ceiling")
_LEAST_TOLD = 0.1  # of what a data set does: clocks of a stolen core say some per cent
_NOTABLE = 0.05  # of a step; a loader that costs less is in tables alone


def loader_words(loader: LoaderCeiling | None) -> str:
    """Return which stage limits the loader, and what that costs; empty if that is little."""
    if loader is None or loader.shorter < _NOTABLE:
        return ""
    return (
        f"With an infinitely fast loader a step would be {format_share(loader.shorter)} shorter: "
        f"{_limit(loader)}."
    )


def loader_rows(loader: LoaderCeiling) -> tuple[list[str], list[list[str]]]:
    """Return the names and the cells of a table of stages, under `HEADS`, and what follows it."""
    rows = [
        [
            format_seconds(stage.seconds),
            f"{stage.at_once:,}",
            rate_words(loader, stage.batches_per_s),
        ]
        for stage in loader.stages
    ]
    rows += [
        ["", "", rate_words(loader, loader.ceiling_per_s)],
        ["", "", rate_words(loader, loader.batches_per_s)],
        ["", "", rate_words(loader, loader.wanted_per_s)],
    ]
    names = [stage.stage for stage in loader.stages]
    return [*names, "all stages", "the run took", "without waiting for it"], rows


def rate_words(loader: LoaderCeiling, batches_per_s: float) -> str:
    """Return a rate in samples per second; in batches where samples were not counted."""
    if loader.samples:
        return f"{significant(batches_per_s * loader.samples)} samples/s"
    return f"{significant(batches_per_s)} batches/s"


def _limit(loader: LoaderCeiling) -> str:
    slowest = next(stage for stage in loader.stages if stage.stage == loader.slowest)
    what = f"{slowest.stage}, {format_seconds(slowest.seconds)} of a batch{_undivided(loader)}"
    if not loader.workers:
        return f"it has no workers, so that the loop itself loads; its slowest stage is {what}"
    each = " on each rank" if loader.ranks > 1 else ""
    delivers = "delivers" if loader.workers == 1 else "deliver"
    workers = f"its {plural(loader.workers, 'worker')}{each} {delivers} at most "
    workers += rate_words(loader, loader.ceiling_per_s)
    wanted = rate_words(loader, loader.wanted_per_s)
    if loader.ceiling_per_s < loader.wanted_per_s:
        return f"{workers}, the steps would take {wanted}; the slowest stage is {what}"
    enough = f"{workers}, enough for the {wanted} of the steps"
    in_turn = [stage for stage in loader.stages if stage.stage in IN_TURN]
    if sum(stage.seconds for stage in in_turn) >= loader.saving_s / 2:
        times = [f"{format_seconds(stage.seconds)} to {stage.stage}" for stage in in_turn]
        return f"{enough}, but the loop waits {' and '.join(times)} each batch"
    return f"{enough}, but batches come unevenly"


def _undivided(loader: LoaderCeiling) -> str:
    """Return what is known where reading and decoding could not be distinguished."""
    if loader.slowest != FETCH or loader.off_core is None:
        return ""
    hint = "--record-io tells reading from decoding)"
    if loader.queued is None:
        off = format_share(loader.off_core)
        return f" (on no core for {off} of it: it waited, as for storage, or lacked a core; {hint}"
    parts = []
    if (waited := loader.off_core - loader.queued) >= _LEAST_TOLD:
        parts.append(f"it waited for {format_share(waited)} of it, as for storage")
    if loader.queued >= _LEAST_TOLD:
        parts.append(f"it lacked a core for {format_share(loader.queued)} of it")
    return f" ({'; '.join([*parts, hint])}"
