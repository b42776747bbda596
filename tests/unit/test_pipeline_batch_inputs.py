"""Which inputs are divided into microbatches, where their sizes do not tell."""

import logging
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[1] / "integration/scripts"))

import pipeline_models  # noqa: E402  # by the path above
from torch import nn  # noqa: E402

from paceline.training.pipeline.batch_inputs import inputs_without_samples  # noqa: E402
from paceline.training.pipeline.graph import capture  # noqa: E402
from paceline.training.pipeline.microbatches import divided_leaves, split  # noqa: E402


def whole(model, inputs):
    return inputs_without_samples(capture(model, inputs), inputs)


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_a_mask_and_places_are_whole_whatever_the_number_of_samples(samples):
    inputs = pipeline_models.masked_inputs(samples, 5)
    assert whole(pipeline_models.Masked(), inputs) == {"mask", "places"}


def test_torch_says_nothing_of_the_runs_that_do_not_fit(monkeypatch):
    said = []
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler()])
    monkeypatch.setattr(logger.handlers[0], "emit", said.append)
    whole(pipeline_models.Masked(), pipeline_models.masked_inputs(5, 5))
    assert not said


def test_inputs_that_all_have_the_samples_are_divided():
    model, inputs, _, _ = pipeline_models.make("many", 6)
    torch.set_default_dtype(torch.float32)
    assert whole(model.float(), {name: x.float() for name, x in inputs.items()}) == {"bias"}


class Decides(nn.Module):
    """It is exported, as models of libraries are."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask=None, **options):
        if x.sum is not None and mask is not None and mask.dim() != 2:
            raise ValueError("no such mask")
        x = torch.tanh(self.first(x))
        return self.second(torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x)


def test_an_exported_model_has_inputs_for_all_samples_too():
    inputs = {"x": torch.randn(5, 5, 4), "mask": torch.zeros(5, 5)}
    captured = capture(Decides(), inputs)
    assert captured.example is not None
    assert inputs_without_samples(captured, inputs) == {"mask"}


def test_nothing_is_said_to_be_whole_without_an_example_that_runs():
    model = pipeline_models.Masked()
    assert inputs_without_samples(capture(model), None) == frozenset()
    wrong = {"mask": torch.zeros(3, 3), "x": torch.zeros(3, 3, 9), "places": torch.arange(3)}
    assert inputs_without_samples(capture(model, wrong), wrong) == frozenset()


def test_what_is_whole_is_in_each_microbatch_as_it_is():
    inputs = pipeline_models.masked_inputs(5, 5)
    parts = split(inputs, [2, 2, 1], frozenset({"mask", "places"}))
    assert [part["x"].shape[0] for part in parts] == [2, 2, 1]
    assert all(part["mask"] is inputs["mask"] for part in parts)
    (first,) = divided_leaves(inputs, frozenset({"mask", "places"}))
    assert first is inputs["x"]
