"""Streams are functions of seed and name, and independent of each other."""

import numpy as np

from paceline.core.randomness import make_generator


def draw(*stream):
    return make_generator(*stream).integers(0, 2**63, 100)


def test_a_stream_is_a_pure_function_of_seed_and_name():
    assert np.array_equal(draw(1, "bootstrap", 3), draw(1, "bootstrap", 3))


def test_streams_and_seeds_differ():
    draws = [draw(1, "a"), draw(1, "b"), draw(2, "a"), draw(1, "a", 1), draw(1)]
    for i, one in enumerate(draws):
        for other in draws[i + 1 :]:
            assert not np.intersect1d(one, other).size
