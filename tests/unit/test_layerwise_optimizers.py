"""LARS and LAMB step by step: against float64 references written here, and other libraries."""

import copy
import importlib
import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.optimizers import LAMB, LARS, lars, parameter_groups
from paceline.training.optimizers.norms import squared_norms

SHAPES = {"conv": (6, 3, 3, 3), "linear": (5, 24), "bias": (5,), "scale": (6,)}
STEPS = 12
RATES = [0.4 * min(1, (step + 1) / 5) * (1 - step / STEPS) ** 2 for step in range(STEPS)]


def values(seed, scale=1.0):
    generator = np.random.default_rng(seed)
    return {name: scale * generator.standard_normal(shape) for name, shape in SHAPES.items()}


GRADIENTS = [values(100 + step, scale=10.0 ** (step % 4 - 2)) for step in range(STEPS)]


def train(make, dtype=torch.float64, start=None, rates=RATES, gradients=GRADIENTS):
    """Return the weights after each step of an optimizer."""
    weights = {
        name: nn.Parameter(torch.tensor(value, dtype=dtype))
        for name, value in (start or values(0)).items()
    }
    optimizer = make(list(weights.values()))
    history = []
    for rate, step in zip(rates, gradients, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for name, weight in weights.items():
            weight.grad = torch.tensor(step[name], dtype=dtype)
        optimizer.step()
        history.append({name: weight.detach().double().numpy() for name, weight in weights.items()})
        history[-1] = {name: value.copy() for name, value in history[-1].items()}
    return history


def norm(value):
    return float(np.sqrt(np.sum(np.square(value))))


def lars_reference(
    *,
    momentum=0.9,
    decay=5e-4,
    trust=0.001,
    eps=0.0,
    start=None,
    rates=RATES,
    correct=False,
    nesterov=False,
):
    """Return the weights after each step as the paper has them, layer by layer."""
    weights = {name: value.copy() for name, value in (start or values(0)).items()}
    velocity = {name: np.zeros_like(value) for name, value in weights.items()}
    history, previous = [], None
    for rate, gradients in zip(rates, GRADIENTS, strict=False):
        for name, w in weights.items():
            g = gradients[name]
            local = 1.0
            if w.ndim > 1 and norm(w) > 0 and norm(g) > 0:
                local = trust * norm(w) / (norm(g) + decay * norm(w) + eps)
            kept = velocity[name] * (rate / previous if correct and previous else 1.0)
            growth = rate * local * (g + decay * w)
            velocity[name] = momentum * kept + growth
            ahead = momentum * velocity[name] + growth
            weights[name] = w - (ahead if nesterov else velocity[name])
        previous = rate
        history.append({name: value.copy() for name, value in weights.items()})
    return history


def lamb_reference(*, betas=(0.9, 0.999), eps=1e-6, decay=0.01, debias=True):
    weights = values(0)
    m = {name: np.zeros_like(value) for name, value in weights.items()}
    v = {name: np.zeros_like(value) for name, value in weights.items()}
    history = []
    for t, (rate, gradients) in enumerate(zip(RATES, GRADIENTS, strict=True), 1):
        for name, w in weights.items():
            g = gradients[name]
            m[name] = betas[0] * m[name] + (1 - betas[0]) * g
            v[name] = betas[1] * v[name] + (1 - betas[1]) * g * g
            mean = m[name] / (1 - betas[0] ** t) if debias else m[name]
            square = v[name] / (1 - betas[1] ** t) if debias else v[name]
            update = mean / (np.sqrt(square) + eps) + decay * w
            ratio = norm(w) / norm(update) if w.ndim > 1 else 1.0
            weights[name] = w - rate * ratio * update
        history.append({name: value.copy() for name, value in weights.items()})
    return history


def assert_same(history, expected, tolerance=1e-12):
    assert len(history) == len(expected) > 0
    for step, (got, wanted) in enumerate(zip(history, expected, strict=True)):
        for name in SHAPES:
            error = np.abs(got[name] - wanted[name]).max() / np.abs(wanted[name]).max()
            assert error <= tolerance, f"step {step}, {name}: {error}"


def differs(history, expected):
    return any(
        not np.allclose(got[name], wanted[name], rtol=1e-6, atol=0)
        for got, wanted in zip(history, expected, strict=True)
        for name in SHAPES
    )


# --- against the references ----------------------------------------------------------------------


MOMENTA = [{"momentum": 0.0}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}]


@pytest.mark.parametrize("momentum", MOMENTA, ids=["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("decay", [0.0, 5e-4, 0.1])
def test_lars_follows_the_paper(momentum, decay):
    history = train(lambda ps: LARS(ps, 1.0, **momentum, weight_decay=decay, eps=0.0))
    assert_same(history, lars_reference(**momentum, decay=decay))


@pytest.mark.parametrize("momentum", MOMENTA, ids=["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fused_operators_for_devices_do_the_same(monkeypatch, momentum, decay):
    """A CPU updates layer by layer; the other form runs here too, on the CPU."""
    monkeypatch.setattr(lars, "_are_on_cpu", lambda _: False)
    history = train(lambda ps: LARS(ps, 1.0, **momentum, weight_decay=decay, eps=0.0))
    assert_same(history, lars_reference(**momentum, decay=decay))


def test_nesterov_at_a_plain_rate_is_that_of_torch():
    """Layers that do not adapt, at one rate: stochastic gradient descent."""
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    flat = lambda ps: [{"params": ps, "layer_adaptation": False}]  # noqa: E731
    rates = [0.1] * len(RATES)
    ours = train(lambda ps: LARS(flat(ps), 0.1, **options), rates=rates)
    torchs = train(lambda ps: torch.optim.SGD(list(ps), 0.1, **options), rates=rates)
    assert_same(ours, torchs)


def test_lars_in_float32_stays_close_to_float64():
    history = train(lambda ps: LARS(ps, 1.0, weight_decay=5e-4), torch.float32)
    assert_same(history, lars_reference(eps=1e-8), tolerance=1e-5)


@pytest.mark.parametrize("debias", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_follows_the_paper(debias, decay):
    history = train(lambda ps: LAMB(ps, weight_decay=decay, bias_correction=debias))
    assert_same(history, lamb_reference(decay=decay, debias=debias))


def test_lamb_in_float32_stays_close_to_float64():
    history = train(lambda ps: LAMB(ps, weight_decay=0.01), torch.float32)
    assert_same(history, lamb_reference(), tolerance=1e-4)


# --- the traps of other implementations ----------------------------------------------------------


def test_a_changed_rate_leaves_the_velocity_as_it_was():
    """The rate belongs to what accumulates, not to the writing of the velocity."""
    history = train(lambda ps: LARS(ps, 1.0, weight_decay=5e-4, eps=0.0))
    assert differs(history, lars_reference(correct=True)), "rates change, so both forms must differ"
    assert_same(history, lars_reference())


def test_momentum_correction_multiplies_the_velocity_by_the_change_of_the_rate():
    rates = [0.1, 0.1, 0.4, 0.4, 0.05, 0.05, 0.05, 0.4]
    make = lambda ps: LARS(ps, 1.0, weight_decay=5e-4, eps=0.0, momentum_correction=True)  # noqa: E731
    history = train(make, rates=rates)
    assert_same(history, lars_reference(rates=rates, correct=True))


def test_momentum_correction_survives_a_rate_of_zero():
    rates = [0.1, 0.0, 0.1, 0.2]
    history = train(lambda ps: LARS(ps, 1.0, momentum_correction=True), rates=rates)
    assert all(np.isfinite(history[-1][name]).all() for name in SHAPES)
    for name in SHAPES:
        assert np.array_equal(history[0][name], history[1][name]), "a rate of 0 moves nothing"


def test_decay_is_in_the_gradient_and_in_the_denominator():
    decay, rates = 0.5, [1.0]
    start = values(0)
    got = train(
        lambda ps: LARS(ps, 1.0, weight_decay=decay, trust_coefficient=0.1, eps=0.0), rates=rates
    )[0]
    w, g = start["conv"], GRADIENTS[0]["conv"]
    local = 0.1 * norm(w) / (norm(g) + decay * norm(w))
    np.testing.assert_allclose(got["conv"], w - local * (g + decay * w), rtol=1e-12)


@pytest.mark.parametrize("make", [lambda ps: LARS(ps, 0.1), lambda ps: LAMB(ps, 0.1)])
@pytest.mark.parametrize("name", ["bias", "linear"])
def test_weights_that_start_at_zero_move(make, name):
    start = {**values(0), name: np.zeros(SHAPES[name])}
    assert np.abs(train(make, start=start, rates=[0.1])[0][name]).max() > 0


def test_a_layer_without_gradient_only_decays():
    gradients = [{**GRADIENTS[0], "linear": np.zeros(SHAPES["linear"])}]
    got = train(lambda ps: LARS(ps, 1.0, weight_decay=0.1), rates=[0.5], gradients=gradients)[0]
    np.testing.assert_allclose(got["linear"], (1 - 0.5 * 0.1) * values(0)["linear"], rtol=1e-12)


def test_without_decay_layers_still_adapt():
    start = values(0)
    got = train(lambda ps: LARS(ps, 1.0, momentum=0.0, eps=0.0), rates=[1.0])[0]
    moved = norm(got["linear"] - start["linear"])
    assert moved == pytest.approx(0.001 * norm(start["linear"]))


def test_parameters_of_one_dim_take_the_plain_rate():
    got = train(lambda ps: LARS(ps, 1.0, momentum=0.0), rates=[0.25])[0]
    for name in ("bias", "scale"):
        np.testing.assert_allclose(got[name], values(0)[name] - 0.25 * GRADIENTS[0][name])


def test_an_update_of_lamb_has_the_rate_times_the_norm_of_the_weights():
    start = values(0)
    got = train(lambda ps: LAMB(ps, weight_decay=0.01), rates=[0.25])[0]
    assert norm(got["conv"] - start["conv"]) == pytest.approx(0.25 * norm(start["conv"]))


def test_small_gradients_still_adapt():
    tiny = 1e-18
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.full((4, 4), tiny)
    LARS([weight], 1.0, momentum=0.0, trust_coefficient=0.5, eps=0.0).step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 4), 0.5))
    assert squared_norms([torch.full((4,), tiny)]).item() == pytest.approx(
        4 * tiny**2, rel=1e-5, abs=0
    )


def test_half_precision_norms_do_not_overflow():
    assert squared_norms([torch.full((4,), 60000.0, dtype=torch.float16)]).item() == pytest.approx(
        4 * 59999.0**2, rel=1e-3
    )


# --- state ---------------------------------------------------------------------------------------

MAKERS = {
    "LARS": lambda ps: LARS(ps, 0.3, weight_decay=1e-3, momentum_correction=True),
    "LAMB": lambda ps: LAMB(ps, 0.3, weight_decay=1e-3),
}


def a_model():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))


def steps(model, optimizer, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        model(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_without_gradients_touches_no_state(name):
    model = a_model()
    optimizer = MAKERS[name](model.parameters())
    steps(model, optimizer, 3)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] *= 2
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] /= 2
    torch.testing.assert_close((optimizer.state_dict(), model.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKERS)
def test_training_continues_exactly_from_a_state_dict(name):
    model = a_model()
    optimizer = MAKERS[name](model.parameters())
    steps(model, optimizer, 3)
    other = a_model()
    other.load_state_dict(model.state_dict())
    resumed = MAKERS[name](other.parameters())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *resumed.param_groups):
        group["lr"] = 0.05
    steps(model, optimizer, 3, seed=1)
    steps(other, resumed, 3, seed=1)
    for parameter, wanted in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, wanted)


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_of_an_optimizer_steps(name):
    model = a_model()
    optimizer = copy.deepcopy(MAKERS[name](model.parameters()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert any(
        not torch.equal(parameter, own)
        for parameter, own in zip(
            (p for group in optimizer.param_groups for p in group["params"]),
            (p for p in model.parameters() if p.ndim > 1),
            strict=False,
        )
    )


def test_the_loss_of_a_closure_is_returned():
    model = a_model()
    optimizer = LARS(model.parameters(), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure).item()
    assert optimizer.step(closure).item() != first


def test_norms_are_asked_for_once_in_a_step():
    """For all layers of all groups: one all-reduce where layers are sharded."""
    calls = []

    class Norms:
        def squared(self, tensors, parameters):
            calls.append(len(tensors))
            return squared_norms(tensors)

    model = a_model()
    for make in (LARS, LAMB):
        optimizer = make([{"params": [p]} for p in model.parameters()], 0.1, norms=Norms())
        steps(model, optimizer, 2)
    assert calls == [4, 4, 4, 4], "two weights and their updates, in each step"


def test_sparse_gradients_are_refused():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        LARS(embedding.parameters(), 0.1).step()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda ps: LARS(ps, -1.0), "lr"),
        (lambda ps: LARS(ps, float("nan")), "lr"),
        (lambda ps: LARS(ps, 1.0, momentum=1.0), "momentum"),
        (lambda ps: LARS(ps, 1.0, momentum=0.0, nesterov=True), "nesterov"),
        (lambda ps: LARS(ps, 1.0, weight_decay=-1e-4), "weight_decay"),
        (lambda ps: LAMB(ps, betas=(0.9, 1.0)), r"betas\[1\]"),
        (lambda ps: LAMB(ps, eps=-1.0), "eps"),
    ],
)
def test_impossible_values_are_refused(make, named):
    with pytest.raises(UsageError, match=named):
        make([nn.Parameter(torch.ones(2, 2))])


def test_lamb_on_float16_weights_is_refused():
    weight = nn.Parameter(torch.ones(2, 2, dtype=torch.float16))
    weight.grad = torch.full_like(weight, 1e-5)
    with pytest.raises(UsageError, match=r"float16.*Keep them in float32"):
        LAMB([weight]).step()
    assert torch.equal(weight, torch.ones_like(weight))


# --- parameter groups ----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.image_norm = nn.LayerNorm((4, 3, 3))  # three dims, and still a normalisation
        self.conv = nn.Conv2d(4, 4, 3)
        self.norm = nn.SyncBatchNorm(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))


def test_groups_by_module_and_shape():
    net = Net()
    names = {parameter: name for name, parameter in net.named_parameters()}
    weights, excluded = parameter_groups(net, weight_decay=0.1)
    assert [names[p] for p in weights["params"]] == ["embedding.weight", "conv.weight"]
    assert {names[p] for p in excluded["params"]} == {
        *("image_norm.weight", "image_norm.bias", "conv.bias", "norm.weight", "norm.bias"),
        *("head.bias", "gain"),
    }
    assert (weights["weight_decay"], weights["layer_adaptation"]) == (0.1, True)
    assert (excluded["weight_decay"], excluded["layer_adaptation"]) == (0.0, False)


def test_a_normalisation_of_several_dims_takes_the_plain_rate():
    net = nn.Sequential(nn.Conv2d(4, 4, 1), nn.LayerNorm((4, 3, 3)))
    before = net[1].weight.detach().clone()
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    LARS(parameter_groups(net, weight_decay=0.1), 0.25, momentum=0.0).step()
    torch.testing.assert_close(net[1].weight.detach(), before - 0.25)


def test_groups_serve_optimizers_of_torch():
    model = a_model()
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1), lr=0.1)
    steps(model, optimizer, 2)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_groups_of_one_kind_are_not_empty():
    assert len(parameter_groups(nn.Linear(3, 3, bias=False), weight_decay=0.1)) == 1
    with pytest.raises(UsageError, match="no trained parameter"):
        parameter_groups(nn.ReLU(), weight_decay=0.1)


def test_groups_with_names_keep_them():
    optimizer = LARS([{"params": list(a_model().named_parameters())}], 0.1)
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "3.weight"],
        ["0.bias", "1.weight", "1.bias", "3.bias"],
    ]


# --- against other libraries ---------------------------------------------------------------------


def timm_module(name):
    """Return a module of timm.optim without importing all of timm, which needs torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None:
        pytest.skip("timm is not installed")
    if "timm_optim" not in sys.modules:
        package = types.ModuleType("timm_optim")
        package.__path__ = [str(Path(spec.origin).parent / "optim")]
        sys.modules["timm_optim"] = package
    return importlib.import_module(f"timm_optim.{name}")


def matrices(ps):
    return [p for p in ps if p.ndim > 1], [p for p in ps if p.ndim <= 1]


@pytest.mark.parametrize("decay", [0.0, 5e-4])
def test_lars_equals_timm(decay):
    """In timm the rate stands outside the velocity, which momentum correction equals."""
    peer = timm_module("lars").Lars

    def theirs(ps):
        adapted, plain = matrices(ps)
        groups = [
            {"params": adapted, "always_adapt": True},
            {"params": plain, "weight_decay": 0.0},
        ]
        return peer(groups, lr=1.0, momentum=0.9, weight_decay=decay, eps=1e-8)

    def ours(ps):
        adapted, plain = matrices(ps)
        groups = [{"params": adapted}, {"params": plain, "weight_decay": 0.0}]
        return LARS(groups, 1.0, weight_decay=decay, momentum_correction=True)

    assert_same(train(ours), train(theirs))


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_lamb_equals_timm(decay):
    lamb = timm_module("lamb").Lamb

    def theirs(ps):
        adapted, plain = matrices(ps)
        groups = [
            {"params": adapted, "always_adapt": True},
            {"params": plain, "weight_decay": 0.0},
        ]
        return lamb(groups, lr=1.0, weight_decay=decay, max_grad_norm=None)

    def ours(ps):
        adapted, plain = matrices(ps)
        groups = [{"params": adapted}, {"params": plain, "weight_decay": 0.0}]
        return LAMB(groups, 1.0, weight_decay=decay)

    assert_same(train(ours), train(theirs), tolerance=1e-10)


def torch_optimizer():
    if importlib.util.find_spec("torch_optimizer") is None:
        pytest.skip("torch-optimizer is not installed")
    return importlib.import_module("torch_optimizer")


def test_lars_equals_torch_optimizer():
    """It adapts what decays; the rate stands outside the velocity."""
    peer = torch_optimizer().LARS

    def theirs(ps):
        adapted, plain = matrices(ps)
        groups = [{"params": adapted}, {"params": plain, "weight_decay": 0.0}]
        return peer(groups, lr=1.0, momentum=0.9, weight_decay=5e-4, trust_coefficient=0.001)

    def ours(ps):
        adapted, plain = matrices(ps)
        groups = [{"params": adapted}, {"params": plain, "weight_decay": 0.0}]
        return LARS(groups, 1.0, weight_decay=5e-4, momentum_correction=True)

    assert_same(train(ours), train(theirs))


def test_lamb_equals_torch_optimizer():
    """It adapts every parameter, and clamps the weights' norm unless that is large."""
    lamb = torch_optimizer().Lamb

    def ours(ps):
        return LAMB(
            [{"params": ps, "layer_adaptation": True}], weight_decay=0.01, bias_correction=False
        )

    history = train(lambda ps: lamb(ps, weight_decay=0.01, clamp_value=1e9))
    assert_same(train(ours), history)
