"""How the columns of an index are stored: the narrowest type that holds them, one entry for equals.

A pack of a hundred million samples has an index of gigabytes, and a loader that shuffles touches
all of what reading a sample takes. So columns are as narrow as their values allow. An index that
gains nothing by it is written as version 2, which older readers know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.store.format.layout import ALIGNMENT, COLUMN_TYPES, EXTENT_COLUMNS, Section
from paceline.store.write.index.sections import StoredColumn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_LAST_PLAIN_CODEC = 1  # zstd, unshuffled, which version 2 knows
MANY_SAMPLES = 1 << 16  # above, an index is large enough to be verified where it is touched
# Columns whose values decide their width; that of the others follows from what is known otherwise.
_RANGED = (
    Section.LENGTHS,
    Section.STORED_LENGTHS,
    Section.CODECS,
    Section.MODES,
    Section.MTIMES,
)


@dataclass(slots=True)
class ValueRange:
    """The smallest and the largest of the values that were added; none so far if `low > high`."""

    low: int = 1
    high: int = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add values."""
        if len(values):
            self.include(int(values.min()), int(values.max()))

    def include(self, low: int, high: int) -> None:
        """Add values of which `low` is the smallest, and `high` the largest."""
        if self.low > self.high:
            self.low, self.high = low, high
        else:
            self.low, self.high = min(self.low, low), max(self.high, high)


@dataclass(slots=True)
class IndexLayout:
    """The numbers from which the size of an index follows, as far as its samples decide it.

    Attributes:
        sample_count: number of samples.
        extent_count: number of extents.
        name_bytes: bytes of all names.
        is_encoded: whether an extent is compressed.
        is_chunked: whether a sample has other than one extent.
        needs_dictionary: whether an extent is of the codec zstd-dict.
        has_small: whether a sample begins at no multiple of 64, as only version 3 allows.
        ranges: the values of the columns whose range is not known otherwise.
    """

    sample_count: int = 0
    extent_count: int = 0
    name_bytes: int = 0
    is_encoded: bool = False
    is_chunked: bool = False
    needs_dictionary: bool = False
    has_small: bool = False
    ranges: dict[Section, ValueRange] = field(
        default_factory=lambda: {section: ValueRange() for section in _RANGED}
    )

    def note_offsets(self, offsets: NDArray[np.uint64]) -> None:
        """Note whether samples at these offsets are aligned."""
        self.has_small |= bool(int(np.bitwise_or.reduce(offsets, initial=0)) % ALIGNMENT)

    @property
    def needs_version_3(self) -> bool:
        """Whether only version 3 holds it, or it is to have narrow columns and sums of blocks."""
        has_new_codec = self.ranges[Section.CODECS].high > _LAST_PLAIN_CODEC
        return self.has_small or has_new_codec or self.sample_count > MANY_SAMPLES


def stored_columns(
    layout: IndexLayout, shard_lengths: Sequence[int], class_count: int
) -> dict[Section, StoredColumn]:
    """Return how the columns of an index of version 3 are stored that are narrower than their type.

    Args:
        layout: what the samples decide.
        shard_lengths: bytes of each shard file.
        class_count: number of classes.
    """
    ranges = dict(layout.ranges)
    # What a plan cannot know exactly is stored by a bound that it knows.
    ranges[Section.OFFSETS] = ValueRange(0, max(shard_lengths, default=0))
    ranges[Section.SHARDS] = ValueRange(0, max(len(shard_lengths) - 1, 0))
    ranges[Section.LABELS] = ValueRange(-1, class_count - 1)
    columns = {}
    for section, values in ranges.items():
        kind = COLUMN_TYPES[section]
        assert kind.is_narrow
        count = layout.extent_count if section in EXTENT_COLUMNS else layout.sample_count
        width = _width(values, is_signed="i" in kind.dtype)
        is_constant = values.low == values.high
        if count and (is_constant or width < kind.at_width(0).itemsize):
            columns[section] = StoredColumn(width, is_constant)
    return columns


def _width(values: ValueRange, *, is_signed: bool) -> int:
    """Return the bytes of the narrowest type that holds the values.

    >>> _width(ValueRange(0, 256), is_signed=False), _width(ValueRange(-1, 127), is_signed=True)
    (2, 1)
    """
    for width in (1, 2, 4):
        limits = np.iinfo(f"{'i' if is_signed else 'u'}{width}")
        if limits.min <= values.low and values.high <= limits.max:
            return width
    return 8
