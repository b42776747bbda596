"""Requests of `measure`, `links` and `doctor` to their workers, and answers; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.machine import (
    CollectiveCost,
    Disturbance,
    FrameworkOverhead,
    Overhead,
    Quantity,
    Rate,
)
from paceline.core.worker_process import WorkerMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureRequest(WorkerMessage):
    """The task of one of `ranks` processes that measure at the same time.

    Attributes:
        rank: of this process.
        ranks: 1 measures compute; 2 also collectives and DDP.
        cores: to run on.
        threads: counts of compute threads, each measured.
        budget_s: for one kernel in one round.
        rounds: of which the best counts.
        quick: fewer sizes and repetitions.
        repeat_s: that measuring disturbed parts again may take, for each number of threads.
        store: path of the file through which the ranks find each other; unused for one rank.
        deadline_s: for each collective.
        only_collectives: all operations, for two and more ranks, and nothing else.
    """

    rank: int
    ranks: int
    cores: tuple[int, ...]
    threads: tuple[int, ...]
    budget_s: float
    rounds: int
    quick: bool
    repeat_s: float
    store: str
    deadline_s: float
    only_collectives: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRates(WorkerMessage):
    """Bytes per second out of cache, and of memory that is touched for the first time."""

    bandwidth_bytes_per_s: Quantity
    first_touch_bytes_per_s: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeMeasurement(WorkerMessage):
    """Rates and overheads with `threads` threads in each of `processes` processes.

    `repeated` says what was measured again.
    """

    threads: int
    processes: int
    rates: tuple[Rate, ...]
    overheads: tuple[Overhead, ...]
    framework_overheads: tuple[FrameworkOverhead, ...]
    memory: MemoryRates
    disturbed: tuple[Disturbance, ...] = ()
    repeated: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationMeasurement(WorkerMessage):
    """Collectives of the ranks by library, and what DDP adds on top of them.

    `repeated` says what was measured again.
    """

    collectives: tuple[CollectiveCost, ...]
    ddp: tuple[FrameworkOverhead, ...]
    disturbed: tuple[Disturbance, ...] = ()
    repeated: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerMeasurement(WorkerMessage):
    """The measurements of one process; `communication` is None for a process alone."""

    torch: str
    compute: tuple[ComputeMeasurement, ...]
    communication: CommunicationMeasurement | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRequest(WorkerMessage):
    """Asks a process to answer each turn of the caller's.

    Attributes:
        descriptor: of the memory that both map; inherited.
        port: of this host, on which the caller listens.
        rounds: number of small turns; a hundredth of it are large ones.
        deadline_s: for each turn.
    """

    descriptor: int
    port: int
    rounds: int
    deadline_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkAnswer(WorkerMessage):
    """The end of all turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRequest(WorkerMessage):
    """Asks which torch is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchFacts(WorkerMessage):
    """The installed torch.

    Attributes:
        torch: its version.
        gpus: that it sees.
        backends: of ``torch.distributed`` that it was built with.
    """

    torch: str
    gpus: int
    backends: tuple[str, ...]
