"""`prepare`: what an ordinary loop gains, on real ranks."""

from pathlib import Path

import pytest
import torch
from support.process_groups import run_ranks
from torch import nn

from paceline.core.errors import UsageError
from paceline.training import prepare
from paceline.training.options import TrainingOptions

SCRIPT = Path(__file__).parent / "scripts/prepared_training.py"
ALL = (
    *("nan", "overflow", "clip", "lars", "compressed", "uneven", "trainer"),
    *("state", "scaling", "diverges", "differ", "planned"),
)


ENGINES = [
    ("paceline", "allreduce"),
    ("gloo", "ddp"),
    ("gloo", "sharded"),
    ("paceline", "root"),
    ("gloo", "fsdp2"),
]
COMPRESSING = ENGINES[:2]
OURS = [engine for engine in ENGINES if engine[1] not in ("ddp", "fsdp2")]


@pytest.fixture(scope="module", params=ENGINES, ids="-".join)
def found(request, tmp_path_factory):
    """What all cases found, by rank, with one process group for all of them."""
    backend, engine = request.param
    left_out = set()
    if request.param not in COMPRESSING:
        left_out.add("compressed")
    if request.param not in OURS:
        left_out.add("differ")  # the check of torch's own engines is torch's
    cases = [case for case in ALL if case not in left_out]
    folder = tmp_path_factory.mktemp("ranks")
    return engine, run_ranks(SCRIPT, folder, 2, backend, engine, *cases)


def test_passes_and_recomputation_of_a_plan_train_as_one_pass_would(found):
    _, ranks = found
    for rank in ranks:
        assert rank["planned"]["passes"] == 4
        assert rank["planned"]["forwards"] == 3 * 4 * 2  # each pass computes its layer twice
        assert rank["planned"]["far"] < 1e-9


def test_a_nan_is_traced_to_its_rank_step_and_layer(found):
    engine, ranks = found
    for rank in ranks:
        place = "step 2" if engine == "fsdp2" else "rank 1; step 2"  # seen when it is reduced
        assert rank["nan"]["where"] == place
        assert "not finite" in rank["nan"]["what"]
        assert rank["nan"]["same"], engine


def test_an_overflow_on_one_rank_skips_the_step_on_all(found):
    _, ranks = found
    for rank in ranks:
        result = rank["overflow"]
        assert result["skipped"] >= 1
        assert result["finite"]
        assert result["equal"]
        assert result["types"] == ["torch.float32"]


def test_clipping_is_that_of_one_process(found):
    assert max(rank["clip"]["error"] for rank in found[1]) < 1e-7  # torch's epsilon, and ours


def test_lars_takes_the_norms_of_whole_layers(found):
    assert max(rank["lars"]["error"] for rank in found[1]) < 1e-6  # norms are float32 sums


def test_every_sample_counts_alike_where_ranks_have_other_numbers_of_them(found):
    for rank in found[1]:
        assert rank["uneven"]["error"] < 1e-12
        assert rank["uneven"]["empty"] == "the loader of rank 1 has no batch"


def test_a_trainer_goes_on_from_its_state(found):
    for rank in found[1]:
        result = rank["trainer"]
        assert result["epochs"] == [1, 2]
        assert result["samples"] == 3 * 4 + 2 * 5
        assert result["text"].startswith("epoch 1: loss ")
        assert result["same"]


def test_one_process_goes_on_from_the_state_of_all_ranks(found):
    engine, ranks = found
    for rank in ranks:
        result = rank["state"]
        names = [f"{layer}.{kind}" for layer in ("0.0", "0.1", "2") for kind in ("bias", "weight")]
        assert result["names"] == names
        assert result["same"] == 0.0
        if engine != "fsdp2":
            assert result["alone"] < 1e-12


def test_strong_scaling_divides_batches_and_weak_scaling_raises_rates(found):
    _, ranks = found
    assert sum(rank["scaling"]["rows"] for rank in ranks) == 17
    for number, rank in enumerate(ranks):
        result = rank["scaling"]
        assert result["error"] < 1e-12
        assert result["whole"] == "with strong scaling every rank would train on the whole batch"
        assert result["other"] == "rank 1 has another batch than rank 0", number
        assert result["rates"] == pytest.approx([0.1, 0.05 * 2**0.5])
        assert result["schedule"].startswith("the optimizer has a schedule already")


def test_the_alarm_names_the_step_and_the_layer_at_which_training_diverges(found):
    engine, ranks = found
    for rank in ranks:
        said = rank["diverges"]["said"]
        if engine == "fsdp2":  # shards gradients before they are seen; Trainer shows the loss
            assert not said
        else:
            assert said[0].startswith("training diverges at step 7"), said
            assert "; most of it in " in said[0]


@pytest.mark.parametrize("found", COMPRESSING, indirect=True, ids="-".join)
def test_compression_that_sends_everything_is_momentum_sgd(found):
    assert max(rank["compressed"]["error"] for rank in found[1]) < 1e-6


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_model_with_all_that_models_have_is_compressed(tmp_path, ranks):
    for rank in run_ranks(SCRIPT, tmp_path, ranks, "gloo", "allreduce", "awkward"):
        assert rank["awkward"]["all"]["error"] < 1e-6  # sums are float32
        assert rank["awkward"]["all"]["equal"]
        assert rank["awkward"]["few"]["equal"]
        assert 0 < rank["awkward"]["few"]["error"] < 1


def test_dgc_alone_warms_up():
    schedule = TrainingOptions(compression="dgc").dgc().density
    assert schedule.warmup_steps == 1000
    assert schedule.at(0) == pytest.approx(0.25, rel=0.02)
    own = TrainingOptions(compression="dgc", compression_warmup=10).dgc().density
    assert (own.steps_per_stage, own.density) == (3, 0.001)
    none = TrainingOptions(compression="auto", compression_warmup=0).dgc().density
    assert none.at(0) == 0.001


@pytest.mark.parametrize("found", OURS, indirect=True, ids="-".join)
def test_ranks_with_other_models_are_refused_with_the_first_difference(found):
    for rank in found[1]:
        assert rank["differ"]["what"] == "rank 1 trains another model than rank 0"
        assert "1.weight [3, 4] float32 on rank 0, 1.weight [4, 4]" in rank["differ"]["why"]
        assert rank["differ"]["options"] == "rank 1 trains with other options than rank 0"
        assert rank["differ"]["rate"].startswith("the optimizer of rank 1 is another one")
        assert "lr=0.1 in group 0 on rank 0, lr=1.1 in group 0" in rank["differ"]["rate"]


@pytest.mark.parametrize("found", OURS, indirect=True, ids="-".join)
def test_a_model_that_outlives_its_process_group_does_not_keep_it(found):
    """The threads of a group that is kept are ended with the interpreter, now and then by abort."""
    assert all(rank["group_ended"] for rank in found[1])


def test_without_a_process_group_one_process_trains():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared, same = prepare(model, optimizer)
    assert same is optimizer
    prepared(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert list(prepared.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine": "fast"},
        {"precision": "int8"},
        {"engine": "sharded", "compression": "dgc"},
        {"engine": "ddp", "compression": "dgc", "precision": "float16"},
        {"clip_norm": 0.0},
        {"sharding": True},
        {"scaling": "linear"},
        {"compression": "topk"},
        {"compression_warmup": 100},
        {"compression": "dgc", "compression_warmup": -1},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong):
    model = nn.Linear(3, 2)
    with pytest.raises(UsageError):
        prepare(model, torch.optim.SGD(model.parameters(), 0.1), **wrong)


def test_an_optimizer_of_another_model_is_refused():
    with pytest.raises(UsageError, match="no parameter of the model"):
        prepare(nn.Linear(3, 2), torch.optim.SGD(nn.Linear(3, 2).parameters(), 0.1))
