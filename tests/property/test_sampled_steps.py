"""Looking closely at some steps costs no more than it may, whatever a look and a step take."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.trace.collectors.sampled_steps import FIRST_STEP, LEAST_EVERY, SampledSteps

SHARE, MOST_NS = 0.001, 20_000


def sampled(steps, step_ns, costs_ns):
    """Return the numbers, costs and begins of the steps that are sampled."""
    chooser, now_ns, found = SampledSteps(SHARE, MOST_NS), 0, []
    for step in range(steps):
        is_sampled = chooser.is_sampled(step, now_ns)
        begin_ns = now_ns
        now_ns += step_ns(step)
        if is_sampled:
            cost_ns = costs_ns[len(found) % len(costs_ns)]
            now_ns += cost_ns
            found.append((step, begin_ns, cost_ns))
            chooser.note_cost(step, begin_ns, cost_ns)
    return found


@settings(max_examples=examples(40))
@given(
    st.integers(100_000, 200_000_000),
    st.lists(st.integers(1, 20_000_000), min_size=1, max_size=5),
)
def test_each_sample_is_paid_for_before_the_next(step_ns, costs_ns):
    found = sampled(800, lambda step: step_ns + 1000 * (step % 7), costs_ns)
    assert found[0][0] == FIRST_STEP, "a short run has one, too"
    for (step, begin_ns, cost_ns), (later, later_ns, _) in itertools.pairwise(found):
        assert cost_ns <= SHARE * (later_ns - begin_ns)
        assert cost_ns <= MOST_NS * (later - step + 1)
        assert later - step >= min(LEAST_EVERY, later) - FIRST_STEP


@settings(max_examples=examples(40))
@given(
    st.integers(1_000_000, 100_000_000),
    st.lists(st.integers(1000, 2_000_000), min_size=1, max_size=4),
)
def test_ranks_of_different_cost_sample_the_same_steps_or_some_of_them(step_ns, costs_ns):
    """One sample of a rank may delay all: those of ranks should fall together."""
    steady = [sampled(500, lambda _: step_ns, [cost]) for cost in costs_ns]
    for first in steady:
        for other in steady:
            few, many = sorted([first, other], key=len)
            # Where a rank's interval doubles, its first samples may still lie between.
            common = {step for step, _, _ in few} & {step for step, _, _ in many}
            assert len(common) >= len(few) // 2


def test_steps_that_are_dear_become_rare_and_cheap_ones_frequent_again():
    dear_first = [50_000_000] + [10_000] * 1000
    found = [step for step, _, _ in sampled(10_000, lambda _: 50_000_000, dear_first)]
    assert found[1] >= 2500, "50 ms at most 20 us each"
    gaps = [later - step for step, later in itertools.pairwise(found)]
    assert gaps[-1] == LEAST_EVERY
