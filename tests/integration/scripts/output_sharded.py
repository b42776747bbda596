"""Saves sharded checkpoints, removes the one before, and loads the other rank's shard."""

import os
import shutil
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint

top = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(3):
    state = {
        "both": torch.full((300, 300), float(step)),
        f"of{rank}": torch.full((9,), rank + 10.0),
    }
    checkpoint.save(state, checkpoint_id=f"{top}/step{step}")
    dist.barrier()
    if rank == 0 and step:
        shutil.rmtree(f"{top}/step{step - 1}")
    dist.barrier()
loaded = {"both": torch.zeros(300, 300), f"of{1 - rank}": torch.zeros(9)}
checkpoint.load(loaded, checkpoint_id=f"{top}/step2")
assert loaded["both"].eq(2).all()
assert loaded[f"of{1 - rank}"].eq(11.0 - rank).all()
print(os.listdir(top))
dist.barrier()
dist.destroy_process_group()
