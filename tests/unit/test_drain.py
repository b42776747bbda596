"""The drain of an output: what the target holds after each step."""

import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from paceline.store.serve.drain import HIDDEN, ROOM, Drain, DrainRoom


class Output:
    """An output that a test writes to."""

    def __init__(self, top, **options):
        self.folder, self.target = top / "local", top / "shared"
        self.folder.mkdir(exist_ok=True)
        self.room = DrainRoom(self.folder / ROOM, 1000)
        self.drain = Drain(self.folder, self.target, self.room, **options)
        self.drain.begin()
        self.tree = self.folder / "tree"
        self.inode = self.target.stat().st_ino

    def drained(self):
        """Return what the target holds."""
        return {
            str(path.relative_to(self.target)): path.read_text()
            for path in self.target.rglob("*")
            if path.is_file()
        }


@pytest.fixture
def output(tmp_path):
    return Output(tmp_path)


def test_files_and_folders_are_copied_with_mode_and_time(output):
    (output.tree / "a" / "empty").mkdir(parents=True)
    file = output.tree / "a" / "b"
    file.write_text("1")
    file.chmod(0o640)
    os.utime(file, ns=(5, 7))
    assert output.drain.step() == 0
    assert output.drained() == {"a/b": "1"}
    assert (output.target / "a" / "empty").is_dir()
    found = (output.target / "a" / "b").stat()
    assert (found.st_mode & 0o777, found.st_mtime_ns) == (0o640, 7)
    assert not list(output.target.rglob(f"{HIDDEN}*"))


def test_what_is_renamed_is_not_copied_again(output):
    (output.tree / "new").write_text("1")
    (output.tree / "last").write_text("0")
    output.drain.step()
    inode = (output.target / "new").stat().st_ino
    (output.tree / "new").rename(output.tree / "last")
    assert output.drain.step() == 0
    assert output.drained() == {"last": "1"}
    assert (output.target / "last").stat().st_ino == inode
    assert (output.drain.counts.files, output.drain.counts.renamed) == (2, 1)
    (output.tree / "last").unlink()
    output.drain.step()
    assert output.drained() == {}


def test_hidden_files_are_not_drained_and_stale_ones_go(output):
    (output.tree / f"{HIDDEN}x").write_text("unfinished")
    assert output.drain.step() == 0
    assert output.drained() == {}
    output.drain.remove_stale()
    assert list(output.tree.iterdir()) == []


def test_what_the_target_had_is_in_the_tree_and_follows_it(tmp_path):
    (tmp_path / "shared" / "d").mkdir(parents=True)
    (tmp_path / "shared" / "d" / "old").write_text("old")
    output = Output(tmp_path)
    assert (output.tree / "d" / "old").read_text() == "old"
    (output.tree / "d").rename(output.tree / "e")
    output.drain.step()
    assert (output.tree / "e" / "old").read_text() == "old"
    output.drain.verify()  # removes the old name
    output.drain.step()
    assert output.drained() == {"e/old": "old"}
    (output.tree / "e" / "old").unlink()
    output.drain.step()
    assert output.drained() == {}


def test_the_target_keeps_what_others_put_there(output):
    (output.tree / "mine").write_text("mine")
    output.drain.step()
    (output.target / "theirs").write_text("theirs")
    (output.target / "mine").write_text("replaced by another node")
    (output.tree / "mine").unlink()
    assert output.drain.step() == 0
    assert output.drained() == {"theirs": "theirs", "mine": "replaced by another node"}


def test_what_the_target_lost_is_copied_again(output):
    (output.tree / "a").write_text("a")
    output.drain.step()
    (output.target / "a").unlink()
    output.drain.verify()
    assert output.drain.step() == 0
    assert output.drained() == {"a": "a"}


def test_a_file_that_cannot_be_copied_is_named_and_tried_again(output):
    (output.target / "a").mkdir()
    (output.target / "a" / "in-the-way").touch()
    (output.tree / "a").write_text("a")
    (output.tree / "b").write_text("b")
    assert output.drain.step() == 1
    assert list(output.drain.problems) == ["a"]
    assert output.drained()["b"] == "b"
    (output.target / "a" / "in-the-way").unlink()
    (output.target / "a").rmdir()
    assert output.drain.step() == 0
    assert output.drain.problems == {}
    assert output.drained() == {"a": "a", "b": "b"}


def test_bytes_that_wait_are_counted(output):
    (output.tree / "a").write_text("12345")
    output.room._fields[0] = 5  # as the program that publishes it does
    assert output.room.published_bytes - output.room.settled_bytes == 5
    output.drain.step()
    assert output.room.settled_bytes == 5


def test_a_leftover_does_not_replace_what_is_later(tmp_path):
    output = Output(tmp_path, keeps_later=True)
    for name in ("earlier", "later"):
        (output.tree / name).write_text("left")
        (output.target / name).write_text("there")
        os.utime(output.target / name, ns=(0, 1 if name == "earlier" else 1 << 62))
    output.drain.step()
    assert output.drained() == {"earlier": "left", "later": "there"}


class Mounts:
    """Lets paths be on other file systems, or on none."""

    def __init__(self, monkeypatch):
        self.elsewhere = {}
        stat = Path.stat

        def found(path, **how):
            real = stat(path, **how)
            moved = self.elsewhere.get(path)
            if moved is None:
                return real
            fields = list(real)
            fields[2], fields[1] = moved  # device, inode
            return os.stat_result(fields)

        monkeypatch.setattr(Path, "stat", found)


def test_nothing_is_made_below_a_mount_point_whose_file_system_is_lost(
    output, tmp_path, monkeypatch, caplog
):
    """It was made again there, and drained to, with exit code 0."""
    (output.tree / "before").write_text("1")
    assert output.drain.step() == 0
    mounts, away = Mounts(monkeypatch), tmp_path / "away"
    output.target.rename(away)
    mounts.elsewhere[tmp_path] = (77, 5)  # the folder that was below the mount
    (output.tree / "d").mkdir()
    (output.tree / "d" / "during").write_text("2")
    (output.tree / "before").unlink()
    for _ in range(2):
        assert output.drain.step() == 1
    assert not output.target.exists()
    assert [str(problem) for problem in output.drain.problems.values()] == [
        f"[Errno {errno.ENODEV}] its file system is not mounted any more: '{output.target}'"
    ]
    assert caplog.text.count("is lost (its file system is not mounted any more)") == 1
    output.target.mkdir()
    mounts.elsewhere[output.target] = (77, 6)
    assert output.drain.step() == 1
    assert output.drained() == {}
    output.target.rmdir()
    away.rename(output.target)
    mounts.elsewhere.clear()
    mounts.elsewhere[output.target] = (78, output.inode)  # mounted anew
    assert output.drain.step() == 0
    assert output.drained() == {"d/during": "2"}
    assert not output.drain.problems
    assert "is back" in caplog.text


def test_a_target_that_was_removed_is_made_again(output):
    (output.tree / "a").write_text("1")
    assert output.drain.step() == 0
    shutil.rmtree(output.target)
    (output.tree / "b").write_text("2")
    assert output.drain.step() == 0
    assert output.drained() == {"b": "2"}


def test_a_drain_that_is_started_again_knows_its_target(output, tmp_path, monkeypatch):
    (output.tree / "a").write_text("1")
    mounts = Mounts(monkeypatch)
    mounts.elsewhere[output.target] = (77, 5)
    again = Drain(output.folder, output.target, output.room)
    again.begin()
    assert again.step() == 1
    assert output.drained() == {}
    mounts.elsewhere.clear()
    assert again.step() == 0
    assert output.drained() == {"a": "1"}


def test_what_killed_drains_left_in_the_target_goes_and_what_others_write_stays(tmp_path):
    (tmp_path / "shared" / "d").mkdir(parents=True)
    stale, live = (tmp_path / "shared" / "d" / f"{HIDDEN}{name}" for name in "ab")
    stale.write_text("half")
    with live.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        output = Output(tmp_path)
        assert live.exists()
    assert not stale.exists()
    assert [path.name for path in output.tree.rglob("*")] == ["d"]
