"""Figures of a machine that nobody probed: what its description implies for a captured model.

`estimate` prices operators by rates and collectives by measured costs. A machine of the library
(`core.machine_file.library_machine`) has neither; its peaks and links imply both::

    peak, memory bandwidth, Efficiency   --> Rate            one point: the peak x its efficiency
    links, fabric, Efficiency            --> Link            at the bandwidth that collectives reach
    schedules.candidates over the links  --> CollectiveCost  the fastest at each size

So the schedules that the runtime executes are those that are priced. A convolution or product takes
the time of its FLOPs and that of its bytes, added: see `perf.transformer.pricing`. Starting kernels
costs nothing; the throughput that was published for one device (`anchored`) has that in it, at its
own batch.

Limits: efficiencies are those of the device's kind until a throughput says better; a library of
collectives other than Paceline's is priced as if it ran the fastest of these schedules; ranks that
use a link at the same time for other collectives share it evenly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.machine import (
    CollectiveCost,
    CollectivePoint,
    Link,
    Operator,
    Point,
    Quantity,
    Rate,
)
from paceline.core.plan import Plan
from paceline.perf.communication import reducing_collectives
from paceline.perf.compute import COMPUTE_PHASES, cost_model, step_compute
from paceline.perf.transformer.efficiency import efficiency_of
from paceline.perf.transformer.network import (
    NETWORK,
    fabric_taper,
    inside_level,
    network_link,
)
from paceline.perf.transformer.pricing import DeviceRates
from paceline.schedules import Topology, candidates, groups_of, schedule_s
from paceline.schedules.topology import ADD_BYTES

if TYPE_CHECKING:
    from paceline.core.machine import Machine
    from paceline.core.workload import Workload
    from paceline.schedules.schedule import Operation

# Classes whose time is that of their FLOPs and of their bytes; all others move bytes.
COMPUTING: tuple[Operator, ...] = ("matmul", "convolution", "attention")
DTYPES = ("float32", "bfloat16", "float16")
SIZES_BYTES = (0.0, *(float(1 << power) for power in range(10, 31, 2)))
MOST_TRANSFERS = 1_000_000
SHARED_MEMORY = "shared-memory"
# A message between processes that share memory is written once and read once.
_COPY_BYTES = 2
_SHARED_MEMORY_LATENCY_S = 1e-6  # of a wake-up between cores


def described(machine: Machine, plan: Plan, *, most_transfers: int = MOST_TRANSFERS) -> Machine:
    """Return the machine with the rates and collective costs that its description implies.

    What was measured stays: a figure is added where the machine has none, and a link is slowed to
    what collectives reach where it is not a probe's.

    Args:
        machine: its first device has peaks and a memory bandwidth, or rates (see `anchored`).
        plan: whose ranks communicate.
        most_transfers: schedules with more are not compared, see `schedules.candidates`.

    Raises:
        UsageError: the device has no peak or no bandwidth, or the plan's ranks no link.
    Cost: some 7 us for each transfer of the compared schedules; 7 s for 256 nodes of 8 devices.
    """
    device = machine.devices[0]
    if not device.rates:
        device = replace(device, rates=implied_rates(machine, plan.threads))
    machine = replace(
        machine, devices=(device, *machine.devices[1:]), links=_reached_links(machine, plan)
    )
    if plan.mesh.data == 1 or machine.collectives:
        return machine
    topology = replica_topology(machine, plan)
    operations: tuple[Operation, ...] = ("all_reduce",)
    if plan.engine == "ddp":
        operations += ("broadcast",)  # of buffers
    costs = tuple(_cost(operation, topology, plan, most_transfers) for operation in operations)
    return replace(machine, collectives=costs)


# --- compute -------------------------------------------------------------------------------------


def anchored(
    machine: Machine, workload: Workload, samples_per_s: float, *, threads: int = 1
) -> Machine:
    """Return the machine with rates at which one device has a published throughput.

    All rates are the peaks times one factor, so that a step of `workload` takes as long as it was
    published. The factor also stands for what the model does not see, such as starting kernels.

    Args:
        machine: its first device has peaks and a memory bandwidth.
        workload: of the model and the batch with which the throughput was measured.
        samples_per_s: that one device reached: one accelerator, or all cores of a CPU node.
        threads: compute threads of a rank on an accelerator; a CPU has all of its cores.

    Raises:
        UsageError: the device cannot reach that throughput by its peaks.
    """
    device = machine.devices[0]
    rates = implied_rates(machine, threads, reaches_peak=True)
    alone = Plan(threads=device.cores if device.kind == "cpu" else threads)
    peak = replace(machine, devices=(replace(device, rates=rates), *machine.devices[1:]))
    compute = step_compute(cost_model(peak, workload, alone), device, workload, alone)
    least_s = sum(compute.phases[phase].total_s for phase in COMPUTE_PHASES)
    factor = least_s * samples_per_s / workload.batch
    if not 0 < factor <= 1:
        raise UsageError(
            f"one {device.name} cannot reach {samples_per_s:g} samples/s",
            where=f"{machine.name}, {workload.name}",
            why=f"by its peaks {workload.batch / least_s:.4g} a second are possible",
            fix="Check the throughput, its number of devices, and the precision of the workload",
        )
    return with_peak_share(machine, factor, threads=threads)


def with_peak_share(machine: Machine, share: float, *, threads: int = 1) -> Machine:
    """Return the machine with rates that are one share of the first device's peaks.

    Args:
        machine: its first device has peaks and a memory bandwidth.
        share: for example what `peak_share` says of another machine whose devices are alike.
        threads: as in `anchored`.

    Raises:
        UsageError: the share is none, or the device has no peak rate or no memory bandwidth.
    """
    if not 0 < share <= 1:
        raise UsageError(
            f"a device cannot reach {share:g} of its peaks",
            where=machine.name,
            fix="Give a share above 0 and at most 1",
        )
    device = machine.devices[0]
    rates = implied_rates(machine, threads, reaches_peak=True)
    slowed = tuple(_times(rate, share) for rate in rates)
    return replace(machine, devices=(replace(device, rates=slowed), *machine.devices[1:]))


def peak_share(machine: Machine) -> float:
    """Return which part of its peaks the first device's convolutions reach.

    Args:
        machine: with the rates of `anchored`, `with_peak_share` or `implied_rates`.

    Raises:
        UsageError: the device has no such rate, no peak, or no memory bandwidth.
    """

    def per_s(rates: tuple[Rate, ...]) -> float:
        for rate in rates:
            if (rate.operator, rate.dtype, rate.unit) == ("convolution", "float32", "flops"):
                return rate.points[0].rate_per_s
        raise UsageError(
            "the device has no rate of convolutions",
            where=f"{machine.name}: devices[0].rates",
            fix="Give the machine that `anchored` returned",
        )

    return per_s(machine.devices[0].rates) / per_s(implied_rates(machine, reaches_peak=True))


def implied_rates(
    machine: Machine, threads: int = 1, *, reaches_peak: bool = False
) -> tuple[Rate, ...]:
    """Return the rates of the first device that its peaks and bandwidth imply.

    Args:
        machine: its first device has peaks and a memory bandwidth.
        threads: of a rank; an accelerator is as fast with any number. The rates of a CPU are those
            of all its cores, of which each thread has its share.
        reaches_peak: whether efficiencies are left out.

    Raises:
        UsageError: the device has no peak rate, or no memory bandwidth.
    """
    device = machine.devices[0]
    reached = efficiency_of(device)
    if reaches_peak:
        whole = Quantity(value=1.0, source="datasheet")
        reached = replace(reached, matmul=whole, attention=whole, bandwidth=whole)
    like = Rate(
        operator="elementwise",
        phase="forward",
        dtype="float32",
        threads=device.cores if device.kind == "cpu" else min(threads, device.cores),
        processes=1,
        unit="bytes",
        source=device.peaks[0].flops_per_s.source if device.peaks else "datasheet",
        points=(),
    )
    rates = []
    for dtype in DTYPES:
        found = DeviceRates.of(machine, dtype, reached)
        moved = replace(like, dtype=dtype, points=(Point(work=1.0, rate_per_s=found.bytes_per_s),))
        for operator in COMPUTING:
            per_s = found.attention_per_s if operator == "attention" else found.matmul_per_s
            computed = replace(moved, unit="flops", points=(Point(work=1.0, rate_per_s=per_s),))
            rates += [replace(rate, operator=operator) for rate in (computed, moved)]
        rates.append(moved)
    return tuple(rates)


def _times(rate: Rate, factor: float) -> Rate:
    points = (replace(point, rate_per_s=point.rate_per_s * factor) for point in rate.points)
    return replace(rate, source="fit", points=tuple(points))


# --- communication -------------------------------------------------------------------------------


def replica_topology(machine: Machine, plan: Plan) -> Topology:
    """Return where the replicas of the plan's first stage are, and what connects them.

    Rank = place x replicas + replica, and a node has consecutive ranks. Stages on one node reduce
    their gradients at the same time: each has its part of a link that the node shares.

    Args:
        machine: its links are those that collectives reach.
        plan: of the replicas.

    Raises:
        UsageError: the machine has no link between ranks of a node, or between nodes.
    """
    device = machine.devices[0]
    replicas, per_node = plan.mesh.data, plan.ranks_per_node
    hosts = groups_of(replicas, min(per_node, replicas))
    together = max(1, per_node // replicas)
    bandwidth = device.bandwidth_bytes_per_s
    sharing = per_node if device.kind == "cpu" else 1
    return Topology(
        hosts=hosts,
        inside=_part(_inside(machine), together) if len(hosts[0]) > 1 else None,
        across=_part(network_link(machine, plan.nodes), together) if len(hosts) > 1 else None,
        devices=1 if device.kind == "cpu" else min(device.count, len(hosts[0])),
        reduction_s_per_byte=ADD_BYTES * sharing / bandwidth.value if bandwidth else 0.0,
    )


def _reached_links(machine: Machine, plan: Plan) -> tuple[Link, ...]:
    """Return the links at the bandwidth that collectives reach; ranks of a node have one."""
    reached = efficiency_of(machine.devices[0])
    inside = _inside(machine)
    links = [_slowed(inside, reached.link.value)]
    for link in machine.links:
        if link.level == NETWORK:
            links.append(_slowed(link, reached.network.value * fabric_taper(machine, plan.nodes)))
        elif link.level != inside.level:
            links.append(link)
    return tuple(links)


def _inside(machine: Machine) -> Link:
    """Return the link between ranks of a node; without one, they copy through its memory."""
    for level in (SHARED_MEMORY, "loopback", inside_level(machine)):
        link = machine.link(level)
        if link is not None:
            return link if level == "loopback" else replace(link, level=SHARED_MEMORY)
    bandwidth = machine.devices[0].bandwidth_bytes_per_s
    if bandwidth is None:
        raise UsageError(
            "the machine has no link between ranks of a node, and no memory bandwidth",
            where=machine.name,
            fix="Add devices[0].bandwidth_bytes_per_s to the machine file",
        )
    return Link(
        level=SHARED_MEMORY,
        latency_s=Quantity(value=_SHARED_MEMORY_LATENCY_S, source="recalled"),
        bandwidth_bytes_per_s=replace(bandwidth, value=bandwidth.value / _COPY_BYTES),
        sharing="node",
    )


def _slowed(link: Link, efficiency: float) -> Link:
    whole = link.bandwidth_bytes_per_s
    if whole.source == "probe":
        return link
    part = Quantity(value=whole.value * efficiency, source=whole.source, reference=whole.reference)
    return replace(link, bandwidth_bytes_per_s=part)


def _part(link: Link, together: int) -> Link:
    """Return the link as one of some collectives sees it that use it at the same time."""
    whole = link.bandwidth_bytes_per_s
    shared = together if link.sharing in ("node", "all") else 1
    return replace(link, bandwidth_bytes_per_s=replace(whole, value=whole.value / shared))


def _cost(
    operation: Operation, topology: Topology, plan: Plan, most_transfers: int
) -> CollectiveCost:
    """Return the cost of the fastest schedule at each size."""
    found = candidates(operation, topology.hosts, most_transfers=most_transfers)
    seconds = np.array([schedule_s(schedule, topology, SIZES_BYTES) for schedule in found])
    least_s = seconds.min(axis=0)
    level = topology.across or topology.inside
    assert level is not None  # there are two ranks or more
    source = level.bandwidth_bytes_per_s.source
    return CollectiveCost(
        backend="paceline" if reducing_collectives(plan) == "paceline" else "schedules",
        operation=operation,
        algorithm=found[int(seconds[:, -1].argmin())].algorithm,
        ranks=plan.mesh.data,
        hosts=len(topology.hosts),
        level=level.level,
        points=tuple(
            CollectivePoint(bytes=size, seconds=Quantity(value=float(value), source=source))
            for size, value in zip(SIZES_BYTES, least_s, strict=True)
        ),
    )
