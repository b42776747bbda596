"""Spill files leave the page cache alone, also where the file system refuses direct transfers."""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from paceline.training.out_of_core.transfers import aligned_memory
from paceline.training.out_of_core.uncached_file import CHUNK_BYTES, UncachedFile, WriteBack

MIB = 1 << 20
SIZE = 6 * CHUNK_BYTES + 3 * 4096
MOST_CACHED_BYTES = 2 * CHUNK_BYTES + MIB  # a chunk on its way, the next one, and stray pages


def cached_bytes(descriptor):
    """Return how much of a file is in the page cache."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0
    with mmap.mmap(descriptor, size) as mapped:
        address = (ctypes.c_char * size).from_buffer(mapped)
        pages = (ctypes.c_ubyte * -(-size // 4096))()
        failed = ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), pages)
        del address
        assert not failed
        return 4096 * sum(page & 1 for page in pages)


def refuse_direct(monkeypatch):
    """Have `os.open` refuse O_DIRECT, as several file systems do."""
    opened = os.open

    def refusing(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr("os.open", refusing)


def most_cached(file, monkeypatch):
    """Write and read many chunks; return the most bytes in the cache, during and after."""
    memory = aligned_memory(SIZE).numpy()
    memory[:] = np.arange(SIZE, dtype=np.uint32).astype(np.uint8)
    found = []

    def noting(transfer):
        def note(descriptor, views, offset):
            count = transfer(descriptor, views, offset)
            found.append(cached_bytes(descriptor))
            return count

        return note

    monkeypatch.setattr("os.pwritev", noting(os.pwritev))
    monkeypatch.setattr("os.preadv", noting(os.preadv))
    pieces = [memory[: MIB + 4096], memory[MIB + 4096 :]]
    for begin in (0, SIZE):
        file.write(pieces, begin)
    found.append(cached_bytes(file._descriptor))
    read = aligned_memory(SIZE).numpy()
    for begin in (0, SIZE):
        read[:] = 0
        file.read(read, begin)
        assert np.array_equal(read, memory)
    found.append(cached_bytes(file._descriptor))
    assert len(found) >= 6
    return max(found), found[-1]


def test_direct_transfers_are_not_cached(tmp_path, monkeypatch):
    file = UncachedFile(tmp_path)
    if not file.is_direct:
        pytest.skip("no direct transfers here")
    assert most_cached(file, monkeypatch)[0] <= 4096
    file.close()


@pytest.mark.parametrize("how", ["ranges", "sync", "nfs"])
def test_a_file_system_without_direct_transfers_caches_two_chunks(how, tmp_path, monkeypatch):
    refuse_direct(monkeypatch)
    if how == "sync":  # nor does it write ranges
        monkeypatch.setattr(WriteBack, "_sync_range", lambda *_: False)
    if how == "nfs":
        made = WriteBack.__init__
        monkeypatch.setattr(
            WriteBack,
            "__init__",
            lambda self, descriptor, **_: made(self, descriptor, is_committed=True),
        )
    file = UncachedFile(tmp_path)
    assert not file.is_direct
    most, left = most_cached(file, monkeypatch)
    assert most <= MOST_CACHED_BYTES
    assert left <= MIB
    file.close()


@pytest.fixture
def journaled(tmp_path):
    """Return a folder of ext4 with data=journal, which takes O_DIRECT and uses the cache."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("mounting a file system needs root, and mkfs.ext4")
    image, point = tmp_path / "image", tmp_path / "mounted"
    image.touch()
    os.truncate(image, 256 * MIB)
    point.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True, timeout=60)
    options = ["-o", "loop,data=journal"]
    done = subprocess.run(["mount", *options, image, point], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no loop devices here: {done.stderr.strip()}")
    yield Path(point)
    subprocess.run(["umount", point], check=True, timeout=60)


def test_a_file_system_that_only_pretends_is_found_out(journaled, monkeypatch):
    file = UncachedFile(journaled)
    try:
        assert not file.is_direct
        most, left = most_cached(file, monkeypatch)
        assert most <= MOST_CACHED_BYTES
        assert left <= MIB
    finally:
        file.close()
