"""A step that was measured operator by operator, and what is predicted from it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, small_machine

from paceline.core.errors import UsageError
from paceline.core.measured_step import MeasuredPhase, OperatorCalls, OperatorTime, StepMeasurement
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Layer, Operation, Workload
from paceline.perf import estimate
from paceline.perf.interval import RUN_SPREAD

MIB = 1 << 20


def phase(operators_s, residual_s, low=0.9, high=1.2):
    total_s = operators_s + residual_s
    return MeasuredPhase(
        operators_s=operators_s, residual_s=residual_s, low_s=low * total_s, high_s=high * total_s
    )


def measured_step(**changes):
    settings = {
        "torch": "2.13.0",
        "threads": 1,
        "processes": 1,
        "allocator": "keep",
        "phases": {
            "forward": phase(3e-3, 1e-3),
            "backward": phase(5e-3, 3e-3),
            "optimizer": phase(1e-3, -0.5e-3),
        },
        "operators": (
            OperatorCalls("forward", "aten.mm", 3, OperatorTime(1e-3, 9e-4, 2e-3)),
            OperatorCalls("backward", "aten.sort", 2, None),
        ),
        "whole_steps": 40,
    }
    return StepMeasurement(**(settings | changes))


def workload(**changes):
    def operation(phase, flops):
        return Operation(
            phase=phase, operator="matmul", dtype="float32", count=1, flops=flops, bytes=8
        )

    layers = tuple(
        Layer(
            name=name,
            kind="Linear",
            parameter_bytes=(30 * MIB,),
            operations=(operation("forward", 1000), operation("backward", flops)),
        )
        for name, flops in (("first", 3000), ("second", 1000))
    )
    return Workload(name="w", batch=4, input_bytes=16, layers=layers, **changes)


def test_the_phases_of_a_prediction_are_those_that_were_measured():
    predicted = estimate(small_machine(), workload(), Plan(), measured_step())
    assert predicted.breakdown.forward == pytest.approx(4e-3)
    assert predicted.breakdown.backward == pytest.approx(8e-3)
    assert predicted.breakdown.optimizer == pytest.approx(0.5e-3)
    assert predicted.sources["backward"].startswith("measured: 40 steps; 1 distinct operators, 2")


def test_the_interval_covers_the_rounds_and_the_spread_of_runs():
    predicted = estimate(small_machine(), workload(), Plan(), measured_step())
    step_s = predicted.step_time_s
    assert predicted.low_s < 0.9 * step_s
    assert predicted.high_s > 1.2 * step_s
    steady = {name: phase(1e-3, 0.0, 1.0, 1.0) for name in ("forward", "backward", "optimizer")}
    predicted = estimate(small_machine(), workload(), Plan(), measured_step(phases=steady))
    assert predicted.high_s == pytest.approx((1 + RUN_SPREAD) * predicted.step_time_s)


def test_a_disturbed_measurement_is_said_and_widens_the_interval():
    quiet = estimate(small_machine(), workload(), Plan(), measured_step())
    busy = estimate(small_machine(), workload(), Plan(), measured_step(foreign_cores=0.8))
    assert busy.high_s - busy.low_s > quiet.high_s - quiet.low_s
    assert "other processes used 0.80 cores" in busy.warnings[0]
    assert not quiet.warnings


def test_gradients_are_ready_when_their_layers_are_in_the_measured_pass():
    machine = dataclasses.replace(
        small_machine(), collectives=(collective("all_reduce", 4e-3, 1e12),)
    )
    plan = Plan(mesh=Mesh(data=2), bucket_bytes=30 * MIB, first_bucket_bytes=MIB)
    two = measured_step(processes=2, waiting_s=2e-4)
    predicted = estimate(machine, workload(), plan, two)
    # The second layer's gradient is ready at a quarter of the 8 ms, the first one's at their end:
    # latency is hidden for one of the two buckets.
    assert predicted.breakdown.transfer == pytest.approx(4e-3, rel=0.05)
    assert predicted.breakdown.waiting == pytest.approx(2e-4)


def test_ranks_that_outnumber_cores_lose_when_they_meet_what_a_collective_does_not_take():
    machine = dataclasses.replace(
        small_machine(), collectives=(collective("all_reduce", 4e-3, 1e12),)
    )
    plan = Plan(mesh=Mesh(data=2))
    step = measured_step(processes=2, waiting_s=2e-4, meeting_s=9e-3)
    predicted = estimate(machine, workload(), plan, step)
    assert predicted.breakdown.waiting == pytest.approx(2e-4 + 9e-3 - 4e-3)


@pytest.mark.parametrize(("backend", "scaled"), [("gloo", True), ("nccl", False)])
def test_collectives_are_as_slow_as_they_were_beside_the_measured_steps(backend, scaled):
    cost = dataclasses.replace(collective("all_reduce", 1e-3, 1e9), backend=backend)
    machine = dataclasses.replace(small_machine(), collectives=(cost,))
    plan = Plan(mesh=Mesh(data=2))
    probed = estimate(machine, workload(), plan, measured_step(processes=2))
    half = measured_step(
        processes=2, reduced_bytes=10 * MIB, reduced_s=cost.seconds_at(10 * MIB) / 2
    )
    predicted = estimate(machine, workload(), plan, half)
    assert predicted.sources["transfer"].endswith("beside the steps") is scaled
    if scaled:
        assert predicted.breakdown.transfer < 0.75 * probed.breakdown.transfer
        assert predicted.high_s - predicted.low_s < probed.high_s - probed.low_s
    else:
        assert predicted.breakdown == probed.breakdown
    assert predicted.machine_digest == probed.machine_digest


def test_a_step_of_other_threads_or_processes_is_refused():
    for plan in (Plan(threads=2), Plan(mesh=Mesh(data=2))):
        with pytest.raises(UsageError, match="not that of the plan"):
            estimate(small_machine(), workload(), plan, measured_step())


@given(st.lists(st.integers(0, 1 << 30), min_size=3, max_size=3))
def test_memory_of_a_measured_process_adds_up_to_its_peak(sizes):
    base, tensors, slack = sizes
    step = measured_step(base_bytes=base, peak_bytes=base + tensors + 60 * MIB + slack + 16)
    model = workload(peak_bytes=tensors + 60 * MIB + 16)
    memory = estimate(small_machine(), model, Plan(), step).memory_bytes
    # Parameters and all gradients are what a process has at least.
    least = base + max(tensors, 60 * MIB) + 60 * MIB + 16
    assert sum(memory.values()) >= min(step.peak_bytes, least)
    assert memory["process"] == base


def test_activations_are_the_peak_beyond_what_stays():
    model = workload(peak_bytes=200 * MIB, process_bytes=300 * MIB)
    memory = estimate(small_machine(), model, Plan()).memory_bytes
    assert memory["activations"] == 200 * MIB - 120 * MIB - 16
    assert memory["process"] == 300 * MIB
    assert memory["allocator"] > 0


def test_a_measured_step_survives_json():
    step = measured_step()
    assert StepMeasurement.from_text(step.to_text()) == step
    assert step.calls == 5
    assert [equal.signature for equal in step.untimed] == ["aten.sort"]
