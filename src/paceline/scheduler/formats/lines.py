"""Reading text files of jobs: errors that name file, line and field."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import CorruptData
from paceline.core.files import read_text
from paceline.core.record import nearest
from paceline.report.units import plural

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@dataclass(frozen=True, slots=True)
class Field:
    """Names the fields of a line in errors."""

    path: Path
    line: int

    def __call__(self, field: str) -> str:
        """Return where a field stands, in words."""
        return f"{self.path}, line {self.line}, {field}"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table with a header.

    Attributes:
        fields: text by column, without surrounding blanks; columns of the header only.
        where: names a column of this line in errors.
    """

    fields: Mapping[str, str]
    where: Field

    def number(self, column: str, *, least: float = 0.0) -> float:
        """Return a column as a finite number; errors as `number`."""
        return number(self.fields[column], self.where(column), least=least)

    def whole(self, column: str, *, least: int = 0) -> int:
        """Return a column as a whole number; errors as `whole`."""
        return whole(self.fields[column], self.where(column), least=least)


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


def whole(text: str, where: str, *, least: int = 0) -> int:
    """Return a field as a whole number of at least `least`; ``8.0`` is one.

    Raises:
        CorruptData: it is none; the message names `where`.
    """
    value = number(text, where, least=least)
    if value != int(value):
        raise CorruptData(
            f"'{text}' is not a whole number", where=where, fix="Correct the field, or the column"
        )
    return int(value)


def moment_s(text: str, where: str) -> float:
    """Return a date and time, such as ``2017-10-09 07:01:55``, as seconds of the epoch.

    Traces have local times without their zone: differences across a change to or from summer time
    are wrong by an hour.

    Raises:
        CorruptData: it is no date and time; the message names `where`.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise CorruptData(
            f"'{text}' is not a date and time",
            where=where,
            fix="Write it as 2017-10-09T07:01:55, or remove the line",
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def read_table(
    path: Path,
    *,
    required: Collection[str],
    known: Collection[str] | None = None,
    separator: str = ",",
) -> Iterator[Row]:
    """Yield the lines of a table whose first line names its columns.

    Blank lines, and lines that begin with ``#``, are no lines of the table. Where a header has no
    comma, semicolons or tabs separate its fields, as spreadsheets write them.

    Args:
        path: of the file.
        required: columns that must be there.
        known: all columns that may be there; None: any others are passed on.
        separator: of the fields.

    Raises:
        NotFound, StorageError: there is no such file, or it cannot be read.
        CorruptData: it is not text, the header lacks a column or has an unknown one, or a line has
            another number of fields than the header.
    """
    header: list[str] | None = None
    # Comments are blanked and not removed: the reader counts the lines for the errors.
    texts = read_text(path).splitlines()
    lines = ["" if text.lstrip().startswith("#") else text for text in texts]
    first = next((text for text in lines if text.strip()), "")
    reader = csv.reader(lines, delimiter=separator_of(first, separator))
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        where = Field(path, reader.line_num)
        fields = [cell.strip() for cell in cells]
        if header is None:
            header = fields
            _check_header(header, where, required, known)
        elif len(fields) != len(header):
            raise CorruptData(
                f"{len(fields)} fields, the header names {len(header)}",
                where=f"{path}, line {reader.line_num}",
                fix="Correct the line, or remove it",
            )
        else:
            yield Row(dict(zip(header, fields, strict=True)), where)
    if header is None:
        raise CorruptData("an empty file", where=str(path), fix="Give a file with a header line")


def left_out_notes(left_out: Mapping[tuple[str, str], int]) -> tuple[str, ...]:
    """Return a note for each kind of line, a noun and which of them, that is not among the jobs."""
    return tuple(
        f"left out: {plural(count, noun)} {which}" for (noun, which), count in left_out.items()
    )


def separator_of(header: str, usual: str) -> str:
    """Return what separates the fields of a header: `usual`, or what a spreadsheet has for a comma.

    >>> separator_of("name;work", ","), separator_of("name", ",")
    (';', ',')
    """
    if usual != "," or "," in header:
        return usual
    return next((other for other in ";\t" if other in header), usual)


def _check_header(
    header: list[str], where: Field, required: Collection[str], known: Collection[str] | None
) -> None:
    for column in header:
        if known is not None and column not in known:
            raise CorruptData(
                f"unknown column '{column}'", where=where("header"), fix=nearest(column, known)
            )
        if header.count(column) > 1:
            raise CorruptData(
                f"column '{column}' stands twice", where=where("header"), fix="Remove one of them"
            )
    for column in required:
        if column not in header:
            raise CorruptData(
                f"no column '{column}'",
                where=where("header"),
                fix=f"Name the columns in the first line: {', '.join(required)}",
            )
