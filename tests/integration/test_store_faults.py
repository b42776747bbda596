"""Killed, out of space, or failing at any system call: the old state or the new, never between.

The seam is the `os` module: the store writes through `os.write`, `os.fsync`, `os.rename` and their
like, one call each, and here the k-th of these is the last, or fails.
"""

import contextlib
import errno
import itertools
import os
import random
import signal
import subprocess
import sys

import pytest

from paceline.core.errors import CorruptPack, NotFound, PacelineError, StorageError
from paceline.store import PackOptions, open_pack, pack_folder
from paceline.store import partial as partial_module

OPTIONS = PackOptions(shard_bytes=1024)
CALLS = (
    "mkdir",
    "open",
    "readv",
    "write",
    "fsync",
    "rename",
    "unlink",
    "rmdir",
    "close",
    "scandir",
)


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    for k in range(6):
        folder = root / f"class{k % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{k}.bin").write_bytes(bytes([k]) * (400 * k))
    return root


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
    monkeypatch.setattr(partial_module, "_BUFFER_BYTES", 512)


class Faults:
    """Counts the calls in `names` and does `action` in place of the `at`-th, or notes them all."""

    def __init__(self, at=-1, action=None, names=CALLS):
        self.at, self.action = at, action
        self.names = names
        self.seen = []

    def __enter__(self):
        self.original = {name: getattr(os, name) for name in self.names}
        for name, function in self.original.items():
            setattr(os, name, self._wrap(name, function))
        return self

    def __exit__(self, *ignored):
        for name, function in self.original.items():
            setattr(os, name, function)

    def _wrap(self, name, function):
        def call(*args, **kwargs):
            self.seen.append((name, args[0]))
            if len(self.seen) - 1 == self.at:
                return self.action(function, *args, **kwargs)
            return function(*args, **kwargs)

        return call


def count_calls(source, destination, names=CALLS):
    with Faults(names=names) as faults:
        pack_folder(source, destination, options=OPTIONS)
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
    descriptor, data = args
    function(descriptor, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def pack_with_fault(source, destination, at, action, names=CALLS):
    with Faults(at, action, names):
        pack_folder(source, destination, options=OPTIONS)


@pytest.mark.parametrize(
    ("names", "action"), [(CALLS, kill_now), (("write",), half_write_and_kill)]
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
            pack_folder(source, destination, options=OPTIONS)
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
from paceline.store import PackOptions, pack_folder
sys.stdout.write("ready\\n"); sys.stdout.flush(); sys.stdin.readline()
pack_folder(sys.argv[1], sys.argv[2], options=PackOptions(shard_bytes=1024))
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
            pack_folder(source, destination, options=OPTIONS)
            assert assert_old_or_new(source, destination)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_each_call_failing_is_an_error_and_leaves_no_litter(source, tmp_path, code):
    def fail(function, *args, **kwargs):
        raise OSError(code, os.strerror(code))

    # Not close, which a local file system does not fail, nor what only cleans up.
    names = ("mkdir", "open", "readv", "write", "fsync", "rename", "scandir")
    total = len(count_calls(source, tmp_path / "whole", names))
    for at in range(total):
        destination = tmp_path / f"pack{at}"
        with pytest.raises(StorageError) as caught, Faults(at, fail, names) as faults:
            pack_folder(source, destination, options=OPTIONS)
        assert os.strerror(code) in str(caught.value)
        assert caught.value.where
        if faults.seen[at][0] == "write" and code == errno.ENOSPC:
            assert "the disk is full" in str(caught.value)
        if faults.seen[at][0] in ("readv", "scandir"):
            assert str(source) in caught.value.where
        assert_old_or_new(source, destination)
        assert not list(tmp_path.glob("*.partial"))


def test_a_short_write_goes_on(source, tmp_path):
    def half(function, descriptor, data):
        return function(descriptor, data[: len(data) // 2 + 1])

    for at in range(len(count_calls(source, tmp_path / "whole", ("write",)))):
        pack_with_fault(source, tmp_path / f"pack{at}", at, half, ("write",))
        assert assert_old_or_new(source, tmp_path / f"pack{at}")


def test_everything_is_on_storage_before_the_rename(source, tmp_path):
    seen = count_calls(source, tmp_path / "pack", ("open", "write", "fsync", "rename", "close"))
    position = [name for name, _ in seen].index("rename")
    dirty = set()
    for name, what in seen[:position]:
        if name == "write":
            dirty.add(what)
        elif name == "fsync":
            dirty.discard(what)
        elif name == "close":
            assert what not in dirty
    assert not dirty
    synced = sum(name == "fsync" for name, _ in seen[:position])
    assert synced == len(list((tmp_path / "pack").iterdir())) + 1  # the files and their folder
    assert [name for name, _ in seen[position + 1 :]].count("fsync") == 1  # the parent


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
        with pytest.raises(StorageError, match="the disk is full"):
            pack_folder(source, mount / "pack")
        assert list(mount.iterdir()) == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_errors_are_of_our_tree():
    assert issubclass(StorageError, PacelineError)
    assert issubclass(StorageError, OSError)
