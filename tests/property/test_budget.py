"""The ranks of a node share its cores fairly; who sets OMP_NUM_THREADS has the last word."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.affinity import allowed_cores, core_binding

CORES = st.lists(st.integers(0, 1023), min_size=1, max_size=64, unique=True).map(sorted)


@given(CORES, st.data())
def test_shares_are_disjoint_cover_all_and_differ_by_at_most_one(cores, data):
    ranks = data.draw(st.integers(1, len(cores)))
    shares = [core_binding(cores, rank, ranks, {}) for rank in range(ranks)]
    together = [core for share in shares for core in share.cores]
    assert together == cores  # covering, disjoint, and neighbours stay together
    sizes = [len(share.cores) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert [share.threads for share in shares] == sizes


@given(CORES, st.integers(1, 64), st.integers(1, 4096))
def test_omp_num_threads_wins(cores, ranks, threads):
    mine = core_binding(cores, ranks - 1, ranks, {"OMP_NUM_THREADS": str(threads)})
    assert mine.cores == ()
    assert mine.threads == threads


@pytest.mark.parametrize("text", ["", "0", "-1", "two"])
def test_what_openmp_ignores_is_ignored(text):
    assert core_binding([0, 1], 1, 2, {"OMP_NUM_THREADS": text}).cores == (1,)


def test_threads_by_nesting_level_are_those_of_the_first():
    mine = core_binding([0, 1], 1, 2, {"OMP_NUM_THREADS": "3,2"})
    assert mine.threads == 3
    assert mine.cores == ()


@given(CORES, st.integers(1, 64))
def test_more_ranks_than_cores_share_with_one_thread_each(cores, more):
    ranks = len(cores) + more
    for rank in (0, ranks - 1):
        mine = core_binding(cores, rank, ranks, {})
        assert mine.cores == ()
        assert mine.threads == 1


def test_allowed_cores_are_those_of_the_affinity_mask():
    assert set(allowed_cores()) == os.sched_getaffinity(0)
    assert list(allowed_cores()) == sorted(allowed_cores())
