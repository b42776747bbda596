"""A model in stages on real ranks: what it computes is what one process computes."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forking
from support.process_groups import DEADLINE_S, run_ranks

SCRIPT = Path(__file__).parent / "scripts/pipeline_training.py"
MODELS = ("residual", "unet", "transformer", "many")
FAULTS = pytest.mark.campaign("faults")
GRID = list(itertools.product((1, 2, 3, 4), repeat=2))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What all cases found on 2 ranks, by rank, with one process group for all of them."""
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("ranks"), 2, "gloo", "all")


def check_grid(found, models=MODELS):
    assert {case.split()[0] for case in found} == set(models)
    for case, (gradient_error, loss_error) in found.items():
        assert gradient_error < 1e-10, case
        assert loss_error < 1e-10, case


def test_gradients_are_those_of_one_process(two):
    for found in two:
        check_grid(found["grid"])


def check_replicas(folder, partitions, replicas, microbatches):
    samples = 5 * replicas + 1  # microbatches of unequal sizes, and replicas too
    arguments = ("paceline", "grid", partitions, replicas, microbatches, samples)
    ranks = partitions * replicas
    for found in run_ranks(SCRIPT, folder, ranks, *arguments, deadline_s=120 * ranks):
        check_grid(found)


def test_gradients_of_two_replicas_are_those_of_one_process(tmp_path):
    check_replicas(tmp_path, 2, 2, "3")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """What 2 partitions x 2 replicas found whose stages FSDP2 shards, by rank."""
    folder = tmp_path_factory.mktemp("sharded")
    return run_ranks(SCRIPT, folder, 4, "gloo", "sharded", deadline_s=300)


def test_gradients_of_sharded_stages_are_those_of_one_process_in_every_order(sharded):
    for found in sharded:
        assert set(found["grid"]) == {
            "1f1b",
            "fill_drain",
            "interleaved",
            "zero_bubble",
            "recompute",
        }
        for case in found["grid"].values():
            check_grid(case)
        check_grid(found["library"], ["library"])
        assert found["accumulated"] < 1e-10


def test_training_of_sharded_stages_and_its_state_are_those_of_one_process(sharded):
    for found in sharded:
        for kind, (error, resumed, *_) in found["steps"].items():
            assert error < 1e-9, kind
            assert resumed < 1e-9, kind
    assert sharded[0]["steps"]["sgd"][2]  # the names of the model


def test_sharded_stages_keep_a_part_of_parameters_gradients_and_state(sharded):
    for found in sharded:
        whole, parts = found["memory"]
        steps_bytes = 2 * 2 * 2 * 4  # Adam counts the steps of each of 2 x 2 tensors, 8 bytes
        assert parts[:2] == [size / 2 for size in whole[:2]]
        assert whole[2] / 2 <= parts[2] <= whole[2] / 2 + steps_bytes


def test_a_model_that_decides_in_python_has_the_gradients_of_one_process(two):
    for found in two:
        for case in found["library"]:
            check_grid(case, ["library"])


def test_batches_that_the_ranks_of_a_replica_do_not_have_alike_are_refused_on_all(two):
    first, second = (found["refused"] for found in two)
    other = "rank 1 has another batch than rank 0: the ranks of one replica have the same batches; "
    for found in (first, second):
        assert found["values"] == found["evaluation"] == other + "its values are others"
        assert found["samples"] == other + "5 samples on rank 1, 6 on rank 0"
        assert found["empty"].startswith("the batch has no samples")
        assert found["error"] < 1e-10
    assert first["arguments"].startswith("rank 1 cannot use its batch")
    assert second["arguments"].startswith("the model does not take these inputs")


def test_models_and_options_that_differ_or_have_no_effect_are_refused(two):
    first, second = (found["refused"] for found in two)
    assert first["models"] == second["models"]
    assert first["models"].startswith(
        "the model of rank 1 computes something else than that of rank 0: the first difference: "
        "stage 0: _1 = 1(_0,), {}, ReLU on rank 0, stage 0: _1 = 1(_0,), {}, Tanh on rank 1"
    )
    assert first["order"].startswith("stages_per_rank has no effect on this schedule")
    assert first["rank"].startswith("rank 1 trains with other options than rank 0")
    for found in (first, second):
        assert found["loss"].startswith("the rank of the last stage needs the loss")
        assert found["auto"].startswith("the strategy auto estimates the model for an example")
        assert found["layers"] == (
            "layers has 2 numbers, whose sum is 6, for 2 stages and 3 layers: "
            "the layers are 0, 1, 2"
        )
        assert found["rate"] == (
            "the optimizer of rank 1 is another one than that of rank 0: "
            "lr=0.1 in group 0 on rank 0, lr=0.2 in group 0 on rank 1"
        )


def test_a_divided_model_says_how_it_is_called_and_is_prepared_once(two):
    for found in (ranks["refused"] for ranks in two):
        assert found["outputs"].startswith("outputs of a model in stages have no gradients")
        assert found["given"].startswith("the layers of this model are divided among the ranks")
        assert "is on the device meta, and has no values to train" in found["again"]


def test_after_a_failed_step_no_other_one_begins(tmp_path):
    (first, then), (second, there) = run_ranks(SCRIPT, tmp_path, 2, "gloo", "fails")
    assert first == "a bug"
    assert second == "rank 0 failed: ValueError: a bug"
    assert then == (
        "an earlier step of this model failed, and its ranks are not in step any more: "
        "ValueError: a bug"
    )
    assert there.startswith("an earlier step of this model failed")


@pytest.mark.campaign("torch")
def test_stages_with_tied_weights_and_replicas_agree_on_their_groups(tmp_path):
    # 3 stages x 2 replicas: ranks are in different numbers of groups.
    arguments = ("gloo", "grid", 3, 2, "2", 7)
    for found in run_ranks(SCRIPT, tmp_path, 6, *arguments):
        check_grid(found)


def test_models_with_tied_weights_train_beside_each_other_in_groups_of_the_job(tmp_path):
    assert max(run_ranks(SCRIPT, tmp_path, 4, "gloo", "halves", deadline_s=60)) < 1e-10


@pytest.mark.campaign("torch")
@pytest.mark.parametrize(("partitions", "replicas"), GRID)
def test_gradients_of_all_sizes_are_those_of_one_process(tmp_path, partitions, replicas):
    check_replicas(tmp_path, partitions, replicas, "1,2,3,4")


@pytest.mark.parametrize("name", ["fill_drain", "interleaved", "zero_bubble", "recompute"])
def test_every_order_brings_the_same_gradients(two, name):
    for found in two:
        check_grid(found["orders"][name])


def test_stages_may_use_shared_layers_in_different_orders(two):
    for found in two:
        assert max(found["repeats"]) < 1e-10


def test_a_model_of_split_points_trains(two):
    for found in two:
        assert found["splits"] < 1e-10


def test_inputs_for_all_samples_are_not_cut_where_they_have_as_many_rows(two):
    for found in two:
        assert max(found["masked"]) < 1e-10


def test_default_microbatches_fit_the_graph_and_a_loss_has_the_models_type(two):
    for found in two:
        for (gradients, loss, dtype), own in zip(
            found["by_default"], ("torch.float64", "torch.float32"), strict=True
        ):
            assert gradients < 8
            assert loss < 8
            assert dtype == own


def test_blocking_collectives_of_shared_layers_come_in_one_order(tmp_path):
    arguments = ("paceline", "repeats", "interleaved", 2, 1, 1, 1)
    assert max(run_ranks(SCRIPT, tmp_path, 2, *arguments)) < 1e-10


@pytest.mark.campaign("torch")
@pytest.mark.parametrize(("partitions", "replicas"), [(2, 2), (3, 1)])
def test_every_order_brings_the_same_gradients_on_more_ranks(tmp_path, partitions, replicas):
    samples, ranks = 5 * replicas + 1, partitions * replicas
    arguments = ("gloo", "orders", partitions, replicas, "1,2,3,4", samples)
    for found in run_ranks(SCRIPT, tmp_path, ranks, *arguments, deadline_s=120 * ranks):
        for name in found:
            check_grid(found[name])


@pytest.mark.campaign("torch")
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_graphs_are_computed_as_by_one_process(tmp_path, ranks):
    for found in run_ranks(SCRIPT, tmp_path, ranks, "gloo", "graphs", 50, deadline_s=400):
        for seed, (gradient_error, loss_error) in found.items():
            assert gradient_error < 1e-10, seed
            assert loss_error < 1e-10, seed


def test_recomputation_changes_neither_statistics_nor_dropout(two):
    for found in two:
        plain, recomputed = found["statistics"]
        assert recomputed == plain
    assert two[0]["statistics"][0][1]["1.num_batches_tracked"] == 2


def test_training_and_its_state_are_those_of_one_process(two):
    for found in two:
        for kind, (error, resumed, *_) in found["steps"].items():
            assert error < 1e-9, kind
            assert resumed < 1e-9, kind
    (*_, is_whole, first), (*_, is_whole_elsewhere, second) = (f["steps"]["sgd"] for f in two)
    assert is_whole
    assert not is_whole_elsewhere
    whole, tied = 1672, 88
    assert first + second == whole + tied  # each rank keeps its own layers only


def test_the_last_stage_returns_the_models_outputs(two):
    for rank, found in enumerate(two):
        *errors, follows_mode = found["outputs"]
        assert follows_mode
        assert len(errors) == len(MODELS)
        assert all(error == -1.0 if rank == 0 else 0 <= error < 1e-10 for error in errors)


def test_a_trainer_trains_a_model_in_stages(two):
    first, second = (found["trainer"] for found in two)
    assert first == second
    assert [samples for _, samples in first] == [12, 12, 12]
    losses = [loss for loss, _ in first]
    assert losses[2] < losses[0]


def test_an_estimate_chooses_the_same_on_all_ranks(two):
    (is_divided, error), (is_divided_elsewhere, _) = (found["chosen"][0] for found in two)
    assert is_divided == is_divided_elsewhere
    assert error < 1e-9


def test_the_same_call_trains_replicas_with_unequal_batches(two):
    for found in two:
        is_divided, error = found["chosen"][1]
        assert not is_divided
        assert error < 1e-9


@pytest.mark.parametrize(
    ("backend", "how", "kind", "deadline_s", "engine"),
    [
        ("gloo", "SIGKILL", "RankLost", 60, "allreduce"),
        pytest.param("gloo", "SIGKILL", "RankLost", 60, "fsdp2", marks=FAULTS),
        pytest.param("paceline", "SIGKILL", "RankLost", 60, "allreduce", marks=FAULTS),
        pytest.param("gloo", "SIGSTOP", "DeadlineExceeded", 5, "allreduce", marks=FAULTS),
        pytest.param("paceline", "SIGSTOP", "DeadlineExceeded", 5, "allreduce", marks=FAULTS),
    ],
)
def test_the_ranks_that_are_left_name_the_one_that_is_not(
    tmp_path, backend, how, kind, deadline_s, engine
):
    store, ranks = tmp_path / "store", 4 if engine == "fsdp2" else 3
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(ranks), backend, "dies", how, str(deadline_s), engine]
    processes = [
        forking.Popen(
            [sys.executable, str(SCRIPT), str(store), str(rank), *arguments],
            modules=forking.TORCH,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(ranks)
    ]
    try:
        for rank in (0, 2):
            said = processes[rank].communicate(timeout=2 * DEADLINE_S)[0]
            found = json.loads(said.splitlines()[-1])
            assert found["kind"] == kind
            assert found["what"].startswith("rank 1")
            assert found["where"].startswith(f"rank {rank}; ")
    finally:
        for process in processes:
            process.kill()
            process.communicate()
