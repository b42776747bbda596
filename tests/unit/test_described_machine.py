"""Machines that nobody probed: what follows from peaks and links, at limits that are known."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, sheet

from paceline.core.errors import UsageError
from paceline.core.machine import Device, Fabric, Link, Machine, PeakRate
from paceline.core.machine_file import library_machine, library_names
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Layer, LayerEdge, Operation, Workload
from paceline.perf import estimate
from paceline.perf.described import (
    SIZES_BYTES,
    anchored,
    described,
    implied_rates,
    peak_share,
    replica_topology,
    with_peak_share,
)
from paceline.perf.transformer.efficiency import prior
from paceline.schedules import candidates, schedule_s

MIB = 1 << 20
PEAK, BANDWIDTH = 1e12, 1e11


def link(level, bandwidth_bytes_per_s=1e10, latency_s=1e-6, sharing="node"):
    return Link(
        level=level,
        latency_s=sheet(latency_s),
        bandwidth_bytes_per_s=sheet(bandwidth_bytes_per_s),
        sharing=sharing,
    )


def machine_of(kind="gpu", count=4, links=(), **changes):
    device = Device(
        name="device",
        kind=kind,
        cores=8,
        count=count,
        memory_bytes=sheet(16e9),
        bandwidth_bytes_per_s=sheet(BANDWIDTH),
        peaks=(PeakRate(dtype="float32", flops_per_s=sheet(PEAK)),),
    )
    settings = {"name": "m", "nodes": 64, "devices": (device,)}
    found = links or (link("nvlink", sharing="device"), link("network"))
    return Machine(**(settings | changes), links=found)


def operation(phase, operator="convolution", flops=10**9, size=10**6):
    return Operation(
        phase=phase, operator=operator, dtype="float32", count=1, flops=flops, bytes=size
    )


def workload_of(layers=4, batch=8, parameters=MIB, **changes):
    found = tuple(
        Layer(
            name=str(number),
            kind="Conv2d",
            parameter_bytes=(parameters,),
            operations=(operation("forward"), operation("backward", flops=2 * 10**9)),
        )
        for number in range(layers)
    )
    edges = tuple(LayerEdge(number, (number + 1,), 1000) for number in range(layers - 1))
    settings = {"name": "w", "batch": batch, "input_bytes": 0, "edges": edges}
    return Workload(**(settings | changes), layers=found)


def test_an_operator_takes_its_flops_and_its_bytes_at_the_prior_of_the_device():
    machine = machine_of()
    found = estimate(described(machine, Plan()), workload_of(), Plan())
    reached = prior(machine.devices[0])
    flops, moved = 4 * 3e9, 4 * 2e6
    expected = flops / (PEAK * reached.matmul.value) + moved / (BANDWIDTH * reached.bandwidth.value)
    assert found.breakdown.forward + found.breakdown.backward == pytest.approx(expected)


@pytest.mark.parametrize("threads", [1, 4, 16])
def test_an_accelerator_is_as_fast_with_any_threads_and_a_cpu_in_proportion(threads):
    plan = Plan(threads=threads)
    times = {}
    for kind in ("gpu", "cpu"):
        machine = machine_of(kind)
        times[kind] = [
            estimate(described(machine, which), workload_of(), which).step_time_s
            for which in (Plan(threads=1), plan)
        ]
    assert times["gpu"][1] == pytest.approx(times["gpu"][0])
    assert times["cpu"][1] == pytest.approx(times["cpu"][0] / min(threads, 8))


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("batch", [1, 8, 1000])
def test_one_device_has_the_throughput_to_which_it_is_anchored(kind, batch):
    machine, workload = machine_of(kind), workload_of(batch=batch)
    rate = batch / 0.05
    found = anchored(machine, workload, rate)
    plan = Plan(threads=8 if kind == "cpu" else 1)
    alone = estimate(described(found, plan), workload, plan)
    assert workload.batch / alone.step_time_s == pytest.approx(rate)
    assert 0 < peak_share(found) < 1
    shared = with_peak_share(machine, peak_share(found))
    for rate_of, expected in zip(shared.devices[0].rates, found.devices[0].rates, strict=True):
        assert rate_of.points[0].rate_per_s == pytest.approx(expected.points[0].rate_per_s)


def test_a_throughput_beyond_the_peak_is_refused_with_what_is_possible():
    with pytest.raises(UsageError, match=r"by its peaks .* a second are possible"):
        anchored(machine_of(), workload_of(), 1e9)
    with pytest.raises(UsageError, match="no rate of convolutions"):
        peak_share(machine_of())
    for share in (0.0, -1.0, 1.5, float("nan")):
        with pytest.raises(UsageError, match="of its peaks"):
            with_peak_share(machine_of(), share)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 12, 20])
def test_gradients_cost_what_the_fastest_schedule_takes_over_the_links(ranks):
    machine = machine_of()
    plan = Plan(mesh=Mesh(data=ranks), nodes=-(-ranks // 4), engine="allreduce")
    found = described(machine, plan)
    (cost,) = found.collectives
    topology = replica_topology(found, plan)
    fastest_s = np.min(
        [schedule_s(s, topology, SIZES_BYTES) for s in candidates("all_reduce", topology.hosts)],
        axis=0,
    )
    assert [point.seconds.value for point in cost.points] == pytest.approx(fastest_s)
    assert (cost.ranks, cost.hosts) == (ranks, len(topology.hosts))
    assert estimate(found, workload_of(), plan).breakdown.transfer >= 0


def test_the_passes_of_an_accelerator_hide_all_but_the_last_bucket():
    workload = workload_of(layers=6, parameters=8 * MIB)
    plan = Plan(
        mesh=Mesh(data=8), nodes=2, engine="allreduce", bucket_bytes=MIB, first_bucket_bytes=MIB
    )
    slow = with_peak_share(machine_of(), 0.01)
    found = described(slow, plan)
    last_s = found.collectives[0].seconds_at(8 * MIB)
    breakdown = estimate(found, workload, plan).breakdown
    assert breakdown.backward / 6 > last_s
    assert breakdown.transfer == pytest.approx(last_s)
    # The cores of a CPU both compute and move bytes.
    cpu = described(with_peak_share(machine_of("cpu"), 0.01), plan)
    assert estimate(cpu, workload, plan).breakdown.transfer > 5 * last_s


def test_stages_on_a_node_share_its_links():
    machine = machine_of("cpu", 1, (link("network"),))
    alone = Plan(mesh=Mesh(data=4), nodes=1)
    shared = Plan(mesh=Mesh(data=4, pipeline=2), nodes=1)
    for plan, sharing in ((alone, 1), (shared, 2)):
        topology = replica_topology(described(machine, plan), plan)
        copied = BANDWIDTH / 2 * prior(machine.devices[0]).link.value
        assert topology.inside.bandwidth_bytes_per_s.value == pytest.approx(copied / sharing)


def test_the_network_is_slower_between_groups_of_the_fabric():
    fabric = Fabric(topology="fat-tree", group_nodes=4, taper=sheet(0.5))
    machine = machine_of(fabric=fabric)
    times = []
    for nodes in (4, 8):
        plan = Plan(mesh=Mesh(data=4 * nodes), nodes=nodes)
        across = replica_topology(described(machine, plan), plan).across
        times.append(across.bandwidth_bytes_per_s.value)
    assert times[1] == pytest.approx(times[0] / 2)


def test_what_was_measured_stays():
    measured = dataclasses.replace(
        machine_of(),
        collectives=(collective("all_reduce"),),
        links=(
            dataclasses.replace(
                link("loopback"),
                bandwidth_bytes_per_s=dataclasses.replace(sheet(5e9), source="probe"),
            ),
        ),
    )
    found = described(measured, Plan(mesh=Mesh(data=2)))
    assert found.collectives == measured.collectives
    assert found.link("loopback") == measured.link("loopback")
    rates = implied_rates(machine_of())
    device = dataclasses.replace(measured.devices[0], rates=rates[:1])
    kept = described(dataclasses.replace(measured, devices=(device,)), Plan())
    assert kept.devices[0].rates == rates[:1]


def test_a_machine_without_a_link_between_nodes_says_so():
    machine = machine_of(links=(link("nvlink"),))
    with pytest.raises(UsageError, match="needs a link between nodes"):
        described(machine, Plan(mesh=Mesh(data=8), nodes=2))


@pytest.mark.parametrize("name", library_names())
@pytest.mark.parametrize(("stages", "nodes"), [(1, 1), (1, 3), (2, 1), (4, 2)])
def test_every_machine_of_the_library_predicts_a_captured_model(name, stages, nodes):
    machine = library_machine(name)
    nodes = nodes if machine.link("network") else 1
    ranks = nodes * machine.devices[0].count * stages
    plan = Plan(
        mesh=Mesh(data=ranks // stages, pipeline=stages),
        nodes=nodes,
        threads=machine.devices[0].cores if machine.devices[0].kind == "cpu" else 1,
        collectives="paceline",
        engine="allreduce",
    )
    found = estimate(described(machine, plan), workload_of(), plan)
    assert 0 < found.low_s < found.step_time_s < found.high_s


@given(st.integers(2, 40), st.integers(1, 6), st.integers(10, 25))
def test_more_bytes_or_slower_links_never_take_less_time(ranks, nodes, power):
    nodes = min(nodes, ranks)
    plan = Plan(mesh=Mesh(data=ranks), nodes=nodes, engine="allreduce")
    fast, slow = (
        described(machine_of(count=40, links=(link("nvlink", b), link("network", b))), plan)
        for b in (1e10, 5e9)
    )
    seconds = [m.collectives[0].seconds_at(float(1 << power)) for m in (fast, slow)]
    assert seconds[0] <= seconds[1] * (1 + 1e-12)
    assert fast.collectives[0].seconds_at(2.0**power) <= fast.collectives[0].seconds_at(
        2.0 ** (power + 1)
    )
