"""What a random crop costs a loader, and where the time goes.

Makes 80 JPEGs of two photographs, packs them, and runs an epoch for each way to decode: whole
images that the transform crops, parts of the same size, and parts that are resized. Prints images
per second, and the seconds of the workers by stage.

    python examples/decode_images.py            # needs 'paceline[demo,images]'
"""

import dataclasses
import json
import tempfile
import time
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_sample_images

from paceline.store import Folder, Loader, LoaderOptions, RandomCrop, pack

SIZE, COUNT = 224, 80
WAYS = {
    "whole images": ("image", lambda image: image[:, :SIZE, :SIZE].float() / 255),
    "parts": (RandomCrop(SIZE, scale=None), lambda image: image.float() / 255),
    "resized parts": (RandomCrop(SIZE, flip=0.5), lambda image: image.float() / 255),
}


def make_photos(folder):
    folder.mkdir()
    photos = [Image.fromarray(pixels) for pixels in load_sample_images().images]
    for number in range(COUNT):
        photo = photos[number % 2].resize((500, 375), Image.Resampling.LANCZOS)
        photo.save(folder / f"{number:03d}.jpg", quality=95)


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos")
        pack(Folder(folder / "photos"), folder / "photos.pack")
        for way, (decode, transform) in WAYS.items():
            options = LoaderOptions(decode=decode, workers=1)
            with Loader(folder / "photos.pack", 40, transform=transform, options=options) as loader:
                begin_s = time.perf_counter()
                for images, _ in loader:
                    assert images.shape == (40, 3, SIZE, SIZE)
                took_s = time.perf_counter() - begin_s
            stages = {
                name: round(spent_s, 3)
                for name, spent_s in dataclasses.asdict(loader.stats.stages).items()
            }
            print(json.dumps({"decode": way, "images_per_s": round(COUNT / took_s), **stages}))


if __name__ == "__main__":
    main()
