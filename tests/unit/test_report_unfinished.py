"""The sentence about a step that did not end."""

import pytest
from support.traces import MS, Event, write_run

from paceline.launch.summary import summarize
from paceline.report.model import gather
from paceline.report.unfinished import unfinished_words
from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run

S = 1000 * MS
STEPS = [Event(Kind.STEP, i * 10 * MS, (i + 1) * 10 * MS, "optimizer", i) for i in range(5)]
LAST_NS = 50 * MS


def said(folder, *by_rank):
    run = write_run(folder, [[*STEPS, *events] for events in by_rank])
    return unfinished_words(load_run(run).ranks, 0.010)


def sample(name, at_ns):
    return Event(Kind.SAMPLE, at_ns, at_ns, name, 5)


def waits(name="all_reduce", until_ns=7 * S):
    return Event(Kind.COLLECTIVE, LAST_NS + MS, until_ns, name, 5)


def test_a_hang_names_who_waits_and_where_the_others_are(tmp_path):
    culprit = [sample("train.py:40", at * S) for at in (1, 2, 3, 4, 7)] + [sample("other", 5 * S)]
    drain = Event(Kind.WAIT, LAST_NS + MS, 7 * S, "drain", 5)
    assert said(tmp_path, [waits(), drain], culprit, [waits()]) == (
        "The run ended 6.95 s after its last step: ranks 0, 2 waited in all_reduce, which rank 1 "
        "had not entered; rank 1 was in train.py:40."
    )


def test_a_rank_that_left_no_event_is_not_said_to_do_anything(tmp_path):
    assert "nothing was recorded of what rank 1 did" in said(tmp_path, [waits()], [])


def test_ranks_that_wait_for_nobody_here(tmp_path):
    assert said(tmp_path, [waits()], [waits("barrier")]).endswith(
        "ranks 0, 1 waited in all_reduce and barrier, and so did every rank."
    )


@pytest.mark.parametrize(("exit_code", "hung"), [(0, False), (130, True)])
def test_only_a_run_that_did_not_come_to_its_end_hung(tmp_path, exit_code, hung):
    """In a finished one the other ranks may have waited while rank 1 evaluated at the end."""
    evaluated = [sample("train.py:50", at * S) for at in (1, 2, 3)]
    run = write_run(tmp_path, [[*STEPS, *events] for events in ([waits()], evaluated)])
    result = summarize(run, 2, exit_code, None)
    (run / "result.json").write_text(result.to_text())
    assert ("after its last step" in gather(run).verdict) == hung


@pytest.mark.parametrize("until_ns", [LAST_NS + 100 * MS, LAST_NS + 900 * MS])
def test_a_run_that_ends_soon_after_a_step_needs_no_sentence(tmp_path, until_ns):
    assert said(tmp_path, [waits(until_ns=until_ns)], []) == ""
