"""Reads our own CSV of jobs, and of their rates: docs/reference/queue-csv.md describes both.

Rates may also be a scaling profile, as `paceline characterize` writes it.

The columns of a job are the fields of `Job`, so that what a job has, a file can say; `duration_s`
stands for `work` of a job whose profile has no rates. An empty field is the field's default.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline.core.errors import ConfigError, CorruptData
from paceline.core.record import nearest
from paceline.core.scaling_profile import is_profile, read_profile
from paceline.scheduler.formats.lines import left_out_notes, read_table, whole
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.topology import Exchange

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from paceline.core.scaling_profile import ScalingProfile
    from paceline.scheduler.formats.lines import Row

DURATION = "duration_s"
COLUMNS = (*(field.name for field in dataclasses.fields(Job)), DURATION)
RATE_COLUMNS = (
    *("profile", "device_type", "devices", "rate", "spread"),
    *("message_bytes", "compute_s", "overlap"),
)
_KINDS = get_type_hints(Job)
_TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def read_jobs(path: Path, rates: Path | None = None) -> Queue:
    """Return the jobs of a CSV.

    Args:
        path: of the jobs.
        rates: of their profiles' rates; None: each job makes one unit of work per second.

    Raises:
        NotFound: there is no such file.
        CorruptData: a line cannot be read, or two jobs have one name; the message names file, line
            and field.
    """
    profiles = read_rates(rates) if rates is not None else {}
    jobs: dict[str, Job] = {}
    left_out: Counter[tuple[str, str]] = Counter()
    for row in read_table(path, required=("name",), known=COLUMNS):
        if row.fields.get(DURATION) and row.number(DURATION) == 0.0:
            left_out["job", "of 0 s"] += 1
            continue
        job = _job(row, profiles)
        if job.name in jobs:
            raise CorruptData(
                f"a second job named '{job.name}'",
                where=row.where("name"),
                fix="Give each job a name of its own",
            )
        jobs[job.name] = job
    ordered = sorted(jobs.values(), key=lambda job: job.submitted_s)
    return Queue(tuple(ordered), RateModel(profiles), left_out_notes(left_out))


def read_rates(path: Path) -> dict[str, Profile]:
    """Return profiles by name from a CSV of measured rates, or from `paceline characterize`.

    Args:
        path: of a CSV, of a scaling profile, or of the folder of a sweep that has one.

    Raises:
        NotFound: there is no such file.
        CorruptData: a line cannot be read; the message names file, line and field.
        ConfigError: a scaling profile cannot be read.
    """
    if is_profile(path):
        return profiles_of(read_profile(path))
    alone: dict[str, dict[str, dict[int, float]]] = {}
    spread: dict[str, dict[tuple[str, int], float]] = {}
    exchange: dict[str, dict[str, Exchange]] = {}
    for row in read_table(path, required=("profile", "rate"), known=RATE_COLUMNS):
        name, kind = row.fields["profile"], row.fields.get("device_type", "")
        if not name:
            raise CorruptData("no name", where=row.where("profile"), fix="Name the profile")
        devices = row.whole("devices", least=1) if row.fields.get("devices") else 1
        alone.setdefault(name, {}).setdefault(kind, {})[devices] = _positive(row, "rate")
        if row.fields.get("spread"):
            spread.setdefault(name, {})[kind, devices] = _positive(row, "spread")
        if row.fields.get("message_bytes") or row.fields.get("compute_s"):
            exchange.setdefault(name, {})[kind] = _exchange(row)
    return {
        name: Profile(alone=rates, spread=spread.get(name, {}), exchange=exchange.get(name, {}))
        for name, rates in alone.items()
    }


def profiles_of(characterized: ScalingProfile) -> dict[str, Profile]:
    """Return the rates of each curve of a scaling profile, by its name; a rank is a device."""
    kind = characterized.device_type
    found = {}
    for curve in characterized.curves:
        most = curve.points[-1]
        exchange = {}
        if most.ranks > 1 and most.reduced_bytes and most.computing_s:
            exchange[kind] = Exchange(most.reduced_bytes, most.computing_s)
        found[curve.name] = Profile(
            alone={kind: {point.ranks: point.throughput.value for point in curve.points}},
            spread={
                (kind, point.ranks): point.spread
                for point in curve.points
                if point.spread is not None
            },
            exchange=exchange,
        )
    return found


def _exchange(row: Row) -> Exchange:
    for column, other in itertools.permutations(("message_bytes", "compute_s")):
        if not row.fields.get(column):
            raise CorruptData(
                f"{other} without {column}",
                where=row.where(column),
                fix="Give both: what a step exchanges, and how long it computes",
            )
    message_bytes, compute_s = _positive(row, "message_bytes"), _positive(row, "compute_s")
    if not row.fields.get("overlap"):
        return Exchange(message_bytes, compute_s)
    overlap = row.number("overlap")
    if not 0 <= overlap <= 1:
        raise CorruptData(
            f"'{row.fields['overlap']}' is not between 0 and 1",
            where=row.where("overlap"),
            fix="Give the share of the computation under which the exchange can hide",
        )
    return Exchange(message_bytes, compute_s, overlap)


def _job(row: Row, profiles: Mapping[str, Profile]) -> Job:
    if not row.fields["name"]:
        raise CorruptData("no name", where=row.where("name"), fix="Name the job")
    values = {column: _value(row, column) for column, text in row.fields.items() if text != ""}
    profile = values.get("profile", "")
    if profiles and profile and profile not in profiles:
        raise CorruptData(
            f"no rate of the profile '{profile}'",
            where=row.where("profile"),
            fix=nearest(profile, profiles),
        )
    duration_s = values.pop(DURATION, None)
    if ("work" in values) == (duration_s is not None):
        raise CorruptData(
            "a job needs either work or duration_s",
            where=row.where(f"work and {DURATION}"),
            fix="Fill in one of the two",
        )
    if duration_s is not None:
        if profile in profiles:
            raise CorruptData(
                f"the profile '{profile}' has rates, so that the duration depends on the devices",
                where=row.where(DURATION),
                fix="Give work in the unit of the rates",
            )
        values["work"] = duration_s
    try:
        return Job(**values)
    except ConfigError as problem:
        raise CorruptData(
            problem.what, where=row.where("devices and limits, or work"), fix=problem.fix
        ) from None


def _value(row: Row, column: str) -> Any:
    text = row.fields[column]
    kind = float if column == DURATION else _KINDS[column]
    if kind is str:
        return text
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise CorruptData(
                f"'{text}' is neither yes nor no", where=row.where(column), fix="Write yes or no"
            )
        return _TRUTH[text.lower()]
    if kind is int:
        return row.whole(column)
    if kind == tuple[str, ...]:
        return tuple(text.split())
    if kind == tuple[int, ...]:
        return tuple(whole(size, row.where(column), least=1) for size in text.split())
    if column in ("work", DURATION):
        return _positive(row, column)
    return row.number(column)


def _positive(row: Row, column: str) -> float:
    value = row.number(column)
    if not value > 0:
        raise CorruptData(
            f"'{row.fields[column]}' is not more than 0",
            where=row.where(column),
            fix="Correct the field, or remove the line",
        )
    return value
