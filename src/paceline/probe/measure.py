"""Measures this node into a Machine, in at most about 20 seconds. The loop begins here.

What needs torch runs in processes of its own (`probe_worker`): one alone, with one thread and with
all cores, then two at once, each on its half of the cores, because that is how ranks share a node.
What cannot be measured here is named in `Machine.missing` instead of being guessed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.affinity import allowed_cores, share
from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, Missing, NotFound, PacelineError
from paceline.core.machine import (
    CollectiveCost,
    CollectivePoint,
    Device,
    FrameworkOverhead,
    Link,
    Machine,
    Overhead,
    Quantity,
    Rate,
)
from paceline.core.processes import ended_on_signal
from paceline.probe import node
from paceline.probe.links import measure_links
from paceline.probe.storage import measure_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.machine import Phase, Tier

DEADLINE_S = 60.0
PAIR = 2
Measured = list[dict[str, Any]]


def measure(
    folder: Path, *, quick: bool = False, tell: Callable[[str], None] = lambda _: None
) -> Machine:
    """Return this node as a Machine.

    Args:
        folder: whose storage is measured; it must be writable.
        quick: fewer sizes and repetitions: rougher, in about a third of the time.
        tell: called with what is being measured.

    Raises:
        NotFound: there is no such folder.
    """
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix="Name one that is there")
    with ended_on_signal(SystemClock()):  # the workers' sessions get no signal of a terminal
        return _measure(folder, quick=quick, tell=tell)


def _measure(folder: Path, *, quick: bool, tell: Callable[[str], None]) -> Machine:
    missing: list[str] = []
    cores = len(allowed_cores())
    tell(f"{cores} cores of {node.cpu_name()}")
    tell("links between two processes")
    links = _links(missing, quick=quick)
    tell(f"storage of {folder}")
    tiers = _tiers(folder, missing, quick=quick)
    workers: Measured = []
    for ranks in (1, PAIR):
        tell("compute, one process alone" if ranks == 1 else "compute, two processes; gloo")
        try:
            workers += _run_workers(ranks, quick=quick)
        except PacelineError as problem:
            missing.append(f"compute of {ranks} process(es): {problem}")
            break
    return Machine(
        name=platform.node() or "this node",
        devices=(_device(cores, workers),),
        links=links,
        collectives=_collectives(workers[1:]),
        tiers=tiers,
        missing=tuple(missing),
    )


def _probed(value: float) -> Quantity:
    return Quantity(value=value, source="probe")


def _links(missing: list[str], *, quick: bool) -> tuple[Link, ...]:
    try:
        measured = measure_links(rounds=300 if quick else 2000, deadline_s=DEADLINE_S / 4)
    except (PacelineError, OSError) as problem:
        missing.append(f"links between processes: {problem}")
        return ()
    return tuple(
        Link(level=level, latency_s=_probed(latency_s), bandwidth_bytes_per_s=_probed(bandwidth))
        for level, (latency_s, bandwidth) in sorted(measured.items(), key=lambda one: one[1][0])
    )


def _tiers(folder: Path, missing: list[str], *, quick: bool) -> tuple[Tier, ...]:
    try:
        return (measure_folder(folder, quick=quick),)
    except PacelineError as problem:
        missing.append(f"storage: {problem}")
        return ()


def _run_workers(ranks: int, *, quick: bool) -> Measured:
    """Run `ranks` workers at once and return their answers in order of rank.

    Raises:
        Missing: torch is not installed, or a worker failed.
        DeadlineExceeded: a worker did not answer in time.
    """
    if importlib.util.find_spec("torch") is None:
        raise Missing(
            "torch is not installed",
            why="compute is measured with the framework that trains",
            fix="pip install 'paceline[torch]'",
        )
    allowed = allowed_cores()
    with tempfile.TemporaryDirectory(prefix="paceline-probe-") as meeting:
        running = []
        for rank in range(ranks):
            mine = share(allowed, rank, ranks, environ={})
            settings = {
                "parent": os.getpid(),
                "ranks": ranks,
                "rank": rank,
                "cores": mine.cores,
                "threads": sorted({1, mine.threads}) if ranks == 1 else [mine.threads],
                "budget_s": 0.002 if quick else 0.007,
                "rounds": 2 if quick else 3,
                "quick": quick,
                "meeting": str(Path(meeting) / "store"),
                "deadline_s": DEADLINE_S,
            }
            running.append(_start(settings))
        try:
            return [_answer(process, rank) for rank, process in enumerate(running)]
        finally:
            for process in running:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def _start(settings: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.probe.worker", json.dumps(settings)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _answer(process: subprocess.Popen[str], rank: int) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(
            "the measurement did not end",
            where=f"process {rank}",
            why=f"{DEADLINE_S} s passed",
            fix="Probe when nothing else runs here; `paceline doctor` checks torch",
        ) from None
    # gloo's threads may outlive the interpreter, which then aborts after the work is done: what
    # counts is whether the answer is whole.
    try:
        # torch, or a library under it, may greet on stdout: the answer is the last line.
        answer: dict[str, Any] = json.loads(out.strip().rpartition("\n")[2])
    except json.JSONDecodeError:
        last = errors.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise Missing(
            "the measurement failed",
            where=f"process {rank}",
            why=last[0],
            fix="Run `paceline doctor`, which checks torch",
        ) from None
    return answer


def _device(cores: int, workers: Measured) -> Device:
    # Of the two ranks that ran at once the first speaks for both: they measured the same.
    configurations = [one for worker in workers[:2] for one in worker["configurations"]]
    memory = {one["processes"]: one["memory"] for one in configurations}
    alone, shared = memory.get(1), memory.get(PAIR)
    cache = node.cache_bytes()
    overheads = [Overhead.from_json(one) for each in configurations for one in each["overheads"]]
    frameworks = [
        FrameworkOverhead.from_json(one)
        for each in configurations
        for one in each["framework_overheads"]
    ]
    return Device(
        name=node.cpu_name(),
        kind="cpu",
        cores=cores,
        memory_bytes=_probed(float(node.memory_bytes())),
        cache_bytes=Quantity(value=float(cache), source="datasheet") if cache else None,
        bandwidth_bytes_per_s=_probed(alone["bandwidth"]) if alone else None,
        bandwidth_shared_bytes_per_s=_probed(shared["bandwidth"]) if shared else None,
        first_touch_bytes_per_s=_probed(alone["first_touch"]) if alone else None,
        rates=tuple(Rate.from_json(one) for each in configurations for one in each["rates"]),
        overheads=tuple(overheads),
        framework_overheads=(*frameworks, *_ddp(workers[1:])),
    )


def _ddp(pair: Measured) -> tuple[FrameworkOverhead, ...]:
    """Return what DistributedDataParallel adds on each of two ranks, the mean of both."""
    if not pair:
        return ()
    ddp = {key: sum(worker["ddp"][key] for worker in pair) / len(pair) for key in pair[0]["ddp"]}
    bare_s_per_byte = 1 / pair[0]["collectives"]["all_reduce"][1]
    where = {
        "framework": "ddp",
        "threads": pair[0]["configurations"][0]["threads"],
        "processes": PAIR,
    }
    phases: tuple[Phase, Phase] = ("forward", "backward")
    return (
        *(
            FrameworkOverhead(what="wrapper", phase=phase, seconds=_probed(ddp[phase]), **where)
            for phase in phases
        ),
        FrameworkOverhead(
            what="reduction",
            phase="backward",
            seconds_per_byte=_probed(max(0.0, 1 / ddp["bandwidth"] - bare_s_per_byte)),
            **where,
        ),
        # Buffers go in one broadcast per dtype: floats, and the counters of batches.
        FrameworkOverhead(
            what="buffer_broadcast", phase="forward", seconds=_probed(ddp["buffers"] / 2), **where
        ),
    )


def _collectives(pair: Measured) -> tuple[CollectiveCost, ...]:
    if not pair:
        return ()
    return tuple(
        CollectiveCost(
            backend="gloo",
            operation=operation,
            ranks=PAIR,
            level="loopback",
            points=(
                CollectivePoint(bytes=0.0, seconds=_probed(latency_s)),
                CollectivePoint(
                    bytes=float(1 << 24), seconds=_probed(latency_s + (1 << 24) / rate)
                ),
            ),
        )
        for operation, (latency_s, rate) in pair[0]["collectives"].items()
    )


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
        f"{cost.backend} {cost.operation} between {cost.ranks} ranks: "
        f"{cost.points[0].seconds.value * 1e6:.1f} us, "
        f"{cost.points[-1].bytes / cost.points[-1].seconds.value / 1e9:.2f} GB/s"
        for cost in machine.collectives
    ]
    lines += [
        f"{tier.name} ({tier.kind}): {tier.bandwidth_bytes_per_s.value / 1e9:.2f} GB/s, "
        f"open+stat {tier.open_latency_s.value * 1e6:.0f} us"
        for tier in machine.tiers
    ]
    return lines + [f"not measured: {one}" for one in machine.missing]
