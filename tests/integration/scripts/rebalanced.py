"""An ordinary DDP script, whose last line says which samples it trained on and its weights.

rebalanced.py [--workers N] [--accumulate N] [--slow RANK] [--loss mean|sum] [--ahead]
"""

import argparse
import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--slow", type=int)
parser.add_argument("--loss", default="mean")
parser.add_argument("--ahead", action="store_true")
parser.add_argument("--prepare", action="store_true")
parser.add_argument("--epochs", type=int, default=2)
options = parser.parse_args()


class Samples(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 24, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index], index


def ahead(loader):
    """Yield batches one later than they are taken, as some wrappers of loaders do."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = Samples(490)
sampler = DistributedSampler(data, seed=5)
loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=options.workers)
held_out = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 5)).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if options.prepare:
    import paceline.training

    prepared = paceline.training.prepare(model, optimizer)
    model = prepared.model
else:
    model = DistributedDataParallel(model)
work = torch.randn(200, 200)
steps, evaluated = [], []
for epoch in range(options.epochs):
    sampler.set_epoch(epoch)
    batches = ahead(loader) if options.ahead else loader
    if options.prepare:
        batches = prepared.batches(loader)
    for number, (inputs, labels, indices) in enumerate(batches):
        steps.append(indices.tolist())
        if rank == options.slow:
            for _ in range(4 * len(indices)):
                work = (work @ work).clamp(-1, 1)
        updates = (number + 1) % options.accumulate == 0 or number + 1 == len(loader)
        with contextlib.nullcontext() if updates else model.no_sync():
            loss = nn.functional.cross_entropy(model(inputs), labels, reduction=options.loss)
            (loss / options.accumulate if options.accumulate > 1 else loss).backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        evaluated += [len(indices) for *_, indices in held_out]
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
samples = [None, None]
dist.all_gather_object(samples, steps)
if rank == 0:
    print(json.dumps({"steps": samples, "weights": weights.tolist(), "evaluated": evaluated}))
dist.destroy_process_group()
