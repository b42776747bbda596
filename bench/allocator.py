"""Does a step gain when freed memory stays with the process? --allocator keep against system.

Six models, and one whose batches differ in length, train in pairs of processes: one under the C
library's defaults, one with the variables that `paceline run --allocator keep` sets. They take
turns in blocks of steps, in an order that is drawn anew for each round; meanwhile the others wait
for a line. A third process, under the defaults too, is the control: what it differs by is this
machine's noise. The median over the rounds of the ratio of step times stands with its bootstrapped
95 % interval; CPU time per step beside it, as a busy neighbour disturbs it less. The peak of
resident memory, page faults per step and whether the weights are equal bit for bit are in each row.

    python bench/allocator.py --json [--quick]
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
from harness import Report, median_interval, options, tell
from predict_small import cnn, mlp, transformer

KINDS = ("system", "keep", "control")
BLOCK_S, QUICK_BLOCK_S = 0.5, 0.3
WARM_STEPS = 5
SLOWER_BAR, MEMORY_BAR_BYTES = 1.01, 64 << 20


# --- in the processes that train -----------------------------------------------------------------


def resnet(batch, size):
    """A ResNet-18."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, inside, outside, stride):
            super().__init__()
            self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
            self.short = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

        def forward(self, x):
            y = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
            return torch.relu(y + self.short(x))

    layers = [nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for inside, outside, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
    module = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return module, torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))


def unet(batch, size, width):
    import torch
    from torch import nn

    def block(inside, outside):
        return nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()
        )

    class UNet(nn.Module):
        def __init__(self):
            super().__init__()
            self.down1, self.down2 = block(3, width), block(width, 2 * width)
            self.middle = block(2 * width, 4 * width)
            self.up2, self.up1 = block(6 * width, 2 * width), block(3 * width, width)
            self.head = nn.Conv2d(width, 2, 1)

        def forward(self, x):
            pool, up = nn.functional.max_pool2d, nn.functional.interpolate
            first = self.down1(x)
            second = self.down2(pool(first, 2))
            low = self.middle(pool(second, 2))
            low = self.up2(torch.cat([up(low, scale_factor=2), second], 1))
            return self.head(self.up1(torch.cat([up(low, scale_factor=2), first], 1)))

    target = torch.randint(0, 2, (batch, size, size))
    return UNet(), torch.randn(batch, 3, size, size), target


def lstm(batch, length, width):
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(256, width)
            self.layers = nn.LSTM(width, width, 2, batch_first=True)
            self.head = nn.Linear(width, 256)

        def forward(self, tokens):
            return self.head(self.layers(self.token(tokens))[0]).flatten(0, 1)

    tokens = torch.randint(0, 256, (batch, length + 1))
    return Model(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous().flatten()


def encoder(batch, length, width):
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Embedding(256, width)
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(width, 256)

        def forward(self, tokens):
            return self.head(self.layers(self.token(tokens))).flatten(0, 1)

    tokens = torch.randint(0, 256, (batch, length + 1))
    return Model(), tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous().flatten()


MODELS = {
    "mlp": (mlp, (1024, 2, 128)),
    "cnn": (cnn, (32, 32, 32)),
    "resnet-18": (resnet, (2, 96)),
    "u-net": (unet, (4, 64, 16)),
    "lstm": (lstm, (32, 64, 128)),
    "transformer": (transformer, (192, 6, 2, 64, 8)),
    "varying lengths": (encoder, (8, 256, 128)),
}


def batches(name, inputs, target):
    """Yield batches for ever; of one model each has another length."""
    import torch

    generator = torch.Generator().manual_seed(0)
    width = inputs.shape[1]
    rows = target.reshape(len(inputs), width) if name == "varying lengths" else None
    while True:
        if rows is None:
            yield inputs, target
        else:
            length = int(torch.randint(width // 8, width + 1, (1,), generator=generator))
            yield inputs[:, :length], rows[:, :length].flatten()


def train(name):
    """Train a model in blocks: a line on stdin asks for some steps, one on stdout tells of them."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    build, arguments = MODELS[name]
    module, inputs, target = build(*arguments)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    source = batches(name, inputs, target)
    total = 0
    print(json.dumps({"model": name}), flush=True)  # from now on it is this process that reads
    for line in iter(sys.stdin.readline, ""):
        count = int(line)
        if count == 0:
            break
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(count):
            batch, wanted = next(source)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(batch), wanted).backward()
            optimizer.step()
        total += count
        outcome = {
            "step_s": (time.perf_counter() - wall_s) / count,
            "cpu_s": (time.process_time() - cpu_s) / count,
            "faults": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / count,
        }
        print(json.dumps(outcome), flush=True)
    digest = hashlib.sha256()
    for value in module.state_dict().values():
        digest.update(value.numpy().tobytes())
    print(json.dumps({"weights": digest.hexdigest(), "steps": total, "peak": peak_bytes()}))


def peak_bytes():
    with open("/proc/self/status") as status:  # noqa: PTH123  # a file of the kernel
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")


def serve():
    """Load torch once, and train each model that a line names in a child of its own."""
    import torch

    torch.ones(1)
    print(json.dumps({"ready": True}), flush=True)
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            train(line.strip())
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)


# --- in the benchmark ----------------------------------------------------------------------------


class Server:
    """A process with an allocator of its own that trains model after model."""

    def __init__(self, kind):
        from paceline.core.allocator import KEEP

        environ = {name: value for name, value in os.environ.items() if name not in KEEP}
        self.process = subprocess.Popen(
            [sys.executable, "-u", __file__, "--serve"],
            env={**environ, "OMP_NUM_THREADS": "1", **(KEEP if kind == "keep" else {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"a process that trains has ended: {self.process.wait()}")
        return json.loads(line)

    def tell(self, line):
        print(line, file=self.process.stdin, flush=True)

    def block(self, count):
        self.tell(count)
        return self.read()

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


def compare(report, servers, name, rounds, block_s, rng):
    """Train one model under each allocator in turn; add its row, and return it."""
    for server in servers.values():
        server.tell(name)
        server.read()
    step_s = max(server.block(WARM_STEPS)["step_s"] for server in servers.values())
    count = max(2, round(block_s / step_s))
    blocks = {kind: [] for kind in servers}
    for _ in range(rounds):
        for kind in rng.permutation(list(servers)):
            blocks[kind].append(servers[kind].block(count))
    last = {}
    for kind, server in servers.items():
        last[kind] = server.block(0)
    row = {"model": name, "steps": last["keep"]["steps"]}
    for field in ("step_s", "cpu_s"):
        for kind in ("keep", "control"):
            ratios = [
                block[field] / plain[field]
                for block, plain in zip(blocks[kind], blocks["system"], strict=True)
            ]
            row[f"{kind}_{field}_ratio"] = dict(
                zip(("median", "low", "high"), median_interval([ratios]), strict=True)
            )
    for kind in ("system", "keep"):
        row[f"{kind}_step_s"] = statistics.median(block["step_s"] for block in blocks[kind])
        row[f"{kind}_faults_per_step"] = statistics.median(
            block["faults"] for block in blocks[kind]
        )
        row[f"{kind}_peak_bytes"] = last[kind]["peak"]
    row["equal_weights"] = last["keep"]["weights"] == last["system"]["weights"]
    report.row(**row)
    return row


def main():
    flags = options(__doc__, "--serve")
    if flags.serve is not None:
        serve()
        return 0
    report = Report("allocator", flags.json)
    rounds, block_s = (5, QUICK_BLOCK_S) if flags.quick else (40, BLOCK_S)
    rng = np.random.default_rng(0)
    servers = {kind: Server(kind) for kind in KINDS}
    for server in servers.values():
        server.read()
    tell(f"{len(MODELS)} models, {rounds} rounds of {block_s} s per allocator")
    rows = [compare(report, servers, name, rounds, block_s, rng) for name in MODELS]
    for server in servers.values():
        server.end()
    ratios = [row["keep_cpu_s_ratio"]["median"] for row in rows]
    report.row(
        models=len(rows),
        median_ratio=statistics.median(ratios),
        fastest_ratio=min(ratios),
        slowest_ratio=max(ratios),
        control_ratio=statistics.median(row["control_cpu_s_ratio"]["median"] for row in rows),
    )
    report.bar("keep / system, CPU time of a step, median", statistics.median(ratios), 1.0)
    surely = max(row["keep_cpu_s_ratio"]["low"] for row in rows)
    report.bar("keep / system, the worst model, lower end of 95 %", surely, SLOWER_BAR)
    more = max(row["keep_peak_bytes"] - row["system_peak_bytes"] for row in rows)
    report.bar("resident memory that keep adds at most, bytes", more, MEMORY_BAR_BYTES)
    differing = sum(not row["equal_weights"] for row in rows)
    report.bar("models whose weights differ", differing, 0)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
