"""A tree of files, a pack of it, and programs that see the pack where the tree is not."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from paceline.store import Folder, PackOptions, pack
from paceline.store.posix.mounts import parse_mounts, variables

DEADLINE_S = 120


@dataclass(frozen=True)
class Twins:
    """``plain/data``, a folder of files, and ``mounted/data``, at which a pack of it is mounted.

    Nothing is at ``mounted/data``: what a mount does not catch fails, and finds no file by chance.
    """

    top: Path

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
        environ |= self.variables() if is_mounted else {}
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
