"""Tar archives, TFRecord files and folders in place: what their own readers read, and faults."""

import gzip
import io
import logging
import os
import shutil
import struct
import tarfile
from itertools import pairwise

import lmdb
import numpy as np
import pytest

from paceline import store
from paceline.core.errors import (
    CorruptData,
    CorruptPack,
    DataChanged,
    NotFound,
    StorageError,
    UsageError,
)
from paceline.native import crc32c
from paceline.store import Loader, LoaderOptions, add_checksums, open_pack


def value_of(k, length):
    return np.random.default_rng(k).bytes(length)


def settle(path):
    """Let files be older than the step in which times advance, for which indexing would wait."""
    for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
        os.utime(file, ns=(10**18, 10**18))
    return path


def write_tar(path, members, kind=tarfile.PAX_FORMAT, mode="w"):
    with tarfile.open(path, mode, format=kind) as archive:
        for name, body in members:
            entry = tarfile.TarInfo(name)
            entry.mtime = 1_700_000_000
            if isinstance(body, str):
                entry.type, entry.linkname = tarfile.LNKTYPE, body
                archive.addfile(entry)
            else:
                entry.size = len(body)
                archive.addfile(entry, io.BytesIO(body))
    return settle(path)


def masked(data):
    """Return the masked checksum of the TFRecord format."""
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def write_tfrecords(path, bodies):
    """Write what tf.io.TFRecordWriter writes (tensorflow/core/lib/io/record_writer.cc)."""
    with path.open("wb") as file:
        for body in bodies:
            length = struct.pack("<Q", len(body))
            file.write(length + masked(length) + body + masked(body))
    return settle(path)


def contents(pack):
    """Return what a pack holds, having read it in each way."""
    bodies = [pack.read(k) for k in range(len(pack))]
    buffer, offsets = pack.read_batch(range(len(pack)))
    assert [buffer[a:b].tobytes() for a, b in pairwise(offsets)] == bodies
    assert [bytes(view) for view in pack.views(range(len(pack)))] == bodies
    return dict(zip(pack.names, bodies, strict=True))


def epoch(path, batch):
    options = LoaderOptions(workers=2)
    with Loader(path, batch, rank=0, world_size=1, options=options) as loader:
        return [bytes(sample) for samples, _ in loader for sample in samples]


# Tar


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_those_of_tarfile(tmp_path, kind):
    long = "d" * 90 + "/" + "n" * 90
    members = [(f"{k % 3}/{k}.bin", value_of(k, k * 37 % 5_000)) for k in range(200)]
    members += [(long, b"long"), ("empty", b"")]
    path = write_tar(tmp_path / "x.tar", members, kind)
    with tarfile.open(path) as archive:
        expected = {entry.name: archive.extractfile(entry).read() for entry in archive}
    with open_pack(path) as pack:
        assert contents(pack) == expected
        assert pack.class_names[:3] == ("0", "1", "2")
        assert pack.mtimes_ns[0] == 1_700_000_000 * 10**9
        assert not pack.is_verified
    assert sorted(epoch(path, 101)) == sorted(expected.values())


def test_shards_and_their_classes_are_those_of_a_pack(tmp_path):
    (tmp_path / "shards").mkdir()
    for k in range(3):
        members = []
        for j in range(20):
            members += [(f"{k}{j:02d}.jpg", value_of(j, 900)), (f"{k}{j:02d}.cls", b"%d" % (j % 4))]
        write_tar(tmp_path / "shards" / f"train-{k:03d}.tar", members)
    store.pack(store.Archives(tmp_path / "shards"), tmp_path / "pack")
    for path in (tmp_path / "shards", tmp_path / "shards" / "train-{000..002}.tar"):
        with open_pack(path) as pack, open_pack(tmp_path / "pack") as packed:
            assert contents(pack) == contents(packed)
            assert pack.labels.tolist() == packed.labels.tolist()
            assert pack.class_names == packed.class_names
            assert pack.shard_count == 3
    assert (tmp_path / "shards.pace").exists()
    assert (tmp_path / "shards" / "train-{000..002}.tar.pace").exists()


def test_side_files_are_no_part_of_the_data(tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for k in range(2):
        write_tar(shards / f"s{k}.tar", [(f"{k}{name}", b"%d" % k) for name in "abc"])
    alone = open_pack(shards / "s0.tar")
    open_pack(shards / "s{0..1}.tar").close()
    (shards / ".s1.tar.pace.lock").touch()
    (shards / ".s1.tar.pace.x1_y2.partial").mkdir()
    (shards / ".s1.tar.pace.x1_y2.partial" / "spool").write_bytes(b"half")
    assert len(alone) == 3
    for path in (shards, shards / "s*"):
        with open_pack(path) as pack:
            assert len(contents(pack)) == 6
    store.pack(store.find_source(shards), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as packed:
        assert len(packed) == 6
    (shards / "text").mkdir()
    (shards / "text" / "index.pace").write_bytes(b"the user's")
    settle(shards)
    with open_pack(shards) as pack:  # no longer of archives only
        assert list(pack.names) == ["s0.tar", "s1.tar", "text/index.pace"]
        assert list(pack.folder_names) == ["text"]
        assert len(contents(pack)) == 3
    for k in range(2):
        (shards / f"s{k}.tar").unlink()
    shutil.rmtree(shards / "text")
    with pytest.raises(NotFound, match="no pack here"):
        open_pack(shards)


def test_a_hard_link_is_the_bytes_of_its_target(tmp_path):
    members = [("first", "target"), ("target", b"body"), ("second", "first")]
    with open_pack(write_tar(tmp_path / "x.tar", members)) as pack:
        assert contents(pack) == dict.fromkeys(("first", "second", "target"), b"body")
        assert len({tuple(pack.extents(k)) for k in range(3)}) == 1
    with pytest.raises(UsageError, match="leads to no file"):
        open_pack(write_tar(tmp_path / "y.tar", [("first", "nothing")]))


def test_a_class_may_be_a_hard_link(tmp_path):
    members = [("a.jpg", b"1"), ("a.cls", b"7"), ("b.jpg", b"2"), ("b.cls", "a.cls")]
    with open_pack(write_tar(tmp_path / "x.tar", members)) as pack:
        assert contents(pack) == {"a.jpg": b"1", "b.jpg": b"2"}
        assert pack.class_names[7:] == ("7",)
        assert pack.labels.tolist() == [7, 7]
    members[1] = ("a.cls", b"")
    with pytest.raises(UsageError, match=r"^'a\.cls' names no class"):
        open_pack(write_tar(tmp_path / "y.tar", members))


def test_archives_that_cannot_be_read_in_place_are_refused(tmp_path):
    write_tar(tmp_path / "x.tar.gz", [("a", b"1")], mode="w:gz")
    with pytest.raises(UsageError, match=r"compressed archive.*paceline pack"):
        open_pack(tmp_path / "x.tar.gz")
    path = write_tar(tmp_path / "x.tar", [("a", b"1" * 3_000), ("b", b"2" * 3_000)])
    content = path.read_bytes()
    for length in (100, 600, 3_900, 5_000):
        path.write_bytes(content[:length])
        with pytest.raises(StorageError, match=r"x\.tar.*truncated"):
            open_pack(settle(path))
    with pytest.raises(UsageError, match="two samples have one name"):
        open_pack(write_tar(tmp_path / "twice.tar", [("a", b"1"), ("a", b"2")]))
    with pytest.raises(NotFound):
        open_pack(tmp_path / "nowhere.tar")
    with pytest.raises(NotFound, match="no such file"):
        open_pack(tmp_path / "nowhere.tfrecord")
    with pytest.raises(NotFound, match="nothing matches"):
        open_pack(tmp_path / "nowhere-*.tar")


# TFRecord


def test_records_are_numbered_over_all_files_and_verified_from_the_start(tmp_path):
    bodies = [value_of(k, k * 91 % 7_000) for k in range(300)]
    (tmp_path / "data").mkdir()
    for k in range(3):
        write_tfrecords(tmp_path / "data" / f"x-{k}.tfrecord", bodies[100 * k : 100 * (k + 1)])
    settle_empty = tmp_path / "data" / "x-9.tfrecord"
    settle_empty.touch()
    settle(settle_empty)
    with open_pack(tmp_path / "data") as pack:
        assert pack.is_verified
        assert list(contents(pack).values()) == bodies
        assert list(pack.names)[:2] == ["0000000000", "0000000001"]
        assert not list(pack.verify())
    assert sorted(epoch(tmp_path / "data" / "x-*.tfrecord", 100)) == sorted(bodies)


def test_damaged_tfrecords(tmp_path):
    path = write_tfrecords(tmp_path / "x.tfrecord", [value_of(k, 500) for k in range(20)])
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[5 * 516 + 100] ^= 1  # data of record 5: found when it is read
    path.write_bytes(damaged)
    settle(path)
    with open_pack(path) as pack:
        with pytest.raises(CorruptPack, match="sample 5 '0000000005' is damaged"):
            pack.read_batch(range(20))
        assert [problem.what for problem in pack.verify()] == ["sample 5 '0000000005' is damaged"]
    damaged[7 * 516 + 2] ^= 1  # a length: found when it is indexed
    path.write_bytes(damaged)
    (tmp_path / "x.tfrecord.pace").unlink()
    with pytest.raises(CorruptData, match="record at byte 3612 has a damaged length"):
        open_pack(settle(path))
    for length in (7, 300, 516 + 15):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptData, match=r"is truncated.*allow_truncated=True"):
            open_pack(settle(path))
    (tmp_path / "x.tfrecord.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UsageError, match="gunzip"):
        open_pack(tmp_path / "x.tfrecord.gz")


def test_a_file_that_ends_amid_a_record_is_read_to_it_if_that_is_allowed(tmp_path, caplog):
    bodies = [value_of(k, 500) for k in range(20)]
    for k in range(2):
        write_tfrecords(tmp_path / f"{k}.tfrecord", bodies[10 * k : 10 * (k + 1)])
    paths = str(tmp_path / "?.tfrecord")
    cut = tmp_path / "0.tfrecord"
    for length, count in ((10 * 516 - 1, 9), (9 * 516 + 13, 9), (516 + 15, 1), (5, 0)):
        write_tfrecords(cut, bodies[:10])
        os.truncate(cut, length)
        settle(cut)
        with open_pack(paths, allow_truncated=True) as pack:
            assert list(contents(pack).values()) == [*bodies[:count], *bodies[10:]]
        assert f"0.tfrecord ends amid a record: its last {length - count * 516} by" in caplog.text
        with open_pack(paths, allow_truncated=True) as pack:
            assert len(pack) == count + 10
        with pytest.raises(CorruptData, match=r"0\.tfrecord.*is truncated"):
            open_pack(paths)  # though there is an index
    write_tfrecords(cut, bodies[:10])
    with open_pack(paths, allow_truncated=True) as pack:
        assert list(contents(pack).values()) == bodies
    with open_pack(paths) as pack:
        assert len(pack) == 20


def test_shards_without_a_suffix_are_tfrecords_if_they_begin_as_one(tmp_path):
    bodies = [value_of(k, 500) for k in range(20)]
    for k in range(2):
        write_tfrecords(tmp_path / f"train-0000{k}-of-00003", bodies[10 * k : 10 * (k + 1)])
    (tmp_path / "train-00002-of-00003").touch()
    settle(tmp_path / "train-00002-of-00003")
    for named in (tmp_path, tmp_path / "train-*-of-00003"):
        with open_pack(named) as pack:
            assert list(contents(pack).values()) == bodies
    (tmp_path / "train-00002-of-00003").write_bytes(b"something else")
    settle(tmp_path / "train-00002-of-00003")
    with open_pack(tmp_path) as pack:
        assert sorted(pack.names) == [f"train-0000{k}-of-00003" for k in range(3)]


# Permissions


def make_private(kind, place):
    """Make data that only their owner may read; return where they and their side file are."""
    if kind == "folder":
        (place / "x" / "inner").mkdir(parents=True)
        (place / "x" / "inner" / "secret").write_bytes(b"1")
        (place / "x" / "inner").chmod(0o700)
        return place / "x", place / "x.pace"
    path = place / f"x.{kind}"
    if kind == "tar":
        write_tar(path, [("secret", b"1")])
    else:
        write_tfrecords(path, [b"1"])
    path.chmod(0o600)
    return path, place / f"x.{kind}.pace"


@pytest.mark.parametrize("kind", ["tar", "tfrecord", "folder"])
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_side_file_is_as_private_as_its_data(tmp_path, kind, umask):
    before = os.umask(umask)
    try:
        path, side_file = make_private(kind, tmp_path)
        open_pack(path).close()
        assert side_file.stat().st_mode & 0o777 == 0o600
        add_checksums(open_pack(path))
        assert side_file.stat().st_mode & 0o777 == 0o600
        (path if path.is_file() else path / "inner").chmod(0o755)
        side_file.unlink()
        open_pack(path).close()
        assert side_file.stat().st_mode & 0o777 == 0o644 & ~umask
    finally:
        os.umask(before)


# Folders


@pytest.fixture
def folder(tmp_path):
    for k in range(60):
        file = tmp_path / "data" / f"class-{k % 3}" / f"{k}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(value_of(k, k * 171 % 9_000))
    (tmp_path / "data" / "top").write_bytes(b"top")
    (tmp_path / "data" / "class-empty").mkdir()
    return settle(tmp_path / "data")


def test_a_folder_is_what_its_pack_is(folder, tmp_path):
    store.pack(store.Folder(folder), tmp_path / "pack")
    with open_pack(folder) as pack, open_pack(tmp_path / "pack") as packed:
        assert contents(pack) == contents(packed)
        assert pack.labels.tolist() == packed.labels.tolist()
        assert list(pack.folder_names) == list(packed.folder_names)
        assert pack.mtimes_ns.tolist() == packed.mtimes_ns.tolist()
        assert not pack.is_verified
        add_checksums(pack)
    with open_pack(folder) as pack, open_pack(tmp_path / "pack") as packed:
        assert pack.is_verified
        assert pack.index.checksums.tolist() == packed.index.checksums.tolist()
    assert sorted(epoch(folder, 61)) == sorted(contents(open_pack(folder)).values())


def change(folder, how):
    file = folder / "class-1" / "1.bin"
    if how == "written":
        file.write_bytes(b"x" * file.stat().st_size)
    elif how == "resized":
        file.write_bytes(b"x")
    elif how == "removed":
        file.unlink()
    elif how == "added":
        (folder / "new").write_bytes(b"new")
    else:
        file.rename(folder / "class-1" / "renamed")


@pytest.mark.parametrize("how", ["written", "resized", "removed", "added", "renamed"])
def test_a_changed_folder_is_indexed_again(folder, how, caplog):
    open_pack(folder).close()
    change(folder, how)
    with caplog.at_level(logging.WARNING), open_pack(folder) as pack:
        found = contents(pack)
    assert "changed since it was indexed" in caplog.text
    assert found == {
        str(file.relative_to(folder)): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }


@pytest.mark.parametrize("how", ["written", "resized", "removed", "renamed"])
def test_a_file_that_changes_while_the_pack_is_open_is_an_error(folder, how):
    with open_pack(folder) as pack:
        sample = pack.find("class-1/1.bin")
        change(folder, how)
        with pytest.raises(DataChanged, match="changed since it was indexed"):
            pack.read(sample)
        assert pack.read(pack.find("top")) == b"top"


def test_what_is_no_data_set_is_not_indexed(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "shard-00000.pace").write_bytes(b"x")
    (tmp_path / "text.txt").write_bytes(b"text")
    for name in ("empty", "lost", "text.txt", "nowhere"):
        with pytest.raises(NotFound, match="no pack here"):
            open_pack(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 3


def test_databases_and_tfrecords_can_be_packed(tmp_path):
    with (
        lmdb.open(str(tmp_path / "x.mdb"), subdir=False, map_size=1 << 24) as environment,
        environment.begin(write=True) as transaction,
    ):
        for k in range(100):
            transaction.put(b"%d/%d" % (k % 3, k), value_of(k, 50 * k))
    write_tfrecords(tmp_path / "x.tfrecord", [value_of(k, 700) for k in range(30)])
    for name in ("x.mdb", "x.tfrecord"):
        store.pack(store.find_source(tmp_path / name), tmp_path / "pack")
        with open_pack(tmp_path / "pack") as packed, open_pack(tmp_path / name) as pack:
            assert not packed.is_in_place
            assert contents(packed) == contents(pack)
            assert packed.labels.tolist() == pack.labels.tolist()
        shutil.rmtree(tmp_path / "pack")


def test_the_index_of_a_pack_names_no_other_files(tmp_path):
    write_tar(tmp_path / "private.tar", [("key", b"the user's")])
    open_pack(tmp_path / "private.tar").close()
    (tmp_path / "pack").mkdir()
    # Its index names `private.tar`; a hostile one would name any file by its absolute path.
    shutil.copy(tmp_path / "private.tar.pace", tmp_path / "pack" / "index.pace")
    shutil.copy(tmp_path / "private.tar", tmp_path / "pack")
    with pytest.raises(CorruptPack, match="names files elsewhere"):
        open_pack(tmp_path / "pack")
    store.pack(store.Samples([("a", b"1")]), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "index.pace", tmp_path / "private.tar.pace")
    with open_pack(tmp_path / "private.tar") as pack:  # made again
        assert contents(pack) == {"key": b"the user's"}


# More files than are kept open


def test_files_beyond_those_that_are_mapped_are_opened_for_each_read(folder):
    with open_pack(folder, direct=True) as pack:  # keeps the fewest open
        expected = [pack.read(k) for k in range(len(pack))]
    for k in range(400):
        (folder / f"more-{k:03d}").write_bytes(value_of(k, 200))
    settle(folder)
    for checksums in (False, True):
        with open_pack(folder, direct=True) as pack:
            assert pack.is_verified == checksums
            order = np.random.default_rng(1).permutation(len(pack))
            buffer, offsets = pack.read_batch(order)
            bodies = dict(zip(order.tolist(), pairwise(offsets.tolist()), strict=True))
            for k, name in enumerate(pack.names):
                begin, end = bodies[k]
                assert buffer[begin:end].tobytes() == (folder / name).read_bytes()
                assert bytes(pack.view(k)) == (folder / name).read_bytes()
            last = pack.names[order[-1]]
            assert not list(pack.verify())
            if not checksums:
                add_checksums(pack)
    with open_pack(folder, direct=True) as pack:
        pack.read_batch(order[:300])
        state = (folder / last).stat()
        (folder / last).write_bytes(b"?" * state.st_size)
        with pytest.raises(DataChanged, match="changed since it was indexed"):
            pack.read(int(order[-1]))
        os.utime(folder / last, ns=(state.st_atime_ns, state.st_mtime_ns))
        with pytest.raises(CorruptPack, match=f"{last!a} is damaged"):
            pack.read(int(order[-1]))
    assert len(expected) == 61
