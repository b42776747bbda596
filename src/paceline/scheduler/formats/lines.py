"""Reading text files of jobs: errors that name file, line and field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import CorruptData, NotFound, StorageError


@dataclass(frozen=True, slots=True)
class Field:
    """Names the fields of a line in errors."""

    path: Path
    line: int

    def __call__(self, field: str) -> str:
        """Return where a field stands, in words."""
        return f"{self.path}, line {self.line}, {field}"


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        NotFound: there is no such file.
        StorageError: it cannot be read.
        CorruptData: it is not UTF-8.
    """
    try:
        return path.read_text()
    except FileNotFoundError:
        raise NotFound("no such file", where=str(path), fix="Check the path") from None
    except UnicodeDecodeError as problem:
        raise CorruptData(
            "not a text file", where=str(path), why=str(problem), fix="Give a trace as UTF-8 text"
        ) from None
    except OSError as problem:
        raise StorageError(
            "cannot be read", where=str(path), why=problem.strerror or "", fix="Check the file"
        ) from problem


def number(text: str, where: str, *, least: float = 0.0) -> float:
    """Return a field as a finite number of at least `least`.

    Raises:
        CorruptData: it is none; the message names `where`.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise CorruptData(
            f"'{text}' is not a number of at least {least:g}",
            where=where,
            fix="Correct the field, or remove the line",
        )
    return value
