"""A rank of `imbalance.py`: trains a model under DDP on samples that its loader workers transform.

imbalance_ranks.py MODEL STEPS OUT              a rank of torchrun or paceline run
imbalance_ranks.py MODEL STEPS OUT --spawn N    starts N ranks by torch.multiprocessing
... --caps                                      threads capped as Lightning does
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

BATCH, WORKERS, WARM_UP = 16, 2, 12
COUNTERS = ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


class Images(Dataset):
    """Photographs in memory; augmented as SimCLR does: crop, resize, flip, colours, blur; noise."""

    size = 72

    def __init__(self, count):
        self.images = np.random.default_rng(0).integers(0, 256, (16, 160, 160, 3), dtype=np.uint8)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        image = self.images[index % len(self.images)]
        size = int(rng.integers(112, 160))
        top, left = rng.integers(0, 160 - size, 2)
        image = image[top : top + size, left : left + size].astype(np.float32) / 255
        rows = np.linspace(0, size - 1, self.size)
        low, part = rows.astype(int), (rows % 1).astype(np.float32)
        high = np.minimum(low + 1, size - 1)
        image = image[low] * (1 - part)[:, None, None] + image[high] * part[:, None, None]
        image = image[:, low] * (1 - part)[:, None] + image[:, high] * part[:, None]
        image = image[:, ::-1] if rng.random() < 0.5 else image
        grey = image @ np.array([0.299, 0.587, 0.114], np.float32)
        brightness, contrast, colour = rng.uniform(0.6, 1.4, 3).astype(np.float32)
        image = image * brightness
        image = image * contrast + grey.mean() * (1 - contrast)
        image = image * colour + grey[..., None] * (1 - colour)
        sigma = rng.uniform(0.5, 2.0)
        taps = np.exp(-0.5 * (np.arange(-6, 7) / sigma) ** 2).astype(np.float32)
        taps /= taps.sum()
        for axis in (0, 1):
            padded = np.pad(image, [(6, 6) if a == axis else (0, 0) for a in range(3)], "edge")
            image = sum(
                tap * padded.take(np.arange(at, at + self.size), axis)
                for at, tap in enumerate(taps)
            )
        image = image + rng.normal(0, 0.02, image.shape).astype(np.float32)
        image = (np.clip(image, 0, 1) - 0.45) / 0.225
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1))), index % 10


class Speech(Dataset):
    """Two seconds of sound: noise, logarithmic mel spectrogram, masked as SpecAugment does."""

    frames, bins, mels, count_of_values = 198, 257, 64, 32000

    def __init__(self, count):
        self.sounds = (
            np.random.default_rng(0).normal(0, 0.1, (32, self.count_of_values)).astype(np.float32)
        )
        centres = np.geomspace(1, self.bins - 1, self.mels + 2)
        steps = np.arange(self.bins)[:, None]
        rising = (steps - centres[:-2]) / (centres[1:-1] - centres[:-2])
        falling = (centres[2:] - steps) / (centres[2:] - centres[1:-1])
        self.filters = np.clip(np.minimum(rising, falling), 0, 1).astype(np.float32)
        self.window = np.hanning(400).astype(np.float32)
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        sound = self.sounds[index % len(self.sounds)]
        sound = sound + rng.normal(0, 0.02, len(sound)).astype(np.float32)
        speed = np.linspace(0, len(sound) - 1, int(len(sound) * rng.uniform(1.0, 1.1)))
        sound = np.interp(speed, np.arange(len(sound)), sound).astype(np.float32)
        starts = np.arange(self.frames)[:, None] * 160 + np.arange(400)
        power = np.abs(np.fft.rfft(sound[starts] * self.window, 512)) ** 2
        mel = np.log(power @ self.filters + 1e-6)
        begin, width = int(rng.integers(0, 180)), int(rng.integers(0, 16))
        mel[begin : begin + width] = 0
        mel = mel.reshape(-1, 3, self.mels).mean(1)  # the model sees every third frame
        return torch.from_numpy(mel.astype(np.float32)), index % 10


class Text(Dataset):
    """Documents: normalised, split by a regular expression, coded by merges, a window masked."""

    length, vocabulary = 40, 1000

    def __init__(self, count):
        rng = np.random.default_rng(0)
        letters = np.array(list("etaoinshrdlu"))
        words = ["".join(rng.choice(letters, int(rng.integers(2, 9)))) for _ in range(400)]
        self.lines = [" ".join(rng.choice(words, 500)) + ", 19 of 26." for _ in range(64)]
        pairs = {}
        for word in words:
            for pair in itertools.pairwise(word):
                pairs[pair] = pairs.get(pair, 0) + 1
        self.merges = {p: i for i, p in enumerate(sorted(pairs, key=lambda p: (-pairs[p], p)))}
        self.pattern = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        tokens = []
        for word in self.pattern.findall(self.lines[index % len(self.lines)].lower()):
            parts = list(word)
            while len(parts) > 1:
                ranked = [
                    (self.merges.get(pair, 1 << 30), at)
                    for at, pair in enumerate(itertools.pairwise(parts))
                ]
                best, at = min(ranked)
                if best == 1 << 30:
                    break
                parts[at : at + 2] = ["".join(parts[at : at + 2])]
            tokens += [hash_of(part) % self.vocabulary for part in parts]
        generator = torch.Generator().manual_seed(index)
        begin = int(torch.randint(len(tokens) - self.length, (), generator=generator))
        tokens = torch.tensor(tokens[begin : begin + self.length])
        masked = torch.rand(self.length, generator=generator) < 0.15
        return tokens.masked_fill(masked, 0), tokens


def hash_of(text):
    value = 5381
    for letter in text:
        value = value * 33 + ord(letter)
    return value


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        widths = [3, 24, 48, 96, 192]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU(),
                              nn.Conv2d(b, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in itertools.pairwise(widths)
            ),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10),
        )  # fmt: skip

    def forward(self, images):
        return self.layers(images)


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(Speech.mels, 160, 2, batch_first=True)
        self.head = nn.Linear(160, 10)

    def forward(self, frames):
        return self.head(self.lstm(frames)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(Text.vocabulary, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, Text.vocabulary)

    def forward(self, tokens):
        return self.head(self.encoder(self.embedding(tokens))).transpose(1, 2)


CASES = {"cnn": (Cnn, Images), "lstm": (Lstm, Speech), "transformer": (Encoder, Text)}


def processes():
    """Return this rank and its loader workers."""
    me = os.getpid()
    children = Path(f"/proc/self/task/{me}/children").read_text().split()
    return [me, *map(int, children)]


def counters():
    """Return context switches and page faults of this rank's processes until now."""
    total = dict.fromkeys((*COUNTERS, "main_nonvoluntary", "minor_faults", "cpu_ticks"), 0)
    for process in processes():
        for task in Path(f"/proc/{process}/task").iterdir():
            try:
                lines = (task / "status").read_text().splitlines()
            except OSError:
                continue
            values = dict(line.split(":", 1) for line in lines if ":" in line)
            for name in COUNTERS:
                total[name] += int(values[name])
            if task.name == str(os.getpid()):
                total["main_nonvoluntary"] = int(values[COUNTERS[1]])
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        total["minor_faults"] += int(fields[7])
        total["cpu_ticks"] += int(fields[11]) + int(fields[12])
    return total


def train(name, steps, out):
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    make, samples = CASES[name]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data = samples(BATCH * ranks * (steps + WARM_UP))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=WORKERS, drop_last=True)
    model = DistributedDataParallel(make())
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    times, waits, losses, before = [], [], [], {}
    begin = time.perf_counter()
    for number, (inputs, targets) in enumerate(loader):
        came = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        end = time.perf_counter()
        if number == WARM_UP - 1:
            before = counters()
            end = time.perf_counter()
        elif number >= WARM_UP:
            times.append(end - begin)
            waits.append(came - begin)
        if number == WARM_UP + steps - 3:  # its workers still live
            after = counters()
            break
        begin = end
    spent = {key: (after[key] - before[key]) / len(times) for key in after}
    result = {"step_s": times, "wait_s": waits, "losses": losses, **spent}
    (Path(out) / f"rank-{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def spawned(rank, ranks, port, asked):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    if asked.caps:  # lightning.fabric.utilities.distributed._set_num_threads_if_needed
        threads = max(1, len(os.sched_getaffinity(0)) // ranks)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        torch.set_num_threads(threads)
    train(asked.model, asked.steps, asked.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=CASES)
    parser.add_argument("steps", type=int)
    parser.add_argument("out")
    parser.add_argument("--spawn", type=int)
    parser.add_argument("--caps", action="store_true")
    asked = parser.parse_args()
    if asked.spawn is None:
        train(asked.model, asked.steps, asked.out)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(spawned, (asked.spawn, port, asked), nprocs=asked.spawn)


if __name__ == "__main__":
    main()
