"""What the memory of loader workers did in a run, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.report.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.runs.child_memory import ChildMemory

_LEAST_BYTES = 64 << 20
_LEAST_SHARE = 0.2  # of what they had
_STEADY = 0.15  # of the growth, in the second half: what comes at the start alone is a cache
_COPIED = 0.5  # of the growth, by which shared memory shrank


def child_memory_words(found: Sequence[ChildMemory]) -> str:
    """Return whether loader workers' memory grew, and why; empty if it did not."""
    grown = [memory for memory in found if _is_notable(memory)]
    if not grown:
        return ""
    most = max(grown, key=lambda memory: memory.growth_bytes)
    others = f", and so does that of {plural(len(grown) - 1, 'other rank')}" if grown[1:] else ""
    sentence = (
        f"The memory of rank {most.rank}'s {plural(most.processes, 'process')} (its "
        f"loader's workers) grows: by {format_bytes(most.growth_bytes)} in "
        f"{format_seconds(most.seconds)}, to {format_bytes(most.last_private_bytes)}{others}."
    )
    if most.shared_bytes - most.last_shared_bytes < _COPIED * most.growth_bytes:
        return sentence
    return (
        f"{sentence} Pages that they share with the rank become their own as they touch them "
        "(copy-on-write): to read a Python object writes its count of references. Samples in "
        "arrays (NumPy, torch, Arrow) in place of lists and dicts stay shared."
    )


def _is_notable(memory: ChildMemory) -> bool:
    return (
        memory.growth_bytes >= max(_LEAST_BYTES, _LEAST_SHARE * memory.private_bytes)
        and memory.steady >= _STEADY
    )
