"""What the trainer takes: batches of several inputs, a scheduler of learning rates, models."""

import pytest
import torch
from torch import nn

from paceline.core.errors import UsageError
from paceline.training import Trainer, prepare


class Difference(nn.Module):
    """Takes its inputs by name or by place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, more, less):
        return self.layer(more - less)


def fitted(batch):
    torch.manual_seed(0)
    model = Difference()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.functional.mse_loss)
    (epoch,) = trainer.fit([batch], epochs=1)
    return epoch.loss


def test_inputs_are_a_tensor_or_arguments_by_place_or_name():
    more, less, target = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 1)
    by_name = fitted(({"less": less, "more": more}, target))
    assert by_name == fitted(((more, less), target)) == fitted(([more, less], target))
    with pytest.raises(UsageError, match="the model does not take these inputs"):
        fitted((more, target))


def test_a_scheduler_of_learning_rates_is_no_schedule_of_a_pipeline():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with pytest.raises(UsageError, match="schedule is the order of a pipeline") as raised:
        Trainer(model, optimizer, nn.functional.mse_loss, schedule=scheduler)
    assert raised.value.fix == "Give it as lr_scheduler"
    trainer = Trainer(model, optimizer, nn.functional.mse_loss, lr_scheduler=scheduler)
    batches = [(torch.ones(4, 2), torch.ones(4, 1))] * 2
    list(trainer.fit(batches, epochs=1))
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match="weight is on the device meta, and has no values"):
        prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
