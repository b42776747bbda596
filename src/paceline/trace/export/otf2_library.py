"""OTF2's C library, as far as archives and definitions go; events are written by `native`.

The library comes with the package `otf2`, which has it linked into its extension module, or with
the system (Debian: libopen-trace-format2-10). It is loaded when an archive is
written, by ctypes, so that neither is needed to install Paceline. The interface is that of OTF2 3.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from ctypes import c_bool, c_char_p, c_int, c_int64, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Self

import numpy as np

from paceline.core.errors import Missing, StorageError

UNDEFINED = 0xFFFFFFFF  # a reference of 32 bits to nothing; the root of a collective without one
_NEEDED = "OTF2_EvtWriter_NonBlockingCollectiveRequest"  # since 3.0, with other new arguments
_SYSTEM_NAMES = ("libotf2.so.10", "libopen-trace-format2.so.10")  # OTF2's own name, Debian's
_WRITE, _POSIX, _NO_COMPRESSION = 0, 1, 1  # mode of files, substrate, compression
_EVENT_CHUNK_BYTES, _DEFINITION_CHUNK_BYTES = 1 << 20, 4 << 20
_FLUSH = 1

_PRE_FLUSH = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint8, c_uint64, c_void_p, c_bool)
# User data, file, line, function, error, format, arguments (va_list).
_ON_ERROR = ctypes.CFUNCTYPE(
    c_int, c_void_p, c_char_p, c_uint64, c_char_p, c_int, c_char_p, c_void_p
)
_POST_FLUSH = ctypes.CFUNCTYPE(c_uint64, c_void_p, c_uint8, c_uint64)


class _FlushCallbacks(ctypes.Structure):
    _fields_ = (("pre_flush", _PRE_FLUSH), ("post_flush", _POST_FLUSH))


# Functions that return an error, and the types of their arguments after the handle.
_ARCHIVE = {
    "SetFlushCallbacks": (c_void_p, c_void_p),
    "SetSerialCollectiveCallbacks": (),
    "SetCreator": (c_char_p,),
    "SetDescription": (c_char_p,),
    "OpenEvtFiles": (),
    "CloseEvtFiles": (),
    "OpenDefFiles": (),
    "CloseDefFiles": (),
    "CloseEvtWriter": (c_void_p,),
    "CloseDefWriter": (c_void_p,),
    "CloseGlobalDefWriter": (c_void_p,),
    "Close": (),
}
_DEFINITIONS = {
    "ClockProperties": (c_uint64, c_uint64, c_uint64, c_uint64),
    "String": (c_uint32, c_char_p),
    "SystemTreeNode": (c_uint32, c_uint32, c_uint32, c_uint32),
    "SystemTreeNodeDomain": (c_uint32, c_uint8),
    "LocationGroup": (c_uint32, c_uint32, c_uint8, c_uint32, c_uint32),
    "Location": (c_uint64, c_uint32, c_uint8, c_uint64, c_uint32),
    "Region": (
        *(c_uint32, c_uint32, c_uint32, c_uint32),
        *(c_uint8, c_uint8, c_uint32, c_uint32, c_uint32, c_uint32),
    ),
    "MetricMember": (
        *(c_uint32, c_uint32, c_uint32),
        *(c_uint8, c_uint8, c_uint8, c_uint8, c_int64, c_uint32),
    ),
    "MetricClass": (c_uint32, c_uint8, c_void_p, c_uint8, c_uint8),
    "Group": (c_uint32, c_uint32, c_uint8, c_uint8, c_uint32, c_uint32, c_void_p),
    "Comm": (c_uint32, c_uint32, c_uint32, c_uint32, c_uint32),
    "RmaWin": (c_uint32, c_uint32, c_uint32, c_uint32),
}


def find_otf2() -> Path | str:
    """Return the path or name of OTF2's library.

    Raises:
        Missing: there is none, or it is older than 3.0.
    """
    found: Path | str | None = None
    candidates: list[Path | str] = [*_packaged(), *_SYSTEM_NAMES]
    for candidate in candidates:
        try:
            library = ctypes.CDLL(str(candidate))
        except OSError:
            continue
        if hasattr(library, _NEEDED):
            return candidate
        if hasattr(library, "OTF2_Archive_Open"):
            found = candidate
    if found is not None:
        raise Missing("OTF2 is too old", where=str(found), why="version 3 is needed", fix=_FIX)
    raise Missing("OTF2 is not installed, by which its archives are written", fix=_FIX)


_FIX = "pip install 'paceline[otf2]'"


def _packaged() -> list[Path]:
    """Return the shared libraries of the package otf2."""
    try:
        files = importlib.metadata.files("otf2") or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())) for file in files if ".so" in file.suffixes]


class Otf2Archive:
    """An archive that is written; used as a context, at whose end it is closed."""

    def __init__(self, folder: Path, name: str, where: Path) -> None:
        """Open it.

        Args:
            folder: of the archive; it is made.
            name: of its files: `name`.otf2 is what readers open.
            where: errors say that it could not be written.

        Raises:
            Missing: there is no OTF2.
            StorageError: it cannot be written.
        """
        self.library = str(find_otf2())
        self._where = where
        self._otf2 = ctypes.CDLL(self.library)
        # Some functions print an error and return none: a file that is cut would pass for complete.
        self._errors: list[int] = []
        self._on_error = _ON_ERROR(self._note_error)
        self._former = self._register(self._on_error)
        is_open = self._function("Archive_Open", *_OPEN, result=c_void_p)
        self._handle = is_open(
            *(str(folder).encode(), name.encode(), _WRITE),
            *(_EVENT_CHUNK_BYTES, _DEFINITION_CHUNK_BYTES, _POSIX, _NO_COMPRESSION),
        )
        if not self._handle:
            self._register(self._former)
            raise self._failed("the archive cannot be made", self._first_error())
        self._definitions: int | None = None
        # The library keeps the addresses of the callbacks.
        self._callbacks = _FlushCallbacks(_PRE_FLUSH(lambda *_: _FLUSH), _POST_FLUSH())
        self._archive("SetFlushCallbacks", ctypes.addressof(self._callbacks), None)
        self._archive("SetSerialCollectiveCallbacks")
        self._archive("SetCreator", b"Paceline")
        self._archive("OpenEvtFiles")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the archive: it is complete, unless there was an error.

        Raises:
            StorageError: not all could be written.
        """
        try:
            if kind is None and self._definitions is not None:
                self._archive("CloseGlobalDefWriter", self._definitions)
        finally:
            error = self._function("Archive_Close", c_void_p)(self._handle)
            self._register(self._former)
        if kind is None:
            self.check(error, "the archive's end")

    def event_writer(self, location: int) -> int:
        """Return the address of the event writer of a location."""
        return self._opened("GetEvtWriter", location)

    def close_event_writer(self, writer: int) -> None:
        """Close an event writer: what it holds is written."""
        self._archive("CloseEvtWriter", writer)

    def close_events(self, locations: list[int]) -> None:
        """End the writing of events; each location gets its (empty) file of local definitions."""
        self._archive("CloseEvtFiles")
        self._archive("OpenDefFiles")
        for location in locations:
            self._archive("CloseDefWriter", self._opened("GetDefWriter", location))
        self._archive("CloseDefFiles")

    def define(self, what: str, *fields: Any) -> None:
        """Write a global definition; a text is a string, and a list of references an array."""
        if self._definitions is None:
            get = self._function("Archive_GetGlobalDefWriter", c_void_p, result=c_void_p)
            self._definitions = get(self._handle)
            if not self._definitions:
                raise self._failed("the definitions cannot be written")
        write = self._function(f"GlobalDefWriter_Write{what}", c_void_p, *_DEFINITIONS[what])
        error = write(self._definitions, *(_as_c(field) for field in fields))
        self.check(error, f"a definition ({what})")

    def check(self, error: int, what: str) -> None:
        """Raise the error that a function of OTF2 returned, if it is one.

        Raises:
            StorageError: `what` could not be written.
        """
        if error == 0 and not self._errors:
            return
        self._errors.append(error)
        raise self._failed(f"OTF2 cannot write {what}", self._first_error())

    def _first_error(self) -> str:
        """Return OTF2's words for the first error: those after it follow from it."""
        if not self._errors:
            return ""
        describe = self._function("Error_GetDescription", c_int, result=c_char_p)
        return str(describe(self._errors[0]).decode())

    def _note_error(self, *arguments: Any) -> int:
        error = int(arguments[4])
        self._errors.append(error)
        return error

    def _register(self, callback: Any) -> Any:
        """Let OTF2 call a function at each error; return the address of the one before."""
        register = self._function("Error_RegisterCallback", c_void_p, c_void_p, result=c_void_p)
        return register(ctypes.cast(callback, c_void_p), None)

    def _failed(self, what: str, why: str = "") -> StorageError:
        fix = "Free space, or choose another folder"
        return StorageError(what, where=str(self._where), why=why, fix=fix)

    def _opened(self, what: str, location: int) -> int:
        writer = self._function(f"Archive_{what}", c_void_p, c_uint64, result=c_void_p)(
            self._handle, location
        )
        if not writer:
            raise self._failed(f"no file for location {location} can be made")
        return int(writer)

    def _archive(self, what: str, *arguments: Any) -> None:
        function = self._function(f"Archive_{what}", c_void_p, *_ARCHIVE[what])
        self.check(function(self._handle, *arguments), f"the archive ({what})")

    @functools.cache  # noqa: B019  # an archive does not live long
    def _function(self, name: str, *arguments: Any, result: Any = c_int) -> Any:
        function = getattr(self._otf2, f"OTF2_{name}")
        function.argtypes, function.restype = arguments, result
        return function


_OPEN = (c_char_p, c_char_p, c_uint8, c_uint64, c_uint64, c_uint8, c_uint8)


def _as_c(field: Any) -> Any:
    """Return a field for C: of a text its bytes up to the first zero, of an array its address."""
    if isinstance(field, str):
        return field.replace("\0", " ").encode()
    return field.ctypes.data if isinstance(field, np.ndarray) else field
