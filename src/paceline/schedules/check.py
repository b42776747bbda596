"""Proves that a Schedule performs its operation, before it runs.

No Schedule can deadlock (see `paceline.schedules.schedule`), as long as each transfer has two ends
and steps do not fall, which is checked first. Then the Schedule is executed on symbols: the state
of a chunk on a rank is the set of ranks whose data it holds, as the bits of an integer::

    all_reduce of 2 ranks, 1 chunk       rank 0    rank 1
    begin                                {0}       {1}
    step 0: 1 -> 0, reduce               {0, 1}    {1}
    step 1: 0 -> 1                       {0, 1}    {0, 1}      both hold each rank's data once

Refused is what would make a result wrong, or depend on timing:

- reducing data of a rank that the chunk already holds, or of a chunk that holds nothing;
- sending a chunk that holds nothing (before a broadcast has reached the rank);
- overwriting a chunk in the step in which it is sent, or with another message of the same step;
- receiving, to be reduced, a range that overlaps a range sent in the same step without being equal
  to it: long messages are exchanged in segments, and the two ranges' segments would not match;
- a message that brings its destination nothing.

Cost: one integer operation per transfer and chunk.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from paceline.core.errors import InvalidSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.schedules.schedule import Schedule, Transfer

NOTHING = 0
State = list[list[int]]  # by rank and chunk: the ranks whose data it holds, as bits


def check(schedule: Schedule) -> None:
    """Return if the schedule is correct for every message and timing.

    Raises:
        InvalidSchedule: it is not; names the step, the rank and the chunk.
    """
    _check_transfers(schedule)
    state = [[_initial(schedule, r, c) for c in range(schedule.chunks)] for r in _ranks(schedule)]
    for _, transfers in groupby(schedule.transfers, key=lambda transfer: transfer.step):
        step = list(transfers)
        _check_ranges(schedule, step)
        _execute(schedule, state, step)
    for rank in _ranks(schedule):
        for chunk in range(schedule.chunks):
            wanted = _final(schedule, rank, chunk)
            if wanted is not None and state[rank][chunk] != wanted:
                raise _error(
                    schedule,
                    f"at the end rank {rank} holds {_names(state[rank][chunk])} in chunk {chunk}, "
                    f"not {_names(wanted)}",
                )


def _ranks(schedule: Schedule) -> range:
    return range(schedule.ranks)


def _initial(schedule: Schedule, rank: int, chunk: int) -> int:
    """Return what a chunk holds when the operation begins."""
    if schedule.operation == "broadcast":
        return 1 << rank if rank == schedule.root else NOTHING
    if schedule.operation == "all_gather":
        return 1 << rank if chunk in schedule.owned(rank) else NOTHING
    return 1 << rank


def _final(schedule: Schedule, rank: int, chunk: int) -> int | None:
    """Return what a chunk must hold in the end; None: anything."""
    everybody = (1 << schedule.ranks) - 1
    if schedule.operation == "all_reduce":
        return everybody
    if schedule.operation == "reduce":
        return everybody if rank == schedule.root else None
    if schedule.operation == "reduce_scatter":
        return everybody if chunk in schedule.owned(rank) else None
    if schedule.operation == "all_gather":
        return 1 << chunk // (schedule.chunks // schedule.ranks)
    assert schedule.root is not None
    return 1 << schedule.root


def _check_transfers(schedule: Schedule) -> None:
    """Refuse what is no message between two ranks, and steps that fall."""
    previous = 0
    for transfer in schedule.transfers:
        step, source, destination, begin, end, _ = transfer
        if step < previous:
            raise _error(schedule, f"step {step} comes after step {previous}")
        previous = step
        if source == destination:
            raise _error(schedule, f"step {step}: rank {source} sends to itself")
        for rank in (source, destination):
            if not 0 <= rank < schedule.ranks:
                raise _error(schedule, f"step {step}: there is no rank {rank}")
        if not 0 <= begin < end <= schedule.chunks:
            raise _error(
                schedule,
                f"step {step}: rank {source} sends chunks {begin} to {end} of {schedule.chunks}",
            )


def _check_ranges(schedule: Schedule, step: Sequence[Transfer]) -> None:
    """Refuse ranges that rank by rank are in each other's way within the step."""
    sends: dict[int, list[Transfer]] = {}
    receives: dict[int, list[Transfer]] = {}
    for transfer in step:
        sends.setdefault(transfer.source, []).append(transfer)
        receives.setdefault(transfer.destination, []).append(transfer)
    for rank, received in receives.items():
        for i, transfer in enumerate(received):
            for other in sends.get(rank, ()):
                same = (transfer.begin, transfer.end) == (other.begin, other.end)
                if _overlap(transfer, other) and not (transfer.reduce and same):
                    raise _range_error(schedule, transfer, "that it sends in the same step")
            for other in received[:i]:
                if _overlap(transfer, other) and not (transfer.reduce and other.reduce):
                    raise _range_error(schedule, transfer, "that it receives twice in the step")


def _overlap(first: Transfer, second: Transfer) -> bool:
    return first.begin < second.end and second.begin < first.end


def _range_error(schedule: Schedule, transfer: Transfer, why: str) -> InvalidSchedule:
    step, source, destination, begin, end, reduce = transfer
    verb = "reduces into" if reduce else "overwrites"
    return _error(
        schedule,
        f"step {step}: rank {destination} {verb} chunks {begin} to {end}, received from rank "
        f"{source}, some of {why}",
    )


def _execute(schedule: Schedule, state: State, step: Sequence[Transfer]) -> None:
    """Change `state` as the transfers of a step do: all read it before any of them writes."""
    sent = [state[transfer.source][transfer.begin : transfer.end] for transfer in step]
    for transfer, values in zip(step, sent, strict=True):
        number, source, destination, begin, end, reduce = transfer
        held = state[destination][begin:end]
        if NOTHING in values:
            chunk = begin + values.index(NOTHING)
            raise _error(
                schedule, f"step {number}: rank {source} sends chunk {chunk} but has no data in it"
            )
        if held == values:
            raise _error(
                schedule,
                f"step {number}: rank {destination} already holds what rank {source} sends it in "
                f"chunks {begin} to {end}",
            )
        if reduce:
            _check_disjoint(schedule, transfer, held, values)
            values = [old | new for old, new in zip(held, values, strict=True)]
        state[destination][begin:end] = values


def _check_disjoint(
    schedule: Schedule, transfer: Transfer, held: Sequence[int], values: Sequence[int]
) -> None:
    """Refuse to reduce into nothing, or data that are there already."""
    for chunk, (old, new) in enumerate(zip(held, values, strict=True), transfer.begin):
        where = f"step {transfer.step}: rank {transfer.destination}"
        if old == NOTHING:
            raise _error(schedule, f"{where} reduces into chunk {chunk} but has no data in it")
        if old & new:
            raise _error(
                schedule,
                f"{where} already holds {_names(old & new)} in chunk {chunk}, and reduces "
                f"it again, received from rank {transfer.source}",
            )


def _names(ranks: int) -> str:
    """Return the ranks whose bits are set, in words.

    >>> _names(0), _names(4), _names(5)
    ('nothing', 'data of rank 2', 'data of ranks 0, 2')
    """
    names = [str(rank) for rank in range(ranks.bit_length()) if ranks >> rank & 1]
    if not names:
        return "nothing"
    return f"data of rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _error(schedule: Schedule, what: str) -> InvalidSchedule:
    return InvalidSchedule(
        what,
        where=f"{schedule.algorithm} {schedule.operation} of {schedule.ranks} ranks",
        fix="Correct the generator, or take a schedule of paceline.schedules",
    )
