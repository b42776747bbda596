"""Killed, out of space, or failing at any system call: the old state or the new, never between.

The seam is the `os` module: the store writes through `os.write`, `os.fsync`, `os.rename` and their
like, one call each, and here the k-th of these is the last, or fails. Two threads call them, so the
k-th call of one run need not be that of another; all of them come up all the same.
"""

import contextlib
import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import store
from paceline.core.errors import CorruptPack, NotFound, PacelineError, StorageError
from paceline.store import PackOptions, open_pack
from paceline.store.write.sources import folder as folder_module
from paceline.studies.faults import Faults

pytestmark = pytest.mark.campaign("faults")

OPTIONS = PackOptions(shard_bytes=1024)
CALLS = (
    "mkdir",
    "open",
    "write",
    "pwrite",
    "fsync",
    "rename",
    "unlink",
    "rmdir",
    "close",
    "listdir",
)


@pytest.fixture
def tmp_path(tmp_path):
    """A folder in memory where there is one: thousands of syncs are what takes the time here."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    for k in range(6):
        folder = root / f"class{k % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k}.bin").write_bytes(bytes([k]) * (400 * k))
    return root


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    monkeypatch.setattr(folder_module, "BATCH_SAMPLES", 2)


def count_calls(source, destination, names=CALLS):
    with Faults(names=names) as faults:
        store.pack(store.Folder(source), destination, options=OPTIONS)
    return faults.seen


def assert_old_or_new(source, destination):
    """Check that `destination` is a whole pack or none, and that readers refuse what is between."""
    partial = destination.with_name(destination.name + ".partial")
    if destination.exists():
        assert not partial.exists()
        with open_pack(destination) as pack:
            assert list(pack.verify()) == []
            for k, name in enumerate(pack.names):
                assert pack.read(k) == (source / name).read_bytes()
            assert len(pack) == 6
        return True
    if partial.exists():
        with pytest.raises(CorruptPack, match="unfinished"):
            open_pack(partial)
        with pytest.raises(NotFound, match="unfinished"):
            open_pack(destination)
    return False


def in_child(function):
    """Run `function` in a forked child; return how it ended."""
    child = os.fork()
    if child == 0:
        try:
            function()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_now(function, *args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def half_write_and_kill(function, *args, **kwargs):
    descriptor, data, *position = args
    function(descriptor, data[: len(data) // 2], *position)
    os.kill(os.getpid(), signal.SIGKILL)


def pack_with_fault(source, destination, at, action, names=CALLS):
    with Faults(at, action, names):
        store.pack(store.Folder(source), destination, options=OPTIONS)


@pytest.mark.parametrize(
    ("names", "action"), [(CALLS, kill_now), (("write", "pwrite"), half_write_and_kill)]
)
def test_sigkill_at_each_call_leaves_the_old_or_the_new_state(source, tmp_path, names, action):
    total = len(count_calls(source, tmp_path / "whole", names))
    assert total > (40 if names == CALLS else 10)
    outcomes = []
    for at in range(total):
        destination = tmp_path / f"pack{at}"
        run = (source, destination, at, action, names)
        assert in_child(lambda run=run: pack_with_fault(*run)) == -signal.SIGKILL
        outcomes.append(assert_old_or_new(source, destination))
        if not outcomes[-1]:  # the next run finds what the killed one left, and succeeds
            store.pack(store.Folder(source), destination, options=OPTIONS)
            assert assert_old_or_new(source, destination)
    assert outcomes == sorted(outcomes)  # from none to whole, once


def test_sigkill_while_clearing_a_leftover(source, tmp_path):
    def leave_something(destination):
        run = (source, destination, 0, kill_now, ("rename",))
        assert in_child(lambda: pack_with_fault(*run)) == -signal.SIGKILL
        assert len(list(destination.with_name(destination.name + ".partial").iterdir())) > 3

    leave_something(tmp_path / "pack")
    for at in itertools.count():
        run = (source, tmp_path / "pack", at, kill_now, ("unlink",))
        if in_child(lambda run=run: pack_with_fault(*run)) == 0:
            break
        assert not assert_old_or_new(source, tmp_path / "pack")
    assert assert_old_or_new(source, tmp_path / "pack")


SCRIPT = """
import sys
from paceline import store
from paceline.store import PackOptions
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
store.pack(store.Folder(sys.argv[1]), sys.argv[2], options=PackOptions(shard_bytes=1024))
"""


def test_sigkill_at_random_moments(source, tmp_path):
    generator = random.Random(11)
    for round_number in range(12):
        destination = tmp_path / f"pack{round_number}"
        command = [sys.executable, "-c", SCRIPT, str(source), str(destination)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            process.stdin.write(b"go\n")
            process.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(generator.uniform(0, 0.03))
            process.kill()
        if not assert_old_or_new(source, destination):
            store.pack(store.Folder(source), destination, options=OPTIONS)
            assert assert_old_or_new(source, destination)


FALLIBLE = ("mkdir", "open", "write", "pwrite", "fsync", "rename", "listdir")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_each_call_failing_is_an_error_and_leaves_what_the_next_run_goes_on_from(
    source, tmp_path, code
):
    def fail(function, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    # Not close, which a local file system does not fail, nor what only cleans up.
    total = len(count_calls(source, tmp_path / "whole", FALLIBLE))
    resumed = 0
    for at in range(total):
        destination = tmp_path / f"pack{at}"
        with pytest.raises(StorageError) as caught, Faults(at, fail, FALLIBLE) as faults:
            store.pack(store.Folder(source), destination, options=OPTIONS)
        assert os.strerror(code) in str(caught.value)
        assert caught.value.where
        if faults.seen[at][0] == "write" and code == errno.ENOSPC:
            assert "the disk is full" in str(caught.value)
        if not assert_old_or_new(source, destination):
            is_kept = list(tmp_path.glob("*.partial")) != []
            if "cannot read the source" not in str(caught.value):
                assert is_kept == ("is kept in" in str(caught.value))
            summary = store.pack(store.Folder(source), destination, options=OPTIONS)
            assert (summary.reused_sample_count > 0) == is_kept
            resumed += is_kept
            assert assert_old_or_new(source, destination)
        assert not list(tmp_path.glob("*.partial"))
    assert resumed > 10


@pytest.fixture
def packed(source, tmp_path):
    """A pack of `source`, and a folder of samples to append to it."""
    store.pack(store.Folder(source), tmp_path / "pack", options=replace(OPTIONS, parity_group=2))
    more = tmp_path / "more"
    for k in range(4):
        (more / f"class{k}").mkdir(parents=True)
        (more / f"class{k}" / f"new{k}.bin").write_bytes(bytes([65 + k]) * (500 * k))
    return tmp_path / "pack", more


def append_with_fault(more, destination, at, action, names):
    with Faults(at, action, names) as faults:
        store.append(store.Folder(more), destination, options=OPTIONS)
    return faults.seen


def assert_appended_or_not(source, more, destination, open_before):
    """Check that the pack holds the old samples, or all; return whether it holds all."""
    expected = {
        str(path.relative_to(root)): path.read_bytes()
        for root in (source, more)
        for path in root.rglob("*.bin")
    }
    with open_pack(destination, verify="always") as pack:
        assert list(pack.verify()) == []
        assert {name: pack.read(k) for k, name in enumerate(pack.names)}.items() <= expected.items()
        assert len(pack) in (6, 10)
        is_new = len(pack) == 10
    assert len(open_before) == 6
    assert [open_before.read(k) for k in range(6)] == [expected[n] for n in open_before.names]
    return is_new


def files_of(pack):
    return sorted(path.name for path in pack.iterdir())


@pytest.mark.parametrize(
    ("names", "action"), [(CALLS, kill_now), (("write", "pwrite"), half_write_and_kill)]
)
def test_sigkill_at_each_call_of_an_append(source, packed, tmp_path, names, action):
    original, more = packed
    whole = tmp_path / "whole"
    shutil.copytree(original, whole)
    total = len(append_with_fault(more, whole, -1, None, names))
    for at in range(total):
        destination = tmp_path / f"append{at}"
        shutil.copytree(original, destination)
        with open_pack(destination) as before:
            run = (more, destination, at, action, names)
            assert in_child(lambda run=run: append_with_fault(*run)) == -signal.SIGKILL
            if not assert_appended_or_not(source, more, destination, before):
                store.append(store.Folder(more), destination, options=OPTIONS)
                assert assert_appended_or_not(source, more, destination, before)
                assert files_of(destination) == files_of(whole)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EINTR])
def test_each_call_of_an_append_failing(source, packed, tmp_path, code):
    def fail(function, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    original, more = packed
    whole = tmp_path / "whole"
    shutil.copytree(original, whole)
    total = len(append_with_fault(more, whole, -1, None, FALLIBLE))
    for at in range(total):
        destination = tmp_path / f"append{at}"
        shutil.copytree(original, destination)
        with open_pack(destination) as before:
            with pytest.raises(StorageError, match=os.strerror(code)):
                append_with_fault(more, destination, at, fail, FALLIBLE)
            if not assert_appended_or_not(source, more, destination, before):
                assert files_of(destination) == files_of(original)
                store.append(store.Folder(more), destination, options=OPTIONS)
                assert files_of(destination) == files_of(whole)


def test_a_short_write_goes_on(source, tmp_path):
    def half(function, descriptor, data, *position):
        return function(descriptor, data[: len(data) // 2 + 1], *position)

    names = ("write", "pwrite")
    for at in range(len(count_calls(source, tmp_path / "whole", names))):
        pack_with_fault(source, tmp_path / f"pack{at}", at, half, names)
        assert assert_old_or_new(source, tmp_path / f"pack{at}")


def test_everything_is_on_storage_before_the_rename(source, tmp_path, monkeypatch):
    paths, dirty, synced, after = {}, set(), set(), []
    originals = {name: getattr(os, name) for name in ("open", "write", "pwrite", "fsync", "close")}

    def opened(path, *args, **kwargs):
        descriptor = originals["open"](path, *args, **kwargs)
        paths[descriptor] = str(path)
        return descriptor

    def written(name):
        def call(descriptor, *args):
            dirty.add(descriptor)
            return originals[name](descriptor, *args)

        return call

    def fsynced(descriptor):
        dirty.discard(descriptor)
        if (tmp_path / "pack").exists():
            after.append(paths[descriptor])
        else:
            synced.add(paths[descriptor])
        return originals["fsync"](descriptor)

    def closed(descriptor):
        # What is not for the pack needs no storage.
        assert descriptor not in dirty or paths[descriptor].endswith(".partial")
        dirty.discard(descriptor)
        return originals["close"](descriptor)

    replacements = (opened, written("write"), written("pwrite"), fsynced, closed)
    for name, function in zip(originals, replacements, strict=True):
        monkeypatch.setattr(os, name, function)
    store.pack(store.Folder(source), tmp_path / "pack", options=OPTIONS)
    monkeypatch.undo()
    partial = tmp_path / "pack.partial"
    names = {path.name for path in (tmp_path / "pack").iterdir()}
    assert {str(partial), *(str(partial / name) for name in names)} <= synced
    assert after == [str(tmp_path)]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path):
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting a tmpfs needs root")
    try:
        source = tmp_path / "source"
        source.mkdir()
        for k in range(40):
            (source / f"{k}.bin").write_bytes(os.urandom(10_000))
        with pytest.raises(StorageError, match="too little space for the pack"):
            store.pack(store.Folder(source), mount / "pack")
        unchecked = PackOptions(check_space=False)  # as on a disk that others fill meanwhile
        with pytest.raises(StorageError, match="the disk is full"):
            store.pack(store.Folder(source), mount / "pack", options=unchecked)
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_errors_are_of_our_tree():
    assert issubclass(StorageError, PacelineError)
    assert issubclass(StorageError, OSError)
