"""Chooses how samples are compressed: as small as possible, and still fast enough to feed a loop.

Source: Zhang, Huang, Pauloski, Foster, "Efficient I/O for neural network training with compressed
data", IPDPS 2020: choose the compressor that gives the most capacity under a constraint on
performance, for asynchronous and for synchronous input. The formula is ours. With a codec of
capacity factor r, a storage that reads B bytes/s, and k threads that decode d bytes/s each, a byte
of a sample takes

    t = 1 / (r B) + 1 / (k d)

    async: a loader reads and decodes beside the steps: t <= 0.9 / required, since rates that were
           measured on the first samples are up to a tenth off for all (bench/codecs.py)
    sync:  the loop waits for it: t - t(none) <= 0.05 / required, so that the part of a step that
           is needed for its samples grows by at most a twentieth

At the limits: of a storage that is slow (B -> 0) the largest r always feeds best; of one that costs
nothing (B -> infinity), the codec that decodes fastest, which is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

CANDIDATES = ("none", "lz4", "zstd", "zstd-dict")
ASYNC_MARGIN = 0.1  # of the required rate
SYNC_SHARE = 0.05  # of the time that a sample may take, which decoding may add


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecRate(Record):
    """What a codec is worth for some samples, on this machine.

    `decode_bytes_per_s` is of the bytes of samples, on all threads, verifying them included.
    `feed_bytes_per_s` is the rate at which a loader gets samples, reading included; 0 where the
    rate of the storage is not known.
    """

    codec: str
    capacity_factor: float
    decode_bytes_per_s: float
    feed_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecChoice(Record):
    """How samples are compressed, and why.

    `rates` are of all that was considered, measured on the first samples. The required rate and
    that of the storage are 0 where nothing was chosen.
    """

    codec: str
    why: str
    rates: tuple[CodecRate, ...]
    threads: int
    read_bytes_per_s: float = 0.0
    required_bytes_per_s: float = 0.0

    @property
    def chosen(self) -> CodecRate | None:
        """The rate of the codec; None where there was nothing to measure."""
        return next((rate for rate in self.rates if rate.codec == self.codec), None)


def capacity_factor(sample_bytes: int, stored_bytes: int) -> float:
    """Return how many bytes of samples a stored byte stands for; 1 if there are none.

    >>> capacity_factor(300, 100), capacity_factor(0, 0)
    (3.0, 1.0)
    """
    return sample_bytes / stored_bytes if stored_bytes else 1.0


def feed_rate(factor: float, decode_bytes_per_s: float, read_bytes_per_s: float) -> float:
    """Return at how many bytes of samples a second a loader reads and decodes.

    Args:
        factor: capacity factor of the samples.
        decode_bytes_per_s: on all threads.
        read_bytes_per_s: of the storage.

    >>> feed_rate(2.0, 300e6, 300e6) == 200e6
    True
    """
    return 1 / (1 / (factor * read_bytes_per_s) + 1 / decode_bytes_per_s)


def choose(
    rates: Sequence[CodecRate],
    *,
    required_bytes_per_s: float,
    is_sync: bool,
) -> CodecRate:
    """Return the codec with the largest capacity factor that feeds a loop; none feeds: the fastest.

    Args:
        rates: of the candidates, with the rates at which they feed; one is of `none`.
        required_bytes_per_s: bytes of samples that the loop needs in a second.
        is_sync: the loop waits for its samples.
    """

    def feeds(rate: CodecRate) -> bool:
        if not is_sync:
            return _feeds_async(rate, required_bytes_per_s)
        added_s = 1 / rate.feed_bytes_per_s - 1 / plain.feed_bytes_per_s
        return added_s <= SYNC_SHARE / required_bytes_per_s

    plain = next(rate for rate in rates if rate.codec == "none")
    feeding = [rate for rate in rates if feeds(rate)]
    if not feeding:
        return max(rates, key=lambda rate: rate.feed_bytes_per_s)
    best = max(rate.capacity_factor for rate in feeding)
    # Where two are as small as each other, the faster one.
    alike = [rate for rate in feeding if rate.capacity_factor >= best]
    return max(alike, key=lambda rate: rate.feed_bytes_per_s)


def _feeds_async(rate: CodecRate, required_bytes_per_s: float) -> bool:
    return rate.feed_bytes_per_s * (1 - ASYNC_MARGIN) >= required_bytes_per_s


def reason(choice: CodecRate, *, required_bytes_per_s: float, is_sync: bool, is_given: bool) -> str:
    """Return in words why a codec was chosen."""
    needed = f"{required_bytes_per_s / 1e6:,.0f} MB/s"
    source = "as asked for" if is_given else "what it is without a codec"
    feeds = f"feeds {choice.feed_bytes_per_s / 1e6:,.0f} MB/s"
    if not is_sync and not _feeds_async(choice, required_bytes_per_s):
        return f"{feeds}, the most of all; {needed} needed ({source})"
    if is_sync:
        return f"smallest that lengthens a step by at most 5 %; {feeds}, {needed} needed ({source})"
    return f"smallest that feeds enough: {feeds}, {needed} needed ({source})"
