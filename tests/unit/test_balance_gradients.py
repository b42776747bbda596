"""Weights of unequal batches at the root of a backward pass."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from paceline.trace.collectors.hook_registry import HookRegistry  # noqa: E402
from paceline.training.balance.gradients import WeighedBackward, adds_samples_up  # noqa: E402


@pytest.fixture
def hooks():
    """Hooks in torch, which are taken out after the test."""
    registry = HookRegistry()
    yield registry
    registry.remove()


@pytest.fixture
def single_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def weigh(hooks):
    """Have backward passes weighted; what is returned says by how much, and counts calls."""
    state = {"weight": 1.0, "begun": 0, "ready": 0, "ended": 0}

    def begin(_roots):
        state["begun"] += 1
        return state["weight"]

    def count(name):
        state[name] += 1

    WeighedBackward(begin, lambda: count("ready"), lambda: count("ended")).install(hooks)
    return state


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def gradients(net):
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


@pytest.mark.parametrize("shares", [(5, 3), (1, 7), (4, 4), (2, 5, 1), (6, 1, 1)])
@pytest.mark.parametrize("parts", [1, 2])
def test_the_average_over_ranks_is_the_gradient_of_all_samples(weigh, shares, parts):
    """As DistributedDataParallel averages: the mean over ranks of what each accumulated."""
    ranks = len(shares)
    inputs = torch.randn(parts, 8, 6, dtype=torch.float64)
    labels = torch.randint(0, 3, (parts, 8))
    loss_fn = nn.CrossEntropyLoss()
    whole = model()
    for part in range(parts):
        loss_fn(whole(inputs[part]), labels[part]).backward()
    average = torch.zeros_like(gradients(whole))
    for rank, count in enumerate(shares):
        first = sum(shares[:rank])
        own = model()
        weigh["weight"] = ranks * count / sum(shares)
        for part in range(parts):
            rows = slice(first, first + count)
            loss = loss_fn(own(inputs[part, rows]), labels[part, rows])
            loss.backward()
        average += gradients(own) / ranks
    torch.testing.assert_close(average, gradients(whole), rtol=1e-12, atol=1e-15)


def test_models_in_a_chain_are_weighted_once(weigh):
    first, second = model(), nn.Linear(3, 1).double()
    inputs = torch.randn(4, 6, dtype=torch.float64)
    second(first(inputs)).mean().backward()
    expected = gradients(first), gradients(second)
    weigh["weight"] = 1.5
    for net in (first, second):
        net.zero_grad()
    second(first(inputs)).mean().backward()
    torch.testing.assert_close(gradients(first), 1.5 * expected[0])
    torch.testing.assert_close(gradients(second), 1.5 * expected[1])


def test_a_backward_pass_within_one_is_not_weighted_again(weigh):
    net = model()
    inputs = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    net(inputs).square().mean().backward()
    expected = gradients(net)
    net.zero_grad()
    weigh["weight"] = 0.5
    before = dict(weigh)
    checkpoint(net, inputs, use_reentrant=True).square().mean().backward()
    torch.testing.assert_close(gradients(net), 0.5 * expected)
    assert [weigh[name] - before[name] for name in ("begun", "ready", "ended")] == [1, 1, 1]


def test_all_gradients_are_there_when_ready_is_called(hooks):
    net, seen = model(), []

    def ready():
        seen.append(all(parameter.grad is not None for parameter in net.parameters()))

    WeighedBackward(lambda _: 1.0, ready, lambda: None).install(hooks)
    net(torch.randn(2, 6, dtype=torch.float64)).sum().backward()
    assert seen == [True]


def test_a_pass_that_fails_leaves_no_weight(weigh):
    root = torch.ones(3, dtype=torch.float64, requires_grad=True)
    weigh["weight"] = 2.0
    with pytest.raises(RuntimeError, match="scalar"):
        (root * 2).backward()
    weigh["weight"] = 1.0
    (root * 2).sum().backward()
    assert root.grad.tolist() == [2.0] * 3


def logits():
    return torch.randn(6, 3, requires_grad=True)


@pytest.mark.parametrize(
    ("loss", "adds_up"),
    [
        (lambda x: nn.functional.cross_entropy(x, torch.zeros(6, dtype=torch.long)), False),
        (
            lambda x: nn.functional.cross_entropy(
                x, torch.zeros(6, dtype=torch.long), reduction="sum"
            ),
            True,
        ),
        (lambda x: nn.functional.mse_loss(x, torch.zeros(6, 3), reduction="sum"), True),
        (lambda x: x.square().sum(), True),
        (lambda x: x.square().sum(dim=1).sum(), True),
        (lambda x: x.square().mean(), False),
        (lambda x: x.square().sum() / 6, True),  # of this rank, or of all? it does not show
        (lambda x: 2 * x.square().sum() / torch.tensor(12.0), True),
        (lambda x: torch.tensor(2.0) * -x.square().sum().to(torch.float64), True),
        (lambda x: x.square().mean() / 4, False),
        (lambda x: x.square().mean() * torch.tensor(65536.0), False),
        (lambda x: x.square().mean() + 0.1 * x.square().sum(), False),  # a penalty, not a loss
        (lambda x: x.square().mean() + x.abs().sum(), True),
        (lambda x: torch.stack([x.mean(), x.std()]).sum(), False),
    ],
)
def test_a_loss_that_adds_samples_up_is_seen(loss, adds_up):
    assert adds_samples_up(loss(logits()), 6) is adds_up


class WithLoss(nn.Module):
    """A model that computes its loss itself, of tokens of all ranks, as transformers do."""

    def __init__(self, reduction):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.reduction = reduction

    def forward(self, x):
        outputs = self.layer(x)
        labels = torch.zeros(6, dtype=torch.long)
        loss = nn.functional.cross_entropy(outputs, labels, reduction=self.reduction)
        return {"logits": outputs, "loss": loss / 12}


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(("reduction", "adds_up"), [("sum", True), ("mean", False)])
def test_a_loss_within_a_distributed_model_is_seen(reduction, adds_up):
    model = nn.parallel.DistributedDataParallel(WithLoss(reduction), find_unused_parameters=True)
    loss = model(logits().detach())["loss"]
    assert loss.grad_fn.name() == "_DDPSinkBackward"
    assert adds_samples_up(2 * loss, 6) is adds_up
