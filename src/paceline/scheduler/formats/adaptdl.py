"""Reads the workloads of Pollux (AdaptDL): training jobs that can change devices and batch size.

A workload is a CSV with the columns ``name, time, application, num_replicas, batch_size``: when a
job was submitted, and the devices and batch size that its user would choose. Beside the workloads,
a folder ``profiles`` has a folder for each application::

    placements.csv       placement, local_bsz, step_time, sync_time      placement: 42 is 4 devices
                                                                         on one node, 2 on another
    scalability.csv      num_nodes, num_replicas, local_bsz, step_time, sync_time
    validation-<M>.csv   progress, grad_sqr, grad_var, ...               a row for each epoch at the
                                                                         batch size M

The unit of work is a step of the smallest batch size. An epoch ends at the least progress of all
batch sizes. Jobs may run on 1 device to as many as the batch can be divided into. Each start
costs 30 s, whether it is the first one or not.
Source: A. Qiao et al., Pollux, OSDI 2021; github.com/petuum/adaptdl, branch osdi21-artifact,
simulator/applications.py for the limits that its files do not have, simulator/simulator.py for the
seconds of a start.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import CorruptData, NotFound
from paceline.core.record import nearest
from paceline.scheduler.formats.lines import Row, read_table, whole
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.rates.goodput import BatchLimits, GoodputRates, GradientNoise, Training
from paceline.scheduler.rates.step_times import StepTime, StepTimes

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")
START_S = 30.0
MOST_DEVICES = 64  # of a job: the cluster of the paper
APPLICATION_DEVICES = {"ncf": 1}  # the simulator never runs it on more
LOCAL_BATCH_MOST = {"yolov3": 8}  # larger ones were measured, and the simulator does not use them

_STEP = ("local_bsz", "step_time", "sync_time")


def read_adaptdl(path: Path, profiles: Path | None = None, *, adaptive: bool = True) -> Queue:
    """Return the jobs of a workload and their true rates.

    Args:
        path: of the workload.
        profiles: folder with a folder for each application; None: the nearest folder ``profiles``
            in the folders above the workload.
        adaptive: the batch size of a job is the best one at each time; otherwise it is that of the
            workload, and names the job's profile with the application.

    Raises:
        NotFound: the workload, or a file or folder of profiles is missing.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    folder = profiles or _profiles_beside(path)
    applications: dict[str, Training] = {}
    trainings: dict[str, Training] = {}
    jobs = []
    for row in read_table(path, required=COLUMNS):
        name = row.fields["application"]
        if name not in applications:
            _check_application(row, folder)
            applications[name] = read_training(folder / name)
        training = applications[name]
        profile = name
        batch = _batch(row, training.limits)
        if not adaptive:
            profile = f"{name} batch {batch}"
            training = replace(training, batch=batch)
        trainings.setdefault(profile, training)
        jobs.append(_job(row, profile, training))
    jobs.sort(key=lambda job: job.submitted_s)
    return Queue(tuple(jobs), GoodputRates(trainings))


def read_training(folder: Path) -> Training:
    """Return what was measured of an application, with adaptive batch size.

    Args:
        folder: with its files; its name is that of the application.

    Raises:
        NotFound: a file is missing.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    placements: dict[tuple[int, ...], list[StepTime]] = defaultdict(list)
    for row in read_table(folder / "placements.csv", required=("placement", *_STEP)):
        placements[_placement(row)].append(_step_time(row))
    counts: dict[tuple[int, int], list[StepTime]] = defaultdict(list)
    path = folder / "scalability.csv"
    for row in read_table(path, required=("num_nodes", "num_replicas", *_STEP)):
        nodes = row.whole("num_nodes", least=1)
        counts[nodes, row.whole("num_replicas", least=nodes)].append(_step_time(row))
    noise, epoch_ends = _read_noise(folder)
    local = sorted({step.local_batch for rows in placements.values() for step in rows})
    if not local:
        raise CorruptData(
            "no placement", where=str(folder / "placements.csv"), fix="Measure at least one"
        )
    limits = BatchLimits(
        initial=int(noise.batch_sizes[0]),
        largest=int(noise.batch_sizes[-1]),
        local_least=int(local[0]),
        local_most=min(int(local[-1]), LOCAL_BATCH_MOST.get(folder.name, int(local[-1]))),
    )
    return Training(
        limits=limits,
        noise=noise,
        epoch_ends=epoch_ends,
        step_times=StepTimes(placements, counts),
    )


def _profiles_beside(path: Path) -> Path:
    for folder in path.resolve().parents[:3]:
        if (folder / "profiles").is_dir():
            return folder / "profiles"
    raise NotFound(
        "no folder 'profiles' beside or above the workload",
        where=str(path),
        fix="Name the folder that has a folder for each application",
    )


def _check_application(row: Row, profiles: Path) -> None:
    name = row.fields["application"]
    known = sorted(folder.name for folder in profiles.glob("*") if folder.is_dir())
    if name not in known:
        raise CorruptData(
            f"no profile of '{name}' in {profiles}",
            where=row.where("application"),
            fix=nearest(name, known),
        )


def _batch(row: Row, limits: BatchLimits) -> int:
    batch = row.whole("batch_size", least=limits.initial)
    if batch > limits.largest:
        raise CorruptData(
            f"{batch} is more than {limits.largest}, the largest batch size that was measured",
            where=row.where("batch_size"),
            fix="Correct the field, or measure this batch size",
        )
    return batch


def _job(row: Row, profile: str, training: Training) -> Job:
    application = row.fields["application"]
    most = training.limits.most_devices(training.batch)
    most = min(most, MOST_DEVICES, APPLICATION_DEVICES.get(application, most))
    devices = row.whole("num_replicas", least=1)
    if devices > most:
        raise CorruptData(
            f"{devices} devices are more than {most}, the most for this job",
            where=row.where("num_replicas"),
            fix="Correct the field, or give the job a larger batch size",
        )
    return Job(
        name=row.fields["name"],
        submitted_s=row.number("time"),
        devices=devices,
        min_devices=1,
        max_devices=most,
        profile=profile,
        work=training.epoch_ends[-1],
        start_s=START_S,
        restart_s=START_S,
        shares=False,
    )


def _placement(row: Row) -> tuple[int, ...]:
    text = row.fields["placement"]
    if not text.isascii() or not text.isdigit() or "0" in text:
        raise CorruptData(
            f"'{text}' is not a digit from 1 to 9 for each node",
            where=row.where("placement"),
            fix="Correct the field, or remove the line",
        )
    return tuple(map(int, text))


def _step_time(row: Row) -> StepTime:
    step_s = row.number("step_time", least=1e-9)
    sync_s = row.number("sync_time")
    if sync_s >= step_s:
        raise CorruptData(
            f"{sync_s} s of the exchange in a step of {step_s} s",
            where=row.where("sync_time"),
            fix="Correct the field, or remove the line",
        )
    return StepTime(row.number("local_bsz", least=1), step_s, sync_s)


def _read_noise(folder: Path) -> tuple[GradientNoise, tuple[float, ...]]:
    """Return the gradient statistics, and the least progress at the end of each epoch."""
    files = {
        whole(path.stem.removeprefix("validation-"), f"{path}, its name", least=1): path
        for path in folder.glob("validation-*.csv")
    }
    if len(files) < 2:
        raise NotFound(
            f"{len(files)} files validation-<batch size>.csv",
            where=str(folder),
            fix="Give at least those of the smallest and the largest batch size",
        )
    tables: list[list[tuple[float, float, float]]] = []
    for batch in sorted(files):
        rows = read_table(files[batch], required=("progress", "grad_sqr", "grad_var"))
        table = [_noise(row) for row in rows]
        expected = len(tables[0]) if tables else max(1, len(table))
        if len(table) != expected:
            raise CorruptData(
                f"{len(table)} epochs, expected {expected}",
                where=str(files[batch]),
                fix="Give a row for each epoch",
            )
        tables.append(table)
    progress, squared_norm, variance = np.moveaxis(np.array(tables), -1, 0)
    ends = progress.min(axis=0)
    if not (np.diff(ends, prepend=0.0) > 0).all():
        raise CorruptData(
            "the progress of an epoch is not above that of the one before it",
            where=f"{folder}, validation-*.csv, progress",
            fix="Sort the rows by epoch",
        )
    noise = GradientNoise(
        batch_sizes=np.array(sorted(files), float),
        squared_norm=squared_norm,
        variance=variance,
    )
    return noise, tuple(ends.tolist())


def _noise(row: Row) -> tuple[float, float, float]:
    squared_norm, variance = row.number("grad_sqr"), row.number("grad_var")
    if not squared_norm + variance > 0:
        raise CorruptData(
            "norm and variance of the gradient are both 0",
            where=row.where("grad_sqr"),
            fix="Correct the line",
        )
    return row.number("progress", least=1e-9), squared_norm, variance
