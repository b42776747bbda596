"""Measures with torch, in a process of its own; `measure` runs one worker, then two at once.

A process of its own keeps torch out of the command line, gives each measurement fresh thread pools,
and can be ended when it hangs. It answers a MeasureRequest with a WorkerMeasurement.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.core.worker_process import serve
from paceline.probe.compute import (
    Effort,
    framework_records,
    measure_memory,
    measure_optimizer,
    measure_overheads,
    measure_rates,
    overhead_records,
)
from paceline.probe.gloo import measure_collectives, measure_ddp
from paceline.probe.protocol import (
    CommunicationMeasurement,
    ComputeMeasurement,
    MeasureRequest,
    WorkerMeasurement,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def _measure_compute(
    threads: int, request: MeasureRequest, synchronize: Callable[[], None]
) -> ComputeMeasurement:
    torch.set_num_threads(threads)
    effort = Effort(
        budget_s=request.budget_s,
        rounds=request.rounds,
        quick=request.quick,
        synchronize=synchronize,
    )
    costs = measure_overheads(effort)
    synchronize()
    costs.update(measure_optimizer(effort))
    rates = measure_rates(costs, effort, threads=threads, processes=request.ranks)
    synchronize()
    return ComputeMeasurement(
        threads=threads,
        processes=request.ranks,
        rates=tuple(rates),
        overheads=tuple(overhead_records(costs, threads, request.ranks)),
        framework_overheads=tuple(framework_records(costs, threads, request.ranks)),
        memory=measure_memory(effort),
    )


def _measure_all(request: MeasureRequest, synchronize: Callable[[], None]) -> WorkerMeasurement:
    compute = tuple(_measure_compute(count, request, synchronize) for count in request.threads)
    communication = None
    if request.ranks > 1:
        torch.set_num_threads(request.threads[0])
        collectives = measure_collectives(quick=request.quick)
        ddp = measure_ddp(collectives[0], threads=request.threads[0], quick=request.quick)
        communication = CommunicationMeasurement(collectives=collectives, ddp=ddp)
    return WorkerMeasurement(
        torch=str(torch.__version__), compute=compute, communication=communication
    )


def run(request: MeasureRequest) -> WorkerMeasurement:
    """Return the measurements that `request` asks for."""
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    torch.manual_seed(0)
    if request.ranks == 1:
        return _measure_all(request, lambda: None)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request.store}",
        rank=request.rank,
        world_size=request.ranks,
        timeout=timedelta(seconds=request.deadline_s),
    )
    try:
        return _measure_all(request, dist.barrier)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(MeasureRequest, run)
