"""Images of all kinds are decoded to the pixels that Pillow shows, with simplejpeg and without."""

import io
import pickle
import sys
import threading

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from paceline.core.errors import MemoryExceeded
from paceline.native import decode_jpeg_part, jpeg_available
from paceline.store.feed import images
from paceline.store.feed.crops import CenterCrop, CropBox, RandomCrop, scale_denominator
from paceline.store.feed.images import ImageDecoder

NO_DRAWS = np.empty(0)


@pytest.fixture(params=["core", "simplejpeg", "Pillow"])
def decoder(request, monkeypatch):
    """A decoder of an installation that has all, or not the one, or neither of the two."""
    if request.param != "core":
        monkeypatch.setattr(images, "decode_jpeg_part", lambda *_: False)
    if request.param == "Pillow":
        monkeypatch.setitem(sys.modules, "simplejpeg", None)
    decoder = ImageDecoder()
    assert decoder.has_simplejpeg is (request.param != "Pillow")
    return decoder


def photo(height, width, seed=0):
    """Return smooth random pixels: a JPEG of noise would say little of upsampling."""
    coarse = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def encoded(pixels, kind="JPEG", mode=None, **how):
    image = Image.fromarray(pixels) if isinstance(pixels, np.ndarray) else pixels
    target = io.BytesIO()
    (image.convert(mode) if mode else image).save(target, kind, **how)
    return target.getvalue()


def shown_by_pillow(body):
    with Image.open(io.BytesIO(body)) as image:
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("size", [(96, 128), (97, 131), (9, 17), (1, 1)])
def test_a_jpeg_has_the_pixels_that_pillow_shows(decoder, subsampling, progressive, size):
    body = encoded(photo(*size), quality=90, subsampling=subsampling, progressive=progressive)
    assert np.array_equal(decoder.decode(memoryview(body)), shown_by_pillow(body))
    target = np.zeros((*size, 3), np.uint8)
    assert decoder.decode(body, target) is target
    assert np.array_equal(target, shown_by_pillow(body))


@pytest.mark.parametrize(
    ("kind", "mode", "how"),
    [
        ("JPEG", "L", {}),
        ("JPEG", "CMYK", {}),
        ("PNG", "RGB", {}),
        ("PNG", "L", {}),
        ("PNG", "1", {}),
        ("PNG", "P", {"transparency": 3}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("WEBP", "RGB", {"lossless": True}),
        ("TIFF", "CMYK", {}),
    ],
)
def test_other_modes_and_formats_are_converted_to_rgb_as_pillow_does(decoder, kind, mode, how):
    body = encoded(photo(30, 41), kind, mode, **how)
    pixels = decoder.decode(body)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (30, 41, 3))
    assert np.array_equal(pixels, shown_by_pillow(body))
    assert pixels.flags.writeable


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_dropped_and_not_blended(decoder, mode):
    opaque = Image.fromarray(photo(12, 10)).convert(mode[:-1])
    image = opaque.copy()
    image.putalpha(17)
    assert image.mode == mode
    pixels = decoder.decode(encoded(image, "PNG"))
    assert np.array_equal(pixels, np.asarray(opaque.convert("RGB")))


def test_of_16_bits_the_upper_8_are_kept(decoder):
    wide = np.linspace(0, 65535, 20 * 30).astype(np.uint16).reshape(20, 30)
    body = encoded(wide, "PNG")
    pixels = decoder.decode(body)
    assert np.array_equal(pixels, np.repeat((wide >> 8).astype(np.uint8)[:, :, None], 3, axis=2))
    small = np.empty((5, 5, 3), np.uint8)
    decoder.decode_crop(body, CenterCrop(5), NO_DRAWS, small)
    assert 0 < small.mean() < 255


def test_the_orientation_of_exif_is_not_applied(decoder):
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    body = encoded(photo(20, 40), exif=exif)
    assert decoder.decode(body).shape == (20, 40, 3)


def damaged_bodies():
    jpeg, png = encoded(photo(64, 80), quality=95), encoded(photo(64, 80), "PNG")
    huge = bytearray(jpeg)
    at = huge.index(b"\xff\xc0")  # the header of the frame: its size follows
    huge[at + 5 : at + 9] = b"\xff\xdc\xff\xdc"
    return {
        "cut off": jpeg[: len(jpeg) // 2],
        "cut off in the header": jpeg[:100],
        "a cut-off PNG": png[: len(png) // 2],
        "no image": b"There is no image in this file.",
        "nothing": b"",
        "only the beginning of a JPEG": b"\xff\xd8\xff",
        "a claim of 4 billion pixels": bytes(huge),
    }


@pytest.mark.parametrize("what", damaged_bodies())
def test_what_cannot_be_decoded_is_an_error(decoder, what):
    body = damaged_bodies()[what]
    target = np.empty((8, 8, 3), np.uint8)
    crop = RandomCrop(8)
    draws = crop.draws(0, 0, np.arange(1))[0]
    for attempt in (
        lambda: decoder.decode(body),
        lambda: decoder.decode_crop(body, crop, draws, target),
    ):
        with pytest.raises(Exception, match=r".") as caught:
            attempt()
        assert not isinstance(caught.value, (MemoryError, AssertionError))


def test_what_pillow_tolerates_is_decoded(decoder):
    # Bytes between the image and its end, as some cameras write: the library only warns of them.
    body = encoded(photo(64, 80))
    untidy = body[:-2] + bytes(5) + body[-2:]
    assert np.array_equal(decoder.decode(untidy), shown_by_pillow(untidy))
    assert np.array_equal(decoder.decode(untidy), decoder.decode(body))


# --- crops ---------------------------------------------------------------------------------------


def scaled_by_pillow(body, denominator):
    with Image.open(io.BytesIO(body)) as image:
        image.draft(None, (image.width // denominator, image.height // denominator))
        return np.asarray(image.convert("RGB"))


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
@pytest.mark.parametrize(("size", "denominator"), [(60, 1), (50, 2), (25, 4), (12, 8), (5, 8)])
def test_a_jpeg_is_decoded_smaller_where_the_result_is(decoder, subsampling, size, denominator):
    body = encoded(photo(101, 151), quality=90, subsampling=subsampling)
    crop = CenterCrop(size)
    box = crop.box(101, 151, NO_DRAWS)
    assert box == CropBox(0, 25, 101, 101)
    assert scale_denominator(box, size, size) == denominator
    target = np.empty((size, size, 3), np.uint8)
    decoder.decode_crop(body, crop, NO_DRAWS, target)
    top, left, height, width = (pixels // denominator for pixels in box[:4])
    smaller = scaled_by_pillow(body, denominator)
    assert smaller.shape == (-(-101 // denominator), -(-151 // denominator), 3)
    part = torch.from_numpy(smaller[top : top + height, left : left + width].copy())
    wanted = torch.nn.functional.interpolate(
        part.permute(2, 0, 1)[None], size=(size, size), mode="bilinear", antialias=True
    )
    assert torch.equal(torch.from_numpy(target).permute(2, 0, 1)[None], wanted)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_a_crop_without_resizing_is_a_part_of_the_full_decode(decoder, kind):
    body = encoded(photo(97, 131), kind)
    pixels, crop = decoder.decode(body), RandomCrop((33, 47), scale=None, flip=0.5)
    boxes = set()
    for row in crop.draws(1, 2, np.arange(40)):
        target = np.empty((33, 47, 3), np.uint8)
        decoder.decode_crop(body, crop, row, target)
        box = crop.box(97, 131, row)
        boxes.add(box)
        part = pixels[box.top : box.top + 33, box.left : box.left + 47]
        assert np.array_equal(target, part[:, ::-1] if box.flipped else part)
    assert len(boxes) > 30
    assert {box.flipped for box in boxes} == {True, False}


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "grey"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("denominator", [1, 2, 4, 8])
def test_a_decoded_part_is_that_part_of_the_full_decode(subsampling, progressive, denominator):
    image = Image.fromarray(photo(203, 171))
    if subsampling == "grey":
        body = encoded(image.convert("L"), progressive=progressive)
    else:
        body = encoded(image, quality=93, subsampling=subsampling, progressive=progressive)
    full = scaled_by_pillow(body, denominator)
    height, width, _ = full.shape
    rng = np.random.default_rng(denominator)
    whole = (0, 0, height, width)
    for top, left, part_height, part_width in [whole, *_some_boxes(rng, height, width, 150)]:
        part = np.empty((part_height, part_width, 3), np.uint8)
        decoded = decode_jpeg_part(body, top, left, part_height, part_width, denominator, part)
        assert decoded is jpeg_available()
        wanted = full[top : top + part_height, left : left + part_width]
        assert not decoded or np.array_equal(part, wanted), (top, left, part_height, part_width)


@pytest.mark.parametrize("subsampling", ["440", "411"])
def test_a_part_of_a_rare_subsampling_is_that_of_the_full_decode(subsampling):
    body = simplejpeg.encode_jpeg(photo(83, 121), colorsubsampling=subsampling)
    full = ImageDecoder().decode(body)
    for top, left, height, width in _some_boxes(np.random.default_rng(1), 83, 121, 100):
        part = np.empty((height, width, 3), np.uint8)
        decoded = decode_jpeg_part(body, top, left, height, width, 1, part)
        assert decoded is jpeg_available()
        assert not decoded or np.array_equal(part, full[top : top + height, left : left + width]), (
            top,
            left,
            height,
            width,
        )


def _some_boxes(rng, height, width, count):
    for _ in range(count):
        part_height, part_width = rng.integers(1, height + 1), rng.integers(1, width + 1)
        top = rng.integers(0, height - part_height + 1)
        left = rng.integers(0, width - part_width + 1)
        yield int(top), int(left), int(part_height), int(part_width)


def test_what_is_no_part_of_a_complete_jpeg_is_refused():
    body = encoded(photo(64, 80))
    part = np.empty((10, 10, 3), np.uint8)
    assert decode_jpeg_part(body, 54, 70, 10, 10, 1, part) is jpeg_available()
    wide = np.empty((1, 2**20, 3), np.uint8)
    refused = [
        (body, 55, 70, 10, 10, 1, part),
        (body, 54, 71, 10, 10, 1, part),
        (body, 2**32 - 1, 0, 10, 10, 1, part),
        (body, 0, 2**32 - 5, 10, 10, 1, part),
        (body, 0, 0, 1, 2**20, 1, wide),
        (body, 0, 0, 10, 11, 1, part),
        (body, 0, 0, 0, 0, 1, part[:0]),
        (body, 0, 0, 10, 10, 0, part),
        (body, 0, 0, 10, 10, 1000, part),
        (body[:-2], 0, 0, 10, 10, 1, part),
        (body[:200] + body[-2:], 0, 0, 10, 10, 1, part),
        (b"\xff\xd8\xff\xd9" * 3, 0, 0, 10, 10, 1, part),
        (b"", 0, 0, 10, 10, 1, part),
        (encoded(photo(64, 80), "PNG"), 0, 0, 10, 10, 1, part),
        (encoded(photo(64, 80), mode="CMYK"), 0, 0, 10, 10, 1, part),
    ]
    assert [decode_jpeg_part(*arguments) for arguments in refused] == [False] * len(refused)
    assert decode_jpeg_part(body, 0, 0, 10, 10, 1, part) is jpeg_available()
    with pytest.raises(BufferError):
        decode_jpeg_part(body, 0, 0, 10, 10, 1, bytes(300))


def test_damage_inside_a_jpeg_is_refused_or_decoded_and_never_more():
    body = encoded(photo(64, 80), quality=95)
    rng = np.random.default_rng(0)
    part = np.empty((64, 80, 3), np.uint8)
    for _ in range(2000):
        damaged = bytearray(body)
        for at in rng.integers(2, len(body) - 2, rng.integers(1, 5)):
            damaged[at] = rng.integers(0, 256)
        assert decode_jpeg_part(bytes(damaged), 0, 0, 64, 80, 1, part) in (True, False)


def test_a_resized_crop_is_near_what_pillow_makes_of_it(decoder):
    body = encoded(photo(97, 131), quality=95)
    crop = RandomCrop(64, scale=(0.3, 1.0))
    for row in crop.draws(3, 0, np.arange(10)):
        target = np.empty((64, 64, 3), np.uint8)
        decoder.decode_crop(body, crop, row, target)
        top, left, height, width, _ = crop.box(97, 131, row)
        with Image.open(io.BytesIO(body)) as image:
            part = image.crop((left, top, left + width, top + height))
            wanted = np.asarray(part.resize((64, 64), Image.Resampling.BILINEAR))
        assert np.abs(target.astype(int) - wanted).max() <= 1


def test_an_image_smaller_than_the_crop_is_enlarged(decoder):
    pixels = np.full((6, 5, 3), 90, np.uint8)
    for crop in (RandomCrop(16, scale=None), RandomCrop(16), CenterCrop(16)):
        target = np.empty((16, 16, 3), np.uint8)
        draws = crop.draws(0, 0, np.arange(1))[0]
        decoder.decode_crop(encoded(pixels, "PNG"), crop, draws, target)
        assert np.array_equal(target, np.full((16, 16, 3), 90))


def test_threads_share_a_decoder(decoder):
    bodies = [encoded(photo(60 + k, 80 + k, seed=k), quality=95) for k in range(8)]
    crop = CenterCrop(32)

    def decode(body):
        target = np.empty((32, 32, 3), np.uint8)
        decoder.decode_crop(body, crop, NO_DRAWS, target)
        return target.tobytes()

    wanted, results = [decode(body) for body in bodies], []

    def work():
        results.extend([decode(body) for body in bodies] == wanted for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [True] * 80


def test_a_decoder_goes_to_another_process(decoder):
    body = encoded(photo(20, 30))
    again = pickle.loads(pickle.dumps(decoder))
    assert np.array_equal(again.decode(body), decoder.decode(body))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_an_image_of_more_pixels_than_are_allowed_is_refused(decoder, kind, monkeypatch):
    body = encoded(photo(30, 40), kind)
    small = ImageDecoder(1199)
    out = np.empty((8, 8, 3), np.uint8)
    for decode in (
        lambda: small.decode(body),
        lambda: small.decode_crop(body, CenterCrop(8), np.zeros(0), out),
        lambda: pickle.loads(pickle.dumps(small)).decode(body),
    ):
        with pytest.raises(MemoryExceeded, match=r"40 x 30 pixels.*at most 1,199.*max_pixels"):
            decode()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # which refuses more than twice as many
    assert ImageDecoder(1200).decode(body).shape == (30, 40, 3)
    assert Image.MAX_IMAGE_PIXELS == 1200
