"""Each generator's schedules are right: proved on symbols, and executed on data by threads."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.schedule_cases import RANKS, expected, inputs, interleaved, replay, schedules

from paceline.collectives.executor import ScheduleExecutor
from paceline.collectives.transports.threads import ThreadGroup
from paceline.core.errors import InvalidSchedule
from paceline.schedules import (
    Schedule,
    Transfer,
    chain_binomial,
    check,
    halving_doubling,
    ring,
    two_level_leader,
)

SIZES = (0, 1, 13, 4099)
SCRATCH_BYTES = 4096  # less than most messages of the largest size: they go in segments
TIMEOUT_S = 60
SMALL = [schedule for ranks in (2, 3, 4, 6) for schedule in schedules(ranks)]
DRAWN = settings(max_examples=examples(150))


@pytest.mark.parametrize("ranks", RANKS)
def test_each_schedule_is_proved(ranks):
    for schedule in schedules(ranks):
        check(schedule)
        assert schedule.ranks == ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_each_schedule_gives_the_reference_result(ranks):
    """Over rendezvous sends: whatever relies on buffered messages would end at the deadline."""
    cases = schedules(ranks)

    def run_all(transport):
        results = []
        for schedule in cases:
            executor = ScheduleExecutor(schedule, transport, scratch_bytes=SCRATCH_BYTES)
            for size in SIZES:
                buffer = inputs(ranks, size)[transport.rank]
                executor.run(buffer, timeout_s=TIMEOUT_S)
                results.append(buffer)
        return results

    results = ThreadGroup(ranks).run(run_all)
    for rank, buffers in enumerate(results):
        remaining = iter(buffers)
        for schedule in cases:
            for size in SIZES:
                place, wanted = expected(schedule, inputs(ranks, size), rank)
                assert np.array_equal(next(remaining)[place], wanted), (schedule.algorithm, size)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    shuffle=st.randoms(use_true_random=False),
    chunks=st.integers(1, 6),
    data=st.data(),
)
def test_hosts_of_any_sizes_and_order_are_served(sizes, shuffle, chunks, data):
    ranks = list(range(sum(sizes)))
    shuffle.shuffle(ranks)
    hosts = [[ranks.pop() for _ in range(size)] for size in sizes]
    check(two_level_leader(hosts, across=data.draw(st.sampled_from(["ring", "halving"]))))
    root = data.draw(st.integers(0, sum(sizes) - 1))
    for operation in ("reduce", "broadcast"):
        check(chain_binomial(operation, hosts, root=root, chunks=chunks))


@given(st.integers(1, 40))
@settings(max_examples=examples(30))
def test_ring_and_halving_serve_any_number_of_ranks(ranks):
    for make in (ring, halving_doubling):
        check(make("reduce_scatter", ranks))
        check(make("all_reduce", ranks))


@given(st.sampled_from(SMALL), st.data())
@DRAWN
def test_a_dropped_transfer_is_refused(schedule, data):
    transfers = list(schedule.transfers)
    del transfers[_index(schedule, data)]
    _assert_refused(schedule, transfers)


@given(st.sampled_from(SMALL), st.data())
@DRAWN
def test_a_doubled_transfer_is_refused(schedule, data):
    """In the same step, and in a step of its own right after it."""
    transfers = list(schedule.transfers)
    index = _index(schedule, data)
    transfer = transfers[index]
    _assert_refused(schedule, [*transfers[: index + 1], transfer, *transfers[index + 1 :]])
    later = [t._replace(step=t.step + 1) for t in transfers if t.step > transfer.step]
    until = [t for t in transfers if t.step <= transfer.step]
    _assert_refused(schedule, [*until, transfer._replace(step=transfer.step + 1), *later])


@given(st.sampled_from(SMALL), st.data())
@DRAWN
def test_transfers_that_change_places_are_refused(schedule, data):
    """Two of which the second sends on what the first brought."""
    transfers = list(schedule.transfers)
    first = transfers[_index(schedule, data)]
    dependent = [
        t
        for t in transfers
        if t.source == first.destination
        and t.step > first.step
        and t.begin < first.end
        and first.begin < t.end
    ]
    assume(dependent)
    second = data.draw(st.sampled_from(dependent))
    swapped = {first: first._replace(step=second.step), second: second._replace(step=first.step)}
    moved = sorted((swapped.get(t, t) for t in transfers), key=lambda t: t.step)
    _assert_refused(schedule, moved)


def test_the_error_names_rank_step_and_chunk():
    good = ring("all_reduce", 4)
    missing = dataclasses.replace(good, transfers=good.transfers[:-1])
    with pytest.raises(InvalidSchedule) as caught:
        check(missing)
    assert caught.value.what == (
        "at the end rank 0 holds data of rank 0 in chunk 3, not data of ranks 0, 1, 2, 3"
    )
    twice = dataclasses.replace(good, transfers=(good.transfers[0], *good.transfers))
    with pytest.raises(InvalidSchedule) as caught:
        check(twice)
    assert caught.value.what == (
        "step 0: rank 1 already holds data of rank 0 in chunk 3, and reduces it again, received "
        "from rank 0"
    )
    assert caught.value.where == "ring all_reduce of 4 ranks"


@given(st.sampled_from(SMALL), st.data())
@DRAWN
def test_a_wrong_address_is_refused(schedule, data):
    """Another destination, another source, another range of chunks.

    Now and then that gives another schedule which is right, for instance if the other source holds
    the same data: what the checker accepts must then give the reference result.
    """
    transfers = list(schedule.transfers)
    index = _index(schedule, data)
    transfer = transfers[index]
    ends = {transfer.source, transfer.destination}
    changes = [{"destination": transfer.source}, {"destination": schedule.ranks}, {"source": -1}]
    changes += [{"end": schedule.chunks + 1}, {"begin": transfer.end}]
    for rank in set(range(schedule.ranks)) - ends:
        changes += [{"destination": rank}, {"source": rank}]
    if transfer.end - transfer.begin > 1:
        changes.append({"end": transfer.end - 1})
    change = data.draw(st.sampled_from(changes))
    wrong = transfer._replace(**change)
    _assert_refused_or_right(schedule, [*transfers[:index], wrong, *transfers[index + 1 :]])


@given(st.sampled_from(SMALL), st.data())
@DRAWN
def test_reducing_and_overwriting_cannot_be_confused(schedule, data):
    transfers = list(schedule.transfers)
    index = _index(schedule, data)
    wrong = transfers[index]._replace(reduce=not transfers[index].reduce)
    _assert_refused(schedule, [*transfers[:index], wrong, *transfers[index + 1 :]])


@given(st.sampled_from([s for s in SMALL if s.ranks < 4]))
def test_a_schedule_survives_json(schedule):
    read = Schedule.from_text(schedule.to_text())
    assert read == schedule
    assert all(isinstance(transfer, Transfer) for transfer in read.transfers)


def test_interleaved_hosts_hold_each_rank_once():
    assert interleaved(5, 2) == ((0, 3), (1, 4), (2,))


def _index(schedule, data):
    assume(schedule.transfers)
    return data.draw(st.integers(0, len(schedule.transfers) - 1))


def _assert_refused(schedule, transfers):
    with pytest.raises(InvalidSchedule, match=r"rank|step"):
        check(dataclasses.replace(schedule, transfers=tuple(transfers)))


def _assert_refused_or_right(schedule, transfers):
    changed = dataclasses.replace(schedule, transfers=tuple(transfers))
    try:
        check(changed)
    except InvalidSchedule:
        return
    buffers = inputs(schedule.ranks, 5 * schedule.chunks)
    for rank, buffer in enumerate(replay(changed, buffers)):
        place, wanted = expected(schedule, buffers, rank)
        assert np.array_equal(buffer[place], wanted)
