"""The divergence alarm, and the check for a gradient that is not finite, in one process."""

import json
import math

import pytest
import torch

from paceline.core.errors import PacelineError, UsageError
from paceline.training.health import (
    DivergenceAlarm,
    DivergenceLimits,
    GradientCheck,
)

LIMITS = DivergenceLimits(factor=4.0, patience=3, window=20, warmup=5)


def healthy(step):
    """Return a loss and norms that fall, with noise, and one bad batch in between."""
    noise = 1 + 0.5 * math.sin(37.0 * step)
    spike = 20.0 if step == 30 else 1.0
    fall = 100 / (100 + step)
    return fall * noise * spike, {"a": noise * fall * spike, "b": 10 * noise * fall, "c": 0.0}


def observe(alarm, step, loss, norms):
    return alarm.observe(step, loss=loss, gradient_norms=norms)


def test_a_healthy_training_gives_no_alarm():
    alarm = DivergenceAlarm(LIMITS)
    assert not any(observe(alarm, step, *healthy(step)) for step in range(200))


@pytest.mark.parametrize("layer", ["a", "b"])
def test_growing_gradients_are_named_by_step_and_layer(layer):
    alarm = DivergenceAlarm(LIMITS)
    alarms = {}
    for step in range(60):
        loss, norms = healthy(step)
        if step >= 50:
            norms[layer] *= 1000
        if found := observe(alarm, step, loss, norms):
            alarms[step] = found
    first = alarms[min(alarms)]
    assert (first.step, first.quantity, first.layer, first.steps) == (52, "gradient norm", layer, 3)
    assert layer in str(first)
    assert "step 52" in str(first)


def test_a_growing_loss_is_found_without_norms():
    alarm = DivergenceAlarm(LIMITS)
    found = [alarm.observe(step, loss=1.0 if step < 40 else 9.0) for step in range(44)]
    assert [step for step, divergence in enumerate(found) if divergence] == [42]
    assert (found[42].quantity, found[42].layer, found[42].median) == ("loss", "", 1.0)
    assert "9.0 times" in str(found[42])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_an_alarm_at_once(bad):
    alarm = DivergenceAlarm(LIMITS)
    assert alarm.observe(0, loss=bad).quantity == "loss"
    found = alarm.observe(1, loss=1.0, gradient_norms={"a": 1.0, "b": bad, "c": bad})
    assert (found.step, found.quantity, found.layer) == (1, "gradient norm", "b")
    assert str(found).endswith("in b")


def test_a_new_level_stops_being_an_alarm():
    alarm = DivergenceAlarm(LIMITS)
    alarms = [step for step in range(200) if alarm.observe(step, loss=1.0 if step < 40 else 9.0)]
    assert alarms
    assert max(alarms) < 60


def test_a_loss_below_zero_has_no_factor():
    alarm = DivergenceAlarm(LIMITS)
    assert not any(alarm.observe(step, loss=-10.0 + 0.06 * step) for step in range(150))


def test_an_alarm_continues_from_its_state_dict():
    alarm = DivergenceAlarm(LIMITS)
    for step in range(41):
        observe(alarm, step, 1.0 if step < 40 else 9.0, {"a": 1.0})
    resumed = DivergenceAlarm(LIMITS)
    resumed.load_state_dict(json.loads(json.dumps(alarm.state_dict())))
    for each in (alarm, resumed):
        found = [observe(each, step, 9.0, {"a": 1.0}) for step in (41, 42, 43)]
        assert [bool(divergence) for divergence in found] == [False, True, False]


@pytest.mark.parametrize(
    "wrong", [{"factor": 1.0}, {"patience": 0}, {"window": 20}, {"warmup": 101}]
)
def test_impossible_limits_are_refused(wrong):
    with pytest.raises(UsageError, match="factor"):
        DivergenceLimits(**wrong)


def test_the_first_bad_layer_of_the_backward_pass_is_named():
    check = GradientCheck(["a", "b", "c", "d"])
    check.observe(["d", "c"], [torch.ones(3), torch.tensor([1.0, math.nan])])
    assert check.flag().item() == 1
    check.observe(["b", "a"], [torch.full((2, 2), math.inf), torch.ones(0)])
    (culprit,) = check.culprits(17)
    assert (culprit.rank, culprit.step, culprit.layer, culprit.layers) == (0, 17, "c", 2)
    error = culprit.error()
    assert isinstance(error, PacelineError)
    for text in ("rank 0", "step 17", "gradient of c"):
        assert text in str(error)


def test_finite_gradients_have_no_culprit_however_large():
    check = GradientCheck(["a", "b"])
    assert check.flag().item() == 0
    check.observe(["b", "a"], [torch.full((1000,), 1e17), torch.full((9,), 6e4).half()])
    assert check.flag().item() == 0
    assert check.culprits(0) == ()


def test_a_step_leaves_nothing_behind():
    check = GradientCheck(["a"])
    check.observe(["a"], [torch.tensor([math.nan])])
    check.reset()
    assert check.flag().item() == 0


def test_norms_by_name_are_those_of_unscaled_gradients():
    check = GradientCheck(["weight", "bias"])
    check.observe(["bias"], [torch.zeros(2)])
    check.observe(["weight"], [torch.tensor([[6.0, 0.0], [0.0, 8.0]])])
    assert check.norms(scale=2.0) == {"weight": 5.0, "bias": 0.0}
