"""Trains on one rank without a process group, and records itself if it is asked to."""

import os
import sys

import torch

if sys.argv[2:]:
    import paceline

    paceline.record(sys.argv[2])

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print(os.environ.get("OWN_SITE", ""), "sitecustomize" in sys.modules)
