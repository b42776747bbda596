"""Batch normalisation by the batches of all ranks: training is that of one process."""

from pathlib import Path

import pytest
from process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/batch_norm.py"
EXACT = 1e-10


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    cases = ("data", "synchronised", "ended", "offset", "single")
    return run_ranks(SCRIPT, folder, 3, "paceline", *cases)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("four"), 4, "gloo", "data", "stages")


def test_unequal_batches_of_all_ranks_are_one_batch(three, four):
    for found in (*three, *four):
        assert found["data"]["error"] < EXACT
        assert found["data"]["evaluated"] < EXACT


def test_layers_that_are_synchronised_already_need_no_option(three):
    assert max(found["synchronised"]["error"] for found in three) < EXACT


def test_a_repeated_batch_of_a_rank_whose_loader_has_ended_does_not_count(three):
    assert max(found["ended"]["error"] for found in three) < EXACT


def test_variances_keep_their_digits_where_the_mean_is_large(three):
    assert max(found["offset"]["error"] for found in three) < 1e-4


def test_replicas_of_stages_share_statistics(four):
    for found in four:
        for form, result in found["stages"].items():
            assert result["error"] < EXACT, form


def test_one_sample_has_no_variance(three):
    for found in three:
        assert "needs more than 1 value per channel" in found["single"]["one"]
        assert "may compute a layer again when others do not" in found["single"]["budget"]
