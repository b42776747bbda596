"""Where a queue keeps its files, and where its daemon listens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

DATABASE = "queue.db"
_SOCKET = "queue.sock"
_PATH_BYTES = 107  # of sun_path in <sys/un.h>, less its final zero


@dataclass(frozen=True, kw_only=True, slots=True)
class QueuePaths:
    """Files of a queue.

    Attributes:
        folder: of all files but the socket; private to its user.
        socket: where the daemon listens.
    """

    folder: Path
    socket: Path

    @property
    def database(self) -> Path:
        """The queue's memory."""
        return self.folder / DATABASE

    @property
    def lock(self) -> Path:
        """Locked by the daemon."""
        return self.folder / "lock"

    @property
    def ended(self) -> Path:
        """Jobs that ended long ago, a line for each."""
        return self.folder / "ended.jsonl"

    def job(self, name: str) -> Path:
        """Return the folder that a job keeps over its starts."""
        return self.folder / "jobs" / name

    def attempt(self, name: str, number: int) -> Path:
        """Return the folder of an attempt."""
        return self.job(name) / str(number)


def queue_paths(folder: Path | None, environ: Mapping[str, str]) -> QueuePaths:
    """Return the files of a queue.

    Args:
        folder: of the queue; None: the user's own, in XDG_STATE_HOME, with the socket in
            XDG_RUNTIME_DIR if there is such a folder (XDG base directories).
        environ: of the process.

    Raises:
        UsageError: the path of the socket is longer than the system allows.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "") if folder is None else ""
    if folder is None:
        base = Path(environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser()
        folder = base / "paceline" / "queue"
    folder = folder.absolute()
    socket = Path(runtime).absolute() / f"paceline-{_SOCKET}" if runtime else folder / _SOCKET
    size = len(bytes(socket))
    if size > _PATH_BYTES:
        raise UsageError(
            "the path of the queue's socket is too long",
            where=str(socket),
            why=f"{size} bytes, the system allows {_PATH_BYTES}",
            fix="Give a shorter --dir",
        )
    return QueuePaths(folder=folder, socket=socket)
