"""What the memory of the processes that ranks start, loader workers mostly, did in a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.runs.child_memory import ChildMemory

_LEAST_BYTES = 64 << 20
_LEAST_S = 30.0  # of processes that may have been spawned: what they import is no growth
_LEAST_SHARE = 0.2  # of what they had
_STEADY = 0.15  # of the growth, in the second half: what comes at the start alone is a cache
_COPIED = 0.5  # of the growth, by copies of what was shared
_COPY_ON_WRITE = (
    "Pages that they share with the rank become their own as they touch them (copy-on-write): to "
    "read a Python object writes its count of references. Samples in arrays (NumPy, torch, Arrow) "
    "in place of lists and dicts stay shared."
)


def child_memory_words(found: Sequence[ChildMemory], *, is_idle: bool, loads: bool) -> str:
    """Return what is to be said of the processes that ranks started; empty if it is nothing.

    Args:
        found: what is known of their memory.
        is_idle: whether the run came to its end without a step: these processes may be what trains.
        loads: whether loaders have workers.
    """
    if found and is_idle:
        return (
            f"What the processes that rank {found[0].rank} started did is not recorded: a rank has "
            "one trace. If they train, start them as ranks (paceline run -n)."
        )
    who = " (its loader's workers)" if loads else ""
    grown = [memory for memory in found if _grows(memory) and (loads or memory.seconds >= _LEAST_S)]
    if grown:
        most = max(grown, key=lambda memory: memory.growth_bytes)
        others = f", and so does that of {_other_ranks(grown)}" if grown[1:] else ""
        sentence = (
            f"The memory of {_processes(most)}{who} grows: by {format_bytes(most.growth_bytes)} in "
            f"{format_seconds(most.seconds)}, to {format_bytes(most.last_private_bytes)}{others}."
        )
        copied = most.copied_bytes >= _COPIED * most.growth_bytes
        return f"{sentence} {_COPY_ON_WRITE}" if copied else sentence
    copying = [memory for memory in found if memory.copied_bytes >= _LEAST_BYTES]
    if not copying:
        return ""
    most = max(copying, key=lambda memory: memory.copied_bytes)
    others = f", and so have those of {_other_ranks(copying)}" if copying[1:] else ""
    return (
        f"{_processes(most).capitalize()}{who} have copied {format_bytes(most.copied_bytes)} of "
        f"the rank's memory, to {format_bytes(most.last_private_bytes)} of their own{others}. "
        f"{_COPY_ON_WRITE}"
    )


def _processes(memory: ChildMemory) -> str:
    return f"rank {memory.rank}'s {plural(memory.processes, 'process')}"


def _other_ranks(found: Sequence[ChildMemory]) -> str:
    return plural(len(found) - 1, "other rank")


def _grows(memory: ChildMemory) -> bool:
    return (
        memory.growth_bytes >= max(_LEAST_BYTES, _LEAST_SHARE * memory.private_bytes)
        and memory.steady >= _STEADY
    )
