"""Every type that everyone passes survives JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, sheet

from paceline.core.breakdown import Breakdown
from paceline.core.errors import ConfigError
from paceline.core.machine import (
    CollectiveCost,
    CollectivePoint,
    Device,
    Efficiency,
    Fabric,
    FrameworkOverhead,
    Link,
    Machine,
    Overhead,
    PeakRate,
    Point,
    Quantity,
    Rate,
    Tier,
)
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Dataset, Layer, Operation, Workload

SECONDS = st.floats(0, 1e6)
COUNT = st.integers(1, 2**40)
SOURCE = st.sampled_from(["datasheet", "probe", "fit"])
OPERATOR = st.sampled_from(["matmul", "convolution", "layer_norm", "elementwise"])
PHASE = st.sampled_from(["forward", "backward", "optimizer"])
QUANTITY = st.builds(
    Quantity, value=SECONDS, source=SOURCE, low=st.none() | SECONDS, high=st.none() | SECONDS
)
POSITIVE = st.builds(Quantity, value=st.floats(1e-6, 1e15), source=SOURCE, reference=st.text())
SHARE = st.builds(Quantity, value=st.floats(1e-3, 1), source=SOURCE)
EFFICIENCY = st.builds(
    Efficiency,
    **dict.fromkeys(("matmul", "attention", "bandwidth", "link", "network", "unaligned"), SHARE),
    layer_s=QUANTITY,
)


def tuples(strategy, max_size=3):
    return st.lists(strategy, max_size=max_size).map(tuple)


RATE = st.builds(
    Rate,
    operator=OPERATOR,
    phase=PHASE,
    dtype=st.sampled_from(["float32", "bfloat16"]),
    threads=COUNT,
    processes=COUNT,
    unit=st.sampled_from(["flops", "bytes"]),
    source=SOURCE,
    points=tuples(st.builds(Point, work=SECONDS, rate_per_s=SECONDS)),
)
OVERHEAD = st.builds(
    Overhead, operator=OPERATOR, phase=PHASE, threads=COUNT, processes=COUNT, seconds=QUANTITY
)
FRAMEWORK = st.builds(
    FrameworkOverhead,
    framework=st.sampled_from(["torch", "ddp"]),
    what=st.text(),
    phase=PHASE | st.just("other"),
    threads=COUNT,
    processes=COUNT,
    seconds=QUANTITY,
)
DEVICE = st.builds(
    Device,
    name=st.text(),
    kind=st.sampled_from(["cpu", "gpu", "npu"]),
    cores=COUNT,
    memory_bytes=POSITIVE,
    cache_bytes=st.none() | QUANTITY,
    bandwidth_bytes_per_s=st.none() | POSITIVE,
    peaks=tuples(st.builds(PeakRate, dtype=st.text(), flops_per_s=POSITIVE), 2),
    efficiency=st.none() | EFFICIENCY,
    rates=tuples(RATE, 2),
    overheads=tuples(OVERHEAD, 2),
    framework_overheads=tuples(FRAMEWORK, 2),
)
LINK = st.builds(
    Link,
    level=st.text(),
    latency_s=QUANTITY,
    bandwidth_bytes_per_s=POSITIVE,
    sharing=st.sampled_from(["pair", "device", "node", "all"]),
)
COLLECTIVE = st.builds(
    CollectiveCost,
    backend=st.sampled_from(["gloo", "nccl", "mpi"]),
    operation=st.sampled_from(["all_reduce", "broadcast"]),
    algorithm=st.sampled_from(["", "ring", "tree"]),
    ranks=st.integers(2, 4096),
    level=st.text(),
    points=st.lists(st.floats(0, 1e9), min_size=1, max_size=4, unique=True).flatmap(
        lambda sizes: st.tuples(
            *(st.builds(CollectivePoint, bytes=st.just(n), seconds=QUANTITY) for n in sorted(sizes))
        )
    ),
)
TIER = st.builds(
    Tier,
    name=st.text(),
    kind=st.text(),
    bandwidth_bytes_per_s=QUANTITY,
    open_latency_s=QUANTITY,
    cached=st.booleans(),
)
MACHINE = st.builds(
    Machine,
    name=st.text(),
    nodes=COUNT,
    devices=tuples(DEVICE, 2),
    links=tuples(LINK),
    collectives=tuples(COLLECTIVE),
    tiers=tuples(TIER),
    missing=tuples(st.text()),
    fabric=st.none() | st.builds(Fabric, topology=st.text(), group_nodes=COUNT, taper=SHARE),
)
OPERATION = st.builds(
    Operation,
    phase=PHASE,
    operator=OPERATOR,
    dtype=st.just("float32"),
    count=COUNT,
    flops=COUNT,
    bytes=COUNT,
)
LAYER = st.builds(
    Layer,
    name=st.text(),
    kind=st.text(),
    parameter_bytes=tuples(COUNT),
    frozen=tuples(st.integers(0, 2)),
    buffer_bytes=COUNT,
    saved_bytes=COUNT,
    operations=tuples(OPERATION),
)
WORKLOAD = st.builds(
    Workload,
    name=st.text(),
    batch=COUNT,
    input_bytes=COUNT,
    layers=tuples(LAYER),
    optimizer=st.text(),
    optimizer_bytes=COUNT,
    dataset=st.none()
    | st.builds(Dataset, samples_count=COUNT, sample_bytes=COUNT, seconds_per_sample=SECONDS),
    measured=tuples(st.text()),
    derived=tuples(st.text()),
)
PLAN = st.builds(
    Plan,
    mesh=st.builds(Mesh, data=COUNT, pipeline=COUNT, tensor=COUNT),
    precision=st.sampled_from(["float32", "bfloat16"]),
    threads=COUNT,
    bucket_bytes=COUNT,
    loader_workers=st.integers(0, 64),
)
BREAKDOWN = st.builds(Breakdown, forward=SECONDS, transfer=SECONDS)


@pytest.mark.parametrize("strategy", [MACHINE, WORKLOAD, PLAN, BREAKDOWN])
def test_survives_json(strategy):
    @given(strategy)
    def survives(record):
        data = json.loads(record.to_text())
        assert data["version"] == type(record).version
        assert type(record).from_json(data) == record
        assert type(record).from_text(record.to_text()) == record

    survives()


@given(st.integers(-3, 0), st.sampled_from(["threads", "nodes", "bucket_bytes"]))
def test_plan_refuses_what_cannot_run(count, name):
    with pytest.raises(ConfigError, match=name):
        Plan(**{name: count})


def test_plan_refuses_an_empty_mesh_and_negative_workers():
    with pytest.raises(ConfigError, match="data"):
        Mesh(data=0)
    with pytest.raises(ConfigError, match="loader_workers"):
        Plan(loader_workers=-1)


@given(st.integers(1, 64), st.integers(1, 8))
def test_ranks_per_node_covers_the_world(data, nodes):
    plan = Plan(mesh=Mesh(data=data), nodes=nodes)
    assert plan.ranks_per_node * nodes >= plan.mesh.world_size == data


def test_a_machine_finds_links_by_level_and_collectives_by_operation_and_ranks():
    fast = Quantity(value=1.0, source="datasheet")
    link = Link(level="network", latency_s=fast, bandwidth_bytes_per_s=fast)
    costs = tuple(collective("all_reduce", ranks=ranks) for ranks in (2, 8))
    machine = Machine(name="m", devices=(), links=(link,), collectives=costs)
    assert machine.link("network") == link
    assert machine.link("gloo") is None
    assert [machine.collective("all_reduce", ranks).ranks for ranks in (2, 4, 7, 64)] == [
        2,
        2,
        8,
        8,
    ]
    assert machine.collective("broadcast") is None


def test_costs_between_hosts_and_inside_one_are_kept_apart():
    inside = collective("all_reduce", ranks=8)
    between = tuple(
        collective("all_reduce", ranks=2 * hosts, hosts=hosts, algorithm="flat") for hosts in (2, 8)
    )
    machine = Machine(name="m", devices=(), collectives=(*between, inside))
    assert machine.collective("all_reduce", 2) == inside
    assert machine.collective("all_reduce", 8, hosts=2) == between[0]
    assert machine.collective("all_reduce", 8, hosts=9) == between[1]
    alone = Machine(name="m", devices=(), collectives=(inside,))
    assert alone.collective("all_reduce", 8, hosts=2) == inside  # an extrapolation, which is said
    only = Machine(name="m", devices=(), collectives=between)
    assert only.collective("all_reduce", 8) is None


def test_more_hosts_than_ranks_are_refused():
    with pytest.raises(ConfigError, match="2 ranks cannot be on 3 hosts"):
        collective("all_reduce", ranks=2, hosts=3)


def test_a_curve_without_rising_points_is_refused():
    low, high = (CollectivePoint(bytes=size, seconds=sheet(1)) for size in (1.0, 2.0))
    for points in ((), (high, low), (low, low)):
        with pytest.raises(ConfigError, match="rise in bytes"):
            CollectiveCost(backend="gloo", operation="all_reduce", level="network", points=points)
    with pytest.raises(ConfigError, match="at least 2 ranks"):
        collective("all_reduce", ranks=1)


def test_a_framework_overhead_counts_calls_or_bytes():
    where = {"framework": "ddp", "what": "x", "phase": "backward", "threads": 1, "processes": 1}
    for both in ({}, {"seconds": sheet(1), "seconds_per_byte": sheet(1)}):
        with pytest.raises(ConfigError, match="either seconds or seconds_per_byte"):
            FrameworkOverhead(**where, **both)
