"""The estimate at its limits, where the answer is known without a machine."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, framework, sheet

from paceline.core.errors import UsageError
from paceline.core.estimate import Estimate
from paceline.core.machine import (
    CollectiveCost,
    CollectivePoint,
    Device,
    FrameworkOverhead,
    Machine,
    Overhead,
    Point,
    Rate,
)
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Dataset, Layer, Operation, Workload
from paceline.perf import choose_buckets, estimate
from paceline.perf.communication import (
    Bucket,
    all_reduce_s,
    broadcast_s,
    exposed_s,
    make_buckets,
)
from paceline.perf.costs import CostModel, rate_at

MIB = 1 << 20


def rate(operator, per_s, **changes):
    settings = {
        "operator": operator,
        "phase": "forward",
        "dtype": "float32",
        "threads": 1,
        "processes": 1,
        "unit": "flops" if operator == "matmul" else "bytes",
        "source": "datasheet",
        "points": (Point(work=1.0, rate_per_s=float(per_s)),),
    }
    return Rate(**(settings | changes))


def overhead(operator, phase, seconds):
    return Overhead(operator=operator, phase=phase, threads=1, processes=1, seconds=sheet(seconds))


def make_machine(overheads=(), collectives=True, **device):
    settings = {
        "name": "cpu",
        "kind": "cpu",
        "cores": 4,
        "memory_bytes": sheet(1 << 30),
        "rates": (rate("matmul", 1e9), rate("elementwise", 1e8)),
        "overheads": tuple(overhead for overhead in overheads if isinstance(overhead, Overhead)),
        "framework_overheads": tuple(
            overhead for overhead in overheads if isinstance(overhead, FrameworkOverhead)
        ),
    }
    gloo = (collective("all_reduce"), collective("broadcast")) if collectives else ()
    device = Device(**(settings | device))
    return Machine(name="m", devices=(device,), collectives=gloo)


def operation(phase, operator="matmul", count=1, flops=0, bytes_=0):
    return Operation(
        phase=phase, operator=operator, dtype="float32", count=count, flops=flops, bytes=bytes_
    )


def make_workload(operations, **changes):
    layer = Layer(
        name="0",
        kind="Linear",
        parameter_bytes=(MIB,),
        buffer_bytes=changes.pop("buffer_bytes", 0),
        operations=tuple(operations),
    )
    return Workload(**({"name": "w", "batch": 8, "input_bytes": 0, "layers": (layer,)} | changes))


STEP = (
    operation("forward", flops=1_000_000),
    operation("backward", count=2, flops=1_000_000),
    operation("optimizer", "elementwise", bytes_=100_000),
)


def test_large_operators_cost_work_over_rate():
    result = estimate(make_machine(), make_workload(STEP), Plan())
    assert result.breakdown.forward == pytest.approx(1e-3)
    assert result.breakdown.backward == pytest.approx(2e-3)
    assert result.breakdown.optimizer == pytest.approx(1e-3)
    assert result.breakdown.transfer == result.breakdown.input == 0
    assert result.step_time_s == pytest.approx(result.breakdown.total_s)
    assert result.low_s < result.step_time_s < result.high_s
    assert result.limit == "compute"
    assert result.shares["compute"] == pytest.approx(0.75)


def test_ranks_that_share_cores_take_longer():
    machine, workload = make_machine(), make_workload(STEP)
    enough = estimate(machine, workload, Plan(mesh=Mesh(data=4)))
    crowded = estimate(machine, workload, Plan(mesh=Mesh(data=8)))
    assert crowded.breakdown.forward == pytest.approx(2 * enough.breakdown.forward)
    assert crowded.breakdown.backward == pytest.approx(2 * enough.breakdown.backward)
    assert "8 ranks share 4 cores, oversubscription factor 2" in crowded.sources["forward"]
    spread = estimate(machine, workload, Plan(mesh=Mesh(data=8), nodes=2))
    assert spread.breakdown.forward == pytest.approx(enough.breakdown.forward)


def test_small_operators_cost_their_overhead():
    machine = make_machine(
        [overhead("matmul", "forward", 1e-3), framework("torch", "phase", "forward", 0.5e-3)]
    )
    workload = make_workload([operation("forward", count=10, flops=1)])
    result = estimate(machine, workload, Plan())
    assert result.breakdown.forward == pytest.approx(10.5e-3, rel=1e-3)
    assert result.limit == "operator overhead"


def test_a_class_without_figures_costs_what_an_elementwise_one_does():
    machine = make_machine([overhead("elementwise", "forward", 1e-3)])
    workload = make_workload([operation("forward", "softmax", bytes_=100_000)])
    assert estimate(machine, workload, Plan()).breakdown.forward == pytest.approx(2e-3)


def test_a_class_of_later_machines_costs_what_the_nearest_one_does():
    machine = make_machine(
        overheads=(overhead("convolution", "forward", 5e-3),),
        rates=(rate("convolution", 1e9, unit="flops"), rate("elementwise", 1e3)),
    )
    costs = CostModel(machine.devices[0], threads=1, processes=1, step_bytes=0, precision="float32")
    own = costs.cost(operation("forward", "convolution", flops=10**6, bytes_=8))
    assert costs.cost(operation("forward", "depthwise", flops=10**6, bytes_=8)) == own
    assert own.total_s == pytest.approx(6e-3)


def test_equal_layers_cost_the_same_and_are_computed_once():
    costs = CostModel(
        make_machine().devices[0], threads=1, processes=1, step_bytes=0, precision="float32"
    )
    first, second = ((operation("forward", flops=10**6, bytes_=8),) for _ in range(2))
    assert first is not second
    assert costs.layer(first) is costs.layer(second)
    assert costs.layer(first).phases["forward"] == costs.cost(first[0])


def test_a_class_with_two_rates_pays_both():
    rates = (
        rate("elementwise", 1e8),
        rate("convolution", 1e9, unit="flops"),
        rate("convolution", 1e8, unit="bytes"),
    )
    work = operation("forward", "convolution", flops=10**6, bytes_=10**5)
    result = estimate(make_machine(rates=rates), make_workload([work]), Plan())
    assert result.breakdown.forward == pytest.approx(2e-3)
    assert result.shares["compute"] == pytest.approx(0.5)


def test_a_view_costs_only_its_overhead():
    machine = make_machine([overhead("view", "forward", 1e-3)])
    workload = make_workload([operation("forward", "view", bytes_=10**9)])
    assert estimate(machine, workload, Plan()).breakdown.forward == pytest.approx(1e-3)


def test_beyond_the_cache_memory_limits():
    operations = [operation("forward", "elementwise", bytes_=10_000_000)]
    slow = make_machine(bandwidth_bytes_per_s=sheet(1e7), cache_bytes=sheet(4 * MIB))
    small = make_workload(operations)
    large = make_workload(operations, optimizer_bytes=64 * MIB)
    assert estimate(slow, small, Plan()).breakdown.forward == pytest.approx(0.1)
    result = estimate(slow, large, Plan())
    assert result.breakdown.forward == pytest.approx(1.0)
    assert result.limit == "memory bandwidth"


def test_a_plan_names_the_collectives_that_it_is_predicted_with():
    gloo = FrameworkOverhead.from_json(
        {**framework("ddp", "reduction", "backward", 0).to_json(), "seconds": None}
        | {"processes": 2, "seconds_per_byte": sheet(1e-9).to_json()}
    )
    ours = dataclasses.replace(gloo, backend="paceline", seconds_per_byte=sheet(0.0))
    machine = make_machine([gloo, ours])
    fast = collective("all_reduce", 1e-5, 1e10, backend="paceline")
    both = dataclasses.replace(machine, collectives=(*machine.collectives, fast))
    workload, plan = make_workload(STEP), Plan(mesh=Mesh(data=2))
    transfer_s = estimate(both, workload, plan).breakdown.transfer
    assert transfer_s == pytest.approx(1e-3 + MIB / 1e9 + MIB * 1e-9)
    paceline = dataclasses.replace(plan, collectives="paceline")
    planned = estimate(both, workload, paceline)
    assert planned.breakdown.transfer == pytest.approx(1e-5 + MIB / 1e10)
    assert planned.sources["transfer"].startswith("paceline")
    with pytest.raises(UsageError, match="no cost of all_reduce by paceline"):
        estimate(machine, workload, paceline)


def test_a_plan_names_the_engine_that_it_is_predicted_with():
    wrapper = [framework("ddp", "wrapper", phase, 0.5) for phase in ("forward", "backward")]
    machine = make_machine(wrapper)
    fast = collective("all_reduce", 1e-5, 1e10, backend="paceline")
    both = dataclasses.replace(machine, collectives=(*machine.collectives, fast))
    workload, plan = make_workload(STEP), Plan(mesh=Mesh(data=2))
    ddp = estimate(both, workload, plan)
    for engine in ("allreduce", "sharded"):
        own = estimate(both, workload, dataclasses.replace(plan, engine=engine))
        assert own.breakdown.transfer == pytest.approx(1e-5 + MIB / 1e10)
        assert own.breakdown.forward == pytest.approx(ddp.breakdown.forward - 0.5)
        assert any("'sharded' is predicted as" in line for line in own.warnings) == (
            engine == "sharded"
        )


def test_memory_that_the_process_gives_back_is_touched_again():
    machine = make_machine(first_touch_bytes_per_s=sheet(1e6))
    kept = make_workload(STEP, largest_bytes=MIB)  # all there is: never more than twice that
    given_back = make_workload(STEP, largest_bytes=100_000)
    system = Plan(allocator="system")
    before = estimate(machine, kept, system).step_time_s
    assert estimate(machine, given_back, system).step_time_s == pytest.approx(before + 0.15)
    assert estimate(machine, given_back, Plan()).step_time_s == pytest.approx(before)


def test_threads_scale_a_rate_up_to_the_cores():
    workload = make_workload(STEP)
    one = estimate(make_machine(), workload, Plan()).breakdown.forward
    four = estimate(make_machine(), workload, Plan(threads=4)).breakdown.forward
    many = estimate(make_machine(), workload, Plan(threads=64)).breakdown.forward
    assert one == pytest.approx(4 * four)
    assert many == pytest.approx(four)


def test_the_nearest_measurement_wins():
    rates = (
        rate("matmul", 1e9),
        rate("matmul", 5e8, processes=2),
        rate("matmul", 4e9, dtype="bfloat16"),
        rate("matmul", 3e9, threads=4),
    )
    machine = make_machine(rates=rates)
    workload = make_workload([operation("backward", flops=10**9)])
    plain = estimate(machine, workload, Plan())
    assert plain.breakdown.backward == pytest.approx(1.0)
    shared = estimate(machine, workload, Plan(mesh=Mesh(data=2)))
    assert shared.breakdown.backward == pytest.approx(2.0)
    half = estimate(machine, workload, Plan(precision="bfloat16"))
    assert half.breakdown.backward == pytest.approx(0.25)
    assert "scaled" in estimate(machine, workload, Plan(threads=3)).sources["forward"]


def test_data_parallel_pays_for_gradients_buffers_and_the_wrapper():
    machine = make_machine(
        [
            framework("ddp", "wrapper", "forward", 1e-3),
            framework("ddp", "wrapper", "backward", 2e-3),
        ]
    )
    workload = make_workload(STEP, buffer_bytes=1000)
    alone = estimate(machine, workload, Plan()).breakdown
    result = estimate(machine, workload, Plan(mesh=Mesh(data=2)))
    assert result.breakdown.forward == pytest.approx(alone.forward + 1e-3)
    assert result.breakdown.backward == pytest.approx(alone.backward + 2e-3)
    reduce_s, broadcasts_s = 1e-3 + MIB / 1e9, 2e-3 + 1000 / 1e9
    assert result.breakdown.transfer == pytest.approx(reduce_s + broadcasts_s)
    assert result.link_bytes == {"node": MIB + 1000}
    assert result.memory_bytes["buckets"] == MIB
    over_network = estimate(machine, workload, Plan(mesh=Mesh(data=2), nodes=2))
    assert set(over_network.link_bytes) == {"network"}


def test_accumulated_gradients_are_reduced_in_the_last_backward_pass():
    layers = tuple(
        Layer(
            name=name,
            kind="Linear",
            parameter_bytes=(30 * MIB,),
            operations=(operation("backward", flops=4 * 10**6, count=1),),
        )
        for name in ("first", "second")
    )
    costs = (collective("all_reduce", 3e-3, 1e15),)
    machine = dataclasses.replace(make_machine(), collectives=costs)
    plan = Plan(mesh=Mesh(data=2), threads=1, bucket_bytes=30 * MIB)
    exposed = [
        estimate(
            machine,
            Workload(name="w", batch=1, input_bytes=0, layers=layers, accumulation=passes),
            plan,
        ).breakdown.transfer
        for passes in (1, 4)
    ]
    # One pass: a bucket is ready at half time. Four: at 7 eighths, so that less of it is hidden.
    assert exposed[0] < exposed[1]


def test_frozen_parameters_need_no_gradients_buckets_or_all_reduce():
    layers = (
        Layer(name="backbone", kind="x", parameter_bytes=(64 * MIB, MIB), frozen=(0, 1)),
        Layer(name="head", kind="x", parameter_bytes=(MIB, 2 * MIB), frozen=(1,)),
    )
    frozen = Workload(name="w", batch=1, input_bytes=0, layers=layers, optimizer_bytes=MIB)
    head = Workload(
        name="w",
        batch=1,
        input_bytes=0,
        layers=(Layer(name="head", kind="x", parameter_bytes=(MIB,)),),
        optimizer_bytes=MIB,
    )
    plan = Plan(mesh=Mesh(data=2))
    found, alone = (estimate(make_machine(), workload, plan) for workload in (frozen, head))
    assert found.breakdown.transfer == pytest.approx(alone.breakdown.transfer)
    assert found.breakdown.transfer == pytest.approx(1e-3 + MIB / 1e9)
    assert found.link_bytes == alone.link_bytes
    assert found.memory_bytes["parameters"] == 68 * MIB
    for kind in ("gradients", "buckets", "optimizer"):
        assert found.memory_bytes[kind] == MIB, kind
    assert found.trained_parameter_bytes == MIB


def test_the_loader_is_waited_for_only_when_it_is_slower():
    data = Dataset(samples_count=100, sample_bytes=10, seconds_per_sample=1e-3)
    workload = make_workload(STEP, dataset=data)
    busy_s = 4e-3
    in_loop = estimate(make_machine(), workload, Plan())
    assert in_loop.breakdown.input == pytest.approx(8e-3)
    assert in_loop.limit == "data loading"
    one = estimate(make_machine(), workload, Plan(loader_workers=1)).breakdown.input
    four = estimate(make_machine(), workload, Plan(loader_workers=4)).breakdown.input
    assert (one, four) == (pytest.approx(8e-3 - busy_s), 0.0)


def test_memory_by_kind_and_precision():
    layer = Layer(name="", kind="x", parameter_bytes=(100, 20), buffer_bytes=7, saved_bytes=1000)
    workload = Workload(name="w", batch=1, input_bytes=5, layers=(layer,), optimizer_bytes=240)
    found = estimate(make_machine(), workload, Plan(precision="bfloat16")).memory_bytes
    assert found == {
        "parameters": 120,
        "gradients": 120,
        "optimizer": 240,
        "activations": 500,
        "buffers": 7,
        "input": 5,
        "buckets": 0,
    }


def test_what_cannot_be_predicted_is_refused():
    workload = make_workload(STEP)
    with pytest.raises(UsageError, match="data parallelism"):
        estimate(make_machine(), workload, Plan(mesh=Mesh(tensor=2)))
    with pytest.raises(UsageError, match="what the layers of the model exchange"):
        estimate(make_machine(), workload, Plan(mesh=Mesh(pipeline=2)))
    with pytest.raises(UsageError, match="no compute rates"):
        estimate(make_machine(rates=()), workload, Plan())
    with pytest.raises(UsageError, match="all_reduce"):
        estimate(make_machine(collectives=False), workload, Plan(mesh=Mesh(data=2)))


def test_an_estimate_survives_json():
    result = estimate(make_machine(), make_workload(STEP), Plan(mesh=Mesh(data=2)))
    assert Estimate.from_text(result.to_text()) == result


POSITIVE = st.floats(1.0, 1e12)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=5, unique_by=lambda p: p[0]))
def test_a_rate_lies_between_its_points(pairs):
    points = tuple(Point(work=work, rate_per_s=per_s) for work, per_s in sorted(pairs))
    lowest = min(point.rate_per_s for point in points)
    highest = max(point.rate_per_s for point in points)
    for point in points:
        assert rate_at(points, point.work) == pytest.approx(point.rate_per_s, rel=1e-6)
        for work in (point.work / 3, point.work * 1.5, point.work * 100):
            assert lowest * 0.999 <= rate_at(points, work) <= highest * 1.001


def test_costs_are_kept():
    device = make_machine().devices[0]
    costs = CostModel(device, threads=1, processes=1, step_bytes=0.0, precision="float32")
    work = operation("forward", flops=10**9)
    assert costs.cost(work) == costs.cost(work)
    assert costs.cost(work).times(3).total_s == pytest.approx(3.0)


COST = collective("all_reduce")


@given(st.lists(st.integers(1, 4 * MIB), max_size=30))
def test_buckets_keep_every_byte_in_order(sizes):
    gradients = [(size, float(index)) for index, size in enumerate(sizes)]
    buckets = make_buckets(gradients, bucket_bytes=3 * MIB, first_bucket_bytes=MIB)
    assert sum(bucket.bytes for bucket in buckets) == sum(sizes)
    ready = [bucket.ready_s for bucket in buckets]
    assert ready == sorted(ready)
    assert all(bucket.bytes >= 3 * MIB for bucket in buckets[1:-1])


def test_an_all_reduce_between_two_is_the_measurement_itself():
    assert all_reduce_s(COST, 10**9, 1) == (0.0, 0.0)
    assert all_reduce_s(COST, 10**9, 2) == (pytest.approx(1e-3), pytest.approx(1.0))
    latency_s, move_s = all_reduce_s(COST, 10**9, 1000)
    assert latency_s == pytest.approx(0.999)
    assert move_s == pytest.approx(2.0, rel=0.01)
    assert broadcast_s(COST, 0, 1) == 0.0
    assert broadcast_s(COST, 0, 8) == pytest.approx(3e-3)


def curve(*points, ranks=2):
    return CollectiveCost(
        backend="gloo",
        operation="all_reduce",
        level="network",
        ranks=ranks,
        points=tuple(CollectivePoint(bytes=size, seconds=sheet(s)) for size, s in points),
    )


def test_a_curve_is_followed_by_lines_and_goes_on_with_the_last_one():
    cost = curve((100.0, 1.0), (200.0, 2.0), (300.0, 5.0))
    sizes = (0, 100, 150, 250, 400)
    assert [cost.seconds_at(size) for size in sizes] == pytest.approx([1.0, 1.0, 1.5, 3.5, 8.0])
    alone = curve((100.0, 1.0))
    assert [alone.seconds_at(size) for size in (10, 100, 300)] == pytest.approx([1.0, 1.0, 3.0])


@given(st.integers(2, 512), st.floats(1, 1e8), st.floats(0, 1e-6))
def test_between_as_many_ranks_as_were_measured_the_curve_itself_holds(ranks, size, added):
    cost = curve((1.0, 1e-4), (1e6, 1e-2), (1e7, 5e-2), ranks=ranks)
    expected_s = cost.seconds_at(size) + size * added
    assert sum(all_reduce_s(cost, size, ranks, added)) == pytest.approx(expected_s)
    assert broadcast_s(cost, size, ranks) == pytest.approx(cost.seconds_at(size))
    assert broadcast_s(cost, 0, ranks, 7e-3) == pytest.approx(7e-3)
    more = sum(all_reduce_s(cost, size, 2 * ranks, added))
    assert more > expected_s


def test_residuals_of_a_calibrated_machine_are_part_of_the_step():
    residuals = [
        framework("loop", "residual", phase, seconds)
        for phase, seconds in (("other", 1e-3), ("waiting", 2e-3), ("input", -5e-3))
    ]
    machine = make_machine(residuals)
    data = Dataset(samples_count=100, sample_bytes=10, seconds_per_sample=1e-3)
    pair = estimate(machine, make_workload(STEP, dataset=data), Plan(mesh=Mesh(data=2)))
    assert (pair.breakdown.other, pair.breakdown.waiting) == (1e-3, 2e-3)
    assert pair.breakdown.input == pytest.approx(8e-3 - 5e-3)
    assert "a residual measured in a run" in pair.sources["other"]
    alone = estimate(machine, make_workload(STEP), Plan())
    assert (alone.breakdown.waiting, alone.breakdown.input) == (0.0, 0.0)


def test_communication_hides_behind_the_backward_pass_unless_the_cpu_moves_it():
    early = [Bucket(bytes=MIB, ready_s=0.0)]
    assert exposed_s(early, 1.0, COST, 2, cpu_moves=False) == pytest.approx(0.0)
    assert exposed_s(early, 1.0, COST, 2, cpu_moves=True) == pytest.approx(MIB / 1e9)
    late = [Bucket(bytes=MIB, ready_s=1.0)]
    assert exposed_s(late, 1.0, COST, 2, cpu_moves=False) == pytest.approx(1e-3 + MIB / 1e9)
    assert exposed_s([], 1.0, COST, 2, cpu_moves=True) == 0.0


def test_the_backward_pass_loses_the_cpu_time_of_a_collective_and_no_more():
    """Stalls of gloo's threads were taken for work that no computing hides."""
    points = (
        CollectivePoint(bytes=1.0, seconds=sheet(1e-3), cpu_seconds=sheet(0.0)),
        CollectivePoint(bytes=float(MIB), seconds=sheet(3e-3), cpu_seconds=sheet(5e-4)),
    )
    cost = dataclasses.replace(curve((1.0, 1e-3)), points=points)
    early, late = Bucket(bytes=MIB, ready_s=0.0), Bucket(bytes=MIB, ready_s=1.0)
    assert exposed_s([early], 1.0, cost, 2, cpu_moves=True) == pytest.approx(5e-4)
    assert exposed_s([early], 1.0, cost, 2, cpu_moves=True, per_core=2) == pytest.approx(1e-3)
    assert exposed_s([early], 1.0, cost, 2, cpu_moves=False) == pytest.approx(0.0)
    assert exposed_s([late], 1.0, cost, 2, cpu_moves=False) == pytest.approx(3e-3)
    both = exposed_s([early, late], 1.0, cost, 2, cpu_moves=True)
    assert both == pytest.approx(5e-4 + 1e-3 + 5e-4)


@given(st.lists(st.tuples(st.integers(1, MIB), st.floats(0, 1)), max_size=8), st.integers(2, 64))
def test_exposed_time_is_at_most_all_of_it(pairs, ranks):
    buckets = [Bucket(bytes=size, ready_s=at) for size, at in sorted(pairs, key=lambda p: p[1])]
    total_s = sum(math.fsum(all_reduce_s(COST, bucket.bytes, ranks)) for bucket in buckets)
    for cpu_moves in (False, True):
        exposed = exposed_s(buckets, 1.0, COST, ranks, cpu_moves=cpu_moves)
        assert -1e-9 <= exposed <= total_s * (2 if cpu_moves else 1) + 1e-9


def test_a_machine_without_devices_is_refused():
    machine = Machine(name="empty", devices=(), missing=("torch is not installed",))
    workload = Workload(name="net", batch=1, input_bytes=4, layers=())
    with pytest.raises(UsageError, match="torch is not installed"):
        estimate(machine, workload, Plan())


# --- sizes of buckets ------------------------------------------------------------------------


def many_layers(count, parameter_bytes, backward_s):
    """Return a workload whose gradients come one after the other."""
    flops = int(backward_s * 1e9 / count)
    layers = tuple(
        Layer(
            name=str(number),
            kind="Linear",
            parameter_bytes=(parameter_bytes,),
            buffer_bytes=0,
            operations=(operation("backward", flops=flops),),
        )
        for number in range(count)
    )
    return Workload(name="w", batch=8, input_bytes=0, layers=layers)


def buckets_of(latency_s, s_per_mib, workload):
    """Return the plan that is chosen between two hosts, and the steps before and after."""
    cost = collective("all_reduce", latency_s, MIB / s_per_mib, hosts=2)
    machine = dataclasses.replace(make_machine(), collectives=(cost,))
    plan = Plan(mesh=Mesh(data=2), nodes=2)
    chosen = choose_buckets(machine, workload, plan)
    predicted = [estimate(machine, workload, each).step_time_s for each in (plan, chosen)]
    return chosen, predicted


def test_small_buckets_are_hidden_and_large_ones_pay_latency_less_often():
    workload = many_layers(64, MIB, backward_s=1.0)
    small, (before_s, after_s) = buckets_of(1e-5, 0.012, workload)
    assert small.bucket_bytes < 25 * MIB
    assert after_s < before_s
    large, (before_s, after_s) = buckets_of(0.4, 1e-5, workload)
    assert large.bucket_bytes > 25 * MIB
    assert after_s < before_s


def test_sizes_that_make_no_difference_stay():
    workload = many_layers(4, 100, backward_s=1.0)
    assert buckets_of(1e-5, 1e-3, workload)[0] == Plan(mesh=Mesh(data=2), nodes=2)
    alone = Plan()
    assert choose_buckets(make_machine(), workload, alone) == alone
