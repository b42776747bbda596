"""Calibration: how far a run moves a machine, and what it leaves alone."""

import dataclasses
import math

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, framework, sheet
from support.traces import data_parallel, write_run

from paceline.cli.calibrate import calibrate as verb
from paceline.core.breakdown import PHASES
from paceline.core.errors import NotFound, UsageError
from paceline.core.machine import Device, Machine, Overhead, Point, Rate
from paceline.core.plan import Mesh, Plan
from paceline.core.plan_file import PlanFile
from paceline.core.workload import Dataset, Layer, Operation, Workload
from paceline.perf import estimate
from paceline.perf.calibrate import (
    Calibration,
    Evidence,
    Observed,
    ObservedCollective,
    calibrate,
    log_posterior,
)

MIB = 1 << 20
PLAN = Plan(mesh=Mesh(data=2))


def rate(operator, phase, per_s, unit):
    return Rate(
        operator=operator,
        phase=phase,
        dtype="float32",
        threads=1,
        processes=1,
        unit=unit,
        source="probe",
        points=(Point(work=1.0, rate_per_s=per_s), Point(work=1e9, rate_per_s=2 * per_s)),
    )


MACHINE = Machine(
    name="m",
    devices=(
        Device(
            name="cpu",
            kind="cpu",
            cores=4,
            memory_bytes=sheet(1 << 30),
            first_touch_bytes_per_s=sheet(1e9),
            rates=tuple(
                rate(operator, phase, per_s, unit)
                for operator, per_s, unit in (
                    ("matmul", 1e9, "flops"),
                    ("elementwise", 1e8, "bytes"),
                )
                for phase in ("forward", "backward")
            ),
            overheads=(
                Overhead(
                    operator="elementwise",
                    phase="backward",
                    threads=1,
                    processes=1,
                    seconds=sheet(1e-4),
                ),
            ),
            framework_overheads=(
                framework("torch", "phase", "forward", 1e-4),
                framework("ddp", "wrapper", "backward", 2e-4),
                framework("ddp", "buffer_broadcast", "forward", 1e-3),
            ),
        ),
    ),
    collectives=(collective("all_reduce"), collective("broadcast")),
)
WORKLOAD = Workload(
    name="w",
    batch=8,
    input_bytes=0,
    dataset=Dataset(samples_count=100, sample_bytes=10, seconds_per_sample=1e-4),
    layers=(
        Layer(
            name="0",
            kind="Linear",
            parameter_bytes=(MIB,),
            buffer_bytes=100,
            saved_bytes=10**6,
            operations=tuple(
                Operation(
                    phase=phase,
                    operator=operator,
                    dtype="float32",
                    count=2,
                    flops=flops,
                    bytes=10**5,
                )
                for phase, operator, flops in (
                    ("forward", "matmul", 10**6),
                    ("backward", "matmul", 3 * 10**6),
                    ("backward", "elementwise", 0),
                    ("optimizer", "elementwise", 0),
                )
            ),
        ),
    ),
)


def evidence(factors=None, error=1e-3, collectives=(), steps=100, plan=PLAN):
    """Return a run that took `factors` times the prediction, in phases of that name."""
    factors = factors or {}
    predicted = dict(estimate(MACHINE, WORKLOAD, plan).breakdown.items())
    seconds = {name: predicted[name] * factors.get(name, 1.0) for name in PHASES}
    total_s = sum(seconds.values())
    return Evidence(
        phases={
            name: Observed(seconds=value, error_s=error * value) for name, value in seconds.items()
        },
        step=Observed(seconds=total_s, error_s=error * total_s),
        collectives=collectives,
        steps=steps,
    )


def predicted(machine, name, plan=PLAN):
    return getattr(estimate(machine, WORKLOAD, plan).breakdown, name)


def test_a_run_as_predicted_changes_nothing_that_is_predicted():
    better, outcome = calibrate(MACHINE, WORKLOAD, PLAN, evidence())
    assert outcome.fitted_step_s == pytest.approx(outcome.prior_step_s, rel=2e-3)
    assert Calibration.from_text(outcome.to_text()) == outcome
    assert Machine.from_text(better.to_text()) == better


@pytest.mark.parametrize("name", ["input", "forward", "backward", "optimizer", "transfer"])
@pytest.mark.parametrize("factor", [0.8, 1.6])
def test_a_sure_run_moves_its_phase_nearly_all_the_way_and_no_other(name, factor):
    better, outcome = calibrate(MACHINE, WORKLOAD, PLAN, evidence({name: factor}))
    for fit in outcome.phases:
        target_s = fit.prior_s * (factor if fit.name == name else 1.0)
        assert fit.fitted_s == pytest.approx(target_s, rel=0.12, abs=1e-5), fit
        assert fit.fitted_s == pytest.approx(predicted(better, fit.name))
    moved = next(fit for fit in outcome.phases if fit.name == name)
    assert 0.8 < moved.weight <= 1


def test_what_the_run_does_not_explain_by_phases_is_kept_as_a_residual():
    run = evidence()
    slow = dataclasses.replace(run, step=Observed(seconds=run.step.seconds + 1e-3, error_s=1e-6))
    better, _ = calibrate(MACHINE, WORKLOAD, PLAN, slow)
    assert predicted(better, "other") == pytest.approx(1e-3, rel=0.1)
    again, second = calibrate(better, WORKLOAD, PLAN, slow)
    assert second.fitted_step_s == pytest.approx(slow.step.seconds, rel=0.02)
    assert len(again.devices[0].framework_overheads) == len(better.devices[0].framework_overheads)


def test_evaluations_are_no_part_of_the_step_and_hide_no_residual():
    run = evidence()
    phases = {**run.phases, "evaluation": Observed(seconds=5e-3, error_s=1e-6)}
    step = Observed(seconds=run.step.seconds + 1e-3, error_s=1e-6)  # of training
    better, _ = calibrate(
        MACHINE, WORKLOAD, PLAN, dataclasses.replace(run, phases=phases, step=step)
    )
    assert predicted(better, "other") == pytest.approx(1e-3, rel=0.1)


def test_an_unsure_run_leaves_the_prior():
    unsure = evidence({"forward": 3.0, "transfer": 2.0}, error=math.inf)
    better, outcome = calibrate(MACHINE, WORKLOAD, PLAN, unsure)
    assert better == MACHINE
    assert {fit.weight for fit in outcome.phases} == {0.0}


def test_other_threads_and_machines_with_fewer_processes_keep_their_figures():
    better, _ = calibrate(MACHINE, WORKLOAD, PLAN, evidence({"forward": 1.6, "backward": 1.6}))
    assert better.devices[0].rates[:4] == MACHINE.devices[0].rates
    alone = Plan()
    for name in ("forward", "backward", "waiting"):
        before, after = predicted(MACHINE, name, alone), predicted(better, name, alone)
        assert after == pytest.approx(before), name


def test_changed_figures_say_that_they_were_fitted_and_how_surely():
    better, _ = calibrate(MACHINE, WORKLOAD, PLAN, evidence({"forward": 1.6, "transfer": 1.5}))
    fitted = [rate for rate in better.devices[0].rates if rate.source == "fit"]
    assert {(rate.operator, rate.phase, rate.processes) for rate in fitted} == {
        ("matmul", "forward", 2)
    }
    for rate in fitted:
        for point in rate.points:
            assert point.low_per_s < point.rate_per_s < point.high_per_s
    changed = [
        overhead.seconds
        for overhead in better.devices[0].framework_overheads
        if overhead.processes == 2
    ]
    assert changed
    for quantity in changed:
        assert quantity.source == "fit"
        assert quantity.low <= quantity.value <= quantity.high


def test_a_collective_that_took_longer_costs_more():
    slow = ObservedCollective(
        operation="all_reduce", ranks=2, bytes=MIB, duration=Observed(seconds=4e-3, error_s=1e-6)
    )
    unknown = dataclasses.replace(slow, operation="all_gather")
    run = evidence({"transfer": 1.7}, collectives=(slow, unknown))
    better, outcome = calibrate(MACHINE, WORKLOAD, PLAN, run)
    before, after = (
        machine.collective("all_reduce").points[0].seconds for machine in (MACHINE, better)
    )
    assert after.value > before.value
    assert after.source == "fit"
    transfer = next(fit for fit in outcome.phases if fit.name == "transfer")
    assert transfer.fitted_s == pytest.approx(transfer.measured_s, rel=0.1)


def test_a_run_says_nothing_of_the_collectives_that_it_did_not_use():
    fast = collective("all_reduce", backend="paceline")
    machine = dataclasses.replace(MACHINE, collectives=(*MACHINE.collectives, fast))
    slow = ObservedCollective(
        operation="all_reduce", ranks=2, bytes=MIB, duration=Observed(seconds=4e-3, error_s=1e-6)
    )
    better, _ = calibrate(machine, WORKLOAD, PLAN, evidence(collectives=(slow,)))
    assert better.collective("all_reduce") != machine.collective("all_reduce")
    assert better.collective("all_reduce", collectives="paceline") == fast


def test_without_an_undisturbed_step_there_is_nothing_to_fit():
    with pytest.raises(UsageError, match="no step to calibrate from"):
        calibrate(MACHINE, WORKLOAD, PLAN, evidence(steps=0))


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.floats(0, 10), st.floats(0.05, 1))
def test_the_posterior_lies_between_prior_and_measurement(before, measured, error, prior_sd):
    observed = Observed(seconds=measured, error_s=error)
    found = log_posterior(before, observed, prior_sd)
    low, high = sorted((before, measured))
    assert low * 0.999 <= found.seconds <= high * 1.001
    assert 0 <= found.weight <= 1
    assert found.low <= 1 <= found.high
    surer = log_posterior(before, Observed(seconds=measured, error_s=error / 2), prior_sd)
    assert surer.weight >= found.weight


def _planned_run(folder, *, trained=MIB, workload=WORKLOAD):
    run = write_run(folder, data_parallel(2, 120, amount=trained))
    known = estimate(MACHINE, WORKLOAD, PLAN)
    plan = PlanFile(plan=PLAN, estimate=known, workload=workload)
    (run / "plan.json").write_text(plan.to_text())
    (run / "machine.json").write_text(MACHINE.to_text())
    return run


def test_the_verb_writes_a_machine_that_predicts_the_run(tmp_path):
    run, out = _planned_run(tmp_path / "run"), tmp_path / "better.json"
    done = CliRunner().invoke(verb, [str(run), "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "110 undisturbed steps" in done.output
    better = Machine.from_text(out.read_text())
    measured_s = 0.010
    before, after = (
        abs(estimate(machine, WORKLOAD, PLAN).step_time_s / measured_s - 1)
        for machine in (MACHINE, better)
    )
    assert after < before / 2
    data = CliRunner().invoke(verb, [str(run), "--out", str(out), "--json"], catch_exceptions=False)
    assert Calibration.from_text(data.stdout).measured_step_s == pytest.approx(measured_s)


def test_a_run_without_an_undisturbed_step_is_named(tmp_path, monkeypatch):
    """The error named the machine, which is not at fault."""
    run = _planned_run(tmp_path / "run")
    none = np.zeros(120, dtype=bool)
    monkeypatch.setattr("paceline.studies.calibrate.undisturbed_steps", lambda *_: none)
    arguments = [str(run), "--out", str(tmp_path / "out.json")]
    with pytest.raises(UsageError, match="no step to calibrate from") as caught:
        CliRunner().invoke(verb, arguments, catch_exceptions=False)
    assert caught.value.where == str(run)


def test_a_run_of_another_model_or_without_one_is_refused(tmp_path):
    other = _planned_run(tmp_path / "other", trained=3 * MIB // 2)
    for run, error, words in (
        (other, UsageError, "not the one that was planned"),
        (_planned_run(tmp_path / "none", workload=None), NotFound, "what model it trained"),
    ):
        arguments = [str(run), "--out", str(tmp_path / "out.json")]
        with pytest.raises(error, match=words):
            CliRunner().invoke(verb, arguments, catch_exceptions=False)
    assert not (tmp_path / "out.json").exists()
