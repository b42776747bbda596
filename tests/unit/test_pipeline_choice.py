"""Partitions and replicas: how ranks are divided, and what an estimate chooses."""

import pytest

from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.plan import Mesh, Plan
from paceline.schedules.pipeline import LayerCosts, LayerEdge
from paceline.training.options import TrainingOptions
from paceline.training.pipeline.choice import RankRates, estimate_layouts
from paceline.training.pipeline.preparation import divide_ranks

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
