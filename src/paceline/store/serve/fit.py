"""How many nodes a pack needs, and with which codec it fits on those that there are.

What counts is the node with the largest share, by the placement that nodes really use, together
with the index, which each node holds. Codecs are estimated from samples of the pack, taken evenly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.record import Record
from paceline.native import SampleEncoding, encode
from paceline.store.format.layout import INDEX_NAME
from paceline.store.serve.placement import place
from paceline.store.write.codec_choice import capacity_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.store.read.pack import Pack

AS_PACKED = "as packed"
_CODECS = ("lz4", "zstd")
_MEASURED_SAMPLES = 1024
_MEASURED_BYTES = 32 << 20
_ZSTD_LEVEL = 3
_MOST_TRIED = 64  # numbers of nodes above the one that would do if shares were equal


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecFit(Record):
    """What a codec makes of the nodes' storage.

    Attributes:
        codec: `AS_PACKED`: the shards as they are.
        size_factor: bytes of the shards with it, per byte of the shards as they are.
        node_bytes: of the node with the largest share, on the nodes that there are.
        least_nodes: on which it fits; 0: on no number of them.
        headroom: local storage of a node over `node_bytes`; it fits if this is at least 1.
    """

    codec: str
    size_factor: float
    node_bytes: int
    least_nodes: int
    headroom: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreFit(Record):
    """Whether a pack fits on nodes, and what would make it fit.

    Attributes:
        nodes: that there are.
        local_bytes: of each.
        replicas: copies of each shard.
        shard_bytes: of all shards together, once, as they are.
        codecs: in the order in which they are preferred: the faster one first.
        codec: the first that fits; None: none does.
        least_nodes: for the codec that needs the fewest; 0: no number is enough.
    """

    nodes: int
    local_bytes: int
    replicas: int
    shard_bytes: int
    codecs: tuple[CodecFit, ...]
    codec: str | None
    least_nodes: int


def fit(
    shard_bytes: Sequence[int],
    *,
    nodes: int,
    local_bytes: int,
    replicas: int,
    size_factors: dict[str, float],
    index_bytes: int = 0,
    everywhere: frozenset[int] = frozenset(),
) -> StoreFit:
    """Return which codecs fit on these nodes, and how many nodes each needs at least.

    Args:
        shard_bytes: length of each shard.
        nodes: number of nodes.
        local_bytes: local storage of each.
        replicas: copies of each shard.
        size_factors: by codec, the preferred ones first; see `CodecFit`.
        index_bytes: that each node holds as well.
        everywhere: shards that all nodes hold.

    Raises:
        UsageError: there is no node, no room or no replica.
    """
    if nodes < 1 or local_bytes < 1 or replicas < 1:
        raise UsageError(
            "a pack cannot be spread over nothing",
            where=f"{nodes} nodes of {local_bytes} bytes, {replicas} replicas",
            fix="Give at least one node, one byte and one replica",
        )
    lengths = np.asarray(shard_bytes, np.float64)

    def largest(count: int, factor: float) -> int:
        placed = place(_names(count), len(lengths), replicas, everywhere)
        shares = [lengths[placed.shards_of(name)].sum() for name in placed.nodes]
        return math.ceil(max(shares, default=0.0) * factor) + index_bytes

    def least(factor: float) -> int:
        room = local_bytes - index_bytes
        on_all = sum(lengths[shard] for shard in everywhere) * factor
        spread = (lengths.sum() * factor - on_all) * replicas
        if room <= on_all or lengths.max(initial=0.0) * factor > room:
            return 0
        first = max(replicas, math.ceil(spread / (room - on_all)))
        counts = range(first, first + _MOST_TRIED)
        return next((count for count in counts if largest(count, factor) <= local_bytes), 0)

    codecs = []
    for codec, factor in size_factors.items():
        share = largest(nodes, factor)
        codecs.append(
            CodecFit(
                codec=codec,
                size_factor=factor,
                node_bytes=share,
                least_nodes=least(factor),
                headroom=local_bytes / max(1, share),
            )
        )
    fitting = [found for found in codecs if found.headroom >= 1 and nodes >= replicas]
    return StoreFit(
        nodes=nodes,
        local_bytes=local_bytes,
        replicas=replicas,
        shard_bytes=int(lengths.sum()),
        codecs=tuple(codecs),
        codec=fitting[0].codec if fitting else None,
        least_nodes=min((found.least_nodes for found in codecs if found.least_nodes), default=0),
    )


def fit_pack(
    pack: Pack,
    *,
    nodes: int,
    local_bytes: int,
    replicas: int = 1,
    everywhere: frozenset[int] = frozenset(),
) -> StoreFit:
    """Return `fit` of an open pack, with codecs measured on some of its samples."""
    return fit(
        [int(length) for length in pack.index.shard_lengths],
        nodes=nodes,
        local_bytes=local_bytes,
        replicas=replicas,
        size_factors=measure_size_factors(pack),
        index_bytes=(pack.path / INDEX_NAME).stat().st_size,
        everywhere=everywhere,
    )


def measure_size_factors(pack: Pack) -> dict[str, float]:
    """Return for each codec how large the shards are with it, per byte of the shards as they are.

    Measured on samples at equal distances: at most 1,024 of them, and 32 MiB.
    """
    count = min(len(pack), _MEASURED_SAMPLES)
    factors = {AS_PACKED: 1.0}
    if not count:
        return factors
    chosen = np.linspace(0, len(pack) - 1, count, dtype=np.int64)
    mean_bytes = max(1.0, float(pack.lengths_of(chosen).mean()))
    chosen = chosen[:: max(1, math.ceil(count * mean_bytes / _MEASURED_BYTES))]
    data, offsets = pack.read_batch(chosen)
    lengths = np.diff(offsets).astype(np.uint64)
    stored = sum(extent.stored_length for k in chosen for extent in pack.extents(int(k)))
    plain = int(lengths.sum())
    if not plain or not stored:
        return factors
    packed_factor = capacity_factor(plain, stored)
    for codec in _CODECS:
        encoding = SampleEncoding(
            codec=codec, level=_ZSTD_LEVEL, element_bits=0, keep_ratio=1.0, dictionary=b""
        )
        encoded = encode(data, offsets[:-1].astype(np.uint64), lengths, encoding, threads=1)
        factor = packed_factor / capacity_factor(plain, int(encoded.lengths.sum()))
        if factor < 1:
            factors[codec] = factor
    return factors


def _names(count: int) -> list[str]:
    return [f"node{number}" for number in range(count)]
