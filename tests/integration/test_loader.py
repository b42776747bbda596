"""The store's loader: what it delivers, where it stands, and what it says when things go wrong."""

import dataclasses
import gc
import io
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from paceline import store
from paceline.core.errors import (
    CorruptData,
    CorruptPack,
    DeadlineExceeded,
    Missing,
    PacelineError,
    ScriptFailed,
    StorageError,
    UsageError,
)
from paceline.store import Loader, LoaderOptions, PackDataset, PackSampler, SampleOrder, open_pack

COUNT = 100
DEADLINE_S = 60
KINDS = ("thread", "process")
MAIN = os.getpid()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loader")
    for k in range(COUNT):
        inside = folder / "source" / f"class{k % 3}"
        inside.mkdir(parents=True, exist_ok=True)
        (inside / f"{k:03d}").write_bytes(bytes([k]) * (k + 1))
    store.pack(store.Folder(folder / "source"), folder / "pack")
    return folder / "pack"


@pytest.fixture
def pack(path):
    with open_pack(path) as pack:
        yield pack


def first_byte(body):
    return torch.tensor(body[0], dtype=torch.int64)


def numbers_of(batches):
    return [batch[2].tolist() for batch in batches]


def options(**given):
    return LoaderOptions(**{"numbers": True, "timeout_s": DEADLINE_S, **given})


def loader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("paceline-loader")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for thread in loader_threads():
        thread.join(DEADLINE_S)
    assert loader_threads() == []


# --- what is delivered ---------------------------------------------------------------------------


def test_raw_samples_are_views_of_one_buffer(pack):
    loader = Loader(pack, 8, options=options())
    for samples, labels, numbers in loader:
        bodies = [pack.read(number) for number in numbers.tolist()]
        assert [bytes(body) for body in samples] == bodies
        assert [bytes(samples[k]) for k in range(-len(samples), 0)] == bodies
        assert list(map(bytes, samples[2:4])) == bodies[2:4]
        assert [bytes(tensor.numpy()) for tensor in samples.tensors()] == bodies
        assert b"".join(bodies) == samples.buffer.numpy().tobytes()
        assert labels.dtype == numbers.dtype == torch.int64
        assert labels.tolist() == pack.labels[numbers.numpy()].tolist()
        again = pickle.loads(pickle.dumps(samples))
        assert [bytes(body) for body in again] == bodies
        with pytest.raises(IndexError):
            samples[len(samples)]
    address = samples.buffer.data_ptr()
    assert np.frombuffer(samples[0], np.uint8).ctypes.data == address  # no copy


@pytest.mark.parametrize(
    ("kind", "method", "workers"),
    [
        ("thread", None, 1),
        ("thread", None, 3),
        ("process", None, 1),
        ("process", "fork", 2),
        ("process", "forkserver", 2),
        ("process", "spawn", 1),
    ],
)
def test_workers_of_any_kind_and_number_deliver_the_same(path, kind, method, workers):
    chosen = options(seed=5, workers=workers, worker_kind=kind, start_method=method)
    order = SampleOrder(sample_count=COUNT, seed=5)
    # `max` can be found by workers that are not forked; all bytes of a sample are the same.
    with Loader(path, 16, transform=max, options=chosen) as loader:
        for epoch in range(2):
            assert loader.epoch == epoch
            expected = dataclasses.replace(order, epoch=epoch).samples(np.arange(COUNT)).tolist()
            batches = list(loader)
            delivered = list(itertools.chain.from_iterable(numbers_of(batches)))
            assert delivered[:COUNT] == expected
            assert delivered[COUNT:] == expected[: -COUNT % 16]  # padded from the start
            for samples, labels, numbers in batches:
                with open_pack(path) as pack:
                    names = [pack.names[number] for number in numbers.tolist()]
                assert samples.tolist() == [int(name.partition("/")[2]) for name in names]
                assert labels.tolist() == [int(name[5]) for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_raw_samples_come_from_any_kind_of_worker(path, pack, kind):
    with Loader(path, 32, options=options(worker_kind=kind, workers=1)) as loader:
        for samples, _, numbers in loader:
            assert list(map(bytes, samples)) == [pack.read(number) for number in numbers.tolist()]


def test_a_collate_of_ones_own_gets_the_list_of_samples(pack):
    loader = Loader(pack, 10, collate=lambda bodies: [len(body) for body in bodies])
    samples, labels = next(iter(loader))
    assert len(samples) == len(labels) == 10
    mixed = Loader(
        pack,
        10,
        transform=lambda body: {"size": len(body), "both": (np.ones(3), b"x")},
        options=options(),
    )
    samples, _, numbers = next(iter(mixed))
    assert samples["size"].tolist() == pack.lengths[numbers.numpy()].tolist()


def test_statistics_count_what_was_delivered(pack):
    loader = Loader(pack, 16, options=LoaderOptions(last="drop"))
    batches = iter(loader)
    next(batches)
    assert (loader.stats.batches, loader.stats.samples) == (1, 16)
    list(batches)
    assert (loader.stats.batches, loader.stats.samples) == (6, 96)
    assert 0 < loader.stats.bytes < int(pack.lengths.sum())
    assert loader.stats.waited_s > 0
    assert loader.stats.skipped == 0


def test_no_more_is_made_ahead_than_asked_for(pack):
    made = threading.Semaphore(0)

    def counted(body):
        made.release()
        return first_byte(body)

    batches = iter(Loader(pack, 4, transform=counted, options=options(batches_ahead=3, workers=2)))
    next(batches)
    for _ in range(4 + 3 * 4):  # the batch delivered, and three ahead of it
        assert made.acquire(timeout=DEADLINE_S)
    assert not made.acquire(blocking=False)
    del batches


def test_a_worker_thread_computes_on_one_core_and_others_as_before(pack):
    before = torch.get_num_threads()
    loader = Loader(pack, 4, transform=lambda _: torch.get_num_threads(), options=options())
    assert next(iter(loader))[0].tolist() == [1] * 4
    seen = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join(DEADLINE_S)
    assert seen == [before, before]


# --- images --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    (folder / "source").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (3, 6, 5, 3), np.uint8)
    for k, image in enumerate(pixels):
        Image.fromarray(image).save(folder / "source" / f"{k}.png")
    Image.fromarray(pixels[0, :, :, 0]).save(folder / "source" / "grey.png")
    store.pack(store.Folder(folder / "source"), folder / "pack")
    return folder / "pack", pixels


@pytest.mark.parametrize("kind", KINDS)
def test_images_are_decoded_to_pixels(images, kind):
    path, pixels = images
    chosen = options(decode="image", shuffle="none", worker_kind=kind)
    with Loader(path, 4, options=chosen) as loader:
        ((batch, _, _),) = list(loader)
    assert batch.dtype == torch.uint8
    assert torch.equal(batch[:3], torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert torch.equal(batch[3], torch.from_numpy(pixels[0, :, :, 0]).expand(3, 6, 5))


def test_a_transform_is_given_the_decoded_image(images):
    path, _ = images
    chosen = options(decode="image", shuffle="none")
    loader = Loader(path, 2, transform=lambda image: image.float().mean(), options=chosen)
    samples, *_ = next(iter(loader))
    assert samples.shape == (2,)


def test_what_is_no_image_is_named(path):
    loader = Loader(path, 4, options=options(decode="image"))
    with pytest.raises(CorruptData, match=r"sample \d+ 'class\d/\d+'.*cannot identify"):
        next(iter(loader))


def test_images_without_pillow_are_an_error_that_names_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(Missing, match=r"paceline\[images\]"):
        Loader(path, 4, options=options(decode="image"))


# --- the place in the epoch ----------------------------------------------------------------------


def test_leaving_a_loop_keeps_the_place(pack):
    whole = numbers_of(Loader(pack, 8, options=options()))
    loader = Loader(pack, 8, options=options())
    first = numbers_of(itertools.islice(loader, 3))
    assert loader.position == 24
    assert first + numbers_of(loader) == whole
    assert (loader.epoch, loader.position, len(loader)) == (1, 0, 13)


def test_the_next_batch_has_a_name_for_errors(pack):
    loader = Loader(pack, 50, options=options(shuffle="none", last="drop"))
    assert loader.next_batch() == "the batch that begins with sample 0 'class0/000'"
    batches = iter(loader)
    assert [len(next(batches)[2]) for _ in range(2)] == [50, 50]
    assert loader.next_batch() == "the end of the epoch"


def test_an_epoch_can_be_set_and_the_present_one_goes_on(pack):
    loader = Loader(pack, 10, options=options())
    epochs = [numbers_of(loader) for _ in range(3)]
    assert len({json.dumps(epoch) for epoch in epochs}) == 3
    loader.set_epoch(1)
    assert numbers_of(itertools.islice(loader, 4)) == epochs[1][:4]
    loader.set_epoch(1)
    assert numbers_of(loader) == epochs[1][4:]
    loader.set_epoch(2, 50)
    assert numbers_of(loader) == epochs[2][5:]
    assert loader.epoch == 3
    loader.set_epoch(0, 0)
    assert numbers_of(loader) == epochs[0]
    for wrong in ((-1,), (0, COUNT + 1), (0, -1)):
        with pytest.raises(UsageError, match="is not in epoch"):
            loader.set_epoch(*wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_ends_when_the_loader_moves(pack, kind):
    with Loader(pack, 10, options=options(worker_kind=kind)) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_epoch(5)
        with pytest.raises(UsageError, match="this pass over the loader has ended"):
            next(batches)
        order = SampleOrder(sample_count=COUNT, epoch=5)
        assert next(iter(loader))[2].tolist() == order.samples(np.arange(10)).tolist()


def test_all_options_of_the_last_batch(pack):
    sizes = {}
    for last in ("pad", "drop", "join"):
        loader = Loader(pack, 16, options=options(last=last))
        sizes[last] = [len(batch) for batch in numbers_of(loader)]
        assert len(sizes[last]) == len(loader)
        assert (loader.epoch, loader.position) == (1, 0)
    assert sizes == {"pad": [16] * 7, "drop": [16] * 6, "join": [16] * 6 + [4]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_says_what_was_delivered_not_what_was_made_ahead(pack, kind):
    whole = numbers_of(Loader(pack, 8, options=options(seed=4)))
    with Loader(pack, 8, options=options(seed=4, worker_kind=kind, batches_ahead=6)) as loader:
        for step, _ in enumerate(loader, 1):
            state = json.loads(json.dumps(loader.state_dict()))
            if step in (1, 7, 12, 13):
                other = Loader(pack, 8, options=options(seed=4))
                other.load_state_dict(state)
                if step == 13:
                    assert (other.epoch, other.position) == (1, 0)
                else:
                    assert (other.epoch, other.position) == (0, 8 * step)
                    assert numbers_of(other) == whole[step:]


def test_a_state_after_the_last_whole_batch_is_the_next_epoch(pack):
    loader = Loader(pack, 16, options=options(last="drop"))
    batches = iter(loader)
    for _ in range(6):
        next(batches)
    assert loader.epoch == 0
    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


WORLDS = (1, 2, 3, 4, 8)


def deliver(path, world, state, steps):
    """Run all ranks of a world from a state; return their global batches and the state of each."""
    loaders = [
        Loader(
            path, 24, rank=rank, world_size=world, options=options(seed=1, last="join", workers=1)
        )
        for rank in range(world)
    ]
    parts = []
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
        parts.append(numbers_of(itertools.islice(loader, steps)))
    states = [loader.state_dict() for loader in loaders]
    longest = max(map(len, parts))
    batches = [
        list(itertools.chain.from_iterable(part[step] for part in parts if step < len(part)))
        for step in range(longest)
    ]
    return batches, states


@pytest.mark.parametrize(("before", "after"), itertools.product(WORLDS, WORLDS))
def test_another_number_of_ranks_goes_on_exactly_where_the_first_was(path, before, after):
    first, states = deliver(path, before, None, 2)
    assert all(state == states[0] for state in states)
    rest, _ = deliver(path, after, states[-1], None)
    assert [len(batch) for batch in first + rest] == [24] * 4 + [4]
    assert sorted(itertools.chain.from_iterable(first + rest)) == list(range(COUNT))
    order = SampleOrder(sample_count=COUNT, seed=1).samples(np.arange(COUNT)).tolist()
    assert list(itertools.chain.from_iterable(first + rest)) == order


def test_states_of_something_else_are_refused(path, pack, tmp_path):
    loader = Loader(pack, 8, options=options(seed=4))
    state = loader.state_dict()
    (tmp_path / "source").mkdir()
    for k in range(COUNT):
        (tmp_path / "source" / f"{k}").write_bytes(b"other")
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    refused = [
        (Loader(tmp_path / "pack", 8, options=options(seed=4)), state, "of another pack"),
        (Loader(pack, 8, options=options(seed=5)), state, "its seed is 4, and here it is 5"),
        (Loader(pack, 8, options=options(seed=4, shuffle="block")), state, "shuffle"),
        (loader, {**state, "version": 99}, "version is 99"),
        (loader, {}, "version is None"),
        (loader, {**state, "position": COUNT + 1}, "is not in an epoch"),
        (loader, {**state, "position": "7"}, "is not in an epoch"),
        (loader, {**state, "epoch": -1}, "is not in an epoch"),
    ]
    for resumed, wrong, why in refused:
        with pytest.raises(UsageError, match=why) as caught:
            resumed.load_state_dict(wrong)
        assert caught.value.fix
        assert (resumed.epoch, resumed.position) == (0, 0)
    blocks = Loader(pack, 8, options=options(shuffle="block", block_samples=4))
    with pytest.raises(UsageError, match="block_samples"):
        blocks.load_state_dict({**blocks.state_dict(), "block_samples": 5})
    # A batch of another size is no other order: the position counts samples.
    larger = Loader(pack, 16, options=options(seed=4))
    larger.load_state_dict({**state, "position": 24})
    assert (
        numbers_of(larger)[0]
        == numbers_of(Loader(pack, 8, options=options(seed=4)))[3]
        + (numbers_of(Loader(pack, 8, options=options(seed=4)))[4])
    )


# --- what goes wrong -----------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """A pack in which sample 5 is damaged, and 8 to 11, which `shuffle="none"` gives together."""
    for k in range(20):
        (tmp_path / "source").mkdir(exist_ok=True)
        (tmp_path / "source" / f"{k:02d}").write_bytes(b"sample %02d" % k + bytes(100))
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    shard = tmp_path / "pack" / "shard-00000.pace"
    content = bytearray(shard.read_bytes())
    for k in (5, 8, 9, 10, 11):
        at = content.find(b"sample %02d" % k)
        content[at + 50] ^= 4
    shard.write_bytes(content)
    return tmp_path / "pack"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_an_error_that_names_the_sample_after_what_is_whole(damaged, kind):
    chosen = options(shuffle="none", worker_kind=kind)
    with Loader(damaged, 4, options=chosen) as loader:
        batches = iter(loader)
        assert next(batches)[2].tolist() == [0, 1, 2, 3]
        with pytest.raises(CorruptPack, match="sample 5 '05'") as caught:
            next(batches)
        assert caught.value.where.endswith("shard-00000.pace")
        assert caught.value.fix
        assert loader.position == 4
        with pytest.raises(UsageError, match="over"):
            next(batches)
        assert loader.epoch == 0


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_samples_can_be_skipped_and_are_counted(damaged, kind):
    chosen = options(shuffle="none", worker_kind=kind, on_corrupt="skip")
    with Loader(damaged, 10, options=chosen) as loader:
        first, second = numbers_of(loader)
        assert first == [0, 1, 2, 3, 4, 6, 7]
        assert second == [12, 13, 14, 15, 16, 17, 18, 19]
        assert loader.stats.skipped == 5
        assert loader.stats.skipped_names == ["05", "08", "09", "10", "11"]
        assert loader.stats.samples == 15
        assert len(loader) == 2


def test_skipping_changes_no_rank_s_number_of_batches(damaged):
    for rank in range(2):
        chosen = options(shuffle="none", on_corrupt="skip")
        loader = Loader(damaged, 10, rank=rank, world_size=2, options=chosen)
        assert len(list(loader)) == len(loader) == 2


def test_a_batch_of_which_nothing_is_left_is_an_error(damaged):
    loader = Loader(damaged, 4, options=options(shuffle="none", on_corrupt="skip"))
    batches = iter(loader)
    assert [len(next(batches)[2]) for _ in range(2)] == [4, 3]
    with pytest.raises(CorruptPack, match="sample 8"):
        next(batches)


def refuse_seven(body):
    if body[0] == 7:
        raise ValueError("I do not like it")
    return first_byte(body)


def complain(body):
    raise UsageError("not this way", fix="Another way")


@pytest.mark.parametrize("kind", KINDS)
def test_a_transform_that_fails_is_told_with_the_sample(path, kind):
    chosen = options(shuffle="none", worker_kind=kind)
    with Loader(path, 100, transform=refuse_seven, options=chosen) as loader:
        with pytest.raises(ScriptFailed, match=r"'class1/007'.*ValueError: I do not") as caught:
            list(loader)
        assert isinstance(caught.value, PacelineError)
        assert caught.value.where == str(path)
    with (
        Loader(path, 10, transform=complain, options=chosen) as loader,
        pytest.raises(UsageError, match="not this way"),
    ):
        next(iter(loader))


def test_samples_that_do_not_fit_together_are_told(path):
    loader = Loader(path, 10, transform=lambda body: torch.zeros(len(body)), options=options())
    with pytest.raises(ScriptFailed, match="cannot collate the batch that begins with sample"):
        next(iter(loader))


def test_a_worker_that_hangs_is_named_with_its_sample(path):
    release = threading.Event()

    def hang(body):
        if body[0] == 7:
            release.wait(DEADLINE_S)
        return first_byte(body)

    chosen = options(shuffle="none", timeout_s=0.2, workers=1)
    with Loader(path, 100, transform=hang, options=chosen) as loader:
        batches = iter(loader)
        with pytest.raises(DeadlineExceeded, match=r"paceline-loader-0.*'class1/007'"):
            next(batches)
        release.set()


def hang_in_process(body):
    signal.pause()


def die_in_process(body):
    assert os.getpid() != MAIN
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_hangs_or_dies_is_told(path):
    chosen = options(worker_kind="process", start_method="fork", workers=1)
    hanging = dataclasses.replace(chosen, timeout_s=0.5)
    with (
        Loader(path, 10, transform=hang_in_process, options=hanging) as loader,
        pytest.raises(
            DeadlineExceeded,
            match=r"worker process 0 \(pid \d+\) did not.*0\.5 s.*begins with sample",
        ),
    ):
        next(iter(loader))
    with (
        Loader(path, 10, transform=die_in_process, options=chosen) as loader,
        pytest.raises(ScriptFailed, match=r"worker process 0.*a process of the loader ended"),
    ):
        next(iter(loader))


def test_too_little_shared_memory_is_said_before_the_start(path, monkeypatch):
    monkeypatch.setattr(
        "paceline.store.feed.capacity._SHARED_MEMORY", "/proc"
    )  # which has no room at all
    with (
        Loader(path, 10, options=options(worker_kind="process", workers=1)) as loader,
        pytest.raises(StorageError, match=r"too little shared memory.*worker_kind"),
    ):
        next(iter(loader))
    with Loader(path, 10, options=options(worker_kind="thread", workers=1)) as loader:
        next(iter(loader))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"shuffle": "best"}, "shuffle is 'best'"),
        ({"last": "wrap"}, "last"),
        ({"decode": "video"}, "image, None"),
        ({"on_corrupt": "ignore"}, "raise, skip"),
        ({"worker_kind": "fibre"}, "thread, process"),
        ({"start_method": "clone"}, "forkserver"),
        ({"workers": 0}, "workers is 0"),
        ({"batches_ahead": 0}, "batches_ahead"),
        ({"bytes_ahead": -1}, "bytes_ahead"),
        ({"timeout_s": 0}, "timeout_s"),
    ],
)
def test_options_that_cannot_be_are_refused(wrong, word):
    with pytest.raises(UsageError, match=word):
        LoaderOptions(**wrong)


def test_ranks_that_cannot_share_the_batch_are_refused(path):
    with pytest.raises(UsageError, match="3 ranks cannot share a batch of 8"):
        Loader(path, 8, rank=0, world_size=3)
    with pytest.raises(UsageError, match="must be given together"):
        Loader(path, 8, rank=0)


def test_ranks_are_those_of_the_launcher(path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    batches = Loader(path, 8).batches
    assert (batches.rank, batches.world_size) == (1, 4)


def test_more_workers_than_cores_are_warned_about(path, caplog):
    cores = len(os.sched_getaffinity(0))
    with Loader(path, 8, options=options(workers=cores + 1)) as loader:
        next(iter(loader))
    assert f"{cores + 1} loader workers share {cores} cores" in caplog.text


def test_pinning_is_refused_without_a_gpu_and_done_with_one(path):
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="without a GPU"):
            Loader(path, 8, options=options(pin_memory=True))
        return
    for kind in KINDS:  # pragma: no cover - needs a GPU
        with Loader(path, 8, options=options(worker_kind=kind)) as loader:
            samples, labels, numbers = next(iter(loader))
            assert samples.buffer.is_pinned()
            assert labels.is_pinned()
            assert numbers.is_pinned()


# --- how it ends ---------------------------------------------------------------------------------


def test_dropping_an_iterator_ends_its_threads(pack):
    loader = Loader(pack, 4, options=options(batches_ahead=2))
    batches = iter(loader)
    next(batches)
    threads = loader_threads()
    assert threads
    del batches
    gc.collect()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


PROGRAM = """
import sys
from paceline.store import Loader, LoaderOptions
def size(body): return len(body)
if __name__ == "__main__":
    options = LoaderOptions(worker_kind=sys.argv[2], batches_ahead=2, workers=2)
    loader = Loader(sys.argv[1], 4, transform=size, options=options)
    batches = iter(loader)
    next(batches)
    if sys.argv[3] == "raise":
        raise KeyError("out of the loop")
    print("done")
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["end", "raise"])
def test_a_program_that_stops_in_mid_epoch_ends_at_once(path, tmp_path, kind, how):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, tmp_path / "program.py", path, kind, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == (0 if how == "end" else 1)
    assert (
        (done.stdout, done.stderr) == ("done\n", "") if how == "end" else "KeyError" in done.stderr
    )
    assert "Fatal" not in done.stderr


# --- draws of transforms -------------------------------------------------------------------------


def drawn(_):
    return float(np.random.rand()), random.random(), float(torch.rand(1))


def draws_of(path, rank, kind):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    chosen = options(seed=3, workers=2, worker_kind=kind, last="drop", numbers=False)
    loader = Loader(
        path, 20, transform=drawn, collate=list, rank=rank, world_size=2, options=chosen
    )
    return [set(column) for column in zip(*(v for batch, _ in loader for v in batch), strict=True)]


def test_transforms_of_worker_processes_draw_other_numbers_on_each_rank(path, caplog):
    for own, other in zip(*(draws_of(path, rank, "process") for rank in (0, 1)), strict=True):
        assert len(own) == len(other) == 50
        assert not own & other
    assert "draws from" not in caplog.text


def test_transforms_on_threads_that_may_draw_alike_are_named_once(path, caplog):
    draws_of(path, 1, "thread")
    text = "draws from the generator of numpy.random and of random and of torch"
    assert caplog.text.count(text) == 1
    caplog.clear()
    list(Loader(path, 20, transform=drawn, collate=list, rank=0, world_size=1))
    list(Loader(path, 20, transform=len, rank=0, world_size=2))
    assert "draws from" not in caplog.text


def test_an_epoch_without_a_batch_is_refused(path, tmp_path):
    with pytest.raises(UsageError, match="an epoch of 100 samples has no batch"):
        Loader(path, 200, options=options(last="drop"))
    store.pack(store.Samples([]), tmp_path / "empty")
    with pytest.raises(UsageError, match=r"an epoch of 0 samples has no batch.*Pack some"):
        PackSampler(tmp_path / "empty", 4)


def test_names_can_be_sliced(path):
    names = open_pack(path).names
    assert names[1:4] == [names[1], names[2], names[3]]
    assert names[::-40] == list(names)[::-40]


# --- torch's own DataLoader ----------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batch_sampler_drives_a_data_loader(path, workers):
    expected = numbers_of(Loader(path, 16, options=options(seed=3)))
    order = SampleOrder(sample_count=COUNT, seed=3)
    sampler = PackSampler(path, 16, order=order)
    assert list(sampler) == expected
    assert sampler.order.epoch == 1
    sampler.set_epoch(0)
    data = PackDataset(path, len)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    sizes = [len(data.pack.read(number)) for number in expected[0]]
    assert next(iter(loader))[0].tolist() == sizes
    assert len(loader) == len(sampler) == 7


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batch_sampler_resumes_by_the_batches_that_were_delivered(path, workers):
    sampler = PackSampler(path, 16, rank=1, world_size=2, last="join")
    whole = list(sampler)
    sampler.set_epoch(0)
    loader = DataLoader(
        PackDataset(path), batch_sampler=sampler, num_workers=workers, collate_fn=list
    )
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = json.loads(json.dumps(sampler.state_dict(3)))
    assert state["position"] == 48
    del batches
    other = PackSampler(path, 16, rank=1, world_size=2, last="join")
    other.load_state_dict(state)
    assert list(other) == whole[3:]
    assert other.state_dict()["epoch"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_near_the_end_of_an_epoch_is_of_that_epoch(path, workers):
    """A DataLoader asks for more than there is before it delivers the last batches."""
    sampler = PackSampler(path, 16)
    loader = DataLoader(
        PackDataset(path), batch_sampler=sampler, num_workers=workers, collate_fn=list
    )
    places = []
    for delivered, _ in enumerate(loader, 1):
        state = sampler.state_dict(delivered)
        places.append((state["epoch"], state["position"]))
    assert places == [*((0, 16 * k) for k in range(1, 7)), (1, 0)]
    state = sampler.state_dict(7)  # also when the pass is over
    assert (state["epoch"], state["position"]) == (1, 0)
    sampler.set_epoch(1)
    state = sampler.state_dict(0)
    assert (state["epoch"], state["position"]) == (1, 0)


def test_the_batch_sampler_speaks_the_protocol_of_stateful_data_loaders(path):
    """As torchdata calls it: the state after k batches were asked for, then load and iterate."""
    sampler = PackSampler(path, 8)
    whole = list(sampler)
    sampler.set_epoch(0)
    asked = iter(sampler)
    for k in range(5):
        assert next(asked) == whole[k]
        state = sampler.state_dict()
        other = PackSampler(path, 8)
        other.load_state_dict(state)
        resumed = iter(other)
        assert list(resumed) == whole[k + 1 :]
    assert list(sampler) == whole  # a new pass begins where this one began
    with pytest.raises(UsageError, match="of another order"):
        PackSampler(path, 8, order=SampleOrder(sample_count=COUNT, seed=1)).load_state_dict(state)
    with pytest.raises(UsageError, match="the order is of 7 samples"):
        PackSampler(path, 8, order=SampleOrder(sample_count=7))


class Sharded(BatchSampler):
    """Shares out the batches of another sampler, as accelerate does."""

    def __init__(self, batch_sampler, num_processes):
        self.batch_sampler, self.num_processes = batch_sampler, num_processes

    def __len__(self):
        return len(self.batch_sampler) // self.num_processes

    def __iter__(self):
        yield from itertools.islice(self.batch_sampler, 0, None, self.num_processes)


class OfAllRanks(DistributedSampler):
    """Shares out the items of another sampler, as Lightning does."""

    def __init__(self, sampler):
        super().__init__(sampler, num_replicas=2, rank=0, shuffle=False)

    def __iter__(self):
        items = list(self.dataset)
        return (items[index] for index in super().__iter__())


class LoaderDispatcher(DataLoader):
    """Asks for the batches of all ranks on rank 0."""

    state = types.SimpleNamespace(num_processes=2)


@pytest.mark.parametrize(
    "share",
    [
        lambda sampler, _: Sharded(sampler, 2),
        lambda sampler, _: DataLoader(range(COUNT), batch_sampler=Sharded(sampler, 2)),
        lambda sampler, _: OfAllRanks(sampler),
        lambda sampler, _: OfAllRanks(sampler.sampler),
        lambda sampler, data: LoaderDispatcher(data, batch_sampler=sampler),
    ],
)
def test_batches_of_a_rank_are_not_shared_out_once_more(path, share):
    """Half of an epoch was lost so, without a word."""
    sampler = PackSampler(path, 16, rank=0, world_size=2)
    shared = share(sampler, PackDataset(path, len))
    with pytest.raises(UsageError, match="would share the batches of one rank among 2 ranks"):
        list(shared)
    assert len(list(DataLoader(PackDataset(path, len), batch_sampler=sampler))) == 7


def test_batches_of_all_ranks_may_be_shared_out(path):
    whole = PackSampler(path, 16, rank=0, world_size=1)
    assert list(Sharded(whole, 2)) == list(PackSampler(path, 16, rank=0, world_size=1))[::2]
    one = PackSampler(path, 16, rank=0, world_size=2)
    assert len(list(Sharded(one, 1))) == 7


def test_the_batch_sampler_takes_the_ranks_of_an_injected_sampler(path):
    """Lightning makes a batch sampler anew, with a DistributedSampler of its own."""
    injected = DistributedSampler(PackDataset(path), num_replicas=2, rank=1)
    sampler = PackSampler(path, 16, sampler=injected)
    expected = list(PackSampler(path, 16, rank=1, world_size=2))
    assert isinstance(sampler, BatchSampler)
    assert (sampler.batch_size, sampler.drop_last) == (8, False)
    assert list(sampler) == expected
    sampler.sampler.set_epoch(0)
    assert list(sampler.sampler) == list(itertools.chain(*expected))
    assert len(sampler.sampler) == sum(map(len, expected))
    with pytest.raises(UsageError, match="takes a DistributedSampler, got SequentialSampler"):
        PackSampler(path, 16, sampler=SequentialSampler(range(COUNT)))


def test_a_data_set_s_state_is_its_pack(path, images):
    data = PackDataset(path)
    data.load_state_dict(json.loads(json.dumps(data.state_dict())))
    with pytest.raises(UsageError, match="another pack"):
        data.load_state_dict(PackDataset(images[0]).state_dict())


def test_images_can_be_read_from_a_view(images):
    path, _ = images
    loader = Loader(path, 4, transform=lambda body: Image.open(io.BytesIO(body)).size[0])
    samples, _ = next(iter(loader))
    assert samples.tolist() == [5] * 4
