"""DDP from a pack, with a checkpoint that knows its place in the epoch.

    paceline pack images/ train.pack
    paceline run -n 2 examples/ddp_pack.py train.pack --save state.pt
    paceline run -n 4 examples/ddp_pack.py train.pack --save state.pt     (goes on where it was)

Without decode, transform and collate a batch is views of one buffer; here `bag_of_bytes` makes
a vector of each sample, so that the example runs on any files. Its last line of output is JSON.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.store import Loader, LoaderOptions


def bag_of_bytes(body):
    counts = np.bincount(np.frombuffer(body, np.uint8), minlength=256)
    return torch.from_numpy(counts / max(1, len(body))).float()


def save(path, model, optimizer, loader):
    """Write the checkpoint beside its place, then move it there: a kill leaves old or new."""
    state = {
        "model": model.module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "loader": loader.state_dict(),
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pack")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=64, help="samples a step, all ranks")
    parser.add_argument("--save", type=Path, help="checkpoint; if it is there, go on from it")
    parser.add_argument("--save-steps", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    loader = Loader(
        options.pack,
        options.global_batch,
        transform=bag_of_bytes,
        options=LoaderOptions(seed=7, last="drop"),
    )
    model = nn.Sequential(nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if options.save and options.save.exists():
        state = torch.load(options.save, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    model = DistributedDataParallel(model)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-1)

    step = 0
    for _ in range(loader.epoch, options.epochs):
        for vectors, labels in loader:
            optimizer.zero_grad()
            loss_fn(model(vectors), labels).backward()
            optimizer.step()
            step += 1
            if options.save and step % options.save_steps == 0 and dist.get_rank() == 0:
                save(options.save, model, optimizer, loader)

    if dist.get_rank() == 0:
        stats = loader.stats
        print(json.dumps({"steps": step, "samples": stats.samples, "bytes": stats.bytes}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
