"""Collectives through every front end; prints what torch says of itself. Mentions no recorder."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor


def plain(rank):
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    dist.broadcast(tensor, src=1)
    dist.all_gather([torch.empty(1000) for _ in range(2)], tensor)
    dist.barrier()
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    gathered = [None, None]
    dist.all_gather_object(gathered, {"rank": rank})
    assert gathered[1] == {"rank": 1}


def any_source(rank):
    """Two tags, of which one comes first by number and last by time; sources are found out."""
    for tag in (0, 5, 0, 5):
        if rank == 1:
            dist.send(torch.ones(10 + tag), 0, tag=tag)
        else:
            assert dist.recv(torch.empty(10 + tag), tag=tag) == 1


def groups(rank):
    both = dist.new_group([0, 1])
    alone = [dist.new_group([member]) for member in range(2)]
    dist.all_reduce(torch.ones(10), group=both)
    dist.all_reduce(torch.ones(10), group=alone[rank])


def train(model, shape, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(shape)).square().mean().backward()
        optimizer.step()


def fsdp(_):
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, (8, 64))


def dtensor(_):
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
    assert tensor.full_tensor().sum() == 2016
    assert (tensor @ tensor.T).full_tensor().shape == (8, 8)


def ddp(_):
    torch.manual_seed(0)
    train(nn.parallel.DistributedDataParallel(nn.Linear(64, 64)), (8, 64))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in sys.argv[1:]:
        globals()[name](rank)
    if rank == 0:
        print(json.dumps({"backend": dist.get_backend(), "size": dist.get_world_size()}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
