"""Packs of older format versions stay readable: tests/golden/pack-v1 was written by version 1."""

import stat
from pathlib import Path

from paceline.store import open_pack

GOLDEN = Path(__file__).parents[1] / "golden" / "pack-v1"
BODIES = {
    "cat-tail": b"",
    "cat.txt": b"root file",
    "cat/b.txt": b"meow",
    "cat/kitten/a.txt": bytes(range(256)) * 3,
    "dog/a.txt": b"wuff",
    "dog/\udcff\n": b"odd",
}


def test_a_pack_of_version_1_stays_readable():
    with open_pack(GOLDEN) as pack:
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
