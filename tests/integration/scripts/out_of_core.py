"""An ordinary script: two ranks train a residual network with DistributedDataParallel and Adam."""

import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, ROWS = 256, 1024


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(x + self.second(torch.dropout(torch.relu(self.first(x)), 0.1, True)))


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Sequential(*(Residual() for _ in range(4))))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(7):
    optimizer.zero_grad()
    model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    optimizer.step()
digest = hashlib.sha256()
for parameter in model.parameters():
    digest.update(parameter.detach().numpy())
if dist.get_rank() == 0:
    print(json.dumps({"digest": digest.hexdigest()}))
dist.destroy_process_group()
