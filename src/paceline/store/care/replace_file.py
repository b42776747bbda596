"""Replaces a file of a pack: written beside it, made durable, renamed."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from paceline.core.files import sync_folder
from paceline.store.format.layout import PARTIAL_SUFFIX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def replace_file(path: Path, fill: Callable[[int], bool]) -> bool:
    """Replace a file by a new one; return whether it was put in place.

    Args:
        path: path of the file, which need not exist.
        fill: writes to a descriptor and says whether the content is worth keeping.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(partial, flags, 0o644)
        try:
            if not fill(descriptor):
                return False
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(partial, path)  # noqa: PTH104  # one call, where faults are injected
        sync_folder(path.parent)
    finally:  # after the rename there is nothing left
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return True
