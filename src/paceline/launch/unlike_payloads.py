"""Compares what ranks gave to the collective that they were in when a run failed.

Gloo does not: a rank that receives more than it expects is aborted, or raises, and the others lose
it. What each rank gave to its last collective stands in the first page of its trace, which is there
whatever ended the rank.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import PacelineError
from paceline.launch.rendezvous.shares import name_ranks
from paceline.trace.format.files import read_tables
from paceline.trace.format.progress import read_live_header

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# To which all ranks give equally much; `gather`, `scatter` and `all_to_all` need not.
_EQUAL = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"})
_MOST_RANKS = 1024


class _Given(NamedTuple):
    """What a rank gave to a collective: bytes, and their type."""

    amount: int
    element: str

    def __str__(self) -> str:
        return f"{self.amount:,} bytes of {self.element or 'an unknown type'}"


def unlike_payloads(run: Path) -> str:
    """Return in words that ranks gave unlike tensors to a collective; empty if none is known.

    Compared are ranks whose last collective of a group is the same one. Where they differ in bytes
    or types, those of the fewest are named first.
    """
    places: dict[tuple[str, tuple[int, ...]], dict[int, tuple[int, str, _Given]]] = {}
    for rank, group, place in _last_collectives(run):
        places.setdefault(group, {})[rank] = place
    for (name, _), by_rank in sorted(places.items()):
        last = max(sequence for sequence, _, _ in by_rank.values())
        there = {rank: place for rank, place in by_rank.items() if place[0] == last}
        words = {word for _, word, _ in there.values()}
        given: dict[_Given, list[int]] = collections.defaultdict(list)
        for rank, (_, _, payload) in sorted(there.items()):
            if payload.amount:
                given[payload].append(rank)
        if len(words) == 1 and words <= _EQUAL and len(given) > 1:
            (word,) = words
            fewest = sorted(given.items(), key=lambda item: (len(item[1]), item[1]))
            parts = [f"{name_ranks(ranks)} gave {payload}" for payload, ranks in fewest]
            return f"to {word} {last} of {name}, {' and '.join(parts)}"
    return ""


def _last_collectives(
    run: Path,
) -> Iterator[tuple[int, tuple[str, tuple[int, ...]], tuple[int, str, _Given]]]:
    """Yield of each rank and group the last collective: its sequence, name and payload."""
    for path in sorted((run / "trace").glob("rank-*.trace"))[:_MOST_RANKS]:
        try:
            header, tables = read_live_header(path), read_tables(path)
        except (OSError, PacelineError):
            continue
        for entry in header.groups:
            names, groups = max(entry.name, entry.element), entry.group
            if names >= len(tables.names) or groups >= len(tables.groups):
                continue  # they were not written any more
            group = tables.groups[entry.group]
            given = _Given(entry.amount, tables.names[entry.element])
            place = (entry.entered, tables.names[entry.name], given)
            yield header.status.rank, (group.name, group.members), place
