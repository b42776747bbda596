"""Packs of all format versions stay readable: tests/golden/pack-vN was written by version N."""

import stat
from pathlib import Path

import pytest

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
