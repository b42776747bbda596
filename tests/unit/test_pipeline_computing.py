"""The stages of a model on one rank: what they compute, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

from paceline.core.errors import UsageError
from paceline.schedules.pipeline import PipelineAction, PipelineSchedule
from paceline.training import prepare
from paceline.training.engine.ranks import Ranks
from paceline.training.pipeline.computing import ComputeOptions, StageComputing
from paceline.training.pipeline.graph import capture
from paceline.training.pipeline.mesh import StageMesh
from paceline.training.pipeline.runtime import PipelineRuntime
from paceline.training.pipeline.stages import cut


class Uses(nn.Module):
    """Uses the skip only where the values are large."""

    def forward(self, x, skip):
        return x + skip if x.mean() > 0 else x


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.uses = nn.Linear(1, 1), nn.Identity(), Uses()

    def forward(self, x):
        skip = self.first(x)
        return self.uses(self.second(x), skip)


class Changes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), Adds()

    def forward(self, x):
        return self.last(self.first(x), x)


class Adds(nn.Module):
    def forward(self, y, x):
        if y.shape[0] > 0:
            (x if self.changes == "input" else y).add_(1)
        return y


def test_a_value_that_only_some_microbatches_use_has_the_gradient_of_one_process():
    model, inputs = Skips(), torch.tensor([[2.0], [-1.0]])
    alone = copy.deepcopy(model)
    expected = torch.cat([alone(inputs[:1]), alone(inputs[1:])]).mean()
    expected.backward()
    staged = cut(capture(model), [1])
    assert [stage.layers for stage in staged.stages] == [("first",), ("second", "uses")]
    options = ComputeOptions(loss_fn=lambda output, _: output.mean())
    runtime = PipelineRuntime(
        {stage.number: StageComputing(stage, options) for stage in staged.stages},
        staged.edges,
        StageMesh(Ranks(None, 0, 1, None), (0, 0), 1),
        None,
        microbatches=2,
        device=torch.device("cpu"),
    )
    order = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    actions = tuple(PipelineAction(kind, stage, m) for m in (0, 1) for kind, stage in order)
    schedule = PipelineSchedule(
        name="test", stages=2, microbatches=2, rank_of=(0, 0), actions=(actions,)
    )
    loss = runtime.run(schedule, {"x": inputs}, None, [1, 1])
    assert torch.equal(loss, expected)
    assert torch.equal(model.first.weight.grad, alone.first.weight.grad)


@pytest.mark.parametrize("changes", ["value", "input"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_change_in_place_of_what_another_stage_has_is_refused(changes, requires_grad):
    model = Changes()
    model.last.changes = changes
    staged = cut(capture(model), [1])
    computing = StageComputing(staged.stages[1], ComputeOptions(loss_fn=lambda y, _: y.sum()))
    received = {"first": torch.ones(3, 2, requires_grad=requires_grad)}
    name = "first" if changes == "value" else "x"
    with pytest.raises(UsageError, match=f"stage 1 changes {name}"):
        computing.forward(0, {"x": torch.ones(3, 2)}, received, lambda y: y.sum())


@pytest.mark.parametrize(
    "option",
    [
        {"microbatches": 2},
        {"schedule": "1f1b"},
        {"layers": (1, 1)},
        {"stages_per_rank": 2},
        {"recompute": True},
        {"split_points": ("0",)},
    ],
)
def test_options_of_stages_are_refused_without_stages(option):
    model = nn.Sequential(nn.Linear(2, 2))
    (name,) = option
    with pytest.raises(UsageError, match=f"{name} has no effect on a model that is not divided"):
        prepare(model, torch.optim.SGD(model.parameters(), 0.1), **option)
