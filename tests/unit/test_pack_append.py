"""Appending: what is added, what is refused, and what readers see meanwhile."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from paceline import store
from paceline.core.errors import CorruptPack, NotFound, UsageError
from paceline.store import PackOptions, open_pack
from paceline.store.care.damage import verify_files
from paceline.store.care.repair import repair_pack

GOLDEN = Path(__file__).parents[1] / "golden" / "pack-v1"


def write(root, files):
    for name, body in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
    return root


@pytest.fixture
def pack_path(tmp_path):
    source = write(tmp_path / "source", {"b/1": b"one" * 100, "d/2": b"two", "root": b"r"})
    store.pack(
        store.Folder(source),
        tmp_path / "pack",
        options=PackOptions(shard_bytes=512, parity_group=2),
    )
    return tmp_path / "pack"


def content(pack):
    return {name: pack.read(k) for k, name in enumerate(pack.names)}


def test_samples_are_added_and_labels_stay(pack_path, tmp_path):
    more = write(tmp_path / "more", {"a/0": b"zero", "b/9": b"x" * 2000, "c/e/f": b""})
    with open_pack(pack_path) as before:
        old = content(before)
        classes = before.class_names
        summary = store.append(store.Folder(more), pack_path, options=PackOptions(shard_bytes=512))
        assert content(before) == old  # it keeps the version that it opened
        assert before.class_names == classes == ("b", "d")
    assert (summary.sample_count, summary.reused_sample_count) == (6, 3)
    with open_pack(pack_path) as pack:
        assert content(pack) == {**old, "a/0": b"zero", "b/9": b"x" * 2000, "c/e/f": b""}
        assert pack.class_names == ("b", "d", "a", "c")
        assert dict(zip(pack.names, pack.labels.tolist(), strict=True)) == {
            "a/0": 2,
            "b/1": 0,
            "b/9": 0,
            "c/e/f": 3,
            "d/2": 1,
            "root": -1,
        }
        assert list(pack.folder_names) == ["a", "b", "c", "c/e", "d"]
        assert list(pack.verify()) == []
        assert summary.shard_count == pack.shard_count


def test_a_name_that_is_there_is_refused_and_nothing_changes(pack_path, tmp_path):
    files = {path.name: path.read_bytes() for path in pack_path.iterdir()}
    for names in ({"new": b"", "d/2": b"again"}, {"d": b"like a folder"}):
        more = write(tmp_path / f"more{len(names)}", names)
        with pytest.raises(UsageError, match=r"one name|named like a folder"):
            store.append(store.Folder(more), pack_path)
        assert {path.name: path.read_bytes() for path in pack_path.iterdir()} == files


def test_what_a_killed_append_left_is_removed(pack_path, tmp_path):
    for name in (
        "shard-00077.pace",
        "index.pace.partial",
        "run-00000.partial",
        "parity-00009.pace",
    ):
        (pack_path / name).write_bytes(b"half")
    mine = {"README", "My notes.partial"}
    for name in mine:
        (pack_path / name).write_bytes(b"mine")
    store.append(store.Folder(write(tmp_path / "more", {"new": b"1"})), pack_path)
    names = {path.name for path in pack_path.iterdir()}
    assert mine <= names
    names -= mine
    assert not {name for name in names if name.endswith(".partial") or "77" in name or "9" in name}


def test_parity_that_was_not_renamed_is_finished(pack_path, tmp_path):
    """The index of an append is there, but its parity still has the name of before."""
    more = write(tmp_path / "more", {"new": b"1" * 300})
    old = (pack_path / "parity-00000.pace").read_bytes()
    store.append(store.Folder(more), pack_path, options=PackOptions(shard_bytes=512))
    new = (pack_path / "parity-00000.pace").read_bytes()
    last = sorted(pack_path.glob("parity-*.pace"))[-1]
    (pack_path / f"{last.name}.partial").write_bytes(last.read_bytes())
    last.write_bytes(old)
    store.append(store.Folder(_empty(tmp_path)), pack_path)
    assert (pack_path / "parity-00000.pace").read_bytes() == new
    assert not list(pack_path.glob("*.partial"))


def test_an_interrupt_right_behind_the_rename_keeps_what_was_committed(
    pack_path, tmp_path, monkeypatch
):
    rename = os.rename

    def rename_then_interrupt(name, final, **folders):
        rename(name, final, **folders)
        if final == "index.pace":
            raise KeyboardInterrupt

    more = write(tmp_path / "more", {"new": b"1" * 300})
    monkeypatch.setattr(os, "rename", rename_then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.append(store.Folder(more), pack_path, options=PackOptions(shard_bytes=512))
    monkeypatch.undo()
    with open_pack(pack_path) as pack:
        assert "new" in list(pack.names)
        assert list(pack.verify()) == []
    store.append(store.Folder(_empty(tmp_path)), pack_path)
    assert verify_files(pack_path)[1] == []
    assert not list(pack_path.glob("*.partial"))


def test_no_parity_is_made_of_a_damaged_shard(pack_path, tmp_path):
    shard = pack_path / "shard-00000.pace"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:70] + b"?" + whole[71:])
    more = write(tmp_path / "more", {"new": b"1"})
    with pytest.raises(CorruptPack, match=r"shard-00000\.pace is damaged"):
        store.append(store.Folder(more), pack_path)
    assert repair_pack(pack_path).ok  # the parity of before still has it
    assert shard.read_bytes() == whole
    store.append(store.Folder(more), pack_path)
    assert verify_files(pack_path)[1] == []


def test_no_digest_is_made_of_a_damaged_shard(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "pack")
    shard = tmp_path / "pack" / "shard-00001.pace"
    damaged = bytearray(shard.read_bytes())
    damaged[64] ^= 1
    shard.write_bytes(damaged)
    index = (tmp_path / "pack" / "index.pace").read_bytes()
    with pytest.raises(CorruptPack, match="is damaged"):
        store.append(store.Folder(write(tmp_path / "more", {"new": b"1"})), tmp_path / "pack")
    assert (tmp_path / "pack" / "index.pace").read_bytes() == index


def _empty(tmp_path):
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty"


def test_a_pack_of_version_1_becomes_one_of_version_2(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "pack")
    with open_pack(GOLDEN) as golden:
        expected = content(golden)
    store.append(store.Folder(write(tmp_path / "more", {"cat/new": b"meow"})), tmp_path / "pack")
    with open_pack(tmp_path / "pack") as pack:
        assert content(pack) == {**expected, "cat/new": b"meow"}
        assert list(pack.folder_names) == ["cat", "cat/kitten", "dog", "empty", "empty/within"]
        assert list(pack.verify()) == []


def test_what_is_no_whole_pack_is_refused(pack_path, tmp_path):
    more = write(tmp_path / "more", {"new": b"1"})
    with pytest.raises(NotFound, match="no pack here"):
        store.append(store.Folder(more), tmp_path / "nowhere")
    with pytest.raises(NotFound, match="no such folder to pack"):
        store.append(store.Folder(tmp_path / "nowhere"), pack_path)
    descriptor = os.open(pack_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(UsageError, match="another process"):
        store.append(store.Folder(more), pack_path)
    os.close(descriptor)
    index = bytearray((pack_path / "index.pace").read_bytes())
    index[100] ^= 1
    (pack_path / "index.pace").write_bytes(index)
    with pytest.raises(CorruptPack):
        store.append(store.Folder(more), pack_path)
