"""Layers that compute their forward pass again in every step: which, and that nothing changes."""

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from paceline.training.capture import TrainingStep, capture  # noqa: E402
from paceline.training.measured.protocol import StepForm  # noqa: E402
from paceline.training.measured.steps import formed, loss_of  # noqa: E402
from paceline.training.out_of_core.recompute import recomputable, recomputed  # noqa: E402
from paceline.training.pipeline.workload import ResizableBatch  # noqa: E402


def model(normalisation=nn.LayerNorm):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), normalisation(8), nn.Dropout(0.5)) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(8, 2))


def test_a_recomputed_step_keeps_less_and_computes_more():
    module = model()
    step = TrainingStep(module=module, inputs=torch.zeros(4, 8))
    before = capture(step)
    with recomputed(module) as names:
        again = capture(step)
    assert names == ("0", "1")
    assert sum(layer.saved_bytes for layer in again.layers) < sum(
        layer.saved_bytes for layer in before.layers
    )
    calls = [
        sum(op.count for layer in w.layers for op in layer.operations) for w in (before, again)
    ]
    assert calls[1] > calls[0]
    assert capture(step) == before  # the module is as it was


def test_layers_with_statistics_of_batches_are_left_out():
    assert set(recomputable(model())) == {"0", "1"}
    assert recomputable(model(nn.BatchNorm1d)) == {}


def test_the_form_of_a_step_has_its_samples_in_turn_and_the_same_gradients():
    step = TrainingStep(module=model(), inputs=torch.arange(24.0).view(3, 8))
    batch = ResizableBatch(step)
    plain = formed(step, StepForm(threads=1, samples=5, passes=2, recompute=False), batch)
    assert plain.accumulation == 2
    assert torch.equal(plain.inputs, step.inputs[[0, 1, 2, 0, 1]])
    gradients = []
    for recompute in (False, True):
        own = TrainingStep(module=model(), inputs=step.inputs)
        shape = StepForm(threads=1, samples=5, passes=1, recompute=recompute)
        form = formed(own, shape, batch)
        torch.manual_seed(1)
        loss_of(form, form.module).backward()
        gradients.append([parameter.grad for parameter in form.module.parameters()])
    assert all(map(torch.equal, *gradients))
