"""A committed file is the old one or the new one, whatever stops the writing; nothing is left."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys

import pytest

from paceline.core import files
from paceline.core.errors import CorruptData, NotFound, StorageError
from paceline.core.files import (
    Access,
    LockOutcome,
    commit_bytes,
    commit_chunks,
    commit_text,
    free_middle,
    prepare_file,
    read_text,
    try_lock,
    write_all,
    write_all_at,
)


@pytest.fixture
def old(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("old")
    return path


def names(path):
    return sorted(entry.name for entry in path.parent.iterdir())


def test_new_content_replaces_old(old):
    commit_text(old, "n\u00e9w")
    assert read_text(old) == "n\u00e9w"
    commit_chunks(old, (bytes([i]) for i in range(3)))
    assert old.read_bytes() == b"\0\1\2"
    assert names(old) == ["result.json"]


def test_a_full_disk_leaves_the_old_content(old):
    partial = old.with_name(f".{old.name}.{os.getpid()}.partial")
    partial.symlink_to("/dev/full")  # the kernel's own ENOSPC
    with pytest.raises(StorageError) as caught:
        commit_bytes(old, b"new" * 100_000)
    assert os.strerror(errno.ENOSPC) in str(caught.value)
    assert str(old) == caught.value.where
    assert old.read_text() == "old"
    assert names(old) == ["result.json"]


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StorageError, match="No such file") as caught:
        commit_bytes(tmp_path / "none" / "f", b"")
    assert "none/f" in caught.value.where


def test_a_destination_that_is_a_folder_stays(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(StorageError):
        commit_bytes(tmp_path / "taken", b"x")
    assert [entry.name for entry in tmp_path.iterdir()] == ["taken"]


def test_content_that_fails_on_its_way_leaves_the_old(old):
    def chunks():
        yield b"new"
        raise KeyError("the source broke")

    with pytest.raises(KeyError, match="the source broke"):
        commit_chunks(old, chunks())
    assert old.read_text() == "old"
    assert names(old) == ["result.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from paceline.core import files
seen = 0
def dying(call):
    def one(*args):
        global seen
        seen += 1
        if seen == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)
    return one
os.fsync = dying(os.fsync)
Path.replace = dying(Path.replace)
files.commit_bytes(Path(sys.argv[1]), b"new")
"""


@pytest.mark.parametrize(("at", "content"), [(1, "old"), (2, "old"), (3, "new")])
def test_killed_at_any_call_it_is_old_or_new(old, at, content):
    done = subprocess.run([sys.executable, "-c", KILLED, str(old), str(at)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert old.read_text() == content


def test_reading_says_what_is_wrong(tmp_path):
    with pytest.raises(NotFound, match="no such file"):
        read_text(tmp_path / "none")
    with pytest.raises(StorageError, match="cannot read"):
        read_text(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptData, match="not a text file"):
        read_text(tmp_path / "binary")


def test_a_place_is_prepared_or_refused_before_work_begins(tmp_path):
    place = tmp_path / "new" / "machine.json"
    prepare_file(place)
    assert list(place.parent.iterdir()) == []
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path / "file" / "machine.json", tmp_path / "new"):
        with pytest.raises(StorageError, match="Name a file") as caught:
            prepare_file(wrong)
        assert caught.value.where == str(wrong)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "new"]


@pytest.fixture
def folders(tmp_path):
    descriptors = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_lock_is_acquired_once(folders):
    assert try_lock(folders[0]) is LockOutcome.ACQUIRED
    assert try_lock(folders[1]) is LockOutcome.HELD


def test_a_file_system_without_locks_is_said_once(folders, monkeypatch, caplog):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    files._warn_of_no_locks.cache_clear()
    assert [try_lock(folder) for folder in folders] == [LockOutcome.UNSUPPORTED] * 2
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "has no locks (No locks available)" in record.getMessage()
    assert "one command at a time" in record.getMessage()
    files._warn_of_no_locks.cache_clear()


def test_short_writes_go_on_until_all_is_written(tmp_path, monkeypatch):
    write, pwrite = os.write, os.pwrite
    monkeypatch.setattr(os, "write", lambda d, data: write(d, data[:3]))
    monkeypatch.setattr(os, "pwrite", lambda d, data, at: pwrite(d, data[:3], at))
    with (tmp_path / "file").open("wb") as file:
        assert write_all(file.fileno(), b"0123456789") == 10
        assert write_all_at(file.fileno(), b"abcdefgh", 1) == 8
        assert write_all(file.fileno(), b"") == 0
    assert (tmp_path / "file").read_bytes() == b"0abcdefgh9"


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.parametrize("modes", [[0o644], [0o600], [0o644, 0o640], [0o664, 0o604], [0o444]])
def test_a_copy_is_read_by_none_who_may_not_read_the_originals(tmp_path, umask, modes):
    originals = []
    for number, mode in enumerate(modes):
        originals.append(tmp_path / f"{number}")
        originals[-1].touch()
        originals[-1].chmod(mode)
    copy = tmp_path / "copy"
    commit_chunks(copy, [b"content"], Access.of(originals))
    expected = 0o666 & ~umask
    for mode in modes:
        expected &= mode
    assert mode_of(copy) == expected | 0o600
    gone = Access.of([originals[0], tmp_path / "gone"])
    commit_chunks(copy, [b"content"], gone)
    assert mode_of(copy) == 0o600


def test_a_copy_belongs_to_the_owner_of_the_original_or_to_no_group(tmp_path, monkeypatch):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.touch()
    original.chmod(0o664)
    access = Access.of([original])
    other = Access(access.mode, access.uid + 7, access.gid + 7)
    if os.geteuid() == 0:
        commit_chunks(copy, [b""], other)
        assert (copy.stat().st_uid, copy.stat().st_gid) == (other.uid, other.gid)

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(files.os, "fchown", refuse)
    commit_chunks(copy, [b""], other)
    assert copy.stat().st_gid == access.gid
    assert not mode_of(copy) & 0o070


def test_the_middle_of_a_log_is_freed_while_it_is_written(tmp_path):
    path, most_bytes = tmp_path / "log", 4 << 20
    with path.open("ab", buffering=0) as log:
        log.write(b"the first line\n" + b"x" * (1 << 20))
        free_middle(path, most_bytes, "removed")
        assert b"removed" not in path.read_bytes()
        for part in range(40):
            log.write(b"y" * (1 << 20))
            free_middle(path, most_bytes, "removed")
            assert path.stat().st_blocks * 512 <= most_bytes + (1 << 20), part
        log.write(b"\nthe last line\n")
    found = path.read_bytes()
    assert found.startswith(b"the first line\nxxx")
    assert found.endswith(b"yyy\nthe last line\n")
    assert b"\nremoved\n" in found


def test_a_log_that_is_gone_is_left_alone(tmp_path):
    free_middle(tmp_path / "log", 1, "removed")
    assert list(tmp_path.iterdir()) == []
