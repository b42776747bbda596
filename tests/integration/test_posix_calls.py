"""Calls of the C library that Python makes not, or not so: each finds what it finds in the tree.

Some of what they look for does harm far from where it was done: a file of a mount that reads
from a number which the program closed or gave away, or a child of vfork
that moves its parent's working folder.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from support.mounts import Twins

SOURCE = Path(__file__).parent / "scripts" / "posix_calls.c"
PROBES = re.findall(r"PROBE\((\w+)\),", SOURCE.read_text())

pytestmark = pytest.mark.skipif(
    not os.confstr("CS_GNU_LIBC_VERSION"), reason="no glibc here: the library is for it"
)


def fill(data):
    (data / "a").mkdir(parents=True)
    (data / "a" / "t.txt").write_text("hello\nworld\n")
    (data / "big").write_bytes(bytes(i % 251 for i in range(100_000)))
    (data / "run.sh").write_text("#!/bin/sh\nexit 7\n")
    (data / "run.sh").chmod(0o755)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "posix_calls"
    subprocess.run(["cc", "-O1", "-w", "-pthread", "-o", path, SOURCE], check=True)
    return path


@pytest.fixture(scope="module", params=["plain", "compressed"])
def twins(tmp_path_factory, request):
    found = Twins(tmp_path_factory.mktemp(f"calls-{request.param}"))
    fill(found.plain / "data")
    found.make_pack(**({"codec": "zstd"} if request.param == "compressed" else {}))
    return found


@pytest.mark.parametrize("name", PROBES)
def test_probe(twins, program, name):
    lines = []
    for is_mounted in (False, True):
        done = twins.run([program, "data", name], is_mounted=is_mounted)
        where = twins.mounted if is_mounted else twins.plain
        lines.append(done.stdout.replace(os.fsencode(where), b"TOP").decode())
    assert lines[0].startswith(f"{name}:")
    assert "did not end" not in lines[0]
    assert lines[1] == lines[0]


def test_what_would_change_a_mount_is_refused(twins, tmp_path):
    source = tmp_path / "changes.c"
    source.write_text(CHANGES)
    program = tmp_path / "changes"
    subprocess.run(["cc", "-w", "-o", program, source], check=True)
    done = twins.run([program, "data"], is_mounted=True)
    assert done.stdout.decode().split() == ["EROFS"] * 7 + ["EBADF"], done


CHANGES = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
static void tell(int result) { puts(result == 0 ? "done" : strerrorname_np(errno)); }
int main(int count, char** words) {
  int folder = open(words[1], O_RDONLY | O_DIRECTORY);
  int file = openat(folder, "big", O_RDONLY);
  tell(mkfifoat(folder, "new", 0600));
  tell(mkdirat(folder, "new", 0700));
  tell(futimesat(folder, "big", NULL));
  tell(fsetxattr(file, "user.x", "y", 1, 0));
  tell(fremovexattr(file, "user.x"));
  tell(fchmod(file, 0600));
  tell(unlinkat(folder, "big", 0));
  tell(write(file, "x", 1) == 1 ? 0 : -1);
  return 0;
}
"""


def test_a_program_with_an_environment_of_its_own_is_still_left_out(twins):
    line = "env -i cat data/a/t.txt; env -i head -n 1 data/a/t.txt"
    environ = {**os.environ, **twins.variables(never=["cat"])}
    done = twins.run(["bash", "-c", line], is_mounted=True, env=environ)
    assert done.stdout == b"hello\n"


def test_a_program_with_io_uring_is_named_once(twins, tmp_path):
    # A library of that name, without the kernel's part of it.
    (tmp_path / "uring.c").write_text(
        "int io_uring_queue_init(unsigned n, void* ring, unsigned flags) { return n; }"
    )
    (tmp_path / "uses.c").write_text(
        "int io_uring_queue_init(unsigned, void*, unsigned);"
        "int main() { return io_uring_queue_init(3, 0, 0) + io_uring_queue_init(4, 0, 0); }"
    )
    library = tmp_path / "liburing.so"
    program = tmp_path / "uses"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "uring.c"], check=True)
    subprocess.run(["cc", "-o", program, tmp_path / "uses.c", library], check=True)
    done = twins.run([program], is_mounted=True)
    assert done.returncode == 7
    assert done.stderr.count(b"uses uses io_uring") == 1
    assert b"paceline store mount" in done.stderr
    assert twins.run([program], is_mounted=False).stderr == b""
