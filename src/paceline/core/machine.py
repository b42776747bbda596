"""The Machine: the performance of a cluster, each number with its source and interval, if known.

`paceline probe` measures a Machine, a file under ``machines/`` describes one, `paceline calibrate`
corrects one by a run, and `perf` predicts from it. Four kinds of figures are kept apart, since each
kind has other readers:

    Rate, Overhead      cost of an operator on a device, by class, phase, dtype and threads
    FrameworkOverhead   time that torch or DistributedDataParallel adds to the operators
    Link                latency and bandwidth between two ranks, and which ranks share it
    CollectiveCost      duration of a library's collective over a link, as a curve over bytes

A rate depends on how many threads ran and how many processes kept the node busy at the same time,
so both are part of a rate's key, instead of being folded into a peak that no program reaches.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from paceline.core.collective_costs import costs_of, interpolated, nearest_cost
from paceline.core.errors import ConfigError
from paceline.core.machine_v1 import split_links, split_overheads
from paceline.core.record import Record

if TYPE_CHECKING:
    from paceline.core.plan import CollectivesChoice

Source = Literal["datasheet", "probe", "fit", "recalled"]
Phase = Literal["forward", "backward", "optimizer"]
StepPhase = Literal[
    "input",
    "copy",
    "compilation",
    "forward",
    "backward",
    "optimizer",
    "transfer",
    "waiting",
    "checkpoint",
    "evaluation",
    "host",
    "other",
]
Operator = Literal[
    "matmul",
    "convolution",
    "convolution_1d",
    "depthwise",
    "transposed",
    "recurrent",
    "attention",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "softmax",
    "pooling",
    "upsampling",
    "embedding",
    "embedding_bag",
    "foreach",
    "fused",
    "elementwise",
    "transcendental",
    "exponential",
    "hyperbolic",
    "random",
    "view",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity(Record):
    """A number, where it came from, and how far to trust it.

    Attributes:
        value: in the unit of the field that holds it.
        source: a maker's datasheet, a probe of this machine, a fit to several measurements, or
            ``recalled``: a published figure that was written down from memory, not read again.
        low: lower end of the interval: the smallest value that any single round of a probe gave, or
            the lower end of a fit's 95 % interval. None where it is not known.
        high: upper end of that interval.
        reference: document that has the number; empty for a measured one.
    """

    value: float
    source: Source
    low: float | None = None
    high: float | None = None
    reference: str = ""

    def scaled(self, factor: float) -> Quantity:
        """Return `factor` times the quantity, a number above 0."""
        low, high = (end if end is None else end * factor for end in (self.low, self.high))
        return dataclasses.replace(self, value=self.value * factor, low=low, high=high)


def _refuse_outside(
    key: str,
    quantity: Quantity,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> None:
    """Raise an error for a number that no machine can have; the reader of a file adds its name.

    Raises:
        ConfigError: it is none, or outside of its range.
    """
    value = quantity.value
    if math.isfinite(value) and value > above and least <= value <= most:
        return
    low = f"above {above:g}" if above > -math.inf else f"at least {least:g}"
    high = f" and at most {most:g}" if most < math.inf else ""
    raise ConfigError(f"'{key}' is {value:g}", where="Machine", fix=f"Give a number {low}{high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakRate(Record):
    """What a device reaches at most by its maker's word.

    Attributes:
        dtype: of the operands of a matrix product, for example ``bfloat16``.
        flops_per_s: of one device.
    """

    dtype: str
    flops_per_s: Quantity

    def __post_init__(self) -> None:
        _refuse_outside("flops_per_s", self.flops_per_s, above=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency(Record):
    """Which parts of a maker's peaks a machine reaches when it trains transformers.

    One set per machine. Each is a prior of the device's kind until measured steps refit it
    (`paceline.perf.transformer.fitting`).

    Attributes:
        matmul: of the peak rate, by large matrix products whose dimensions fit the device's tiles.
        attention: of the peak rate, by attention in one kernel.
        bandwidth: of the memory bandwidth, by operators that compute little.
        link: of the bandwidth between the devices of a node, by collectives.
        network: of the bandwidth between nodes, by collectives.
        unaligned: of `matmul`, by products with a dimension that does not fit the tiles.
        layer_s: seconds that a layer's forward pass costs however little it computes.
    """

    matmul: Quantity
    attention: Quantity
    bandwidth: Quantity
    link: Quantity
    network: Quantity
    unaligned: Quantity
    layer_s: Quantity

    def __post_init__(self) -> None:
        for name in ("matmul", "attention", "bandwidth", "link", "unaligned"):
            _refuse_outside(name, getattr(self, name), above=0, most=1)
        _refuse_outside("network", self.network, above=0)
        _refuse_outside("layer_s", self.layer_s, least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric(Record):
    """How the nodes of a machine are connected.

    Attributes:
        topology: for example ``fat-tree``, ``dragonfly``, ``torus`` or ``ethernet``.
        group_nodes: nodes that reach each other at their full bandwidth; 0: all.
        taper: bandwidth per node between groups, over that within one, 0 to 1.
    """

    topology: str
    group_nodes: int = 0
    taper: Quantity | None = None

    def __post_init__(self) -> None:
        if self.taper is not None:
            _refuse_outside("taper", self.taper, above=0, most=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point(Record):
    """One point of a curve: the work of a call and the rate that it reached.

    Attributes:
        work: FLOPs or bytes of one call.
        rate_per_s: FLOPs or bytes per second during that call, overhead taken off.
        low_per_s: lower end of the interval, as in `Quantity`.
        high_per_s: upper end of that interval.
    """

    work: float
    rate_per_s: float
    low_per_s: float | None = None
    high_per_s: float | None = None


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
        points: in the order of rising work; a power law between points, constant beyond the ends.
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
        operator: the class.
        phase: of the training step.
        threads: compute threads of the process.
        processes: processes that compute at the same time on the node, this one included.
        seconds: per call.
    """

    operator: Operator
    phase: Phase
    threads: int
    processes: int
    seconds: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameworkOverhead(Record):
    """Time that a framework adds to a step in addition to operators and collectives.

    `seconds` and `seconds_per_byte`: exactly one of the two is given.

    Attributes:
        framework: ``torch``, ``ddp`` (DistributedDataParallel), or ``loop`` (the script's own).
        what: of torch, ``phase`` is the fixed cost of a phase. Of DDP, ``wrapper`` is a fixed cost
            of a phase; ``reduction`` a cost per byte of gradients, which are copied into buckets
            and compete with the backward pass for the cores; ``buffer_broadcast`` the cost of one
            broadcast of buffers without the per-byte cost, the collective's own latency included.
            Of the loop, ``residual`` is measured time that the other figures do not explain.
        phase: of the training step.
        threads: compute threads of the process.
        processes: processes that compute at the same time on the node, this one included.
        backend: of the collectives, on which what DDP adds depends.
        seconds: per occurrence.
        seconds_per_byte: per byte.
    """

    framework: str
    what: str
    phase: StepPhase
    threads: int
    processes: int
    backend: str = "gloo"
    seconds: Quantity | None = None
    seconds_per_byte: Quantity | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.seconds_per_byte is None):
            raise ConfigError(
                "a framework overhead has either seconds or seconds_per_byte",
                where=f"{self.framework} {self.what} {self.phase}",
                fix="Give one of the two",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Device(Record):
    """A device that computes: a node's CPU, or one of its accelerators.

    Attributes:
        name: as the maker calls it.
        kind: ``cpu`` (all cores of a node together), ``gpu``, or another accelerator's kind.
        count: how many of it a node has.
        cores: that a job may use.
        memory_bytes: capacity that a job may use.
        cache_bytes: last level, shared by the cores.
        bandwidth_bytes_per_s: to memory, one process alone.
        bandwidth_shared_bytes_per_s: the same for each of two processes at once.
        first_touch_bytes_per_s: writing newly allocated memory for the first time.
        rates: curves per operator class, dtype, threads and busy processes.
        overheads: seconds per operator.
        framework_overheads: time that the training framework adds on this device.
        peaks: what the maker promises, by dtype.
        base_bytes: that a process holds on the device before it has a tensor.
        efficiency: what of the peaks training reaches; None: the prior of the device's kind.
    """

    version: ClassVar[int] = 2
    name: str
    kind: str
    count: int = 1
    cores: int
    memory_bytes: Quantity
    cache_bytes: Quantity | None = None
    bandwidth_bytes_per_s: Quantity | None = None
    bandwidth_shared_bytes_per_s: Quantity | None = None
    first_touch_bytes_per_s: Quantity | None = None
    rates: tuple[Rate, ...] = ()
    overheads: tuple[Overhead, ...] = ()
    framework_overheads: tuple[FrameworkOverhead, ...] = ()
    peaks: tuple[PeakRate, ...] = ()
    base_bytes: Quantity | None = None
    efficiency: Efficiency | None = None

    def __post_init__(self) -> None:
        _refuse_outside("memory_bytes", self.memory_bytes, above=0)
        if self.bandwidth_bytes_per_s is not None:
            _refuse_outside("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above=0)

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 kept framework overheads as operators of the classes ``step`` and ``ddp``."""
        return split_overheads(data)


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Record):
    """Connects two ranks: a message of n bytes takes ``latency_s + n / bandwidth_bytes_per_s``.

    Attributes:
        level: for example ``shared-memory``, ``loopback`` or ``network``.
        latency_s: of an empty message.
        bandwidth_bytes_per_s: of a long one.
        sharing: which ranks share that bandwidth when several send at once: only the ``pair``
            itself, all ranks of a ``device``, all ranks of a ``node``, or ``all`` that use the
            level.
        width: devices that the level joins; 0: not stated.
        adapters: among which a node's bandwidth is divided; one message uses one of them.
    """

    version: ClassVar[int] = 2
    level: str
    latency_s: Quantity
    bandwidth_bytes_per_s: Quantity
    sharing: Literal["pair", "device", "node", "all"] = "node"
    width: int = 0
    adapters: int = 1

    def __post_init__(self) -> None:
        if self.adapters < 1:
            raise ConfigError(
                f"'adapters' is {self.adapters}", where=self.level, fix="Give 1 or more"
            )
        _refuse_outside("latency_s", self.latency_s, least=0)
        _refuse_outside("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, above=0)

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 had collectives among the links; `Machine.upgrade` takes those out."""
        if data.get("operation", "send") != "send":
            raise ValueError("a collective is not a link")
        return {key: value for key, value in data.items() if key not in ("operation", "ranks")}


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivePoint(Record):
    """One point of a collective's curve.

    Attributes:
        bytes: of the tensor that one rank passes to the call.
        seconds: from the last rank's call to its end.
        cpu_seconds: that the threads of one rank use a core for a call; None: not measured.
    """

    bytes: float
    seconds: Quantity
    cpu_seconds: Quantity | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveCost(Record):
    """Duration of a library's collective operation over a link, as a curve over bytes.

    Attributes:
        backend: the library, for example ``gloo``, ``paceline``, ``nccl`` or ``mpi``.
        operation: for example ``all_reduce`` or ``broadcast``.
        algorithm: for example ``ring``; empty where the backend chooses and does not say. Between
            hosts ``flat`` (gloo, one group of all ranks) or ``two_level``.
        ranks: that took part.
        hosts: over which these ranks were spread; 1 = they shared memory.
        level: of the link between neighbouring ranks; between hosts, of the link that joins these.
        points: in the order of rising bytes; linear interpolation between points, constant
            extrapolation below the first, linear extrapolation beyond the last.
    """

    backend: str
    operation: str
    algorithm: str = ""
    ranks: int = 2
    hosts: int = 1
    level: str
    points: tuple[CollectivePoint, ...]

    def __post_init__(self) -> None:
        where = f"{self.backend} {self.operation}"
        if self.ranks < 2:
            raise ConfigError(
                f"a collective has at least 2 ranks, got {self.ranks}", where=where, fix="Give 2"
            )
        if not 1 <= self.hosts <= self.ranks:
            raise ConfigError(
                f"{self.ranks} ranks cannot be on {self.hosts} hosts", where=where, fix="Give fewer"
            )
        sizes = [point.bytes for point in self.points]
        if not sizes or any(low >= high for low, high in itertools.pairwise(sizes)):
            raise ConfigError(
                f"a collective's points must rise in bytes, got {sizes}",
                where=where,
                fix="Give at least one point, and each number of bytes once, in rising order",
            )

    @property
    def label(self) -> str:
        """Backend, operation, algorithm for people: ``paceline all_reduce two levels``."""
        algorithm = "two levels" if self.algorithm == "two_level" else self.algorithm
        return " ".join(filter(None, (self.backend, self.operation, algorithm)))

    def seconds_at(self, size_bytes: float) -> float:
        """Return the seconds of a call as it was measured, between its own number of ranks."""
        points = [(point.bytes, point.seconds.value) for point in self.points]
        return interpolated(points, size_bytes)

    def cpu_seconds_at(self, size_bytes: float) -> float | None:
        """Return the seconds for which a call uses a core of each rank; None: not measured."""
        points = [(point.bytes, point.cpu_seconds.value) for point in self.points
                  if point.cpu_seconds is not None]  # fmt: skip
        return interpolated(points, size_bytes) if points else None

    def scaled(self, factor: float) -> CollectiveCost:
        """Return the cost of calls that take `factor` times as long."""
        points = tuple(
            dataclasses.replace(
                point,
                seconds=point.seconds.scaled(factor),
                cpu_seconds=point.cpu_seconds and point.cpu_seconds.scaled(factor),
            )
            for point in self.points
        )
        return dataclasses.replace(self, points=points)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier(Record):
    """Storage that holds samples.

    Attributes:
        name: for example ``local``.
        kind: the file system's type, for example ``ext4`` or ``lustre``.
        bandwidth_bytes_per_s: reading one file from end to end.
        open_latency_s: of open() and fstat() of a small file.
        cached: whether the data may have come from the page cache.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: Quantity
    open_latency_s: Quantity
    cached: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbance(Record):
    """A part of a probe that stayed disturbed however often it was measured.

    Attributes:
        where: with what it was measured, for example ``2 threads alone``.
        part: what was measured, for example ``rates``.
        foreign_cores: cores that other processes used meanwhile, on average.
        why: what says that it was disturbed, in words.
    """

    where: str
    part: str
    foreign_cores: float
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(Record):
    """A cluster of equal nodes.

    Attributes:
        name: name of the cluster, for output.
        nodes: how many.
        devices: of one node; the first is the one that trains unless a Plan says otherwise.
        links: between ranks, nearest first.
        collectives: durations of libraries' collectives over these links.
        tiers: of storage, fastest first.
        missing: what could not be measured, and why.
        disturbed: what was measured while other work disturbed it; figures of these parts may be
            too slow.
        allocator: under which compute was measured (``keep``, ``system``, or ``own`` for one that
            the environment set); empty if that is not known.
        fabric: how the nodes are connected; None: not stated.
    """

    version: ClassVar[int] = 2
    name: str
    nodes: int = 1
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    collectives: tuple[CollectiveCost, ...] = ()
    tiers: tuple[Tier, ...] = ()
    missing: tuple[str, ...] = ()
    disturbed: tuple[Disturbance, ...] = ()
    allocator: str = ""
    fabric: Fabric | None = None

    def link(self, level: str) -> Link | None:
        """Return the link of that level, if the machine has one."""
        return next((link for link in self.links if link.level == level), None)

    def collective(
        self,
        operation: str,
        ranks: int = 2,
        *,
        collectives: CollectivesChoice = "torch",
        hosts: int = 1,
    ) -> CollectiveCost | None:
        """Return the operation's cost, measured with the nearest numbers of hosts and ranks.

        Args:
            operation: for example ``all_reduce``.
            ranks: that are to take part.
            collectives: of which library; ``torch`` is any but Paceline's.
            hosts: over which the ranks are spread; see `costs_of`.
        """
        costs = costs_of(self.collectives, operation, collectives, hosts)
        return nearest_cost(costs, hosts, ranks)

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 kept collectives, and what DDP pays for them, among the links."""
        return split_links(data)
