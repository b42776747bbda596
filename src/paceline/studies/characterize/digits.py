"""The built-in subject of a sweep: three small models on handwritten digits, in files and packed.

`digits_train` is the script that is run, and has the steps that are predicted. Data are made once
in the folder of the sweep; both kinds of storage hold the same images.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline import store
from paceline.core.errors import storage_errors
from paceline.store import PackOptions, open_pack
from paceline.studies.demo_files import write_images

if TYPE_CHECKING:
    from collections.abc import Mapping

MODELS = ("cnn", "mlp", "transformer")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "model": MODELS,
    "storage": ("packed", "files"),
    "optimizer": ("sgd", "lars"),
    "compression": ("none", "dgc"),
    "precision": ("float32", "bfloat16"),
    "checkpointing": ("off", "on"),
}
BASELINE = {"batch": "32", "loader_workers": "0", **{name: c[0] for name, c in CHOICES.items()}}
# What a sweep without any axis varies, one change at a time.
DEFAULT_AXES = {
    "model": ("cnn",),
    "batch": ("16", "64"),
    "storage": CHOICES["storage"],
    "loader_workers": ("0", "1"),
    "optimizer": CHOICES["optimizer"],
    "compression": CHOICES["compression"],
    "precision": CHOICES["precision"],
    "checkpointing": CHOICES["checkpointing"],
}
SCRIPT = Path(__file__).with_name("digits_train.py")
IMAGES, PACK = "images", "digits.pack"  # in the data's folder
_DATA = "data"


class Digits(NamedTuple):
    """The data of a sweep.

    Attributes:
        folder: of images and pack.
        samples: that are trained on in an epoch.
        sample_bytes: of a stored image, the mean.
    """

    folder: Path
    samples: int
    sample_bytes: float


def make_digits(sweep: Path) -> Digits:
    """Write the images and their pack below the folder of a sweep, unless they are there.

    Raises:
        Missing: scikit-learn or Pillow is not installed.
        StorageError: they cannot be written.
    """
    folder = sweep / _DATA
    pack = folder / PACK
    if not pack.exists():  # it is there in whole or not at all, and is written last
        with storage_errors("cannot make the data", where=folder, fix="Choose another --out"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        write_images(folder / IMAGES)
        store.pack(store.Folder(folder / IMAGES), pack, options=PackOptions())
    with open_pack(pack) as opened:
        count = len(opened)
        return Digits(folder, count - len(range(0, count, 5)), float(opened.lengths.mean()))


def arguments(data: Digits) -> list[str]:
    """Return the arguments of `digits_train` with the axes' names in braces."""
    named = ("model", "batch", "storage", "loader_workers", "optimizer", "compression",
             "precision", "checkpointing", "epochs", "result")  # fmt: skip
    flags = [[f"--{name.replace('_', '-')}", f"{{{name}}}"] for name in named]
    return [
        *("--data", str(data.folder.resolve()), "--seed", "{repeat}"),
        *(word for flag in flags for word in flag),
    ]
