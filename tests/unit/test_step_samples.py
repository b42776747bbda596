"""Figures of sampled steps: layers, gradients, operators, memory."""

import pytest
from support.traces import MS, Event, write_run

from paceline.report.sampled import layer_rows, layer_words
from paceline.trace.analysis import analyse
from paceline.trace.analysis.sampled import ROOT
from paceline.trace.format.events import MEMORY_COUNTERS, MEMORY_HOST, SAMPLED_LAYERS, Kind
from paceline.trace.merge import load_run


def steps(count, sampled, inside):
    """Return steps of 10 ms, forward from 0 to 4 and backward from 4 to 8.

    Args:
        count: number of steps.
        sampled: those that have the events `inside`.
        inside: (kind, begin and end in ms, name, amount).
    """
    events = []
    for step in range(count):
        at = 10 * step * MS
        if step in sampled:
            events += [
                Event(kind, at + round(begin * MS), at + round(end * MS), name, step, amount)
                for kind, begin, end, name, amount in inside
            ]
        events.append(Event(Kind.FORWARD, at, at + 4 * MS, "forward", step))
        events.append(Event(Kind.BACKWARD, at + 4 * MS, at + 8 * MS, "backward", step))
        events.append(Event(Kind.OPTIMIZER, at + 8 * MS, at + 10 * MS, "step", step))
        events.append(Event(Kind.STEP, at, at + 10 * MS, "step", step))
    return events


def samples(folder, *ranks):
    return analyse(load_run(write_run(folder, list(ranks)))).sampled


def layer(kind, begin, end, name, amount=0):
    return kind, begin, end, name, amount


NESTED = [
    layer(Kind.LAYER, 0.5, 1.5, "body.first"),
    layer(Kind.LAYER, 1.5, 2.5, "body.second"),
    layer(Kind.LAYER, 0, 3, "body"),
    layer(Kind.LAYER, 3, 3.5, "head"),
    layer(Kind.GRADIENT, 5, 5, "head.weight", 100),
    layer(Kind.GRADIENT, 6, 6, "body.first.bias", 8),
    layer(Kind.GRADIENT, 7, 7, "body.first.weight", 64),
    layer(Kind.GRADIENT, 7.5, 7.5, "scale", 4),
]


def test_layers_have_their_self_time_and_when_their_last_gradient_was_ready(tmp_path):
    rank = steps(8, {4, 6}, NESTED)
    found = samples(tmp_path, rank, rank)
    assert found.layers[0].name == "body", "in the order of a step"
    by_name = {time.name: time for time in found.layers}
    assert set(by_name) == {"body", "body.first", "body.second", "head", ROOT}
    body, first, head = by_name["body"], by_name["body.first"], by_name["head"]
    assert (body.calls, body.steps) == (1, 4)
    assert body.forward_s == pytest.approx(0.003)
    assert body.self_s == pytest.approx(0.001)
    assert body.ready_s is None
    assert first.self_s == first.forward_s == pytest.approx(0.001)
    assert (first.ready_s, first.gradient_bytes) == (pytest.approx(0.003), 72)
    assert (head.ready_s, head.gradient_bytes) == (pytest.approx(0.001), 100)
    assert (by_name[ROOT].calls, by_name[ROOT].ready_s) == (0, pytest.approx(0.0035))


def test_the_phases_are_those_of_a_run_without_samples(tmp_path):
    plain = analyse(load_run(write_run(tmp_path / "plain", [steps(8, (), ())])))
    seen = analyse(load_run(write_run(tmp_path / "seen", [steps(8, {4}, NESTED)])))
    assert seen.phases[0].breakdown() == plain.phases[0].breakdown()
    assert plain.sampled.layers == plain.sampled.operators == plain.sampled.memory == ()


def test_operators_are_told_apart_by_device(tmp_path):
    inside = [
        (Kind.OPERATOR, 0, 2, "aten::linear", round(0.5 * MS)),
        (Kind.OPERATOR, 0.5, 2, "aten::addmm", round(1.5 * MS)),
        (Kind.KERNEL, 1, 3.5, "gemm", 0),
    ]
    rows = samples(tmp_path, steps(6, {4, 5}, inside)).operators
    assert [(row.name, row.device) for row in rows] == [
        ("gemm", "main"),  # of these hand-made events: a stream has a location of its own
        ("aten::addmm", "cpu"),
        ("aten::linear", "cpu"),
    ]
    assert [row.self_s for row in rows] == [pytest.approx(s) for s in (0.0025, 0.0015, 0.0005)]
    assert rows[2].total_s == pytest.approx(0.002)
    assert (rows[0].calls, rows[0].steps) == (1, 2)


def test_memory_is_the_most_of_its_samples_and_lacks_what_was_not_told(tmp_path):
    inside = [
        (Kind.COUNTER, 9, 9, MEMORY_COUNTERS["parameters"], 1000),
        (Kind.COUNTER, 9, 9, MEMORY_COUNTERS["gradients"], 0),
        (Kind.COUNTER, 9, 9, MEMORY_HOST, 5000),
        (Kind.COUNTER, 9, 9, SAMPLED_LAYERS, 2 * MS),
    ]
    found = samples(tmp_path, steps(8, {4, 6}, inside), steps(8, (), ()))
    (held,) = found.memory
    assert (held.rank, held.samples, held.host_bytes) == (0, 2, 5000)
    assert held.held_bytes == {"parameters": 1000, "gradients": 0}
    assert found.cost_s == pytest.approx(0.002), "4 ms of one rank of two"


def test_a_table_has_the_layers_that_take_longest_in_the_order_of_a_step(tmp_path):
    found = samples(tmp_path, steps(8, {4}, NESTED))
    names, cells = layer_rows(found.layers, 3)
    assert names == ["body", "body.first", "body.second"]
    assert cells[1] == ["1.00 ms", "1.00 ms", "after 3.00 ms", "72 B"]
    assert "1 sampled step" in layer_words(found, 1.0)
