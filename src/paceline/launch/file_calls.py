"""Has each process of a run count its calls for files, by a library that is preloaded into it.

The hooks stand before the C library's functions::

    open, stat, readdir, read, write, fsync, mmap, close
          |
    native/io: a row for each file, shared with processes that are forked
          |
    the recorder of the process: an event of each long call, the rows at its end
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import Missing
from paceline.native import io_library, preloaded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FOLDER = "_PACELINE_IO"  # not PACELINE_: it is no setting of the user's; native/io/files.c reads it


def file_call_variables(run: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have processes count their calls for files.

    Args:
        run: the run's folder, whose own files do not count.
        environ: what the processes get otherwise: other libraries to preload come behind, so that
            what they do for a call is part of it.

    Raises:
        Missing: the library was not installed with Paceline.
    """
    library = io_library()
    if not library.is_file():
        raise Missing(
            "the library that counts calls for files is missing",
            where=str(library),
            why="it is built with Paceline on Linux with glibc",
            fix="There, install Paceline again: pip install .; or leave out --record-io",
        )
    return {**preloaded(library, environ), FOLDER: str(run.absolute())}
