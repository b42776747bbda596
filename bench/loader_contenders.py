"""One contender of loader.py, in a process of its own that sleeps until it is its turn.

The protocol is that of store_contenders.py: a line asks for one epoch, a line answers it. Every
contender shuffles the images, decodes them, crops, and delivers batches of float32 from 0 to 1, of
224 x 224 pixels:

    full     decodes the whole image, then takes a random part of 224 x 224 pixels
    part     the same result, for whom can decode only that part
    resized  takes a random part of 8 to 100 % of the image, and resizes it (RandomResizedCrop)

Peers run in environments of their own, without Paceline.

    python bench/loader_contenders.py '{"contender": "dataloader", "files": ..., "workers": 2}'
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from store_contenders import measure

SIZE = 224
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)


def by_pillow(body):
    """Return the pixels as torchvision's own loaders do, (height, width, 3)."""
    from PIL import Image

    with Image.open(io.BytesIO(body)) as image:
        return np.array(image.convert("RGB"))


def by_simplejpeg(body):
    import simplejpeg

    return simplejpeg.decode_jpeg(body)


DECODERS = {"Pillow": by_pillow, "simplejpeg": by_simplejpeg}


def random_part(height, width):
    """Return top, left, height, width as torchvision's RandomResizedCrop draws them."""
    for _ in range(10):
        area = height * width * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(*map(math.log, RATIO)))
        part_width, part_height = (
            round(math.sqrt(area * ratio)),
            round(math.sqrt(area / ratio)),
        )
        if 0 < part_width <= width and 0 < part_height <= height:
            top = random.randint(0, height - part_height)
            return top, random.randint(0, width - part_width), part_height, part_width
    return 0, 0, height, width


def cropped(pixels, task):
    """Return the float tensor of an image (height, width, 3) for a task."""
    height, width, _ = pixels.shape
    if task == "resized":
        top, left, part_height, part_width = random_part(height, width)
    else:
        top, left = random.randint(0, height - SIZE), random.randint(0, width - SIZE)
        part_height = part_width = SIZE
    part = torch.from_numpy(pixels[top : top + part_height, left : left + part_width])
    image = part.permute(2, 0, 1)
    if task == "resized":
        image = torch.nn.functional.interpolate(
            image[None], size=(SIZE, SIZE), mode="bilinear", antialias=True
        )[0]
    return to_float(image)


def to_float(image):
    return image.float().div_(255)


class Contender:
    def __init__(self, asked):
        torch.set_num_threads(1)
        self.batch, self.workers = asked["batch"], asked["workers"]
        self.decode = DECODERS[asked.get("decoder", "simplejpeg")]
        self.asked = asked
        self.made = {}

    def item(self, body, task):
        return cropped(self.decode(body), task)

    def epoch(self, task, seed):
        """Return batches of float tensors, (samples, 3, 224, 224)."""
        raise NotImplementedError

    def _run(self, task, seed):
        def read():
            for images in self.epoch(task, seed):
                assert images.dtype == torch.float32
                assert images.shape[1:] == (3, SIZE, SIZE)
                yield len(images), images.numel() * images.element_size()

        return read

    def full(self, seed):
        return self._run("full", seed)

    def part(self, seed):
        return self._run("part", seed)

    def resized(self, seed):
        return self._run("resized", seed)


class Files(torch.utils.data.Dataset):
    """Images in files, decoded and cropped in the worker."""

    def __init__(self, contender, task):
        folders = sorted(entry.path for entry in os.scandir(contender.asked["files"]))
        self.paths = [e.path for folder in folders for e in sorted(os.scandir(folder), key=str)]
        self.contender, self.task = contender, task

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, number):
        with open(self.paths[number], "rb", buffering=0) as file:  # noqa: PTH123  # the fastest
            return self.contender.item(file.read(), self.task)


class DataLoader(Contender):
    """torch's DataLoader, with workers that stay."""

    def epoch(self, task, _seed):
        if task not in self.made:
            self.made[task] = torch.utils.data.DataLoader(
                Files(self, task),
                batch_size=self.batch,
                shuffle=True,
                num_workers=self.workers,
                persistent_workers=True,
                prefetch_factor=4,
            )
        return self.made[task]


class WebDataset(Contender):
    def epoch(self, task, seed):
        import webdataset

        if task not in self.made:
            shards = sorted(str(path) for path in Path(self.asked["webdataset"]).glob("*.tar"))
            data = webdataset.WebDataset(
                shards, shardshuffle=len(shards), seed=seed, empty_check=False
            )
            data = data.shuffle(500).map(lambda sample: self.item(sample["bin"], task))
            self.made[task] = webdataset.WebLoader(
                data.batched(self.batch, collation_fn=torch.stack),
                batch_size=None,
                num_workers=self.workers,
                persistent_workers=True,
                prefetch_factor=4,
            )
        return self.made[task]


class LitData(Contender):
    def epoch(self, task, _seed):
        import litdata

        contender = self

        class Images(litdata.StreamingDataset):
            def __getitem__(self, index):
                return contender.item(super().__getitem__(index), task)

        if task not in self.made:
            self.made[task] = litdata.StreamingDataLoader(
                Images(self.asked["litdata"], shuffle=True, seed=1),
                batch_size=self.batch,
                num_workers=self.workers,
                persistent_workers=True,
                prefetch_factor=4,
            )
        return self.made[task]


class Spdl(Contender):
    """SPDL's pipeline of threads, with its own decoder (FFmpeg) or with simplejpeg."""

    def __init__(self, asked):
        own = asked.get("decoder") == "FFmpeg"
        super().__init__(asked | ({"decoder": "simplejpeg"} if own else {}))
        if own:
            import spdl.io

            def by_ffmpeg(body):
                return spdl.io.to_numpy(spdl.io.load_image(body))

            self.decode = by_ffmpeg

    def epoch(self, task, seed):
        from spdl.pipeline import PipelineBuilder

        files = Files(self, task)
        order = np.random.default_rng(seed).permutation(len(files)).tolist()
        builder = (
            PipelineBuilder()
            .add_source(order)
            .pipe(files.__getitem__, concurrency=self.workers)
            .aggregate(self.batch)
            .pipe(torch.stack)
            .add_sink(4)
        )
        # Stacking takes a thread of its own, as the docs have it: else it waits behind decoding.
        pipeline = builder.build(num_threads=self.workers + 1)
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)


class PacelineLoader(Contender):
    """`store.Loader` with threads."""

    def epoch(self, task, _seed):
        from paceline.store import Loader, LoaderOptions, RandomCrop

        if task not in self.made:
            decode, transform = "image", self._cropped
            if task != "full":
                transform = to_float
                decode = RandomCrop(SIZE, scale=SCALE if task == "resized" else None)
            options = LoaderOptions(decode=decode, workers=self.workers, last="join")
            self.made[task] = Loader(
                self.asked["pack"], self.batch, transform=transform, options=options
            )
        return (images for images, _ in self.made[task])

    def _cropped(self, image):
        top = random.randint(0, image.shape[1] - SIZE)
        left = random.randint(0, image.shape[2] - SIZE)
        return to_float(image[:, top : top + SIZE, left : left + SIZE])


CONTENDERS = {
    "dataloader": DataLoader,
    "webdataset": WebDataset,
    "litdata": LitData,
    "spdl": Spdl,
    "loader": PacelineLoader,
}


def main():
    asked = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    contender = CONTENDERS[asked["contender"]](asked)
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(contender, json.loads(line))), file=answers, flush=True)
    answers.close()


if __name__ == "__main__":
    main()
