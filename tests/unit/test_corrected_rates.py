import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.events import Measured, Start, Submitted
from paceline.scheduler.job import Job
from paceline.scheduler.placement import NodeDevices, Placement, Shape
from paceline.scheduler.rates.corrected import CorrectedRates, Learned
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import PairKey, PairTable
from paceline.scheduler.state.state import State

ONE = Shape("gpu", (1,), 0)
X, Y = Job(name="x", profile="x", work=100.0), Job(name="y", profile="y", work=100.0)


def estimates(kept=0.8):
    factors = {
        PairKey("gpu", 1, job.profile, other.profile): kept
        for job, other in ((X, Y), (Y, X), (X, X))
    }
    profiles = {name: Profile(alone={"gpu": {1: 10.0, 2: 18.0}}) for name in "xy"}
    return RateModel(profiles, PairTable(factors))


class FasterLater(RateModel):
    """Twice as fast from the first unit of work on."""

    def alone(self, job, shape, work_done=0.0):
        return super().alone(job, shape) * (2 if work_done >= 1 else 1)


def test_a_report_is_compared_with_the_estimate_at_its_progress():
    rates = CorrectedRates(FasterLater({"x": Profile(alone={"gpu": {1: 10.0}})}))
    assert not rates.observe(X, (), ONE, 20.0, 5.0)
    assert rates.alone(X, ONE, 5.0) == pytest.approx(20)


def test_a_job_that_stands_still_does_not_stop_its_class():
    rates = CorrectedRates(estimates())
    assert not rates.observe(X, (), ONE, 0.0)
    assert rates.alone(X, ONE) == 10
    assert not rates.observe(X, [Y], ONE, 0.0)
    assert rates.kept(X, [Y], ONE) > 0


def test_without_a_report_rates_are_the_estimates_and_sharing_is_in_doubt():
    rates = CorrectedRates(estimates(), doubt=0.1)
    assert rates.alone(X, ONE) == 10.0
    assert rates.kept(X, [Y], ONE) == pytest.approx(0.8 * 0.9)
    assert rates.kept(X, [], ONE) == 1.0


def test_the_first_report_replaces_the_guess_and_later_ones_move_it():
    rates = CorrectedRates(estimates(), least_gain=0.2)
    assert rates.observe(X, [], ONE, 7.0)
    assert rates.alone(X, ONE) == pytest.approx(7.0)
    for _ in range(60):
        rates.observe(X, [], ONE, 9.0)
    assert rates.alone(X, ONE) == pytest.approx(9.0, rel=1e-3)


def test_a_report_corrects_its_class_devices_and_type_only():
    rates = CorrectedRates(estimates())
    rates.observe(X, [], ONE, 5.0)
    assert rates.alone(Y, ONE) == 10.0
    assert rates.alone(X, Shape("gpu", (2,), 0)) == 18.0


def test_the_doubt_about_sharing_shrinks_with_each_report():
    rates = CorrectedRates(estimates(), doubt=0.2)
    seen = [rates.kept(X, [Y], ONE)]
    for _ in range(3):
        rates.observe(X, [Y], ONE, 8.0)  # as estimated: 0.8 of 10
        seen.append(rates.kept(X, [Y], ONE))
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(0.8 * (1 - 0.2 / 4))


def test_a_pair_that_does_not_pay_is_undone_after_as_many_slow_reports():
    rates = CorrectedRates(estimates(), slow_limit=3)
    rates.observe(X, [Y], ONE, 4.0)  # says nothing yet about both together
    rates.observe(Y, [X], ONE, 4.0)
    rates.observe(X, [Y], ONE, 4.0)
    assert rates.kept(X, [Y], ONE) > 0
    assert rates.observe(Y, [X], ONE, 4.0)  # the third in a row
    assert rates.kept(X, [Y], ONE) == rates.kept(Y, [X], ONE) == 0.0
    assert rates.kept(X, [X], ONE) > 0  # another pair of classes


def test_a_pair_that_pays_again_starts_to_count_anew():
    rates = CorrectedRates(estimates(), slow_limit=5, least_gain=1.0)
    for rate in (4.0, 4.0, 8.0, 4.0, 4.0):
        rates.observe(X, [Y], ONE, rate)
        rates.observe(Y, [X], ONE, rate)
    assert rates.kept(X, [Y], ONE) > 0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1e6)), max_size=30))
def test_shares_stay_between_none_and_all_whatever_is_reported(reports):
    rates = CorrectedRates(estimates())
    for shared, rate in reports:
        rates.observe(X, [Y] if shared else [], ONE, rate)
        assert 0 <= rates.kept(X, [Y], ONE) <= 1
        assert math.isfinite(rates.alone(X, ONE))


def test_what_one_job_reports_changes_the_estimate_for_the_next_of_its_class():
    state = State(Cluster.of_text("1x2"), CorrectedRates(estimates()))
    state.apply(Submitted(at_s=0.0, job=X))
    devices = (NodeDevices(node="n0", devices=(0,)),)
    state.act(Start(name="x", placement=Placement(parts=devices)))
    state.apply(Measured(at_s=10.0, name="x", work_done=50.0, rate=5.0))
    assert state.learned == 1
    assert state.running["x"].rate == 5.0
    state.apply(Submitted(at_s=11.0, job=Job(name="next", profile="x", work=100.0)))
    assert state.rate_of(state.waiting["next"], ONE, ()) == pytest.approx(5.0)


def test_what_was_learned_can_be_handed_on_and_goes_with_rates_that_are_given_anew():
    rates = CorrectedRates(estimates())
    rates.observe(X, [], ONE, 7.0)
    for _ in range(3):
        rates.observe(X, [Y], ONE, 1.0)
        rates.observe(Y, [X], ONE, 1.0)
    learned = Learned.from_json(rates.learned(1000).to_json())
    after = CorrectedRates(estimates(), learned=learned)
    assert after.alone(X, ONE) == pytest.approx(7.0)
    assert after.kept(X, [Y], ONE) == rates.kept(X, [Y], ONE) == 0.0
    assert after.learned(1000) == learned
    assert after.give("x", {"gpu": {1: 20.0}})
    assert after.alone(X, ONE) == 20.0


def test_what_a_job_keeps_is_not_known_before_it_ran_alone_if_nobody_measured_its_class():
    rates = CorrectedRates(estimates(), is_measured=lambda profile: profile == "y")
    before = rates.kept(X, [Y], ONE)
    assert not rates.observe(X, [Y], ONE, 80.0)
    assert rates.kept(X, [Y], ONE) == before
    rates.observe(X, [], ONE, 100.0)
    assert rates.observe(X, [Y], ONE, 40.0)
    assert rates.kept(X, [Y], ONE) < before
