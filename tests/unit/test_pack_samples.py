"""Packing an iterator: names, codecs, chunks, shard sizes, and memory that does not grow."""

import tracemalloc

import numpy as np
import pytest

from paceline import native, store
from paceline.core.errors import ConfigError, Missing, UsageError
from paceline.native import codec_available
from paceline.store import PackOptions, open_pack
from paceline.store.write import options as options_module
from paceline.store.write.index import build as index_module
from paceline.store.write.index import name_table as table_module
from paceline.store.write.index import sorted_runs as runs_module
from paceline.store.write.options import ShardLimits, shard_limits
from paceline.store.write.sources.source import SourceTotals


def content(path):
    with open_pack(path) as pack:
        assert list(pack.verify()) == []
        return {name: pack.read(k) for k, name in enumerate(pack.names)}


@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", ".", "..", "a/../b", "a\0", "x" * 4096])
def test_names_that_are_no_paths_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="cannot name a sample"):
        store.pack(store.Samples([("fine", b""), (name, b"")]), tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["x" * 4095, "a.b/..c/.d", "é", "\udcff", "\n"])
def test_names_that_are_paths_are_taken(tmp_path, name):
    store.pack(store.Samples([(name, b"1")]), tmp_path / "pack")
    assert content(tmp_path / "pack") == {name: b"1"}


def test_what_is_no_pair_or_comes_twice_is_refused(tmp_path):
    with pytest.raises(UsageError, match="it is a str"):
        store.pack(store.Samples([("a", "text")]), tmp_path / "pack")
    with pytest.raises(UsageError, match=r"two samples have one name.*'a/b'"):
        store.pack(store.Samples([("a/b", b""), ("c", b""), (b"a/b", b"")]), tmp_path / "pack")
    with pytest.raises(UsageError, match=r"named like a folder.*'a'"):
        store.pack(store.Samples([("a/b", b""), ("a", b""), ("a-b", b"")]), tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_iterator_comes_through(tmp_path):
    def samples():
        yield "a", b"1"
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        store.pack(store.Samples(samples()), tmp_path / "pack")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not codec_available("zstd"), reason="libzstd is not here")
def test_codecs(tmp_path, monkeypatch):
    noise = np.random.default_rng(1).integers(0, 256, 5000, np.uint8).tobytes()
    samples = {
        "empty": b"",
        "flat": bytes(5000),
        "noise": noise,
        "slightly": noise + bytes(300),  # saves less than a tenth
        "large": bytes(50_000),
    }
    monkeypatch.setattr(options_module, "BATCH_BYTES", 20_000)
    codecs = {}
    for codec, code in (("none", 1), ("zstd", 1), ("lz4", 2)):
        path = tmp_path / codec
        summary = store.pack(store.Samples(samples.items()), path, options=PackOptions(codec=codec))
        assert content(path) == samples
        with open_pack(path) as pack:
            extents = {name: pack.extents(k)[0] for k, name in enumerate(pack.names)}
        codecs[codec] = {name for name, extent in extents.items() if extent.codec == code}
        assert summary.stored_bytes == sum(extent.stored_length for extent in extents.values())
    assert codecs == {
        "none": set(),
        "zstd": {"flat", "slightly", "large"},
        "lz4": {"flat", "slightly", "large"},
    }


def test_a_codec_that_is_missing_is_said_before_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "codec_available", lambda codec: codec != "zstd")
    with pytest.raises(Missing, match=r"libzstd.*--codec none"):
        store.pack(
            store.Samples([("a", b"")]), tmp_path / "pack", options=PackOptions(codec="auto")
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        {"codec": "lzma"},
        {"shuffle": "3"},
        {"feed": "fast"},
        {"feed_bytes_per_s": -1},
        {"codec_level": 0},
        {"codec_level": 23},
        {"parity_group": 1},
    ],
)
def test_options_that_cannot_be_are_refused(options):
    with pytest.raises(ConfigError):
        PackOptions(**options)


def test_samples_larger_than_a_shard_are_chunked(tmp_path):
    samples = {f"{k}": bytes([k]) * (k * 90) for k in range(12)}
    options = PackOptions(shard_bytes=256)
    store.pack(store.Samples(samples.items()), tmp_path / "pack", options=options)
    assert content(tmp_path / "pack") == samples
    assert all(file.stat().st_size <= 256 for file in tmp_path.glob("pack/shard-*"))
    with open_pack(tmp_path / "pack") as pack:
        extents = pack.extents(pack.find("11"))
        assert [extent.length for extent in extents] == [192] * 5 + [30]
        assert pack.lengths[pack.find("11")] == 990


def test_large_packs_get_larger_shards():
    def known(byte_count):
        return SourceTotals(sample_count=10, byte_count=byte_count, is_exact=True)

    sizes = [shard_limits(known(n << 30), PackOptions()).shard_bytes for n in (1, 60, 100, 10**6)]
    assert sizes == [256 << 20, 256 << 20, 512 << 20, 16 << 30]
    assert shard_limits(known(1 << 50), PackOptions(shard_bytes=4096)).shard_bytes == 4096
    unknown = shard_limits(SourceTotals(), PackOptions())
    assert unknown.limit(63) == 256 << 20
    assert unknown.limit(64) == 512 << 20
    assert unknown.limit(1 << 40) == 16 << 30
    assert ShardLimits(shard_bytes=20 << 30, growth_shards=1).limit(5) == 20 << 30


def peak_bytes(count, path):
    def samples():
        for k in range(count):
            yield b"c%d/%08x" % (k % 7, k * 2654435761 % (1 << 32)), b"%d" % k

    tracemalloc.start()
    store.pack(store.Samples(samples()), path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_number_of_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "SORTED_RUN_SAMPLES", 4096)
    monkeypatch.setattr(index_module, "BLOCK_SAMPLES", 4096)
    monkeypatch.setattr(table_module, "BUCKET_SAMPLES", 4096)
    few, many = (peak_bytes(count, tmp_path / f"{count}") for count in (20_000, 100_000))
    assert many < 1.2 * few
    with open_pack(tmp_path / "100000") as pack:
        assert len(pack) == 100_000
        assert [pack.read(pack.find(pack.names[k])) for k in (0, 50_000)]
        assert pack.read(pack.find("c1/9e3779b1")) == b"1"
