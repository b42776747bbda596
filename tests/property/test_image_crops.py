"""Random crops lie inside their images, as large as asked for, and depend on nothing else."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import UsageError
from paceline.store import CenterCrop, LoaderOptions, RandomCrop
from paceline.store.feed.crops import output_size, scale_denominator

PIXELS = st.integers(1, 5000)
SIZES = st.integers(1, 300) | st.tuples(st.integers(1, 300), st.integers(1, 300))
SHARES = st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(sorted).map(tuple)
RATIOS = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)).map(sorted).map(tuple)
RANDOM = st.builds(RandomCrop, size=SIZES, scale=st.none() | SHARES, ratio=RATIOS)
CROPS = RANDOM | st.builds(CenterCrop, size=SIZES, share=st.floats(0.01, 1))


@given(CROPS, PIXELS, PIXELS, st.integers(0, 2**62), st.integers(0, 1000))
def test_a_crop_lies_inside_the_image_and_stays_large_enough_when_scaled(
    crop, height, width, sample, epoch
):
    (draws,) = crop.draws(7, epoch, np.array([sample]))
    box = crop.box(height, width, draws)
    assert box.height >= 1
    assert box.width >= 1
    assert 0 <= box.top <= height - box.height
    assert 0 <= box.left <= width - box.width
    wanted = output_size(crop.size)
    denominator = scale_denominator(box, *wanted)
    smaller = box.scaled(denominator)
    assert smaller.top + smaller.height <= -(-height // denominator)
    assert smaller.left + smaller.width <= -(-width // denominator)
    if denominator > 1:
        assert smaller.height >= wanted[0]
        assert smaller.width >= wanted[1]


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=20, unique=True), st.integers(0, 2**62))
def test_the_draws_of_a_sample_do_not_depend_on_its_batch(samples, seed):
    crop = RandomCrop(8)
    together = crop.draws(seed, 3, np.array(samples))
    assert ((together >= 0) & (together < 1)).all()
    for sample, row in zip(samples, together, strict=True):
        assert np.array_equal(crop.draws(seed, 3, np.array([sample]))[0], row)
    assert not np.array_equal(crop.draws(seed, 4, np.array(samples)), together)
    assert not np.array_equal(crop.draws(seed + 1, 3, np.array(samples)), together)


def test_draws_are_uniform_and_independent_of_each_other_and_of_the_neighbours():
    draws = RandomCrop(8).draws(0, 0, np.arange(20_000))
    # The standard error of a mean of 20,000 numbers is 0.002; five of them are 0.01.
    assert np.abs(draws.mean(axis=0) - 0.5).max() < 0.01
    assert np.abs(draws.var(axis=0) - 1 / 12).max() < 0.005
    columns = np.corrcoef(draws.T) - np.eye(draws.shape[1])
    neighbours = [np.corrcoef(column[:-1], column[1:])[0, 1] for column in draws.T]
    assert np.abs(columns).max() < 0.05
    assert np.abs(neighbours).max() < 0.05
    counts, _ = np.histogram(draws, bins=64, range=(0, 1))
    expected = draws.size / 64
    # Chi-squared of 63 degrees of freedom: mean 63, standard deviation 11.2.
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * 11.2


def test_a_random_crop_has_the_area_and_ratio_that_were_asked_for():
    crop = RandomCrop(224, scale=(0.2, 0.6), ratio=(0.8, 1.25), flip=0.25)
    boxes = [crop.box(3000, 3000, row) for row in crop.draws(5, 1, np.arange(4000))]
    shares = np.array([box.height * box.width / 9e6 for box in boxes])
    ratios = np.log([box.width / box.height for box in boxes])
    assert 0.199 < shares.min() < 0.21
    assert 0.59 < shares.max() < 0.601
    assert shares.mean() == pytest.approx(0.4, abs=0.01)
    assert ratios.min() == pytest.approx(math.log(0.8), abs=0.01)
    assert ratios.max() == pytest.approx(math.log(1.25), abs=0.01)
    assert ratios.mean() == pytest.approx(0, abs=0.01)
    assert np.mean([box.flipped for box in boxes]) == pytest.approx(0.25, abs=0.035)
    places = [box.top / (3000 - box.height) for box in boxes]
    assert np.mean(places) == pytest.approx(0.5, abs=0.025)


def test_every_place_of_a_crop_without_resizing_comes_equally_often():
    crop = RandomCrop((4, 6), scale=None)
    boxes = [crop.box(6, 9, row) for row in crop.draws(5, 1, np.arange(12_000))]
    places, counts = np.unique([box[:2] for box in boxes], axis=0, return_counts=True)
    assert len(places) == 3 * 4
    assert {box[2:] for box in boxes} == {(4, 6, False)}
    assert np.abs(counts / 1000 - 1).max() < 0.2  # six standard errors


def test_a_central_part_is_shown_where_no_drawn_one_fits():
    tall = RandomCrop(8, scale=(1.0, 1.0), ratio=(1.0, 1.0))
    (draws,) = tall.draws(0, 0, np.arange(1))
    assert tall.box(100, 60, draws)[:4] == (20, 0, 60, 60)
    assert tall.box(60, 100, draws)[:4] == (0, 20, 60, 60)
    assert tall.box(60, 60, draws)[:4] == (0, 0, 60, 60)


def test_the_centre_is_what_resizing_the_shorter_edge_and_cropping_shows():
    box = CenterCrop(224, share=224 / 256).box(512, 1000, np.empty(0))
    assert box[:4] == ((512 - 448) // 2, (1000 - 448) // 2, 448, 448)
    assert CenterCrop((100, 200)).box(300, 400, np.empty(0))[:4] == (50, 0, 200, 400)


def test_the_choice_stays_the_same_from_version_to_version():
    crop = RandomCrop(224, flip=0.5)
    boxes = [crop.box(375, 500, row) for row in crop.draws(7, 3, np.array([0, 1, 10**9]))]
    assert [tuple(box) for box in boxes] == [
        (32, 103, 343, 317, True),
        (0, 17, 375, 478, True),
        (5, 16, 368, 394, False),
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomCrop(0),
        lambda: RandomCrop((5, -1)),
        lambda: RandomCrop((5, 5, 5)),
        lambda: RandomCrop(2.5),
        lambda: RandomCrop(5, scale=(0.5, 0.4)),
        lambda: RandomCrop(5, scale=(0.0, 1.0)),
        lambda: RandomCrop(5, scale=(0.1, 1.1)),
        lambda: RandomCrop(5, ratio=(2, 1)),
        lambda: RandomCrop(5, flip=1.5),
        lambda: CenterCrop(5, share=0),
        lambda: CenterCrop(0),
        lambda: LoaderOptions(decode=224),
        lambda: LoaderOptions(decode="jpeg"),
    ],
)
def test_impossible_values_are_refused(make):
    with pytest.raises(UsageError) as caught:
        make()
    assert caught.value.fix
