"""Any step under any budget: a plan holds it whatever the disk does, or says that none can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import MemoryExceeded
from paceline.schedules.memory import (
    ManagedTensor,
    RecomputedModule,
    SpillTier,
    StepProfile,
    least_budget_bytes,
    plan_memory,
    replay,
)
from paceline.schedules.memory.timeline import resident_bytes

RATES = st.sampled_from([1.0, 30.0, 1000.0, 1e9])


@st.composite
def profiles(draw):
    """Draw a step: tensors of any sizes and gaps, state of the optimizer, modules to recompute."""
    events = draw(st.integers(2, 24))
    floor = draw(st.lists(st.integers(0, 200), min_size=events, max_size=events))
    compute = draw(st.lists(st.floats(0, 2), min_size=events, max_size=events))
    tensors = []
    for i in range(draw(st.integers(0, 12))):
        saved, idle, needed = sorted(draw(st.tuples(*[st.integers(0, events - 1)] * 3)))
        tensors.append(
            ManagedTensor(f"{i}", "activation", draw(st.integers(0, 100)), saved, idle, needed)
        )
    for i in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, events - 1))
        begin = at + 1 - events
        tensors.append(
            ManagedTensor(f"state {i}", "optimizer", draw(st.integers(1, 60)), begin, begin, at)
        )
    modules = []
    activations = [i for i, t in enumerate(tensors) if t.kind == "activation"]
    if activations and draw(st.booleans()):
        members = tuple(draw(st.sets(st.sampled_from(activations), min_size=1, max_size=3)))
        needed = min(tensors[i].needed for i in members)
        if all(tensors[i].idle <= needed for i in members):
            modules.append(RecomputedModule("block", draw(st.floats(0, 3)), needed, members))
    return StepProfile(
        compute_s=tuple(compute), floor_bytes=tuple(floor), tensors=tuple(tensors),
        modules=tuple(modules),
    )  # fmt: skip


def worst_case(profile, plan):
    """Return the most memory if every transfer takes as long as the plan lets it."""
    kept = [i for i, action in enumerate(plan.actions) if action.action == "keep"]
    names = [module.name for module in profile.modules]
    resident = resident_bytes(profile, kept, [names.index(name) for name in plan.recomputed])
    events = profile.events
    for tensor, action in zip(profile.tensors, plan.actions, strict=True):
        if action.action == "spill":
            assert tensor.saved <= action.written_by <= tensor.needed
            assert action.read_at <= tensor.needed
            assert action.read_at >= min(action.written_by, tensor.needed)
            for at in range(tensor.idle, action.written_by):
                resident[at % events] += tensor.bytes
            for at in range(action.read_at, tensor.needed):
                resident[at] += tensor.bytes
    return max(resident)


@given(profiles(), RATES, RATES, st.floats(0, 1), st.sampled_from(["greedy", "milp"]))
def test_never_over_the_budget(profile, write, read, part, method):
    tier = SpillTier(write_bytes_per_s=write, read_bytes_per_s=read)
    least = least_budget_bytes(profile)
    most = int(max(resident_bytes(profile, range(len(profile.tensors)))))
    budget = int(least + part * (most - least))
    plan = plan_memory(profile, tier, budget, method=method)
    assert worst_case(profile, plan) <= budget
    assert plan.peak_bytes <= budget
    names = [module.name for module in profile.modules]
    again = [names.index(name) for name in plan.recomputed]
    assert replay(profile, plan.actions, tier, again).step_s == pytest.approx(plan.step_s)
    assert plan.step_s >= sum(profile.compute_s) - 1e-9


@given(profiles(), st.integers(1, 1000))
def test_a_budget_below_the_least_is_refused(profile, less):
    tier = SpillTier(write_bytes_per_s=1.0, read_bytes_per_s=1.0)
    with pytest.raises(MemoryExceeded):
        plan_memory(profile, tier, least_budget_bytes(profile) - less)
