"""Random models, trained in random ways: right, or refused by name."""

import copy
import io
from pathlib import Path

import pytest
import torch
from support.process_groups import run_ranks
from torch import nn
from torch.optim.swa_utils import AveragedModel

from paceline.core.errors import UsageError
from paceline.training import prepare

SCRIPT = Path(__file__).parents[2] / "bench" / "random_training" / "ranks.py"


def check(folder, ranks, backend, first, count):
    found = run_ranks(SCRIPT, folder, ranks, backend, first, count, deadline_s=60 + 4 * count)
    assert all(len(outcomes) == count for outcomes in found), found
    for seed in found[0]:
        said = [outcomes[seed] for outcomes in found]
        assert len({text.split(":")[0] for text in said}) == 1, (seed, said)
        assert said[0].startswith(("right", "refused: ")), (seed, said)
    assert sum(text == "right" for text in found[0].values()) > count // 3


@pytest.mark.parametrize(
    ("ranks", "backend", "first", "count"), [(2, "gloo", 0, 35), (3, "paceline", 100, 15)]
)
def test_training_is_that_of_one_process_or_refused(tmp_path, ranks, backend, first, count):
    check(tmp_path, ranks, backend, first, count)


@pytest.mark.campaign("torch")
@pytest.mark.parametrize(("ranks", "backend"), [(2, "gloo"), (2, "paceline"), (3, "gloo")])
def test_training_is_that_of_one_process_or_refused_in_many_cases(tmp_path, ranks, backend):
    check(tmp_path, ranks, backend, 10_000, 250)


# --- copies of a prepared model, in one process ---------------------------------------------------


@pytest.fixture(params=["float32", "bfloat16"])
def prepared(request):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return prepare(model, optimizer, precision=request.param)


def copies(model):
    yield "deepcopy", copy.deepcopy(model)
    yield "deepcopy of the given model", copy.deepcopy(model.module)
    yield "average", AveragedModel(model).module
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    yield "file", torch.load(file, weights_only=False)


def test_a_copy_of_a_prepared_model_computes_with_its_own_parameters(prepared):
    model, optimizer = prepared
    given = torch.randn(3, 4)
    before = model(given).detach()
    made = list(copies(model))
    model(given).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model(given), before)
    for name, other in made:
        assert torch.equal(other(given), before), name
        assert other.state_dict().keys() == model.state_dict().keys()
        other(given).sum().backward()  # and trains alone
        assert all(parameter.grad is not None for parameter in other.parameters()), name


def test_gradients_of_a_closure_are_not_clipped_and_no_closure_is_none():
    model = nn.Linear(2, 1)
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.1), clip_norm=1.0)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step(None)  # as wrappers of optimizers call it
    optimizer.step(closure=None)
    for arguments, keywords in (([lambda: 0.0], {}), ([], {"closure": lambda: 0.0})):
        with pytest.raises(UsageError, match="neither clipped nor unscaled"):
            optimizer.step(*arguments, **keywords)
