"""Do unchanged scripts train from a mount as fast as from files?

FanStore's three applications in small, in PyTorch: a CNN on JPEG images, an LSTM on records of
sensors, a GAN on microscope images (bench/mounted), and with --keras ENV a CNN in Keras on
TensorFlow, in an environment of its own. Each trains on the same files

    files        of a folder on local disk
    mount        of a pack (`paceline store exec --mount`)
    mount, zstd  of a compressed pack
    nodes        that a server on this node keeps (`paceline run --data`)

in turns whose order is drawn anew in each round; a ratio is the median over rounds of the ratio of
samples per second within a round, of epochs after the first. The last losses must be equal, and
the nodes must read the source once. CPU time is shown beside: it hardly depends on what else runs.

    python bench/mount_training.py --json [--quick] [--keras ENV]

    python3 -m venv ENV && ENV/bin/pip install tensorflow-cpu keras pillow
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from harness import Report, options, tell
from PIL import Image

from paceline import store

HERE = Path(__file__).parent
PACELINE = Path(sys.executable).parent / "paceline"
MOUNT = "/paceline-bench"
BAR = 0.97
MODELS = {"cnn": "images", "lstm": "records", "gan": "microscope", "keras_cnn": "images"}
WAYS = ("files", "mount", "mount, zstd", "nodes")
EPOCHS = {"cnn": 3, "lstm": 4, "gan": 4, "keras_cnn": 3}
WAIT_S = 300


def make_data(folder, count):
    """Write JPEG images of 13 KB, records of 16 KB, microscope images of 64 KB, and their packs."""
    random = np.random.default_rng(1)
    for number in range(count):
        rough = random.integers(0, 255, (24, 24, 3), np.uint8)
        image = Image.fromarray(rough).resize((192, 192), Image.Resampling.BICUBIC)
        noisy = np.asarray(image, np.int16) + random.integers(-12, 12, (192, 192, 3))
        place = folder / "images" / f"class{number % 10}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(
            place / f"{number:04}.jpg", quality=90
        )
        record = np.cumsum(random.normal(size=(256, 16)), 0).round(1).astype(np.float32)
        grey = np.asarray(image.convert("L").resize((256, 256)), np.uint8)
        for name, content in (("records", record / 100), ("microscope", grey)):
            (folder / name).mkdir(exist_ok=True)
            np.save(folder / name / f"{number:04}.npy", content)
    for name in set(MODELS.values()):
        for codec in ("none", "zstd"):
            pack_options = store.PackOptions(codec=codec, shard_bytes=1 << 20)
            store.pack(
                store.Folder(folder / name), folder / f"{name}.{codec}", options=pack_options
            )


class Trainings:
    """The ways to train a model.

    Args:
        folder: with the data.
        run: folder for the run of nodes.
        python: interpreters by model.
        epochs: factor on those of a model.
    """

    def __init__(self, folder, run, python, epochs):
        self.folder, self.run, self.python, self.epochs = folder, run, python, epochs
        self.copied = {}

    def train(self, model, way):
        """Return what the script of a model printed."""
        data = self.folder / MODELS[model]
        script = [self.python[model], HERE / "mounted" / f"{model}.py"]
        words = [data if way == "files" else MOUNT, max(1, round(EPOCHS[model] * self.epochs))]
        codec = "zstd" if "zstd" in way else "none"
        mount = f"{data}.{codec}:{MOUNT}"
        before = {
            "files": [],
            "mount": [PACELINE, "store", "exec", "--mount", mount, "--"],
            "mount, zstd": [PACELINE, "store", "exec", "--mount", mount, "--"],
            "nodes": [PACELINE, "run", "--no-record", "--no-bind", "--out", self.run, "--data"],
        }[way]
        before += [mount] if way == "nodes" else []
        shutil.rmtree(self.run, ignore_errors=True)
        command = [str(word) for word in [*before, *script, *words]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        if way == "nodes":
            (report,) = [json.loads(path.read_text()) for path in (self.run / "data").iterdir()]
            size = sum(path.stat().st_size for path in Path(f"{data}.none").glob("shard-*"))
            self.copied.setdefault(model, []).append(report["source_bytes"] / size)
        return json.loads(done.stdout.strip().splitlines()[-1])


def measure(report, trainings, model, rounds):
    """Train a model in all ways, round after round; add its rows and bars."""
    rng = np.random.default_rng(3)
    found = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in rng.permutation(WAYS).tolist():
            found[way].append(trainings.train(model, way))
        tell(f"{model}: round {number + 1} of {rounds}")
    rates = {
        way: [run["samples"] / statistics.median(run["seconds"]) for run in runs]
        for way, runs in found.items()
    }
    cpu = {way: [statistics.median(run["cpu_s"]) for run in runs] for way, runs in found.items()}
    for way in WAYS:
        ratios = [own / files for own, files in zip(rates[way], rates["files"], strict=True)]
        cpu_ratios = [own / files for own, files in zip(cpu[way], cpu["files"], strict=True)]
        report.row(
            model=model,
            way=way,
            samples_per_s=statistics.median(rates[way]),
            of_files=statistics.median(ratios),
            least=min(ratios),
            most=max(ratios),
            cpu_of_files=statistics.median(cpu_ratios),
        )
        if way != "files":
            report.bar(f"{model}: {way} / files", statistics.median(ratios), BAR, at_least=True)
    losses = {run["loss"] for runs in found.values() for run in runs}
    if not model.startswith("keras"):  # whose threads add in any order
        report.bar(f"{model}: different losses beyond one", len(losses) - 1, 0)
    report.bar(f"{model}: source read", max(trainings.copied[model]), 1.0)


def main():
    args = options(__doc__, "--keras")
    report = Report("mount_training", args.json)
    models = dict.fromkeys(("cnn", "lstm", "gan"), sys.executable)
    if args.keras:
        models["keras_cnn"] = Path(args.keras[0]) / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", dir=HERE.parent / "build") as name:
        folder = Path(name)
        make_data(folder, 160 if args.quick else 960)
        trainings = Trainings(folder, folder / "RUN", models, 0.34 if args.quick else 1)
        for model in models:
            measure(report, trainings, model, 1 if args.quick else 7)
    if not args.keras:
        reason = "no environment with TensorFlow and Keras: give --keras ENV"
        report.bar("keras_cnn: mount / files", None, BAR, at_least=True, reason=reason)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
