"""Operators are told apart, called again on copies of their inputs, and counted by phase."""

import pytest

torch = pytest.importorskip("torch")

from paceline.core.measured_step import OperatorTime  # noqa: E402  # after the skip
from paceline.training.capture import TrainingStep  # noqa: E402
from paceline.training.measured.calls import signature_of  # noqa: E402
from paceline.training.measured.recording import CallRecorder  # noqa: E402
from paceline.training.measured.steps import (  # noqa: E402
    WholeSteps,
    make_runner,
    run_round,
)
from paceline.training.measured.timing import time_call  # noqa: E402

aten = torch.ops.aten


def timed(function, *args, **kwargs):
    return time_call(function, args, kwargs, cold_bytes=1 << 20, budget_s=0.0)


def test_shapes_strides_dtypes_and_scalars_tell_calls_apart():
    x = torch.zeros(2, 3)
    signatures = {
        signature_of(aten.mul.Tensor, (x, x), {}),
        signature_of(aten.mul.Tensor, (x.double(), x), {}),
        signature_of(aten.mul.Tensor, (x, x.t().contiguous().t()), {}),
        signature_of(aten.mul.Scalar, (x, 2), {}),
        signature_of(aten.mul.Scalar, (x, 3), {}),
        signature_of(aten._foreach_add.List, ([x, x], [x, x]), {"alpha": 2}),
    }
    assert len(signatures) == 6
    assert signature_of(aten.mul.Tensor, (x + 1, x), {}) in signatures  # values do not


def test_an_operator_in_place_is_timed_without_changing_its_argument():
    x = torch.ones(4, 5)
    time = timed(aten.add_.Tensor, x, x)
    assert time.seconds > 0
    assert time.low_s <= time.seconds <= time.high_s
    assert torch.equal(x, torch.ones(4, 5))


def test_copies_keep_strides_also_of_tensors_that_overlap_themselves():
    seen = []

    def look(tensor):
        seen.append((tensor.stride(), tensor.shape, float(tensor.sum())))

    expanded = torch.arange(3.0)[None].expand(4, 3)
    part = torch.arange(12.0).view(3, 4)[:, 1:3]
    for tensor in (expanded, part, torch.zeros(0, 2)):
        seen.clear()
        timed(look, tensor)
        assert set(seen) == {(tensor.stride(), tensor.shape, float(tensor.sum()))}


def test_an_operator_that_fails_on_its_own_has_no_time():
    assert timed(aten.mm.default, torch.ones(2, 3), torch.ones(2, 3)) is None


def small_step(**changes):
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    settings = {
        "module": module,
        "inputs": torch.randn(3, 4),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
    }
    return TrainingStep(**(settings | changes))


def recorded(step, known=(), asked=None):
    def time_it(function, args, kwargs):
        if asked is not None:
            asked.append(str(function))
        return OperatorTime(1e-6, 1e-6, 1e-6)

    runner, recorder = make_runner(step), CallRecorder(dict(known), time_it)
    runner.run()  # the first step makes what the others have
    runner.phase = lambda name: setattr(recorder, "phase", name)
    with recorder:
        runner.run()
    return recorder.calls()


def test_calls_are_counted_by_phase_and_each_distinct_one_is_timed_once():
    asked = []
    calls = recorded(small_step(), asked=asked)
    by_phase = {
        phase: sum(equal.calls for equal in calls if equal.phase == phase)
        for phase in ("forward", "backward", "optimizer")
    }
    assert by_phase["forward"] >= 3
    assert by_phase["backward"] > by_phase["forward"]
    updates = [equal for equal in calls if "aten.add_" in equal.signature]
    assert sum(equal.calls for equal in updates if equal.phase == "optimizer") == 4
    assert len(asked) == len({equal.signature for equal in calls})


def test_a_known_operator_is_not_timed_again():
    known = {equal.signature: equal.time for equal in recorded(small_step())}
    asked = []
    assert recorded(small_step(), known=known, asked=asked)
    assert asked == []


def test_a_step_that_accumulates_runs_as_many_passes():
    once, thrice = (
        sum(equal.calls for equal in recorded(small_step(accumulation=count)) if "relu" in equal[1])
        for count in (1, 3)
    )
    assert thrice == 3 * once


def test_rounds_have_phases_with_the_medians_of_their_blocks():
    steps = WholeSteps()
    runner = make_runner(small_step())
    for _ in range(2):
        run_round(runner, steps, round_s=0.0, synchronize=lambda: None, agree=float)
    assert len(steps.rounds) == 2
    for number in range(3):
        middle, low, high = steps.phase(number)
        assert 0 <= low <= middle <= high
