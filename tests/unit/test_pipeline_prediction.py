"""Plans with stages at their limits, where the answer is known without a machine."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, sheet, small_machine

from paceline.core.errors import ConfigError, UsageError
from paceline.core.estimate import Estimate
from paceline.core.machine import Link
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Layer, LayerEdge, Operation, SharedParameter, Workload
from paceline.perf import divide, estimate
from paceline.perf.pipeline import stage_workloads

MIB = 1 << 20
RATE_PER_S = 1e9  # of small_machine, for FLOPs and bytes alike


def link(level, bandwidth_bytes_per_s=1e18, latency_s=0.0, sharing="node"):
    return Link(
        level=level,
        latency_s=sheet(latency_s),
        bandwidth_bytes_per_s=sheet(bandwidth_bytes_per_s),
        sharing=sharing,
    )


def machine_with(*links, **changes):
    return dataclasses.replace(small_machine(RATE_PER_S), links=links, **changes)


FREE = machine_with(link("loopback"), link("network"))


def layer(name, forward_s=1e-3, backward_s=2e-3, *, parameters=(MIB,), saved=0, optimizer_s=0.0):
    """A layer that takes so many seconds on one thread of the machine."""
    work = (("forward", forward_s), ("backward", backward_s), ("optimizer", optimizer_s))
    operations = tuple(
        Operation(
            phase=phase,
            operator="matmul",
            dtype="float32",
            count=1,
            flops=round(seconds * RATE_PER_S),
            bytes=0,
        )
        for phase, seconds in work
    )
    return Layer(
        name=name,
        kind="Linear",
        parameter_bytes=parameters,
        saved_bytes=saved,
        operations=operations,
    )


def workload_of(layers, sent_bytes=0, **changes):
    count = len(layers)
    edges = tuple(LayerEdge(n, (n + 1,), sent_bytes) for n in range(count - 1))
    settings = {"name": "w", "batch": 4, "input_bytes": 0, "edges": edges}
    return Workload(**(settings | changes), layers=tuple(layers))


def staged(stages, replicas=1, microbatches=8, **changes):
    mesh = Mesh(data=replicas, pipeline=stages)
    return Plan(mesh=mesh, microbatches=microbatches, **changes)


EQUAL = workload_of([layer(str(n)) for n in range(12)])


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 1), (2, 8), (3, 4), (4, 6)])
def test_equal_stages_with_free_links_idle_as_the_formula_says(schedule, stages, microbatches):
    plan = staged(stages, microbatches=microbatches, schedule=schedule)
    result = estimate(FREE, EQUAL, plan)
    bubble = (stages - 1) / (microbatches + stages - 1)
    assert result.bubble_share == pytest.approx(bubble)
    stage_s = 12 / stages * 3e-3
    assert result.step_time_s == pytest.approx((microbatches + stages - 1) * stage_s)
    assert result.breakdown.waiting == pytest.approx((stages - 1) * stage_s)
    assert result.shares["pipeline bubble"] == pytest.approx(bubble)
    assert [stage.layers for stage in result.stages] == [12 // stages] * stages
    live = [stage.live_microbatches for stage in result.stages]
    expected = [microbatches] * stages
    if schedule == "1f1b":
        expected = [min(stages - number, microbatches) for number in range(stages)]
    assert live == expected
    assert Estimate.from_text(result.to_text()) == result


def test_one_stage_is_predicted_as_ever():
    whole = dataclasses.replace(EQUAL, edges=())
    for plan in (Plan(), Plan(mesh=Mesh(data=2)), Plan(mesh=Mesh(data=4), nodes=2)):
        for part in ("breakdown", "memory_bytes", "link_bytes", "shares", "sources", "warnings"):
            assert getattr(estimate(FREE, EQUAL, plan), part) == getattr(
                estimate(FREE, whole, plan), part
            )
        assert estimate(FREE, EQUAL, plan).stages == ()


def test_the_stages_together_are_the_whole_model():
    result = estimate(FREE, EQUAL, staged(3))
    alone = estimate(FREE, EQUAL, Plan())
    assert sum(s.parameter_bytes for s in result.stages) == alone.memory_bytes["parameters"]
    assert sum(s.forward_s for s in result.stages) == pytest.approx(alone.breakdown.forward)
    assert sum(s.backward_s for s in result.stages) == pytest.approx(alone.breakdown.backward)


def test_layers_of_unequal_cost_are_divided_so_that_the_slowest_stage_is_fastest():
    costs = [1, 1, 1, 1, 4, 4]
    unequal = workload_of([layer(str(n), c * 1e-3, c * 2e-3) for n, c in enumerate(costs)])
    plan = divide(FREE, unequal, staged(2))
    assert plan.layers == (5, 1)
    assert divide(FREE, unequal, plan) is plan
    by_hand = staged(2, layers=(3, 3))
    assert estimate(FREE, unequal, by_hand).step_time_s > estimate(FREE, unequal, plan).step_time_s


def test_a_transfer_that_nothing_hides_is_communication():
    slow = machine_with(link("loopback", 1e6, 1e-3))
    sending = workload_of([layer(str(n)) for n in range(2)], sent_bytes=10_000)
    result = estimate(slow, sending, staged(2, microbatches=1))
    # forward, message, forward, backward, message, backward
    assert result.step_time_s == pytest.approx(6e-3 + 2 * (1e-3 + 1e-2))
    assert result.breakdown.transfer == pytest.approx(1.1e-2)  # one message to each rank
    assert result.link_bytes == {"node": 10_000 + 0}
    half = estimate(slow, sending, staged(2, microbatches=1, precision="bfloat16"))
    assert half.breakdown.transfer == pytest.approx(6e-3)


def test_stages_of_two_nodes_use_the_network_and_replicas_share_it():
    slow = machine_with(
        link("loopback"), link("network", 1e6), collectives=(collective("all_reduce"),)
    )
    sending = workload_of([layer(str(n)) for n in range(2)], sent_bytes=10_000)
    alone = estimate(slow, sending, staged(2, microbatches=1, nodes=2))
    assert alone.breakdown.transfer == pytest.approx(1e-2)
    both = estimate(slow, sending, staged(2, replicas=2, microbatches=1, nodes=2))
    assert both.breakdown.transfer == pytest.approx(2e-2 + both.stages[0].reduce_s)
    near = estimate(slow, sending, staged(2, microbatches=1))
    assert near.breakdown.transfer == pytest.approx(0, abs=1e-9)


def test_a_stage_that_ends_early_reduces_its_gradients_in_the_bubble():
    layers = [layer("0", parameters=(1000,)), layer("1", parameters=(MIB,))]
    machine = dataclasses.replace(FREE, collectives=(collective("all_reduce", 1e-4, 1e9),))
    result = estimate(machine, workload_of(layers), staged(2, replicas=2, layers=(1, 1)))
    small, large = (stage.reduce_s for stage in result.stages)
    assert small == pytest.approx(1e-4 + 1000 / 1e9)
    assert large == pytest.approx(1e-4 + MIB / 1e9)
    passes_s = 9 * 3e-3
    # Stage 1 ends a backward pass of stage 0, 2 ms, before the last one: its reduction is hidden.
    assert large < 2e-3
    assert result.step_time_s == pytest.approx(passes_s + small)


def test_memory_is_that_of_the_fullest_stage():
    layers = [layer(str(n), parameters=((n + 1) * 1000,), saved=50) for n in range(4)]
    workload = workload_of(layers, sent_bytes=10, optimizer_bytes=20_000, input_bytes=3)
    result = estimate(FREE, workload, staged(2, microbatches=4, layers=(2, 2)))
    assert result.memory_bytes == {
        "parameters": 7000,
        "gradients": 7000,
        "optimizer": 14_000,
        "activations": 100 + 10,  # one live microbatch, and what was received for it
        "buffers": 0,
        "input": 4 * 3,
        "buckets": 0,
    }
    first, last = (stage.memory_bytes for stage in result.stages)
    assert last == sum(result.memory_bytes.values())
    assert first == 3000 * 2 + 6000 + 2 * 100 + 4 * 3
    assert result.needed_memory_bytes == first + last


@given(
    sizes=st.lists(st.integers(1, 10 * MIB), min_size=4, max_size=10),
    stages=st.integers(2, 4),
    microbatches=st.integers(1, 9),
    replicas=st.integers(1, 2),
    schedule=st.sampled_from(["1f1b", "fill_drain", "zero_bubble"]),
)
def test_what_holds_for_every_model_and_plan(sizes, stages, microbatches, replicas, schedule):
    layers = [
        layer(str(n), size * 1e-9, size * 2e-9, parameters=(size,), saved=size)
        for n, size in enumerate(sizes)
    ]
    workload = workload_of(layers, sent_bytes=1000)
    plan = staged(stages, replicas, microbatches, schedule=schedule)
    result = estimate(FREE, workload, plan)
    fullest = max(stage.parameter_bytes for stage in result.stages)
    assert sum(result.memory_bytes.values()) >= fullest
    assert max(stage.memory_bytes for stage in result.stages) == sum(result.memory_bytes.values())
    assert result.step_time_s == pytest.approx(sum(s for _, s in result.breakdown.items()))
    assert min(seconds for _, seconds in result.breakdown.items()) >= 0
    slowest_s = max(stage.forward_s + stage.backward_s for stage in result.stages)
    assert result.step_time_s >= microbatches * slowest_s * (1 - 1e-9)
    assert 0 <= result.bubble_share < 1
    counts = [stage.layers for stage in result.stages]
    assert sum(counts) == len(sizes)
    bounds = list(itertools.accumulate(counts))
    assert [stage.last for stage in result.stages] == [str(end - 1) for end in bounds]


def test_replicas_that_shard_their_stage_keep_a_part_of_its_state():
    model = workload_of(
        [layer(str(n), optimizer_s=1e-3) for n in range(4)], optimizer_bytes=8 * MIB
    )
    machine = dataclasses.replace(FREE, collectives=(collective("all_reduce"),))
    whole, parts = (
        estimate(machine, model, staged(2, 2, engine=engine)) for engine in ("allreduce", "fsdp2")
    )
    assert parts.memory_bytes["optimizer"] == whole.memory_bytes["optimizer"] // 2 == 2 * MIB
    assert parts.memory_bytes["gradients"] == whole.memory_bytes["gradients"] * 3 // 2
    assert parts.breakdown.optimizer < whole.breakdown.optimizer
    assert parts.warnings == whole.warnings


def test_a_shared_parameter_is_held_by_each_of_its_stages():
    layers = [layer("embedding", parameters=(MIB,)), layer("body"), layer("head", parameters=())]
    shared = (SharedParameter((0, 2), MIB),)
    first, last = stage_workloads(workload_of(layers, shared=shared, optimizer_bytes=40), [1])
    assert first.parameter_bytes == MIB
    assert last.parameter_bytes == 2 * MIB
    assert (first.optimizer_bytes, last.optimizer_bytes) == (20, 40)
    together, _ = stage_workloads(workload_of(layers, shared=(SharedParameter((0, 1), MIB),)), [2])
    assert together.parameter_bytes == 2 * MIB


def test_a_model_that_fits_only_in_stages():
    huge = workload_of([layer(str(n), parameters=(200 * MIB,)) for n in range(4)])
    assert not estimate(FREE, huge, Plan()).fits
    # Both stages are on one CPU and share its memory; on two nodes they do not.
    assert not estimate(FREE, huge, staged(2)).fits
    assert estimate(FREE, huge, staged(2, nodes=2)).fits


def test_what_a_machine_or_a_model_lacks_is_named():
    with pytest.raises(UsageError, match="no link loopback or shared-memory"):
        estimate(machine_with(link("network")), EQUAL, staged(2))
    with pytest.raises(UsageError, match="no link network"):
        estimate(machine_with(link("loopback")), EQUAL, staged(2, nodes=2))
    bare = dataclasses.replace(FREE, collectives=())
    with pytest.raises(UsageError, match="no cost of all_reduce"):
        estimate(bare, EQUAL, staged(2, replicas=2))
    with pytest.raises(UsageError, match="12 layers cannot be divided into the plan's 13 stages"):
        estimate(FREE, EQUAL, staged(13))
    with pytest.raises(UsageError, match="which have 11 layers"):
        estimate(FREE, EQUAL, staged(2, layers=(5, 6)))
    with pytest.raises(ConfigError, match=r"'layers' is \[5, 6\] for 1 stages"):
        Plan(layers=(5, 6))
