"""The words of `paceline why` and of the line that ends a run."""

import doctest
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import paceline.report.advice.rules
import paceline.report.columns
import paceline.report.delays
import paceline.report.page.chart
import paceline.report.page.svg
import paceline.report.units
import paceline.report.words
import paceline.trace.analysis.communication
from paceline.core.breakdown import Breakdown
from paceline.report.delays import cut_words, shift_words
from paceline.report.words import (
    STEP_RULES,
    disk_words,
    nan_words,
    summary_line,
    sync_place,
    verdict,
)
from paceline.runs.result import Failure, MemoryUse, PhaseTime, RankResult, RunResult
from paceline.trace.analysis.blame import Straggler
from paceline.trace.analysis.nans import NanValue
from paceline.trace.analysis.shifts import Shift
from paceline.trace.merge.steps import StepRule

LATE = Straggler(
    rank=1, cause="data", late_ms=18.2, first_step=200, last_step=400, others_wait=0.243
)
TOTAL = Breakdown(input=1, forward=3, backward=5, transfer=1)


def _verdict(stragglers=(), **changes):
    given = {"world_size": 8, "steps": 700, "total": TOTAL, **changes}
    return verdict(stragglers, **given)


def test_the_late_rank_is_named_with_numbers_and_cause():
    assert _verdict((LATE,)) == (
        "Rank 1 arrives 18 ms late at every all-reduce between steps 200 and 400, because of data "
        "loading; the others wait 24 % of each of these steps."
    )


def test_of_two_ranks_the_other_one_is_named():
    assert _verdict((LATE,), world_size=2).endswith("rank 0 waits 24 % of each of these steps.")


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("compute", "because it computes longer"),
        (
            "slow_core",
            "because its core is slower: its optimizer, with the same work",
        ),
        ("not_running", "because its threads waited for a core (another process took it)"),
        ("blocked", "because its main thread sleeps outside the data loader (a lock, a sleep"),
        ("stopped", "because its process is stopped (SIGSTOP, a debugger, or a frozen container)"),
        ("checkpoint", "because it writes checkpoints"),
        ("evaluation", "because it evaluates"),
        ("compilation", "because torch.compile makes code"),
        ("gc", "because of Python's garbage collection"),
    ],
)
def test_each_cause_has_its_words(cause, words):
    late = Straggler(rank=3, cause=cause, late_ms=5, first_step=1, last_step=9, others_wait=0.1)
    assert words in _verdict((late,))


def _late(shape, **changes):
    given = {"rank": 1, "cause": "gc", "late_ms": 21.3, "first_step": 19, "last_step": 299}
    return Straggler(**{**given, "others_wait": 0.2, "shape": shape, **changes})


def test_each_shape_has_its_words():
    assert _verdict((_late("periodic", period_steps=20, late_share=0.05),)) == (
        "Rank 1 arrives 21 ms late in every 20th step between steps 19 and 299, because of "
        "Python's garbage collection; the others wait 20 % of each of these steps."
    )
    assert "21 ms late now and then, in 23 % of the steps between steps 19 and 299" in _verdict(
        (_late("intermittent", late_share=0.234),)
    )
    drift = _verdict((_late("drifting", slope_ms_per_step=0.052),))
    assert "Rank 1 arrives later and later, by 0.052 ms more in each step between" in drift
    assert "(21 ms late in the median)" in drift
    assert "late, but 0.052 ms less so in each step" in _verdict(
        (_late("drifting", slope_ms_per_step=-0.052),)
    )


def test_a_loss_of_all_ranks_that_is_larger_than_the_late_rank_comes_first():
    data = Breakdown(input=7.0, forward=2.0, waiting=1.0)
    text = _verdict((LATE,), total=data)
    assert text.startswith("The largest loss is waiting for data: 70 % of the loop. Rank ")
    waits = Breakdown(input=2.0, forward=5.0, waiting=3.0)
    assert _verdict((LATE,), total=waits).startswith("Rank ")
    little = Breakdown(input=1.9, forward=8.0, waiting=0.1)
    assert _verdict((LATE,), total=little).startswith("Rank ")


def test_rare_delays_are_told_with_their_steps():
    once = _late("rare", late_ms=3000.0, first_step=61, last_step=61, cause="evaluation")
    assert _verdict((once,)) == (
        "Rank 1 arrives 3.00 s late in step 61, because it evaluates; the others wait 20 % of this "
        "step."
    )
    thrice = _late("rare", late_ms=1000.0, first_step=21, last_step=101, late_share=3 / 81)
    assert "1.00 s late in 3 of steps 21 to 101, because" in _verdict((thrice,))
    assert "Also late: rank 1 by 3.00 s in step 61, because" in _verdict((thrice, once))
    assert "rank 1 was late in step 61" in summary_line(_result(straggler=once), Path("runs/one"))


def test_a_line_between_phases_takes_the_place_of_the_general_words():
    slow = _late("persistent", cause="compute", place="train.py:12")
    assert "takes longer at train.py:12, between the phases of its step;" in _verdict((slow,))
    asleep = _late("persistent", cause="blocked", place="near train.py:12")
    assert "sleeps near train.py:12 (a lock, a sleep, or I/O);" in _verdict((asleep,))


def test_blocks_are_said_with_their_rhythm_or_without():
    blocks = {"late_share": 0.5, "block_steps": 25}
    rhythm = _late("recurring", period_steps=50, **blocks)
    assert _verdict((rhythm,)).startswith(
        "Rank 1 arrives 21 ms late in about 25 of each 50 steps between steps 19 and 299, because "
    )
    assert "late in blocks of about 25 steps between" in _verdict((_late("recurring", **blocks),))
    summary = summary_line(_result(straggler=rhythm), Path("runs/one"))
    assert "rank 1 was late in about 25 of each 50 steps, in steps 19 to 299" in summary


def test_a_confidence_is_said_where_it_is_low():
    assert _verdict((_late("intermittent", confidence=0.97),)).endswith("(confidence 97 %).")
    assert "confidence" not in _verdict((_late("intermittent", confidence=0.9999),))
    assert "confidence" not in _verdict((LATE,))  # results of before do not say


def test_the_summary_says_in_which_steps_by_shape():
    def summary(late):
        return summary_line(_result(straggler=late), Path("runs/one"))

    assert "rank 1 was late in every 20th step of 19 to 299" in summary(
        _late("periodic", period_steps=20)
    )
    assert "rank 1 was late now and then in steps 19 to 299" in summary(_late("intermittent"))
    assert "late more and more in steps 19" in summary(_late("drifting", slope_ms_per_step=1.0))
    assert "late less and less in steps 19" in summary(_late("drifting", slope_ms_per_step=-1.0))


def _shift(step, factor, before_ms=10.0):
    return Shift(step=step, factor=factor, before_ms=before_ms, after_ms=factor * before_ms)


def test_a_change_of_all_ranks_is_said():
    assert shift_words(()) == ""
    assert shift_words((_shift(300, 12.0),)) == (
        "All ranks became 12x slower at step 300 (10.0 ms to 120 ms per step)."
    )
    assert shift_words((_shift(200, 1.6), _shift(260, 0.625, 16.0))) == (
        "All ranks became 1.6x slower at step 200 and 1.6x faster at step 260."
    )
    many = shift_words((_shift(20, 2.0), _shift(50, 4.0, 20.0), _shift(90, 1.5, 80.0)))
    assert many == (
        "The step time of all ranks changed 3 times, from 10.0 ms to 120 ms, most of all at step "
        "50 (4.0x slower)."
    )


def _rank(number, *, complete=True, recorded=40, **status):
    status = SimpleNamespace(**{"dropped_count": 0, "error": 0, "step": 40, **status})
    steps = {"step": np.arange(recorded)}
    return SimpleNamespace(
        rank=number,
        complete=complete,
        status=status,
        marks_within_steps=0,
        events_of=lambda _kind: steps,
    )


def test_what_a_trace_lacks_is_said():
    assert cut_words([_rank(0), _rank(1)], 40, failed=False) == ""
    full = cut_words([_rank(0), _rank(1, error=28, dropped_count=1234)], 40, failed=False)
    assert full == (
        "The trace is incomplete: rank 1 could not write all of it (No space left on device), "
        "1,234 events are lost. What follows covers steps 0 to 39."
    )
    fast = cut_words([_rank(0, dropped_count=7)], 40, failed=False)
    assert "rank 0 lost 7 events, which came too fast." in fast
    killed = [_rank(number, complete=False) for number in range(4)]
    text = cut_words(killed, 0, failed=False)
    assert "rank 0 has not closed its file (it still runs, or was killed); rank 1" in text
    assert text.endswith("and 2 other ranks likewise. What follows covers no step.")


def test_a_trace_that_a_failure_truncated_is_said_with_the_steps_that_it_costs():
    assert cut_words([_rank(0), _rank(1)], 40, failed=True) == ""
    killed = _rank(1, complete=False, recorded=25)
    assert cut_words([_rank(0), killed], 25, failed=True) == (
        "The trace is incomplete: that of rank 1 is truncated (its last 15 steps may be missing). "
        "What follows covers steps 0 to 24, which all ranks recorded."
    )
    one = cut_words([_rank(0, complete=False, recorded=39)], 39, failed=True)
    assert "(its last step may be missing)" in one
    none = cut_words([_rank(0, complete=False)], 40, failed=True)
    assert "(what it did last may be missing). What follows covers steps 0 to 39." in none
    nothing = cut_words([_rank(0, complete=False, recorded=0)], 0, failed=True)
    assert nothing.endswith("(its last 40 steps may be missing). What follows covers no step.")


def test_further_stragglers_share_a_sentence():
    second = Straggler(
        rank=5, cause="compute", late_ms=7, first_step=10, last_step=50, others_wait=0.1
    )
    one_more = _verdict((LATE, second))
    assert one_more.endswith(
        "Also late: rank 5 by 7.0 ms in steps 10 to 50, because it computes longer."
    )
    two_more = _verdict((LATE, second, LATE))
    assert "2 other ranks were late too, most of all rank 5" in two_more


def test_when_nobody_is_late_the_largest_shares_are_named():
    assert _verdict() == (
        "No rank was late in 700 steps: the largest part of a step is the backward pass (50 %), "
        "followed by the forward pass (30 %)."
    )
    assert _verdict(world_size=1).startswith(
        "One rank took 700 steps: the largest part of a step is"
    )


def test_compiling_is_kept_apart_from_what_each_step_takes():
    text = _verdict(total=Breakdown(compilation=6, forward=3, backward=1))
    assert text == (
        "No rank was late in 700 steps: compiling the model took 60 % of the loop, and of the rest "
        "the largest part is the forward pass (75 %), followed by the backward pass (25 %)."
    )
    assert "compiling" not in _verdict(total=Breakdown(compilation=1, forward=60, backward=39))


def test_waiting_for_nobody_in_particular_is_said():
    text = _verdict(total=Breakdown(backward=6, waiting=4))
    assert "ranks wait for each other 40 % of the time, not always for the same rank" in text
    text = _verdict(total=Breakdown(backward=6, waiting=4), most_late_rank=3)
    assert "40 % of the time, mostly for rank 3, but in no regular pattern" in text


def test_ranks_without_a_trace_are_not_called_punctual():
    assert _verdict(missing=(3, 4)).startswith(
        "2 ranks left no trace (first: 3), so only the other ranks are described. What is called "
        "communication may include waiting for them. No rank was late"
    )
    assert "may include waiting for rank 3." in _verdict(missing=(3,))
    assert "may include" not in _verdict(missing=(3,), total=Breakdown(forward=1))
    assert "One rank took 700 steps" in _verdict(world_size=2, missing=(1,))


def test_ranks_without_a_common_collective_are_named_so():
    text = _verdict(world_size=2, place="")
    assert text.startswith(
        "The ranks took part in no common collective: each trained a model of its own"
    )
    assert "DistributedDataParallel" in text
    assert text.endswith(
        "In 700 steps the largest part of a step is the backward pass (50 %), followed by "
        "the forward pass (30 %)."
    )
    assert _verdict(world_size=1, place="").startswith("One rank took 700 steps")


def test_a_run_without_steps_says_why_nothing_can_be_said():
    assert "paceline.step()" in _verdict(steps=0)
    ended = _verdict(steps=0, was_ended=True)
    assert ended.startswith("The run was ended before a step was recorded")
    assert "calls no optimizer" not in ended
    killed = Failure(rank=1, signal="SIGKILL", step=11)
    assert "before its steps were written" in _verdict(steps=0, failure=killed)
    assert "paceline.step()" in _verdict(steps=0, failure=Failure(rank=1, error="x"))


def test_a_failure_comes_first():
    killed = Failure(rank=1, signal="SIGKILL", step=17, phase="backward")
    text = _verdict((LATE,), failure=killed)
    assert text.startswith(
        "Rank 1 was killed by SIGKILL in step 17, during the backward pass. Rank 1 arrives"
    )
    raised = Failure(rank=0, step=3, phase="forward", error="ValueError: bad\x1b[2J shape.")
    assert _verdict(failure=raised).startswith(
        "Rank 0 failed in step 3, during the forward pass: ValueError: bad\\x1b[2J shape. No rank"
    )
    unknown = Failure(rank=0, step=3, phase="waiting")
    text = _verdict(failure=unknown)
    assert text.startswith("Rank 0 failed in step 3, during waiting for other ranks.")


def test_the_place_of_lateness_depends_on_what_meets():
    assert sync_place(frozenset({"all_reduce"}), 1.0) == "at every all-reduce"
    assert sync_place(frozenset({"all_reduce"}), 4.0) == "in every step"
    assert sync_place(frozenset({"all_gather", "reduce_scatter"}), 1.0) == "in every step"
    assert "late in every step between" in _verdict((LATE,), place="in every step")


def _result(**changes):
    phases = tuple(
        PhaseTime(name=name, measured_s=seconds)
        for name, seconds in Breakdown(forward=3, waiting=1).items()
    )
    ranks = tuple(
        RankResult(rank=rank, steps=40, loop_wall_s=4.0, peak_memory_bytes=1, phases=phases)
        for rank in (0, 1)
    )
    given = {
        "exit_code": 0,
        "world_size": 2,
        "step_time_s": 0.0124,
        "loop_wall_s": 4.0,
        "ranks": ranks,
    }
    return RunResult(**{**given, **changes})


def test_the_summary_is_one_line():
    assert summary_line(_result(), Path("runs/one")) == (
        "2 ranks, 40 steps, median 12.4 ms, 25 % of the time waiting; folder: runs/one"
    )
    late = summary_line(_result(straggler=LATE), Path("runs/one"))
    assert "rank 1 was late in steps 200 to 400" in late
    nothing = summary_line(_result(ranks=(), step_time_s=0.0), Path("runs/one"))
    assert nothing == "2 ranks, no step recorded; folder: runs/one"
    failure = Failure(rank=1, error="first\nRuntimeError: boom")
    failed = summary_line(_result(failure=failure), Path("runs/one"))
    assert failed.startswith("Rank 1 failed before the end of its first step: RuntimeError")
    assert "\n" not in failed


def test_a_disk_slower_than_planned_is_said():
    ranks = tuple(
        RankResult(
            rank=rank,
            steps=40,
            loop_wall_s=4.0,
            peak_memory_bytes=1,
            phases=(),
            memory=MemoryUse(budget_bytes=1 << 30, corrected=rank),
        )
        for rank in (0, 1)
    )
    words = "The disk for spilled tensors was slower than planned on rank 1: planned again"
    assert words in summary_line(_result(ranks=ranks), Path("runs/one"))
    assert disk_words(_result()) == disk_words(None) == ""


@pytest.mark.parametrize(
    "module",
    [
        paceline.report.advice.rules,
        paceline.report.columns,
        paceline.report.delays,
        paceline.report.page.chart,
        paceline.report.page.svg,
        paceline.report.units,
        paceline.report.words,
        paceline.trace.analysis.communication,
    ],
    ids=lambda module: module.__name__,
)
def test_examples_hold(module):
    assert doctest.testmod(module).failed == 0


def test_every_rule_of_steps_is_stated():
    assert set(STEP_RULES) == set(StepRule)
    assert all(STEP_RULES[rule] for rule in StepRule if rule is not StepRule.NONE)


def test_a_value_that_is_no_number_is_stated_with_step_and_rank():
    assert nan_words(None) == ""
    words = nan_words(NanValue(rank=1, step=812))
    assert "was NaN in step 812 on rank 1." in words
    assert words.endswith("it is of step 811.")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "left with exit code 0 while rank 0 still needed it",
            "Rank 1 left with exit code 0 while rank 0 still needed it, in step 7, during the "
            "forward pass.",
        ),
        (
            "left without an exception while rank 0 still needed it",
            "Rank 1 left without an exception while rank 0 still needed it, in step 7, during the "
            "forward pass.",
        ),
        (
            "hung: rank 0 waited for it until the timeout",
            "Rank 1 hung in step 7, during the forward pass: rank 0 waited for it until the "
            "timeout.",
        ),
    ],
)
def test_how_a_rank_failed_others_is_a_sentence(error, words):
    failure = Failure(rank=1, step=7, phase="forward", error=error)
    assert paceline.report.words.failure_words(failure) == words
