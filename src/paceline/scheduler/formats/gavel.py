"""Reads Gavel's traces and its table of measured throughputs.

A trace has a job a line, fields separated by tabs, in one of two forms::

    physical cluster   job_type command directory steps_option needs_data steps scale_factor
                       priority_weight slo arrival_s
    msr                job_type command steps_option needs_data steps arrival_s scale_factor

The table is JSON: ``{device_type: {"('job_type', scale_factor)": {"null": steps_per_s, "('other',
scale_factor)": [own steps_per_s, the other's], ...}}}``; ``..._unconsolidated`` types hold the same
for devices on more servers than needed. A pair of zeros did not fit into memory together.
Source: D. Narayanan et al., Heterogeneity-Aware Cluster Scheduling Policies for Deep Learning
Workloads, OSDI 2020; github.com/stanford-futuredata/gavel.
"""

from __future__ import annotations

import ast
import json
from typing import TYPE_CHECKING, Any

from paceline.core.errors import CorruptData
from paceline.core.files import read_text
from paceline.scheduler.formats.lines import Field, number
from paceline.scheduler.job import Job
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import PairKey, PairTable

if TYPE_CHECKING:
    from pathlib import Path

_SPREAD = "_unconsolidated"


def read_jobs(path: Path) -> tuple[Job, ...]:
    """Return the jobs of a trace in either form.

    Raises:
        NotFound: there is no such file.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    jobs = []
    for line, text in enumerate(read_text(path).splitlines(), 1):
        fields = text.split("\t")
        if len(fields) == 10:
            steps, scale, arrival = fields[5], fields[6], fields[9]
        elif len(fields) == 7:
            steps, arrival, scale = fields[4:7]
        else:
            raise CorruptData(
                f"{len(fields)} fields, expected 10 or 7",
                where=f"{path}, line {line}",
                fix="Separate the fields of Gavel's formats by tabs",
            )
        where = Field(path, line)
        jobs.append(
            Job(
                name=f"{line - 1}",
                submitted_s=number(arrival, where("arrival time")),
                devices=int(number(scale, where("scale factor"), least=1)),
                profile=fields[0],
                work=number(steps, where("total steps"), least=1),
            )
        )
    return tuple(sorted(jobs, key=lambda job: job.submitted_s))


def read_rates(path: Path, *, shares: bool = True, distance: bool = True) -> RateModel:
    """Return the measured throughputs as a rate model.

    Args:
        path: of ``simulation_throughputs.json``.
        shares: whether the measured pairs may share devices.
        distance: whether devices on more servers than needed are slower, as was measured; in
            Gavel's own simulator they are not.

    Raises:
        NotFound: there is no such file.
        CorruptData: it is no such table.
    """
    text = read_text(path)
    try:
        return _rate_model(json.loads(text), shares=shares, distance=distance)
    except (ValueError, SyntaxError, KeyError, TypeError, AttributeError) as problem:
        raise CorruptData(
            "not a table of Gavel's throughputs",
            where=str(path),
            why=f"{type(problem).__name__}: {problem}",
            fix="Give its simulation_throughputs.json",
        ) from problem


def _rate_model(table: dict[str, Any], *, shares: bool, distance: bool) -> RateModel:
    alone: dict[str, dict[str, dict[int, float]]] = {}
    spread: dict[str, dict[tuple[str, int], float]] = {}
    factors: dict[PairKey, float] = {}
    for kind, rows in table.items():
        device_type = kind.removesuffix(_SPREAD)
        for key, measured in rows.items():
            name, devices = ast.literal_eval(key)
            rate = measured["null"]
            if kind != device_type:
                close = table[device_type][key]["null"]
                if close > 0 and distance:
                    spread.setdefault(name, {})[device_type, devices] = rate / close
                continue
            if rate > 0:
                alone.setdefault(name, {}).setdefault(device_type, {})[devices] = rate
            for other_key, pair in measured.items():
                if other_key == "null" or rate <= 0:
                    continue
                other, other_devices = ast.literal_eval(other_key)
                if other_devices == devices and min(pair) > 0:
                    factors[PairKey(device_type, devices, name, other)] = pair[0] / rate
    profiles = {
        name: Profile(alone=rates, spread=spread.get(name, {})) for name, rates in alone.items()
    }
    return RateModel(profiles, PairTable(factors) if shares else None)
