"""Which share of its cores each task of a node gets, and how ranks are named in messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def core_shares(bindings: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Return the share of its node's cores that each task gets, as (index, count).

    Tasks of a node that may all use the same cores have not been bound: they share them. A task
    with cores of its own keeps them all.

    Args:
        bindings: host and allowed cores of each task, in the order of their numbers.

    >>> core_shares([("a", (0, 1)), ("a", (0, 1)), ("b", (0,)), ("b", (1,))])
    [(0, 2), (1, 2), (0, 1), (0, 1)]
    """
    counts: dict[tuple[str, tuple[int, ...]], int] = {}
    indices = []
    for binding in bindings:
        indices.append(counts.get(binding, 0))
        counts[binding] = indices[-1] + 1
    return [(index, counts[binding]) for index, binding in zip(indices, bindings, strict=True)]


def name_ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    """Return ``rank 1, 2, 3``, cut short when there are many; `noun` says what is numbered.

    >>> name_ranks(range(12))
    'rank 0, 1, 2, 3, 4, 5, 6, 7 and 4 more'
    """
    shown = ", ".join(map(str, ranks[:8]))
    return f"{noun} {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
