"""A step captured layer by layer of its graph is the step captured module by module."""

import sys
from pathlib import Path

import pytest

from paceline.core.errors import UsageError
from paceline.core.workload import SharedParameter

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "integration/scripts"))

import pipeline_models  # noqa: E402  # by the path above
from torch import nn  # noqa: E402

from paceline.training.capture import TrainingStep, capture  # noqa: E402
from paceline.training.pipeline import graph  # noqa: E402
from paceline.training.pipeline.workload import capture_layers, resized  # noqa: E402

PHASES = ("forward", "backward", "optimizer")


def work_of(workload, phase):
    """Return the calls, FLOPs and bytes of a phase."""
    found = [
        (work.count, work.count * work.flops, work.count * work.bytes)
        for layer in workload.layers
        for work in layer.operations
        if work.phase == phase
    ]
    return tuple(map(sum, zip(*found, strict=True)))


def residual_step():
    model = pipeline_models.ResidualNet()
    target = torch.zeros(6, dtype=torch.long)
    return TrainingStep(
        module=model,
        inputs=torch.zeros(6, 2, 8, 8),
        target=target,
        loss_fn=nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )


def transformer_step():
    return TrainingStep(
        module=pipeline_models.Transformer(),
        inputs=torch.zeros(4, 6, dtype=torch.long),
        optimizer=torch.optim.Adam,
    )


@pytest.mark.parametrize("make", [residual_step, transformer_step])
def test_layers_of_the_graph_do_what_the_modules_do(make):
    step = make()
    by_module, by_layer = capture(step), capture_layers(step)
    for phase in PHASES:
        assert work_of(by_layer, phase) == work_of(by_module, phase), phase
    for name in ("parameter_bytes", "trained_bytes", "saved_bytes", "optimizer_bytes", "batch"):
        assert getattr(by_layer, name) == getattr(by_module, name), name
    layers = graph.capture(step.module, step.inputs).layers
    assert [layer.name for layer in by_layer.layers] == [layer.name for layer in layers]


def test_edges_skip_layers_and_shared_parameters_are_found():
    residual = capture_layers(residual_step())
    names = [layer.name for layer in residual.layers]
    stem = residual.edges[0]
    assert (stem.source, stem.bytes) == (names.index("stem"), 6 * 4 * 8 * 8 * 4)
    last_block = max(n for n, name in enumerate(names) if name.startswith("blocks.3"))
    assert stem.destinations[0] == 1
    assert stem.destinations[-1] >= last_block  # the skip over all blocks
    assert residual.shared == ()
    transformer = capture_layers(transformer_step())
    names = [layer.name for layer in transformer.layers]
    first, last = names.index("tokens"), len(names) - 1
    assert transformer.shared == (SharedParameter((first, last), 11 * 8 * 4),)
    assert transformer.layers[last].parameter_bytes == ()


def test_a_microbatch_of_any_size_is_captured_without_its_data():
    step = residual_step()
    small = capture_layers(resized(step, 2))
    assert small.batch == 2
    assert small.input_bytes * 3 == capture_layers(step).input_bytes
    assert step.inputs.shape[0] == 6
    assert resized(step, 6) is step


def test_what_cannot_be_captured_as_a_graph_is_captured_with_split_points():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            y = self.first(x)
            return self.second(y) if y.sum() > 0 else self.second(-y)

    step = TrainingStep(module=Branches(), inputs=torch.zeros(2, 3))
    with pytest.raises(UsageError, match="split_points"):
        capture_layers(step)
    cut = TrainingStep(
        module=Branches(), inputs=torch.zeros(2, 3), split_points=("first", "second")
    )
    assert [layer.name for layer in capture_layers(cut).layers] == ["first", "second"]


def test_a_step_of_another_size_has_the_same_mask():
    inputs = pipeline_models.masked_inputs(5, 5)
    step = TrainingStep(
        module=pipeline_models.Masked(),
        inputs=inputs,
        target=torch.zeros(5, 2),
        loss_fn=nn.functional.mse_loss,
    )
    smaller = resized(step, 2)
    assert smaller.inputs["x"].shape == (2, 5, 4)
    assert smaller.inputs["mask"] is inputs["mask"]
    assert smaller.inputs["places"] is inputs["places"]
    assert smaller.target.shape == (2, 2)
