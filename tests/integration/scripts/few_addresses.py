"""Trains within a memory budget in a process that may not reserve addresses for a pool."""

import json
import resource
import sys

import torch
from torch import nn

from paceline.training import OutOfCore

model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
with OutOfCore(model, optimizer, budget_bytes=1 << 40, spill_folder=sys.argv[1]) as out_of_core:
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(512, 512)).square().mean().backward()
        optimizer.step()
    print(json.dumps({"is_pooled": out_of_core.session.allocator.is_pooled, "steps": 3}))
