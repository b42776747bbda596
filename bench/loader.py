"""Does store.Loader decode images faster than the loaders that people use?

Epochs over 1,000 JPEGs of about 100 KB (500 x 375 pixels, parts of two photographs that come with
scikit-learn) in batches of 64, from memory: decoding, a random crop of 224 x 224, float. Each
contender sits in a process of its own (loader_contenders.py), peers in their own environments
(scripts/peers io spdl), and takes turns with the others, in rounds whose order is drawn anew. A
ratio is the median over the rounds of the ratio within a round; the first round does not count.

    python bench/loader.py --json [--quick] [--data FOLDER] [--only SECTION ...] [--rounds N]

Sections: a task and a number of workers, as in full-1. `--quick` is part-1 with a third of the
images and fewer rounds. A peer that is missing, or that fails, is left out of "the best of the
others" and named; without any peer the bar has no value.

Tasks (what each does stands in loader_contenders.py):

- full: all decode whole images. DataLoader with Pillow is what most scripts have; all others decode
  with simplejpeg, SPDL also with its own decoder (FFmpeg).
- part, resized: crops that are chosen before decoding, as `RandomCrop` does. The others decode
  whole images, since none of them offers more. The images of `resized` are larger than what most
  crops become (1024 x 768), so that they are also decoded smaller.

The bar against DataLoader with Pillow is on the last two, since these are what a script gets that
asks `store.Loader` for a random crop; on full decodes the ratio is a row.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import store_data
from harness import Report, options, run_sections
from store_read import PACELINE, Contest, Failed

HERE = Path(__file__).parent
SIZE = 224
BYTES = 100_000  # of an image, about
SETS = {"part": (500, 375), "full": (500, 375), "resized": (1024, 768)}
COUNT = 1000
BATCH = 64
PEERS = ("webdataset", "litdata", "spdl")
PILLOW = "DataLoader, Pillow"
OURS = "store.Loader"


def make_photos(folder, width, height, count):
    """Make JPEGs of about `BYTES` in ten folders, unless they are there; return where."""
    from PIL import Image
    from sklearn.datasets import load_sample_images

    place = folder / f"photos-{width}x{height}-{count}" / "files"
    wanted = {"width": width, "height": height, "count": count, "bytes": BYTES, "version": 1}
    if store_data.complete(place, wanted):
        return place
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    rng = np.random.default_rng(1)
    for number in range(count):
        photo = photos[number % 2]
        share = rng.uniform(0.6, 1.0)  # of the photograph, with its aspect ratio cut to the image's
        part_width = share * min(photo.width, photo.height * width / height)
        part_height = part_width * height / width
        left = rng.uniform(0, photo.width - part_width)
        top = rng.uniform(0, photo.height - part_height)
        box = (left, top, left + part_width, top + part_height)
        image = photo.resize((width, height), Image.Resampling.LANCZOS, box=box)
        # Grain, as in a photograph that was not enlarged.
        grain = rng.normal(0, 3, (height, width, 1))
        image = Image.fromarray((np.asarray(image) + grain).clip(0, 255).astype(np.uint8))
        path = place / str(number % 10) / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_of_size(image))
    store_data.mark(place, wanted)
    return place


def _of_size(image):
    """Return the image as a JPEG of the quality whose size is nearest to `BYTES`."""
    low, high, best = 40, 97, b""
    while low <= high:
        quality, target = (low + high) // 2, io.BytesIO()
        image.save(target, "JPEG", quality=quality)
        body = target.getvalue()
        if abs(len(body) - BYTES) < abs(len(best) - BYTES):
            best = body
        low, high = (quality + 1, high) if len(body) < BYTES else (low, quality - 1)
    return best


class Photos:
    """A set of JPEGs and its formats, as contenders are given them."""

    contender_script = HERE / "loader_contenders.py"

    def __init__(self, folder, task, workers, flags):
        self.folder, self.workers = folder, workers
        self.count = COUNT // 3 if flags.quick else COUNT
        self.files = make_photos(folder, *SETS[task], self.count)
        self.size = f"{task}, {workers} worker{'s' if workers > 1 else ''}"
        self.bytes = self.count * 3 * SIZE * SIZE * 4  # that are delivered
        self.asked = {
            "files": str(self.files),
            "pack": str(self._made("pack", self._pack)),
            "spdl": str(self.files),
            "batch": BATCH,
            "workers": workers,
        }
        for kind in ("webdataset", "litdata"):
            if store_data.environment_python(kind) is not None:
                self.asked[kind] = str(self._made(kind, self._convert))

    def _made(self, kind, make):
        place = self.files.with_name(kind)
        wanted = {"of": self.files.parent.name}
        if not store_data.complete(place, wanted):
            make(kind, place)
            store_data.mark(place, wanted)
        return place

    def _pack(self, _kind, place):
        subprocess.run([PACELINE, "pack", self.files, place], stdout=subprocess.DEVNULL, check=True)

    def _convert(self, kind, place):
        python = store_data.environment_python(kind)
        command = [python, store_data.__file__, "make", kind, self.files, place]
        environ = store_data.peer_environment(self.folder)
        subprocess.run(command, env=environ, stdout=sys.stderr, check=True)


def compare(report, task, workers, folder, flags):
    """Let all loaders do a task, and judge."""
    photos = Photos(folder, task, workers, flags)
    with Contest(report, photos, of_bytes=False) as contest:
        contest.enter(OURS, "loader", task)
        contest.enter(PILLOW, "dataloader", task, key="pillow", decoder="Pillow")
        contest.enter("DataLoader, simplejpeg", "dataloader", task, key="fast")
        contest.enter("WebDataset, simplejpeg", "webdataset", task)
        contest.enter("LitData, simplejpeg", "litdata", task)
        contest.enter("SPDL, simplejpeg", "spdl", task, key="spdl fast")
        contest.enter("SPDL, FFmpeg", "spdl", task, key="spdl", decoder="FFmpeg")
        others = [name for name in contest.entries if name != OURS]
        contest.run(int(flags.rounds[0]) if flags.rounds else 3 if flags.quick else 5)
        for name, problem in contest.problems.items():
            report.row(what=name, set=photos.size, problem=problem)
        for name in others:
            contest.compare(OURS, name)
        title = f"{photos.size}: {OURS} / "
        if task != "full":
            contest.bar(f"{title}{PILLOW}", OURS, PILLOW, 2.0)
        ratios = {name: contest.ratio(OURS, name)[0] for name in others if name != PILLOW}
        known = {name: ratio for name, ratio in ratios.items() if ratio is not None}
        best = min(known, key=known.get, default=None)
        limit = 1.0 if task == "full" else 1.2
        reason = f"{best} is the best of them" if best else "no other was measured"
        report.bar(
            f"{title}the best of the others", known.get(best), limit, at_least=True, reason=reason
        )


SECTIONS = {f"{task}-{workers}": (task, workers) for task in SETS for workers in (1, 2)}


def main():
    flags = options(__doc__, "--data", "--only", "--rounds")
    folder = Path(flags.data[0] if flags.data else HERE.parent / "build" / "bench-data").absolute()
    report = Report("loader", flags.json)
    run_sections(
        flags.only or (["part-1"] if flags.quick else SECTIONS),
        lambda name: compare(report, *SECTIONS[name], folder, flags),
        report,
        failures=(Failed, subprocess.CalledProcessError),
    )
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
