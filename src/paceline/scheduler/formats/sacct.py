r"""Reads what Slurm's accounting says of jobs that have run.

    sacct --allusers --allocations --parsable2 --starttime 2024-01-01 \
        --format=JobID,Submit,Start,End,Elapsed,State,AllocTRES,ReqTRES,NCPUS,Account,User

The header says which fields there are; needed are ``JobID``, ``Submit`` and ``Elapsed`` or
``ElapsedRaw``. A job's work is the time that it ran. Its devices are the GPUs of ``AllocTRES``,
else of ``ReqTRES``; in a file in which no job has GPUs, its CPUs. Its tenant is ``Account``, else
``User``. Submissions count from the first. What cannot be simulated is counted in the notes of the
queue: jobs that never ran, steps of jobs, jobs without GPUs beside jobs with GPUs.
Source: Slurm's manual pages sacct and slurm.conf (AccountingStorageTRES).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import CorruptData
from paceline.scheduler.formats.lines import left_out_notes, moment_s, number, read_table
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.rates.model import RateModel

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.scheduler.formats.lines import Row

_ELAPSED = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+(?:\.\d+)?)$")
_TRES = re.compile(r"([^=,]+)=([^,]*)")


class _Request(NamedTuple):
    """Devices of a job.

    Attributes:
        gpus: 0 for a job without.
        gpu_type: empty if it is not known.
        cpus: 0 if the file does not say.
    """

    gpus: int
    gpu_type: str
    cpus: int


def read_sacct(path: Path) -> Queue:
    """Return the jobs that ran, and what else the file holds as notes.

    Raises:
        NotFound: there is no such file.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    left_out: Counter[tuple[str, str]] = Counter()
    rows: list[tuple[Row, _Request, float]] = []
    for row in read_table(path, required=("JobID", "Submit"), separator="|"):
        if "." in row.fields["JobID"]:
            left_out["step", "of jobs"] += 1
            continue
        elapsed_s = _elapsed_s(row)
        if elapsed_s > 0:
            rows.append((row, _request(row), elapsed_s))
        else:
            state = row.fields.get("State", "").split(" ")[0]
            left_out["job", f"that never ran ({state})" if state else "that never ran"] += 1
    has_gpus = any(request.gpus for _, request, _ in rows)
    first_s = min((_submit_s(row) for row, _, _ in rows), default=0.0)
    names: Counter[str] = Counter()
    jobs = []
    for row, request, elapsed_s in rows:
        if has_gpus and not request.gpus:
            left_out["job", "without GPUs"] += 1
            continue
        devices = request.gpus or request.cpus
        if not devices:
            raise CorruptData(
                "neither GPUs nor CPUs of the job are known",
                where=row.where("AllocTRES, ReqTRES, AllocCPUS or NCPUS"),
                fix="Ask sacct for AllocTRES and NCPUS",
            )
        name = row.fields["JobID"]
        names[name] += 1  # a job that was requeued has a line for each time that it ran
        jobs.append(
            Job(
                name=name if names[name] == 1 else f"{name}#{names[name]}",
                submitted_s=_submit_s(row) - first_s,
                devices=devices,
                device_types=(request.gpu_type,) if request.gpu_type else (),
                work=elapsed_s,
                tenant=row.fields.get("Account") or row.fields.get("User", ""),
            )
        )
    notes = left_out_notes(left_out)
    return Queue(tuple(sorted(jobs, key=lambda job: job.submitted_s)), RateModel({}), notes)


def _submit_s(row: Row) -> float:
    return moment_s(row.fields["Submit"], row.where("Submit"))


def _elapsed_s(row: Row) -> float:
    raw = row.fields.get("ElapsedRaw")
    if raw is not None:
        return number(raw, row.where("ElapsedRaw"))
    text = row.fields.get("Elapsed")
    if text is None:
        raise CorruptData(
            "no column 'Elapsed'", where=row.where("header"), fix="Ask sacct for Elapsed"
        )
    match = _ELAPSED.match(text)
    if not match:
        raise CorruptData(
            f"'{text}' is not a time such as 1-02:03:04",
            where=row.where("Elapsed"),
            fix="Correct the field, or remove the line",
        )
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _request(row: Row) -> _Request:
    """Return the devices that a job had, else those that it asked for."""
    gpus = cpus = 0
    gpu_type = ""
    for column in ("AllocTRES", "ReqTRES"):
        for name, count in _TRES.findall(row.fields.get(column, "")):
            if name == "gres/gpu":
                gpus = gpus or int(number(count, row.where(column)))
            elif name.startswith("gres/gpu:"):
                gpu_type = gpu_type or name.removeprefix("gres/gpu:")
                gpus = gpus or int(number(count, row.where(column)))
            elif name == "cpu":
                cpus = cpus or int(number(count, row.where(column)))
    for column in ("AllocCPUS", "NCPUS", "ReqCPUS"):
        if not cpus and row.fields.get(column):
            cpus = row.whole(column)
    return _Request(gpus, gpu_type, cpus)
