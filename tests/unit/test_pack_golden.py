"""Packs of all format versions stay readable: tests/golden/pack-vN was written by version N."""

import io
import stat
from pathlib import Path

import numpy as np
import pytest

from paceline.native import encoding_of
from paceline.store import open_pack
from paceline.store.care.damage import verify_files
from paceline.store.read.describe import describe_pack

GOLDEN = Path(__file__).parents[1] / "golden"
BODIES = {
    "cat-tail": b"",
    "cat.txt": b"root file",
    "cat/b.txt": b"meow",
    "cat/kitten/a.txt": bytes(range(256)) * 3,
    "dog/a.txt": b"wuff",
    "dog/\udcff\n": b"odd",
}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_pack_of_each_version_stays_readable(version):
    path = GOLDEN / f"pack-v{version}"
    with open_pack(path) as pack:
        assert describe_pack(pack).format_version == version
        assert list(pack.names) == list(BODIES)
        assert [pack.read(k) for k in range(len(pack))] == list(BODIES.values())
        assert [pack.find(name) for name in BODIES] == list(range(6))
        assert pack.labels.tolist() == [-1, -1, 0, 0, 1, 1]
        assert pack.lengths.tolist() == [0, 9, 4, 768, 4, 3]
        assert pack.class_names == ("cat", "dog", "empty")
        assert set(pack.folder_names) == {"cat", "cat/kitten", "dog", "empty", "empty/within"}
        assert all(stat.S_IMODE(int(mode)) == 0o640 for mode in pack.modes)
        assert set(pack.mtimes_ns.tolist()) == {1_700_000_000_123_456_789}
        assert pack.shard_count == 3
        assert list(pack.verify()) == []
    assert verify_files(path) == (0 if version == 1 else 5, [])  # shards and parity files


def encoded_bodies():
    """Return the samples of pack-v3-codecs, and how each is stored."""
    ramp = np.arange(1000, 1100, dtype="<f4") / np.float32(16)
    array = io.BytesIO()
    np.save(array, ramp)
    return {
        "array.npy": (array.getvalue(), ("lz4", 2)),
        "doubles": (ramp.astype("<f8").tobytes(), ("zstd-dict", 3)),
        "halves": (ramp.astype("<f2").tobytes() + b"!", ("zstd", 1)),
        "lz4": (b"some words, " * 20, ("lz4", 0)),
        "none": (bytes(range(200)), ("none", 0)),
        "zstd-dict": (b'{"kind": "a record", "number": 7}', ("zstd-dict", 0)),
    }


def test_each_way_to_compress_stays_readable():
    expected = encoded_bodies()
    path = GOLDEN / "pack-v3-codecs"
    with open_pack(path) as pack:
        assert list(pack.names) == list(expected)
        assert [pack.read(k) for k in range(len(pack))] == [body for body, _ in expected.values()]
        found = [encoding_of(pack.extents(k)[0].codec) for k in range(len(pack))]
        assert found == [encoding for _, encoding in expected.values()]
        assert list(pack.verify()) == []
    assert verify_files(path)[1] == []
