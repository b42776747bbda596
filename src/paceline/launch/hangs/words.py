"""Says of a hang in one sentence which rank it is, what it did last, and where it is."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.launch.hangs.detector import INPUT, MESSAGE, HangKind, RankSample, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

_FRAME = re.compile(r"^(?P<name>.*) \((?P<file>[^()]*?)(?P<line>:\d+)?\)$")
_RECORDER = re.compile(r"paceline/(launch|trace)/")
_LOCK = re.compile(r"^wchan: .*futex")
_LIBRARY = re.compile(
    r"\.so(\.|$)|(site|dist)-packages/|/lib/python3|^<|paceline/(launch|trace|store|training)/|/torch/"
)


def detail_of(
    verdict: Verdict,
    sample: RankSample,
    stack: Sequence[str],
    children: Sequence[Sequence[str]] = (),
) -> str:
    """Return the verdict as a clause about its rank, without the rank.

    Args:
        verdict: on a rank that hangs.
        sample: the last one of this rank.
        stack: of its main thread, the innermost frame first.
        children: stacks of the processes that it waits for.
    """
    waiting = _ranks(verdict.waiting)
    have = "has" if len(verdict.waiting) == 1 else "have"
    call = _call(verdict)
    match verdict.kind:
        case HangKind.MISMATCHED:
            which = f"number {verdict.sequence} of {verdict.group[0]}"
            clause = (
                f"it entered {verdict.own_name} as {which}, where {waiting} {have} entered "
                f"{verdict.name}: collectives must come in the same order on all ranks"
            )
        case HangKind.CIRCLE:
            clause = (
                f"{waiting} {have} waited {verdict.waited_s:.0f} s for it in {call}, and it waits "
                "elsewhere for them: collectives and messages must come in the same order on all "
                "ranks"
            )
        case _ if verdict.group == INPUT:
            what = " for a batch" if sample.in_input else ""
            clause = f"its loop has waited {verdict.waited_s:.0f} s{what}"
        case _:
            clause = f"{waiting} {have} waited {verdict.waited_s:.0f} s for it in {call}"
    parts = [clause]
    if verdict.kind is not HangKind.MISMATCHED and verdict.group != INPUT:
        parts.append(doing(sample))
    if verdict.kind is HangKind.STOPPED:
        parts.append("it is stopped, by SIGSTOP or a frozen container")
    if verdict.kind is HangKind.GONE:
        parts.append("it has left its loop, or ended")
    if sample.lost_child:
        parts.append(sample.lost_child)
    if stuck := _places_of_children(children):
        parts.append(stuck if verdict.group == INPUT else f"it waits for a batch, and {stuck}")
    elif stack:
        parts.append(f"it is {_place(stack)}")
    return "; ".join(parts)


def _places_of_children(children: Sequence[Sequence[str]]) -> str:
    """Return where the processes are that execute the script; those that wait for work do not."""
    counts = Counter(_place(stack) for stack in children if any(map(_is_of_the_script, stack)))
    if not counts:
        return ""
    place, count = counts.most_common(1)[0]
    who = "a loader worker is" if count == 1 else f"{count} loader workers are"
    return f"{who} {place}"


def _is_of_the_script(frame: str) -> bool:
    found = _FRAME.match(frame)
    return found is not None and not _LIBRARY.search(found["file"])


def busy_words(verdict: Verdict) -> str:
    """Return a sentence about a rank that keeps others waiting beyond the deadline and works."""
    return (
        f"rank {verdict.rank} works on while {_ranks(verdict.waiting)} waited "
        f"{verdict.waited_s:.0f} s for it in {_call(verdict)}: it may be slow, and is not stopped"
    )


def doing(sample: RankSample) -> str:
    """Return in words which collective or message a rank is in, or has left last."""
    message = sample.message
    if message is not None and message.is_open:
        peer = f" with rank {message.peer}" if message.peer >= 0 else ""
        return f"it is in {message.name or 'a message'}{peer}"
    last = max(sample.groups.items(), key=lambda item: item[1].entered, default=None)
    for group, place in sample.groups.items():
        if place.left < place.entered:
            name = place.names.get(place.entered, "a collective")
            return f"it is in {name} {place.entered} of {group[0]}"
    if last is None:
        return "it has entered no collective"
    group, place = last
    return f"its last was {place.names.get(place.entered, 'number')} {place.entered} of {group[0]}"


def _call(verdict: Verdict) -> str:
    if verdict.group == MESSAGE:
        return verdict.name or "a message"
    return f"{verdict.name or 'collective'} {verdict.sequence} of {verdict.group[0]}"


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "no rank"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) <= 4:
        return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
    return f"{len(ranks)} ranks (first: {ranks[0]})"


def _place(stack: Sequence[str]) -> str:
    """Return the innermost frame, and the innermost one of the script if it is another one."""
    frames = [found for frame in stack if (found := _FRAME.match(frame))]
    waits = ", waiting for a lock" if any(_LOCK.search(line) for line in stack) else ""
    frames = [found for found in frames if not _RECORDER.search(found["file"])]
    if not frames:  # the kernel's words
        return f"in the kernel ({', '.join(stack)})"
    own = [found for found in frames if not _LIBRARY.search(found["file"])]
    places = [_frame(frames[0])]
    if own and own[0] is not frames[0]:
        places.append(f"called by {_frame(own[0])}")
    return "in " + ", ".join(places) + waits


def _frame(found: re.Match[str]) -> str:
    return f"{found['name']} ({Path(found['file']).name}{found['line'] or ''})"
