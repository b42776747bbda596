"""Advice for any figures: it never promises more than the phase that it comes from."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.breakdown import PHASES, Breakdown
from paceline.report.advice.facts import Facts, Scope, StragglerScope, UnevenEvaluation
from paceline.report.advice.rules import (
    AGAINST_CAUSE,
    AGAINST_HOST_WORK,
    AGAINST_STAGE,
    LEAST_SHARE,
    LEAST_STEPS,
    MOST_ADVICE,
    advise,
)
from paceline.trace.analysis.host import HostTime
from paceline.trace.format.events import LOADER_STAGES

SECONDS = st.floats(0, 1e3, allow_subnormal=False)
STEPS = 500


@st.composite
def breakdowns(draw):
    return Breakdown(**{name: draw(SECONDS) for name in PHASES})


@st.composite
def scopes(draw, *, has_rank):
    first = draw(st.integers(0, STEPS - 1))
    last = draw(st.integers(first, STEPS - 1))
    return Scope(
        steps=last - first + 1,
        words=f"in steps {first} to {last}",
        rank=draw(st.integers(0, 63)) if has_rank else None,
        step=draw(breakdowns()),
        others=draw(breakdowns()) if has_rank else None,
    )


@st.composite
def facts(draw):
    causes = st.sampled_from(["data", *AGAINST_CAUSE])
    stragglers = st.builds(
        StragglerScope, scope=scopes(has_rank=True), cause=causes, late_s=SECONDS
    )
    uneven = st.builds(
        UnevenEvaluation,
        ranks=st.lists(st.integers(0, 63), min_size=1, max_size=3).map(tuple),
        others=st.integers(1, 63),
        waiting_s=SECONDS,
    )
    names = st.sampled_from([*AGAINST_HOST_WORK, "sampling"])
    work = st.builds(HostTime, name=names, measured_s=SECONDS)
    return Facts(
        steps=draw(st.integers(0, STEPS)),
        step=draw(breakdowns()),
        undisturbed=draw(st.none() | scopes(has_rank=False)),
        stragglers=tuple(draw(st.lists(stragglers, max_size=3))),
        uneven_evaluation=draw(st.none() | uneven),
        host_work=tuple(draw(st.lists(work, max_size=3))),
        checkpoints=draw(st.integers(0, STEPS)),
        evaluations=draw(st.integers(0, STEPS)),
        loader_workers=draw(st.none() | st.integers(0, 16)),
        loader_queued=draw(st.floats(0, 1)),
        loader_stages_s=draw(st.dictionaries(st.sampled_from([*AGAINST_STAGE]), SECONDS)),
        ranks=draw(st.integers(1, 64)),
        threads=draw(st.integers(1, 64)),
        cores=draw(st.integers(0, 256)),
        cpu_s=draw(SECONDS),
        no_core_s=draw(SECONDS),
        reduced_bytes=draw(SECONDS),
        reduced_share=draw(st.floats(0, 1)),
        broadcast_share=draw(st.floats(0, 1)),
    )


@given(facts())
def test_advice_saves_no_more_than_its_phase_takes(facts):
    found = advise(facts)
    assert len(found) <= MOST_ADVICE
    assert [advice.share for advice in found] == sorted(
        (advice.share for advice in found), reverse=True
    )
    for advice in found:
        assert 0 <= advice.saving_s <= advice.phase_s * (1 + 1e-9)
        assert LEAST_SHARE <= advice.share <= 1
        assert math.isfinite(advice.phase_s)
        assert advice.phase in (*PHASES, "computing")
        assert advice.action.endswith(".")
        assert advice.evidence.endswith(".")


def _input(input_s, rest_s, **changes):
    step = Breakdown(input=input_s, forward=rest_s)
    scope = Scope(steps=STEPS, words="", rank=None, step=step)
    return Facts(steps=STEPS, step=step, undisturbed=scope, **changes)


def test_two_workers_hide_what_fits_beside_the_rest_of_the_step():
    # A batch takes 18 ms to load; two workers deliver one every 9 ms, and the step needs 12 ms.
    (advice,) = advise(_input(0.018, 0.012, loader_workers=0))
    assert advice.action == "Two loader workers would hide all 18.0 ms of waiting for data."
    assert advice.share == pytest.approx(0.6)
    assert "its loader has no workers" in advice.evidence
    # Workers that lack cores would take them from each other.
    assert advise(_input(0.018, 0.012, loader_workers=2, loader_queued=0.5)) == ()
    # The CPU time of the ranks of the node bounds the step from below.
    (advice,) = advise(_input(0.018, 0.012, loader_workers=0, cores=2, cpu_s=0.036))
    assert advice.saving_s == pytest.approx(0.012)
    assert "would hide 12.0 of 18.0 ms" in advice.action
    assert "more than" not in advice.action


def test_more_workers_than_cores_are_said_to_be_enough_for_storage_only():
    (advice,) = advise(_input(0.018, 0.012, loader_workers=0, ranks=2, cores=2))
    assert advice.action == (
        "Two loader workers would hide all 18.0 ms of waiting for data (2 workers are more than "
        "the 1 core of a rank: enough only if they mostly wait for storage)."
    )
    (advice,) = advise(_input(0.018, 0.012, loader_workers=2, ranks=2, cores=8))
    assert "(5 workers are more than the 4 cores of a rank: enough only" in advice.action
    (advice,) = advise(_input(0.018, 0.012, loader_workers=0, ranks=2, cores=4))
    assert "more than" not in advice.action


def test_busy_workers_are_joined_by_more():
    # Two workers that deliver a batch per 30 ms need 60 ms for one: five deliver one every 12 ms.
    (advice,) = advise(_input(0.018, 0.012, loader_workers=2))
    assert advice.action.startswith("Three more loader workers would hide all 18.0 ms")
    assert "its loader has 2 workers" in advice.evidence


def test_without_knowing_the_loader_no_number_of_workers_is_named():
    (advice,) = advise(_input(0.018, 0.012))
    assert advice.action.startswith("Loading the next batch while the ranks compute would hide")
    assert advice.saving_s == pytest.approx(0.012)


def test_the_longest_stage_of_the_loader_is_to_be_halved():
    # One worker makes a batch in 24 ms, 20 ms of it decoding: half of that is hidden.
    stages_s = {"read": 0.002 * STEPS, "decode": 0.02 * STEPS, "transform": 0.002 * STEPS}
    found = advise(_input(0.012, 0.012, loader_workers=1, loader_stages_s=stages_s))
    (advice,) = (advice for advice in found if advice.rule == "faster_stage")
    assert advice.saving_s == pytest.approx(0.010)
    assert advice.share == pytest.approx(10 / 24)
    assert "would hide 10.0 of 12.0 ms of waiting for data" in advice.action
    assert advice.evidence == (
        "Decode takes 83 % of the loader's time (read 8.3 %, transform 8.3 %)."
    )
    # Two workers make it in half the time; and no more is hidden than the loop waits.
    found = advise(_input(0.012, 0.012, loader_workers=2, loader_stages_s=stages_s))
    assert [advice.saving_s for advice in found if advice.rule == "faster_stage"] == [
        pytest.approx(0.005)
    ]
    found = advise(_input(0.003, 0.021, loader_workers=1, loader_stages_s=stages_s))
    assert [advice.saving_s for advice in found if advice.rule == "faster_stage"] == [
        pytest.approx(0.003)
    ]


@pytest.mark.parametrize("stage", LOADER_STAGES)
def test_each_stage_of_the_loader_has_its_advice(stage):
    found = advise(_input(0.01, 0.01, loader_workers=1, loader_stages_s={stage: 10.0}))
    (advice,) = (advice for advice in found if advice.rule == "faster_stage")
    assert advice.action.startswith(AGAINST_STAGE[stage])
    assert advice.evidence == f"{stage.capitalize()} takes 100 % of the loader's time."


def test_small_savings_and_short_runs_get_no_advice():
    assert advise(_input(0.0002, 0.012)) == ()
    short = _input(0.018, 0.012)
    step = short.step
    assert advise(Facts(steps=LEAST_STEPS - 1, step=step, undisturbed=short.undisturbed)) == ()


@pytest.mark.parametrize("cause", AGAINST_CAUSE)
def test_each_cause_of_a_straggler_has_its_advice(cause):
    own, others = Breakdown(forward=0.03), Breakdown(forward=0.02, waiting=0.01)
    scope = Scope(steps=100, words="in steps 0 to 99", rank=3, step=own, others=others)
    straggler = StragglerScope(scope=scope, cause=cause, late_s=0.02)
    (advice,) = advise(Facts(steps=200, step=others, stragglers=(straggler,)))
    assert advice.rule == f"straggler_{cause}"
    saving_s = 0.005 if cause == "evaluation" else 0.01  # the others then evaluate their part
    assert advice.saving_s == pytest.approx(saving_s)  # the others wait no longer than that
    assert advice.share == pytest.approx(saving_s * 100 / (0.03 * 200))
    assert "20.0 ms late" in advice.evidence


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            Facts(steps=100, step=Breakdown(forward=0.02, waiting=0.01), usual_waiting_s=0.008),
            "Batches that take all ranks equally long",
        ),
        (
            Facts(
                steps=100,
                step=Breakdown(forward=0.02, transfer=0.01),
                reduced_share=1.0,
                reduced_bytes=1 << 20,
            ),
            "would save 5.0 of 10.0 ms of communication per batch",
        ),
        (
            Facts(steps=100, step=Breakdown(forward=0.02, transfer=0.01), broadcast_share=0.4),
            "broadcast_buffers=False)), would save 4.0 of 10.0 ms of communication",
        ),
        (
            Facts(steps=100, step=Breakdown(forward=0.02, checkpoint=0.01), checkpoints=10),
            "10 checkpoints of 100 ms each",
        ),
        (
            Facts(steps=100, step=Breakdown(forward=0.02, evaluation=0.01), evaluations=4),
            "half as often would save 5.0 of 10.0 ms per step. Saves up to 17 % of the loop. The "
            "run evaluated 4 times",
        ),
        (
            Facts(
                steps=100,
                step=Breakdown(forward=0.02, host=0.01),
                host_work=(HostTime(name="logging", measured_s=1.0),),
            ),
            "Logging every tenth time would save 9.0 of 10.0 ms per step",
        ),
        (
            Facts(
                steps=100,
                step=Breakdown(forward=0.02),
                ranks=2,
                threads=2,
                cores=2,
                no_core_s=0.01,
            ),
            "At most 2 threads on 2 cores would save 10.0 of 20.0 ms",
        ),
        (
            Facts(steps=100, step=Breakdown(forward=0.02), ranks=2, cores=2, no_core_s=0.01),
            "Keeping other processes off the cores of the run",
        ),
        (  # how many threads a rank has is not known, and not said
            Facts(steps=100, step=Breakdown(forward=0.02), ranks=4, cores=2, no_core_s=0.01),
            "of computing. Saves up to 50 % of the loop. 4 ranks run on 2 cores;",
        ),
    ],
)
def test_each_rule_names_the_figure_that_it_rests_on(facts, words):
    (advice,) = advise(facts)
    assert words in advice.sentence


def test_a_program_that_trains_nothing_is_told_nothing_of_gradients_and_buffers():
    """An MPI program was advised to accumulate gradients."""
    step = Breakdown(other=0.02, transfer=0.01)
    for share in ({"reduced_share": 1.0}, {"broadcast_share": 0.4}):
        assert not advise(Facts(steps=100, step=step, **share))
