"""Batches by shares: whatever they are, a step has the samples of the script's own sampler."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

torch = pytest.importorskip("torch")

from accelerate.data_loader import BatchSamplerShard  # noqa: E402
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler  # noqa: E402

from paceline.training.balance.batches import (  # noqa: E402
    BalancedLoader,
    BatchPlace,
    Shares,
    lists_of_ranks,
)
from paceline.training.balance.division import (  # noqa: E402
    Speed,
    divide_samples,
    in_proportion,
)

speeds = st.builds(Speed, st.floats(0, 0.1), st.floats(1e-6, 1e-2))


class Reversed(DistributedSampler):
    """A sampler with an order of its own that follows from epoch and rank."""

    def __iter__(self):
        return iter(list(super().__iter__())[::-1])


def samplers(data, ranks, **options):
    return [
        BatchSampler(
            options["kind"](range(data), ranks, rank, shuffle=options["shuffle"], seed=7),
            options["batch"],
            options["drop_last"],
        )
        for rank in range(ranks)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(
    data=st.integers(1, 120),
    ranks=st.integers(1, 5),
    batch=st.integers(2, 9),
    kind=st.sampled_from([DistributedSampler, Reversed]),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    changes=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 8), st.randoms()), max_size=3),
)
def test_a_step_has_the_samples_of_the_scripts_own_sampler(
    data, ranks, batch, kind, shuffle, drop_last, changes
):
    options = {"batch": batch, "kind": kind, "shuffle": shuffle, "drop_last": drop_last}
    theirs = samplers(data, ranks, **options)
    ours_of = samplers(data, ranks, **options)
    loaders = [BalancedLoader.of(own) for own in ours_of]
    pending = {}
    for generation, (epoch, number, randoms) in enumerate(sorted(changes, key=lambda c: c[:2]), 1):
        weights = [randoms.uniform(0.3, 3) for _ in range(ranks)]
        samples = in_proportion(ranks * batch, weights)
        pending[BatchPlace(epoch, number)] = Shares(generation, samples)
    for epoch in (1, 2):
        for own in (*theirs, *ours_of):
            own.sampler.set_epoch(epoch)
        ours = [
            loader.batches(own, BatchSampler.__iter__)
            for loader, own in zip(loaders, ours_of, strict=True)
        ]
        expected = list(zip(*theirs, strict=True))
        shares = loaders[0].shares_at(BatchPlace(epoch, 0))
        for number, batches in enumerate(expected):
            if (change := pending.pop(BatchPlace(epoch, number), None)) is not None:
                shares = change
                for loader in loaders:
                    loader.put_in_force(change, BatchPlace(epoch, number))
            drawn = [next(own) for own in ours]
            assert sorted(itertools.chain(*drawn)) == sorted(itertools.chain(*batches))
            is_full = len(batches[0]) == batch
            if is_full and shares.samples:
                assert tuple(map(len, drawn)) == shares.samples
            else:
                assert drawn == list(map(list, batches))
            for rank, own in enumerate(ours):
                own.delivered += 1
                weight = own.current().weight(rank)
                count = sum(map(len, drawn))
                assert math.isclose(weight, ranks * len(drawn[rank]) / count)
        assert [next(own, None) for own in ours] == [None] * ranks


@settings(max_examples=examples(60), deadline=None)
@given(
    data=st.integers(1, 120),
    ranks=st.integers(1, 5),
    batch=st.integers(2, 9),
    split=st.booleans(),
    drop_last=st.booleans(),
    change=st.integers(0, 6),
    randoms=st.randoms(),
)
def test_a_step_has_the_samples_of_accelerates_shards(
    data, ranks, batch, split, drop_last, change, randoms
):
    def shards():
        generators = [torch.Generator().manual_seed(5) for _ in range(ranks)]
        return [
            BatchSamplerShard(
                BatchSampler(
                    RandomSampler(range(data), generator=generator),
                    batch * (ranks if split else 1),
                    drop_last,
                ),
                ranks,
                rank,
                split_batches=split,
            )
            for rank, generator in enumerate(generators)
        ]

    theirs, ours_of = shards(), shards()
    loaders = [BalancedLoader.of(own) for own in ours_of]
    samples = in_proportion(ranks * batch, [randoms.uniform(0.3, 3) for _ in range(ranks)])
    for epoch in (1, 2):
        ours = [
            loader.batches(own, BatchSamplerShard.__iter__)
            for loader, own in zip(loaders, ours_of, strict=True)
        ]
        steps = list(zip(*theirs, strict=True))
        for number, batches in enumerate(steps):
            if epoch == 1 and number == change:
                for loader in loaders:
                    loader.put_in_force(Shares(1, samples), BatchPlace(1, number))
            drawn = [next(own) for own in ours]
            assert sorted(itertools.chain(*drawn)) == sorted(itertools.chain(*batches))
            is_full = (number + 1) * ranks * batch <= data
            is_divided = is_full and (change < len(steps) if epoch == 2 else number >= change)
            assert drawn == list(batches) or is_divided
            if is_divided:
                assert tuple(map(len, drawn)) == samples
            # The loop takes the next batch, or finds that there is none, before it uses this one.
            for rank, own in enumerate(ours):
                own.delivered = min(number + 2, len(steps))
                own.has_ended = number + 1 == len(steps)
                weight = own.current().weight(rank)
                assert math.isclose(weight, ranks * len(drawn[rank]) / sum(map(len, drawn)))
        assert [next(own, None) for own in ours] == [None] * ranks


@given(data=st.integers(1, 200), ranks=st.integers(1, 7), drop_last=st.booleans())
def test_the_lists_of_all_ranks_are_those_of_their_samplers(data, ranks, drop_last):
    for kind in (DistributedSampler, Reversed):
        each = [kind(range(data), ranks, rank, drop_last=drop_last) for rank in range(ranks)]
        lists = [[int(index) for index in own] for own in lists_of_ranks(each[0])]
        assert lists == [list(own) for own in each]
        assert (each[0].rank, each[0].num_replicas) == (0, ranks)


@given(
    each=st.lists(speeds, min_size=1, max_size=8),
    batch=st.integers(2, 64),
    least=st.integers(1, 2),
)
def test_no_move_of_a_sample_makes_the_last_rank_ready_earlier(each, batch, least):
    most = [3 * batch] * len(each)
    samples = divide_samples(batch * len(each), each, least, most)
    assert sum(samples) == batch * len(each)
    assert all(least <= count <= 3 * batch for count in samples)

    def ready_s(counts):
        return max(speed.busy_s(count) for speed, count in zip(each, counts, strict=True))

    for giver, taker in itertools.permutations(range(len(each)), 2):
        if samples[giver] > least and samples[taker] < 3 * batch:
            moved = list(samples)
            moved[giver] -= 1
            moved[taker] += 1
            assert ready_s(moved) >= ready_s(samples) * (1 - 1e-9)


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=8),
    each=st.integers(1, 40),
    least=st.integers(1, 2),
)
def test_samples_in_proportion_add_up(weights, each, least):
    total = max(least, each) * len(weights)
    samples = in_proportion(total, weights, least)
    assert sum(samples) == total
    assert min(samples) >= least
    whole = sum(weights)
    if least == 1 and all(total * weight / whole >= 1 for weight in weights):
        for count, weight in zip(samples, weights, strict=True):
            assert abs(count - total * weight / whole) < 1 + 1e-6


def test_what_the_least_samples_cost_is_taken_from_all_others():
    assert in_proportion(11, [30, 20, 1, 1], 2) == (5, 2, 2, 2)  # exactly: 6.3, 4.2, 0.2, 0.2
