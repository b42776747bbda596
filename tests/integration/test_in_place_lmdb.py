"""LMDB databases in place: what lmdb itself reads, sample by sample, and what is refused."""

import logging
import os
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.clock import ManualClock
from paceline.core.errors import (
    CorruptData,
    CorruptPack,
    DataChanged,
    DeadlineExceeded,
    PacelineError,
    UsageError,
)
from paceline.store import Loader, LoaderOptions, add_checksums, open_pack
from paceline.store.in_place import side_file as side_file_module
from paceline.store.in_place.indexing_lock import IndexingLock
from paceline.store.in_place.lmdb import LmdbData
from paceline.store.in_place.side_file import open_data
from paceline.store.read.pack import read_options


def written(path, *commits, subdir=False):
    """Write a database by several commits of pairs; a value of None deletes. Return its path."""
    with lmdb.open(str(path), subdir=subdir, map_size=1 << 30) as environment:
        for commit in commits:
            with environment.begin(write=True) as transaction:
                for key, value in commit:
                    if value is None:
                        transaction.delete(key)
                    else:
                        transaction.put(key, value)
    settle(path / "data.mdb" if subdir else path)
    return path


def settle(path):
    """Let a file be older than the step in which times advance, for which indexing would wait."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 10**9))


def by_lmdb(path):
    """Return what lmdb reads, in its order."""
    subdir = path.is_dir()
    with (
        lmdb.open(str(path), subdir=subdir, readonly=True, lock=False) as environment,
        environment.begin() as transaction,
    ):
        return list(transaction.cursor())


def value_of(k, length):
    return np.random.default_rng(k).bytes(length)


def same_as_lmdb(path):
    """Check everything that a pack offers against lmdb; return the open pack."""
    items = by_lmdb(path)
    pack = open_pack(path)
    assert len(pack) == len(items)
    assert [pack.key(k) for k in range(len(pack))] == [key for key, _ in items]
    values = [value for _, value in items]
    assert [pack.read(k) for k in range(len(pack))] == values
    assert [bytes(view) for view in pack.views(range(len(pack)))] == values
    order = np.random.default_rng(0).permutation(len(pack))
    buffer, offsets = pack.read_batch(order)
    for k, sample in enumerate(order):
        assert buffer[offsets[k] : offsets[k + 1]].tobytes() == values[sample]
    assert pack.lengths.tolist() == [len(value) for value in values]
    for k in range(0, len(pack), 97):
        assert pack.find(pack.names[k]) == k
    return pack


LENGTHS = {"small": [0, 1, 30, 200], "large": [5_000, 20_000, 70_000], "both": [3, 2_000, 9_000]}


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("subdir", [False, True])
def test_records_are_those_of_lmdb(tmp_path, kind, subdir):
    count = 400 if kind == "large" else 5_000
    lengths = LENGTHS[kind]
    pairs = [(f"{k:06d}".encode(), value_of(k, lengths[k % len(lengths)])) for k in range(count)]
    written(tmp_path / "x.mdb", pairs, subdir=subdir)
    pack = same_as_lmdb(tmp_path / "x.mdb")
    assert pack.names[3] == "000003"
    assert pack.labels.tolist() == [-1] * count
    assert pack.is_in_place


def test_deleted_and_rewritten_keys_over_several_commits(tmp_path):
    random = np.random.default_rng(7)
    commits = []
    for _ in range(8):
        keys = random.integers(0, 3_000, 900)
        commits.append(
            [
                (
                    b"%05d" % key,
                    None
                    if random.random() < 0.3
                    else value_of(key, int(random.choice([9, 7_000]))),
                )
                for key in keys.tolist()
            ]
        )
    path = written(tmp_path / "x.mdb", *commits)
    assert len(same_as_lmdb(path)) > 1_000


def test_an_empty_database_is_an_empty_pack(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"a", b"1")], [(b"a", None)])
    with open_pack(path) as pack:
        assert len(pack) == 0
        assert not list(pack.verify())


def test_keys_with_folders_are_classes(tmp_path):
    pairs = [(f"{name}/{k}".encode(), b"x") for name in ("dog", "cat") for k in range(5)]
    pack = same_as_lmdb(written(tmp_path / "x.mdb", [*pairs, (b"top", b"y")]))
    assert pack.class_names == ("cat", "dog")
    assert pack.labels.tolist() == [0] * 5 + [1] * 5 + [-1]
    assert [entry.name for entry in pack.scandir()] == ["cat", "dog", "top"]


@pytest.mark.parametrize(
    "keys",
    [
        [struct.pack(">Q", k) for k in range(300)],
        [b"a", b"a/b"],  # a sample that would be a folder
        [b"/absolute", b"../above"],
        [b"\xff\xfe\x00", b"plain"],
    ],
)
def test_keys_that_are_no_paths_are_named_by_their_digits(tmp_path, keys):
    pack = same_as_lmdb(written(tmp_path / "x.mdb", [(key, key) for key in keys]))
    assert pack.names[0] == min(keys).hex()


@settings(max_examples=examples(40))
@given(
    commits=st.lists(
        st.lists(
            st.tuples(
                st.binary(min_size=1, max_size=40) | st.sampled_from([b"a", b"a/b", b"c/d", b"e"]),
                st.none() | st.builds(value_of, st.integers(0, 9), st.integers(0, 9_000)),
            ),
            max_size=30,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_any_database(tmp_path_factory, commits):
    path = tmp_path_factory.mktemp("any") / "x.mdb"
    same_as_lmdb(written(path, *commits)).close()
    shutil.rmtree(path.parent)


def test_a_loader_delivers_an_epoch_of_the_database(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 700)) for k in range(1_000)])
    options = LoaderOptions(workers=2)
    with Loader(path, 50, rank=0, world_size=1, options=options) as loader:
        state = None
        delivered = []
        for k, (samples, _) in enumerate(loader):
            delivered += [bytes(sample) for sample in samples]
            if k == 3:
                state = loader.state_dict()
    assert sorted(delivered) == sorted(value for _, value in by_lmdb(path))
    with Loader(path, 50, rank=0, world_size=1, options=options) as loader:
        loader.load_state_dict(state)
        rest = [bytes(sample) for samples, _ in loader for sample in samples]
    assert rest == delivered[4 * 50 :]


def test_an_unpickled_pack_reads_by_the_side_file_that_is_there(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"a", b"1")])
    with open_pack(path) as pack:
        make, arguments = pack.__reduce__()
    assert make(*arguments).read(0) == b"1"
    written(path, [(b"b", b"2")])
    with pytest.raises(DataChanged, match="was committed after"):
        make(*arguments).read(0)
    open_pack(path).close()
    with pytest.raises(UsageError, match="not the one that was opened before"):
        make(*arguments).read(0)


# The side file


def test_the_side_file_is_made_once_and_again_after_a_commit(tmp_path, caplog):
    path = written(tmp_path / "x.mdb", [(b"a", b"1")])
    with caplog.at_level(logging.WARNING), open_pack(path) as pack:
        side_file, identity = pack.side_file, pack.identity
    assert side_file == tmp_path / "x.mdb.pace"
    assert [record.getMessage() for record in caplog.records] == [
        f"indexing {path}, once: 1 file(s), {path.stat().st_size:,} bytes; "
        f"the index will be {side_file}"
    ]
    before = side_file.stat()
    with open_pack(path) as pack:
        assert pack.identity == identity
    assert side_file.stat().st_ino == before.st_ino
    written(path, [(b"b", b"2")])
    with caplog.at_level(logging.WARNING), open_pack(path) as pack:
        assert list(pack.names) == ["a", "b"]
        assert pack.identity != identity
    assert "indexing" in caplog.text
    assert sorted(entry.name for entry in tmp_path.iterdir() if "lock" not in entry.name) == [
        "x.mdb",
        "x.mdb.pace",
    ]


def test_a_commit_while_the_pack_is_open_is_an_error_not_other_bytes(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 3_000)) for k in range(50)])
    with open_pack(path) as pack:
        pack.read_batch(range(50))
        written(path, [(b"0001", b"other")])
        for read in (lambda: pack.read(0), lambda: pack.read_batch([1]), lambda: pack.view(2)):
            with pytest.raises(DataChanged, match=r"transaction \d+ was committed after"):
                read()
        with pytest.raises(DataChanged, match="was committed after"):
            add_checksums(pack)
    assert open_pack(path).read(1) == b"other"


def test_a_commit_while_the_database_is_indexed(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 300)) for k in range(50)])
    commits = [[(b"%04d" % k, value_of(k + 7, 9_000)) for k in range(20, 80)]]

    class CommittedTo(LmdbData):
        """A database to which a program commits once, behind the indexing of its records."""

        def blocks(self):
            yield from super().blocks()
            while commits:
                written(path, commits.pop())

    items = by_lmdb(path)
    with open_data(CommittedTo(path, str(path)), read_options()) as pack:
        assert by_lmdb(path) != items
        keys, values = zip(*by_lmdb(path), strict=True)
        assert (*map(pack.key, range(len(pack))),) == keys
        assert (*map(pack.read, range(len(pack))),) == values
    same_as_lmdb(path)


def test_another_database_of_the_same_transaction_is_an_error(tmp_path):
    path, other = (
        written(
            tmp_path / f"{name}.mdb",
            [(b"%04d" % k, value_of(k + count, 3_000)) for k in range(count)],
        )
        for name, count in (("x", 50), ("y", 60))
    )
    with open_pack(path) as pack:
        make, arguments = pack.__reduce__()
        pack.read_batch(range(50))
        shutil.copyfile(other, path)  # the inode and the transaction stay
        for read in (lambda: pack.read(0), lambda: pack.read_batch([1]), lambda: pack.view(2)):
            with pytest.raises(DataChanged, match="another database is at its path now"):
                read()
    with pytest.raises(DataChanged, match="another database is at its path now"):
        make(*arguments).read(0)  # as a worker that is spawned
    settle(path)
    same_as_lmdb(path).close()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "foreign", "of_other_files"])
def test_a_damaged_side_file_is_made_again(tmp_path, caplog, kind):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 300)) for k in range(500)])
    open_pack(path).close()
    side_file = tmp_path / "x.mdb.pace"
    content = bytearray(side_file.read_bytes())
    if kind == "truncated":
        del content[len(content) // 2 :]
    elif kind == "flipped":
        content[len(content) // 2] ^= 1
    elif kind == "empty":
        content = bytearray()
    elif kind == "foreign":
        content[:8] = b"SOMEBODY"
    else:
        other = written(tmp_path / "y.mdb", [(b"z", b"other")])
        open_pack(other).close()
        content = (tmp_path / "y.mdb.pace").read_bytes()
    side_file.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        same_as_lmdb(path)
    assert "again" in caplog.text


def test_data_in_a_folder_that_is_not_writable_is_indexed_in_the_cache(tmp_path, monkeypatch):
    path = written(tmp_path / "x.mdb", [(b"a", b"1")])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda where, *mode: where != tmp_path and real(where, *mode)
    )  # root may write anywhere
    clock = ManualClock()
    monkeypatch.setattr(side_file_module, "SystemClock", lambda: clock)
    with open_pack(path) as pack:
        assert pack.side_file.is_relative_to(tmp_path / "cache" / "paceline")
        assert pack.read(0) == b"1"
        made = pack.side_file.stat()
    assert clock.now == pytest.approx(0.04)  # as the cache may be on another file system
    assert not (tmp_path / "x.mdb.pace").exists()
    with open_pack(path) as pack:
        assert pack.side_file.stat() == made


def test_what_a_killed_process_left_is_removed(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"a", b"1")])
    (tmp_path / ".x.mdb.pace.left.partial").mkdir()
    (tmp_path / ".x.mdb.pace.left.partial" / "index.pace").write_bytes(b"half")
    (tmp_path / ".x.mdb.pace.lock").touch()
    open_pack(path).close()
    assert not list(tmp_path.glob(".x.mdb*"))


class SharedData(LmdbData):
    """A database whose indexing begins only when others want it as well; it counts the passes."""

    def __init__(self, path, barrier):
        super().__init__(path, str(path))
        self.barrier = barrier
        self.passes = []

    def blocks(self):
        if not self.passes:
            self.barrier.wait(20)
        self.passes.append(1)
        yield from super().blocks()


def test_one_process_indexes_and_the_others_open_what_it_made(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 300)) for k in range(50)])
    barrier = threading.Barrier(2)
    data = [SharedData(path, barrier) for _ in range(4)]  # each opens the lock file for itself
    with ThreadPoolExecutor(4) as threads:
        opening = [threads.submit(open_data, shared, read_options()) for shared in data]
        barrier.wait(20)
        packs = [future.result() for future in opening]
    assert [pack.read(7) for pack in packs] == [value_of(7, 300)] * 4
    assert sum(len(shared.passes) for shared in data) == 1
    assert not list(tmp_path.glob(".x.mdb*"))


def test_an_index_that_is_made_while_one_looks_for_it_is_opened(tmp_path, monkeypatch):
    path = written(tmp_path / "x.mdb", [(b"1", b"a")])
    late, look = SharedData(path, threading.Barrier(1)), side_file_module._open_if_current

    def look_late(data, place, options):
        found = look(data, place, options)
        monkeypatch.setattr(side_file_module, "_open_if_current", look)
        open_data(LmdbData(path, str(path)), read_options()).close()
        return found

    monkeypatch.setattr(side_file_module, "_open_if_current", look_late)
    with open_data(late, read_options()) as pack:
        assert pack.read(0) == b"a"
    assert not late.passes


def test_waiting_for_another_process_ends(tmp_path):
    with IndexingLock(tmp_path / "x.mdb.pace") as held:
        held.wait()
        with IndexingLock(tmp_path / "x.mdb.pace", ManualClock()) as lock:
            with pytest.raises(DeadlineExceeded, match=r"\.x\.mdb\.pace\.lock.*lslocks"):
                lock.wait()
            assert not lock.is_exclusive
    assert not list(tmp_path.iterdir())


# Checksums


def test_samples_are_unverified_until_all_were_read_once(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 5_000)) for k in range(40)])
    with open_pack(path) as pack:
        assert not pack.is_verified
        assert not list(pack.verify())
        identity = pack.identity
        progress = []
        add_checksums(pack, lambda done, total: progress.append((done, total)))
        assert progress[-1] == (40, 40)
    with open_pack(path) as pack:
        assert pack.is_verified
        assert pack.identity == identity  # a loader's state stays valid
        assert not list(pack.verify())
        offset = pack.extents(7)[0].offset
    state = path.stat()
    with path.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"damage")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a failing disk would leave it
    with open_pack(path) as pack:
        assert [problem.what for problem in pack.verify()] == ["sample 7 '0007' is damaged"]
        with pytest.raises(CorruptPack, match="sample 7 '0007' is damaged"):
            pack.read_batch(range(40))


# What is refused


def test_named_databases_are_refused(tmp_path):
    with lmdb.open(str(tmp_path / "named.mdb"), subdir=False, max_dbs=2) as environment:
        database = environment.open_db(b"images")
        with environment.begin(write=True, db=database) as transaction:
            transaction.put(b"a", b"1")
    with pytest.raises(UsageError, match="named databases"):
        open_pack(tmp_path / "named.mdb")
    assert not list(tmp_path.glob("*.pace"))


def test_a_truncated_database_is_damaged(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, 3_000)) for k in range(50)])
    content = path.read_bytes()
    for length in (4096, 8192, 3 * 4096, len(content) // 2, len(content) - 4096):
        path.write_bytes(content[:length])
        with pytest.raises(CorruptData):
            open_pack(path)


def test_mutated_databases_end_in_an_error_or_in_their_own_bytes(tmp_path):
    path = written(tmp_path / "x.mdb", [(b"%04d" % k, value_of(k, k % 60)) for k in range(3_000)])
    content = path.read_bytes()
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(150):
        bad = bytearray(content)
        for at in random.integers(0, len(bad), 3).tolist():
            page = at // 4096 * 4096  # mostly into headers and nodes
            bad[page + int(random.choice([at % 4096, at % 200]))] = int(random.integers(256))
        path.write_bytes(bad)
        settle(path)
        (tmp_path / "x.mdb.pace").unlink(missing_ok=True)
        try:
            with open_pack(path) as pack:
                pack.read_batch(range(len(pack)))
        except PacelineError:
            refused += 1
    assert refused > 10
