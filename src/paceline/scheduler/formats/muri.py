"""Reads Muri's traces: jobs of eight models, with the seconds of each stage of a step.

A job a line, below a header; times in milliseconds. Used are ``job_id``, ``num_gpu``,
``submit_time``, ``iterations`` (the work), ``model_name``, ``iteration_time`` (of a step alone) and
``resource_time_0`` to ``_2`` (input, device, network). A job's profile is its model and number of
GPUs, ``gpt2 x8``; the unit of work is an iteration. A start costs what the authors measured for the
model. Their simulator takes that time from every running job at each event, and spares a job the
last interval; here a job pays when it starts.
Source: Y. Zhao et al., Multi-Resource Interleaving for Deep Learning Training (Muri), SIGCOMM 2022;
github.com/Rivendile/Muri (Apache-2.0), simulator/run_sim.py for the seconds of a start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import CorruptData
from paceline.scheduler.formats.lines import read_table
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.rates.model import ANY_TYPE, Profile, RateModel
from paceline.scheduler.rates.muri import ALONE, LockstepSharing, Stages

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.scheduler.formats.lines import Row

_STAGES = ("resource_time_0", "resource_time_1", "resource_time_2")
COLUMNS = (
    *("job_id", "num_gpu", "submit_time", "iterations", "model_name", "iteration_time"),
    *_STAGES,
)
_SIZES = (1, 2, 4, 8, 16, 32)
START_S = {  # seconds of a start by model, for each of _SIZES
    "vgg16": (7, 7, 8, 9, 9, 10),
    "vgg19": (7, 7, 8, 9, 10, 10),
    "resnet18": (4, 5, 5, 7, 7, 7),
    "shufflenet_v2_x1_0": (4, 4, 5, 5, 7, 8),
    "bert": (10, 10, 10, 10, 10, 10),
    "gpt2": (10, 10, 10, 10, 10, 10),
    "a2c": (38, 39, 39, 46, 46, 46),
    "dqn": (5, 5, 6, 6, 8, 8),
}


def read_muri(path: Path, *, bounded: bool = False, interference: float = 0.0) -> Queue:
    """Return the jobs of a trace, and their rates alone and in groups.

    Args:
        path: of the trace.
        bounded: see `LockstepSharing`.
        interference: see `LockstepSharing`.

    Raises:
        NotFound: there is no such file.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    jobs: list[Job] = []
    stages: dict[str, Stages] = {}
    step_s: dict[str, float] = {}
    profiles: dict[str, Profile] = {}
    for row in read_table(path, required=COLUMNS):
        job = _job(row)
        own_s = row.number("iteration_time", least=1e-3) * ALONE / 1e3
        input_s, device_s, network_s = (row.number(column) / 1e3 for column in _STAGES)
        own_stages = (input_s, device_s, network_s)
        if not sum(own_stages) > 0:
            raise CorruptData(
                "all stages take no time",
                where=row.where("resource_time_0 to _2"),
                fix="Give the milliseconds of each stage",
            )
        known = (stages.get(job.profile, own_stages), step_s.get(job.profile, own_s))
        if known != (own_stages, own_s):
            raise CorruptData(
                f"other times than an earlier job of the profile '{job.profile}'",
                where=row.where("iteration_time or resource_time"),
                fix="Give jobs of one model and number of GPUs equal times",
            )
        stages[job.profile], step_s[job.profile] = own_stages, own_s
        profiles[job.profile] = Profile(alone={ANY_TYPE: {job.devices: 1 / own_s}})
        jobs.append(job)
    sharing = LockstepSharing(stages, step_s, bounded=bounded, interference=interference)
    return Queue(tuple(sorted(jobs, key=lambda job: job.submitted_s)), RateModel(profiles, sharing))


def _job(row: Row) -> Job:
    devices, model = row.whole("num_gpu", least=1), row.fields["model_name"]
    seconds = START_S.get(model)
    index = min(len(_SIZES) - 1, (devices - 1).bit_length())
    start_s = float(seconds[index]) if seconds else 0.0
    return Job(
        name=row.fields["job_id"],
        submitted_s=row.number("submit_time") / 1e3,
        devices=devices,
        profile=f"{model} x{devices}",
        work=row.number("iterations", least=1),
        start_s=start_s,
        restart_s=start_s,
    )
