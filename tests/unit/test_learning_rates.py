"""Scaling rules, warm-up and decay: against torch's own schedules where torch has them."""

import copy
import itertools
import math
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, PolynomialLR, SequentialLR

from paceline.core.errors import UsageError
from paceline.training.optimizers import (
    LARS,
    LargeBatchRate,
    large_batch_schedule,
    linear_scaling,
    square_root_scaling,
)

GIVEN = {"batch": 1024, "reference_batch": 256, "epochs": 10, "steps_per_epoch": 7}


def an_optimizer(rate=0.1):
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=rate)


def rates_of(optimizer, scheduler, count, skipped=()):
    """Return the rate of each step; the steps in `skipped` have no gradients."""
    rates = []
    for step in range(count):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None if step in skipped else torch.zeros_like(parameter)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_scaling_rules():
    assert linear_scaling(8192, 256) == 32
    assert square_root_scaling(8192, 256) == pytest.approx(math.sqrt(32))
    assert linear_scaling(128, 256) == square_root_scaling(64, 256) == 0.5


@pytest.mark.parametrize(("rule", "peak"), [("linear", 4), ("square-root", 2), ("none", 1)])
def test_warm_up_rises_from_the_reference_rate_in_equal_increments(rule, peak):
    rate = LargeBatchRate(**GIVEN, rule=rule, warmup_epochs=2, decay="constant")
    factors = [1.0] + [rate.factor(step) for step in range(14)]
    assert factors[-1] == pytest.approx(peak)
    increments = {round(b - a, 12) for a, b in itertools.pairwise(factors)}
    assert increments == {round((peak - 1) / 14, 12)}
    assert rate.factor(14) == rate.factor(69) == peak


def test_no_step_of_a_warm_up_from_zero_is_lost():
    rate = LargeBatchRate(**GIVEN, warmup_epochs=2, warmup_from=0.0)
    assert rate.factor(0) == pytest.approx(4 / 14)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_polynomial_decay_is_that_of_torch(power):
    optimizer = an_optimizer()
    rate = LargeBatchRate(**GIVEN, warmup_epochs=2, power=power)
    mine = rates_of(optimizer, large_batch_schedule(optimizer, rate), 70)
    other = an_optimizer(0.4)
    theirs = rates_of(other, PolynomialLR(other, total_iters=56, power=power), 56)
    assert mine[14:] == pytest.approx(theirs)


def test_warm_up_and_cosine_are_those_of_torch():
    optimizer = an_optimizer()
    rate = LargeBatchRate(**GIVEN, warmup_epochs=2, decay="cosine")
    mine = rates_of(optimizer, large_batch_schedule(optimizer, rate), 70)
    other = an_optimizer(0.4)
    first = (1 + 3 / 14) / 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedule = SequentialLR(
            other,
            [LinearLR(other, first, total_iters=13), CosineAnnealingLR(other, T_max=56)],
            milestones=[14],
        )
        theirs = rates_of(other, schedule, 70)
    assert mine == pytest.approx(theirs)


def test_after_the_last_epoch_the_rate_stays_where_it_ended():
    assert LargeBatchRate(**GIVEN).factor(1000) == 0
    assert LargeBatchRate(**GIVEN, decay="constant").factor(1000) == 4


def test_groups_keep_their_ratios():
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    groups = [{"params": [parameters[0]], "lr": 0.1}, {"params": [parameters[1]], "lr": 0.3}]
    optimizer = torch.optim.SGD(groups)
    scheduler = large_batch_schedule(optimizer, LargeBatchRate(**GIVEN))
    rates_of(optimizer, scheduler, 9)
    first, second = (group["lr"] for group in optimizer.param_groups)
    assert second == pytest.approx(3 * first)


def test_skipped_steps_do_not_use_up_the_warm_up():
    rate = LargeBatchRate(**GIVEN)
    optimizer = an_optimizer()
    plain = rates_of(optimizer, large_batch_schedule(optimizer, rate), 12)
    optimizer = an_optimizer()
    skipping = rates_of(optimizer, large_batch_schedule(optimizer, rate), 15, skipped=(0, 1, 7))
    applied = [value for step, value in enumerate(skipping) if step not in (0, 1, 7)]
    assert applied == plain


def test_a_schedule_by_epoch_advances_once_for_many_steps():
    optimizer = an_optimizer()
    scheduler = large_batch_schedule(optimizer, LargeBatchRate(**GIVEN))
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(5):
        optimizer.step()
    scheduler.step()
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_a_schedule_continues_from_its_state_dict():
    rate = LargeBatchRate(**GIVEN)
    optimizer = an_optimizer()
    scheduler = large_batch_schedule(optimizer, rate)
    rates_of(optimizer, scheduler, 20)
    other = an_optimizer()
    resumed = large_batch_schedule(other, rate)
    other.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    assert rates_of(other, resumed, 20) == rates_of(optimizer, scheduler, 20)


def test_lars_takes_a_schedule():
    weight = nn.Parameter(torch.ones(3, 3))
    optimizer = LARS([weight], 1.0, momentum=0.0, trust_coefficient=0.1)
    scheduler = large_batch_schedule(optimizer, LargeBatchRate(**GIVEN, warmup_epochs=1))
    moved = []
    for _ in range(7):
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        scheduler.step()
        moved.append(((before - weight.detach()) / before).mean().item())
    assert moved == pytest.approx([0.1 * (1 + 3 * (step + 1) / 7) for step in range(7)])


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"batch": 0}, "batch"),
        ({"epochs": float("nan")}, "epochs"),
        ({"warmup_epochs": 11}, "warmup_epochs"),
        ({"rule": "cubic"}, "cubic"),
        ({"decay": "step"}, "step"),
    ],
)
def test_impossible_schedules_are_refused(wrong, named):
    with pytest.raises(UsageError, match=named):
        LargeBatchRate(**{**GIVEN, **wrong})
