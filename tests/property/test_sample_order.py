"""The order of samples: a permutation whatever is asked, uniform, and the same for all ranks."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.errors import UsageError
from paceline.store.feed.order import SampleOrder
from paceline.store.feed.sampler import RankBatches

WORLDS = (1, 2, 3, 4, 8)

orders = st.builds(
    SampleOrder,
    sample_count=st.integers(0, 3000),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**40),
    shuffle=st.sampled_from(["global", "block", "none"]),
    block_samples=st.integers(1, 100),
    window_blocks=st.integers(1, 20),
)


def whole(order):
    return order.samples(np.arange(order.sample_count))


# --- one order -----------------------------------------------------------------------------------


@given(orders)
def test_every_sample_comes_exactly_once(order):
    assert np.array_equal(np.sort(whole(order)), np.arange(order.sample_count))


@given(orders, st.data())
def test_a_position_alone_decides_the_sample(order, data):
    if order.sample_count:
        any_position = st.integers(0, order.sample_count - 1)
        positions = np.array(data.draw(st.lists(any_position, max_size=50)), np.int64)
        assert np.array_equal(order.samples(positions), whole(order)[positions])


@given(st.integers(2, 2**62), st.data())
@settings(max_examples=examples(30))
def test_large_sets_cost_no_memory_and_stay_in_range(count, data):
    order = SampleOrder(sample_count=count, shuffle=data.draw(st.sampled_from(["global", "block"])))
    positions = np.unique(data.draw(st.lists(st.integers(0, count - 1), max_size=200)))
    found = order.samples(positions)
    assert len(np.unique(found)) == len(positions)
    assert not len(found) or (found.min() >= 0 and found.max() < count)


def test_more_positions_than_are_computed_at_once():
    order = SampleOrder(sample_count=150_001, seed=2, shuffle="block")
    assert np.array_equal(np.sort(whole(order)), np.arange(150_001))


def test_the_order_never_changes_between_versions():
    """A checkpoint's position means what it meant: whoever changes this gives it a new version."""
    first = {
        shuffle: SampleOrder(
            sample_count=1000, seed=7, epoch=3, shuffle=shuffle, block_samples=10, window_blocks=5
        )
        .samples([0, 1, 2, 500, 999])
        .tolist()
        for shuffle in ("global", "block", "none")
    }
    assert first == GOLDEN


GOLDEN = {
    "block": [519, 515, 670, 364, 457],
    "global": [226, 886, 89, 936, 771],
    "none": [0, 1, 2, 500, 999],
}


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_seeds_and_epochs_give_orders_that_have_nothing_in_common(shuffle):
    order = SampleOrder(sample_count=5000, shuffle=shuffle, block_samples=5, window_blocks=10)
    others = [dataclasses.replace(order, seed=seed) for seed in range(1, 6)]
    others += [dataclasses.replace(order, epoch=epoch) for epoch in range(1, 6)]
    for one, other in itertools.combinations([order, *others], 2):
        # Two random permutations agree in one place on average; in 12, once in 10^9 times.
        assert np.count_nonzero(whole(one) == whole(other)) < 12


# --- randomness: fixed seeds, and limits that chance passes once in more than 10^5 times ---------


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_all_permutations_of_a_small_set_are_equally_frequent(count):
    draws = 2400
    seen = Counter(
        tuple(whole(SampleOrder(sample_count=count, seed=seed)).tolist()) for seed in range(draws)
    )
    kinds = list(itertools.permutations(range(count)))
    expected = draws / len(kinds)
    chi_square = sum((seen[kind] - expected) ** 2 / expected for kind in kinds)
    degrees = len(kinds) - 1
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5 + 15


@pytest.mark.parametrize(
    ("count", "shuffle"),
    [(50, "global"), (64, "global"), (200, "global"), (50, "block"), (200, "block")],
)
def test_every_sample_is_equally_frequent_at_every_position(count, shuffle):
    draws = 1000 if shuffle == "global" else 250
    table = np.zeros((count, count))
    order = SampleOrder(sample_count=count, shuffle=shuffle, block_samples=3, window_blocks=4)
    positions = np.arange(count)
    for epoch in range(draws):
        table[positions, dataclasses.replace(order, epoch=epoch).samples(positions)] += 1
    chi_square = ((table - draws / count) ** 2 / (draws / count)).sum()
    expected = count * (count - 1)  # of a random permutation: count^2 cells of this variance
    spread = 6 if shuffle == "global" else 12  # samples of a window come together
    assert abs(chi_square - expected) < spread * (2 * expected) ** 0.5


def test_neighbours_do_not_stay_neighbours():
    order = SampleOrder(sample_count=20_000, seed=1)
    steps = np.diff(whole(order)) % 20_000
    counts = np.bincount(steps // 400, minlength=50)
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 49 + 6 * 98**0.5


# --- what the shuffle by blocks promises to storage ----------------------------------------------


def pieces_of(samples, count):
    """Return how many stretches of neighbours the samples form; the last and first are two."""
    held = np.zeros(count + 1, np.int8)
    held[samples] = 1
    return int(np.count_nonzero(np.diff(held, prepend=0) == 1))


@given(st.integers(1, 3000), st.integers(1, 60), st.integers(1, 12), st.integers(0, 2**32))
def test_a_window_holds_whole_blocks_and_each_is_read_once(count, block, window, seed):
    order = SampleOrder(
        sample_count=count, seed=seed, shuffle="block", block_samples=block, window_blocks=window
    )
    samples, width = whole(order), block * window
    pieces = 0
    for begin in range(0, count, width):
        inside = pieces_of(samples[begin : begin + width], count)
        assert inside <= window + 1  # one block may lie across the end
        pieces += inside
    assert pieces <= -(-count // block) + 1


@given(
    st.integers(1, 2000),
    st.integers(1, 60),
    st.integers(1, 12),
    st.integers(1, 500),
    st.integers(1, 20_000),
)
def test_storage_fetches_no_more_than_the_bound(count, block, window, sample_bytes, unit_bytes):
    """Fetch whole units, forget everything at the end of each window, and count."""
    order = SampleOrder(
        sample_count=count, shuffle="block", block_samples=block, window_blocks=window
    )
    samples, width, fetched = whole(order), block * window, 0
    for begin in range(0, count, width):
        inside = np.sort(samples[begin : begin + width])
        first = inside * sample_bytes // unit_bytes
        last = ((inside + 1) * sample_bytes - 1) // unit_bytes
        first[1:] = np.maximum(first[1:], last[:-1] + 1)  # the unit that two samples share
        fetched += int((last - first + 1).sum()) * unit_bytes
    assert fetched <= order.fetch_bound(sample_bytes, unit_bytes) * count * sample_bytes * 1.000001
    scattered = dataclasses.replace(order, shuffle="global")
    if block > 1 and count > 2 * block:
        assert order.fetch_bound(sample_bytes, unit_bytes) < scattered.fetch_bound(
            sample_bytes, unit_bytes
        )


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"shuffle": "best"}, "best"),
        ({"sample_count": -1}, "sample_count"),
        ({"epoch": -1}, "epoch"),
        ({"block_samples": 0}, "block_samples"),
        ({"window_blocks": 0}, "window_blocks"),
    ],
)
def test_an_impossible_order_is_refused(wrong, word):
    with pytest.raises(UsageError, match=word):
        SampleOrder(**{"sample_count": 10, **wrong})


@pytest.mark.parametrize("positions", [[-1], [10], [0, 11]])
def test_positions_outside_the_epoch_are_refused(positions):
    with pytest.raises(IndexError, match="epoch of 10"):
        SampleOrder(sample_count=10).samples(positions)


# --- ranks ---------------------------------------------------------------------------------------

shares = st.fixed_dictionaries(
    {
        "sample_count": st.integers(0, 400),
        "global_batch_size": st.sampled_from([24, 48, 96]),
        "last": st.sampled_from(["pad", "drop", "join"]),
    }
)


def ranks(world, **settings):
    return [RankBatches(rank=rank, world_size=world, **settings) for rank in range(world)]


def steps(world, position, count, **settings):
    """Return the global batches from a position on, as the ranks' parts side by side."""
    parts = [rank.positions(position, count) for rank in ranks(world, **settings)]
    return [
        np.concatenate([part[step] for part in parts if step < len(part)]).tolist()
        for step in range(max(map(len, parts)))
    ]


@given(shares, st.integers(0, 30))
def test_global_batches_are_the_same_for_any_number_of_ranks(settings, done):
    position = min(done * settings["global_batch_size"], settings["sample_count"])
    alone = steps(1, position, 1000, **settings)
    for world in WORLDS[1:]:
        assert steps(world, position, 1000, **settings) == alone


@given(shares, st.sampled_from(WORLDS), st.sampled_from(WORLDS), st.integers(0, 20))
@settings(max_examples=examples(200))
def test_a_restart_on_another_number_of_ranks_loses_and_repeats_nothing(
    settings, before, after, done
):
    first = steps(before, 0, done, **settings)
    rank_0 = ranks(before, **settings)[0]
    position = rank_0.after(0, len(first))
    rest = steps(after, position, 1000, **settings) if position < rank_0.sample_count else []
    assert first + rest == steps(1, 0, 1000, **settings)
    seen = list(itertools.chain.from_iterable(first + rest))
    count, batch = settings["sample_count"], settings["global_batch_size"]
    if settings["last"] == "join":
        assert seen == list(range(count))
    elif settings["last"] == "drop":
        assert seen == list(range(count - count % batch))
    else:
        assert seen[:count] == list(range(count))
        assert seen[count:] == [extra % count for extra in range(-count % batch)]


@pytest.mark.parametrize(("before", "after"), itertools.product(WORLDS, WORLDS))
def test_all_pairs_of_world_sizes_give_each_sample_exactly_once(before, after):
    settings = {"sample_count": 1003, "global_batch_size": 48, "last": "join"}
    order = SampleOrder(sample_count=1003, seed=9, epoch=4)
    first = steps(before, 0, 7, **settings)
    rest = steps(after, 7 * 48, 1000, **settings)
    seen = order.samples(list(itertools.chain.from_iterable(first + rest)))
    assert sorted(seen.tolist()) == list(range(1003))
    assert first + rest == steps(1, 0, 1000, **settings)


@given(shares, st.sampled_from(WORLDS))
def test_ranks_have_equally_many_batches_of_equal_size_but_for_join(settings, world):
    parts = [rank.positions(0, 1000) for rank in ranks(world, **settings)]
    counts = [rank.count() for rank in ranks(world, **settings)]
    assert counts == [len(part) for part in parts]
    sizes = [{len(batch) for batch in part} for part in parts]
    if settings["last"] == "join" and max(counts):
        assert max(counts) - min(counts) <= 1
        last = [len(part[-1]) if len(part) == max(counts) else 0 for part in parts]
        assert max(last) - min(last) <= 1
        assert counts[0] == max(counts)  # rank 0 saves the state: it is there to the end
    else:
        assert len(set(counts)) == 1
        assert set.union(*sizes) <= {settings["global_batch_size"] // world}


@given(shares, st.sampled_from(WORLDS), st.integers(0, 20))
def test_several_batches_at_once_are_those_one_by_one(settings, world, count):
    for rank in ranks(world, **settings):
        together = rank.positions(0, count)
        for step, batch in enumerate(together):
            (alone,) = rank.positions(rank.after(0, step))
            assert np.array_equal(alone, batch)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"world_size": 5}, "5 ranks cannot share a batch of 48"),
        ({"global_batch_size": 0}, "at least 1 for each rank, got 0.*Give 1 or more"),
        ({"global_batch_size": 0, "world_size": 3}, "Give 3 or a multiple of it"),
        ({"rank": 3, "world_size": 3}, "rank 3 is not in a world"),
        ({"rank": -1}, "rank -1 is not in a world"),
        ({"world_size": 0}, "of 0"),
        ({"last": "wrap"}, "wrap"),
    ],
)
def test_an_impossible_share_is_refused(wrong, word):
    with pytest.raises(UsageError, match=word):
        RankBatches(**{"sample_count": 10, "global_batch_size": 48, **wrong})
