"""Compresses samples as they are packed: learns from the first ones, then encodes each batch.

What is learned is a dictionary of what small samples have in common, and, for `auto`, which codec
to use (`codec_choice.py`). The packing thread owns the encoder.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.native import (
    NPY_ELEMENTS,
    EncodedSamples,
    SampleEncoding,
    crc32c,
    decode_s,
    encode,
    monotonic_ns,
    train_dictionary,
)
from paceline.store.format.layout import PARTIAL_SUFFIX
from paceline.store.write.codec_choice import (
    CANDIDATES,
    CodecChoice,
    CodecRate,
    capacity_factor,
    choose,
    feed_rate,
    reason,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from paceline.store.write.files import PackFolder
    from paceline.store.write.options import PackOptions, ShardLimits

DICTIONARY_NAME = "dictionary" + PARTIAL_SUFFIX
LEARNING_BYTES = 8 << 20  # of samples; then packing begins
MIN_LEARNING_BYTES = 256 << 10  # fewer are not learned from while more may come
LEARNING_SAMPLES = 1 << 17
_MAX_DICTIONARY_BYTES = 110 << 10  # zstd's own default
_MIN_DICTIONARY_BYTES = 1 << 10
_SAMPLE_BYTES_PER_DICTIONARY_BYTE = 32  # fewer, and it costs more than it saves
_MAX_TRAINED_BYTES = 64 << 10  # larger samples hold enough to compress themselves
_MAX_ENCODED_BYTES = 64 << 20  # larger samples are stored as they are
_BEFORE_LEARNING = {"zstd-dict": "zstd", "auto": "none"}
_KEEP_RATIO = 0.9  # of `auto`
_ELEMENT_BITS = {"auto": NPY_ELEMENTS, "none": 0, "2": 1, "4": 2, "8": 3}
_MEASUREMENTS = 3
_MAX_READERS = 8  # threads of a reader (store.open_pack)
_READ_TEST_BYTES = 32 << 20
_READ_BYTES = 4 << 20


class SampleEncoder:
    """Encodes the batches of one packing.

    Args:
        options: how to pack.
        folder: the folder in which the pack is made: it is where the rate of the storage is
            measured, and keeps the dictionary for a packing that is resumed.
        dictionary: of the pack, where samples are appended to one.

    Attributes:
        dictionary: what the samples of codec zstd-dict have in common; empty = none.
        choice: how samples are compressed; None = not at all, or nothing was learned yet.
        must_learn: whether `learn` is still to be called, as soon as there are samples enough.
    """

    def __init__(
        self, options: PackOptions, folder: PackFolder, *, dictionary: bytes = b""
    ) -> None:
        self._options = options
        self._folder = folder
        self._codec = _BEFORE_LEARNING.get(options.codec, options.codec)
        self._is_kept = False
        self._threads = len(os.sched_getaffinity(0))
        self.dictionary = dictionary
        self.choice: CodecChoice | None = None
        self.must_learn = options.codec in _BEFORE_LEARNING
        if dictionary:
            self._use_dictionary()

    def max_bytes(self, limits: ShardLimits) -> int:
        """Return the length above which samples are not compressed; 0 = none is."""
        if self._options.codec == "none":
            return 0
        return min(_MAX_ENCODED_BYTES, limits.shard_bytes // 2)

    def resume(self, *, has_entries: bool) -> bool:
        """Take the dictionary of a packing that was killed; return whether it can be resumed.

        Args:
            has_entries: whether that packing left samples, which may need the dictionary.
        """
        if self._options.codec not in _BEFORE_LEARNING or not has_entries:
            return has_entries
        dictionary = _read_dictionary(self._folder.folder)
        if dictionary is None:
            return False
        self.dictionary = dictionary
        self._is_kept = True
        self._use_dictionary()
        return True

    def _use_dictionary(self) -> None:
        if self._options.codec == "zstd-dict":
            self._codec = "zstd-dict" if self.dictionary else "zstd"
            self.must_learn = False

    def learn(self, samples: ReadSamples) -> None:
        """Train the dictionary and choose the codec by the first samples, as they were read."""
        self.must_learn = False
        if not self._is_kept:
            self.dictionary = self.dictionary or _trained(samples)
            self._keep_dictionary()
        self._use_dictionary()
        if not samples.lengths.any():
            return
        if self._options.codec == "auto":
            self._choose(samples)
        else:
            self.choice = self._as_asked(self._encoded(samples, self._codec), samples.lengths)

    def encode(self, samples: ReadSamples) -> EncodedSamples | None:
        """Return samples as they are to be stored; None = as they are."""
        if self._codec == "none":
            return None
        encoded = self._encoded(samples, self._codec)
        if self.choice is None and not self.must_learn and samples.lengths.any():
            self.choice = self._as_asked(encoded, samples.lengths)
        return encoded

    @property
    def _readers(self) -> int:
        return min(self._threads, _MAX_READERS)

    def _encoded(self, samples: ReadSamples, codec: str) -> EncodedSamples:
        return encode(
            *samples,
            SampleEncoding(
                codec=codec,
                level=self._options.codec_level,
                element_bits=_ELEMENT_BITS[self._options.shuffle],
                keep_ratio=_KEEP_RATIO if self._options.codec == "auto" else 1.0,
                dictionary=self.dictionary if codec == "zstd-dict" else b"",
            ),
            threads=self._threads,
        )

    def _as_asked(self, encoded: EncodedSamples, lengths: NDArray[np.uint64]) -> CodecChoice:
        why = "as asked for"
        if self._codec != self._options.codec:
            why = "the first samples are too few for a dictionary, or have too little in common"
        return CodecChoice(
            codec=self._codec,
            why=why,
            rates=(self._rate(self._codec, encoded, lengths),),
            threads=self._readers,
        )

    def _choose(self, samples: ReadSamples) -> None:
        read = measure_read_rate(self._folder)
        rates = []
        for codec in CANDIDATES:
            if codec == "zstd-dict" and not self.dictionary:
                continue
            if codec == "none":
                encoded = EncodedSamples(*samples, np.zeros(len(samples.lengths), np.uint8))
            else:
                encoded = self._encoded(samples, codec)
            rate = self._rate(codec, encoded, samples.lengths)
            fed = feed_rate(rate.capacity_factor, rate.decode_bytes_per_s, read)
            rates.append(replace(rate, feed_bytes_per_s=fed))
        is_sync = self._options.feed == "sync"
        asked = self._options.feed_bytes_per_s
        required_rate = float(asked) if asked else rates[0].feed_bytes_per_s  # of none
        chosen = choose(rates, required_bytes_per_s=required_rate, is_sync=is_sync)
        self._codec = chosen.codec
        self.choice = CodecChoice(
            codec=chosen.codec,
            why=reason(
                chosen,
                required_bytes_per_s=required_rate,
                is_sync=is_sync,
                is_given=bool(asked),
            ),
            rates=tuple(rates),
            threads=self._readers,
            read_bytes_per_s=read,
            required_bytes_per_s=required_rate,
        )

    def _rate(self, codec: str, encoded: EncodedSamples, lengths: NDArray[np.uint64]) -> CodecRate:
        threads = self._readers
        dictionary = self.dictionary if codec == "zstd-dict" else b""

        def measure(_: int) -> float:
            times = [decode_s(encoded, lengths, dictionary) for _ in range(_MEASUREMENTS)]
            assert min(times) >= 0
            return statistics.median(times)

        # All threads at once, since they share caches and the memory's bandwidth.
        with ThreadPoolExecutor(threads) as pool:
            slowest_s = max(pool.map(measure, range(threads)))
        sample_bytes = int(lengths.sum())
        return CodecRate(
            codec=codec,
            capacity_factor=capacity_factor(
                sample_bytes, int(encoded.lengths.sum()) + len(dictionary)
            ),
            decode_bytes_per_s=threads * sample_bytes / max(slowest_s, 1e-9),
        )

    def _keep_dictionary(self) -> None:
        """Make the dictionary durable, before any sample that needs it is."""
        with contextlib.suppress(FileNotFoundError):
            self._folder.remove([DICTIONARY_NAME])
        file = self._folder.create(DICTIONARY_NAME)
        file.write(self.dictionary + crc32c(self.dictionary).to_bytes(4, "little"))
        self._folder.close(file)


class ReadSamples(NamedTuple):
    """Samples as they were read, of one or of several batches."""

    data: NDArray[np.uint8]
    begins: NDArray[np.uint64]  # of each in `data`
    lengths: NDArray[np.uint64]


def _trained(samples: ReadSamples) -> bytes:
    small = np.flatnonzero(samples.lengths <= _MAX_TRAINED_BYTES)
    lengths = samples.lengths[small]
    capacity = min(int(lengths.sum()) // _SAMPLE_BYTES_PER_DICTIONARY_BYTE, _MAX_DICTIONARY_BYTES)
    if capacity < _MIN_DICTIONARY_BYTES:
        return b""
    return train_dictionary(samples.data, samples.begins[small], lengths, capacity)


def _read_dictionary(folder: Path) -> bytes | None:
    """Return the dictionary that a killed packing kept, perhaps an empty one; None = it is lost."""
    try:
        content = (folder / DICTIONARY_NAME).read_bytes()
    except OSError:
        return None
    dictionary, checksum = content[:-4], content[-4:]
    is_whole = crc32c(dictionary).to_bytes(4, "little") == checksum
    return dictionary if is_whole else None


def measure_read_rate(folder: PackFolder) -> float:
    """Return at how many bytes a second the storage below a folder reads large blocks.

    A file is written, made durable, and read past the page cache; where the file system has no such
    reads (tmpfs), through it.
    """
    file = folder.create("reading" + PARTIAL_SUFFIX)
    block = mmap.mmap(-1, _READ_BYTES)  # aligned, as O_DIRECT wants it
    block.write(np.random.default_rng(0).bytes(_READ_BYTES))
    try:
        free = os.fstatvfs(file.descriptor)
        spare = free.f_bavail * free.f_frsize // 2  # the samples need space, too
        for _ in range(max(min(_READ_TEST_BYTES, spare) // _READ_BYTES, 1)):
            file.write(memoryview(block))
        file.sync()
        os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        descriptor = _open_direct(file.path)
        try:
            begin_ns = monotonic_ns()
            done = 0
            while count := os.preadv(descriptor, [block], done):
                done += count
            seconds = (monotonic_ns() - begin_ns) / 1e9
        finally:
            os.close(descriptor)
    finally:
        folder.discard(file)
    return done / max(seconds, 1e-9)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
