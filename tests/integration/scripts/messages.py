"""Three ranks reduce in each step, after messages that only two of them know of."""

import torch
import torch.distributed as dist
from torch import nn

STEPS = 20


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()
    for _ in range(STEPS):
        model(torch.ones(4, 8)).sum().backward()
        if rank == 0:
            dist.send(torch.ones(16), 1)
        if rank == 1:
            dist.recv(torch.empty(16), 0)
            dist.send(torch.ones(4), 2, group=pair, tag=3)
        if rank == 2:
            dist.recv(torch.empty(4), 1, group=pair, tag=3)
        dist.all_reduce(model.weight.grad)
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
