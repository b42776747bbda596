"""How algorithms are put together from parts: one after the other, at the same time, reversed.

A part is a list of transfers whose steps begin at 0. Two identities spare half of the algorithms:

    all_gather = reverse(reduce_scatter)        all_reduce = reduce_scatter, then all_gather
    broadcast  = reverse(reduce)

Reversed in time, the last partial sum that a rank received becomes the first result that it sends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.schedules.schedule import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def then(*parts: Sequence[Transfer]) -> list[Transfer]:
    """Return the parts one after the other."""
    result: list[Transfer] = []
    start = 0
    for part in parts:
        result += [
            Transfer(step + start, source, destination, begin, end, reduce)
            for step, source, destination, begin, end, reduce in part
        ]
        start += length(part)
    return result


def together(parts: Iterable[Sequence[Transfer]]) -> list[Transfer]:
    """Return the parts at the same time; all begin at step 0."""
    merged = [transfer for part in parts for transfer in part]
    return sorted(merged, key=lambda transfer: transfer.step)  # stable: each part keeps its order


def reverse(part: Sequence[Transfer]) -> list[Transfer]:
    """Return the part in reversed time and direction, with overwriting in place of reducing."""
    last = length(part) - 1
    return [
        Transfer(last - step, destination, source, begin, end, reduce=False)
        for step, source, destination, begin, end, _ in reversed(part)
    ]


def length(part: Sequence[Transfer]) -> int:
    """Return the number of steps of a part, whose transfers may be in any order."""
    return max((transfer.step for transfer in part), default=-1) + 1


def split(begin: int, end: int, parts: int) -> list[int]:
    """Return the bounds of `parts` equal blocks: block i is the chunks bounds[i] to bounds[i + 1].

    >>> split(0, 6, 3)
    [0, 2, 4, 6]
    """
    size = (end - begin) // parts
    return [begin + i * size for i in range(parts + 1)]
