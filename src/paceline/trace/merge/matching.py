"""Matches the ranks' events: the calls of one collective on all ranks, a send and its receive.

A collective is identified on all ranks of its group by (group, sequence); the calls of the ranks
that took part are one *instance*. A message is identified on both sides by (group, source,
destination, tag, order): messages are numbered apart from collectives, since only two ranks of the
group know of a message. Groups are the same on two ranks if their names and members are equal.

The calls of an instance must agree. If they name different operations, or different sizes for an
operation that takes equal sizes, the script branched differently on different ranks, or a trace
lost events. Such an instance is reported as a `Mismatch`, and left out of all analyses.

All results are arrays (`matches`); no object is created per event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.trace.format.events import COMPLETION_UNKNOWN, EQUAL_SIZES, Group, Kind
from paceline.trace.merge.keys import collective_keys, row_ids
from paceline.trace.merge.matches import CALL, INSTANCE, MESSAGE, NONE, Matches

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace


def match(ranks: Sequence[RankTrace]) -> Matches:
    """Return the ranks' matched collectives and messages, with times on each rank's own clock."""
    groups, local_groups = _unified_groups(ranks)
    operations: dict[str, int] = {}
    paths = {"": 0}
    calls = [
        _calls(trace_index, rank, local_groups[trace_index], groups, operations, paths)
        for trace_index, rank in enumerate(ranks)
    ]
    messages = [
        _messages(trace_index, rank, local_groups[trace_index], groups)
        for trace_index, rank in enumerate(ranks)
    ]
    joined = np.concatenate(calls)
    by_instance, starts = _join_calls(joined)
    both_sides = np.concatenate(messages)
    numbers = np.array([rank.rank for rank in ranks], dtype=np.int64)
    _join_messages(both_sides, numbers)
    matches = Matches(
        ranks=numbers,
        groups=groups,
        operations=tuple(operations),
        paths=tuple(paths),
        local_groups=local_groups,
        calls=joined,
        call_starts=_starts(calls),
        by_instance=by_instance,
        instance_starts=starts,
        instances=np.zeros(len(starts) - 1, INSTANCE),
        messages=both_sides,
        message_starts=_starts(messages),
    )
    _check_agreement(matches)
    return matches


def _unified_groups(
    ranks: Sequence[RankTrace],
) -> tuple[tuple[Group, ...], tuple[np.ndarray, ...]]:
    """Return the run's groups, and for each rank the run's number of each of the rank's own groups.

    Traces of version 1 do not tell the members of a group. If the traces know the members of
    exactly one group of that name, it is that group. If no trace knows members and all ranks use
    the name, it is the group of all ranks.
    """
    world_size = ranks[0].status.world_size
    known: dict[str, set[tuple[int, ...]]] = {}
    users: dict[str, int] = {}
    for rank in ranks:
        for name in {group.name for group in rank.groups}:
            users[name] = users.get(name, 0) + 1
        for group in rank.groups:
            members = known.setdefault(group.name, set())
            if group.members:
                members.add(group.members)

    def unified(group: Group) -> Group:
        candidates = known[group.name]
        if group.members or not group.name:
            return group
        if len(candidates) == 1:
            return Group(name=group.name, members=next(iter(candidates)))
        if not candidates and users[group.name] == world_size:
            return Group(name=group.name, members=tuple(range(world_size)))
        return group

    numbers: dict[Group, int] = {}
    local = []
    for rank in ranks:
        own = [numbers.setdefault(unified(group), len(numbers)) for group in rank.groups]
        local.append(np.array(own, dtype=np.int32))
    return tuple(numbers), tuple(local)


def _calls(
    trace_index: int,
    rank: RankTrace,
    local_groups: np.ndarray,
    groups: tuple[Group, ...],
    operations: dict[str, int],
    paths: dict[str, int],
) -> np.ndarray:
    events = rank.events_of(Kind.COLLECTIVE)
    rows = np.zeros(len(events), CALL)
    _fill(rows, trace_index, rank, events, local_groups, groups)
    rows["operation"] = _numbers(events["name"], rank, operations)
    with_path = events["tag"] > 0  # the name of a path; 0 where the recorder knows none
    rows["path"][with_path] = _numbers(events["tag"][with_path], rank, paths)
    return rows


def _numbers(names: np.ndarray, rank: RankTrace, known: dict[str, int]) -> np.ndarray:
    """Return the run's number of each of a rank's names; new names are added to `known`."""
    numbers = np.zeros(max(1, len(rank.names)), dtype=np.int32)
    for name in np.unique(names).tolist():
        numbers[name] = known.setdefault(rank.names[name], len(known))
    return np.asarray(numbers[names])


def _messages(
    trace_index: int, rank: RankTrace, local_groups: np.ndarray, groups: tuple[Group, ...]
) -> np.ndarray:
    events = rank.events_of(Kind.SEND, Kind.RECV)
    rows = np.zeros(len(events), MESSAGE)
    _fill(rows, trace_index, rank, events, local_groups, groups)
    rows["tag"] = events["tag"]
    rows["sends"] = events["kind"] == Kind.SEND
    rows["partner"] = NONE
    return rows


def _fill(
    rows: np.ndarray,
    trace_index: int,
    rank: RankTrace,
    events: np.ndarray,
    local_groups: np.ndarray,
    groups: tuple[Group, ...],
) -> None:
    """Fill in the fields that calls and messages share."""
    rows["enter_ns"], rows["exit_ns"] = events["begin_ns"], events["end_ns"]
    for field in ("amount", "sequence", "step", "peer"):
        rows[field] = events[field]
    rows["trace"] = trace_index
    rows["group"] = local_groups[events["group"]]
    rows["timed"] = (events["flags"] & COMPLETION_UNKNOWN) == 0
    if rank.status.version == 1:  # its peers are ranks within a group of unknown members
        known = np.array([bool(group.members) for group in groups], dtype=bool)
        rows["peer"][~known[rows["group"]]] = NONE


def _join_calls(calls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Set each call's instance; return the rows of calls by instance and where instances begin."""
    keys = collective_keys(calls["group"], calls["sequence"])
    _, instances, counts = np.unique(keys, return_inverse=True, return_counts=True)
    calls["instance"] = instances
    by_instance = np.argsort(instances, kind="stable")
    return by_instance, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def _join_messages(messages: np.ndarray, ranks: np.ndarray) -> None:
    """Set each message's partner: the row of its other side."""
    rows = np.flatnonzero(messages["peer"] >= 0)
    named = messages[rows]
    own = ranks[named["trace"]]
    ids = row_ids(
        named["group"],
        np.where(named["sends"], own, named["peer"]),
        np.where(named["sends"], named["peer"], own),
        named["tag"],
        named["sequence"],
    )
    order = np.lexsort((~named["sends"], ids))
    same = ids[order][1:] == ids[order][:-1]
    opposite = named["sends"][order][:-1] & ~named["sends"][order][1:]
    first = np.flatnonzero(same & opposite)
    sends, receives = rows[order[first]], rows[order[first + 1]]
    messages["partner"][sends] = receives
    messages["partner"][receives] = sends


def _check_agreement(matches: Matches) -> None:
    """Set each instance's group, sequence, operation and number of ranks, and whether it agrees.

    An instance agrees if its calls name the same operation, and the same size if the operation
    takes equal sizes, and if no rank took part twice.
    """
    instances, first = matches.instances, matches.instance_starts[:-1]
    if not len(instances):
        return
    calls = matches.calls[matches.by_instance]

    def all_equal(column: str) -> np.ndarray:
        values = calls[column]
        equal: np.ndarray = np.minimum.reduceat(values, first) == np.maximum.reduceat(values, first)
        return equal

    of_equal_sizes = matches.are(EQUAL_SIZES)[calls["operation"][first]]
    twice = np.zeros(len(calls), dtype=bool)
    twice[1:] = (calls["instance"][1:] == calls["instance"][:-1]) & (
        calls["trace"][1:] == calls["trace"][:-1]
    )
    instances["agrees"] = (
        all_equal("operation")
        & (all_equal("amount") | ~of_equal_sizes)
        & ~np.logical_or.reduceat(twice, first)
    )
    for field in ("group", "sequence", "operation", "path"):
        instances[field] = calls[field][first]
    instances["ranks"] = np.diff(matches.instance_starts)


def _starts(tables: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(np.int64)
