"""Whether a pack fits on nodes: by the shares that nodes really get."""

import pytest

from paceline.core.errors import UsageError
from paceline.store.serve.fit import AS_PACKED, fit
from paceline.store.serve.placement import place

MB, GB = 10**6, 10**9
SHARDS = [250 * MB] * 1820  # 455 GB
FACTORS = {AS_PACKED: 1.0, "lz4": 0.8, "zstd": 0.45}


def largest(nodes, replicas):
    placement = place([f"node{k}" for k in range(nodes)], len(SHARDS), replicas)
    return max(len(placement.shards_of(name)) for name in placement.nodes) * 250 * MB


def test_455_gb_fit_on_8_nodes_of_60_gb_once():
    found = fit(SHARDS, nodes=8, local_bytes=60 * GB, replicas=1, size_factors=FACTORS)
    assert found.codec == AS_PACKED
    plain = found.codecs[0]
    assert plain.least_nodes == 8
    assert plain.node_bytes == largest(8, 1) <= 60 * GB
    assert plain.headroom >= 1


def test_twice_they_need_a_codec_or_more_nodes():
    found = fit(SHARDS, nodes=8, local_bytes=60 * GB, replicas=2, size_factors=FACTORS)
    assert found.codec == "zstd"
    by_codec = {row.codec: row for row in found.codecs}
    assert by_codec["lz4"].headroom < 1
    for nodes, row in ((by_codec[AS_PACKED].least_nodes, 1.0), (by_codec["lz4"].least_nodes, 0.8)):
        assert largest(nodes, 2) * row <= 60 * GB < largest(nodes - 1, 2) * row
    assert found.least_nodes == by_codec["zstd"].least_nodes <= 8


def test_what_is_everywhere_and_the_index_count_on_each_node():
    everywhere = frozenset(range(40))  # 10 GB
    found = fit(
        SHARDS,
        nodes=16,
        local_bytes=60 * GB,
        replicas=1,
        size_factors={AS_PACKED: 1.0},
        index_bytes=GB,
        everywhere=everywhere,
    )
    (row,) = found.codecs
    assert row.least_nodes == 10  # 445 GB over 49 GB each
    assert row.node_bytes >= 11 * GB + 445 * GB // 16


def test_a_shard_that_is_larger_than_a_node_never_fits():
    found = fit([GB], nodes=4, local_bytes=GB // 2, replicas=1, size_factors={AS_PACKED: 1.0})
    assert (found.codec, found.least_nodes) == (None, 0)
    with pytest.raises(UsageError, match="spread over nothing"):
        fit([GB], nodes=0, local_bytes=1, replicas=1, size_factors={AS_PACKED: 1.0})
