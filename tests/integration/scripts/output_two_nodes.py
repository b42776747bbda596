"""Two programs on two nodes: what one does, the other finds."""

import os
import signal
import sys
from pathlib import Path

top, flags = Path(sys.argv[1]), Path(sys.argv[2])
rank = int(os.environ["RANK"])
MEGABYTE = b"x" * 1_000_000


def reach(name):
    (flags / name).touch()


def wait_for(name):
    for _ in range(3000):
        if (flags / name).exists():
            return
        signal.sigtimedwait([], 0.02)
    raise SystemExit(f"rank {rank} waited for {name!r}")


def is_refused(how):
    try:
        open(top / "a", how).close()
    except FileExistsError:
        return True
    return False


def first():
    file = open(top / "a", "wb")
    file.write(MEGABYTE)
    reach("written")
    wait_for("refused")
    file.close()
    os.chmod(top / "a", 0o640)
    os.utime(top / "a", (3, 4))
    reach("closed")
    wait_for("read")
    os.makedirs(top / "d" / "e")
    os.rename(top / "a", top / "d" / "e" / "b")
    reach("renamed")
    wait_for("renamed back")
    assert os.listdir(top) == ["z"]
    assert (top / "z/e/c").read_text() == "version 9"
    assert (top / "z/e/b").stat().st_size == len(MEGABYTE) + 1
    assert (top / "z/e/b").read_bytes() == MEGABYTE + b"y"
    with open(top / "z/e/b", "rb") as file:  # stays readable
        reach("open")
        wait_for("removed")
        assert file.read() == MEGABYTE + b"y"
    assert os.listdir(top / "z/e") == ["c"]


def second():
    wait_for("written")
    assert not (top / "a").exists()
    assert is_refused("xb")
    assert is_refused("wb")
    reach("refused")
    wait_for("closed")
    found = os.stat(top / "a")
    assert (found.st_size, found.st_mode & 0o777, found.st_mtime) == (len(MEGABYTE), 0o640, 4)
    assert (top / "a").read_bytes() == MEGABYTE
    with open(top / "a") as file:
        opened = os.fstat(file.fileno())
        assert (opened.st_ino, opened.st_mode, opened.st_mtime) == (found.st_ino, found.st_mode, 4)
    assert is_refused("x")
    reach("read")
    wait_for("renamed")
    assert sorted(str(path.relative_to(top)) for path in top.rglob("*")) == ["d", "d/e", "d/e/b"]
    with open(top / "d/e/b", "ab") as file:
        file.write(b"y")
    for number in range(10):
        (top / "d/e/c").write_text(f"version {number}")
    os.rename(top / "d", top / "z")
    reach("renamed back")
    wait_for("open")
    os.unlink(top / "z/e/b")
    reach("removed")


(second if rank else first)()
print("as expected")
