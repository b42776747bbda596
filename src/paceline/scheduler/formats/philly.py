"""Reads the jobs of Microsoft's Philly cluster, as reduced to CSV in AdaptDL's artifact.

A job a line, below the header ``timestamp,duration,num_gpus,gpu_time,cluster``: its start as local
time, seconds that it ran, its GPUs, GPU-seconds, and its virtual cluster, which is its tenant here.
The trace has no rates: a job takes its duration on any device type.
Source: M. Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters for DNN Training
Workloads, USENIX ATC 2019; github.com/msr-fiddle/philly-traces (CC-BY-4.0).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from paceline.scheduler.formats.lines import left_out_notes, moment_s, read_table
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.rates.model import RateModel

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = ("timestamp", "duration", "num_gpus")


def read_philly(path: Path) -> Queue:
    """Return the jobs of a Philly CSV; submissions count from the first.

    Raises:
        NotFound: there is no such file.
        CorruptData: a line cannot be read; the message names file, line and field.
    """
    left_out: Counter[tuple[str, str]] = Counter()
    starts_s, jobs = [], []
    for row in read_table(path, required=COLUMNS):
        work = row.number("duration")
        if not work > 0:
            left_out["job", "of 0 s"] += 1
            continue
        starts_s.append(moment_s(row.fields["timestamp"], row.where("timestamp")))
        jobs.append((row.whole("num_gpus", least=1), work, row.fields.get("cluster", "")))
    first_s = min(starts_s, default=0.0)
    read = [
        Job(name=f"{i}", submitted_s=at_s - first_s, devices=devices, work=work, tenant=tenant)
        for i, (at_s, (devices, work, tenant)) in enumerate(zip(starts_s, jobs, strict=True))
    ]
    return Queue(
        tuple(sorted(read, key=lambda job: job.submitted_s)),
        RateModel({}),
        left_out_notes(left_out),
    )
