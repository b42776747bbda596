"""What ranks agree on before a step: overflow on one of them, and where a NaN comes from.

    precision_ranks.py STORE RANK RANKS

Prints {case: what each rank found}, or {case: what went wrong}.
"""

import contextlib
import copy
import json
import math
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from paceline.training.health import GradientCheck
from paceline.training.optimizers import LargeBatchRate, large_batch_schedule
from paceline.training.precision import LossScaler

warnings.simplefilter("ignore")
RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])


def net():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def case_one_rank_overflows():
    """Each rank holds other gradients, as when they are sharded: only the last one's overflow."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rate = LargeBatchRate(batch=4, reference_batch=1, epochs=9, steps_per_epoch=1, warmup_epochs=8)
    scheduler = large_batch_schedule(optimizer, rate)
    scaler = LossScaler(initial_scale=64.0, growth_interval=2)
    scaler.attach(optimizer)
    found = []
    for step in range(6):
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        scaler.scale_outputs(model(torch.ones(2, 4) * (RANK + 1))).sum().backward()
        if RANK == RANKS - 1 and step in (2, 3):
            model[0].weight.grad[0, 0] = math.inf
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        after = (model.state_dict(), optimizer.state_dict())
        unchanged = all(torch.equal(before[0][name], after[0][name]) for name in before[0])
        kept = all(
            torch.equal(state["momentum_buffer"], after[1]["state"][key]["momentum_buffer"])
            for key, state in before[1]["state"].items()
        )
        found.append([scaler.scale, scheduler.last_epoch, unchanged, kept])
    return found


def case_a_nan_of_one_rank_is_named():
    """Gradients are averaged, so that every rank has the NaN; all know where it was before."""
    model = net()
    names = dict(model.named_parameters())
    check, scaler = GradientCheck(list(names)), LossScaler(enabled=False)
    found = []
    for step in range(3):
        model(torch.ones(2, 4)).sum().backward()
        if RANK == RANKS - 1 and step == 1:
            for name in ("0.weight", "0.bias"):
                names[name].grad.fill_(math.nan)
        backward = list(reversed(names))
        for bucket in (backward[:2], backward[2:]):
            check.observe(bucket, [names[name].grad for name in bucket])
            for name in bucket:
                dist.all_reduce(names[name].grad)
        spread = not bool(torch.isfinite(names["0.weight"].grad).all())
        bad = scaler.unscale_and_check(model.parameters(), found=check.flag())
        culprits = check.culprits(step) if bad else ()
        found.append([spread, [[c.rank, c.step, c.layer, c.layers] for c in culprits]])
        check.reset()
        model.zero_grad()
    return found


def case_fsdp2():
    """Gradients are DTensors: their parts are unscaled in place, and a bad part stops all ranks."""
    model = fully_shard(net())
    scaler = LossScaler(initial_scale=8.0)
    given = torch.ones(2, 4)
    scaler.scale_outputs(model(given)).sum().backward()
    first = scaler.unscale_and_check(model.parameters())
    plain = net()
    plain(given).sum().backward()
    differences = [
        (own.grad.full_tensor() - parameter.grad).abs().max().item()
        for own, parameter in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    if RANK == RANKS - 1:
        next(model.parameters()).grad.to_local()[0, 0] = math.nan
    return [first, max(differences) < 1e-6, scaler.unscale_and_check(model.parameters())]


def case_a_group_of_some_ranks():
    """Ranks outside of the group decide for themselves."""
    group = dist.new_group([0])
    if RANK != 0:
        return None
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([math.nan, 0.0])
    return LossScaler().unscale_and_check([weight], group)


def main():
    store = dist.FileStore(sys.argv[1], RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    outcome = {}
    for case, function in list(globals().items()):
        if case.startswith("case_"):
            try:
                outcome[case] = function()
            except Exception:  # noqa: BLE001  # reported to the test
                outcome[case] = traceback.format_exc()
    print(json.dumps(outcome))
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


main()
