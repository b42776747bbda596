"""Too little space at the destination is said before anything is written."""

import errno
import io
import json
import os
import random
import shutil
import tarfile
from pathlib import Path

import pytest

from paceline import store
from paceline.cli.app import main
from paceline.core import files
from paceline.core.errors import StorageError
from paceline.store import PackOptions, open_pack
from paceline.store.care.repair import repair_pack
from paceline.store.read.extract import extract
from paceline.store.write import pack as pack_module

COUNT, BODY_BYTES = 50, 2000


@pytest.fixture
def source(tmp_path):
    for k in range(COUNT):
        path = tmp_path / "source" / f"{k % 3}" / f"{k:02d}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([k]) * BODY_BYTES)
    return tmp_path / "source"


@pytest.fixture
def free(monkeypatch):
    """Return what sets the bytes that every file system claims to have."""

    def claim(count):
        monkeypatch.setattr(files, "free_bytes", lambda _: count)

    return claim


def entries(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_free_is_what_the_system_says(tmp_path):
    free = files.free_bytes(tmp_path / "not" / "yet" / "there")
    assert 0 < free <= shutil.disk_usage(tmp_path).total


def test_a_folder_that_may_not_be_searched_is_no_error(tmp_path, monkeypatch):
    hidden = tmp_path / "hidden"
    known = os.statvfs

    def refuse(path, *_, **__):
        if hidden in (path, *Path(path).parents):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return known(path)

    monkeypatch.setattr(os, "statvfs", refuse)
    monkeypatch.setattr(Path, "stat", refuse)  # of `exists`, as for a user who is not root
    assert files.free_bytes(hidden / "pack") == files.free_bytes(tmp_path)


@pytest.mark.parametrize("parity", [0, 2])
def test_a_pack_that_cannot_fit_is_refused_with_both_numbers(source, tmp_path, free, parity):
    options = PackOptions(parity_group=parity)
    planned = store.plan_pack(store.Folder(source), tmp_path / "pack", options=options)
    free(COUNT * BODY_BYTES)  # the samples would fit, but for their index
    with pytest.raises(StorageError, match=r"too little space.*needed, 100,000 bytes are free"):
        store.pack(store.Folder(source), tmp_path / "pack", options=options)
    assert entries(tmp_path) == ["source"]
    free(planned.pack_bytes * 2)  # what it may take while it is written
    assert store.pack(store.Folder(source), tmp_path / "pack").sample_count == COUNT


@pytest.mark.parametrize("kind", ["folder", "tar"])
@pytest.mark.parametrize("missing", [0, 1])
def test_what_a_dry_run_computes_decides_to_the_byte(source, tmp_path, free, kind, missing):
    options = PackOptions(parity_group=2, shard_bytes=20_000)
    what = store.Folder(source)
    if kind == "tar":
        with tarfile.open(tmp_path / "source.tar", "w") as archive:
            archive.add(source, "top")
        what = store.Archives(tmp_path / "source.tar")
    before = entries(tmp_path)
    planned = store.plan_pack(what, tmp_path / "pack", options=options)
    free(planned.pack_bytes - missing)
    if missing:
        with pytest.raises(StorageError, match="too little space for the pack"):
            store.pack(what, tmp_path / "pack", options=options)
        assert entries(tmp_path) == before
    else:
        summary = store.pack(what, tmp_path / "pack", options=options)
        assert summary.pack_bytes == planned.pack_bytes


def test_the_check_can_be_left_out(source, tmp_path, free):
    free(10)
    options = PackOptions(check_space=False)
    assert store.pack(store.Folder(source), tmp_path / "pack", options=options).shard_count == 1
    with open_pack(tmp_path / "pack") as pack:
        assert extract(pack, tmp_path / "out", check_space=False).sample_count == COUNT


def test_where_only_a_bound_is_known_a_warning_says_so(source, tmp_path, free, caplog):
    free(50_000)
    options = PackOptions(codec="zstd")
    store.pack(store.Folder(source), tmp_path / "pack", options=options)
    assert "may be too little space" in caplog.text
    assert "50,000 bytes are free" in caplog.text
    caplog.clear()
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        entry = tarfile.TarInfo("x")
        entry.size = 90_000
        archive.addfile(entry, io.BytesIO(bytes(90_000)))
    store.pack(store.Archives(tmp_path / "a.tar"), tmp_path / "other", options=options)
    assert "may be too little space" in caplog.text


def test_a_compressed_archive_may_need_many_times_its_size(tmp_path, free, caplog):
    free(80_000)
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("x")
        entry.size = 100_000
        archive.addfile(entry, io.BytesIO(random.Random(0).randbytes(10_000) * 10))
    assert (tmp_path / "a.tar.gz").stat().st_size < 30_000
    store.pack(store.Archives(tmp_path / "a.tar.gz"), tmp_path / "pack")
    assert "may be too little space" in caplog.text


def test_what_an_earlier_packing_left_is_not_needed_again(source, tmp_path, free, monkeypatch):
    options = PackOptions(shard_bytes=20_000)
    commit = pack_module.PartialPack.commit

    def killed(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(pack_module.PartialPack, "commit", killed)
    with pytest.raises(KeyboardInterrupt):
        store.pack(store.Folder(source), tmp_path / "pack", options=options)
    monkeypatch.setattr(pack_module.PartialPack, "commit", commit)
    free(60_000)
    summary = store.pack(store.Folder(source), tmp_path / "pack", options=options)
    assert summary.reused_sample_count > COUNT // 2


def test_appending_extracting_and_repairing_ask_as_well(source, tmp_path, free):
    store.pack(store.Folder(source), tmp_path / "pack", options=PackOptions(shard_bytes=30_000))
    shutil.copytree(tmp_path / "pack", tmp_path / "copy")
    more = tmp_path / "more"
    more.mkdir()
    (more / "new").write_bytes(bytes(5000))
    free(6000)  # enough for the sample, not for the index beside the old one
    before = entries(tmp_path / "pack")
    with pytest.raises(StorageError, match=r"too little space for the pack.*6,000 bytes are free"):
        store.append(store.Folder(more), tmp_path / "pack")
    with (
        open_pack(tmp_path / "pack") as pack,
        pytest.raises(StorageError, match=r"the extracted files.*100,000 bytes are needed"),
    ):
        extract(pack, tmp_path / "out")
    assert entries(tmp_path / "pack") == before
    (tmp_path / "pack" / "shard-00001.pace").unlink()
    assert repair_pack(tmp_path / "pack", replica=tmp_path / "copy", dry_run=True).ok
    with pytest.raises(StorageError, match=r"the rebuilt shard.*needed, 6,000 bytes are free"):
        repair_pack(tmp_path / "pack", replica=tmp_path / "copy")
    free(10**9)
    assert repair_pack(tmp_path / "pack", replica=tmp_path / "copy").ok
    assert store.append(store.Folder(more), tmp_path / "pack").sample_count == COUNT + 1


def test_a_dry_run_says_what_is_needed_and_what_is_free(
    source, tmp_path, free, monkeypatch, capsys
):
    free(1000)
    for flags in ([], ["--json"]):
        command = ["paceline", "pack", str(source), str(tmp_path / "pack"), "--dry-run", *flags]
        monkeypatch.setattr("sys.argv", command)
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0
    words, _, data = capsys.readouterr().out.rstrip().rpartition("\n")
    assert "needed, 1,000 B free: too little" in words
    assert json.loads(data)["free_bytes"] == 1000
