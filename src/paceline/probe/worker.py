"""Measures with torch, in a process of its own; `measure` runs one worker, then two at once.

A process of its own keeps torch out of the command line, gives each measurement fresh thread pools,
and can be ended when it hangs. It answers a MeasureRequest with a WorkerMeasurement.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from paceline.core.machine import CollectiveCost, Disturbance, FrameworkOverhead
from paceline.core.worker_process import serve
from paceline.perf.communication import MODELLED
from paceline.probe.collectives import (
    OPERATIONS,
    libraries,
    measure_collectives,
)
from paceline.probe.compute import (
    Effort,
    framework_records,
    in_company,
    measure_memory,
    measure_optimizer,
    measure_overheads,
    measure_rates,
    overhead_records,
)
from paceline.probe.ddp import measure_ddp
from paceline.probe.protocol import (
    CommunicationMeasurement,
    ComputeMeasurement,
    MeasureRequest,
    WorkerMeasurement,
)
from paceline.probe.quiet import QuietParts, slower_with_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _measure_compute(
    threads: int, request: MeasureRequest, synchronize: Callable[[], None], parts: QuietParts
) -> ComputeMeasurement:
    torch.set_num_threads(threads)
    effort = Effort(
        budget_s=request.budget_s,
        rounds=request.rounds,
        quick=request.quick,
        synchronize=synchronize,
        parts=parts,
    )
    costs = measure_overheads(effort)
    synchronize()
    costs.update(parts.measure("optimizer", lambda: measure_optimizer(effort)))
    rates = measure_rates(costs, effort, threads=threads, processes=request.ranks)
    overheads = overhead_records(costs, threads, request.ranks)
    synchronize()
    rates = in_company(effort, rates, overheads, threads=threads, processes=request.ranks)
    synchronize()
    memory = parts.measure("memory", lambda: measure_memory(effort))
    return ComputeMeasurement(
        threads=threads,
        processes=request.ranks,
        rates=tuple(rates),
        overheads=tuple(overheads),
        framework_overheads=tuple(framework_records(costs, threads, request.ranks)),
        memory=memory,
        disturbed=parts.disturbances(_where(threads, request.ranks)),
        repeated=parts.repetitions(_where(threads, request.ranks)),
    )


def _where(threads: int, processes: int) -> str:
    each = "1 thread" if threads == 1 else f"{threads} threads"
    return f"{each} alone" if processes == 1 else f"{each} in each of {processes} processes"


def _measure_alone(request: MeasureRequest) -> WorkerMeasurement:
    """Measure with each number of threads; more threads are never slower than one."""

    def measure(threads: int) -> ComputeMeasurement:
        return _measure_compute(
            threads, request, lambda: None, QuietParts(repeat_s=request.repeat_s)
        )

    one, *others = (measure(threads) for threads in request.threads)
    checked = [one]
    for measured in others:
        slower = slower_with_threads(one.rates, measured.rates)
        if slower and not measured.disturbed:  # what disturbed it passed unseen, and may be over
            first = measured.repeated
            again = (
                f"measured again, {_where(measured.threads, 1)}, as it was slower than one thread"
            )
            measured = measure(measured.threads)
            said = "; ".join(text for text in (first, again, measured.repeated) if text)
            measured = dataclasses.replace(measured, repeated=said)
            slower = slower_with_threads(one.rates, measured.rates)
        checked.append(_marked(measured, slower) if slower else measured)
    return WorkerMeasurement(torch=str(torch.__version__), compute=tuple(checked))


def _marked(measured: ComputeMeasurement, slower: Sequence[str]) -> ComputeMeasurement:
    cores = max((part.foreign_cores for part in measured.disturbed), default=0.0)
    mark = Disturbance(
        where=_where(measured.threads, 1),
        part="threads",
        foreign_cores=cores,
        why=f"slower than one thread: {', '.join(slower)}",
    )
    return dataclasses.replace(measured, disturbed=(*measured.disturbed, mark))


def _measure_together(request: MeasureRequest) -> WorkerMeasurement:
    """Measure at the same time as the other ranks, and what they cost each other."""
    (threads,) = request.threads

    def quiet_parts() -> QuietParts:
        return QuietParts(
            repeat_s=request.repeat_s,
            combine=_sum_over_ranks,
            leads=request.rank == 0,
            own_cores=bool(request.cores),
        )

    compute: tuple[ComputeMeasurement, ...] = ()
    if not request.only_collectives:
        compute = (_measure_compute(threads, request, dist.barrier, quiet_parts()),)
    return WorkerMeasurement(
        torch=str(torch.__version__),
        compute=compute,
        communication=_measure_communication(threads, request, quiet_parts()),
    )


def _measure_communication(
    threads: int, request: MeasureRequest, parts: QuietParts
) -> CommunicationMeasurement:
    operations = OPERATIONS if request.only_collectives else MODELLED
    collectives: list[CollectiveCost] = []
    ddp: list[FrameworkOverhead] = []
    for library in libraries():
        costs = parts.measure(
            f"collectives of {library.backend}",
            functools.partial(measure_collectives, library, operations, quick=request.quick),
        )
        collectives += costs
        if not request.only_collectives:
            ddp += parts.measure(
                f"DistributedDataParallel over {library.backend}",
                functools.partial(
                    measure_ddp, library, costs[0], threads=threads, quick=request.quick
                ),
            )
    return CommunicationMeasurement(
        collectives=tuple(collectives),
        ddp=tuple(ddp),
        disturbed=parts.disturbances(_where(threads, request.ranks)),
        repeated=parts.repetitions(_where(threads, request.ranks)),
    )


def _sum_over_ranks(values: Sequence[float]) -> list[float]:
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    return [float(value) for value in sums]


def run(request: MeasureRequest) -> WorkerMeasurement:
    """Return the measurements that `request` asks for."""
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    torch.manual_seed(0)
    if request.ranks == 1:
        return _measure_alone(request)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{request.store}",
        rank=request.rank,
        world_size=request.ranks,
        timeout=timedelta(seconds=request.deadline_s),
    )
    try:
        return _measure_together(request)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(MeasureRequest, run)
