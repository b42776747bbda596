"""Training steps for `paceline plan --fit`; as a script it says what a recorded one takes."""

import json
import sys

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.first, self.norm = (
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
        )
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2000, 256)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(3)
        )
        self.head = nn.Linear(256, 2000)

    def forward(self, x):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).flatten(0, 1)


def mlp():
    layers = (nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512)) for _ in range(6))
    module = nn.Sequential(*layers, nn.Linear(512, 10))
    target = torch.randint(0, 10, (2048,))
    return module, torch.randn(2048, 512), target, functional.cross_entropy, torch.optim.Adam


def cnn():
    blocks = (Residual(32) for _ in range(4))
    module = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *blocks, Mean(), nn.Linear(32, 10))
    target = torch.randint(0, 10, (16,))
    return module, torch.randn(16, 3, 48, 48), target, functional.cross_entropy, torch.optim.Adam


def transformer():
    tokens, target = torch.randint(0, 2000, (8, 128)), torch.randint(0, 2000, (8 * 128,))
    return Language(), tokens, target, functional.cross_entropy, torch.optim.Adam


def alone(name):
    """Return the peak of a session with the whole model."""
    from paceline.training import OutOfCore

    module, inputs, target, loss_fn, make_optimizer = globals()[name]()
    optimizer = make_optimizer(module.parameters())
    with OutOfCore(module, optimizer, budget_bytes=1 << 40, recompute=False) as out_of_core:
        while out_of_core.plan is None:
            optimizer.zero_grad()
            loss_fn(module(inputs), target).backward()
            optimizer.step()
        return out_of_core.plan.in_core_peak_bytes


def in_stages(store, rank, ranks, name, schedule):
    """Return the peak of a session of a rank that has a stage."""
    import torch.distributed as dist

    from paceline.training import prepare

    files = dist.FileStore(store, int(ranks))
    dist.init_process_group("gloo", store=files, rank=int(rank), world_size=int(ranks))
    torch.manual_seed(0)  # the ranks of a replica have the same batch
    module, inputs, target, loss_fn, make_optimizer = globals()[name]()
    prepared = prepare(
        module,
        make_optimizer(module.parameters()),
        partitions=int(ranks),
        microbatches=4,
        schedule=schedule,
        loss_fn=loss_fn,
        example_inputs=inputs[:4],
        memory_budget=1 << 40,
        alarm=False,
    )
    while prepared.out_of_core.plan is None:
        prepared.optimizer.zero_grad()
        prepared.forward_backward(inputs, target)
        prepared.optimizer.step()
    peak = prepared.out_of_core.plan.in_core_peak_bytes
    prepared.out_of_core.close()
    dist.destroy_process_group()
    return peak


if __name__ == "__main__":
    peak_bytes = alone(sys.argv[1]) if len(sys.argv) == 2 else in_stages(*sys.argv[1:])
    print(json.dumps({"peak_bytes": peak_bytes}))
