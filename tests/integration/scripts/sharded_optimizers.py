"""LARS and LAMB on layers that ranks share, beside the same steps on whole layers in this process.

    sharded_optimizers.py STORE RANK RANKS

Each case returns the largest relative difference of a parameter. Prints {case: difference}, or
{case: what went wrong}.
"""

import copy
import json
import sys
import traceback
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as distributed_state
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from paceline.training.optimizers import LAMB, LARS, ShardedNorms, parameter_groups

warnings.simplefilter("ignore")
RANK, RANKS = int(sys.argv[2]), int(sys.argv[3])
MAKERS = {
    "lars": lambda groups: LARS(groups, 0.5, weight_decay=0.01, momentum_correction=True),
    "lamb": lambda groups: LAMB(groups, 0.05, weight_decay=0.01),
}
STEPS = 6


def net():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 7, 3), nn.GroupNorm(7, 7), nn.Flatten(), nn.ReLU(), nn.Linear(63, 5)
    )


def gradients(step):
    """Return the averaged gradient of each parameter at a step, equal on all ranks."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in net().named_parameters()
    }


def rate(step):
    return 0.1 * (step + 1)


def trained_whole(name):
    model = net()
    optimizer = MAKERS[name](parameter_groups(model, weight_decay=0.01))
    for step in range(STEPS):
        set_rate(optimizer, step)
        for key, parameter in model.named_parameters():
            parameter.grad = gradients(step)[key]
        optimizer.step()
    return dict(model.named_parameters())


def set_rate(optimizer, step):
    for group in optimizer.param_groups:
        group["lr"] = rate(step)


def difference(parameters, name):
    wanted = trained_whole(name)
    assert parameters.keys() == wanted.keys()
    return max(
        ((parameters[key] - wanted[key]).norm() / wanted[key].norm()).item() for key in wanted
    )


def slices(tensors):
    """Return this rank's part of each tensor; all lie in one bucket that ranks share evenly."""
    length = -(-sum(tensor.numel() for tensor in tensors.values()) // RANKS)
    first, last = RANK * length, (RANK + 1) * length
    parts, offset = {}, 0
    for key, tensor in tensors.items():
        begin, end = (min(max(edge - offset, 0), tensor.numel()) for edge in (first, last))
        parts[key] = tensor.detach().flatten()[begin:end].clone()
        offset += tensor.numel()
    return parts


def case_flat_slices(name):
    model = net()
    optimizer = MAKERS[name](parameter_groups(model, weight_decay=0.01))
    parts = slices(dict(model.named_parameters()))
    if RANKS > 1:
        assert any(part.numel() == 0 for part in parts.values()), "no rank lacks a layer"
    names = {parameter: key for key, parameter in model.named_parameters()}
    for group in optimizer.param_groups:  # as an engine replaces them
        group["params"] = [parts[names[parameter]] for parameter in group["params"]]
    optimizer.layer_norms = ShardedNorms(None)
    for step in range(STEPS):
        set_rate(optimizer, step)
        for key, gradient in slices(gradients(step)).items():
            parts[key].grad = gradient
        optimizer.step()
    gathered = [None] * RANKS
    dist.all_gather_object(gathered, parts)
    whole = {
        key: torch.cat([own[key] for own in gathered]).view_as(parameter)
        for key, parameter in model.named_parameters()
    }
    return difference(whole, name)


def trained_sharded(model, name, restore=False):
    """Train with DTensor parameters; with `restore`, continue half-way from a state dict."""
    optimizer = MAKERS[name](parameter_groups(model, weight_decay=0.01))
    for step in range(STEPS):
        if restore and step == STEPS // 2:
            saved = copy.deepcopy(distributed_state.get_optimizer_state_dict(model, optimizer))
            optimizer = MAKERS[name](parameter_groups(model, weight_decay=0.01))
            distributed_state.set_optimizer_state_dict(model, optimizer, optim_state_dict=saved)
        set_rate(optimizer, step)
        for key, parameter in model.named_parameters():
            whole = gradients(step)[key]
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        optimizer.step()
    return {key: parameter.full_tensor() for key, parameter in model.named_parameters()}


def sharded():
    model = net()
    for layer in (model[0], model[4]):
        fully_shard(layer)
    return fully_shard(model)


def case_fsdp2(name):
    return difference(trained_sharded(sharded(), name), name)


def case_fsdp2_from_a_state_dict(name):
    return difference(trained_sharded(sharded(), name, restore=True), name)


def case_dtensors_of_several_placements(name):
    """Rows and columns sharded, and one layer replicated: its norm must not be counted twice."""
    mesh = init_device_mesh("cpu", (RANKS,))
    model = net()
    placements = {"0.weight": Shard(1), "4.weight": Shard(1), "4.bias": Replicate()}
    for key, parameter in list(model.named_parameters()):
        module = model[int(key.split(".")[0])]
        placed = distribute_tensor(parameter.detach(), mesh, [placements.get(key, Replicate())])
        setattr(module, key.split(".")[1], nn.Parameter(placed))
    return difference(trained_sharded(model, name), name)


def case_one_all_reduce_in_a_step(name):
    """Count the collectives of a step of FSDP2's parameters: one, whatever the layers."""
    model = sharded()
    optimizer = MAKERS[name](parameter_groups(model, weight_decay=0.01))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    counted, plain = [], dist.all_reduce

    def counting(tensor, *args, **kwargs):
        counted.append(tensor.numel())
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        optimizer.step()
    finally:
        dist.all_reduce = plain
    assert counted == [4], counted
    assert isinstance(next(iter(optimizer.state.values()))[STATE[name]], DTensor)
    return 0.0


STATE = {"lars": "momentum_buffer", "lamb": "exp_avg"}


def main():
    store = dist.FileStore(sys.argv[1], RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    outcome = {}
    for case, function in list(globals().items()):
        for name in MAKERS if case.startswith("case_") else ():
            try:
                outcome[f"{case}:{name}"] = function(name)
            except Exception:  # noqa: BLE001  # reported to the test
                outcome[f"{case}:{name}"] = traceback.format_exc()
    print(json.dumps(outcome))
    dist.destroy_process_group()


main()
