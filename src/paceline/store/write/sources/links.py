"""The bytes that the links of a tar archive stand for.

A hard link is a second name of a file of the same archive and has no body; a symbolic link has the
path of a file, from its own folder. The target may stand before or behind the link, and may be a
link itself. So on its first link an archive is read twice more, to its end: once for all links, and
once for the bodies that they lead to. An archive without links costs nothing.
"""

from __future__ import annotations

import os
import posixpath
import tempfile
from typing import IO, TYPE_CHECKING, Self

from paceline.core.errors import UsageError
from paceline.store.write.sources.source import BATCH_BYTES
from paceline.store.write.sources.tar import (
    BLOCK_BYTES,
    open_archive,
    read_exactly,
    read_headers,
    skip,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.store.write.sources.tar import TarHeader

FILES = b"0\0" + b"7"
HARD_LINK = b"1"
SYMBOLIC_LINK = b"2"
LINKS = HARD_LINK + SYMBOLIC_LINK
_HELD_BYTES = 8 * BATCH_BYTES  # of all bodies, in memory; more wait in a file


class Links:
    """What the links of one archive lead to; a context, because it may hold a temporary file.

    Args:
        path: of the archive.
        normalised: returns a member's name as the pack has it.
        kinds: `HARD_LINK`, or `LINKS` to follow symbolic links, too.
    """

    def __init__(self, path: str, normalised: Callable[[bytes], bytes], kinds: bytes) -> None:
        self._kinds = kinds
        self._path = path
        self._normalised = normalised
        self._targets: dict[bytes, bytes] = {}  # of each link, by name
        self._bodies: dict[bytes, tuple[int, int]] = {}  # begin and length in `_held`, by name
        self._places: dict[bytes, tuple[int, int]] = {}  # of each file, by name
        self._held: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.close()

    def open(self, name: bytes) -> tuple[IO[bytes], int]:
        """Return a file that stands where the bytes of the link `name` begin, and their number.

        Raises:
            UsageError: the link leads to no file of the archive.
            StorageError: the archive is damaged, or cannot be read.
        """
        if self._held is None:
            self._held = tempfile.SpooledTemporaryFile(_HELD_BYTES)  # noqa: SIM115  # `__exit__` closes it
            self._targets = {
                self._normalised(header.name): self._target(header)
                for _, header in self._headers()
                if header.kind in self._kinds
            }
            self._hold_bodies(self._held)
        target = self._file_of(name)
        if target not in self._bodies:
            raise self._leads_to_no_file(name, target)
        begin, length = self._bodies[target]
        self._held.seek(begin)
        return self._held, length

    def locate(self, name: bytes) -> tuple[int, int]:
        """Return where in its archive the bytes of the link `name` begin, and their number.

        The archive is not compressed. Errors are those of `open`.
        """
        if not self._places:
            for file, header in self._headers():
                if header.kind in self._kinds:
                    self._targets[self._normalised(header.name)] = self._target(header)
                elif header.kind in FILES:
                    place = (file.tell(), header.length)
                    self._places.setdefault(self._normalised(header.name), place)
        target = self._file_of(name)
        if target not in self._places:
            raise self._leads_to_no_file(name, target)
        return self._places[target]

    def _target(self, header: TarHeader) -> bytes:
        if header.kind == HARD_LINK:
            return self._normalised(header.target)
        folder = self._normalised(header.name).rpartition(b"/")[0]
        return posixpath.normpath(posixpath.join(folder, header.target))

    def _file_of(self, name: bytes) -> bytes:
        """Return the first name on the way from a link that is not a link itself."""
        passed = set()
        while name in self._targets:
            if name in passed:
                raise self._no_file(name, "it leads back to itself")
            passed.add(name)
            name = self._targets[name]
        return name

    def _hold_bodies(self, held: IO[bytes]) -> None:
        wanted = {target for target in self._targets.values() if target not in self._targets}
        end = 0
        for file, header in self._headers():
            name = self._normalised(header.name)
            if header.kind not in FILES or name not in wanted or name in self._bodies:
                continue
            self._bodies[name] = (end, header.length)
            end += header.length
            left = header.length
            while left:
                chunk = read_exactly(file, min(left, BATCH_BYTES), self._path)
                held.write(chunk)
                left -= len(chunk)

    def _headers(self) -> Iterator[tuple[IO[bytes], TarHeader]]:
        """Yield each header, and the file, from which the body may then be read to its end."""
        with open_archive(self._path) as file:
            for header in read_headers(file, self._path):
                begin = file.tell()
                yield file, header
                padded = header.length + -header.length % BLOCK_BYTES
                skip(file, padded - (file.tell() - begin))

    def _leads_to_no_file(self, name: bytes, target: bytes) -> UsageError:
        return self._no_file(name, f"it leads to {os.fsdecode(target)[:200]!a}, which is no file")

    def _no_file(self, name: bytes, why: str) -> UsageError:
        return UsageError(
            "a link leads to no file of the archive",
            where=f"{self._path}: {os.fsdecode(name)[:200]!a}",
            why=why,
            fix="Make the archive again with that file in it, or with what links lead to "
            "(tar --hard-dereference -h)",
        )
