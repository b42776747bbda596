"""Plain collectives, one of which a rank does not enter: BACKEND FAULT RANK STEP."""

import sys

import torch
import torch.distributed as dist
from faults import commit

_, backend, fault, culprit, at = sys.argv
dist.init_process_group(backend)
rank, values = dist.get_rank(), torch.ones(1000)
for step in range(12):
    if step == int(at) and rank == int(culprit):
        if commit(fault):
            continue
        if fault == "order":
            dist.broadcast(values, 0)
    dist.all_reduce(values)
    values /= dist.get_world_size()
    dist.all_gather([torch.empty(1000) for _ in range(dist.get_world_size())], values)
dist.barrier()
dist.destroy_process_group()
