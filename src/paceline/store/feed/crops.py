"""Crops of images that are chosen before decoding, so that only what is needed is decoded.

A random crop is a pure function of (seed, epoch, sample, size of the image): the same on any
number of ranks and workers, and after a resume. The random numbers of a sample are a stream of
SplitMix64 of its own, computed for a batch at once.

Source: G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014
(SplitMix64).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_VERSION = 1  # of the random choice itself: another choice must take another number
_ATTEMPTS = 10  # to find a crop of the drawn area and aspect ratio that fits into the image
_DRAWS = 2 * _ATTEMPTS + 3  # area and ratio of each attempt; top, left, flip
_DENOMINATORS = (8, 4, 2)  # of the sizes that libjpeg-turbo decodes to with fast code, beside 1


class CropBox(NamedTuple):
    """The part of an image that is shown, in pixels, and whether it is mirrored left to right."""

    top: int
    left: int
    height: int
    width: int
    flipped: bool = False

    def scaled(self, denominator: int) -> CropBox:
        """Return the box in the image that is decoded to 1 / `denominator` of its size.

        Coordinates are rounded down, so that the box stays inside the smaller image.
        """
        top, left, height, width = (value // denominator for value in self[:4])
        return CropBox(top, left, height, width, self.flipped)

    def part_of(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a view of the part of an image, shape (height, width, 3)."""
        return pixels[self.top : self.top + self.height, self.left : self.left + self.width]


def scale_denominator(box: CropBox, height: int, width: int) -> int:
    """Return 1, 2, 4 or 8: the most by which an image can be decoded smaller.

    The box must keep at least the `height` and `width` that it is resized to.
    """
    for denominator in _DENOMINATORS:
        if box.height >= denominator * height and box.width >= denominator * width:
            return denominator
    return 1


@dataclass(frozen=True, slots=True)
class RandomCrop:
    """A random part of each image, resized to one size; for training.

    The same distribution as torchvision's RandomResizedCrop and RandomHorizontalFlip, or, with
    ``scale=None``, as RandomCrop. The choice depends on the seed of the loader, the epoch and the
    number of the sample alone. Unlike with torchvision, a sample that comes twice in an epoch
    (``last="pad"``) is cropped in the same way both times.

    Attributes:
        size: (height, width) of the result in pixels; one number for a square.
        scale: smallest and largest share of the image's area that is shown, drawn uniformly. None:
            show a part of exactly `size`, without resizing, unless the image is smaller.
        ratio: smallest and largest width / height of that part, its logarithm drawn uniformly. If
            no part of the drawn area and ratio fits, a central one is shown.
        flip: probability of mirroring left to right.

    Raises:
        UsageError: a value is impossible.
    """

    size: int | tuple[int, int]
    _: KW_ONLY
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.0

    def __post_init__(self) -> None:
        check_size(self.size)
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise UsageError(
                f"scale is {self.scale}", fix="Give two shares of the area, 0 < low <= high <= 1"
            )
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"ratio is {self.ratio}", fix="Give two ratios, 0 < low <= high")
        if not 0 <= self.flip <= 1:
            raise UsageError(f"flip is {self.flip}", fix="Give a probability, from 0 to 1")

    def draws(self, seed: int, epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the random numbers of each sample, in [0, 1), shape (samples, draws)."""
        text = f"paceline image crop {_VERSION}\0{seed}\0{epoch}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        return _uniform(key, samples, _DRAWS)

    def box(self, height: int, width: int, draws: NDArray[np.float64]) -> CropBox:
        """Return the part that is shown of an image of this size.

        Args:
            height: of the image, pixels.
            width: of the image, pixels.
            draws: a row of `draws`.
        """
        top, left, flip = draws[-3:].tolist()
        shown_height, shown_width, is_central = self._shape(height, width, draws)
        if is_central:
            top = left = 0.5
        return CropBox(
            # Uniform over the possible places; a draw is below 1.
            int(top * (height - shown_height + 1)),
            int(left * (width - shown_width + 1)),
            shown_height,
            shown_width,
            flip < self.flip,
        )

    def _shape(self, height: int, width: int, draws: NDArray[np.float64]) -> tuple[int, int, bool]:
        """Return height and width of the part that is shown, and whether it is central."""
        if self.scale is None:
            wanted_height, wanted_width = output_size(self.size)
            return min(wanted_height, height), min(wanted_width, width), False
        low, high = self.scale
        log_low, log_high = map(math.log, self.ratio)
        drawn = draws.tolist()
        for area_draw, ratio_draw in zip(drawn[0:-3:2], drawn[1:-3:2], strict=True):
            area = height * width * (low + (high - low) * area_draw)
            ratio = math.exp(log_low + (log_high - log_low) * ratio_draw)
            shown_width = round(math.sqrt(area * ratio))
            shown_height = round(math.sqrt(area / ratio))
            if 0 < shown_width <= width and 0 < shown_height <= height:
                return shown_height, shown_width, False
        if width < self.ratio[0] * height:
            return min(height, max(1, round(width / self.ratio[0]))), width, True
        return height, min(width, max(1, round(height * self.ratio[1]))), True


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The centre of each image, resized to one size; for evaluation.

    The part that is shown has the aspect ratio of `size`, is as large as fits into the image, and
    then `share` of that in height and width: ``CenterCrop(224, share=224 / 256)`` is what resizing
    the shorter edge to 256 and cropping 224 x 224 shows.

    Attributes:
        size: (height, width) of the result in pixels; one number for a square.
        share: of the largest possible height and width, above 0 and at most 1.

    Raises:
        UsageError: a value is impossible.
    """

    size: int | tuple[int, int]
    _: KW_ONLY
    share: float = 1.0

    def __post_init__(self) -> None:
        check_size(self.size)
        if not 0 < self.share <= 1:
            raise UsageError(f"share is {self.share}", fix="Give a share above 0, at most 1")

    def draws(self, _seed: int, _epoch: int, samples: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return no random numbers for each sample, shape (samples, 0)."""
        return np.empty((len(samples), 0))

    def box(self, height: int, width: int, _draws: NDArray[np.float64]) -> CropBox:
        """Return the part that is shown of an image of this size, in pixels."""
        wanted_height, wanted_width = output_size(self.size)
        largest = min(height / wanted_height, width / wanted_width) * self.share
        shown_height = min(height, max(1, round(wanted_height * largest)))
        shown_width = min(width, max(1, round(wanted_width * largest)))
        return CropBox(
            (height - shown_height) // 2, (width - shown_width) // 2, shown_height, shown_width
        )


ImageCrop = RandomCrop | CenterCrop


def output_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (height, width)."""
    return (size, size) if isinstance(size, int) else size


def check_size(size: int | tuple[int, int]) -> None:
    """Raise an error unless `size` is a positive number of pixels, or two of them."""
    sizes = size if isinstance(size, tuple) else (size, size)
    if len(sizes) != 2 or any(not isinstance(pixels, int) or pixels < 1 for pixels in sizes):
        raise UsageError(
            f"size is {size!r}", fix="Give pixels: one number of at least 1, or (height, width)"
        )


def _uniform(key: int, samples: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for each sample: SplitMix64, seeded by key and sample."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    states = _mixed(_mixed(samples.astype(np.uint64)) ^ np.uint64(key))
    steps = np.arange(1, count + 1, dtype=np.uint64) * golden  # modulo 2**64, as intended
    values = _mixed(states[:, None] + steps)
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's finaliser of each value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
