"""Collectives of ranks that share memory.

A rank makes a segment of memory and maps those of its peers (`hosts`); the calls are the compiled
module's (native/include/paceline/host_group.hpp), so that a call costs no Python. They work on raw
addresses, block without the interpreter's lock, and take a deadline.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from paceline import native
from paceline.collectives.hosts import SegmentAddress, exchange, release_first_rank
from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.collectives.hosts import KeyValueStore

KIB = 1024


class DType(IntEnum):
    """Element types; the numbers are those of ``enum class DType`` in reduction.hpp."""

    FLOAT32 = 0
    FLOAT64 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT8 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8
    BOOL = 9


class ReduceOp(IntEnum):
    """Reductions; the numbers are those of ``enum class ReduceOp`` in reduction.hpp."""

    SUM = 0
    AVERAGE = 1
    MINIMUM = 2
    MAXIMUM = 3
    PRODUCT = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class HostGroup(native.HostGroup):
    """Ranks of one host that share memory; made by `form`.

    Every rank calls the same collectives in the same order. Results have the same bits on all ranks
    and in every run. Any call may raise RankLost (a rank died or aborted), DeadlineExceeded (a rank
    did not come in time), CollectiveMismatch (ranks called different collectives) or UsageError;
    the first three name the rank, and make the group unusable for all ranks.
    """

    @classmethod
    def form(
        cls,
        store: KeyValueStore,
        rank: int,
        ranks: int,
        timeout_s: float,
        *,
        name: str = "host",
        ring_bytes: int = 2048 * KIB,
        packet_bytes: int = 64 * KIB,
        heap_bytes: int = 0,
    ) -> HostGroup:
        """Return the group of all ranks that call this with one store and name.

        Args:
            store: that all ranks share, for example torch's.
            rank: of this process in the group.
            ranks: of the group.
            timeout_s: the longest wait for other ranks.
            name: of the group; each name can be used once per store.
            ring_bytes: of the ring through which data is staged.
            packet_bytes: of each of the four packets of a channel for messages.
            heap_bytes: of the symmetric heap, for `allocate`; memory is taken when it is touched.

        Raises:
            DeadlineExceeded: a rank did not take part; the error names it.
            UsageError: ranks of the group do not share memory; the error names them.
        """
        if not 0 <= rank < ranks:
            raise UsageError(
                f"rank must be in [0, {ranks}), got {rank}",
                fix="Give the number of the rank in the group, from 0 on",
            )
        segment = native.HostSegment.create(
            rank,
            ranks,
            ring_bytes=ring_bytes,
            packet_bytes=packet_bytes,
            heap_bytes=heap_bytes,
        )
        topic = f"paceline/{name}"
        address = SegmentAddress.of(segment).to_bytes()
        addresses = exchange(store, f"{topic}/address", rank, ranks, address, timeout_s)
        segments, problem = _open_all(segment, rank, addresses)
        problems = exchange(store, f"{topic}/mapped", rank, ranks, problem.encode(), timeout_s)
        segment.close_descriptor()
        release_first_rank(store, f"{topic}/read", rank, ranks, timeout_s)
        _raise_first(problems)
        return cls(rank, segments)


def _open_all(
    own: native.HostSegment, rank: int, addresses: list[bytes]
) -> tuple[list[native.HostSegment], str]:
    """Return the segments of all ranks, or what the first problem was."""
    segments = []
    for peer, data in enumerate(addresses):
        try:
            segments.append(own if peer == rank else SegmentAddress.from_bytes(data).open())
        except (OSError, ValueError) as problem:
            return [], f"rank {rank} cannot map the memory of rank {peer}: {problem}"
    return segments, ""


def _raise_first(problems: list[bytes]) -> None:
    for problem in problems:
        if problem:
            raise UsageError(
                "the ranks of the group do not share memory",
                why=problem.decode(),
                fix="Form groups of the ranks of one host: paceline.collectives.find_hosts",
            )
