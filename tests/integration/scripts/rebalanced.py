"""An ordinary DDP script, whose last line says which samples it trained on and its weights.

rebalanced.py [--slow RANK]
"""

import argparse
import contextlib
import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

COUNT = 490


class Samples(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(count, 24, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(0, 5, (count,), generator=generator)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.inputs[index], self.labels[index], index


def one_ahead(loader):
    """Yield batches one later than they are taken, as some wrappers of loaders do."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield held
        held = batch
    yield held


def accelerated(data, workers):
    """Return a loader as accelerate, and so the Trainer of Hugging Face, prepare it."""
    from accelerate.data_loader import prepare_data_loader

    generator = torch.Generator().manual_seed(5)
    sampler = RandomSampler(data, generator=generator)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
    return prepare_data_loader(
        loader,
        num_processes=dist.get_world_size(),
        process_index=dist.get_rank(),
        put_on_device=False,
    )


def write_pack(folder):
    """Write the samples to a pack; return its path."""
    from paceline.store import Folder, pack

    data = Samples(COUNT)
    plain = folder / "plain"
    plain.mkdir()
    for number, (inputs, label) in enumerate(zip(data.inputs, data.labels, strict=True)):
        row = torch.cat([inputs, label.double()[None]])
        (plain / f"{number:04}").write_bytes(row.numpy().tobytes())
    pack(Folder(plain), folder / "pack")
    return folder / "pack"


def from_bytes(sample):
    return torch.frombuffer(bytearray(sample), dtype=torch.float64)


def from_store(path, worker_kind):
    """Return the store's loader, as inputs, labels and indices."""
    from paceline.store import Loader, LoaderOptions

    options = LoaderOptions(
        numbers=True, seed=5, workers=2, worker_kind=worker_kind, node_reader="off"
    )
    loader = Loader(path, 8 * dist.get_world_size(), transform=from_bytes, options=options)
    return Triples(loader)


class Triples:
    def __init__(self, loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for rows, _, numbers in self.loader:
            yield rows[:, :24], rows[:, 24].long(), numbers


def train(
    *,
    store=None,
    worker_kind="thread",
    workers=0,
    accumulate=1,
    slow=None,
    loss="mean",
    ahead=False,
    prepared=False,
    accelerate=False,
    epochs=2,
):
    """Train on two ranks; return this rank's samples of each step, and the weights."""
    torch.manual_seed(0)
    data = Samples(COUNT)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=8, sampler=sampler, num_workers=workers)
    if store:
        loader = from_store(store, worker_kind)
    if accelerate:
        loader = accelerated(data, workers)
    held_out = DataLoader(data, batch_size=16, sampler=DistributedSampler(data, shuffle=False))
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 5)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if prepared:
        import paceline.training

        made = paceline.training.prepare(model, optimizer)
        model = made.model
    else:
        model = DistributedDataParallel(model)
    work = torch.randn(200, 200)
    steps, evaluated = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = made.batches(loader) if prepared else one_ahead(loader) if ahead else loader
        for number, (inputs, labels, indices) in enumerate(batches):
            steps.append(indices.tolist())
            if dist.get_rank() == slow:
                for _ in range(4 * len(indices)):
                    work = (work @ work).clamp(-1, 1)
            updates = (number + 1) % accumulate == 0 or number + 1 == len(loader)
            with contextlib.nullcontext() if updates else model.no_sync():
                value = nn.functional.cross_entropy(model(inputs), labels, reduction=loss)
                (value / accumulate if accumulate > 1 else value).backward()
            if updates:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            evaluated += [len(indices) for *_, indices in held_out]
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {"steps": steps, "evaluated": evaluated, "weights": weights.tolist()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow", type=int)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    said = train(slow=options.slow, epochs=3)
    steps = [None, None]
    dist.all_gather_object(steps, said["steps"])
    if dist.get_rank() == 0:
        print(json.dumps({**said, "steps": steps}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
