"""Measures this node and returns a Machine, in at most about 20 seconds where nothing disturbs it.

What needs torch runs in processes of its own (`worker`): one alone, with one thread and with
all cores, then two at once, each on its half of the cores, because that is how ranks share a node.
Figures that cannot be measured here are named in `Machine.missing` instead of being guessed.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core import node
from paceline.core.affinity import allowed_cores, core_binding
from paceline.core.allocator import allocator_setting
from paceline.core.clock import SystemClock
from paceline.core.config import environment
from paceline.core.errors import Missing, NotFound, PacelineError
from paceline.core.machine import (
    CollectiveCost,
    Device,
    Disturbance,
    FrameworkOverhead,
    Link,
    Machine,
    Quantity,
)
from paceline.core.processes import ended_on_signal
from paceline.core.worker_process import WorkerCall, call_all
from paceline.probe.links import measure_links
from paceline.probe.protocol import (
    ComputeMeasurement,
    MeasureRequest,
    MemoryRates,
    WorkerMeasurement,
)
from paceline.probe.quiet import QuietParts
from paceline.probe.storage import measure_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.allocator import AllocatorSetting
    from paceline.core.machine import Tier

DEADLINE_S = 180.0  # ends what hangs; with 20 busy processes beside it a probe takes 60 s and more
PAIR = 2
# What measuring disturbed parts again may add, for each number of threads and processes.
REPEAT_S, QUICK_REPEAT_S = 6.0, 2.0
WORKER = "paceline.probe.worker"


def measure(
    folder: Path, *, quick: bool = False, on_progress: Callable[[str], None] = lambda _: None
) -> Machine:
    """Return this node as a Machine.

    Args:
        folder: whose storage is measured; it must be writable.
        quick: fewer sizes and repetitions: rougher, in about a third of the time.
        on_progress: called with what is being measured.

    Raises:
        NotFound: there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix="Give an existing folder")
    with ended_on_signal(SystemClock()):  # the workers' sessions get no signal of a terminal
        return _measure(folder, quick=quick, on_progress=on_progress)


def _measure(folder: Path, *, quick: bool, on_progress: Callable[[str], None]) -> Machine:
    missing: list[str] = []
    cores = len(allowed_cores())
    on_progress(f"{cores} cores of {node.cpu_name()}")
    on_progress("links between two processes")
    parts = QuietParts(repeat_s=REPEAT_S / 2 if not quick else QUICK_REPEAT_S / 2)
    links = parts.measure("links", lambda: _links(missing, quick=quick))
    if repeated := parts.repetitions("two processes"):
        on_progress(repeated)
    on_progress(f"storage of {folder}")
    tiers = _tiers(folder, missing, quick=quick)
    workers: list[WorkerMeasurement] = []
    allocator = allocator_setting("keep", environment())  # as paceline run gives it to the ranks
    for ranks in (1, PAIR):
        on_progress(
            "compute, one process alone" if ranks == 1 else "compute, two processes; collectives"
        )
        try:
            measured = _run_workers(ranks, allocator, quick=quick)
        except PacelineError as problem:
            missing.append(f"compute of {ranks} process(es): {problem}")
            break
        workers += measured
        for repeated in _repeated(measured[0]):
            on_progress(repeated)
    return Machine(
        name=platform.node() or "this node",
        devices=(_device(cores, workers),),
        links=links,
        collectives=_collectives(workers[1:]),
        tiers=tiers,
        allocator=allocator.in_effect,
        missing=tuple(missing),
        disturbed=(*parts.disturbances("two processes"), *_disturbed(workers)),
    )


def _disturbed(workers: Sequence[WorkerMeasurement]) -> list[Disturbance]:
    """Return what stayed disturbed; ranks that measured together say the same, so one speaks."""
    found: list[Disturbance] = []
    for worker in workers[:2]:
        for measured in (*worker.compute, worker.communication):
            found += measured.disturbed if measured else ()
    return found


def _repeated(worker: WorkerMeasurement) -> list[str]:
    """Return what was measured again, in words; ranks that measure together repeat together."""
    parts = (*worker.compute, worker.communication)
    return [measured.repeated for measured in parts if measured and measured.repeated]


def _links(missing: list[str], *, quick: bool) -> tuple[Link, ...]:
    try:
        return measure_links(rounds=300 if quick else 2000, deadline_s=DEADLINE_S / 4)
    except (PacelineError, OSError) as problem:
        missing.append(f"links between processes: {problem}")
        return ()


def _tiers(folder: Path, missing: list[str], *, quick: bool) -> tuple[Tier, ...]:
    try:
        return (measure_folder(folder, quick=quick),)
    except PacelineError as problem:
        missing.append(f"storage: {problem}")
        return ()


def _run_workers(
    ranks: int, allocator: AllocatorSetting, *, quick: bool, only_collectives: bool = False
) -> tuple[WorkerMeasurement, ...]:
    """Run `ranks` workers at once and return what they measured, in order of rank.

    Raises:
        Missing: torch is not installed.
        WorkerFailed: a worker crashed, or torch raised.
        DeadlineExceeded: a worker did not answer in time.
    """
    if importlib.util.find_spec("torch") is None:
        raise Missing(
            "torch is not installed",
            why="compute is measured with the framework that trains",
            fix="pip install 'paceline[torch]'",
        )
    allowed = allowed_cores()
    with tempfile.TemporaryDirectory(prefix="paceline-probe-") as folder:
        requests = []
        for rank in range(ranks):
            binding = core_binding(allowed, rank, ranks, environ={})
            request = MeasureRequest(
                ranks=ranks,
                rank=rank,
                cores=binding.cores,
                threads=tuple(sorted({1, binding.threads})) if ranks == 1 else (binding.threads,),
                budget_s=0.002 if quick else 0.007,
                rounds=2 if quick else 3,
                quick=quick,
                repeat_s=QUICK_REPEAT_S if quick else REPEAT_S,
                store=str(Path(folder) / "store"),
                deadline_s=DEADLINE_S,
                only_collectives=only_collectives,
            )
            requests.append(request)
        works = [
            WorkerCall(
                module=WORKER,
                request=request,
                answer=WorkerMeasurement,
                name=f"the measurement in process {request.rank}",
                environment=allocator.variables,
            )
            for request in requests
        ]
        return call_all(works, deadline_s=DEADLINE_S)


def _device(cores: int, workers: Sequence[WorkerMeasurement]) -> Device:
    # Of the two ranks that ran at once the first speaks for both: they measured the same.
    compute = [measured for worker in workers[:2] for measured in worker.compute]
    alone, shared = (_best_memory(compute, processes) for processes in (1, PAIR))
    cache = node.cache_bytes()
    overheads = [overhead for measured in compute for overhead in measured.overheads]
    frameworks = [overhead for measured in compute for overhead in measured.framework_overheads]
    return Device(
        name=node.cpu_name(),
        kind="cpu",
        cores=cores,
        memory_bytes=Quantity(value=float(node.memory_bytes()), source="datasheet"),
        cache_bytes=Quantity(value=float(cache), source="datasheet") if cache else None,
        bandwidth_bytes_per_s=alone.bandwidth_bytes_per_s if alone else None,
        bandwidth_shared_bytes_per_s=shared.bandwidth_bytes_per_s if shared else None,
        first_touch_bytes_per_s=alone.first_touch_bytes_per_s if alone else None,
        rates=tuple(rate for measured in compute for rate in measured.rates),
        overheads=tuple(overheads),
        framework_overheads=(*frameworks, *_ddp(workers[1:])),
    )


def _best_memory(compute: Sequence[ComputeMeasurement], processes: int) -> MemoryRates | None:
    """Return the memory's rates with the threads that reached the highest bandwidth."""
    return max(
        (measured.memory for measured in compute if measured.processes == processes),
        key=lambda memory: memory.bandwidth_bytes_per_s.value,
        default=None,
    )


def _ddp(pair: Sequence[WorkerMeasurement]) -> tuple[FrameworkOverhead, ...]:
    """Return DDP's overheads, the mean of both ranks."""
    by_rank = [worker.communication.ddp for worker in pair if worker.communication]
    return tuple(_mean(overheads) for overheads in zip(*by_rank, strict=True))


def _mean(overheads: tuple[FrameworkOverhead, ...]) -> FrameworkOverhead:
    """Return one overhead of several ranks; its interval covers theirs."""
    per_call = [overhead.seconds for overhead in overheads if overhead.seconds]
    per_byte = [overhead.seconds_per_byte for overhead in overheads if overhead.seconds_per_byte]
    quantities = per_call or per_byte
    mean = Quantity(
        value=sum(quantity.value for quantity in quantities) / len(quantities),
        source="probe",
        low=min(quantity.low or 0.0 for quantity in quantities),
        high=max(quantity.high or 0.0 for quantity in quantities),
    )
    if per_call:
        return dataclasses.replace(overheads[0], seconds=mean)
    return dataclasses.replace(overheads[0], seconds_per_byte=mean)


def measure_collectives(
    ranks: Sequence[int], *, quick: bool = False, on_progress: Callable[[str], None]
) -> tuple[CollectiveCost, ...]:
    """Return the costs of collectives between ranks of this host: a tuning table.

    Of gloo and of the backend ``paceline``: all-reduce, broadcast, reduce, reduce-scatter and
    all-gather.

    Args:
        ranks: numbers of ranks, each of which is measured.
        quick: with fewer calls.
        on_progress: called with what is being measured.

    Raises:
        Missing: torch is not installed.
        WorkerFailed: a worker crashed, or torch raised.
        DeadlineExceeded: a worker did not answer in time.
    """
    allocator = allocator_setting("keep", environment())
    found: list[CollectiveCost] = []
    with ended_on_signal(SystemClock()):
        for count in ranks:
            on_progress(f"collectives of {count} ranks")
            workers = _run_workers(count, allocator, quick=quick, only_collectives=True)
            found += _collectives(workers)
    return tuple(found)


def with_collectives(machine: Machine, costs: Sequence[CollectiveCost]) -> Machine:
    """Return the machine with these costs in place of those of the same kind and ranks."""

    def key(cost: CollectiveCost) -> tuple[object, ...]:
        return cost.backend, cost.operation, cost.algorithm, cost.ranks, cost.hosts, cost.level

    by_key = {key(cost): cost for cost in (*machine.collectives, *costs)}
    return dataclasses.replace(machine, collectives=tuple(by_key.values()))


def _collectives(pair: Sequence[WorkerMeasurement]) -> tuple[CollectiveCost, ...]:
    # Both ranks of a collective measure the same calls: the first one speaks for both.
    communication = pair[0].communication if pair else None
    return communication.collectives if communication else ()


def summary(machine: Machine) -> list[str]:
    """Return the machine in a few lines for people."""
    device = machine.devices[0]
    lines = [f"{device.name}, {device.cores} cores, {device.memory_bytes.value / 2**30:.1f} GiB"]
    for rate in device.rates:  # a convolution's two rates are terms of a fit: neither is a speed
        if rate.operator == "matmul" and rate.phase == "forward":
            best = max(point.rate_per_s for point in rate.points)
            threads = "1 thread" if rate.threads == 1 else f"{rate.threads} threads"
            alone = "alone" if rate.processes == 1 else f"each of {rate.processes} processes"
            lines.append(f"matmul {rate.dtype}: {best / 1e9:.0f} GFLOP/s, {threads}, {alone}")
    if device.bandwidth_bytes_per_s and device.bandwidth_shared_bytes_per_s:
        lines.append(
            f"memory: {device.bandwidth_bytes_per_s.value / 1e9:.1f} GB/s alone, "
            f"{device.bandwidth_shared_bytes_per_s.value / 1e9:.1f} GB/s each of two"
        )
    lines += [
        f"{link.level}: {link.latency_s.value * 1e6:.1f} us, "
        f"{link.bandwidth_bytes_per_s.value / 1e9:.2f} GB/s"
        for link in machine.links
    ]
    lines += [
        f"{cost.label} between {cost.ranks} ranks"
        f"{f' on {cost.hosts} hosts' if cost.hosts > 1 else ''}: "
        f"{cost.points[0].seconds.value * 1e6:.1f} us, "
        f"{cost.points[-1].bytes / cost.points[-1].seconds.value / 1e9:.2f} GB/s"
        for cost in machine.collectives
    ]
    lines += [
        f"{tier.name} ({tier.kind}): {tier.bandwidth_bytes_per_s.value / 1e9:.2f} GB/s, "
        f"open+stat {tier.open_latency_s.value * 1e6:.0f} us"
        for tier in machine.tiers
    ]
    lines += [f"not measured: {text}" for text in machine.missing]
    return lines + _disturbed_lines(machine.disturbed)


def _disturbed_lines(disturbed: tuple[Disturbance, ...]) -> list[str]:
    """Return a line for each place that was disturbed: its parts, and the worst of them."""
    lines = []
    for where in dict.fromkeys(disturbance.where for disturbance in disturbed):
        parts = [disturbance for disturbance in disturbed if disturbance.where == where]
        worst = max(parts, key=lambda part: part.foreign_cores)
        names = ", ".join(part.part for part in parts)
        lines.append(f"disturbed: {where}: {names}; worst: {worst.part}, {worst.why}")
    if lines:
        lines.append("probe again when nothing else runs: what was disturbed may be too slow")
    return lines
