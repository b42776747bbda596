"""The Machine: what a cluster can do, each number with the place it came from.

It is where the loop begins: `paceline probe` measures one, a file under ``machines/`` describes
one, calibration returns a better one, and `perf` predicts from it. A rate depends on how many
threads ran and how many processes kept the node busy at the same time, so both stand beside it
instead of being folded into a peak that no program reaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.core.record import Record

Source = Literal["datasheet", "probe", "fit"]
Phase = Literal["forward", "backward", "optimizer"]
Operator = Literal[
    "matmul",
    "convolution",
    "attention",
    "batch_norm",
    "layer_norm",
    "softmax",
    "pooling",
    "embedding",
    "elementwise",
    "transcendental",
    "random",
    "view",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity(Record):
    """A number and where it came from."""

    value: float
    source: Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(Record):
    """One point of a curve: the work of a call and the rate that it reached.

    Attributes:
        work: FLOPs or bytes of one call.
        rate_per_s: FLOPs or bytes per second during that call, overhead taken off.
    """

    work: float
    rate_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate(Record):
    """How fast one class of operators runs, as a curve over the size of a call.

    Attributes:
        operator: the class.
        phase: of the training step; a backward call moves other bytes than the forward one.
        dtype: of the data, for example ``float32``.
        threads: compute threads of the process.
        processes: processes that compute at the same time on the node, this one included.
        unit: what `Point.work` counts.
        source: where the points came from.
        points: in the order of rising work; beyond the ends the nearest point holds.
    """

    operator: Operator
    phase: Phase
    dtype: str
    threads: int
    processes: int
    unit: Literal["flops", "bytes"]
    source: Source
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overhead(Record):
    """Seconds that one operator costs however little it computes.

    Attributes:
        operator: the class; ``step`` for what a phase costs once, however few operators it has;
            ``ddp`` for what DistributedDataParallel adds once to a phase, collectives aside.
        phase: of the training step.
        threads: compute threads of the process.
        processes: processes that compute at the same time on the node, this one included.
        seconds: per call.
    """

    operator: Operator | Literal["step", "ddp"]
    phase: Phase
    threads: int
    processes: int
    seconds: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(Record):
    """What computes: a node's CPU, or one of its accelerators.

    Attributes:
        name: as the maker calls it.
        kind: ``cpu`` stands for all cores of a node together.
        count: how many of it a node has.
        cores: that a job may use.
        memory_bytes: capacity that a job may use.
        cache_bytes: last level, shared by the cores.
        bandwidth_bytes_per_s: to memory, one process alone.
        bandwidth_shared_bytes_per_s: the same for each of two processes at once.
        first_touch_bytes_per_s: writing memory that the process has just got from the system.
        rates: curves per operator class, dtype, threads and busy processes.
        overheads: seconds per operator.
    """

    name: str
    kind: Literal["cpu", "gpu"]
    count: int = 1
    cores: int
    memory_bytes: Quantity
    cache_bytes: Quantity | None = None
    bandwidth_bytes_per_s: Quantity | None = None
    bandwidth_shared_bytes_per_s: Quantity | None = None
    first_touch_bytes_per_s: Quantity | None = None
    rates: tuple[Rate, ...] = ()
    overheads: tuple[Overhead, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Record):
    """What joins two ranks, or what one collective costs between them.

    A message or collective of n bytes takes ``latency_s + n / bandwidth_bytes_per_s``.

    Attributes:
        level: for example ``shared-memory``, ``loopback``, ``network``, or with a library that runs
            over it, ``gloo``; ``ddp`` is what DistributedDataParallel pays for it.
        operation: ``send``, or the collective that was measured as a whole between `ranks` ranks.
        ranks: that took part.
        latency_s: of an empty message.
        bandwidth_bytes_per_s: of a long one, bytes as the caller counts them.
    """

    level: str
    operation: Literal["send", "all_reduce", "broadcast"] = "send"
    ranks: int = 2
    latency_s: Quantity
    bandwidth_bytes_per_s: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier(Record):
    """A place that holds samples.

    Attributes:
        name: for example ``local``.
        kind: the file system's type, for example ``ext4`` or ``lustre``.
        bandwidth_bytes_per_s: reading one file from end to end.
        open_latency_s: opening a small file and asking for its size.
        cached: whether the data may have come from the page cache.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: Quantity
    open_latency_s: Quantity
    cached: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(Record):
    """A cluster of equal nodes.

    Attributes:
        name: that people know it by.
        nodes: how many.
        devices: of one node; the first is the one that trains unless a Plan says otherwise.
        links: between ranks, nearest first.
        tiers: of storage, fastest first.
        missing: what could not be measured, and why.
    """

    name: str
    nodes: int = 1
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    tiers: tuple[Tier, ...] = ()
    missing: tuple[str, ...] = ()

    def link(self, level: str, operation: str = "send") -> Link | None:
        """Return the link of that level and operation, if the machine has one."""
        for link in self.links:
            if (link.level, link.operation) == (level, operation):
                return link
        return None
