"""Layers divided among ranks: training is that of one process, on real ranks."""

from pathlib import Path

import pytest
from support.process_groups import run_ranks

from paceline.core.plan import Mesh, Plan
from paceline.training.options import options_of

SCRIPT = Path(__file__).parent / "scripts/tensor_parallel.py"
EXACT = 1e-12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def two(folder):
    """What two ranks on gloo found, in one process group."""
    cases = ["equal:classifier,transformer,many", f"state:{folder}", "nan", "gone", "evaluates"]
    return run_ranks(
        SCRIPT, folder, 2, "gloo", *cases, "auto", "refused", "differ", "clipped", "half"
    )


@pytest.fixture(scope="module")
def three(two, tmp_path_factory, folder):
    """What three ranks on Paceline's backend found, with a state that two ranks saved."""
    cases = [f"load:{folder}", "equal:classifier,many", "nan", "gone"]
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("three"), 3, "paceline", *cases)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """What four ranks on gloo found, alone and in groups."""
    folder = tmp_path_factory.mktemp("four")
    return run_ranks(SCRIPT, folder, 4, "gloo", "equal:transformer", "groups:2", "part:2", "lost")


def test_training_equals_one_process_with_unequal_batches(two, three, four):
    for found in (*two, *three, *four[:-1]):
        for case, result in found["equal"].items():
            assert result["error"] < EXACT, case
            assert result["loss"] < EXACT, case
            assert result["kept"] < 1, case


def test_groups_of_ranks_share_layers_and_are_data_parallel(four):
    for found in four[:-1]:
        for kind, result in found["groups"].items():
            assert result["error"] < EXACT, kind
            assert result["parts"] == pytest.approx(2, rel=0.06), kind  # 37 rows


def test_the_ranks_of_a_layer_end_where_one_is_lost(four):
    for number, found in enumerate(four[:-1]):
        assert "a rank ended" in found["lost"]
        assert f"rank {number}; " in found["lost"]


def test_states_are_whole_and_go_on_with_other_numbers_of_ranks(two, three):
    for found in two:
        for result in found["state"].values():
            assert result["names"]
            assert result["same"] == 0
            assert result["moments"] == [[37, 108]]
    for found in three:
        assert max(found["load"].values()) < EXACT


def test_a_nan_is_that_of_the_rank_whose_sample_it_is(two, three):
    for last, ranks in ((1, two), (2, three)):
        for found in ranks:
            result = found["nan"]
            assert "is not finite" in result["text"]
            assert f"rank {last}; step 1" in result["text"]
            assert result["kept"] == 0
            assert result["again"] == ""


def test_ranks_that_leave_each_other_are_told(two, three):
    for ranks in (two, three):
        for found in ranks:
            errors = found["gone"]
            first = "classifier.0 without gradients while rank 0 computes classifier.0 with"
            assert f"rank 1 computes {first}" in errors["mode"]
            assert "rank 1 computes head without gradients while rank 0" in errors["layer"]
            assert "rank 0 computes classifier.0 without gradients" in errors["layer"]
            assert "while rank 0 saves head" in errors["state"]
            assert "computes classifier.0 with gradients while rank 0" in errors["backward"]
            assert "computes the gradient of head" in errors["backward"]
            assert "Have all ranks call the model equally often" in errors["state"]


def test_an_evaluation_takes_any_batches(two):
    for found in two:
        assert found["evaluates"]["error"] < EXACT
        assert found["evaluates"]["shape"] == [2, 3, 37]


def test_auto_divides_layers_of_more_gradients_than_activations(two):
    for found in two:
        # The third layer takes the columns of the second one: it saves an exchange.
        assert found["auto"]["kept"] == [2304 * 600 // 2, 600 * 600 // 2, 600 * 2 // 2, 2 * 700]


def test_what_does_not_work_is_refused(two):
    for rank in two:
        found = rank["refused"]
        assert "has no engine 'sharded'" in found["engine"]
        assert "has no compression" in found["compression"]
        assert "has no memory_budget" in found["memory_budget"]
        assert "a model is divided into stages or by tensor_parallel" in found["partitions"]
        assert "it is a GELU" in found["unknown"]
        assert "Name linear layers, such as head" in found["misspelt"]
        assert "Give 'auto', or the names of linear layers in a list" in found["text"]
        assert "tensor_parallel names no layer" in found["none"]
        assert "Give example_inputs" in found["no example"]
        assert "2 ranks do not divide into groups of 3" in found["groups"]
        assert "another layer uses its parameters too" in found["tied"]
        assert "LBFGS may look at whole tensors" in found["lbfgs"]


def test_an_error_of_one_rank_is_that_of_all(two):
    for found in two:
        errors = found["differ"]
        assert "rank 0 failed while the others waited for it" in errors["example"]
        assert "to have 2 channels, but got 3" in errors["example"]
        assert "the optimizer of rank 1 is another one than that of rank 0" in errors["optimizer"]
        assert "the layer head of rank 1 cannot be divided as that of rank 0" in errors["frozen"]
        assert "with nothing to train, and divided by its inputs, with weight" in errors["frozen"]


def test_clipping_by_hand_which_sees_parts_only_is_an_error(two):
    for found in two:
        assert found["clipped"]["1e+09"] == ""
        text = found["clipped"]["0.001"]
        assert "the ranks changed the gradient of features.0.bias in different ways" in text
        assert "Give prepare clip_norm=" in text


def test_a_part_of_the_job_divides_layers_where_a_rank_is_in_more_groups(four):
    for found in four[:2]:
        assert found["part"] < EXACT


def test_layers_compute_in_half_precision(two):
    for found in two:
        for result in found["half"].values():
            assert result["error"] < 2e-3
            assert result["types"] == ["torch.float32"]


def test_the_axis_tensor_of_a_plan_divides_layers():
    plan = Plan(mesh=Mesh(data=2, tensor=2), engine="allreduce")
    options = options_of({}, plan)
    assert (options.tensor_parallel, options.tensor_parallel_ranks) == ("auto", 2)
    named = options_of({"tensor_parallel": ["head"]}, plan)
    assert (named.tensor_parallel, named.tensor_parallel_ranks) == (("head",), None)
