"""Layers divided among ranks: training is that of one process, on real ranks."""

from pathlib import Path

import pytest
from process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/tensor_parallel.py"
EXACT = 1e-12


@pytest.mark.parametrize(
    ("backend", "ranks", "models"),
    [
        ("gloo", 2, ("classifier", "transformer", "many")),
        ("gloo", 3, ("classifier",)),
        ("paceline", 2, ("classifier", "many")),
        ("paceline", 4, ("transformer",)),
    ],
)
def test_training_equals_one_process_with_unequal_batches(tmp_path, backend, ranks, models):
    for found in run_ranks(SCRIPT, tmp_path, ranks, backend, "equal", *models):
        assert len(found) == 4 * len(models)
        for case, result in found.items():
            assert result["error"] < EXACT, case
            assert result["loss"] < EXACT, case
            assert result["kept"] < 1, case


def test_groups_of_ranks_share_layers_and_are_data_parallel(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 4, "gloo", "groups", 2):
        for kind, result in found.items():
            assert result["error"] < EXACT, kind
            assert result["parts"] == pytest.approx(2, rel=0.06), kind  # 37 rows


def test_states_are_whole_and_go_on_with_other_numbers_of_ranks(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path / "first", 2, "gloo", "state", tmp_path):
        for result in found.values():
            assert result["names"]
            assert result["same"] == 0
            assert result["moments"] == [[37, 108]]
    for found in run_ranks(SCRIPT, tmp_path / "second", 3, "paceline", "load", tmp_path):
        assert max(found.values()) < EXACT


def test_a_nan_is_that_of_the_rank_whose_sample_it_is(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 3, "gloo", "nan"):
        assert "is not finite" in found["text"]
        assert "rank 2; step 1" in found["text"]
        assert found["kept"] == 0
        assert found["again"] == ""


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_ranks_that_leave_each_other_are_told(tmp_path, backend):
    for found in run_ranks(SCRIPT, tmp_path, 2, backend, "gone"):
        assert "rank 1 computes without gradients while rank 0 computes with" in found["mode"]
        assert "rank 1 computes head while rank 0 computes classifier.0" in found["layer"]
        assert "while rank 0 saves its state" in found["state"]
        assert "Have all ranks call the model equally often" in found["state"]


def test_an_evaluation_takes_any_batches(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 2, "paceline", "evaluates"):
        assert found["error"] < EXACT
        assert found["shape"] == [2, 3, 37]


def test_auto_divides_layers_of_more_gradients_than_activations(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 2, "gloo", "auto"):
        assert found["kept"][0] == 2304 * 600 // 2
        assert found["kept"][1:] == [600 * 600 // 2, 1200, 1400]


def test_what_does_not_work_is_refused(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 2, "gloo", "refused"):
        assert "has no engine 'sharded'" in found["engine"]
        assert "has no compression" in found["compression"]
        assert "has no memory_budget" in found["memory_budget"]
        assert "a model in stages has no tensor_parallel" in found["partitions"]
        assert "it is a GELU" in found["unknown"]
        assert "Name linear layers, such as head" in found["misspelt"]
        assert "Give 'auto', or the names of linear layers in a list" in found["text"]
        assert "Give example_inputs" in found["no example"]
        assert "2 ranks do not divide into groups of 3" in found["groups"]
        assert "another layer uses its parameters too" in found["tied"]
        assert "LBFGS updates whole matrices" in found["lbfgs"]


def test_layers_compute_in_half_precision(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 2, "gloo", "half"):
        for result in found.values():
            assert result["error"] < 2e-3
            assert result["types"] == ["torch.float32"]
