"""The system's table of mounts, as proc(5) describes it."""

import os

from paceline.store.posix import mount_table
from paceline.store.posix.mount_table import find_mount, parse_table, real_point

TABLE = rb"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
36 22 0:39 / /data/with\040blank ro,nosuid shared:7 master:2 - fuse.paceline /packs/a\134b\011c ro
37 36 0:40 / /data/with\040blank ro - fuse.other peer ro
38 22 0:41 / /plain rw - tmpfs tmpfs rw
"""


def test_blanks_and_optional_fields_are_understood(tmp_path, monkeypatch):
    found = parse_table(TABLE)
    assert [(entry.kind, entry.connection) for entry in found] == [
        ("ext4", 1),
        ("fuse.paceline", 39),
        ("fuse.other", 40),
        ("tmpfs", 41),
    ]
    assert found[1].point == "/data/with blank"
    assert found[1].source == "/packs/a\\b\tc"
    # Of several mounts at one folder, programs see the last.
    (tmp_path / "table").write_bytes(TABLE)
    monkeypatch.setattr(mount_table, "_TABLE", tmp_path / "table")
    assert find_mount("/data/with blank").kind == "fuse.other"
    assert find_mount("/data") is None


def test_links_are_followed(tmp_path):
    (tmp_path / "real" / "point").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "other").symlink_to("point")
    real = os.path.realpath(tmp_path / "real")
    assert real_point(str(tmp_path / "link" / "point")) == f"{real}/point"
    assert real_point(f"{tmp_path}/link/./other/") == f"{real}/point"
