"""The hash table of names, built in order of hash so that it streams, whatever its size.

A sample is placed at its home (the top bits of the hash) or right after the previous sample. In
order of hash this is one pass; for that order, samples are first distributed to files by the top
bits of their hash, and each file is sorted in memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.store.format.layout import Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from paceline.store.write.files import PackFile, PackFolder
    from paceline.store.write.index.sections import IndexWriter

BUCKET_SAMPLES = 1 << 20  # 16 MiB of hashes and numbers
_MAX_BUCKETS = 512  # files that are open at a time
TAIL_SLOTS = 64  # slots after the last home, at least: the length is known before the names are
_SAMPLE_BITS = np.uint64(40)
_MARK = np.uint64(0xFFFFFF)
_BLOCK_SLOTS = 1 << 20


def home_count(sample_count: int) -> int:
    """Return how many homes the table has: a power of two, at least twice the samples.

    >>> home_count(0), home_count(1), home_count(3)
    (2, 2, 8)
    """
    return 1 << max(2 * sample_count - 1, 1).bit_length()


class NameTable:
    """Collects the hashes of names, then writes the table.

    Args:
        sample_count: how many names there will be.
        folder: the folder for temporary files of hashes that exceed memory.
    """

    def __init__(self, sample_count: int, folder: PackFolder) -> None:
        self._folder = folder
        self._home_bits = home_count(sample_count).bit_length() - 1
        buckets = min(1 << (sample_count // BUCKET_SAMPLES).bit_length(), _MAX_BUCKETS)
        self._bucket_bits = buckets.bit_length() - 1 if sample_count >= BUCKET_SAMPLES else 0
        self._memory: list[NDArray[np.uint64]] = []
        self._files: list[PackFile] = []
        if self._bucket_bits:
            self._files = [
                folder.create(f"names-{k:03d}.partial") for k in range(1 << self._bucket_bits)
            ]

    def add(self, hashes: NDArray[np.uint64], first_sample: int) -> None:
        """Add the hashes of the samples from `first_sample` on."""
        pairs = np.empty((len(hashes), 2), np.uint64)
        pairs[:, 0] = hashes
        pairs[:, 1] = np.arange(first_sample, first_sample + len(hashes))
        if not self._files:
            self._memory.append(pairs)
            return
        buckets = hashes >> np.uint64(64 - self._bucket_bits)
        order = np.argsort(buckets, kind="stable")
        bounds = np.searchsorted(buckets[order], np.arange(len(self._files) + 1))
        pairs = pairs[order]
        for k, file in enumerate(self._files):
            bucket = pairs[bounds[k] : bounds[k + 1]]
            if len(bucket):
                file.write(bucket.view(np.uint8).reshape(-1).data)

    def write(self, index: IndexWriter) -> None:
        """Write the table as the index's section, and discard the hashes."""
        home_shift = np.uint64(64 - self._home_bits)
        homes = 1 << self._home_bits
        buckets = 1 << self._bucket_bits
        written = 0  # slots
        begin = 0  # the first slot that may be free
        late = np.zeros((0, 2), np.uint64)  # slot and entry that lie after the end of their bucket
        for k, pairs in enumerate(self._buckets()):
            pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]  # ties: by number
            home = (pairs[:, 0] >> home_shift).astype(np.int64)
            rank = np.arange(len(pairs))
            slots = np.maximum.accumulate(np.maximum(home, begin) - rank) + rank
            if len(slots):
                begin = int(slots[-1]) + 1
            placed = np.empty((len(pairs), 2), np.uint64)
            placed[:, 0] = slots
            placed[:, 1] = (pairs[:, 0] & _MARK) << _SAMPLE_BITS | (pairs[:, 1] + np.uint64(1))
            placed = np.concatenate([late, placed])
            last = k == buckets - 1
            end = max(begin, homes + TAIL_SLOTS) if last else homes // buckets * (k + 1)
            here = placed[:, 0] < end
            late = placed[~here]
            _put_slots(index, placed[here], written, end)
            written = end

    def _buckets(self) -> Iterator[NDArray[np.uint64]]:
        if not self._files:
            yield np.concatenate([np.zeros((0, 2), np.uint64), *self._memory])
            return
        for file in self._files:
            with file.path.open("rb") as opened:
                yield np.fromfile(opened, np.uint64).reshape(-1, 2)


def _put_slots(index: IndexWriter, placed: NDArray[np.uint64], begin: int, end: int) -> None:
    slots = placed[:, 0].astype(np.int64)
    for first in range(begin, end, _BLOCK_SLOTS):
        block = np.zeros(min(_BLOCK_SLOTS, end - first), np.uint64)
        low, high = np.searchsorted(slots, [first, first + len(block)])
        block[slots[low:high] - first] = placed[low:high, 1]
        index.put(Section.NAME_TABLE, block)
