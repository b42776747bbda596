"""A packing that was killed goes on from its closed shards, if the source is still the same."""

import json
import os
import shutil
import tarfile

import pytest

from paceline import store
from paceline.core.errors import StorageError
from paceline.store import PackOptions, open_pack
from paceline.store.write import pipeline as pipeline_module
from paceline.store.write.sources import folder as folder_module

OPTIONS = PackOptions(shard_bytes=4096)


class Stop(Exception):
    """Stands for whatever ends a run early."""


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch):
    monkeypatch.setattr(folder_module, "BATCH_SAMPLES", 1)


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    for k in range(20):
        path = root / f"c{k % 3}" / f"{k:02d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([k]) * (1000 + k) if k != 10 else bytes(10_000))
    return root


def stop_at(count):
    def on_progress(progress):
        if progress.sample_count >= count:
            raise Stop

    return on_progress


def stop_a_run(source, destination, count, kind=store.Folder, **kwargs):
    with pytest.raises(Stop):
        store.pack(kind(source), destination, options=OPTIONS, on_progress=stop_at(count), **kwargs)


def check(source, destination, whole):
    """Compare a resumed pack with one that was packed at once: they are equal to the byte."""
    names = sorted(path.name for path in destination.iterdir())
    assert names == sorted(path.name for path in whole.iterdir())
    for name in names:
        assert (destination / name).read_bytes() == (whole / name).read_bytes()
    with open_pack(destination) as pack:
        assert list(pack.verify()) == []
    assert not destination.with_name(destination.name + ".partial").exists()


def test_a_resumed_pack_equals_one_that_was_packed_at_once(source, tmp_path):
    whole = store.pack(store.Folder(source), tmp_path / "whole", options=OPTIONS)
    reused = []
    for count in range(1, 20):
        destination = tmp_path / f"pack{count}"
        stop_a_run(source, destination, count)
        seen = []
        summary = store.pack(
            store.Folder(source), destination, options=OPTIONS, on_progress=seen.append
        )
        check(source, destination, tmp_path / "whole")
        reused.append(summary.reused_sample_count)
        assert summary.reused_sample_count <= count
        assert summary.sample_bytes == summary.stored_bytes == whole.sample_bytes
        if summary.reused_sample_count:
            assert seen[0].sample_count == summary.reused_sample_count
            assert seen[0].reused_byte_count == seen[0].byte_count > 0
    assert reused == sorted(reused)
    assert reused[0] == 0
    assert reused[-1] > 12


@pytest.mark.parametrize(
    "change",
    ["last", "first", "touched", "gone", "new", "class", "options", "restart", "shard", "run"],
)
def test_only_what_is_still_true_is_kept(source, tmp_path, change):
    stop_a_run(source, tmp_path / "pack", 15)
    partial = tmp_path / "pack.partial"
    entries = [
        json.loads(line) for line in (partial / "journal.partial").read_bytes().split(b"\n")[1:-1]
    ]
    assert len(entries) > 3
    options = OPTIONS
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    everything = entries[-1]["samples"]
    expected = 0
    if change == "last":  # of the shards that were closed, the last has another sample now
        victim = source / names[everything - 1]
        victim.write_bytes(b"o" * victim.stat().st_size)
        expected = entries[-2]["samples"]
    elif change == "first":
        (source / names[0]).write_bytes(b"other")
    elif change == "touched":
        os.utime(source / names[0], ns=(1, 1))
    elif change == "gone":
        (source / names[0]).unlink()
    elif change == "new":  # behind what is packed: all of it still holds
        (source / "c2" / "zz").write_bytes(b"new")
        expected = everything
    elif change == "class":  # no file changes, but every label
        (source / "a").mkdir()
    elif change == "options":
        options = PackOptions(shard_bytes=4096 + 64)
    elif change == "restart":
        options = PackOptions(shard_bytes=4096, restart=True)
    elif change == "shard":
        os.truncate(partial / "shard-00001.pace", 100)
        expected = entries[0]["samples"]
    else:
        name = entries[2]["runs"][0][0]
        data = bytearray((partial / name).read_bytes())
        data[-1] ^= 1
        (partial / name).write_bytes(data)
        expected = entries[1]["samples"]
    summary = store.pack(store.Folder(source), tmp_path / "pack", options=options)
    assert summary.reused_sample_count == expected
    store.pack(store.Folder(source), tmp_path / "whole", options=options)
    check(source, tmp_path / "pack", tmp_path / "whole")


@pytest.mark.parametrize("spoil", ["torn", "nonsense", "empty", "missing"])
def test_a_journal_that_cannot_be_read_is_no_obstacle(source, tmp_path, spoil):
    stop_a_run(source, tmp_path / "pack", 15)
    journal = tmp_path / "pack.partial" / "journal.partial"
    lines = journal.read_bytes().split(b"\n")
    count = json.loads(lines[-3])["samples"]
    if spoil == "torn":
        journal.write_bytes(b"\n".join(lines)[:-9])
    elif spoil == "nonsense":
        journal.write_bytes(b"\n".join([*lines[:-2], b"nonsense", b""]))
    elif spoil == "empty":
        journal.write_bytes(b"")
    else:
        journal.unlink()
    summary = store.pack(store.Folder(source), tmp_path / "pack", options=OPTIONS)
    assert summary.reused_sample_count == (count if spoil in ("torn", "nonsense") else 0)
    store.pack(store.Folder(source), tmp_path / "whole", options=OPTIONS)
    check(source, tmp_path / "pack", tmp_path / "whole")


def test_a_source_that_changed_is_mended_and_packing_goes_on(source, tmp_path):
    def spoil(progress):
        if progress.sample_count == 15:
            (source / "c2" / "17").write_bytes(b"other")

    with pytest.raises(StorageError, match="changed while"):
        store.pack(store.Folder(source), tmp_path / "pack", options=OPTIONS, on_progress=spoil)
    assert (
        store.pack(store.Folder(source), tmp_path / "pack", options=OPTIONS).reused_sample_count > 0
    )


def test_an_interrupt_while_it_is_passed_over_keeps_what_was_packed(source, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    stop_a_run(source, tmp_path / "pack", 15)
    with monkeypatch.context() as patched:
        patched.setattr(pipeline_module, "resume", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.pack(store.Folder(source), tmp_path / "pack", options=OPTIONS)
    assert (
        store.pack(store.Folder(source), tmp_path / "pack", options=OPTIONS).reused_sample_count > 0
    )


def test_archives_resume_when_they_are_the_same(source, tmp_path, monkeypatch):
    monkeypatch.setattr("paceline.store.write.sources.source.BATCH_SAMPLES", 1)
    archive = tmp_path / "a.tar"
    with tarfile.open(archive, "w") as file:
        file.add(source, "root")
    store.pack(store.Archives(archive), tmp_path / "whole", options=OPTIONS)
    stop_a_run(archive, tmp_path / "pack", 15, store.Archives)
    shutil.copytree(tmp_path / "pack.partial", tmp_path / "other.partial")
    summary = store.pack(store.Archives(archive), tmp_path / "pack", options=OPTIONS)
    assert summary.reused_sample_count > 8
    check(archive, tmp_path / "pack", tmp_path / "whole")
    os.utime(archive, ns=(1, 1))
    summary = store.pack(store.Archives(archive), tmp_path / "other", options=OPTIONS)
    assert summary.reused_sample_count == 0
    check(archive, tmp_path / "other", tmp_path / "whole")
