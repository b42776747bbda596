"""A training job of `scheduler_real.py`: a small net on one core, with or without waits for data.

    vision   a convolutional net, its data in memory: computes all the time
    tabular  a perceptron, its data in memory: computes all the time
    remote   a perceptron whose batches come from a slow storage: waits half of the time
    stream   a convolutional net whose batches come from a slower one: waits most of the time
    start    to be measured alone: each step starts and ends a job

What a queue asks of a job is done as in `examples/queue_job.py`. With `--measure` the job says when
it is ready, reads BEGIN and END (of the monotonic clock) from stdin, trains from then to then, and
prints its steps per second, and the share of a core that it used.

    python bench/queue_training.py remote --steps 500
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

TRY_AGAIN = 75
REPORT_S = 1.0
RATE = 0.1
BLOCKS = 8  # of a batch: a step is as long as several timeslices, as that of a real training


class Kind(NamedTuple):
    """What is trained.

    Attributes:
        net: makes it.
        batch: samples of a block.
        wait_s: for which the storage lets each step wait.
    """

    net: str
    batch: int
    wait_s: float


KINDS = {
    "vision": Kind("convolutional", 64, 0.0),
    "tabular": Kind("perceptron", 256, 0.0),
    "remote": Kind("perceptron", 256, 0.025),
    "stream": Kind("convolutional", 64, 0.05),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*KINDS, "start"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    asked_to_stop = []
    signal.signal(signal.SIGUSR1, lambda *_: asked_to_stop.append(True))
    torch.set_num_threads(1)
    job = Starts() if options.kind == "start" else Training(KINDS[options.kind])
    if options.measure:
        measure(job)
        return 0
    folder = Path(os.environ.get("PACELINE_QUEUE_FOLDER", "."))
    job.load(folder / "checkpoint.pt")
    reported, reported_s = job.step, time.monotonic()
    while job.step < options.steps:
        job.train()
        now_s = time.monotonic()
        stop = bool(asked_to_stop) and job.step < options.steps
        if stop or now_s >= reported_s + REPORT_S or job.step == options.steps:
            # Since the last report: the mean since the start would hide that neighbours came.
            report(job.step, (job.step - reported) / (now_s - reported_s))
            reported, reported_s = job.step, now_s
        if stop:
            job.save(folder / "checkpoint.pt")
            return TRY_AGAIN
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    job.save(folder / "checkpoint.pt")
    print(f"trained {job.step} steps, loss {job.loss:.4f}", flush=True)
    return 0


class Training:
    """A net, trained by plain gradient descent, and the steps behind it."""

    warm = 5  # steps before a measurement

    def __init__(self, kind):
        torch.manual_seed(0)
        self.kind = kind
        self.step, self.loss = 0, float("nan")
        self.net = convolutional() if kind.net == "convolutional" else perceptron()

    def train(self):
        """Train one step: wait for its batch, then compute."""
        if self.kind.wait_s:
            time.sleep(self.kind.wait_s)
        draw = torch.Generator().manual_seed(self.step)
        self.net.zero_grad()
        for _ in range(BLOCKS):
            x = torch.randn(self.kind.batch, 1, 16, 16, generator=draw)
            y = (x.mean(dim=(1, 2, 3)) > 0).long()
            loss = nn.functional.cross_entropy(self.net(x), y) / BLOCKS
            loss.backward()
        with torch.no_grad():  # torch.optim would import the compiler: a second of each start
            for parameter in self.net.parameters():
                parameter -= RATE * parameter.grad
        self.step += 1
        self.loss = BLOCKS * loss.item()

    def save(self, path):
        """Replace the checkpoint as a whole."""
        partial = path.with_suffix(".partial")
        torch.save({"net": self.net.state_dict(), "step": self.step}, partial)
        partial.replace(path)

    def load(self, path):
        """Go on from the checkpoint, if there is one."""
        if path.exists():
            state = torch.load(path, weights_only=True)
            self.net.load_state_dict(state["net"])
            self.step = state["step"]


class Starts:
    """Starts of jobs that do nothing, counted as steps."""

    warm = 1

    def __init__(self):
        self.step = 0

    def train(self):
        """Start a job, and wait for its end."""
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "tabular", "--steps", "0"]
            environ = {**os.environ, "PACELINE_QUEUE_FOLDER": folder}
            subprocess.run(command, env=environ, stdout=subprocess.DEVNULL, check=True)
        self.step += 1


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 8 * 8, 2),
    )


def perceptron():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 2),
    )


def report(step, steps_per_s):
    """Tell the queue how far the job is."""
    path = os.environ.get("PACELINE_QUEUE_PROGRESS")
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps({"work_done": step, "rate": steps_per_s}) + "\n")


def measure(job):
    """Train between two given moments; print the steps per second and the share of a core."""
    for _ in range(job.warm):
        job.train()
    print("ready", flush=True)
    begin_s, end_s = map(float, sys.stdin.readline().split())
    time.sleep(max(0.0, begin_s - time.monotonic()))
    first, first_s, first_cpu_s = job.step, time.monotonic(), time.process_time()
    while time.monotonic() < end_s:
        job.train()
    took_s, cpu_s = time.monotonic() - first_s, time.process_time() - first_cpu_s
    print(json.dumps({"rate": (job.step - first) / took_s, "core": cpu_s / took_s}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
