"""Packing a folder: what is taken, what is refused, and what is left behind."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paceline import store
from paceline.core.clock import ManualClock
from paceline.core.errors import (
    ConfigError,
    DestinationExists,
    NotFound,
    StorageError,
    UsageError,
)
from paceline.store import Pack, PackOptions, open_pack
from paceline.store.write import encoding as encoding_module
from paceline.store.write import options as limits_module
from paceline.store.write.sources import folder as folder_module


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    (root / "cat" / "kitten").mkdir(parents=True)
    (root / "dog").mkdir()
    (root / "empty" / "within").mkdir(parents=True)
    (root / "cat" / "b.txt").write_bytes(b"meow")
    (root / "cat" / "kitten" / "a.txt").write_bytes(b"m" * 1000)
    (root / "cat-tail").write_bytes(b"")
    (root / "cat.txt").write_bytes(b"root file")
    (root / "dog" / "a.txt").write_bytes(b"wuff")
    return root


def left_behind(tmp_path):
    return sorted(path.name for path in tmp_path.iterdir() if path.name != "source")


def test_the_store_offers_no_other_names():
    with pytest.raises(AttributeError, match="nonsense"):
        store.nonsense  # noqa: B018


@pytest.fixture
def one_by_one(monkeypatch):
    """Let every batch have one sample, so that progress is told between any two."""
    monkeypatch.setattr(folder_module, "BATCH_SAMPLES", 1)


@pytest.mark.usefixtures("one_by_one")
def test_samples_come_in_bytewise_order_with_labels_and_empty_folders(source, tmp_path):
    seen = []
    summary = store.pack(
        store.Folder(source), tmp_path / "pack", on_progress=seen.append, clock=ManualClock()
    )
    assert summary.to_json() == {
        "version": 1,
        "source": str(source),
        "destination": str(tmp_path / "pack"),
        "sample_count": 5,
        "folder_count": 5,
        "class_count": 3,
        "shard_count": 1,
        "sample_bytes": 1017,
        "stored_bytes": 1017,
        "pack_bytes": sum(f.stat().st_size for f in (tmp_path / "pack").iterdir()),
        "opens_before": 5,
        "opens_after": 2,
        "reused_sample_count": 0,
        "elapsed_s": 0.0,
        "dictionary_bytes": 0,
        "choice": None,
    }
    assert [progress.sample_count for progress in seen] == [1, 2, 3, 4, 5]
    assert (seen[-1].byte_count, seen[-1].byte_total, seen[-1].sample_total) == (1017, 1017, 5)
    with open_pack(tmp_path / "pack") as pack:
        # As whole paths compare: '-' and '.' come before '/'.
        assert list(pack.names) == [
            "cat-tail",
            "cat.txt",
            "cat/b.txt",
            "cat/kitten/a.txt",
            "dog/a.txt",
        ]
        assert pack.class_names == ("cat", "dog", "empty")
        assert pack.labels.tolist() == [-1, -1, 0, 0, 1]
        assert pack.lengths.tolist() == [0, 9, 4, 1000, 4]
        folders = ["cat", "cat/kitten", "dog", "empty", "empty/within"]
        assert list(pack.folder_names) == folders
        status = (source / "dog" / "a.txt").stat()
        assert pack.modes[4] == status.st_mode
        assert pack.mtimes_ns[4] == status.st_mtime_ns
        assert pack.names[-1] == "dog/a.txt"
        with pytest.raises(IndexError):
            pack.names[5]


def test_two_packs_of_one_source_are_equal(source, tmp_path):
    store.pack(store.Folder(source), tmp_path / "one")
    store.pack(store.Folder(source), tmp_path / "two")
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


@pytest.mark.parametrize("shard_bytes", [128, 192, 600, 1 << 20])
def test_shards_stay_below_their_size_unless_one_sample_is_larger(source, tmp_path, shard_bytes):
    options = PackOptions(shard_bytes=shard_bytes)
    planned = store.plan_pack(store.Folder(source), tmp_path / "pack", options=options)
    assert left_behind(tmp_path) == []
    summary = store.pack(
        store.Folder(source), tmp_path / "pack", options=options, clock=ManualClock()
    )
    assert planned == summary
    shards = sorted((tmp_path / "pack").glob("shard-*.pace"))
    assert len(shards) == summary.shard_count
    with open_pack(tmp_path / "pack") as pack:
        for k, shard in enumerate(shards):
            inside = int((pack.shards == k).sum())
            assert shard.stat().st_size <= max(shard_bytes, 64) + 63 or inside == 1


def test_an_empty_folder_makes_an_empty_pack(tmp_path):
    (tmp_path / "source" / "class").mkdir(parents=True)
    summary = store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    assert (summary.sample_count, summary.shard_count, summary.class_count) == (0, 0, 1)
    with open_pack(tmp_path / "pack") as pack:
        assert len(pack) == 0
        assert list(pack.names) == []
        buffer, offsets = pack.read_batch([])
        assert (buffer.size, offsets.tolist()) == (0, [0])
        assert list(pack.verify()) == []
        with pytest.raises(IndexError):
            pack.read(0)


@pytest.mark.parametrize("kind", ["file", "folder", "full folder", "dangling link"])
def test_an_existing_destination_is_not_touched(source, tmp_path, kind):
    destination = tmp_path / "pack"
    if kind == "file":
        destination.write_bytes(b"mine")
    elif kind == "dangling link":
        destination.symlink_to(tmp_path / "nowhere")
    else:
        destination.mkdir()
    if kind == "full folder":
        (destination / "index.pace").write_bytes(b"mine")
    for function in (store.pack, store.plan_pack):
        with pytest.raises(DestinationExists, match="the destination exists"):
            function(store.Folder(source), destination)
    assert left_behind(tmp_path) == ["pack"]
    if kind == "full folder":
        assert (destination / "index.pace").read_bytes() == b"mine"


@pytest.mark.usefixtures("one_by_one")
def test_a_destination_that_appears_meanwhile_is_not_touched(source, tmp_path):
    destination = tmp_path / "pack"

    def interfere(progress):
        if progress.sample_count == 1:
            destination.mkdir()
            (destination / "mine").write_bytes(b"mine")

    with pytest.raises(DestinationExists):
        store.pack(store.Folder(source), destination, on_progress=interfere)
    assert left_behind(tmp_path) == ["pack"]
    assert [path.name for path in destination.iterdir()] == ["mine"]


def test_a_missing_source_or_parent_is_named(source, tmp_path):
    with pytest.raises(NotFound, match="nowhere"):
        store.pack(store.Folder(tmp_path / "nowhere"), tmp_path / "pack")
    with pytest.raises(NotFound, match="mkdir -p"):
        store.pack(store.Folder(source), tmp_path / "no" / "pack")
    with pytest.raises(UsageError, match="only a folder"):
        store.pack(store.Folder(source / "cat.txt"), tmp_path / "pack")
    with pytest.raises(StorageError, match="cannot read"):
        store.pack(store.Folder(source / "cat.txt" / "below"), tmp_path / "pack")
    assert left_behind(tmp_path) == []


def test_a_destination_inside_the_source_is_refused(source, tmp_path):
    (tmp_path / "link").symlink_to(source / "cat")
    for destination in (source / "pack", source / "cat" / "pack", tmp_path / "link" / "pack"):
        with pytest.raises(UsageError, match="inside the source"):
            store.pack(store.Folder(source), destination)
    with pytest.raises(UsageError, match="cannot be named"):
        store.pack(store.Folder(source), tmp_path / "pack.partial")


def test_symbolic_links_are_refused_unless_asked_for(source, tmp_path):
    (source / "dog" / "link.txt").symlink_to(source / "cat" / "b.txt")
    (source / "dog" / "more").symlink_to(source / "cat" / "kitten")
    with pytest.raises(UsageError, match=r"symbolic link.*--symlinks follow"):
        store.pack(store.Folder(source), tmp_path / "pack")
    assert left_behind(tmp_path) == []
    store.pack(store.Folder(source), tmp_path / "pack", options=PackOptions(symlinks="follow"))
    with open_pack(tmp_path / "pack") as pack:
        assert pack.read(pack.find("dog/link.txt")) == b"meow"
        assert pack.read(pack.find("dog/more/a.txt")) == b"m" * 1000


def test_links_and_special_files_can_be_left_out(source, tmp_path, caplog):
    before = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    (source / "dog" / "link.txt").symlink_to(source / "cat" / "b.txt")
    (source / "dog" / "more").symlink_to(source / "cat" / "kitten")
    (source / "broken").symlink_to("nowhere")
    os.mkfifo(source / "dog" / "pipe")
    store.pack(store.Folder(source), tmp_path / "pack", options=PackOptions(symlinks="skip"))
    with open_pack(tmp_path / "pack") as pack:
        assert set(pack.names) == before
    assert "left out 4 symbolic link(s) and special file(s) ('broken', 'dog/" in caplog.text


def test_links_that_lead_nowhere_or_back_are_named(source, tmp_path):
    options = PackOptions(symlinks="follow")
    broken = source / "dog" / "broken"
    broken.symlink_to("nowhere")
    with pytest.raises(UsageError, match=r"leads nowhere.*broken"):
        store.pack(store.Folder(source), tmp_path / "pack", options=options)
    broken.unlink()
    (source / "dog" / "loop").symlink_to(source)
    with pytest.raises(UsageError, match="leads back"):
        store.pack(store.Folder(source), tmp_path / "pack", options=options)
    assert left_behind(tmp_path) == []


def test_pipes_sockets_and_devices_are_refused(source, tmp_path):
    os.mkfifo(source / "dog" / "pipe")
    with pytest.raises(UsageError, match="named pipe"):
        store.pack(store.Folder(source), tmp_path / "pack")
    (source / "dog" / "pipe").unlink()
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(os.path.relpath(source / "dog" / "socket"))
        with pytest.raises(UsageError, match="socket"):
            store.pack(store.Folder(source), tmp_path / "pack")
    (source / "dog" / "socket").unlink()
    try:
        os.mknod(source / "dog" / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        return  # only root makes devices
    with pytest.raises(UsageError, match="device"):
        store.pack(store.Folder(source), tmp_path / "pack")


def change_before(sample, action):
    """Return an on_progress that does `action` just before the `sample`-th file is read."""

    def on_progress(progress):
        if progress.sample_count == sample:
            action()

    return on_progress


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("turns_into", ["nothing", "a link"])
def test_a_source_file_that_vanishes_is_named(source, tmp_path, turns_into):
    def spoil():
        (source / "dog" / "a.txt").unlink()
        if turns_into == "a link":
            (source / "dog" / "a.txt").symlink_to(source / "cat.txt")

    with pytest.raises(StorageError, match=r"changed while.*dog/a\.txt"):
        store.pack(store.Folder(source), tmp_path / "pack", on_progress=change_before(4, spoil))
    assert left_behind(tmp_path) == []


@pytest.mark.usefixtures("one_by_one")
def test_a_source_file_that_turns_into_a_pipe_is_named(source, tmp_path):
    def spoil():
        (source / "dog" / "a.txt").unlink()
        os.mkfifo(source / "dog" / "a.txt")

    with pytest.raises(StorageError, match=r"dog/a\.txt.*not a regular file any more"):
        store.pack(store.Folder(source), tmp_path / "pack", on_progress=change_before(4, spoil))


@pytest.mark.parametrize("change", ["grows", "shrinks", "is touched"])
def test_a_source_file_that_changes_while_it_is_read_is_named(
    source, tmp_path, monkeypatch, change
):
    victim = source / "cat" / "kitten" / "a.txt"
    os_readv = os.readv
    monkeypatch.setattr(limits_module, "BATCH_BYTES", 100)  # it is large, hence read in chunks
    monkeypatch.setattr(encoding_module, "BATCH_BYTES", 100)  # of this size

    def readv(descriptor, buffers):
        count = os_readv(descriptor, buffers)
        if os.fstat(descriptor).st_ino == victim.stat().st_ino:
            if change == "grows":
                with victim.open("ab") as file:
                    file.write(b"more" * 100)
            elif change == "shrinks":
                os.truncate(victim, 150)
            else:
                os.utime(victim, ns=(1, 1))
        return count

    monkeypatch.setattr(os, "readv", readv)
    with pytest.raises(StorageError, match=r"changed while.*kitten/a\.txt"):
        store.pack(store.Folder(source), tmp_path / "pack")
    assert left_behind(tmp_path) == []


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize("change", ["grows", "shrinks", "is touched"])
def test_a_source_file_that_changed_since_it_was_listed_is_named(source, tmp_path, change):
    victim = source / "dog" / "a.txt"

    def spoil():
        if change == "grows":
            victim.write_bytes(b"wuff wuff")
        elif change == "shrinks":
            os.truncate(victim, 1)
        else:
            os.utime(victim, ns=(1, 1))

    why = "written to" if change == "is touched" else "had 4 bytes"
    with pytest.raises(StorageError, match=rf"changed while.*dog/a\.txt.*{why}"):
        store.pack(store.Folder(source), tmp_path / "pack", on_progress=change_before(4, spoil))
    assert left_behind(tmp_path) == []


def test_a_leftover_is_replaced_but_nothing_else_is_removed(source, tmp_path):
    partial = tmp_path / "pack.partial"
    partial.mkdir()
    (partial / "shard-00000.pace").write_bytes(b"old")
    (partial / "shard-00017.pace").write_bytes(b"old")
    (partial / "index.pace").write_bytes(b"old")
    store.pack(store.Folder(source), tmp_path / "pack")
    assert left_behind(tmp_path) == ["pack"]
    assert len(list((tmp_path / "pack").iterdir())) == 2
    mine = tmp_path / "second.partial"
    mine.mkdir()
    (mine / "thesis.tex").write_bytes(b"mine")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        store.pack(store.Folder(source), tmp_path / "second")
    assert (mine / "thesis.tex").read_bytes() == b"mine"
    (tmp_path / "third.partial").write_bytes(b"mine")
    with pytest.raises(UsageError, match="not a folder"):
        store.pack(store.Folder(source), tmp_path / "third")
    (tmp_path / "fourth.partial").symlink_to(mine)
    with pytest.raises(UsageError, match="not a folder"):
        store.pack(store.Folder(source), tmp_path / "fourth")


@pytest.mark.usefixtures("one_by_one")
def test_two_runs_to_one_destination_do_not_mix(source, tmp_path):
    problems = []

    def second_run(progress):
        if progress.sample_count == 2:
            with pytest.raises(UsageError, match="another process") as caught:
                store.pack(store.Folder(source), tmp_path / "pack")
            problems.append(caught.value)

    store.pack(store.Folder(source), tmp_path / "pack", on_progress=second_run)
    assert len(problems) == 1
    with open_pack(tmp_path / "pack") as pack:
        assert list(pack.verify()) == []


def test_a_rival_that_finishes_between_open_and_lock_wins(source, tmp_path, monkeypatch):
    flock = fcntl.flock

    def finish_then_lock(descriptor, operation):
        (tmp_path / "pack.partial").rename(tmp_path / "pack")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", finish_then_lock)
    with pytest.raises(DestinationExists):
        store.pack(store.Folder(source), tmp_path / "pack")
    assert left_behind(tmp_path) == ["pack"]


def test_a_leftover_that_vanishes_before_it_is_opened_is_made_again(source, tmp_path, monkeypatch):
    os_open = os.open
    vanished = []

    def vanish_then_open(path, flags, *args, **kwargs):
        if str(path).endswith(".partial") and not vanished:
            vanished.append(path)
            path.rmdir()
        return os_open(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", vanish_then_open)
    store.pack(store.Folder(source), tmp_path / "pack")
    assert vanished
    assert left_behind(tmp_path) == ["pack"]


def test_a_file_system_without_locks_still_packs(source, tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store.pack(store.Folder(source), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert list(pack.verify()) == []


def test_an_interrupted_run_cleans_up(source, tmp_path):
    def interrupt(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.pack(store.Folder(source), tmp_path / "pack", on_progress=interrupt)
    assert left_behind(tmp_path) == []


def test_an_interrupt_right_behind_the_rename_keeps_the_pack(source, tmp_path, monkeypatch):
    rename = Path.rename

    def rename_then_interrupt(path, target):
        rename(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", rename_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.pack(store.Folder(source), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert len(pack) > 0
        assert list(pack.verify()) == []


def test_a_shard_size_that_holds_nothing_is_refused():
    with pytest.raises(ConfigError, match="shard_bytes"):
        PackOptions(shard_bytes=100)


def test_a_tree_deeper_than_pythons_stack_is_packed(tmp_path):
    root = tmp_path / "source"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    try:
        for _ in range(1100):
            os.mkdir("d", dir_fd=here)
            below = os.open("d", os.O_RDONLY, dir_fd=here)
            os.close(here)
            here = below
        store.pack(store.Folder(root), tmp_path / "pack")
        with open_pack(tmp_path / "pack") as pack:
            assert len(pack.folder_names) == 1100
    finally:
        os.close(here)
        subprocess.run(["rm", "-rf", str(root)], check=True)  # pytest's own removal recurses


def test_reading_refuses_what_is_not_there(source, tmp_path):
    store.pack(store.Folder(source), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert repr(pack) == f"Pack({str(tmp_path / 'pack')!r})"
        with pytest.raises(NotFound, match=r"no sample named 'cat/x\\n'"):
            pack.find("cat/x\n")
        for wrong in (-1, 5, 1 << 70):
            with pytest.raises(IndexError, match="no sample"):
                pack.read(wrong)
        for wrong in ([0, -1], [5], np.array([1 << 63], np.uint64)):
            with pytest.raises(IndexError):
                pack.read_batch(wrong)
        for wrong in ([0.5], [[1]], 3, ["a"]):
            with pytest.raises(UsageError, match="list of integers"):
                pack.read_batch(wrong)
        labels = pack.labels
        with pytest.raises(ValueError, match="read-only"):
            labels[0] = 7
    assert labels.tolist() == [-1, -1, 0, 0, 1]  # the view keeps the mapping alive
    with pytest.raises(UsageError, match="closed"):
        pack.read(0)
    assert isinstance(pack, Pack)
