"""Partitions and replicas: how ranks are divided, and what an estimate chooses."""

import dataclasses

import pytest
from support.machines import sheet, small_machine

from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.machine import Link
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Layer, Operation, Workload
from paceline.perf import divide, estimate
from paceline.schedules.pipeline import LayerCosts, LayerEdge
from paceline.training.options import TrainingOptions
from paceline.training.pipeline.choice import RankRates, estimate_layouts
from paceline.training.pipeline.preparation import check_options, divide_ranks

GIB = 1 << 30


def costs(layers=8, parameter_bytes=4 << 20, activation_bytes=1 << 20):
    return LayerCosts(
        forward_s=(0.01,) * layers,
        backward_s=(0.02,) * layers,
        parameter_bytes=(parameter_bytes,) * layers,
        activation_bytes=(activation_bytes,) * layers,
        edges=tuple(LayerEdge(n, (n + 1,), 1 << 16) for n in range(layers - 1)),
    )


@pytest.mark.parametrize(
    ("options", "ranks", "shape"),
    [
        ({}, 4, (1, 4)),
        ({"strategy": "data"}, 4, (1, 4)),
        ({"strategy": "model"}, 4, (4, 1)),
        ({"strategy": "hybrid", "partitions": 2}, 4, (2, 2)),
        ({"replicas": 2}, 6, (3, 2)),
        ({"partitions": 2}, 2, (2, 1)),
        ({"strategy": "auto"}, 1, (1, 1)),
    ],
)
def test_partitions_and_replicas_follow_from_each_other(options, ranks, shape):
    assert divide_ranks(TrainingOptions(**options), None, ranks) == shape


def test_a_plans_mesh_divides_the_ranks_where_no_option_does():
    plan = Plan(mesh=Mesh(data=2, pipeline=2))
    assert divide_ranks(TrainingOptions(), plan, 4) == (2, 2)
    assert divide_ranks(TrainingOptions(strategy="data"), plan, 4) == (1, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "hybrid"}, "the strategy hybrid needs partitions or replicas"),
        ({"partitions": 3}, "3 partitions x 1 replicas are not 4 ranks"),
        ({"strategy": "data", "partitions": 4}, "the strategy data has 1 partition, not 4"),
        ({"partitions": 2, "replicas": 4}, "2 partitions x 4 replicas are not 4 ranks"),
    ],
)
def test_ranks_that_cannot_be_divided_are_an_error(options, said):
    with pytest.raises(UsageError, match=said):
        divide_ranks(TrainingOptions(**options), None, 4)


def test_stages_take_fsdp2_but_no_memory_budget_with_it():
    check_options(TrainingOptions(partitions=2, engine="fsdp2"))
    with pytest.raises(UsageError, match="a model in stages has no engine"):
        check_options(TrainingOptions(partitions=2, engine="sharded"))
    with pytest.raises(UsageError, match="has parts of its parameters cannot spill them"):
        check_options(TrainingOptions(partitions=2, engine="fsdp2", memory_budget=1 << 30))


def test_replicas_are_chosen_where_gradients_cost_little():
    rates = RankRates(1.0, 1e-6, 1e11, 16 * GIB)
    assert estimate_layouts(costs(), 4, rates)[0].partitions == 1


def test_partitions_are_chosen_where_gradients_cost_much():
    rates = RankRates(1.0, 1e-6, 1e8, 16 * GIB)
    found = estimate_layouts(costs(parameter_bytes=256 << 20), 4, rates)
    assert found[0].partitions == 4
    assert [estimate.partitions for estimate in found] == [4, 2, 1]


def test_partitions_are_chosen_where_the_model_does_not_fit():
    rates = RankRates(1.0, 1e-6, 1e11, GIB)
    found = estimate_layouts(costs(parameter_bytes=GIB // 4), 4, rates)
    assert found[0].partitions == 4
    assert str(found[-1]).endswith("too little memory")
    with pytest.raises(MemoryExceeded):
        estimate_layouts(costs(parameter_bytes=2 * GIB), 4, rates)


def test_slower_devices_make_gradients_cost_less_in_comparison():
    gradients = costs(parameter_bytes=64 << 20)
    fast, slow = (
        estimate_layouts(gradients, 4, RankRates(slowness, 1e-6, 1e9, 16 * GIB))
        for slowness in (0.1, 10.0)
    )
    assert fast[0].partitions > slow[0].partitions


def test_the_estimate_of_auto_is_that_of_a_plan():
    forward_s, backward_s, parameter_bytes = 1e-3, 2e-3, 1 << 20
    edges = tuple(LayerEdge(n, (n + 1,), 1 << 16) for n in range(7))
    work = (("forward", forward_s), ("backward", backward_s))
    operations = tuple(
        Operation(
            phase=phase, operator="matmul", dtype="float32", count=1, flops=round(s * 1e9), bytes=0
        )
        for phase, s in work
    )
    layers = tuple(
        Layer(name=str(n), kind="Linear", parameter_bytes=(parameter_bytes,), operations=operations)
        for n in range(8)
    )
    model = Workload(name="w", batch=4, input_bytes=0, edges=edges, layers=layers)
    link = Link(level="loopback", latency_s=sheet(1e-4), bandwidth_bytes_per_s=sheet(1e8))
    machine = dataclasses.replace(small_machine(1e9), links=(link,))
    plan = divide(machine, model, Plan(mesh=Mesh(pipeline=4), microbatches=8))
    example = LayerCosts(  # two microbatches
        forward_s=(2 * forward_s,) * 8,
        backward_s=(2 * backward_s,) * 8,
        parameter_bytes=(4 * parameter_bytes,) * 8,
        activation_bytes=(0,) * 8,
        edges=tuple(edge._replace(bytes=2 * edge.bytes) for edge in edges),
    )
    found = estimate_layouts(example, 4, RankRates(1.0, 1e-4, 1e8, 16 * GIB), 8)
    (auto,) = (layout for layout in found if layout.partitions == 4)
    assert auto.layers == plan.layers == (2, 2, 2, 2)
    step_s = estimate(machine, model, plan).step_time_s
    assert auto.step_s == pytest.approx(step_s, rel=1e-3)


def test_a_measured_pass_leaves_buffers_and_random_numbers_as_they_were():
    torch = pytest.importorskip("torch")
    from paceline.training.pipeline.costs import forward_seconds
    from paceline.training.pipeline.graph import capture

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 2)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = torch.get_rng_state()
    captured = capture(model)
    found = forward_seconds(captured, torch.randn(3, 4, generator=torch.Generator()))
    assert len(found) == len(captured.layers)
    assert all(seconds > 0 for seconds in found)
    assert torch.equal(torch.get_rng_state(), states)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert forward_seconds(captured, torch.ones(3, 5)) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partitions": "two"}, "partitions must be a whole number of at least 1, got 'two'"),
        ({"microbatches": 2.5}, "microbatches must be a whole number of at least 1, got 2.5"),
        ({"memory_budget": "8GiB"}, "memory_budget must be a whole number of at least 1"),
        ({"memory_budget": 0}, "memory_budget must be a whole number of at least 1, got 0"),
        ({"layers": [3, 0]}, "a stage has 1 layer or more, got 0"),
        ({"clip_norm": -1.0}, r"clip_norm must be a number above 0, got -1\.0"),
        ({"deadline_s": 0}, "deadline_s must be a number above 0, got 0"),
        ({"split_points": "stem"}, "split_points is 'stem'"),
        ({"tensor_parallel": True}, "tensor_parallel is True"),
        ({"strategy": "auto", "partitions": 2}, "auto chooses partitions and replicas itself"),
    ],
)
def test_options_of_other_types_or_without_effect_are_refused(options, said):
    with pytest.raises(UsageError, match=said):
        TrainingOptions(**options)
