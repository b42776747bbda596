"""Models that train out of core, and a budget that half of their tensors fit."""

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn

from paceline.schedules.memory import least_budget_bytes, plan_memory, target_budget_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "scripts"))
from out_of_core_models import ROWS, WIDTH, residuals, rows

__all__ = ["ROWS", "WIDTH", "residuals", "rows"]

MIB = 1 << 20
PLENTY = 1 << 40


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        layers = []
        for inputs in (3, 32, 32, 32, 32):
            layers += [nn.Conv2d(inputs, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(True)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.body(x).mean(dim=(2, 3)))


def make(kind):
    """Return a model and a batch."""
    torch.manual_seed(0)
    if kind == "cnn":
        return Cnn(), torch.randn(16, 3, 32, 32)
    return residuals(), rows()


def train(model, batch, steps, optimizer, after_step=lambda step: None):
    """Return digests of the gradients of every step; copies would count as memory of the step."""
    return train_on(model, batch, range(steps), optimizer, after_step)


def train_on(model, batch, steps, optimizer, after_step=lambda step: None):
    """Go on with the steps of these numbers."""
    found = []
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(batch(step) if callable(batch) else batch).square().mean().backward()
        found.append([digest(parameter.grad) for parameter in model.parameters()])
        optimizer.step()
        after_step(step)
    return found


def digest(tensor):
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy()).hexdigest()


def plan_for_half(out_of_core, monkeypatch):
    """Have a budget of `PLENTY` become one that needs most tensors to be away, for this step.

    It is known no earlier, and chosen again where a later step is recorded: what else the process
    holds, as other tests left it, changes meanwhile by more than these models take.
    """
    session = out_of_core.session

    def target_of(profile, budget_bytes):
        assert budget_bytes == session.budget_bytes
        least = least_budget_bytes(profile)
        if session.budget_bytes == PLENTY or least >= session.budget_bytes:
            most = plan_memory(profile, session.planning.tier(), PLENTY).in_core_peak_bytes
            assert most - least > 5 * MIB
            session.budget_bytes = least + (most - least) // 2
        return target_budget_bytes(profile, session.budget_bytes)

    monkeypatch.setattr("paceline.training.out_of_core.planning.target_budget_bytes", target_of)
