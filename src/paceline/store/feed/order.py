"""The order of samples: a pure function of (seed, epoch, position), in O(1) memory.

A loader that shuffles a list must keep the list, and must shuffle it again to resume. Here the
sample at position p is computed from p alone, by a permutation. So resuming costs nothing, and all
ranks, workers and restarts see the same order.

The permutation of n positions is a Feistel network over the smallest power of two that holds n; a
value outside is mapped again until it falls inside ("cycle walking"), which makes the result a
permutation of n::

    left, right = halves of the position's bits
    repeat:  left ^= F(right, key)      each line can be undone, so the whole is a permutation,
             right ^= F(left, key')     whatever F is; F and the number of rounds make it random

The power of two is below 2n, so a position goes through fewer than two times on average.

Source: J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, sections 3 and
5; F is the 32-bit finaliser of A. Appleby's MurmurHash3 (public domain). Not cryptography: F mixes
well, and an epoch is not attacked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Shuffle = Literal["global", "block", "none"]

_ROUNDS = 8  # 4 suffice in theory (Luby and Rackoff) for large halves; small sets have small ones
_SMALLEST_BITS = 8  # of the network: halves of 3 bits mix measurably worse, and walking is cheap
_TABLE_BITS = 10
_CHUNK = 65536  # positions at a time: few enough that what is computed on stays in the cache
_VERSION = 1  # of the order itself: another one must give itself another number


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """The order of one data set's samples in one epoch.

    Attributes:
        sample_count: number of samples in the pack.
        seed: seed of the run; together with `epoch` it decides the order.
        epoch: number of the epoch; each has an order of its own.
        shuffle: ``global``: any sample anywhere, a permutation of them all. ``block``: see below.
            ``none``: as numbered, which is the order of names.
        block_samples: B, consecutive samples that ``block`` keeps together. Ignored otherwise.
        window_blocks: W, blocks among which ``block`` mixes their samples. Ignored otherwise.

    ``block`` is for storage that is slow at small random reads (spinning disks, parallel file
    systems). The samples, turned by a random number of places, are cut into blocks of B; the blocks
    are permuted, W that then follow each other form a window, and the samples of a window are
    permuted among themselves. Its promise, by construction: the positions of window w, from w * W *
    B to (w + 1) * W * B, hold W full blocks and nothing else. So a node that can hold a window in
    memory reads each block once in an epoch, as one extent: at most ``ceil(sample_count / B) + 1``
    extents (one lies across the end) rather than one per sample. Storage that reads units of u
    bytes (a stripe, its read-ahead) then fetches at most 2u more than the data for each extent:
    `fetch_bound`. That is per node, whose ranks share its page cache, and for samples that lie in
    the order of their numbers, as in a pack made from a folder; a border between shards cuts one
    block in two. Randomness is that of a shuffle buffer of W * B samples over shuffled shards of B.

    Raises:
        UsageError: a count is not positive, or the shuffle has another name.

    Cost: about 30 ns a position; no memory in addition to the result.
    """

    sample_count: int
    seed: int = 0
    epoch: int = 0
    shuffle: Shuffle = "global"
    block_samples: int = 64
    window_blocks: int = 64

    def __post_init__(self) -> None:
        if self.shuffle not in get_args(Shuffle):
            names = ", ".join(get_args(Shuffle))
            raise UsageError(f"unknown shuffle {self.shuffle!r}", fix=f"Choose from {names}")
        least = {"sample_count": 0, "epoch": 0, "block_samples": 1, "window_blocks": 1}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise UsageError(
                    f"{name} is {getattr(self, name)}", fix=f"Give {lowest} or more for {name}"
                )

    def samples(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the sample at each position of the epoch.

        Args:
            positions: shape (n,), each from 0 to `sample_count` - 1, in any order.

        Returns:
            Sample numbers, shape (n,). All positions together give each sample exactly once.

        Raises:
            IndexError: a position is outside the epoch.
        """
        asked = np.asarray(positions, np.int64)
        if asked.size and (asked.min() < 0 or asked.max() >= self.sample_count):
            raise IndexError(
                f"positions {asked.min()} to {asked.max()} of an epoch of {self.sample_count}"
            )
        if self.shuffle == "none":
            return asked.copy()
        found = np.empty(asked.shape, np.int64)
        for begin in range(0, len(asked), _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            found[chunk] = self._some(asked[chunk].astype(np.uint64)).astype(np.int64)
        return found

    def fetch_bound(self, sample_bytes: float, unit_bytes: int) -> float:
        """Return how many bytes storage fetches in an epoch at most, per byte of data.

        Args:
            sample_bytes: mean size of a sample.
            unit_bytes: smallest unit that storage reads: its stripe, page or read-ahead.

        Assumes that what is fetched is kept for one window (``block``), or for one sample.
        """
        blocks = -(-self.sample_count // self.block_samples)
        extents = {"global": self.sample_count, "block": blocks + 1, "none": 1}[self.shuffle]
        return 1 + 2 * unit_bytes * extents / max(1.0, self.sample_count * sample_bytes)

    def _some(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        if self.shuffle == "global":
            return _permuted(positions, self.sample_count, self._keys("samples"))
        return self._from_blocks(positions)

    def _from_blocks(self, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return samples by window, then by block, then turned.

        What is left over when full blocks are taken stays at the epoch's end; the turn makes
        these other samples in each epoch.
        """
        window_size = self.window_blocks * self.block_samples
        full_windows, left_over = divmod(self.sample_count, window_size)
        windows = positions // np.uint64(window_size)
        begins = windows * np.uint64(window_size)
        keys, tweaks = self._keys("window"), _mixed(windows.astype(np.uint32))
        mixed = positions.copy()
        for inside, size in (
            (windows < full_windows, window_size),
            (windows == full_windows, left_over),
        ):
            chosen = np.flatnonzero(inside)
            within = positions[chosen] - begins[chosen]
            mixed[chosen] = begins[chosen] + _permuted(within, size, keys, tweaks[chosen])

        block_size, full_blocks = (
            np.uint64(self.block_samples),
            self.sample_count // self.block_samples,
        )
        in_block = mixed < full_blocks * self.block_samples
        blocks, places = np.divmod(mixed[in_block], block_size)
        mixed[in_block] = _permuted(blocks, full_blocks, self._keys("blocks")) * block_size + places
        turn = int.from_bytes(self._keys("turn").tobytes(), "little") % self.sample_count
        return (mixed + np.uint64(turn)) % np.uint64(self.sample_count)

    def _keys(self, purpose: str) -> NDArray[np.uint32]:
        text = f"paceline sample order {_VERSION}\0{self.seed}\0{self.epoch}\0{purpose}"
        digest = hashlib.blake2b(text.encode(), digest_size=4 * _ROUNDS).digest()
        return np.frombuffer(digest, "<u4").astype(np.uint32)


def _permuted(
    positions: NDArray[np.uint64],
    count: int,
    keys: NDArray[np.uint32],
    tweaks: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint64]:
    """Return where the permutation of `count` that `keys` choose sends each position.

    Args:
        positions: shape (n,), each below `count`.
        count: size of the permutation.
        keys: keys of the rounds, shape (_ROUNDS,).
        tweaks: choose a permutation for each position, shape (n,).
    """
    bits = max(_SMALLEST_BITS, (count - 1).bit_length())
    if bits <= _TABLE_BITS and tweaks is None:  # small sets are walked long: look each step up
        table = _network(np.arange(1 << bits, dtype=np.uint64), bits, keys, None)
        found = table[positions]
    else:
        table, found = None, _network(positions, bits, keys, tweaks)
    outside = np.flatnonzero(found >= count)
    while outside.size:
        values, its_tweaks = found[outside], None if tweaks is None else tweaks[outside]
        again = _network(values, bits, keys, its_tweaks) if table is None else table[values]
        found[outside] = again
        outside = outside[again >= count]
    return found


def _network(
    values: NDArray[np.uint64],
    bits: int,
    keys: NDArray[np.uint32],
    tweaks: NDArray[np.uint32] | None,
) -> NDArray[np.uint64]:
    """Return each value of `bits` bits, sent once through the Feistel network."""
    right_bits = np.uint64(bits // 2)
    left_mask = np.uint32((1 << (bits - bits // 2)) - 1)
    right_mask = np.uint32((1 << bits // 2) - 1)
    left = (values >> right_bits).astype(np.uint32)
    right = values.astype(np.uint32) & right_mask
    for number in range(0, _ROUNDS, 2):
        for_left, for_right = keys[number], keys[number + 1]
        if tweaks is not None:
            for_left, for_right = for_left ^ tweaks, for_right ^ tweaks
        left ^= _mixed(right ^ for_left) & left_mask
        right ^= _mixed(left ^ for_right) & right_mask
    return left.astype(np.uint64) << right_bits | right


def _mixed(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return MurmurHash3's 32-bit finaliser of each value; `values` is overwritten."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values
