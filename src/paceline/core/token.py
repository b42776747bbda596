"""The secret by which the processes of a user know each other.

Servers answer those who prove that they have it (`core.handshake`). By default it is the user's, a
file of mode 0600 among the user's settings, made at the first use::

    ~/.config/paceline/token       (XDG base directories: $XDG_CONFIG_HOME/paceline/token)

Where nodes share no home, or several users a server, a token file is given instead.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.config import environment
from paceline.core.errors import UsageError, reason

if TYPE_CHECKING:
    from collections.abc import Mapping

_BYTES = 32
_MOST_BYTES = 4096
_GIVE = "Give a token file that only you can read, the same everywhere: --token-file"


def token_path(environ: Mapping[str, str] | None = None) -> Path:
    """Return the file of the user's token; it may not exist."""
    environ = environment() if environ is None else environ
    base = environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "paceline" / "token"


def find_token(given: str | os.PathLike[str] | None = None) -> str:
    """Return the token in the file that was given, or else the user's, made at its first use.

    Raises:
        UsageError: the file cannot be read or made, is empty, or others can read it.
    """
    if given:
        return _read(Path(given))
    path = token_path()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return _read(path)
    try:
        _make(path)
    except (OSError, RuntimeError) as problem:
        raise UsageError(
            "the token of this user cannot be made",
            where=str(path),
            why=reason(problem) if isinstance(problem, OSError) else str(problem),
            fix=_GIVE + ", or set XDG_CONFIG_HOME to a folder that you can write",
        ) from None
    return _read(path)


def _read(path: Path) -> str:
    """Return the content of a token file.

    Raises:
        FileNotFoundError, NotADirectoryError: the user's token is not made yet.
        UsageError: see `find_token`.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MOST_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        if path == token_path():
            raise
        raise UsageError("there is no such token file", where=str(path), fix=_GIVE) from None
    except OSError as problem:
        raise UsageError(
            "a token file cannot be read", where=str(path), why=reason(problem), fix=_GIVE
        ) from None
    if mode & 0o007:
        raise UsageError(
            "other users can read a token file",
            where=str(path),
            why=f"its mode is {mode:04o}",
            fix=f"chmod 600 {path}; if others had access, write a new token, too",
        )
    try:
        token = content.decode().strip()
        why = "" if token else "it is empty"
    except UnicodeDecodeError:
        token, why = "", "it is no text"
    if len(content) > _MOST_BYTES:
        why = f"it is longer than {_MOST_BYTES:,} bytes"
    if why:
        raise UsageError(
            "a token file has no token",
            where=str(path),
            why=why,
            fix="Write a random one: (umask 077; openssl rand -hex 32 > FILE)",
        )
    return token


def _make(path: Path) -> None:
    """Write a new token, unless another process is first; it appears complete."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = path.with_name(f"token.{os.getpid()}.{secrets.token_hex(4)}")
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w", encoding="ascii") as writer:
            os.fchmod(file, 0o600)
            writer.write(secrets.token_hex(_BYTES) + "\n")
            writer.flush()
            os.fsync(file)
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(partial, path)
    finally:
        partial.unlink()
