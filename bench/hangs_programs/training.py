"""DistributedDataParallel, in which one rank commits a fault: BACKEND FAULT RANK STEP."""

import sys

import torch
import torch.distributed as dist
from faults import commit

_, backend, fault, culprit, at = sys.argv
dist.init_process_group(backend)
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    loss = model(torch.randn(4, 8)).sum()
    if step == int(at) and rank == int(culprit):
        if commit(fault):
            continue
        if fault == "order":
            dist.broadcast(torch.ones(4), 0)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
