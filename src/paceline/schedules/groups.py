"""Ranks in groups: the hosts of a job, or groups that an algorithm makes of neighbouring ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def groups_of(ranks: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Return groups of `size` neighbouring ranks; the last one may be smaller.

    >>> groups_of(5, 2)
    ((0, 1), (2, 3), (4,))
    """
    if ranks < 1 or size < 1:
        raise UsageError(
            f"{ranks} ranks cannot be put into groups of {size}", fix="Give 1 or more of both"
        )
    return tuple(tuple(range(i, min(i + size, ranks))) for i in range(0, ranks, size))


def check_groups(groups: Sequence[Sequence[int]]) -> int:
    """Return the number of ranks in `groups`, such as the hosts of a job.

    Raises:
        UsageError: a group is empty, or not each rank from 0 on is in exactly one group.
    """
    ranks = sorted(rank for group in groups for rank in group)
    if not ranks or not all(groups) or ranks != list(range(len(ranks))):
        raise UsageError(
            f"groups must hold each rank from 0 on once, got {[list(group) for group in groups]}",
            fix="Number the ranks of the group from 0, and put each into one group or host",
        )
    return len(ranks)
