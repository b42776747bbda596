"""Measures how fast files of a folder are read: one long file, and many small files."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

from paceline.core.errors import storage_errors
from paceline.core.machine import Quantity, Tier
from paceline.core.node import mount_of, read_mounts
from paceline.probe.figures import ROUNDS, probed

CHUNK_BYTES = 1 << 20
LONG_BYTES, QUICK_BYTES = 64 << 20, 8 << 20
SMALL_COUNT, SMALL_BYTES = 200, 1024
IN_MEMORY = ("tmpfs", "ramfs")


def measure_folder(folder: Path, *, quick: bool) -> Tier:
    """Return bandwidth and latency of reading from `folder`; temporary files are removed.

    Raises:
        StorageError: the folder cannot be written, or is full.
    """
    mount = mount_of(str(folder.resolve()), read_mounts())
    kind = mount.kind if mount else "unknown"
    fix = "Give a writable folder with --folder"
    with (
        storage_errors("cannot measure the folder", where=folder, fix=fix),
        tempfile.TemporaryDirectory(prefix=".paceline-probe-", dir=folder) as name,
    ):
        place = Path(name)
        bandwidth = _read_long(place / "long", QUICK_BYTES if quick else LONG_BYTES)
        open_latency_s = _open_small(place)
    return Tier(
        name="local",
        kind=kind,
        bandwidth_bytes_per_s=Quantity(value=bandwidth, source="probe"),
        open_latency_s=open_latency_s,
        cached=kind in IN_MEMORY,
    )


def _read_long(path: Path, size: int) -> float:
    """Return bytes per second of reading a file that the page cache was asked to forget."""
    chunk = os.urandom(CHUNK_BYTES)
    with path.open("wb") as file:
        for _ in range(size // CHUNK_BYTES):
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        while os.read(descriptor, CHUNK_BYTES):
            pass
        return size / (time.perf_counter() - begin)
    finally:
        os.close(descriptor)


def _open_small(folder: Path) -> Quantity:
    """Return the seconds of open() and fstat() of a small file."""
    paths = [folder / f"{number:04d}" for number in range(SMALL_COUNT)]
    for path in paths:
        path.write_bytes(b"\0" * SMALL_BYTES)
    samples = []
    for path in paths:
        begin = time.perf_counter()
        descriptor = os.open(path, os.O_RDONLY)
        os.fstat(descriptor)
        samples.append(time.perf_counter() - begin)
        os.close(descriptor)
    parts = [samples[i::ROUNDS] for i in range(ROUNDS)]
    return probed(statistics.median(part) for part in (samples, *parts))
