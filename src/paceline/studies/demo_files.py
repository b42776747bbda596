"""Where the demo keeps its files, and the handwritten digits written as PNG files."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.core.errors import DestinationExists, Missing, storage_errors

FOLDER = Path("paceline-demo")
IMAGES = FOLDER / "images"
PACK = FOLDER / "digits.pack"
BATCH = 32  # samples per rank and step
SIDE = 8  # pixels

_MARK = FOLDER / ".paceline-demo"  # marks a folder that a demo made, and may replace


def make_folder() -> None:
    """Make the demo's folder, in place of an earlier demo's.

    Raises:
        DestinationExists: there is such a folder, but no demo made it.
        StorageError: it cannot be made here.
    """
    if FOLDER.exists() and not _MARK.exists():
        raise DestinationExists(
            "the folder exists, and was not made by a demo",
            where=str(FOLDER),
            fix="Move it away, or start the demo elsewhere",
        )
    fix = "Start the demo in a folder that you may write to"
    with storage_errors("cannot make the demo's folder", where=FOLDER, fix=fix):
        if FOLDER.exists():
            shutil.rmtree(FOLDER)
        FOLDER.mkdir()
        _MARK.touch()


def write_images(folder: Path = IMAGES) -> int:
    """Write scikit-learn's digits as PNG files, a folder per class; return how many.

    Args:
        folder: to write, which is not there.

    Raises:
        Missing: scikit-learn or Pillow is not installed.
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as problem:
        raise Missing(
            f"the handwritten digits need {problem.name}", fix="pip install 'paceline[demo]'"
        ) from problem
    digits = load_digits()
    for label in sorted(set(digits.target.tolist())):
        (folder / str(label)).mkdir(parents=True)
    pixels = (digits.images * (255 / 16)).round().astype("uint8")
    for i, (image, label) in enumerate(zip(pixels, digits.target.tolist(), strict=True)):
        Image.fromarray(image).save(folder / str(label) / f"{i:04d}.png")
    return len(pixels)
