"""How large may the batch be before accuracy falls, and by how much do LARS and LAMB move that?

A small CNN learns Fashion-MNIST at batches from 64 to 32,768, each in the same number of epochs;
two ranks share a batch and accumulate it. A character transformer learns tiny-shakespeare.

    sgd    momentum 0.9; the rate grows linearly with the batch
    lars   its rate grows with the square root of the batch
    lamb   its rate grows with the square root of the batch

All of them warm up over 15 % of the epochs and decay polynomially (power 2); biases and
normalisation layers neither decay nor adapt. At every batch every method gets the same number of
tuning trials, judged on images held out from training: three rates a factor of 4 apart around the
peak rate that was best at the batch before; then, one after the other, a quarter of the lowest or 4
times the highest while one of these is best, and twice and half the best otherwise. So no method
ends at an edge of its grid because its rates were guessed too high for large batches. The best rate
then trains with three seeds, which the test images judge. All trials are in the results.

    python bench/large_batch.py --json [--quick | --short] [--data DIR]

DIR has the folders fashion-mnist and tinyshakespeare. `--quick` trains one point with each method
on a part of the images, without tuning. `--short` has 4 batches, a smaller net, and fewer
epochs.
The full run is a campaign of some hours. Each training is appended to a file in bench/results when
it ends, and a run that is started again takes what is there: stop it at any time, or give it
`--minutes M`, after which it starts no further training.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from harness import Report, options, tell

RANKS = 2
METHODS = ("sgd", "lars", "lamb")
BASE = {
    "images": {"sgd": 0.05, "lars": 2.0, "lamb": 0.008},  # at a batch of 64
    "text": {"sgd": 0.2, "lars": 2.0, "lamb": 0.008},
}
TRIALS = 6
CHANCE = 0.15  # an accuracy below has learnt nothing
TRAINING_SAMPLES = {"images": 55_000, "text": 15_253}
SEEDS = (1, 2, 3)
LARGE = 16_384
POINT = 0.01  # of accuracy


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """What one mode of the benchmark trains."""

    batches: dict[str, tuple[int, ...]]
    epochs: dict[str, float]
    width: int
    samples: int = 0  # 0: all
    trials: int = TRIALS
    seeds: tuple[int, ...] = SEEDS


FULL = Campaign(
    batches={
        "images": (64, 256, 1024, 2048, 4096, 8192, 16_384, 32_768),
        "text": (16, 128, 1024, 4096),
    },
    epochs={"images": 10, "text": 4},
    width=8,
)
SHORT = Campaign(
    batches={"images": (64, 1024, 8192, 32_768)},
    epochs={"images": 4},
    width=4,
)
QUICK = Campaign(
    batches={"images": (256,)},
    epochs={"images": 4},
    width=4,
    samples=12_000,
    trials=0,
    seeds=(1,),
)


def main():
    switches = {"--short": "4 batches and a smaller net, within 45 minutes"}
    given = options(__doc__, "--data", "--minutes", switches=switches)
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    data = Path(given.data[0]) if given.data else default
    mode = "quick" if given.quick else "short" if given.short else "full"
    campaign = {"quick": QUICK, "short": SHORT, "full": FULL}[mode]
    report = Report("large_batch", given.json)
    if not (data / "fashion-mnist").is_dir():
        tell(f"skipped: no folder fashion-mnist in {data}; give it with --data DIR")
        return 0
    results = Path(__file__).parent / "results"
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) if mode == "quick" else results
        end = time.monotonic() + 60 * float(given.minutes[0]) if given.minutes else None
        with Trainer(data, Path(folder), kept / f"large_batch_{mode}.jsonl", end) as train:
            for task, batches in campaign.batches.items():
                figures, peaks = {}, dict(BASE[task])
                for batch in batches:
                    for method in METHODS:
                        outcome = best_of(train, campaign, task, method, batch, peaks[method])
                        figures[method, batch] = outcome
                        peaks[method] = outcome["peak_rate"]
                        report.row(task=task, method=method, batch=batch, **outcome)
                judge(report, task, figures, batches, mode)
    return report.print()


def best_of(train, campaign, task, method, batch, center):
    """Tune the peak rate of a method at a batch; return the figures of the best over the seeds."""
    scale = batch / 64 if method == "sgd" else (batch / 64) ** 0.5  # the schedule multiplies by it
    common = {
        "task": task,
        "method": method,
        "batch": batch,
        "epochs": campaign.epochs[task],
        "samples": campaign.samples,
        "width": campaign.width,
    }

    def trial(peak):
        found = train({**common, "rate": peak / scale, "seed": 0, "split": "validation"})
        return goodness(task, found["figure"])

    tried = tune(trial, center, campaign.trials)
    peak = best_rate(tried) if tried else center * scale
    finals = [
        train({**common, "rate": peak / scale, "seed": seed, "split": "test"})["figure"]
        for seed in campaign.seeds
    ]
    known = [figure for figure in finals if figure is not None]
    return {
        "share_of_data": batch / (campaign.samples or TRAINING_SAMPLES[task]),
        "peak_rate": peak,
        "test": statistics.mean(known) if len(known) == len(finals) else None,
        "test_by_seed": finals,
        "trials": [list(pair) for pair in tried.items()],
    }


def tune(trial, center, trials):
    """Return the goodness of the rates that were tried, by rate.

    >>> list(tune(lambda rate: -abs(rate - 3), 1.0, 6))
    [0.25, 1.0, 4.0, 16.0, 8.0, 2.0]
    """
    tried = {}
    for rate in (center / 4, center, center * 4)[:trials]:
        tried[rate] = trial(rate)
    while len(tried) < trials:
        best = best_rate(tried)
        wanted = [2 * best, best / 2, 2**0.5 * best, best / 2**0.5]
        if best == min(tried):
            wanted.insert(0, best / 4)
        elif best == max(tried):
            wanted.insert(0, best * 4)
        rate = next(rate for rate in wanted if rate not in tried)
        tried[rate] = trial(rate)
    return tried


def best_rate(tried):
    """Return the rate of the best trial; the lowest of equal ones, as where all diverged.

    >>> best_rate({1.0: float("-inf"), 0.25: float("-inf")})
    0.25
    """
    return max(tried, key=lambda rate: (tried[rate], -rate))


def goodness(task, figure):
    """Return what tuning maximises; a training that diverged is worse than any other."""
    if figure is None or (task == "images" and figure < CHANCE):
        return float("-inf")
    return figure if task == "images" else -figure


def judge(report, task, figures, batches, mode):
    """Compare the largest batches that keep the small batch's accuracy."""
    if task != "images":
        return
    if mode == "quick":
        for method in METHODS:
            value = figures[method, batches[0]]["test"]
            report.bar(f"{method}, batch {batches[0]}: accuracy", value, 0.7, at_least=True)
        return
    reference = figures["sgd", batches[0]]["test"]

    def accuracy(method, batch):
        return figures[method, batch]["test"] or 0.0

    largest = {
        method: max(
            (batch for batch in batches if accuracy(method, batch) >= reference - POINT),
            default=0,
        )
        for method in METHODS
    }
    best = max(largest["lars"], largest["lamb"])
    report.row(task=task, reference=reference, largest_within_a_point=largest)
    ratio = best / largest["sgd"] if largest["sgd"] else None
    report.bar("largest batch within 1 point, best / tuned SGD", ratio, 4, at_least=True)
    gaps = [
        max(accuracy("lars", batch), accuracy("lamb", batch)) - accuracy("sgd", batch)
        for batch in batches
        if batch >= LARGE
    ]
    report.bar("accuracy at >= 16,384, best - tuned SGD, least", min(gaps), 0, at_least=True)


class Trainer:
    """Trains requests on the ranks, and keeps what it found in a file."""

    def __init__(self, data, folder, path, end):
        self.data, self.folder, self.path, self.end = data, folder, path, end
        text = path.read_text() if path.exists() else ""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # killed while it wrote
            path.write_text("".join(lines[:-1]))
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        self.finished = {json.dumps(entry["request"]): entry["answer"] for entry in entries}
        self.ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            try:
                rank.wait(timeout=60)
            except subprocess.TimeoutExpired:
                rank.kill()

    def __call__(self, request):
        """Return the answer to a request, which may have been found by an earlier run."""
        key = json.dumps(request)
        if key not in self.finished:
            if self.end is not None and time.monotonic() > self.end:
                sys.exit(f"stopped after --minutes; {len(self.finished)} trainings are kept")
            self.finished[key] = answer = self._train(key)
            with self.path.open("a") as file:
                file.write(json.dumps({"request": request, "answer": answer}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            tell(f"  {request['method']} {request['batch']}, rate {request['rate']:.4g}: {answer}")
        return self.finished[key]

    def _train(self, line):
        self.ranks = self.ranks or [self._start(rank) for rank in range(RANKS)]
        for rank in self.ranks:
            rank.stdin.write(line + "\n")
            rank.stdin.flush()
        answer = self.ranks[0].stdout.readline()
        if not answer:
            sys.exit(f"a rank ended while it trained {line}")
        return json.loads(answer)

    def _start(self, rank):
        script = str(Path(__file__).with_name("large_batch_ranks.py"))
        store = str(self.folder / "store")
        return subprocess.Popen(
            [sys.executable, script, store, str(rank), str(RANKS), str(self.data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )


if __name__ == "__main__":
    sys.exit(main())
