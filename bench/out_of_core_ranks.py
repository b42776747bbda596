"""One rank of bench/out_of_core.py: trains some steps in one mode, and prints what they came to.

out_of_core_ranks.py '{"mode": ..., "model": ..., "steps": ..., "folder": ...}'
"""

import hashlib
import json
import mmap
import os
import resource
import sys
import tempfile
import time

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.training import OutOfCore
from paceline.training.out_of_core.process_memory import Allocator, ProcessMemory

TOKENS, WIDTH, LAYERS, HEADS, WORDS = 2048, 512, 8, 8, 1000
SEQUENCE = 256


class Transformer(nn.Module):
    def __init__(self, is_checkpointed):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)
        self.is_checkpointed = is_checkpointed

    def forward(self, words):
        x = self.embedding(words)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.head(x).transpose(1, 2)


class Cnn(nn.Module):
    def __init__(self, is_checkpointed, channels=64, blocks=6):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(channels, 10)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            y = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            x = torch.relu(x + y)
        return self.head(x.mean(dim=(2, 3)))


def make(name, is_checkpointed):
    torch.manual_seed(0)
    if name == "transformer":
        shape = (TOKENS // SEQUENCE, SEQUENCE)
        words = torch.randint(WORDS, (2, *shape))
        return Transformer(is_checkpointed), words[0], words[1]
    return Cnn(is_checkpointed), torch.randn(16, 3, 96, 96), torch.randint(10, (16,))


class MappedFile:
    """Saved tensors in a mapped file, whose pages come when they are touched: the naive way."""

    def __init__(self, folder):
        self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as the process
        self.end = 0

    def pack(self, tensor):
        if tensor.nbytes < 1 << 16 or not tensor.is_contiguous():
            return tensor
        size = -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        offset, self.end = self.end, self.end + size
        os.ftruncate(self.file.fileno(), max(self.end, os.fstat(self.file.fileno()).st_size))
        mapped = mmap.mmap(self.file.fileno(), size, offset=offset)
        copy = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel())
        copy.copy_(tensor.detach().reshape(-1))
        return copy.view(tensor.shape)

    def unpack(self, tensor):
        return tensor


def main():
    asked = json.loads(sys.argv[1])
    mode = asked["mode"]
    model, inputs, target = make(asked["model"], mode == "checkpointing")
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    out_of_core = hooks = None
    if mode == "planned":
        out_of_core = OutOfCore(
            model, optimizer, budget_bytes=asked.get("budget"), spill_folder=asked["folder"]
        )
    elif mode in ("mapped", "checkpointing"):
        Allocator().begin()  # without it they do not fit either
    mapped = MappedFile(asked["folder"])
    memory = ProcessMemory()
    times, cpu, digests, peaks = [], [], [], []
    for step in range(asked["steps"]):
        torch.manual_seed(step)
        is_watched = out_of_core is None or out_of_core.plan is not None
        if is_watched:
            memory.start()
        begin, begin_cpu = time.perf_counter(), time.process_time()
        if mode == "mapped":
            mapped.end = 0
            hooks = torch.autograd.graph.saved_tensors_hooks(mapped.pack, mapped.unpack)
            hooks.__enter__()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), target).backward()
        if hooks is not None:
            hooks.__exit__()
        gradients_s = time.perf_counter()
        digest = hashlib.sha256()
        for parameter in model.parameters():
            digest.update(parameter.grad.numpy())
        digests.append(digest.hexdigest()[:16])
        begin += time.perf_counter() - gradients_s
        optimizer.step()
        times.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
        peaks.append(memory.peak_bytes() if is_watched else None)
    result = {
        "step_s": times,
        "cpu_s": cpu,
        "digests": digests,
        "peaks": peaks,
        "faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
    }
    if out_of_core is not None:
        result["out_of_core"] = out_of_core.to_json()
    print(json.dumps(result))


main()
