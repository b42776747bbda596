"""Reads a workload of any format: `read_queue` is the one door.

Which format a file has is seen from its first line: the names of its columns, or fields that are
separated by tabs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.core.errors import NotFound, UsageError
from paceline.core.files import read_text
from paceline.core.record import nearest
from paceline.scheduler.formats import adaptdl, gavel, muri, philly
from paceline.scheduler.formats.lines import separator_of
from paceline.scheduler.formats.queue_csv import read_jobs
from paceline.scheduler.formats.sacct import read_sacct
from paceline.scheduler.formats.workload import Queue

_Read: TypeAlias = Callable[[Path, "Path | None"], Queue]
_THROUGHPUTS = "simulation_throughputs.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A format of workloads.

    Attributes:
        read: reads jobs, and their rates from a second file or folder if the format has one.
        columns: that the first line names, each of them; empty if it has no header.
        separator: of the first line's fields.
        cluster: of the published experiments, as `Cluster.of_text` has it; empty if there is none.
        has_rates_file: whether rates are in a file or folder of their own.
    """

    read: _Read
    columns: tuple[str, ...] = ()
    separator: str = ","
    cluster: str = ""
    has_rates_file: bool = False


def _read_gavel(path: Path, rates: Path | None) -> Queue:
    return Queue(gavel.read_jobs(path), gavel.read_rates(rates or _gavel_rates(path)))


def _gavel_rates(path: Path) -> Path:
    """Return the table of throughputs, which lies in a folder above the traces."""
    for folder in path.resolve().parents[:4]:
        if (folder / _THROUGHPUTS).is_file():
            return folder / _THROUGHPUTS
    raise NotFound(
        f"no {_THROUGHPUTS} beside or above a trace of Gavel",
        where=str(path),
        fix=f"Name it with --rates .../{_THROUGHPUTS}",
    )


FORMATS = {
    "csv": Format(read=read_jobs, columns=("name",), has_rates_file=True),
    "philly": Format(read=lambda path, _: philly.read_philly(path), columns=philly.COLUMNS),
    "gavel": Format(
        read=_read_gavel,
        separator="\t",
        cluster="v100=2x4,p100=4x4,k80=3x8",
        has_rates_file=True,
    ),
    "adaptdl": Format(
        read=adaptdl.read_adaptdl,
        columns=adaptdl.COLUMNS,
        cluster="16x4",
        has_rates_file=True,
    ),
    "muri": Format(read=lambda path, _: muri.read_muri(path), columns=muri.COLUMNS, cluster="8x8"),
    "sacct": Format(
        read=lambda path, _: read_sacct(path), columns=("JobID", "Submit"), separator="|"
    ),
}


def read_queue(path: Path, *, file_format: str | None = None, rates: Path | None = None) -> Queue:
    """Return the jobs of a trace and their true rates.

    Args:
        path: of the trace.
        file_format: one of `FORMATS`; None: see the first line.
        rates: of a format whose rates are in a file of their own.

    Raises:
        NotFound: there is no such file.
        UsageError: the format is not known, has no file of rates, or the trace has no job.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    name = file_format or detect_format(path)
    if name not in FORMATS:
        raise UsageError(f"no format '{name}'", fix=nearest(name, FORMATS))
    chosen = FORMATS[name]
    if rates is not None and not chosen.has_rates_file:
        raise UsageError(
            f"a trace of the format {name} has no file of rates",
            where=str(rates),
            fix="Leave out --rates",
        )
    queue = chosen.read(path, rates)
    if not queue.jobs:
        raise UsageError(
            "no job to simulate",
            where=str(path),
            why="; ".join(queue.notes),
            fix="Give a trace of jobs that ran",
        )
    return queue


def detect_format(path: Path) -> str:
    """Return the name of a trace's format, by its first line.

    Raises:
        NotFound: there is no such file.
        UsageError: it has the first line of no format.
    """
    lines = (line for line in read_text(path).splitlines() if line.strip())
    first = next((line for line in lines if not line.lstrip().startswith("#")), "")
    fitting = [name for name, candidate in FORMATS.items() if _looks_like(candidate, first)]
    if fitting:
        # Columns of one format may be among those of another one: the most specific counts.
        return max(fitting, key=lambda name: len(FORMATS[name].columns))
    raise UsageError(
        "the format of the trace is not known from its first line",
        where=str(path),
        why=f"it begins with '{first[:60]}'",
        fix=f"Name it with --format: {', '.join(FORMATS)}",
    )


def _looks_like(candidate: Format, first: str) -> bool:
    separator = separator_of(first, candidate.separator)
    fields = [field.strip() for field in first.split(separator)]
    if candidate.columns:
        return set(candidate.columns) <= set(fields)
    return len(fields) in (7, 10)
