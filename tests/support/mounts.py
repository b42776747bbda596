"""A tree of files, a pack of it, and programs that see the pack where the tree is not."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.store import Folder, PackOptions, pack
from paceline.store.posix.mounts import parse_mounts, variables

DEADLINE_S = 120


@dataclass(frozen=True)
class Twins:
    """``plain/data``, a folder of files, and ``mounted/data``, at which a pack of it is mounted.

    Nothing else is at ``mounted/data``: what a mount does not catch fails, and finds no file by
    chance. Programs see it by the preloaded library, or, with `by_kernel`, by FUSE.
    """

    top: Path
    by_kernel: bool = False

    @property
    def plain(self) -> Path:
        return self.top / "plain"

    @property
    def mounted(self) -> Path:
        return self.top / "mounted"

    @property
    def mount(self) -> Path:
        return self.mounted / "data"

    def make_pack(self, **options) -> None:
        pack(Folder(self.plain / "data"), self.top / "pack", options=PackOptions(**options))
        self.mounted.mkdir()
        # A pack keeps the times of files only: its folders have that of its index.
        time_ns = (self.top / "pack" / "index.pace").stat().st_mtime_ns
        for folder, _, _ in os.walk(self.plain / "data"):
            os.utime(folder, ns=(time_ns, time_ns))

    def variables(self, **programs) -> dict[str, str]:
        mounts = parse_mounts([f"{self.top / 'pack'}:{self.mount}"])
        return variables(mounts, os.environ, **programs)

    def run(self, command, *, is_mounted, **options):
        """Run `command` beside ``data``, of the files or of the pack."""
        environ = {**os.environ, "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        environ |= self.variables() if is_mounted and not self.by_kernel else {}
        defaults = {"capture_output": True, "timeout": DEADLINE_S, "env": environ}
        where = self.mounted if is_mounted else self.plain
        return subprocess.run(command, cwd=where, **(defaults | options))

    def shell(self, line, *, is_mounted):
        """Return exit code, stdout and stderr of a line for bash; the folder is called TOP."""
        done = self.run(["bash", "-c", line], is_mounted=is_mounted)
        where = os.fsencode(self.mounted if is_mounted else self.plain)
        return (
            done.returncode,
            done.stdout.replace(where, b"TOP"),
            done.stderr.replace(where, b"TOP"),
        )


WAYS = ["library-plain", "library-compressed", "kernel-plain", "kernel-compressed"]
has_fuse = Path("/dev/fuse").exists()
needs_fuse = pytest.mark.skipif(not has_fuse, reason="no /dev/fuse here: the kernel has no FUSE")


@contextlib.contextmanager
def twins_by(way, top, fill):
    """The twins of a folder that `fill` makes, mounted in one of the ``WAYS``."""
    by, kind = way.split("-")
    if by == "kernel" and not has_fuse:
        pytest.skip("no /dev/fuse here: the kernel has no FUSE")
    twins = Twins(top, by_kernel=by == "kernel")
    fill(twins)
    twins.make_pack(**({"codec": "zstd"} if kind == "compressed" else {}))
    with contextlib.ExitStack() as stack:
        if twins.by_kernel:
            twins.mount.mkdir()
            stack.enter_context(kernel_mount(twins.top / "pack", twins.mount))
        yield twins


@contextlib.contextmanager
def kernel_mount(pack, point, *words):
    """A process of ``paceline store mount`` that has mounted a pack; nothing is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "store", "mount", f"{pack}:{point}", "--json", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready, _, _ = select.select([process.stdout], [], [], DEADLINE_S)
        line = process.stdout.readline() if ready else ""
        assert line, process.communicate(timeout=DEADLINE_S)
        assert "error" not in json.loads(line), line
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=DEADLINE_S)
        except ValueError:  # a test has read its output
            process.wait(timeout=DEADLINE_S)
        finally:
            process.kill()
            subprocess.run(["umount", "-l", point], capture_output=True, check=False)
