"""Samples become files again: the same tree, all of it or nothing, and never outside the target."""

import errno
import json
import os
import signal
import subprocess

import pytest
from support.command_line import without_torch

from paceline import store
from paceline.core.errors import CorruptPack, DestinationExists, NotFound, StorageError
from paceline.store import open_pack
from paceline.store.format.header import parse_sections, resealed
from paceline.store.read.extract import extract

ODD = "cat/é\n\\\udcff.txt"


@pytest.fixture
def made(tmp_path):
    bodies = {"root": b"r", "cat/a.bin": bytes(range(256)), ODD: b"odd", "cat/deep/er/x": b"deep"}
    for name, body in bodies.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)
        os.utime(path, ns=(0, 1_234_567_890_123_456_789 + len(body)))
    (tmp_path / "source" / "cat" / "a.bin").chmod(0o751)
    (tmp_path / "source" / "root").chmod(0o4444)
    (tmp_path / "source" / "empty" / "below").mkdir(parents=True)
    store.pack(store.Folder(tmp_path / "source"), tmp_path / "pack")
    return tmp_path


def tree(root):
    found = {}
    for path in root.rglob("*"):
        status = path.stat()
        key = str(path.relative_to(root))
        found[key] = "folder"
        if path.is_file():
            found[key] = (path.read_bytes(), status.st_mode & 0o777, status.st_mtime_ns)
    return found


def test_the_whole_tree_comes_back(made):
    with open_pack(made / "pack") as pack:
        planned = extract(pack, made / "out", dry_run=True)
        assert not (made / "out").exists()
        summary = extract(pack, made / "out")
    assert tree(made / "out") == tree(made / "source")
    assert (made / "out" / "root").stat().st_mode & 0o7777 == 0o444  # not set-user-id
    assert (summary.sample_count, summary.folder_count) == (4, 5)
    assert planned.sample_bytes == summary.sample_bytes == 264
    assert sorted(path.name for path in made.iterdir()) == ["out", "pack", "source"]


def test_samples_and_folders_by_name(made):
    with open_pack(made / "pack") as pack:
        extract(pack, made / "out", ["cat/deep/", "root", "root", "empty"])
        names = {"root", "cat", "cat/deep", "cat/deep/er", "cat/deep/er/x", "empty", "empty/below"}
        assert set(tree(made / "out")) == names
        with pytest.raises(NotFound, match="no sample or folder named 'dog'"):
            extract(pack, made / "more", ["dog"])


def test_only_an_empty_folder_is_taken(made):
    (made / "out").mkdir()
    with open_pack(made / "pack") as pack:
        extract(pack, made / "out")
        before = tree(made / "out")
        for name in ("out", "pack/index.pace"):
            with pytest.raises(DestinationExists):
                extract(pack, made / name)
        (made / "link").symlink_to(made / "new")
        with pytest.raises(DestinationExists):
            extract(pack, made / "link")
        with pytest.raises(NotFound, match="mkdir -p"):
            extract(pack, made / "no" / "such")
    assert tree(made / "out") == before
    assert not (made / "new").exists()


def rename_in_index(path, old, new):
    """Give a sample or a folder another name of the same length, with all checksums in order."""
    assert len(old) == len(new)
    index = path / "index.pace"
    content = bytearray(index.read_bytes())
    for number in (9, 11):
        place = parse_sections(content)[number]
        section = bytes(content[place.offset : place.end])
        content[place.offset : place.end] = section.replace(old, new)
    index.write_bytes(resealed(content))


@pytest.mark.parametrize(
    "hostile",
    [
        b"../../x",
        b"/etc/xx",
        b"a/../xx",
        b"./xxxxx",
        b"a//b/xx",
        b"xxx/xx/",
        b"xx\0xxxx",
        b"..xx/..",
    ],
)
@pytest.mark.parametrize("place", ["sample", "folder"])
def test_hostile_names_write_nothing(tmp_path, hostile, place):
    (tmp_path / "a" / "source").mkdir(parents=True)
    (tmp_path / "a" / "source" / "zz").write_bytes(b"good")
    victim = tmp_path / "a" / "source" / ("y" * len(hostile))
    victim.mkdir() if place == "folder" else victim.write_bytes(b"evil")
    store.pack(store.Folder(tmp_path / "a" / "source"), tmp_path / "a" / "pack")
    rename_in_index(tmp_path / "a" / "pack", b"y" * len(hostile), hostile)
    before = tree(tmp_path)
    with open_pack(tmp_path / "a" / "pack") as pack:
        with pytest.raises(CorruptPack, match="cannot name a file"):
            extract(pack, tmp_path / "a" / "out")
        assert tree(tmp_path) == before
        if place == "sample":
            extract(pack, tmp_path / "a" / "out", ["zz"])
            assert list(tree(tmp_path / "a" / "out")) == ["zz"]


def test_a_name_that_is_a_file_and_a_folder_is_refused(made):
    rename_in_index(made / "pack", b"cat/deep/er/x", b"cat/a.bin/xyz")
    with open_pack(made / "pack") as pack, pytest.raises(StorageError):
        extract(pack, made / "out")
    assert not (made / "out").exists()
    assert not list(made.glob("*.partial"))


def test_a_symlink_in_the_way_is_not_followed(made, monkeypatch):
    (made / "elsewhere").mkdir()
    make = os.mkdir

    def mkdir(path, *args, **kwargs):
        if path == b"cat":  # somebody is faster
            os.symlink(made / "elsewhere", path, dir_fd=kwargs["dir_fd"])
            raise FileExistsError
        return make(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with open_pack(made / "pack") as pack, pytest.raises(StorageError):
        extract(pack, made / "out")
    assert list((made / "elsewhere").iterdir()) == []
    assert not list(made.glob("*.partial"))


def test_a_damaged_sample_leaves_nothing(made):
    shard = made / "pack" / "shard-00000.pace"
    content = bytearray(shard.read_bytes())
    content[content.find(b"deep")] ^= 1
    shard.write_bytes(content)
    with open_pack(made / "pack") as pack:
        with pytest.raises(CorruptPack, match="cat/deep/er/x"):
            extract(pack, made / "out")
        assert not list(made.glob("out*"))
        extract(pack, made / "out", ["cat/a.bin"])


CALLS = ("mkdir", "open", "write", "fchmod", "utime", "rename")


def extract_with(made, action, at=-1):
    """Extract, and do `action` in place of the `at`-th call; return how many there were."""
    count = 0

    def wrap(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count - 1 == at:
                action()
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, open_pack(made / "pack") as pack:
        for name in CALLS:
            patch.setattr(os, name, wrap(getattr(os, name)))
        extract(pack, made / "out")
    return count


def test_killed_at_any_call_there_is_nothing_or_all(made):
    total = extract_with(made, None)
    whole = tree(made / "out")
    for at in range(total):
        subprocess.run(["rm", "-r", made / "out"], check=True)
        child = os.fork()
        if child == 0:
            try:
                extract_with(made, lambda: os.kill(os.getpid(), signal.SIGKILL), at)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        if not (made / "out").exists():  # the next run replaces what the killed one left
            with open_pack(made / "pack") as pack:
                extract(pack, made / "out")
        assert tree(made / "out") == whole
        assert not list(made.glob("*.partial"))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_call_that_fails_leaves_nothing(made, code):
    def fail():
        raise OSError(code, os.strerror(code))

    total = extract_with(made, None)
    for at in range(total - 1):
        subprocess.run(["rm", "-r", made / "out"], check=True)
        with pytest.raises((StorageError, NotFound)):
            extract_with(made, fail, at)
        assert not list(made.glob("out*"))
        extract_with(made, None)


def test_the_verb(made):
    def paceline(*args):
        return without_torch("store", *args, cwd=made)

    done = paceline("extract", "pack", "out", "--dry-run")
    assert done.stdout == b"would extract 4 samples, 264 B, in 5 folders\n"
    done = paceline("extract", "pack", "out", "cat", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sample_count"] == 3
    done = paceline("extract", "pack", "out", "--json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "DestinationExists"
