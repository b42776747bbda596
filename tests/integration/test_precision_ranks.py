"""Overflow on one of two real ranks stops both, and a NaN is traced to its rank and layer."""

from pathlib import Path

import pytest
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "precision_ranks.py"


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("ranks"), 2)


def test_an_overflow_on_one_rank_skips_the_step_on_all(outcome):
    applied, skipped = [False, False], [True, True]
    expected = [
        [64.0, 1, False, True],  # no momentum yet
        [128.0, 2, *applied],
        [64.0, 2, *skipped],
        [32.0, 2, *skipped],
        [32.0, 3, *applied],
        [64.0, 4, *applied],
    ]
    assert [rank["case_one_rank_overflows"] for rank in outcome] == [expected, expected]


def test_every_rank_names_the_rank_and_layer_of_a_nan(outcome):
    expected = [[False, []], [True, [[1, 1, "0.bias", 2]]], [False, []]]
    assert [rank["case_a_nan_of_one_rank_is_named"] for rank in outcome] == [expected, expected]


def test_sharded_gradients_are_unscaled_and_checked(outcome):
    assert [rank["case_fsdp2"] for rank in outcome] == [[False, True, True]] * 2


def test_only_ranks_of_the_group_agree(outcome):
    assert [rank["case_a_group_of_some_ranks"] for rank in outcome] == [True, None]
