"""Momentum is the compressor's, weight decay keeps its own, and the steps are those of SGD."""

import pytest
import torch
from torch import nn

from paceline.core.errors import ConfigError, UsageError
from paceline.training.compression import (
    DeepGradientCompression,
    DensitySchedule,
    DGCOptions,
    MomentumTakeover,
)
from paceline.training.compression.hooks import is_finite


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def train(model, optimizer, compressor=None, steps=20):
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        loss = model(torch.randn(4, 6, generator=random)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        if compressor is not None:
            compressor.reduce((name, value.grad) for name, value in model.named_parameters())
            compressor.end_step()
        optimizer.step()
        scheduler.step()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("nesterov", [False, True])
def test_at_density_1_the_steps_are_those_of_sgd_with_decay_of_some_parameters(nesterov):
    def optimizer_of(model):
        matrices = [value for value in model.parameters() if value.dim() > 1]
        vectors = [value for value in model.parameters() if value.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors}]
        return torch.optim.SGD(groups, lr=0.02, momentum=0.9, nesterov=nesterov)

    plain, model = model_of(), model_of()
    train(plain, optimizer_of(plain))
    optimizer = optimizer_of(model)
    takeover = MomentumTakeover(optimizer, model.named_parameters())
    options = DGCOptions(
        density=DensitySchedule(density=1.0),
        momentum=takeover.momentum,
        nesterov=takeover.nesterov,
        mask_momentum=False,
    )
    train(model, optimizer, DeepGradientCompression(options))
    assert float((flat(plain) - flat(model)).abs().max()) < 1e-6
    assert sorted(takeover.state_dict()["velocity"]) == ["0.weight", "2.weight"]


def test_the_optimizer_gets_its_momentum_back():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.8, weight_decay=0.01)
    takeover = MomentumTakeover(optimizer, model.named_parameters())
    assert optimizer.param_groups[0]["momentum"] == 0.0
    takeover.release(optimizer)
    group = optimizer.param_groups[0]
    assert (group["momentum"], group["weight_decay"]) == (0.8, 0.01)
    train(model, optimizer, steps=1)
    assert takeover.state_dict()["velocity"] == {}


def test_optimizers_with_another_momentum_are_refused():
    model = model_of()
    first, second = model.parameters(), list(model.parameters())
    with pytest.raises(UsageError, match=r"needs torch\.optim\.SGD"):
        MomentumTakeover(torch.optim.Adam(first), model.named_parameters())
    with pytest.raises(UsageError, match="dampening"):
        MomentumTakeover(
            torch.optim.SGD(second, 0.1, momentum=0.9, dampening=0.1), model.named_parameters()
        )
    groups = [{"params": second[:1], "momentum": 0.5}, {"params": second[1:]}]
    with pytest.raises(UsageError, match="one momentum"):
        MomentumTakeover(torch.optim.SGD(groups, 0.1, momentum=0.9), model.named_parameters())


def test_options_and_states_that_make_no_sense_are_refused():
    for wrong in ({"momentum": 1.0}, {"clip_norm": 0.0}):
        with pytest.raises(ConfigError):
            DGCOptions(**wrong)
    with pytest.raises(UsageError, match="version 9"):
        DeepGradientCompression().load_state_dict({"version": 9})


def test_a_sum_that_overflows_is_no_sign_of_an_infinity():
    assert is_finite(torch.tensor([3e38, 3e38]))
    assert not is_finite(torch.tensor([float("inf"), 1.0]))
    assert not is_finite(torch.tensor([float("inf"), -float("inf"), 1.0]))


def test_tensors_without_elements_and_with_one_are_compressed():
    compressor = DeepGradientCompression(
        DGCOptions(momentum=0.0, density=DensitySchedule(density=0.001, steps_per_stage=0))
    )
    shapes = {"none": (0, 4), "scalar": (), "one": (1, 1), "small": (3, 5)}
    gradients = {name: torch.ones(shape) for name, shape in shapes.items()}
    compressor.reduce(gradients.items())
    assert {name: float(value.sum()) for name, value in gradients.items()} == {
        "none": 0.0,
        "scalar": 1.0,
        "one": 1.0,
        "small": 1.0,
    }
    assert sorted(compressor.state_dict()["residual"]) == ["one", "small"]


def test_gradients_of_16_bits_are_accumulated_in_32():
    compressor = DeepGradientCompression(
        DGCOptions(density=DensitySchedule(density=0.25, steps_per_stage=0))
    )
    gradient = torch.tensor([[1.0, 2.0], [3.0, 257.0]], dtype=torch.bfloat16)
    for _ in range(3):
        compressor.reduce([("w", gradient)])
        compressor.end_step()
    state = compressor.state_dict()
    assert state["step"] == 3
    assert state["residual"]["w"].dtype is torch.float32
