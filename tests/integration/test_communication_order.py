"""Collectives come in one order on all ranks, whatever order gradients become ready in."""

from pathlib import Path

import pytest
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/swapped_models.py"


@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (3, "paceline")])
def test_gradients_are_right_though_ranks_run_models_and_layers_in_other_orders(
    tmp_path, ranks, backend
):
    for found in run_ranks(SCRIPT, tmp_path, ranks, backend, "train"):
        assert len(found) == 8
        assert {case: error for case, error in found.items() if not error < 1e-12} == {}


def test_ranks_that_train_other_models_get_an_error_that_names_them(tmp_path):
    for said in run_ranks(SCRIPT, tmp_path, 2, "gloo", "differ"):
        assert "rank 1 reduces the gradients of model 1 (" in said
        assert "while rank 0 reduces those of models 0 (" in said


def test_ddp_models_that_ranks_call_in_other_orders_are_an_error(tmp_path):
    first, second = run_ranks(SCRIPT, tmp_path, 2, "gloo", "ddp")
    assert first == "no error"  # rank 1 ends the job
    assert "rank 1 reduces the gradients of its DistributedDataParallel models in" in second
    assert "the order [0, 1], rank 0 in the order [1, 0]" in second or "[1, 0], rank 0" in second


def test_ddp_models_in_one_order_pass(tmp_path):
    assert run_ranks(SCRIPT, tmp_path, 2, "gloo", "ddp-same") == ["no error", "no error"]
