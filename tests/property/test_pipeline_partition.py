"""Cutting layers into stages: as fast as the best of all partitions, and within the bound."""

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.errors import ConfigError, MemoryExceeded, UsageError
from paceline.core.machine import Link, Quantity
from paceline.schedules.pipeline import (
    LayerCosts,
    LayerEdge,
    StageEdge,
    fill_drain,
    live_microbatches,
    one_forward_one_backward,
    partition,
    replay,
    stage_costs,
    stage_edges,
)

LINK = Link(
    level="network",
    latency_s=Quantity(value=0.25, source="datasheet"),
    bandwidth_bytes_per_s=Quantity(value=16.0, source="datasheet"),
)


@st.composite
def layer_costs(draw, most=9):
    layers = draw(st.integers(1, most))

    def values(least, most):
        return tuple(draw(st.lists(st.integers(least, most), min_size=layers, max_size=layers)))

    edges = []
    for source in range(layers - 1):
        users = draw(st.sets(st.integers(source + 1, layers - 1), max_size=3))
        if users:
            edges.append(
                LayerEdge(
                    source, tuple(sorted(users)), draw(st.integers(0, 40) | st.integers(0, 400))
                )
            )
    return LayerCosts(
        forward_s=tuple(map(float, values(0, 9))),
        backward_s=tuple(map(float, values(0, 9))),
        parameter_bytes=values(0, 20),
        activation_bytes=values(0, 20),
        edges=tuple(edges),
    )


def brute_force(costs, stages, speeds, live, exposed):
    """Yield (cuts, seconds of stages, of links, bytes) of every partition, from the definitions."""
    for cuts in itertools.combinations(range(1, costs.layers), stages - 1):
        bounds = [0, *cuts, costs.layers]
        seconds, sizes = [], []
        for stage, (begin, end) in enumerate(itertools.pairwise(bounds)):
            compute = sum(costs.forward_s[begin:end]) + sum(costs.backward_s[begin:end])
            transfers = exposed * (transfer_s(costs, begin) + transfer_s(costs, end))
            seconds.append(compute / speeds[stage] + transfers)
            activations = sum(costs.activation_bytes[begin:end])
            sizes.append(live[stage] * activations + sum(costs.parameter_bytes[begin:end]))
        yield cuts, seconds, [crossing(costs, cut) / 16.0 for cut in cuts], sizes


def crossing(costs, cut):
    return sum(size for source, users, size in costs.edges if source < cut <= max(users))


def transfer_s(costs, cut):
    size = crossing(costs, cut)
    return 0.25 + size / 16.0 if size else 0.0


@st.composite
def problems(draw):
    costs = draw(layer_costs())
    stages = draw(st.integers(1, costs.layers))
    speeds = draw(st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=stages, max_size=stages))
    live = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    exposed = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return costs, stages, speeds, live, exposed


@given(problem=problems())
@settings(max_examples=examples(150))
def test_no_partition_has_a_faster_slowest_stage(problem):
    costs, stages, speeds, live, exposed = problem
    found = partition(costs, stages, speeds=speeds, live=live, link=LINK, exposed=exposed)
    candidates = {cuts: figures for cuts, *figures in brute_force(*problem)}
    seconds, links, sizes = candidates[found.cuts]
    assert found.stage_s == pytest.approx(seconds)
    assert found.link_s == pytest.approx(links)
    assert list(found.stage_bytes) == sizes
    assert found.slowest_s == pytest.approx(
        min(max(seconds + links) for seconds, links, _ in candidates.values())
    )


@given(problem=problems(), data=st.data())
@settings(max_examples=examples(150))
def test_the_best_of_those_that_keep_the_bound_is_found(problem, data):
    costs, stages, speeds, live, exposed = problem
    bound = data.draw(
        st.lists(st.integers(0, 120), min_size=stages, max_size=stages)
        | st.integers(0, 120).map(lambda size: [size] * stages)
    )
    options = {"speeds": speeds, "live": live, "link": LINK, "exposed": exposed}
    candidates = list(brute_force(*problem))
    excess = min(max(b - m for b, m in zip(sizes, bound, strict=True))
                 for *_, sizes in candidates)  # fmt: skip
    if excess > 0:
        with pytest.raises(MemoryExceeded, match="no partition of") as caught:
            partition(costs, stages, bound_bytes=bound, **options)
        assert caught.value.why == f"the best one exceeds it by {excess:,} bytes"
        if len(set(bound)) == 1:
            smallest = int(re.search(r"a bound of (\d+) bytes", caught.value.fix)[1])
            assert smallest == bound[0] + excess
        bound = [size + excess for size in bound]
    found = partition(costs, stages, bound_bytes=bound, **options)
    assert all(size <= most for size, most in zip(found.stage_bytes, bound, strict=True))
    allowed = [
        max(seconds + links)
        for _, seconds, links, sizes in candidates
        if all(size <= most for size, most in zip(sizes, bound, strict=True))
    ]
    assert found.slowest_s == pytest.approx(min(allowed))


@given(costs=layer_costs(), data=st.data())
def test_stages_have_the_costs_and_edges_of_their_layers(costs, data):
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, costs.layers - 1)), max_size=4)))
    cuts = [cut for cut in cuts if cut < costs.layers]
    speeds = [float(2 + stage) for stage in range(len(cuts) + 1)]
    stage_of = [sum(cut <= layer for cut in cuts) for layer in range(costs.layers)]
    made = stage_costs(costs, cuts, speeds)
    for stage, speed in enumerate(speeds):
        layers = [layer for layer in range(costs.layers) if stage_of[layer] == stage]
        assert made.forward_s[stage] == pytest.approx(
            sum(costs.forward_s[layer] for layer in layers) / speed
        )
        assert made.backward_s[stage] == pytest.approx(
            sum(costs.backward_s[layer] for layer in layers) / speed
        )
    assert list(stage_edges(costs.edges, cuts)) == [
        StageEdge(stage_of[source], stage, size)
        for source, users, size in costs.edges
        for stage in sorted({stage_of[user] for user in users} - {stage_of[source]})
    ]


def uniform(layers, **changes):
    fields = {
        "forward_s": (1.0,) * layers,
        "backward_s": (2.0,) * layers,
        "parameter_bytes": (10,) * layers,
        "activation_bytes": (100,) * layers,
        "edges": tuple(LayerEdge(layer, (layer + 1,), 8) for layer in range(layers - 1)),
    }
    return LayerCosts(**fields | changes)


def test_equal_layers_are_divided_equally():
    found = partition(uniform(12), 4)
    assert found.cuts == (3, 6, 9)
    assert found.stage_s == (9.0,) * 4
    assert found.stage_bytes == (330,) * 4


def test_a_faster_device_gets_more_layers():
    assert partition(uniform(12), 2, speeds=[1.0, 3.0]).cuts == (3,)


def test_a_narrow_cut_is_preferred_where_transfers_are_exposed():
    edges = [LayerEdge(layer, (layer + 1,), 8 if layer == 3 else 800) for layer in range(7)]
    costs = uniform(8, edges=tuple(edges), forward_s=(1.0,) * 4 + (0.9,) * 4)
    assert partition(costs, 2, link=LINK).cuts == (4,)
    skipping = uniform(8, edges=(*edges, LayerEdge(0, (7,), 80)))
    found = partition(skipping, 2, link=LINK)
    assert found.stage_s[0] == pytest.approx(12 + 0.25 + 88 / 16)


def test_a_link_that_is_slower_than_any_stage_decides_though_transfers_are_hidden():
    edges = tuple(LayerEdge(layer, (layer + 1,), 1600 if layer == 1 else 160) for layer in range(3))
    costs = uniform(4, edges=edges)
    assert partition(costs, 2, link=LINK, exposed=0.0).cuts != (2,)
    assert partition(costs, 2, exposed=0.0).cuts == (2,)
    found = partition(costs, 2, link=LINK, exposed=0.0)
    assert (max(found.stage_s), found.link_s, found.slowest_s) == (9.0, (10.0,), 10.0)


def test_memory_depends_on_the_microbatches_that_the_order_keeps():
    costs, bound = uniform(12), [1210] * 4
    with pytest.raises(MemoryExceeded, match="the best one exceeds it by 1,220 bytes"):
        partition(costs, 4, bound_bytes=bound, live=live_microbatches(fill_drain(4, 8)))
    order = one_forward_one_backward(4, 8)
    found = partition(costs, 4, bound_bytes=bound, live=live_microbatches(order))
    assert found.cuts[:2] == (2, 5)
    assert found.slowest_s == 12.0


def test_the_users_partition_is_taken_and_checked():
    found = partition(uniform(6), 3, layers_per_stage=[1, 2, 3])
    assert found.cuts == (1, 3)
    assert found.stage_s == (3.0, 6.0, 9.0)
    assert partition(uniform(6), 3, layers_per_stage=[1, 2, 3], bound_bytes=[330] * 3) == found
    with pytest.raises(MemoryExceeded, match="stage 2 of the given partition needs 330 bytes, 1 "):
        partition(uniform(6), 3, layers_per_stage=[1, 2, 3], bound_bytes=[329] * 3)
    with pytest.raises(UsageError, match="layers_per_stage has 2 values for 3 stages"):
        partition(uniform(6), 3, layers_per_stage=[3, 3])
    with pytest.raises(UsageError, match=r"\(1, 1, 1\) does not divide 6 layers"):
        partition(uniform(6), 3, layers_per_stage=[1, 1, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 7}, "6 layers cannot be cut into 7 stages"),
        ({"stages": 0}, "6 layers cannot be cut into 0 stages"),
        ({"speeds": [1.0]}, "speeds has 1 values for 2 stages"),
        ({"speeds": [1.0, 0.0]}, "speeds has a value of 0 or less"),
        ({"live": [1]}, "live has 1 values for 2 stages"),
        ({"bound_bytes": [1]}, "bound_bytes has 1 values for 2 stages"),
        ({"exposed": 1.5}, "exposed is 1.5"),
    ],
)
def test_impossible_requests_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        partition(uniform(6), **{"stages": 2, **options})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backward_s": (1.0,)}, "backward_s has 1 values for 3 layers"),
        ({"forward_s": (1.0, -1.0, 1.0)}, "forward_s has a value below 0"),
        ({"edges": (LayerEdge(1, (1,), 8),)}, "does not lead to later layers of 3"),
        ({"edges": (LayerEdge(1, (3,), 8),)}, "does not lead to later layers of 3"),
        ({"edges": (LayerEdge(1, (), 8),)}, "does not lead to later layers of 3"),
    ],
)
def test_costs_of_no_model_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        uniform(3, **changes)


def test_a_model_of_5000_layers_is_cut_and_scheduled():
    rng = np.random.default_rng(0)
    layers, stages = 5000, 64
    costs = LayerCosts(
        forward_s=tuple(rng.uniform(1e-4, 1e-2, layers).tolist()),
        backward_s=tuple(rng.uniform(2e-4, 2e-2, layers).tolist()),
        parameter_bytes=tuple(rng.integers(0, 10**6, layers).tolist()),
        activation_bytes=tuple(rng.integers(0, 10**6, layers).tolist()),
        edges=tuple(
            LayerEdge(layer, tuple({layer + 1, min(layer + 3, layers - 1)}), 10**5)
            for layer in range(layers - 1)
        ),
    )
    schedule = one_forward_one_backward(stages, 8)
    live = live_microbatches(schedule)
    found = partition(costs, stages, bound_bytes=[10**9] * stages, live=live)
    mean_s = (sum(costs.forward_s) + sum(costs.backward_s)) / stages
    assert mean_s <= found.slowest_s <= mean_s + 0.03  # a layer is at most 0.03 s
    edges = stage_edges(costs.edges, found.cuts)
    replayed = replay(schedule, edges, stage_costs(costs, found.cuts))
    assert replayed.makespan_s == pytest.approx((8 + 63) * mean_s, rel=0.02)
