"""One rank of bench/large_batch.py: trains what it is asked to, request by request.

    python bench/large_batch_ranks.py STORE RANK RANKS DATA

A request is a line of JSON on standard input, the same for all ranks; rank 0 answers each with a
line of JSON on standard output. Ranks share every batch evenly, and each sums its share up from
passes of at most `PASS` samples, so that a batch of 32,768 takes the memory of 256.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from paceline.core.randomness import make_generator
from paceline.training.optimizers import (
    LAMB,
    LARS,
    LargeBatchRate,
    large_batch_schedule,
    parameter_groups,
)

PASS = 256  # samples of a forward pass; batch-norm statistics are those of a pass
VALIDATION = 5000  # the last training images choose the rate; test images only judge
REFERENCE_BATCH = 64  # the batch at which a rate is stated
CONTEXT = 64  # characters of a text sample


class Images:
    """Fashion-MNIST, classified by a small CNN; the figure is accuracy."""

    def __init__(self, folder):
        folder = folder / "fashion-mnist"
        self.train = read_images(folder, "train")
        self.test = read_images(folder, "t10k")

    def model(self, width):
        return nn.Sequential(
            *(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.MaxPool2d(2),
            *(nn.Conv2d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm2d(2 * width)),
            *(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(2 * width * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
        ).to(memory_format=torch.channels_last)

    def split(self, name):
        x, y = self.train
        if name == "train":
            return x[:-VALIDATION], y[:-VALIDATION]
        return (x[-VALIDATION:], y[-VALIDATION:]) if name == "validation" else self.test

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="sum")

    def right(self, model, x, y):
        return (model(x).argmax(1) == y).sum().item()


class Text:
    """tiny-shakespeare, next character by a small transformer; the figure is the loss in nats."""

    def __init__(self, folder):
        text = (folder / "tinyshakespeare" / "input.txt").read_text()
        characters = sorted(set(text))
        codes = torch.tensor([characters.index(character) for character in text])
        samples = codes[: len(codes) // (CONTEXT + 1) * (CONTEXT + 1)].view(-1, CONTEXT + 1)
        held = len(samples) // 18
        self.parts = {
            "train": samples[: -2 * held],
            "validation": samples[-2 * held : -held],
            "test": samples[-held:],
        }
        self.characters = len(characters)

    def model(self, width):
        return Transformer(self.characters, 4 * width)

    def split(self, name):
        return self.parts[name][:, :-1], self.parts[name][:, 1:]

    def loss(self, model, x, y):
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / (
            CONTEXT
        )

    def right(self, model, x, y):
        return self.loss(model, x, y).item()


class Transformer(nn.Module):
    """A character model: two pre-norm layers with causal attention."""

    def __init__(self, characters, width):
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters)
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        h = self.embedding(x) + self.position
        for layer in self.layers:
            h = layer(h, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(h))


TASKS = {"images": Images, "text": Text}
METHODS = {
    "sgd": lambda groups, rate: torch.optim.SGD(groups, lr=rate, momentum=0.9),
    "lars": lambda groups, rate: LARS(groups, rate, momentum=0.9),
    "lamb": lambda groups, rate: LAMB(groups, rate),
}
DECAY = {"sgd": 5e-4, "lars": 5e-4, "lamb": 1e-2}
RULES = {"sgd": "linear", "lars": "square-root", "lamb": "square-root"}


def read_images(folder, part):
    """Return images, shape (count, 1, 28, 28), standardised float32, and labels."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8).astype(np.int64)
    x = (torch.from_numpy(pixels.astype(np.float32)) / 255 - 0.286) / 0.353
    return x.contiguous(memory_format=torch.channels_last), torch.from_numpy(labels)


def train(task, request, rank, ranks):
    """Return the figure of one training, its steps and seconds."""
    started = time.monotonic()
    x, y = task.split("train")
    count = min(len(x), request["samples"] or len(x))
    x, y, batch = x[:count], y[:count], request["batch"]
    torch.manual_seed(request["seed"])
    model = task.model(request["width"])
    method = request["method"]
    groups = parameter_groups(model, weight_decay=DECAY[method])
    optimizer = METHODS[method](groups, request["rate"])
    plan = LargeBatchRate(
        batch=batch,
        reference_batch=REFERENCE_BATCH,
        epochs=request["epochs"],
        steps_per_epoch=count / batch,
        warmup_epochs=0.15 * request["epochs"],
        warmup_from=0.0,
        rule=RULES[method],
        decay="polynomial",
    )
    scheduler = large_batch_schedule(optimizer, plan)
    sums = flat_gradients(model)
    own, parts = batch // ranks, sample_stream(count, request["seed"])
    steps = max(1, plan.steps)
    for step in range(steps):
        sums.zero_()
        chosen = next_samples(parts, batch)[rank * own : (rank + 1) * own]
        for begin in range(0, own, PASS):
            indices = chosen[begin : begin + PASS]
            loss = task.loss(model, x[indices], y[indices]) / batch
            loss.backward()
            sums[-1] += loss.item()
        dist.all_reduce(sums)
        if not math.isfinite(sums.sum().item()):
            seconds = time.monotonic() - started
            return {"figure": None, "diverged_at": step, "steps": steps, "seconds": seconds}
        optimizer.step()
        scheduler.step()
    figure = evaluate(task, model, request["split"], rank, ranks)
    seconds = time.monotonic() - started
    return {"figure": figure, "diverged_at": None, "steps": steps, "seconds": seconds}


def flat_gradients(model):
    """Return a tensor that all gradients are views of, with room for the loss: one all-reduce."""
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters) + 1)
    offset = 0
    for parameter in parameters:
        # A view with the parameter's own strides, which backward would otherwise replace.
        piece = flat[offset : offset + parameter.numel()]
        parameter.grad = piece.as_strided(parameter.shape, parameter.stride(), offset)
        offset += parameter.numel()
    return flat


def sample_stream(count, seed):
    """Yield the samples of epoch after epoch, each in an order of its own."""
    epoch = 0
    while True:
        yield from make_generator(seed, "large batch", epoch).permutation(count).tolist()
        epoch += 1


def next_samples(stream, batch):
    return torch.tensor([next(stream) for _ in range(batch)])


@torch.no_grad()
def evaluate(task, model, split, rank, ranks):
    """Return the mean figure over a split; ranks share it, and their batch-norm statistics."""
    for buffer in model.buffers():
        if buffer.is_floating_point() and not torch.isinf(buffer).any():
            dist.all_reduce(buffer)
            buffer /= ranks
    model.eval()
    x, y = task.split(split)
    total = torch.zeros(1, dtype=torch.float64)
    for begin in range(rank * 500, len(x), ranks * 500):
        total += task.right(model, x[begin : begin + 500], y[begin : begin + 500])
    dist.all_reduce(total)
    return total.item() / len(x)


def main():
    store, rank, ranks, data = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=10),
    )
    tasks = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["task"]
        if name not in tasks:
            tasks[name] = TASKS[name](data)
        answer = train(tasks[name], request, rank, ranks)
        if rank == 0:
            print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
