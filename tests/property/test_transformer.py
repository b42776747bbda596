"""Fast paths of the transformer's prediction, against the slow ones that they stand for."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.machine import Link, Quantity
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import Architecture
from paceline.perf.transformer.efficiency import prior
from paceline.perf.transformer.memory import rank_memory
from paceline.perf.transformer.network import Network
from paceline.perf.transformer.pipelining import (
    StagePasses,
    _extended,
    _live_in_closed_form,
    _more_microbatches,
    make_schedule,
    replayed_s,
)
from paceline.schedules import Topology, ring, schedule_s
from paceline.schedules.pipeline import peak_activation_bytes

seconds = st.floats(0.1, 3)
DEVICE = library_machine("selene").devices[0]
MODEL = Architecture(layers=32, hidden=1024, heads=16, vocab=32000, sequence=512)


def one(value):
    return Quantity(value=value, source="datasheet")


@st.composite
def passes(draw, ranks, chunks):
    """Equal stages, with more work in the first and the last one: embedding and loss."""
    stages = ranks * chunks
    forward, backward = draw(seconds), draw(seconds)
    more = [draw(st.floats(0, 0.3)) for _ in range(4)]
    forwards, backwards = [forward] * stages, [backward] * stages
    forwards[0] *= 1 + more[0]
    backwards[0] *= 1 + more[1]
    forwards[-1] *= 1 + more[2]
    backwards[-1] *= 1 + more[3]
    return StagePasses(tuple(forwards), tuple(backwards))


@settings(max_examples=examples(40))
@given(
    st.data(),
    st.sampled_from([("1f1b", 1), ("fill_drain", 1), ("zero_bubble", 1), ("1f1b", 2)]),
    st.integers(5, 9),
    st.integers(4, 7),
)
def test_a_large_pipeline_is_extended_as_it_would_be_replayed(data, order, ranks, rounds):
    schedule, chunks = order
    plan = Plan(mesh=Mesh(pipeline=ranks), schedule=schedule, stages_per_rank=chunks)
    times = data.draw(passes(ranks, chunks))
    limit = 0.02 if chunks == 1 else 0.05
    whole_s = replayed_s(plan, times, ranks, rounds * ranks)
    assert _extended(plan, times, rounds * ranks) == pytest.approx(whole_s, rel=limit)
    assert _more_microbatches(plan, times, rounds * ranks) == pytest.approx(whole_s, rel=limit)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_live_layers_of_large_pipelines_are_those_of_the_schedule(
    ranks, chunks, rounds, each, uneven
):
    plan = Plan(mesh=Mesh(pipeline=ranks), stages_per_rank=chunks)
    layers = tuple(each + uneven * (index % 2) for index in range(ranks * chunks))
    schedule = make_schedule(plan, ranks, rounds * ranks)
    found = _live_in_closed_form(plan, layers, rounds * ranks)
    exact = peak_activation_bytes(schedule, layers)
    assert all(most >= least for most, least in zip(found, exact, strict=True))
    assert uneven or found == exact


@given(
    st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (3, 4)]),
    st.floats(1e3, 1e9),
    st.sampled_from(["device", "node"]),
    st.sampled_from(["device", "node"]),
    st.floats(1e8, 1e12),
    st.floats(1e8, 1e12),
)
def test_rings_cost_what_their_schedule_costs(shape, size, inner, outer, fast, slow):
    nodes, per_node = shape
    links = (
        Link(level="nvlink", latency_s=one(2e-6), bandwidth_bytes_per_s=one(fast), sharing=inner),
        Link(level="network", latency_s=one(5e-6), bandwidth_bytes_per_s=one(slow), sharing=outer),
    )
    selene = library_machine("selene")
    device = dataclasses.replace(selene.devices[0], count=per_node)
    machine = dataclasses.replace(selene, links=links, devices=(device,))
    perfect = dataclasses.replace(prior(device), link=one(1.0), network=one(1.0))
    network = Network.of(machine, perfect, nodes)
    ranks = nodes * per_node
    hosts = tuple(tuple(range(i * per_node, (i + 1) * per_node)) for i in range(nodes))
    topology = Topology(
        hosts=hosts,
        inside=links[0] if per_node > 1 else None,
        across=links[1] if nodes > 1 else None,
        devices=per_node,
    )
    group = network.group(ranks, 1)
    for operation, found in (
        ("all_gather", network.all_gather_s(group, size)),
        ("all_reduce", 2 * network.all_gather_s(group, size)),
    ):
        (expected,) = schedule_s(ring(operation, ranks), topology, [size])
        assert found == pytest.approx(expected, rel=1e-6), operation
    assert network.all_reduce_s(group, size) <= 2 * network.all_gather_s(group, size)


def memory(**fields):
    axes = {axis: fields.pop(axis, 1) for axis in ("data", "tensor", "pipeline", "context")}
    plan = Plan(mesh=Mesh(**axes), precision="bfloat16", **fields)
    return max(sum(kinds.values()) for kinds in rank_memory(MODEL, plan, 1, DEVICE))


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["none", "selective", "full"]),
    st.booleans(),
)
def test_memory_falls_with_more_ranks_and_higher_stages_of_zero(tensor, pipeline, again, fused):
    fields = {"recompute": again, "fused_attention": fused, "microbatches": 8}
    here = memory(tensor=tensor, pipeline=pipeline, data=8, **fields)
    assert memory(tensor=2 * tensor, pipeline=pipeline, data=8, **fields) < here
    by_stage = [
        memory(tensor=tensor, pipeline=pipeline, data=8, zero=zero, **fields) for zero in (0, 1, 2)
    ]
    assert by_stage == sorted(by_stage, reverse=True)


@given(st.integers(2, 9), seconds, seconds, st.floats(0.01, 0.5))
def test_messages_between_equal_boundaries_make_passes_longer(ranks, forward, backward, message):
    plan = Plan(mesh=Mesh(pipeline=ranks))
    times = StagePasses((forward,) * ranks, (backward,) * ranks, (message,) * (ranks - 1))
    few, many = 4 * ranks, 8 * ranks
    exact_s = [replayed_s(plan, times, ranks, count) for count in (few, many)]
    folded = times.with_messages()
    found_s = [replayed_s(plan, folded, ranks, count) for count in (few, many)]
    # In the steady state; filling and emptying the pipeline differ by a few messages.
    assert found_s[1] - found_s[0] == pytest.approx(exact_s[1] - exact_s[0])
    assert found_s[1] == pytest.approx(exact_s[1], abs=2 * message * ranks)
