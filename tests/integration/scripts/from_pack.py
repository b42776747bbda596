"""Trains from a pack, saves its place, writes down what each step was given, and may be killed."""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from paceline.store import Loader, LoaderOptions


def as_vector(body):
    return torch.frombuffer(bytearray(body), dtype=torch.uint8).float() / 255


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pack")
    parser.add_argument("log", type=Path, help="folder for what the ranks were given")
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--kill-step", type=int, default=-1)
    parser.add_argument("--kind", default="thread")
    parser.add_argument("--on-corrupt", default="raise")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = Loader(
        options.pack,
        16,
        transform=as_vector,
        options=LoaderOptions(
            seed=3,
            last="join",
            numbers=True,
            worker_kind=options.kind,
            on_corrupt=options.on_corrupt,
        ),
    )
    if options.state.exists():
        loader.load_state_dict(json.loads(options.state.read_text()))
    with (options.log / f"rank-{rank}").open("w") as log:
        for step, (vectors, labels, numbers) in enumerate(loader):
            assert len(labels) == len(vectors)
            optimizer.zero_grad()
            model(vectors).square().mean().backward()
            if rank == 1 and step == options.kill_step:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            print(json.dumps(numbers.tolist()), file=log, flush=True)
            if (step + 1) % options.save_steps == 0:
                dist.barrier()  # what is saved, all ranks have written down
                if rank == 0:
                    partial = options.state.with_suffix(".partial")
                    partial.write_text(json.dumps(loader.state_dict()))
                    partial.rename(options.state)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
