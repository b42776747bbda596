"""Which forms of a step run in a search, and that a plan wins by a step that ran."""

import dataclasses

import pytest
from support.machines import collective, small_machine

from paceline.core.errors import ScriptFailed, UsageError
from paceline.core.measured_step import MeasuredPhase, StepMeasurement
from paceline.core.workload import Layer, Operation, Workload
from paceline.perf.planner.captured import PASSES
from paceline.studies import plan_search
from paceline.studies.plan_search import TargetPlans, search_target
from paceline.training.capture_process import BatchDivision

BATCH, RANKS = 32, (1, 2)


def workload(share, passes):
    operation = Operation(
        phase="backward",
        operator="matmul",
        dtype="float32",
        count=passes,
        flops=share // passes * 10**6,
        bytes=8,
    )
    layer = Layer(name="x", kind="Linear", parameter_bytes=(1 << 20,), operations=(operation,))
    return Workload(
        name="w", batch=share // passes, input_bytes=16, layers=(layer,), accumulation=passes
    )


def target_plans():
    costs = tuple(collective("all_reduce", 1e-5, 1e10, 2, name) for name in ("gloo", "paceline"))
    divisions = [BatchDivision(ranks, 0, passes) for ranks in RANKS for passes in PASSES]
    return TargetPlans(
        machine=dataclasses.replace(small_machine(), collectives=costs),
        target="model.py:step",
        batch=BATCH,
        ranks=RANKS,
        workloads={each: workload(BATCH // each.replicas, each.passes) for each in divisions},
        recomputes=False,
    )


def ran(form, ranks, seconds):
    phase = MeasuredPhase(operators_s=0.0, residual_s=seconds, low_s=seconds, high_s=seconds)
    return StepMeasurement(
        torch="2.13.0",
        threads=form.threads,
        processes=ranks,
        allocator="keep",
        phases=dict.fromkeys(("forward", "backward", "optimizer"), phase),
        operators=(),
        whole_steps=9,
    )


@pytest.fixture
def runs(monkeypatch):
    """Let forms take 50 ms a phase, times their passes; return what ran."""
    found = []

    def measure(target, forms, *, ranks, allocator):
        found.append((ranks, tuple(forms)))
        return tuple(ran(form, ranks, 0.05 * form.passes) for form in forms)

    monkeypatch.setattr(plan_search, "measure_forms", measure)
    monkeypatch.setattr(plan_search, "reason_not_to_measure", lambda *_: "")
    return found


def test_a_plan_wins_by_a_step_that_ran(runs, monkeypatch):
    # By rates, plans with one rank are slower; of the two-rank plans few may run at first.
    monkeypatch.setattr(plan_search, "WORTH", 1.0)
    plans = target_plans()
    found = search_target(plans, plans.space())
    assert found.best.sources["forward"] == "measured: 9 steps"
    assert found.best.step_time_s >= 0.15
    forms = [(ranks, form) for ranks, own in runs for form in own]
    assert len(set(forms)) == len(forms)  # none runs twice
    assert len(runs) > 1  # rates promised more than the first ones kept


def test_forms_are_measured_once_for_all_plans_that_have_them(runs):
    plans = target_plans()
    first = plans.estimates(plans.space().plans())
    count = len(runs)
    assert plans.estimates(plans.space().plans()) == first
    assert len(runs) == count
    assert {estimate.batch for estimate in first} == {BATCH}


def test_nothing_runs_where_rates_are_asked_for(runs):
    plans = target_plans()
    plans.estimates(plans.space().plans(), "rates")
    assert runs == []


def test_a_step_that_does_not_run_is_said_or_an_error(monkeypatch):
    def fails(*_, **__):
        raise ScriptFailed("no step", where="model.py")

    monkeypatch.setattr(plan_search, "measure_forms", fails)
    monkeypatch.setattr(plan_search, "reason_not_to_measure", lambda *_: "")
    plans = target_plans()
    predicted = plans.estimates(plans.space().plans())
    assert all("no step" in each.warnings[-1] for each in predicted)
    with pytest.raises(ScriptFailed):
        plans.estimates(plans.space().plans(), "measured")


def test_another_machine_is_not_measured():
    plans = target_plans()
    with pytest.raises(UsageError, match="cannot be measured here"):
        plans.estimates(plans.space().plans(), "measured")
    assert plans.estimates(plans.space().plans())[0].sources["forward"].startswith("rates")
