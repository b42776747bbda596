"""Trains a small model in two stages: a value of the first one goes to the second."""

import sys

import torch
import torch.distributed as dist
from torch import nn

from paceline.training import prepare

STEPS, SAMPLES, WIDTH = 24, 32, 64

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prepared = prepare(
    model,
    optimizer,
    partitions=2,
    microbatches=int(sys.argv[1]),
    schedule=sys.argv[2],
    layers=(4, 4),
    loss_fn=nn.functional.mse_loss,
    example_inputs=torch.zeros(8, WIDTH),
)
for step in range(STEPS):
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    prepared.forward_backward(inputs, inputs.sin())
    optimizer.step()
    if step % 8 == 0:
        prepared.model.eval()
        prepared.model(inputs)
        prepared.model.train()
dist.destroy_process_group()
