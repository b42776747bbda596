"""A rank with one of two stages: STORE RANK RANKS FOLDER. Trains in core, then within a budget."""

import copy
import hashlib
import json
import sys

import torch
import torch.distributed as dist
from out_of_core_models import residuals, rows
from torch import nn

from paceline.schedules.memory import least_budget_bytes, plan_memory, target_budget_bytes
from paceline.training import prepare
from paceline.training.out_of_core import planning

RANK, RANKS, FOLDER = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
PLENTY = 1 << 40
STEPS = 5


def halve_budget(session):
    """Have a budget of `PLENTY` become one that needs tensors to be away, in the step it plans.

    What else the process holds changes between two sessions by more than these models take.
    """

    def target_of(profile, _budget_bytes):
        least = least_budget_bytes(profile)
        if session.budget_bytes == PLENTY or least >= session.budget_bytes:
            most = plan_memory(profile, session.planning.tier(), PLENTY).in_core_peak_bytes
            session.budget_bytes = (least + most) // 2
        return target_budget_bytes(profile, session.budget_bytes)

    planning.target_budget_bytes = target_of


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
    if prepared.out_of_core is not None:
        halve_budget(prepared.out_of_core.session)
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
    prepared.out_of_core.close()
    return digests, found


dist.init_process_group(
    "gloo", store=dist.FileStore(sys.argv[1], RANKS), rank=RANK, world_size=RANKS
)
torch.set_num_threads(1)
torch.manual_seed(0)
model = residuals(8)
expected, _ = train(model, None)
found, tight = train(model, PLENTY)
print(json.dumps({"expected": expected, "found": found, "tight": tight}))
dist.destroy_process_group()
