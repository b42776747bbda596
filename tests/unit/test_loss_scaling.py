"""Loss scaling against torch.amp.GradScaler, master weights against fp32: exact trajectories."""

import copy
import dataclasses
import itertools
from collections import namedtuple

import pytest
import torch
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.optimizers import LAMB, LARS, LargeBatchRate, large_batch_schedule
from paceline.training.precision import LossScaler, MasterWeights

STEPS = 40


def a_model():
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator) * (300.0 if step % 13 == 7 else 1.0)
    return x, torch.randint(3, (8,), generator=generator)


def by_torch(make, initial_scale, interval, dtype=torch.float16):
    model = a_model()
    optimizer = make(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=initial_scale, growth_interval=interval)
    scales = []
    for step in range(STEPS):
        x, y = batch(step)
        with torch.autocast("cpu", dtype=dtype):
            loss = nn.functional.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, model, optimizer


def by_us(make, initial_scale, interval, dtype=torch.float16):
    model = a_model()
    optimizer = make(model.parameters())
    scaler = LossScaler(initial_scale=initial_scale, growth_interval=interval)
    scaler.attach(optimizer)
    scales = []
    for step in range(STEPS):
        x, y = batch(step)
        with torch.autocast("cpu", dtype=dtype):
            outputs = model(x)
        loss = nn.functional.cross_entropy(scaler.scale_outputs(outputs), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.scale)
    return scales, model, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        lambda ps: torch.optim.Adam(ps, lr=0.01),
        lambda ps: LARS(ps, 2.0, momentum_correction=True),
        lambda ps: LAMB(ps, 0.05),
    ],
    ids=["SGD", "Adam", "LARS", "LAMB"],
)
@pytest.mark.parametrize(("initial_scale", "interval"), [(2.0**22, 4), (2.0**10, 3)])
def test_the_scale_and_the_weights_are_those_of_torch(make, initial_scale, interval):
    theirs, model, optimizer = by_torch(make, initial_scale, interval)
    ours, own_model, own_optimizer = by_us(make, initial_scale, interval)
    assert ours == theirs
    changes = [b / a for a, b in itertools.pairwise(theirs)]
    assert {0.5, 1.0, 2.0} == set(changes), "the trajectory has overflows and growth"
    for parameter, wanted in zip(own_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
    torch.testing.assert_close(
        own_optimizer.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0
    )


def test_any_factors_follow_torch():
    torchs = torch.amp.GradScaler(
        "cpu", init_scale=3e38, growth_factor=3.0, backoff_factor=0.25, growth_interval=2
    )
    torchs.scale(torch.ones(()))
    ours = LossScaler(initial_scale=3e38, growth_factor=3.0, backoff_factor=0.25, growth_interval=2)
    for found in [False, False, False, True, False, False, False, False, True, True, False]:
        torch._amp_update_scale_(
            torchs._scale, torchs._growth_tracker, torch.tensor(float(found)), 3.0, 0.25, 2
        )
        ours.update(found)
        assert ours.scale == pytest.approx(torchs.get_scale(), rel=1e-6)


def test_small_gradients_of_fp16_outputs_survive():
    """The gradient of an fp16 output is scaled before it is rounded to fp16."""
    scaler = LossScaler()
    weight = torch.ones((), dtype=torch.float16, requires_grad=True)
    (scaler.scale_outputs(weight * 1) * 1e-9).backward()
    assert weight.grad.item() == pytest.approx(1e-9 * 65536, rel=1e-3)
    weight.grad = None
    (weight * 1).float().mul(1e-9).backward()
    assert weight.grad.item() == 0, "without scaling it would be lost"


Pair = namedtuple("Pair", "first second")  # noqa: PYI024  # the plain form


@dataclasses.dataclass(frozen=True)
class Result:
    logits: torch.Tensor
    name: str = "x"
    tokens: torch.Tensor | None = None


def test_every_floating_tensor_of_a_nested_output_is_scaled():
    scaler = LossScaler(initial_scale=8.0)
    leaves = [torch.ones(2, requires_grad=True) for _ in range(6)]
    ids = torch.arange(3)
    a, b, c, d, e, f = (leaf * 1 for leaf in leaves)
    given = {"a": a, "b": [b, (c, None)], "d": Pair(d, 3), "e": Result(e, tokens=ids), "f": f}
    outputs = scaler.scale_outputs(given)
    assert isinstance(outputs["d"], Pair)
    assert isinstance(outputs["e"], Result)
    assert outputs["e"].tokens is ids
    assert outputs["b"][1][1] is None
    assert torch.equal(outputs["a"], a)
    total = outputs["a"] + outputs["b"][0] + outputs["b"][1][0] + outputs["d"].first
    (total + outputs["e"].logits + outputs["f"]).sum().backward()
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.full((2,), 8.0))


def test_an_output_whose_tensors_cannot_be_found_is_refused():
    class Opaque:
        logits = torch.ones(2)

    with pytest.raises(UsageError, match="Opaque"):
        LossScaler().scale_outputs([Opaque()])


def test_accumulated_backward_passes_have_one_scale():
    scaler = LossScaler(initial_scale=4.0)
    model = a_model()
    for step in (0, 1):
        x, y = batch(step)
        nn.functional.cross_entropy(scaler.scale_outputs(model(x)), y).backward()
    assert not scaler.unscale_and_check(model.parameters())
    plain = a_model()
    for step in (0, 1):
        x, y = batch(step)
        nn.functional.cross_entropy(plain(x), y).backward()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_a_skipped_step_touches_no_state(bad):
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    rate = LargeBatchRate(batch=8, reference_batch=1, epochs=4, steps_per_epoch=5, warmup_epochs=1)
    scheduler = large_batch_schedule(optimizer, rate)
    scaler = LossScaler(initial_scale=16.0)
    scaler.attach(optimizer)

    def step(spoiled):
        x, y = batch(0)
        nn.functional.cross_entropy(scaler.scale_outputs(model(x)), y).backward()
        if spoiled:
            model[2].bias.grad[1] = bad
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    step(spoiled=False)
    step(spoiled=False)
    parts = (model, optimizer)
    before = copy.deepcopy([part.state_dict() for part in parts])
    schedule = scheduler.last_epoch
    step(spoiled=True)
    torch.testing.assert_close([part.state_dict() for part in parts], before, rtol=0, atol=0)
    assert scheduler.last_epoch == schedule
    assert (scaler.scale, scaler.skipped_in_a_row) == (8.0, 1)
    step(spoiled=False)
    assert scheduler.last_epoch == schedule + 1
    assert scaler.skipped_in_a_row == 0


def test_gradients_are_unscaled_before_clipping():
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = LossScaler(initial_scale=2.0**12)
    scaler.attach(optimizer)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
    )
    x, y = batch(0)
    nn.functional.cross_entropy(scaler.scale_outputs(model(x)), y).backward()
    scaled = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    optimizer.step()
    assert seen[0] == pytest.approx(scaled / 2.0**12, rel=1e-6)


def test_a_scaler_that_is_not_enabled_only_checks():
    scaler = LossScaler(enabled=False)
    outputs = [torch.ones(2)]
    assert scaler.scale_outputs(outputs) is outputs
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([3.0, 4.0])
    assert not scaler.unscale_and_check([weight])
    assert torch.equal(weight.grad, torch.tensor([3.0, 4.0]))
    weight.grad[0] = float("nan")
    assert scaler.unscale_and_check([weight])
    scaler.update(found_inf=True)
    assert scaler.scale == 1.0
    assert scaler.is_exhausted


def test_a_scaler_is_exhausted_when_no_smaller_scale_can_help():
    scaler = LossScaler(initial_scale=4.0)
    exhausted = []
    for _ in range(4):
        scaler.update(found_inf=True)
        exhausted.append(scaler.is_exhausted)
    assert exhausted == [False, False, True, True], "the third step overflowed at the scale 1"
    scaler.update(found_inf=False)
    assert not scaler.is_exhausted


def test_another_reason_not_to_step_is_agreed_on_too():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    scaler = LossScaler()
    assert scaler.unscale_and_check([weight], found=torch.ones(()))
    assert not scaler.unscale_and_check([weight], found=torch.zeros(()))


def test_sparse_gradients_are_unscaled():
    embedding = nn.Embedding(10, 4, sparse=True)
    scaler = LossScaler(initial_scale=4.0)
    scaler.scale_outputs(embedding(torch.tensor([1, 1, 2]))).sum().backward()
    assert not scaler.unscale_and_check(embedding.parameters())
    assert embedding.weight.grad.to_dense()[1].tolist() == [2.0] * 4


def test_gradients_in_fp16_are_refused():
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(UsageError, match="MasterWeights"):
        LossScaler().unscale_and_check([weight])


@pytest.mark.parametrize(
    "wrong",
    [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": 0}, {"initial_scale": 0}],
)
def test_impossible_scales_are_refused(wrong):
    with pytest.raises(UsageError, match="scale"):
        LossScaler(**wrong)


def test_a_scaler_continues_from_its_state_dict():
    course = [False, True, False, False, False, True, True, False, False, False, False]
    scaler = LossScaler(growth_interval=3)
    for found in course[:4]:
        scaler.update(found)
    other = LossScaler(growth_interval=3)
    other.load_state_dict(scaler.state_dict())
    scales = []
    for each in (scaler, other):
        scales.append([])
        for found in course[4:]:
            each.update(found)
            scales[-1].append(each.scale)
    assert scales[0] == scales[1]
    assert len(set(scales[0])) > 2


# --- master weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights_keep_updates_that_low_precision_loses(dtype):
    weights = {}
    for kind in ("plain", "masters"):
        model = nn.Linear(4, 4, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        if kind == "masters":
            MasterWeights(model, optimizer).attach(optimizer)
        for _ in range(500):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        weights[kind] = model.weight.float().mean().item()
    assert weights["plain"] == 1.0, "each update is rounded away"
    assert weights["masters"] == pytest.approx(1 - 500e-4, abs=2e-3)


@pytest.mark.parametrize(
    "make",
    [lambda ps: torch.optim.Adam(ps, lr=0.01), lambda ps: LAMB(ps, 0.01), lambda ps: LARS(ps, 1.0)],
    ids=["Adam", "LAMB", "LARS"],
)
def test_masters_are_fp32_weights_that_took_the_same_gradients(make):
    model = a_model().to(torch.bfloat16)
    reference = copy.deepcopy(model).float()
    optimizer = make(model.parameters())
    masters = MasterWeights(model, optimizer)
    masters.attach(optimizer)
    plain = make(reference.parameters())
    for step in range(5):
        x, y = batch(step)
        nn.functional.cross_entropy(model(x.bfloat16()).float(), y).backward()
        gradients = [p.grad for p in model.parameters()]
        for parameter, gradient in zip(reference.parameters(), gradients, strict=True):
            parameter.grad = gradient.float()
        optimizer.step()
        plain.step()
    for name, parameter in reference.named_parameters():
        assert torch.equal(masters.masters[name], parameter)
        assert torch.equal(dict(model.named_parameters())[name], parameter.bfloat16())


def test_masters_with_loss_scaling_skip_overflows():
    model = a_model().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    MasterWeights(model, optimizer).attach(optimizer)
    scaler = LossScaler(initial_scale=2.0**20, growth_interval=4)
    scaler.attach(optimizer)
    scales = []
    for step in range(20):
        x, y = batch(0 * step)
        loss = nn.functional.cross_entropy(scaler.scale_outputs(model(x.half())), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.scale)
        if step == 0:
            first = loss.item()
    assert min(scales) < 2.0**20
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert loss.item() < 0.8 * first


def test_masters_are_saved_by_name_with_all_their_bits():
    model = a_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    masters = MasterWeights(model, optimizer)
    masters.attach(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    saved = copy.deepcopy(masters.state_dict())
    assert list(saved) == [name for name, _ in model.named_parameters()]
    other = a_model().to(torch.bfloat16)
    restored = MasterWeights(other, torch.optim.SGD(other.parameters(), lr=1e-3))
    restored.load_state_dict(saved)
    for name, parameter in other.named_parameters():
        assert torch.equal(restored.masters[name], saved[name])
        assert torch.equal(parameter, saved[name].bfloat16())
    with pytest.raises(UsageError, match=r"0\.bias"):
        restored.load_state_dict({k: v for k, v in saved.items() if k != "0.bias"})


def test_masters_come_before_the_first_step():
    model = a_model().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(UsageError, match="without steps"):
        MasterWeights(model, optimizer)
