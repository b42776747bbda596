"""The loader decodes images: into the batch's memory, the same everywhere, and around damage."""

import gc
import io
import itertools
import json
import logging
import sys
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from support import forking

from paceline import store
from paceline.core.errors import CorruptData, ScriptFailed
from paceline.store import CenterCrop, Loader, LoaderOptions, RandomCrop
from paceline.store.feed import loader as loader_module

COUNT = 24
DEADLINE_S = 60
KINDS = ("thread", "process")
CROP = RandomCrop(16, scale=(0.2, 1.0), flip=0.5)


def photo(height, width, seed):
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **how):
    target = io.BytesIO()
    image.save(target, "JPEG", **{"quality": 95, **how})
    return target.getvalue()


def packed(folder, bodies):
    """Return a pack of these files, by name."""
    (folder / "source").mkdir()
    for name, body in bodies.items():
        (folder / "source" / name).write_bytes(body)
    store.pack(store.Folder(folder / "source"), folder / "pack")
    return folder / "pack"


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Photos of many sizes; every fifth is a PNG."""
    bodies = {}
    for k in range(COUNT):
        image = photo(40 + k, 60 - k, k)
        bodies[f"{k:02d}"] = jpeg(image)
        if k % 5 == 0:
            target = io.BytesIO()
            image.save(target, "PNG")
            bodies[f"{k:02d}"] = target.getvalue()
    return packed(tmp_path_factory.mktemp("photos"), bodies)


@pytest.fixture(scope="module")
def equal(tmp_path_factory):
    """Photos of one size."""
    bodies = {f"{k:02d}": jpeg(photo(30, 40, k)) for k in range(12)}
    return packed(tmp_path_factory.mktemp("equal"), bodies)


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """Sample 1 is a cut-off JPEG, 3 a text, and 8 to 11 are nothing."""
    bodies = {f"{k:02d}": jpeg(photo(30, 40, k)) for k in range(12)}
    bodies["01"] = bodies["01"][:-200]
    bodies["03"] = b"This is a text."
    bodies |= {f"{k:02d}": b"" for k in range(8, 12)}
    return packed(tmp_path_factory.mktemp("damaged"), bodies)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("paceline-loader"):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def options(**given):
    return LoaderOptions(**{"numbers": True, "timeout_s": DEADLINE_S, "decode": CROP, **given})


def by_sample(batches):
    """Return the pixels of each sample, by its number."""
    return {
        number: image
        for images, _, numbers in batches
        for number, image in zip(numbers.tolist(), images, strict=True)
    }


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


# --- what is delivered ---------------------------------------------------------------------------


def test_crops_of_any_images_fill_a_batch_in_the_memory_format_channels_last(path):
    loader = Loader(path, 8, options=options())
    for images, _, _ in loader:
        assert (images.dtype, tuple(images.shape)) == (torch.uint8, (8, 3, 16, 16))
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert loader.stats.samples == COUNT
    assert loader.stats.stages.decode_s > 0
    assert loader.stats.stages.read_s > 0
    assert loader.stats.stages.transform_s == loader.stats.stages.collate_s == 0


def test_images_of_one_size_are_decoded_into_the_batch(equal):
    loader = Loader(equal, 5, options=options(decode="image", shuffle="none", last="join"))
    delivered = by_sample(loader)
    for number in range(12):
        with Image.open(equal.parent / "source" / f"{number:02d}") as image:
            wanted = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        assert torch.equal(delivered[number], wanted)
    # Decoded one by one, and put together by torch: the same images.
    collated = Loader(
        equal, 5, transform=lambda image: image, options=options(decode="image", last="join")
    )
    assert same(by_sample(collated), delivered)
    assert collated.stats.stages.collate_s > 0
    assert loader.stats.stages.collate_s == 0


def test_images_of_several_sizes_need_a_crop(path):
    loader = Loader(path, 8, options=options(decode="image"))
    with pytest.raises(ScriptFailed, match=r"cannot collate.*RandomCrop"):
        next(iter(loader))


@pytest.mark.parametrize("crop", [CROP, RandomCrop((9, 12), scale=None), CenterCrop(16)])
@pytest.mark.parametrize(("kind", "workers"), [("thread", 3), ("process", 2)])
def test_workers_of_any_kind_and_number_crop_alike(path, crop, kind, workers):
    alone = Loader(path, 6, options=options(decode=crop, workers=1))
    wanted = [by_sample(alone) for _ in range(2)]
    chosen = options(decode=crop, workers=workers, worker_kind=kind)
    with Loader(path, 6, options=chosen) as loader:
        for epoch in wanted:
            assert same(by_sample(loader), epoch)
    is_random = crop != CenterCrop(16)
    assert same(*wanted) is not is_random


@pytest.mark.parametrize("ranks", [2, 3])
def test_another_number_of_ranks_resumes_with_the_same_crops(path, ranks):
    whole = Loader(path, 6, options=options())
    wanted = by_sample(whole)
    first = Loader(path, 6, options=options())
    begun = by_sample(itertools.islice(first, 2))
    state = first.state_dict()
    for rank in range(ranks):
        resumed = Loader(path, 6, rank=rank, world_size=ranks, options=options())
        resumed.load_state_dict(state)
        begun |= by_sample(resumed)
    assert same(begun, wanted)


def test_another_seed_crops_in_another_way(path):
    one, other = (
        by_sample(Loader(path, 6, options=options(seed=seed, shuffle="none"))) for seed in (1, 2)
    )
    assert one.keys() == other.keys()
    assert sum(torch.equal(one[k], other[k]) for k in one) < COUNT // 4


def test_a_transform_is_given_the_crop(path):
    def scale(image):
        assert (image.dtype, tuple(image.shape)) == (torch.uint8, (3, 16, 16))
        return image.float() / 255

    loader = Loader(path, 6, transform=scale, options=options())
    plain = by_sample(Loader(path, 6, options=options()))
    scaled = by_sample(loader)
    assert same(scaled, {k: image.float() / 255 for k, image in plain.items()})
    stages = loader.stats.stages
    assert min(stages.read_s, stages.decode_s, stages.transform_s, stages.collate_s) > 0


def test_the_example_decodes_in_three_ways(root):
    done = forking.run(
        [sys.executable, str(root / "examples" / "decode_images.py")],
        modules=forking.TORCH,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["decode"] for line in lines] == ["whole images", "parts", "resized parts"]
    assert all(line["decode_s"] > line["verify_s"] for line in lines)


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize("decode", ["image", RandomCrop(8)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_decoded_is_an_error_that_names_the_sample(damaged, decode, kind):
    chosen = options(decode=decode, shuffle="none", worker_kind=kind)
    with Loader(damaged, 1, options=chosen) as loader:
        batches = iter(loader)
        assert next(batches)[2].tolist() == [0]
        with pytest.raises(CorruptData, match=r"cannot decode sample 1 '01'.*truncated") as caught:
            next(batches)
        assert caught.value.where == str(damaged)
        assert "on_corrupt" in caught.value.fix
        assert caught.value.exit_code == 4


@pytest.mark.parametrize("transform", [None, torch.Tensor.float])
@pytest.mark.parametrize("decode", ["image", RandomCrop(8), CenterCrop(8)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_decoded_can_be_skipped_and_is_counted(damaged, transform, decode, kind):
    chosen = options(decode=decode, shuffle="none", worker_kind=kind, on_corrupt="skip")
    with Loader(damaged, 6, transform=transform, options=chosen) as loader:
        batches = list(loader)
        assert [batch[2].tolist() for batch in batches] == [[0, 2, 4, 5], [6, 7]]
        assert [len(images) for images, _, _ in batches] == [4, 2]
        assert [len(labels) for _, labels, _ in batches] == [4, 2]
        assert loader.stats.skipped == 6
        assert loader.stats.skipped_names == ["01", "03", "08", "09", "10", "11"]
        assert loader.stats.samples == 6
    good = by_sample(batches)
    alone = options(decode=decode, shuffle="none", on_corrupt="skip")
    single = Loader(damaged, 1, transform=transform, options=alone)
    for number in (0, 2):
        single.set_epoch(0, number)
        assert torch.equal(next(iter(single))[0][0], good[number])


def test_a_batch_of_which_nothing_can_be_decoded_is_an_error(damaged):
    loader = Loader(damaged, 4, options=options(shuffle="none", on_corrupt="skip"))
    batches = iter(loader)
    assert [len(next(batches)[2]) for _ in range(2)] == [2, 4]
    with pytest.raises(CorruptData, match="cannot decode sample 8 '08'"):
        next(batches)


@pytest.mark.parametrize("kind", KINDS)
def test_jpegs_without_simplejpeg_are_decoded_alike_and_it_is_said_once(
    path, kind, monkeypatch, caplog
):
    wanted = by_sample(Loader(path, 6, options=options()))
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    loader_module._advise_simplejpeg.cache_clear()
    chosen = options(worker_kind=kind, start_method="fork" if kind == "process" else None)
    with (
        caplog.at_level(logging.WARNING, logger="paceline.store"),
        Loader(path, 6, options=chosen) as loader,
    ):
        assert same(by_sample(loader), wanted)
        list(loader)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "paceline[images]" in said[0]


def test_nothing_is_said_without_a_jpeg(tmp_path, monkeypatch, caplog):
    target = io.BytesIO()
    photo(20, 20, 0).save(target, "PNG")
    path = packed(tmp_path, {"a": target.getvalue()})
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    loader_module._advise_simplejpeg.cache_clear()
    with caplog.at_level(logging.WARNING, logger="paceline.store"):
        list(Loader(path, 1, options=options()))
    assert caplog.records == []
