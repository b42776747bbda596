"""Decodes images to RGB pixels: JPEG by libjpeg-turbo (simplejpeg), everything else by Pillow.

Both decode a JPEG to the same bytes, since Pillow's wheels contain libjpeg-turbo, too; simplejpeg
writes them where they belong, without the copies that Pillow makes on the way. A part of a JPEG is
decoded by the core (native/src/jpeg.cpp): no Python binding can. Pillow is the judge: what these
refuse (CMYK, a warning of the library, damage) is given to Pillow, and an image that Pillow decodes
is decoded.

Pixels are uint8, shape (height, width, 3), as libjpeg-turbo writes them. Alpha is dropped, not
blended; of 16 bits per channel the upper 8 are kept; EXIF orientation is not applied.
"""

from __future__ import annotations

import io
import math
import threading
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional

from paceline.core.errors import MemoryExceeded, Missing
from paceline.native import acquire_buffer, decode_jpeg_part
from paceline.store.feed.crops import output_size, scale_denominator
from paceline.store.feed.options import MAX_PIXELS

if TYPE_CHECKING:
    from types import ModuleType

    from numpy.typing import NDArray

    from paceline.store.feed.crops import CropBox, ImageCrop

    Body = bytes | memoryview

_JPEG = b"\xff\xd8\xff"


class ImageDecoder:
    """Decodes images, on several threads at once; both libraries release the GIL while they decode.

    Args:
        max_pixels: larger images are refused by their header, which may claim any size. Above
            Pillow's own limit, that is raised, too, in this process.

    Raises:
        Missing: Pillow is not installed.
    """

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        _require_pillow(max_pixels)
        self.max_pixels = max_pixels
        self._simplejpeg = _find_simplejpeg()
        self._own = threading.local()

    def __reduce__(self) -> tuple[type[ImageDecoder], tuple[int]]:
        return (ImageDecoder, (self.max_pixels,))

    @property
    def has_simplejpeg(self) -> bool:
        """Whether simplejpeg is installed."""
        return self._simplejpeg is not None

    def jpeg_size(self, body: Body) -> tuple[int, int] | None:
        """Return (height, width) of a JPEG that simplejpeg can decode, by its header; else None."""
        if self._simplejpeg is None or not is_jpeg(body):
            return None
        try:
            height, width, space, _ = self._simplejpeg.decode_jpeg_header(body)
        except ValueError:
            return None
        # Pillow alone knows whether the values of a CMYK image are inverted.
        fits = space not in ("CMYK", "YCCK") and 0 < height * width <= self.max_pixels
        return (height, width) if fits else None

    def decode(self, body: Body, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """Return all pixels of an image.

        Args:
            body: the file's bytes.
            out: where to decode to, contiguous, of the image's shape; None: a new array.

        Raises:
            Exception: Pillow cannot decode it.
        """
        size = self.jpeg_size(body)
        if size is not None:
            target = _pixels(*size) if out is None else out
            if self._decode_jpeg(body, target, 1):
                return target
        pixels = _by_pillow(body, 1, self.max_pixels)
        if out is None:
            return pixels
        out[...] = pixels
        return out

    def decode_crop(
        self, body: Body, crop: ImageCrop, draws: NDArray[np.float64], out: NDArray[np.uint8]
    ) -> None:
        """Decode the part of an image that is shown, resized to the shape of `out`.

        A JPEG is decoded to 1/2, 1/4 or 1/8 of its size, by libjpeg-turbo's scaled inverse DCT, as
        long as the part keeps at least as many pixels as `out` has; and no more of it than the
        part, where the core has libjpeg-turbo, to the same pixels. Resizing is bilinear with
        antialiasing.

        Args:
            body: the file's bytes.
            crop: a RandomCrop or CenterCrop.
            draws: the sample's row of ``crop.draws``.
            out: pixels to write, uint8, shape (height, width, 3).

        Raises:
            Exception: Pillow cannot decode it.
        """
        size = self.jpeg_size(body)
        if size is not None:
            box = crop.box(*size, draws)
            denominator = scale_denominator(box, *out.shape[:2])
            scaled = box.scaled(denominator)
            shown_shape = (scaled.height, scaled.width, 3)
            is_final = shown_shape == out.shape and not scaled.flipped
            part = out if is_final else self._scratch(shown_shape)
            if decode_jpeg_part(body, *scaled[:4], denominator, part):
                return None if is_final else _show(part, scaled.flipped, out)
            scaled_size = tuple(-(-pixels // denominator) for pixels in size)
            pixels = self._scratch((*scaled_size, 3))
            if self._decode_jpeg(body, pixels, denominator):
                return _show(scaled.part_of(pixels), scaled.flipped, out)
        scaled, pixels = _crop_by_pillow(body, crop, draws, self.max_pixels)
        return _show(scaled.part_of(pixels), scaled.flipped, out)

    def _decode_jpeg(self, body: Body, out: NDArray[np.uint8], denominator: int) -> bool:
        """Decode a JPEG at 1 / `denominator` of its size; return False if simplejpeg refuses it."""
        assert self._simplejpeg is not None
        height, width, _ = out.shape
        at_least = {} if denominator == 1 else {"min_height": height, "min_width": width}
        try:
            found = self._simplejpeg.decode_jpeg(body, "RGB", buffer=out, **at_least)
        except ValueError:
            return False
        assert found.shape == out.shape, (found.shape, out.shape)
        return True

    def _scratch(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an array of the calling thread, valid until the thread asks again."""
        size = math.prod(shape)
        memory = getattr(self._own, "memory", None)
        if memory is None or len(memory) < size:
            memory = self._own.memory = np.empty(size, np.uint8)
        own: NDArray[np.uint8] = memory[:size].reshape(shape)
        return own


def _pixels(height: int, width: int) -> NDArray[np.uint8]:
    """Return recycled memory for an image: fresh pages take as long as a part of decoding."""
    return acquire_buffer(height * width * 3).reshape(height, width, 3)


def is_jpeg(body: Body) -> bool:
    """Return whether these bytes begin as a JPEG does."""
    return bytes(body[:3]) == _JPEG


def _show(part: NDArray[np.uint8], flipped: bool, out: NDArray[np.uint8]) -> None:
    """Write a part of an image to `out`, resized to its shape and perhaps mirrored."""
    if part.shape != out.shape:
        # As (1, 3, height, width) in the memory format channels_last, for which torch has its
        # fastest code.
        image = torch.from_numpy(part).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            image, size=out.shape[:2], mode="bilinear", antialias=True
        )
        part = resized[0].permute(1, 2, 0).numpy()
    out[...] = part[:, ::-1] if flipped else part


def _crop_by_pillow(
    body: Body, crop: ImageCrop, draws: NDArray[np.float64], max_pixels: int
) -> tuple[CropBox, NDArray[np.uint8]]:
    """Return an image's pixels, perhaps at a smaller size, and the box to show of them."""
    from PIL import Image

    with Image.open(io.BytesIO(body)) as image:
        width, height = image.size
        box = crop.box(height, width, draws)
        is_scalable = image.format in ("JPEG", "MPO")
    denominator = scale_denominator(box, *output_size(crop.size)) if is_scalable else 1
    return box.scaled(denominator), _by_pillow(body, denominator, max_pixels)


def _by_pillow(body: Body, denominator: int, max_pixels: int) -> NDArray[np.uint8]:
    """Return an image's pixels, at 1 / `denominator` of its size if it is a JPEG."""
    from PIL import Image

    with Image.open(io.BytesIO(body)) as image:
        if image.width * image.height > max_pixels:
            raise MemoryExceeded(
                f"an image of {image.width:,} x {image.height:,} pixels",
                why=f"at most {max_pixels:,} are decoded; each takes up to 9 bytes",
                fix="Allow more with LoaderOptions(max_pixels=...), leave such images out with "
                "on_corrupt='skip', or pack smaller ones",
            )
        if denominator > 1:
            # Decodes at the smallest scale that is not below this size: exactly at the denominator.
            image.draft(None, (image.width // denominator, image.height // denominator))
        if image.mode.startswith("I;16"):  # which Pillow would clip at 255
            gray = (np.asarray(image) >> 8).astype(np.uint8)
            return np.repeat(gray[:, :, None], 3, axis=2)
        return np.array(image.convert("RGB"))  # a copy, and so writable


def _find_simplejpeg() -> ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    module: ModuleType = simplejpeg
    return module


def _require_pillow(max_pixels: int) -> None:
    try:
        import PIL.Image
    except ImportError as error:
        raise Missing(
            "images are decoded by Pillow, which is not installed",
            why=str(error),
            fix="pip install 'paceline[images]', or pip install Pillow",
        ) from error
    allowed = PIL.Image.MAX_IMAGE_PIXELS  # None: the script wants no limit
    if allowed is not None and allowed < max_pixels:
        PIL.Image.MAX_IMAGE_PIXELS = max_pixels
