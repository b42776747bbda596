"""Reads images to train with: the IDX files of MNIST's format, or the digits of scikit-learn."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.core.errors import ConfigError, Missing, NotFound

_FILES = {
    "images": "train-images-idx3-ubyte",
    "labels": "train-labels-idx1-ubyte",
    "test_images": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
_TESTED = 4  # of the digits, one of so many is for the test


class ImageData(NamedTuple):
    """Images and their classes.

    Attributes:
        images, labels: to train with; float32 (samples, inputs), int64 (samples,).
        test_images, test_labels: to evaluate with.
    """

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def read_images(folder: str) -> ImageData:
    """Return the images of a folder; "": the digits of scikit-learn.

    Raises:
        NotFound: a file is missing.
        ConfigError: a file is not of the IDX format.
        Missing: scikit-learn is not installed.
    """
    if not folder:
        return _digits()
    parts = {name: _read_idx(Path(folder), file) for name, file in _FILES.items()}
    flat = {name: parts[name].reshape(len(parts[name]), -1) for name in ("images", "test_images")}
    mean, spread = flat["images"].mean(), flat["images"].std()
    return ImageData(
        ((flat["images"] - mean) / spread).astype(np.float32),
        parts["labels"].astype(np.int64),
        ((flat["test_images"] - mean) / spread).astype(np.float32),
        parts["test_labels"].astype(np.int64),
    )


def _read_idx(folder: Path, name: str) -> np.ndarray:
    paths = [folder / f"{name}.gz", folder / name]
    path = next((path for path in paths if path.exists()), None)
    if path is None:
        raise NotFound(
            f"there is no {name}",
            where=str(folder),
            fix="Name a folder with the four IDX files of MNIST or Fashion-MNIST",
        )
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    dims = raw[3] if len(raw) > 3 else 0
    begin = 4 + 4 * dims
    if raw[:3] != b"\0\0\x08" or len(raw) < begin:
        raise ConfigError("a file is not of the IDX format", where=str(path))
    shape = struct.unpack(f">{dims}I", raw[4:begin])
    if len(raw) != begin + int(np.prod(shape)):
        raise ConfigError(
            "an IDX file is not as long as it says", where=str(path), why=f"shape {shape}"
        )
    return np.frombuffer(raw, np.uint8, offset=begin).reshape(shape)


def _digits() -> ImageData:
    try:
        from sklearn.datasets import load_digits
    except ImportError as problem:
        raise Missing(
            "scikit-learn is not installed, which brings the digits",
            fix="Run `pip install 'paceline[demo]'`, or name a folder of images",
        ) from problem
    bunch = load_digits()
    images = ((bunch.data - bunch.data.mean()) / bunch.data.std()).astype(np.float32)
    labels = bunch.target.astype(np.int64)
    is_test = np.arange(labels.size) % _TESTED == 0
    return ImageData(images[~is_test], labels[~is_test], images[is_test], labels[is_test])
