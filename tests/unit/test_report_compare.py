"""Prediction beside measurement: what an undisturbed step is, and how far off it was."""

import numpy as np
import pytest
from support.traces import Late, data_parallel, write_run

from paceline.core.breakdown import Breakdown
from paceline.report.compare import Comparison, compare, undisturbed
from paceline.trace.analysis import analyse
from paceline.trace.analysis.blame import Straggler
from paceline.trace.merge import load_run

PREDICTED = Breakdown(input=0.001, forward=0.003, backward=0.005, transfer=0.001, optimizer=0.001)


def _compare(run, predicted=None, **kwargs):
    late = (Late(1, 18, 40, 80),)
    trace = load_run(write_run(run, data_parallel(2, 100, late=late)))
    analysis = analyse(trace)
    return compare(analysis.phases, analysis.stragglers, predicted, **kwargs)


def test_a_stragglers_window_and_the_warm_up_are_left_out(tmp_path):
    found = _compare(tmp_path, PREDICTED)
    assert (found.steps, found.undisturbed_steps) == (100, 100 - 10 - 41)
    measured = {phase.name: phase.measured_s for phase in found.phases}
    assert measured["input"] == pytest.approx(0.001)
    assert measured["backward"] == pytest.approx(0.004)
    assert measured["waiting"] == 0
    assert found.measured_step_s == pytest.approx(0.010)


def test_the_phases_add_up_to_the_step(tmp_path):
    late = (Late(1, 18, 40, 80), Late(0, 3, 90, 99, "compute"))
    trace = load_run(write_run(tmp_path, data_parallel(2, 100, late=late)))
    analysis = analyse(trace)
    found = compare(analysis.phases, analysis.stragglers)
    assert sum(phase.measured_s for phase in found.phases) == pytest.approx(found.measured_step_s)


def test_typical_steps_are_of_one_kind_when_all_ranks_change(tmp_path):
    jitter_ns = np.zeros((2, 100), dtype=int)
    jitter_ns[:, 60:] = 12_000_000
    trace = load_run(write_run(tmp_path, data_parallel(2, 100, jitter_ns=jitter_ns)))
    found = compare(analyse(trace).phases, ())
    measured = {phase.name: phase.measured_s for phase in found.phases}
    assert found.measured_step_s == pytest.approx(0.010)
    assert measured["forward"] == pytest.approx(0.003)
    assert measured["backward"] == pytest.approx(0.004)


@pytest.mark.parametrize(("share", "left"), [(0.2, 90), (0.6, 9)])
def test_a_range_with_few_late_steps_stays(share, left):
    late = Straggler(
        rank=1,
        cause="not_running",
        late_ms=3,
        first_step=19,
        last_step=99,
        others_wait=0.5,
        shape="intermittent",
        late_share=share,
    )
    assert undisturbed(100, [late]).sum() == left


def test_only_the_late_steps_of_a_periodic_straggler_are_left_out():
    late = Straggler(
        rank=1,
        cause="checkpoint",
        late_ms=30,
        first_step=19,
        last_step=99,
        others_wait=0.5,
        shape="periodic",
        period_steps=20,
    )
    chosen = undisturbed(100, [late])
    assert np.flatnonzero(~chosen).tolist() == [*range(10), 19, 39, 59, 79, 99]


def test_errors_and_ratios(tmp_path):
    found = _compare(tmp_path, PREDICTED)
    assert found.predicted_step_s == pytest.approx(0.011)
    assert found.step_time_error == pytest.approx(0.1)
    ratios = {phase.name: phase.ratio for phase in found.phases}
    assert ratios["backward"] == pytest.approx(1.25)
    assert ratios["waiting"] is None
    assert Comparison.from_text(found.to_text()) == found


def test_a_step_time_may_be_predicted_apart_from_phases(tmp_path):
    found = _compare(tmp_path, PREDICTED, predicted_step_s=0.02)
    assert found.step_time_error == pytest.approx(1.0)


def test_without_prediction_there_is_only_the_measurement(tmp_path):
    found = _compare(tmp_path)
    assert found.step_time_error is None
    assert all(phase.predicted_s is None for phase in found.phases)
    assert found.measured_step_s > 0


def test_a_run_without_an_undisturbed_step_is_compared_by_its_late_steps(tmp_path):
    late = (Late(1, 18, 0, 99),)
    analysis = analyse(load_run(write_run(tmp_path, data_parallel(2, 100, late=late))))
    found = compare(analysis.phases, analysis.stragglers, PREDICTED)
    assert (found.undisturbed_steps, found.not_compared) == (0, "")
    assert found.measured_step_s == pytest.approx(0.028)
    assert found.step_time_error == pytest.approx(1 - 0.011 / 0.028)


def test_without_steps_there_is_nothing(tmp_path):
    found = compare((), (), PREDICTED)
    assert (found.steps, found.undisturbed_steps, found.measured_step_s) == (0, 0, 0)
    assert found.step_time_error is None


def test_short_runs_warm_up_for_a_third(tmp_path):
    assert undisturbed(9, ()).tolist() == [False] * 3 + [True] * 6
    assert undisturbed(100, ()).sum() == 90
    assert not undisturbed(0, ()).any()
