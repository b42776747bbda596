"""Describes stragglers, changes of all ranks, and traces that were cut, in plain sentences."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.report.units import format_seconds, format_share, plural, significant
from paceline.trace.format.events import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.analysis.shifts import Shift
    from paceline.trace.format.files import RankTrace

BECAUSE = {
    "data": "because of data loading",
    "compute": "because it computes longer",
    "slow_core": "because its core is slower: its optimizer, with the same work as the others', "
    "takes longer too (a lower clock, or another tenant on the same physical core)",
    "blocked": "because its main thread sleeps outside the data loader (a lock, a sleep, or I/O)",
    "stopped": "because its process is stopped (SIGSTOP, a debugger, or a frozen container)",
    "not_running": "because its threads waited for a core (another process took it)",
    "checkpoint": "because it writes checkpoints",
    "evaluation": "because it evaluates",
    "compilation": "because torch.compile makes code",
    "gc": "because of Python's garbage collection",
}
_SURE = 0.99  # a lower confidence is said


def late_words(late: Straggler, world_size: int, place: str) -> str:
    """Return the sentence about a run's main straggler.

    Args:
        late: the straggler.
        world_size: number of ranks of the run.
        place: where skew shows if it does so in every step, from `sync_place`.
    """
    others = f"rank {1 - late.rank} waits" if world_size == 2 else "the others wait"
    size, steps = f"{significant(late.late_ms, 2)} ms", _range(late)
    how = {
        "persistent": f"{size} late {place} between {steps}",
        "periodic": f"{size} late in every {_ordinal(late.period_steps)} step between {steps}",
        "drifting": f"{_drift(late)} between {steps} ({size} late in the median)",
        "intermittent": f"{size} late now and then, in {format_share(late.late_share)} of the "
        f"steps between {steps}",
        "recurring": f"{size} late {_blocks(late)} between {steps}",
        "rare": f"{format_seconds(late.late_ms / 1e3)} late {brief_steps(late)}",
    }[late.shape]
    these = "this step" if late.first_step == late.last_step else "each of these steps"
    unsure = "" if _is_sure(late) else f" (confidence {format_share(late.confidence)})"
    return (
        f"Rank {late.rank} arrives {how}, {_because(late)}; {others} "
        f"{format_share(late.others_wait)} of {these}{unsure}."
    )


def _because(late: Straggler) -> str:
    """Return the cause; what a rank does between phases may as well be calls for files."""
    if not late.place:
        return BECAUSE[late.cause]
    if late.cause == "compute":
        return f"because it takes longer {at(late.place)}, between the phases of its step"
    return f"because its main thread sleeps {at(late.place)} (a lock, a sleep, or I/O)"


def at(place: str) -> str:
    """Return where a line or function is, as `HostTime.words` has it."""
    return place if place.startswith("near ") else f"at {place}"


def more_words(more: Sequence[Straggler]) -> str:
    """Return the sentence about the stragglers besides the main one."""
    worst = more[0]
    late_by = f"{significant(worst.late_ms, 2)} ms"
    if worst.shape == "rare":
        late_by = format_seconds(worst.late_ms / 1e3)
    text = f"rank {worst.rank} by {late_by} {brief_steps(worst)}, {_because(worst)}"
    if len(more) == 1:
        return f"Also late: {text}."
    return f"{len(more)} other ranks were late too, most of all {text}."


def brief_steps(late: Straggler) -> str:
    """Return in a few words in which steps a rank was late.

    Example: ``in every 20th step of 19 to 299``.
    """
    steps = f"{late.first_step} to {late.last_step}"
    if late.shape == "periodic":
        return f"in every {_ordinal(late.period_steps)} step of {steps}"
    if late.shape == "rare":
        count = round(late.late_share * (late.last_step - late.first_step + 1))
        return f"in step {late.first_step}" if count == 1 else f"in {count} of steps {steps}"
    words = {
        "drifting": "more and more ",
        "intermittent": "now and then ",
        "recurring": f"{_blocks(late)}, ",
    }
    if late.shape == "drifting" and late.slope_ms_per_step < 0:
        words["drifting"] = "less and less "
    return f"{words.get(late.shape, '')}in steps {steps}"


def _blocks(late: Straggler) -> str:
    if late.period_steps:
        return f"in about {late.block_steps} of each {late.period_steps} steps"
    return f"in blocks of about {late.block_steps} steps"


def shift_words(shifts: Sequence[Shift]) -> str:
    """Return the sentence about changes of all ranks within the run; empty without one."""
    if not shifts:
        return ""
    first, last = shifts[0], shifts[-1]
    ends = f"{format_seconds(first.before_ms / 1e3)} to {format_seconds(last.after_ms / 1e3)}"
    if len(shifts) == 1:
        return f"All ranks became {_change(first.factor)} at step {first.step} ({ends} per step)."
    if len(shifts) == 2:
        return (
            f"All ranks became {_change(first.factor)} at step {first.step} and "
            f"{_change(last.factor)} at step {last.step}."
        )
    largest = max(shifts, key=lambda shift: max(shift.factor, 1 / shift.factor))
    return (
        f"The step time of all ranks changed {len(shifts)} times, from {ends}, most of all at step "
        f"{largest.step} ({_change(largest.factor)})."
    )


def cut_words(ranks: Sequence[RankTrace], steps: int, *, failed: bool) -> str:
    """Return the sentence about a trace that lacks a part; empty for a complete one.

    Args:
        ranks: traces of the run.
        steps: number of steps that all ranks completed.
        failed: whether the run is known to have failed: then the failure says why a rank did not
            close its trace, and this sentence how many steps that costs.
    """
    reasons = []
    for rank in ranks:
        lost = plural(rank.status.dropped_count, "event")
        if rank.status.error:
            why = os.strerror(rank.status.error)
            reasons.append(f"rank {rank.rank} could not write all of it ({why}), {lost} are lost")
        elif rank.status.dropped_count:
            reasons.append(f"rank {rank.rank} lost {lost}, which came too fast")
        elif not rank.complete and failed:
            reasons.append(f"that of rank {rank.rank} is truncated{_lost_steps(rank)}")
        elif not rank.complete:
            reasons.append(
                f"rank {rank.rank} has not closed its file (it still runs, or was killed)"
            )
    if not reasons:
        return ""
    more = f", and {plural(len(reasons) - 2, 'other rank')} likewise" if len(reasons) > 2 else ""
    covers = f"steps 0 to {steps - 1}" if steps else "no step"
    if failed and steps and len(ranks) > 1:
        covers += ", which all ranks recorded"
    return f"The trace is incomplete: {'; '.join(reasons[:2])}{more}. What follows covers {covers}."


def _lost_steps(rank: RankTrace) -> str:
    """Return how many steps a trace may lack that the rank had completed, as its header says."""
    written = rank.events_of(Kind.STEP)["step"]
    done = rank.status.step - rank.marks_within_steps  # the header counts marks
    lost = done - (int(written.max()) + 1 if len(written) else 0)
    if lost <= 0:
        return " (what it did last may be missing)"
    which = "step" if lost == 1 else f"{lost:,} steps"
    return f" (its last {which} may be missing)"


def _range(late: Straggler) -> str:
    return f"steps {late.first_step} and {late.last_step}"


def _drift(late: Straggler) -> str:
    slope = f"{significant(abs(late.slope_ms_per_step), 2)} ms"
    if late.slope_ms_per_step < 0:
        return f"late, but {slope} less so in each step"
    return f"later and later, by {slope} more in each step"


def _is_sure(late: Straggler) -> bool:
    """Return whether nothing need be said of chance; results of before have no confidence."""
    return late.confidence == 0.0 or late.confidence >= _SURE


def _change(factor: float) -> str:
    r"""Return a factor of step times in words.

    >>> _change(12.3), _change(0.5)
    ('12x slower', '2.0x faster')
    """
    if factor >= 1:
        return f"{significant(factor, 2)}x slower"
    return f"{significant(1 / factor, 2)}x faster"


def _ordinal(number: int) -> str:
    """Return the ordinal of a number.

    >>> [_ordinal(number) for number in (2, 3, 11, 20, 21)]
    ['2nd', '3rd', '11th', '20th', '21st']
    """
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
