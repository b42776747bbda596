"""The plans of a captured model on one machine, and the best of those that were priced."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machines import collective, small_machine

from paceline.core.affinity import planned_cores
from paceline.core.errors import UsageError
from paceline.core.plan import Plan
from paceline.core.workload import Layer, Operation, Workload
from paceline.perf import estimate
from paceline.perf.planner.captured import AXES, CapturedSpace, best_of
from paceline.perf.planner.winner import axis_value
from paceline.report.plan_search import plan_in_words

MIB = 1 << 20


def space(**changes):
    settings = {
        "batch": 48,
        "ranks": (1, 2, 4),
        "cores": 4,
        "trained_bytes": 6 * MIB,
        "recomputes": True,
    }
    return CapturedSpace(**(settings | changes))


@given(
    batch=st.integers(1, 64),
    ranks=st.sets(st.integers(1, 8), min_size=1).map(tuple),
    cores=st.integers(1, 16),
    trained=st.integers(1, 600 * MIB),
)
def test_each_plan_divides_the_batch_and_comes_once(batch, ranks, cores, trained):
    searched = space(batch=batch, ranks=ranks, cores=cores, trained_bytes=trained)
    if all(batch % count for count in ranks):
        with pytest.raises(UsageError, match="no plan divides"):
            searched.plans()
        return
    plans = searched.plans()
    assert len(set(plans)) == len(plans)
    for plan in plans:
        assert plan.mesh.data in ranks
        assert batch % (plan.mesh.data * plan.microbatch_count) == 0
        assert plan.threads <= max(1, cores)
        assert plan.collectives == "torch" or plan.mesh.data > 1


def test_a_space_begins_with_the_default_of_its_ranks_and_varies_each_axis():
    plans = space(ranks=(2,)).plans()
    assert plans[0] == dataclasses.replace(Plan(), mesh=plans[0].mesh, threads=2)
    found = {axis: {axis_value(plan, axis) for plan in plans} for axis in AXES}
    assert found == {
        "ranks": {"2"},
        "threads": {"1", "2", "4"},
        "microbatch": {"1 per replica", "2 per replica", "4 per replica"},
        "recompute": {"none", "full"},
        "collectives": {"torch", "paceline"},
        "bucket": {"25 MiB", "1 MiB", "4 MiB", "16 MiB"},
    }
    words = {plan_in_words(plan) for plan in plans}
    assert len(words) == len(plans)


def test_what_is_fixed_is_not_varied():
    fixed = {"threads": 3, "microbatch": 2, "collectives": "paceline", "bucket": 8 * MIB}
    for plan in space(ranks=(2, 4), fixed=fixed).plans():
        assert (plan.threads, plan.microbatches, plan.collectives) == (3, 2, "paceline")
        assert plan.bucket_bytes == plan.first_bucket_bytes == 8 * MIB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fixed": {"tensor": 2}}, "'tensor' is no axis"),
        ({"batch": 0}, "nothing to search"),
        ({"ranks": ()}, "nothing to search"),
        ({"fixed": {"recompute": "selective"}}, "recomputes 'selective'"),
        ({"fixed": {"recompute": "full"}, "recomputes": False}, "recomputes 'full'"),
    ],
)
def test_a_space_that_cannot_be_is_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        space(**changes)


def machine():
    costs = [
        collective("all_reduce", latency_s, 1e9, ranks, backend)
        for backend, latency_s in (("gloo", 2e-3), ("paceline", 1e-4))
        for ranks in (2, 4)
    ]
    return dataclasses.replace(small_machine(), collectives=tuple(costs))


def workload(plan):
    """Return a rank's step: its flops are the rank's share, its memory one pass's."""
    share = 48 // plan.mesh.data
    operations = tuple(
        Operation(phase=phase, operator="matmul", dtype="float32", count=plan.microbatch_count,
                  flops=share // plan.microbatch_count * 10**5, bytes=8)
        for phase in ("forward", "backward")
    )  # fmt: skip
    layer = Layer(
        name="only",
        kind="Linear",
        parameter_bytes=(MIB,),
        saved_bytes=share // plan.microbatch_count * MIB,
        operations=operations,
    )
    return Workload(
        name="w", batch=share, input_bytes=16, layers=(layer,), accumulation=plan.microbatch_count
    )


def searched(on, **changes):
    plans = space(trained_bytes=MIB, recomputes=False, **changes).plans()
    estimates = [estimate(on, workload(plan), plan) for plan in plans]
    return estimates, best_of(estimates, 48, 0.1)


def test_the_winner_is_the_fastest_plan_and_the_front_what_no_other_beats():
    estimates, found = searched(machine())
    assert found.best.step_time_s == min(each.step_time_s for each in estimates)
    assert found.best.plan.collectives == "paceline" or found.best.plan.mesh.data == 1
    assert found.front[0].plan == found.best.plan
    seconds = [priced.step_s for priced in found.front]
    sizes = [priced.memory_bytes for priced in found.front]
    assert seconds == sorted(seconds)
    assert sizes == sorted(sizes, reverse=True)
    assert found.compared == found.priced == len(estimates)


def test_alternatives_are_the_best_plans_of_other_values():
    estimates, found = searched(machine(), ranks=(2, 4))
    for item in found.alternatives:
        own = [e for e in estimates if axis_value(e.plan, item.axis) == item.value]
        best_s = min(each.step_time_s for each in own)
        assert item.slower == pytest.approx(best_s / found.best.step_time_s - 1)
    gloo = next(item for item in found.alternatives if item.value == "torch")
    assert (gloo.axis, gloo.why) == ("collectives", "transfer")


def test_where_nothing_fits_the_smallest_plan_is_named():
    device = machine().devices[0]
    tiny = dataclasses.replace(device.memory_bytes, value=1024.0)
    small = dataclasses.replace(
        machine(), devices=(dataclasses.replace(device, memory_bytes=tiny),)
    )
    estimates, found = searched(small)
    assert not found.fits
    assert found.best.needed_memory_bytes == min(e.needed_memory_bytes for e in estimates)
    assert "GiB of memory" in found.cheapest_change


def test_ranks_with_more_threads_than_cores_of_their_own_are_not_bound():
    assert planned_cores((0, 1, 2, 3), 1, 2, 2) == (2, 3)
    assert planned_cores((0, 1, 2, 3), 1, 2, 3) == ()
    assert planned_cores((0, 1), 3, 4, 1) == ()
