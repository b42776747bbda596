"""Metadata of samples and extents while they are packed, in columns.

A sample has one extent, or several if it is larger than a shard. Names lie end to end, with an
array of where each begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class SampleColumns:
    """Columns with one entry per sample; names are concatenated."""

    names: NDArray[np.uint8]
    name_offsets: NDArray[np.uint64]
    labels: NDArray[np.int32]
    modes: NDArray[np.uint32]
    mtimes_ns: NDArray[np.int64]
    extent_counts: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, samples: slice) -> SampleColumns:
        """Return some samples that follow each other."""
        first, end, _ = samples.indices(len(self))
        if (first, end) == (0, len(self)):
            return self
        offsets = self.name_offsets[first : end + 1]
        return SampleColumns(
            names=self.names[int(offsets[0]) : int(offsets[-1])],
            name_offsets=offsets - offsets[0],
            labels=self.labels[first:end],
            modes=self.modes[first:end],
            mtimes_ns=self.mtimes_ns[first:end],
            extent_counts=self.extent_counts[first:end],
        )


@dataclass(frozen=True, slots=True)
class ExtentColumns:
    """Columns with one entry per extent."""

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint64]
    stored_lengths: NDArray[np.uint64]
    shards: NDArray[np.uint32]
    checksums: NDArray[np.uint32]
    codecs: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.offsets)


SAMPLE_TYPES = {
    "labels": "<i4",
    "modes": "<u4",
    "mtimes_ns": "<i8",
    "extent_counts": "<u4",
}
EXTENT_TYPES = {
    "offsets": "<u8",
    "lengths": "<u8",
    "stored_lengths": "<u8",
    "shards": "<u4",
    "checksums": "<u4",
    "codecs": "u1",
}


def concatenate_samples(columns: Sequence[SampleColumns]) -> SampleColumns:
    """Return the samples of all `columns`."""
    names = np.concatenate([samples.names for samples in columns])
    lengths = np.concatenate([np.diff(samples.name_offsets) for samples in columns])
    offsets = np.zeros(len(lengths) + 1, np.uint64)
    np.cumsum(lengths, out=offsets[1:])
    rest = {
        name: np.concatenate([getattr(samples, name) for samples in columns])
        for name in SAMPLE_TYPES
    }
    return SampleColumns(names=names, name_offsets=offsets, **rest)


def concatenate_extents(columns: Sequence[ExtentColumns]) -> ExtentColumns:
    """Return the extents of all `columns`."""
    return ExtentColumns(
        **{
            name: np.concatenate([getattr(extents, name) for extents in columns])
            for name in EXTENT_TYPES
        }
    )


def take_names(
    names: NDArray[np.uint8], offsets: NDArray[np.uint64], order: NDArray[Any]
) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    """Return the names in another order."""
    lengths = np.diff(offsets)[order]
    taken = np.zeros(len(order) + 1, np.uint64)
    np.cumsum(lengths, out=taken[1:])
    return names[spread(offsets[:-1][order], lengths)], taken


def spread(starts: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.int64]:
    """Return the indices of ranges, one after the other.

    >>> spread(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    indices: NDArray[np.int64] = np.arange(total)
    indices += np.repeat(starts.astype(np.int64) - (ends - counts), counts)
    return indices
