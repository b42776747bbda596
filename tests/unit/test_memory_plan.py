"""Memory plans: small steps whose best plan is known, and records that round-trip."""

import numpy as np
import pytest

from paceline.core.errors import ConfigError, MemoryExceeded
from paceline.schedules.memory import (
    ManagedTensor,
    MemoryPlan,
    RecomputedModule,
    SpillTier,
    StepProfile,
    least_budget_bytes,
    plan_memory,
    replay,
)
from paceline.schedules.memory.selection import greedy

FAST = SpillTier(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
SLOW = SpillTier(write_bytes_per_s=10.0, read_bytes_per_s=10.0)


def stack(layers, size=100, floor=50, **more):
    """Return the profile of layers that save a tensor each, needed in the reverse order."""
    events = 2 * layers
    tensors = tuple(
        ManagedTensor(f"layer {i}", "activation", size, i, i, events - 1 - i) for i in range(layers)
    )
    return StepProfile(
        compute_s=(1.0,) * events, floor_bytes=(floor,) * events, tensors=tensors, **more
    )


def actions_of(plan):
    return [action.action for action in plan.actions]


def test_all_is_kept_where_all_fits():
    plan = plan_memory(stack(4), FAST, 450)
    assert plan.method == "fits"
    assert actions_of(plan) == ["keep"] * 4
    assert plan.peak_bytes == plan.in_core_peak_bytes == 450
    assert plan.slowdown == 1


@pytest.mark.parametrize("method", ["greedy", "milp", "auto"])
def test_the_cheapest_choice_spills_beside_the_computing(method):
    plan = plan_memory(stack(4), FAST, 350, method=method)
    assert 1 <= actions_of(plan).count("spill") < 4
    assert plan.peak_bytes <= 350
    assert plan.step_s == pytest.approx(8, rel=1e-6)


def test_greedy_gives_up_no_more_than_it_must():
    profile = stack(4)
    choice = greedy(profile, FAST, 350)
    assert len(choice.kept) == 3


@pytest.mark.parametrize("method", ["greedy", "milp"])
def test_a_module_is_recomputed_where_the_disk_is_slower(method):
    modules = tuple(RecomputedModule(f"layer {i}", 0.5, 7 - i, (i,)) for i in range(4))
    plan = plan_memory(stack(4, modules=modules), SLOW, 350, method=method)
    assert "spill" not in actions_of(plan)
    assert plan.recomputed
    assert plan.step_s == pytest.approx(8.5)


def test_a_budget_that_nothing_fits_says_by_how_much():
    profile = stack(4, floor=1000)
    with pytest.raises(
        MemoryExceeded, match=r"takes 1,000 bytes, 100 bytes more.* at least 1,000"
    ) as got:
        plan_memory(profile, FAST, 900)
    assert isinstance(got.value, MemoryError)
    assert plan_memory(profile, FAST, least_budget_bytes(profile)).peak_bytes == 1000


def test_a_slow_disk_makes_the_step_wait_and_holds_the_budget():
    fast = plan_memory(stack(6), FAST, 250, method="greedy")
    slow = plan_memory(stack(6), SLOW, 250, method="greedy")
    assert fast.exposed_s < 1e-3 < slow.exposed_s
    assert slow.peak_bytes <= 250


def test_state_is_away_from_one_update_to_the_next():
    # Two states of 100 bytes, at the last two events; they are in memory in their own interval.
    tensors = tuple(
        ManagedTensor(f"state {i}", "optimizer", 100, i + 4 - 5, i + 4 - 5, i + 3) for i in range(1)
    )
    profile = StepProfile(
        compute_s=(1.0,) * 5, floor_bytes=(100, 100, 100, 200, 100), tensors=tensors
    )
    plan = plan_memory(profile, FAST, 200)
    assert actions_of(plan) == ["keep"]
    with pytest.raises(MemoryExceeded):
        plan_memory(profile, FAST, 199)
    high = StepProfile(compute_s=(1.0,) * 5, floor_bytes=(100, 150, 100, 200, 100), tensors=tensors)
    plan = plan_memory(high, FAST, 200)
    action = plan.actions[0]
    assert action.action == "spill"
    assert action.written_by <= 1  # before the interval that has no room for it
    assert action.read_at == 2  # the first event after it
    assert replay(high, plan.actions, FAST).peak_bytes == 200


def test_records_round_trip():
    plan = plan_memory(stack(4), FAST, 350)
    assert MemoryPlan.from_text(plan.to_text()) == plan
    profile = stack(3, modules=(RecomputedModule("a", 1.0, 4, (1,)),))
    assert StepProfile.from_text(profile.to_text()) == profile
    assert SpillTier.from_text(FAST.to_text()) == FAST


def test_events_out_of_order_are_refused():
    with pytest.raises(ConfigError, match="not in order"):
        StepProfile(
            compute_s=(1.0, 1.0),
            floor_bytes=(1, 1),
            tensors=(ManagedTensor("a", "activation", 1, 1, 1, 0),),
        )


@pytest.mark.parametrize("seed", range(3))
def test_the_greedy_choice_is_about_as_good_as_the_solvers(seed):
    random = np.random.default_rng(seed)
    layers = 20
    events = 2 * layers
    tensors = tuple(
        ManagedTensor(f"{i}", "activation", int(random.integers(20, 200)), i, i, events - 1 - i)
        for i in range(layers)
    )
    profile = StepProfile(
        compute_s=tuple(random.uniform(0.05, 0.2, events).tolist()),
        floor_bytes=(100,) * events,
        tensors=tensors,
    )
    tier = SpillTier(write_bytes_per_s=1000.0, read_bytes_per_s=1000.0)
    most = 100 + sum(tensor.bytes for tensor in tensors)
    for part in (0.3, 0.6, 0.9):
        plans = [
            plan_memory(profile, tier, int(part * most), method=method)
            for method in ("greedy", "milp", "auto")
        ]
        by_greedy, by_milp, by_either = (plan.step_s for plan in plans)
        assert by_greedy <= 1.1 * by_milp
        assert by_either <= min(by_greedy, by_milp) * 1.01
