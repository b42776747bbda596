"""Batch normalisation by the batches of all ranks: training is that of one process."""

from pathlib import Path

import pytest
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/batch_norm.py"
EXACT = 1e-10


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    cases = ("data", "synchronised", "ended", "offset", "single", "wide", "parted")
    return run_ranks(SCRIPT, folder, 3, "paceline", *cases)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run_ranks(
        SCRIPT, tmp_path_factory.mktemp("four"), 4, "gloo", "data", "stages", "parted", "refused"
    )


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


def test_layers_of_many_channels_share_all_of_them(three):
    assert max(found["wide"]["error"] for found in three) < EXACT


def test_ranks_that_call_other_layers_are_told(three, four):
    for found in (*three, *four):
        errors = found["parted"]
        other = "rank 1 computes second.1 with gradients while rank 0 computes first.1"
        assert other in errors["layer"]
        assert "first.1 with gradients while rank 0 computes the gradient" in errors["back"]


def test_options_that_synchronised_layers_do_not_go_with_are_refused(four):
    for found in four:
        errors = found["refused"]
        assert "may compute a layer again when others do not" in errors["budget"]
        assert "does not go with overlap within a host" in errors["overlap"]
        assert "none on rank 1, 1 on rank 0" in errors["other"]


def test_one_sample_has_no_variance(three):
    for found in three:
        assert "needs more than 1 value per channel" in found["single"]["one"]
        assert "may compute a layer again when others do not" in found["single"]["budget"]
