"""Reading packs from Python: views, buffers, folders, policies, processes."""

import multiprocessing
import os
import pickle
import shutil
import time

import numpy as np
import pytest

from paceline import store
from paceline.core.errors import CorruptPack, NotFound, StorageError, UsageError
from paceline.store import open_pack

MTIME_NS = 1_700_000_000_123_456_789
BODIES = {
    "a/0.bin": b"",
    "a/1.bin": b"small",
    "a/deep/er/2.bin": os.urandom(70_001),
    "a.b/3.bin": os.urandom(9_000),
    "b/4.bin": os.urandom(300_000),
    "top.bin": b"at the root",
}


@pytest.fixture
def path(tmp_path):
    for name, body in BODIES.items():
        file = tmp_path / "source" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)
        os.utime(file, ns=(0, MTIME_NS))
    (tmp_path / "source" / "empty" / "folder").mkdir(parents=True)
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    return tmp_path / "pack"


def flip(pack, name, at=-1):
    """Flip a bit of a sample in its shard, as a failing disk would."""
    (extent,) = pack.extents(pack.find(name))
    shard = pack.path / f"shard-{extent.shard:05d}.pace"
    place = extent.offset + at % extent.length
    with shard.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("verify", ["first", "always", "never"])
def test_all_ways_of_reading_return_the_same_bytes(path, verify):
    with open_pack(path, verify=verify) as pack:
        order = [3, 0, 5, 1, 2, 4, 4]
        wanted = [BODIES[pack.names[i]] for i in order]
        for _ in range(3):  # from storage, verified, trusted
            pack.prefetch(order)
            assert [pack.read(i) for i in order] == wanted
            assert [bytes(view) for view in pack.views(order)] == wanted
            buffer, offsets = pack.read_batch(order)
            assert [buffer[offsets[k] : offsets[k + 1]].tobytes() for k in range(7)] == wanted
            out = np.zeros(1 << 20, np.uint8)
            part, offsets = pack.read_batch(order, out)
            assert part.base is out
            assert part.tobytes() == b"".join(wanted)


def test_views_are_read_only_and_outlive_the_pack(path):
    pack = open_pack(path)
    view = pack.view(pack.find("b/4.bin"))
    pack.close()
    assert bytes(view) == BODIES["b/4.bin"]
    with pytest.raises(TypeError):
        view[0] = 0


def test_a_buffer_of_a_batch_serves_again_only_when_nobody_has_it(path):
    pack = open_pack(path)
    first, _ = pack.read_batch([4])
    second, _ = pack.read_batch([4])
    assert not np.shares_memory(first, second)
    again = first.ctypes.data
    kept = second[:10]
    del first, second
    third, _ = pack.read_batch([4])
    assert third.ctypes.data == again
    assert bytes(kept) == pack.read(4)[:10]


@pytest.mark.parametrize(
    "out", [np.zeros(10, np.uint8), np.zeros(2_000_000, np.uint8)[::2], b"0" * 1_000_000]
)
def test_a_buffer_that_cannot_hold_the_samples_is_refused(path, out):
    with open_pack(path) as pack, pytest.raises(UsageError, match="buffer cannot hold"):
        pack.read_batch([0, 4], out)


def test_folders_are_listed_at_the_cost_of_their_entries(path):
    with open_pack(path) as pack:
        listed = {entry.name: entry for entry in pack.scandir()}
        assert list(listed) == ["a.b", "a", "b", "empty", "top.bin"]
        assert [entry.is_folder for entry in listed.values()] == [True, True, True, True, False]
        assert (listed["top.bin"].size, listed["top.bin"].mtime_ns) == (
            11,
            1_700_000_000_123_456_789,
        )
        assert [entry.name for entry in pack.scandir("a/")] == ["deep", "0.bin", "1.bin"]
        assert pack.scandir(b"empty/folder") == []
        files = {
            (f"{folder}/{entry.name}" if folder else entry.name): entry.number
            for folder, entries in pack.walk()
            for entry in entries
            if not entry.is_folder
        }
        assert files == {name: pack.find(name) for name in BODIES}
        assert [folder for folder, _ in pack.walk("a")] == ["a", "a/deep", "a/deep/er"]
        with pytest.raises(NotFound, match="no folder named 'a/dee'"):
            pack.scandir("a/dee")


def test_reading_past_the_page_cache(path):
    pack = open_pack(path, direct=True)
    try:
        read = [pack.read(i) for i in range(len(pack))]
    except StorageError as problem:  # the file system has no such thing: said, not hidden
        if "O_DIRECT" not in str(problem):
            raise
        return
    assert read == [BODIES[name] for name in pack.names]
    flip(pack, "b/4.bin")
    with pytest.raises(CorruptPack, match="checksum"):
        pack.read(pack.find("b/4.bin"))


def test_what_was_dropped_from_memory_is_verified_again(path):
    with open_pack(path) as pack:
        sample = pack.find("b/4.bin")
        for _ in range(3):
            pack.read(sample)
            pack.view(sample)
        pack.evict()
        flip(pack, "b/4.bin")
        with pytest.raises(CorruptPack, match=r"b/4.bin.*store repair"):
            pack.read(sample)
        with pytest.raises(CorruptPack, match=r"checksum 0x\w+ expected, 0x\w+ found"):
            pack.view(sample)
        assert [problem.what for problem in pack.verify()] == [
            f"sample {sample} 'b/4.bin' is damaged"
        ]


def read_until(sample, pack, deadline):
    """Read again and again: what happens to the file is noticed now and then."""
    while time.monotonic() < deadline:
        pack.read(sample)


def test_a_shard_that_is_written_to_is_verified_again(path):
    with open_pack(path) as pack:
        sample = pack.find("b/4.bin")
        pack.read(sample)
        flip(pack, "b/4.bin")  # in the page cache, under our eyes
        with pytest.raises(CorruptPack):
            read_until(sample, pack, time.monotonic() + 10)


def test_a_shard_that_is_cut_off_is_an_error_and_no_signal(path):
    with open_pack(path) as pack:
        pack.read(pack.find("b/4.bin"))
        pack.evict()
        os.truncate(path / "shard-00000.pace", 5000)
        with pytest.raises(CorruptPack):
            pack.read(pack.find("b/4.bin"))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*")
def test_processes_read_the_pack_that_they_were_given(path, method):
    pack = open_pack(path, threads=2, verify="always")
    samples = list(range(len(pack))) * 20  # enough for threads to share
    pack.read_batch(samples)
    context = multiprocessing.get_context(method)
    for damaged in (False, True):
        if damaged:
            flip(pack, "b/4.bin")
        process = context.Process(target=pack.read_batch, args=(samples,))
        process.start()
        process.join(60)
        assert process.exitcode == damaged  # it verifies, so that reading is proof enough
    assert pickle.loads(pickle.dumps(pack))._options["verify"] == "always"


def test_copies_share_an_identity_and_others_do_not(path, tmp_path):
    shutil.copytree(path, tmp_path / "copy")
    (tmp_path / "source" / "more.bin").write_bytes(b"more")
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "other")
    first, copy, other = (open_pack(tmp_path / name) for name in ("pack", "copy", "other"))
    assert first.identity == copy.identity != other.identity
    assert len(first.identity) == 32


def test_an_index_can_be_read_without_its_shards(path):
    (path / "shard-00000.pace").unlink()
    with pytest.raises(CorruptPack, match="is missing"):
        open_pack(path)
    with open_pack(path, index_only=True) as pack:
        assert sorted(pack.names) == sorted(BODIES)
        with pytest.raises(CorruptPack, match="without its shards"):
            pack.read(0)


def test_an_unknown_policy_is_refused(path):
    with pytest.raises(UsageError, match="first, always, never"):
        open_pack(path, verify="sometimes")


def test_fewer_than_one_thread_is_refused(path):
    with pytest.raises(UsageError, match="at least 1, got 0"):
        open_pack(path, threads=0)
