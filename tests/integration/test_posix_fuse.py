"""``paceline store mount``: a pack as a file system of the kernel, from its start to its end."""

import contextlib
import errno
import json
import mmap
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.mounts import DEADLINE_S, Twins, kernel_mount, needs_fuse, twins_by

from paceline.core.errors import Missing
from paceline.store.posix import fuse, fusermount
from paceline.store.posix.mount_table import find_mount

# Reads a file and a folder in each way that a program without the C library's loader has.
STATIC = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>
int main(int count, char** words) {
  (void)count;
  struct stat status;
  const int file = open(words[1], O_RDONLY);
  if (file < 0 || fstat(file, &status) != 0) return 2;
  const char* view = mmap(NULL, status.st_size, PROT_READ, MAP_SHARED, file, 0);
  char part[100];
  if (view == MAP_FAILED || pread(file, part, 100, 5000) != 100) return 3;
  if (memcmp(view + 5000, part, 100) != 0) return 4;
  int entries = 0;
  DIR* folder = opendir(words[2]);
  if (folder == NULL) return 5;
  while (readdir(folder) != NULL) ++entries;
  fprintf(stderr, "%d\n", entries);
  while (sendfile(1, file, NULL, 1 << 20) > 0) {
  }
  return lseek(file, 0, SEEK_CUR) == status.st_size ? 7 : 6;
}
"""

# The command as another user, who may not read Python's files: they are imported before.
AS_USER = """
import os, sys
from paceline.cli.app import main
from paceline.cli import store
from paceline.store.posix import fuse, serving
from paceline.store.posix.mounts import parse_mounts
parse_mounts(word for word in sys.argv if ":" in word)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
main()
"""

pytestmark = needs_fuse


def write_tree(data):
    (data / "cat" / "deep").mkdir(parents=True)
    (data / "cat" / "1.txt").write_text("meow\n")
    (data / "cat" / "deep" / "big").write_bytes(random.Random(1).randbytes(3_000_000))
    (data / "cat" / "text").write_text("".join(f"{i}\n" for i in range(400_000)))
    for i in range(300):
        (data / f"{i}.bin").write_bytes(random.Random(i).randbytes(i * 97))


@pytest.fixture(scope="module", params=["kernel-plain", "kernel-compressed"])
def twins(tmp_path_factory, request):
    top = tmp_path_factory.mktemp(f"fuse-{request.param}")
    with twins_by(request.param, top, lambda made: write_tree(made.plain / "data")) as found:
        yield found


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """A pack that each test mounts itself."""
    made = Twins(tmp_path_factory.mktemp("fuse"))
    write_tree(made.plain / "data")
    made.make_pack()
    return made.top / "pack"


def store(*words, **options):
    defaults = {"capture_output": True, "text": True, "timeout": DEADLINE_S}
    command = [sys.executable, "-m", "paceline", "store", *map(str, words)]
    return subprocess.run(command, **(defaults | options))


def await_line(process, text):
    """Wait for a line on stderr that has this text."""
    while select.select([process.stderr], [], [], DEADLINE_S)[0]:
        line = process.stderr.readline()
        if text in line:
            return
        assert line, "the process has ended"
    raise AssertionError(f"no line with {text!r}")


def test_tar_and_find_see_the_tree(twins):
    for line in (
        "tar cf - --sort=name data | md5sum",
        "find data -type f -printf '%p %s %m\\n' | sort",
    ):
        assert twins.shell(line, is_mounted=True) == twins.shell(line, is_mounted=False)
    assert twins.shell("diff -r data ../plain/data", is_mounted=True) == (0, b"", b"")


def test_a_static_program_reads_it(twins, tmp_path):
    (tmp_path / "static.c").write_text(STATIC)
    program = tmp_path / "static"
    subprocess.run(["cc", "-static", "-O1", "-o", program, tmp_path / "static.c"], check=True)
    place = twins.mount / "cat" / "text"
    done = subprocess.run([program, place, twins.mount], capture_output=True, timeout=DEADLINE_S)
    assert done.returncode == 7
    assert done.stdout == (twins.plain / "data" / "cat" / "text").read_bytes()
    assert int(done.stderr) == 300 + 3  # "cat", ".", ".."
    # For as long as it runs, and with its exit code.
    point = tmp_path / "point"
    point.mkdir()
    words = ("mount", f"{twins.top / 'pack'}:{point}", "--", program, point / "cat" / "text", point)
    assert store(*words, text=False).returncode == 7
    assert find_mount(str(point)) is None


def test_mmap_and_sendfile(twins):
    plain = (twins.plain / "data" / "cat" / "deep" / "big").read_bytes()
    with (twins.mount / "cat" / "deep" / "big").open("rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            assert view[1_234_567:1_300_000] == plain[1_234_567:1_300_000]
        reader, writer = os.pipe()
        assert os.sendfile(writer, file.fileno(), 2_999_000, 5000) == 1000
        assert os.read(reader, 5000) == plain[-1000:]
        os.close(reader)
        os.close(writer)
        with pytest.raises(OSError, match="Read-only") as caught:
            os.open(file.name, os.O_RDWR)
        assert caught.value.errno == errno.EROFS


def test_readers_at_the_same_time_get_right_bytes(twins, tmp_path):
    point = tmp_path / "cold"  # nothing of it is in the kernel's cache
    point.mkdir()
    names = [path.relative_to(twins.plain / "data") for path in (twins.plain / "data").rglob("*")]
    names = [name for name in names if (twins.plain / "data" / name).is_file()]

    def read_all(seed):
        order = random.Random(seed)
        for name in order.sample(names, len(names)):
            plain = (twins.plain / "data" / name).read_bytes()
            with (point / name).open("rb", buffering=0) as file:
                begin = order.randrange(len(plain) + 1)
                assert os.pread(file.fileno(), 70_000, begin) == plain[begin : begin + 70_000], name
            assert (point / name).read_bytes() == plain, name
        return len(names)

    mounted = kernel_mount(twins.top / "pack", point, "--threads", "3")
    with mounted, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read_all, range(8))) == [len(names)] * 8


def test_a_damaged_sample_is_an_error_that_names_it(tmp_path):
    broken = Twins(tmp_path, by_kernel=True)
    (broken.plain / "data").mkdir(parents=True)
    for name in ("good", "bad"):
        (broken.plain / "data" / name).write_bytes(name.encode() * 5000)
    broken.make_pack()
    broken.mount.mkdir()
    shard = tmp_path / "pack" / "shard-00000.pace"
    body = bytearray(shard.read_bytes())
    body[body.index(b"badbad") + 1000] ^= 1
    shard.write_bytes(body)
    with kernel_mount(tmp_path / "pack", broken.mount) as process:
        code, out, complaint = broken.shell("cat data/good | wc -c; cat data/bad", is_mounted=True)
        assert (code, out) == (1, b"20000\n")
        assert b"Input/output error" in complaint
        await_line(process, "bad: checksum")


def test_a_killed_server_is_an_error_and_is_cleaned_up(pack, tmp_path):
    point = tmp_path / "point"
    point.mkdir()
    with kernel_mount(pack, point) as process:
        known = (point / "9.bin").read_bytes()
        process.kill()
        process.wait(timeout=DEADLINE_S)
        assert (point / "9.bin").read_bytes() == known  # by the kernel alone
        with pytest.raises(OSError, match="not connected") as caught:
            (point / "7.bin").read_bytes()
        assert caught.value.errno == errno.ENOTCONN
        # The next mount takes it away.
        done = store("mount", f"{pack}:{point}", "--", "cat", point / "cat" / "1.txt")
        assert (done.returncode, done.stdout) == (0, "meow\n")
        assert "whose server was killed" in done.stderr
    assert find_mount(str(point)) is None
    with kernel_mount(pack, point) as process:
        process.kill()
        process.wait(timeout=DEADLINE_S)
        done = store("unmount", point, "--json")
        assert json.loads(done.stdout)["pack"] == str(pack)
    assert find_mount(str(point)) is None


def test_unmount_ends_the_server(pack, tmp_path):
    point = tmp_path / "a folder"  # a blank is escaped in the system's table
    point.mkdir()
    (tmp_path / "link").symlink_to(point)
    with kernel_mount(pack, tmp_path / "link") as process:
        assert "mounted there already" in store("mount", f"{pack}:{point}").stderr
        with (point / "cat" / "1.txt").open() as file:
            busy = store("unmount", point)
            assert busy.returncode == 1
            assert "busy" in busy.stderr
            assert "--lazy" in busy.stderr
            assert "would" in store("unmount", point, "--dry-run").stdout
            assert store("unmount", point, "--lazy").returncode == 0
            assert not list(point.iterdir())
            assert file.read() == "meow\n"  # for who has it open
            assert process.poll() is None
        assert process.wait(timeout=DEADLINE_S) == 0
    assert "no mount" in store("unmount", point).stderr


def test_a_signal_waits_for_open_files(pack, tmp_path):
    with kernel_mount(pack, tmp_path) as process, (tmp_path / "299.bin").open("rb") as file:
        process.terminate()
        await_line(process, "its files are open")
        assert not list(tmp_path.iterdir())
        assert len(file.read()) == 299 * 97
        file.close()
        assert process.wait(timeout=DEADLINE_S) == 0


def test_a_second_signal_does_not_wait(pack, tmp_path):
    with kernel_mount(pack, tmp_path) as process:
        file = os.open(tmp_path / "299.bin", os.O_RDONLY)
        process.send_signal(signal.SIGINT)
        await_line(process, "its files are open")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_S) == 1
        with pytest.raises(OSError, match="not connected"):
            os.read(file, 10)
        with contextlib.suppress(OSError):
            os.close(file)
    assert find_mount(str(tmp_path)) is None


def test_signals_reach_the_program(pack, tmp_path):
    line = "trap 'exit 9' TERM; echo up; while :; do read -t 1 _ <> <(:); done"
    program = ["bash", "-c", line]
    command = [sys.executable, "-m", "paceline", "store", "mount", f"{pack}:{tmp_path}", "--"]
    process = subprocess.Popen([*command, *program], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.wait(timeout=DEADLINE_S) == 9
    assert find_mount(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("point", "words", "code", "said"),
    [
        ("nowhere", (), 2, "mkdir -p"),
        ("full", (), 2, "not empty"),
        ("full/file", (), 2, "a file is where"),
        ("empty", ("--", "no-such-program"), 2, "no program"),
        ("empty", ("--", "/etc/passwd"), 2, "cannot be started"),
        ("empty", ("--json", "--", "true"), 2, "stdout is the program's"),
    ],
)
def test_what_cannot_be_is_refused(pack, tmp_path, point, words, code, said):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "empty").mkdir()
    done = store("mount", f"{pack}:{tmp_path / point}", *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr + done.stdout
    assert find_mount(str(tmp_path / "empty")) is None


def test_a_damaged_pack_is_refused(pack, tmp_path):
    shutil.copytree(pack, tmp_path / "pack")
    (tmp_path / "pack" / "shard-00000.pace").unlink()
    (tmp_path / "point").mkdir()
    done = store("mount", f"{tmp_path / 'pack'}:{tmp_path / 'point'}", "--", "true")
    assert done.returncode == 4
    assert "shard-00000.pace" in done.stderr


def test_dry_run_mounts_nothing(pack, tmp_path):
    shown = json.loads(store("mount", f"{pack}:{tmp_path}", "--dry-run", "--json").stdout)
    assert shown == {
        "version": 1,
        "pack": str(pack),
        "point": str(tmp_path),
        "threads": fuse.THREADS,
        "dry_run": True,
    }


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(fuse, "_DEVICE", tmp_path / "no-fuse")
    with pytest.raises(Missing, match="no FUSE"):
        fuse.check_system()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Missing, match="fusermount3 is not installed"):
        fusermount.find_fusermount()


@pytest.mark.skipif(shutil.which("fusermount3") is None, reason="no fusermount3 (package fuse3)")
@pytest.mark.skipif(os.geteuid() != 0, reason="no root: the tests above were without it")
def test_a_user_mounts_by_fusermount(pack):
    with tempfile.TemporaryDirectory() as folder:  # that the user can reach
        top = Path(folder)
        top.chmod(0o755)
        shutil.copytree(pack, top / "pack")
        (top / "point").mkdir()
        os.chown(top / "point", 65534, 65534)
        # A device that users may open, as on most systems: for this test only.
        os.mknod(top / "fuse", 0o666 | stat.S_IFCHR, Path("/dev/fuse").stat().st_rdev)
        (top / "fuse").chmod(0o666)
        line = (
            'mount --bind "$0" /dev/fuse && "$@"; code=$?; '
            f"grep {top}/point /proc/self/mountinfo; exit $code"
        )
        inside = ["unshare", "-m", "sh", "-c", line, top / "fuse", sys.executable, "-c", AS_USER]
        mount = ["store", "mount", f"{top / 'pack'}:{top / 'point'}", "--"]
        words = [*inside, *mount, "cat", top / "point" / "cat" / "1.txt"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S)
        assert (done.returncode, done.stdout) == (0, "meow\n"), done.stderr
