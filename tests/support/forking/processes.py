"""Processes of a run, started or forked, by a variable of theirs."""

from __future__ import annotations

import ctypes
from pathlib import Path

MARK = "TEST_RUN_MARK"
_NAME_BYTES = 15  # that the kernel keeps of a thread's name
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


def set_mark(mark: str) -> None:
    """Name this process and its forks, so that `marked` finds them."""
    _libc.prctl(_PR_SET_NAME, mark[:_NAME_BYTES].encode())


def marked(mark: str) -> list[int]:
    """Return the living processes whose variable `MARK` is this."""
    variable = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and _is_marked(folder, mark, variable):
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def _is_marked(folder: Path, mark: str, variable: bytes) -> bool:
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    if state in "ZX":
        return False
    name = (folder / "comm").read_text().strip()
    return name == mark[:_NAME_BYTES] or variable in (folder / "environ").read_bytes()
