"""Is a loader's ceiling right: the stage that limits it, its rate, and a step without waiting?

    python bench/loader_ceiling.py --json [--quick]

One stage of a loader takes 40 ms of each batch: reading (of a FIFO that is filled late), decoding
or collating of torch's DataLoader, transforming or collating of the store's. Two workers load, and
a step waits for 10 ms in place of computing, so that other jobs on the machine disturb little. The
recorded run names a stage, a ceiling, and the time of a step with an infinitely fast loader. They
are compared with the planted stage; with the rate of the same loader in a loop that does nothing
else; and with steps whose loader has nothing planted.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from harness import Report, options

PLANTED_S, STEP_S, WORKERS, BATCH = 0.040, 0.010, 2, 8
BATCHES, QUICK_BATCHES = 200, 60
TOLERANCE = 0.10
DEADLINE_S = 120
CASES = [
    ("torch", "read"),
    ("torch", "decode"),
    ("torch", "collate"),
    ("store", "transform"),
    ("store", "collate"),
]
LOOP = """
import sys, threading, time
import torch
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

source, stage, folder = sys.argv[1], sys.argv[2], sys.argv[3]
planted_s, step_s, batches, batch, workers = map(float, sys.argv[4:])
batches, batch, workers = int(batches), int(batch), int(workers)

def wait(seconds):
    if seconds:
        threading.Event().wait(seconds)

class Samples(Dataset):
    def __len__(self):
        return batches * batch

    def __getitem__(self, number):
        if stage == "read" and planted_s and number % batch == 0:
            with open(f"{folder}/fifo-{get_worker_info().id}", "rb", buffering=0) as file:
                file.read(1)
        if stage == "decode":
            wait(planted_s / batch)
        return torch.zeros(4), number

def transform(sample):
    wait(planted_s / batch if stage == "transform" else 0)
    return torch.zeros(4)

def collate(samples):
    wait(planted_s if stage == "collate" else 0)
    return default_collate(samples)

def loader():
    if source == "torch":
        return DataLoader(Samples(), batch, num_workers=workers, collate_fn=collate)
    from paceline.store import Loader, LoaderOptions
    options = LoaderOptions(workers=workers)
    return Loader(f"{folder}/pack", batch, transform=transform, collate=collate, options=options)

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
times = []
for samples, _ in loader():
    wait(step_s)
    optimizer.zero_grad()
    model(samples).sum().backward()
    optimizer.step()
    times.append(time.perf_counter())
first = len(times) // 5
print("STEP", (times[-1] - times[first]) / (len(times) - 1 - first))
"""


@contextlib.contextmanager
def late_fifos(folder, planted_s):
    """Fill a FIFO for each worker, late, as long as this is open."""
    ended = threading.Event()

    def fill(path):
        while not ended.is_set():
            with contextlib.suppress(BrokenPipeError), path.open("wb", buffering=0) as file:
                ended.wait(planted_s)
                file.write(b"x")

    paths = [folder / f"fifo-{worker}" for worker in range(WORKERS)]
    for path in paths:
        os.mkfifo(path)
    threads = [threading.Thread(target=fill, args=(path,), daemon=True) for path in paths]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for path in paths:  # a writer that waits for a reader goes on, and ends
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            path.unlink()


def run(folder, name, source, stage, planted_s, step_s, batches):
    """Train recorded in folder `name`; return the seconds of a step that the script measured."""
    script = folder / "loop.py"
    script.write_text(LOOP)
    words = [source, stage, folder, planted_s, step_s, batches, BATCH, WORKERS]
    command = [sys.executable, "-m", "paceline", "run", "-n", 1, "--record-io", "--no-bind"]
    command += ["--out", folder / name, script, *words]
    with late_fifos(folder, planted_s):
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True,
                              timeout=DEADLINE_S)  # fmt: skip
    if done.returncode:
        sys.exit(f"the run ended with {done.returncode}: {done.stderr}")
    return next(float(line.split()[1]) for line in done.stdout.splitlines() if "STEP" in line)


def ceiling_of(run_folder):
    from paceline.trace.analysis import analyse
    from paceline.trace.merge import load_run

    return analyse(load_run(run_folder)).loader


def make_pack(folder, batches):
    from paceline import store

    (folder / "source").mkdir()
    for number in range(batches * BATCH):
        (folder / "source" / f"{number:05}").write_bytes(b"x" * 100)
    store.pack(store.Folder(folder / "source"), folder / "pack")


def measure(report, source, stage, batches):
    with tempfile.TemporaryDirectory(prefix="paceline-loader-") as name:
        folder = Path(name)
        if source == "store":
            make_pack(folder, batches)
        run(folder, "limited", source, stage, PLANTED_S, STEP_S, batches)
        found = ceiling_of(folder / "limited")
        alone_s = run(folder, "alone", source, stage, PLANTED_S, 0.0, batches)
        fast_s = run(folder, "fast", source, stage, 0.0, STEP_S, batches)
    own = next(part for part in found.stages if part.stage == found.slowest)
    predicted_s = found.step_s - found.saving_s
    report.row(source=source, planted=stage, slowest=found.slowest, stage_ms=1e3 * own.seconds,
               ceiling_per_s=found.ceiling_per_s, alone_per_s=1 / alone_s,
               step_ms=1e3 * found.step_s, without_ms=1e3 * predicted_s, fast_ms=1e3 * fast_s,
               ceiling_error=found.ceiling_per_s * alone_s - 1,
               step_error=predicted_s / fast_s - 1)  # fmt: skip


def main():
    flags = options(__doc__)
    report = Report("loader_ceiling", flags.json)
    for source, stage in CASES[:: 2 if flags.quick else 1]:
        measure(report, source, stage, QUICK_BATCHES if flags.quick else BATCHES)
    named = sum(row["slowest"] == row["planted"] for row in report.rows)
    worst = {
        key: max(abs(row[key]) for row in report.rows) for key in ("ceiling_error", "step_error")
    }
    report.bar("planted stages that are named", named, len(report.rows), at_least=True)
    report.bar("ceiling against the loader alone, error", worst["ceiling_error"], TOLERANCE)
    report.bar("step without waiting against a fast loader, error", worst["step_error"], TOLERANCE)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
