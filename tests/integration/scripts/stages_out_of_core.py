"""A rank with one of two stages: STORE RANK RANKS FOLDER. Trains in core, then within a budget."""

import copy
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from out_of_core_models import residuals, rows
from torch import nn

from paceline.training import prepare

RANK, RANKS, FOLDER = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
PLENTY = 1 << 40
STEPS = 5


def train(model, budget):
    """Return digests of this rank's gradients in each step, and what came of the budget."""
    model = copy.deepcopy(model)
    prepared = prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        partitions=RANKS,
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        example_inputs=rows(),
        memory_budget=budget,
        spill_folder=FOLDER,
        alarm=False,
    )
    digests = []
    for step in range(STEPS):
        torch.manual_seed(step)
        prepared.optimizer.zero_grad()
        batch = rows()
        prepared.forward_backward(batch, torch.zeros_like(batch))
        digest = hashlib.sha256()
        for group in prepared.optimizer.param_groups:
            for parameter in group["params"]:
                digest.update(parameter.grad.numpy())
        digests.append(digest.hexdigest())
        prepared.optimizer.step()
    if prepared.out_of_core is None:
        return digests, None
    found = prepared.out_of_core.to_json()
    found["least_bytes"] = max(prepared.out_of_core.session.profile.floor_bytes)
    prepared.out_of_core.close()
    return digests, found


dist.init_process_group(
    "gloo", store=dist.FileStore(sys.argv[1], RANKS), rank=RANK, world_size=RANKS
)
torch.set_num_threads(1)
torch.manual_seed(0)
model = residuals(8)
expected, _ = train(model, None)
_, wide = train(model, PLENTY)
every = [None] * RANKS
dist.all_gather_object(every, (wide["least_bytes"], wide["predicted_peak_bytes"]))
least, most = max(least for least, _ in every), min(most for _, most in every)
found, tight = train(model, (least + most) // 2)  # one budget for all ranks
print(json.dumps({"expected": expected, "found": found, "tight": tight}))
dist.destroy_process_group()
