"""What the exits of ranks, as their tasks reported them, come to together."""

import pytest

from paceline.core.processes import StopRequested
from paceline.launch.exits import (
    ExitOutcome,
    RankExit,
    exit_of,
    explaining_exits,
    interrupted_exit,
    interruption,
    lost_exit,
)
from paceline.launch.failures import exit_code, first_failure


def test_a_good_run_has_no_exits_to_explain():
    assert explaining_exits([exit_of(0, 0), exit_of(1, 0)], []) == ()


def test_a_killed_rank_that_reported_late_comes_first():
    """Its peer raised because of it, and those whom their launchers stopped explain nothing."""
    raised = exit_of(0, 1, at_s=10.1)
    killed = exit_of(1, -9, at_s=10.0)
    stopped = exit_of(2, -9, stopped=True, at_s=13.0)
    assert stopped.outcome is ExitOutcome.STOPPED
    assert explaining_exits([raised, killed, stopped], []) == (killed, raised)


@pytest.mark.parametrize(("interrupted_s", "code"), [(9.0, 130), (11.0, 5)])
def test_what_came_first_counts(tmp_path, interrupted_s, code):
    stopped = interrupted_exit(0, StopRequested("SIGTERM"), interrupted_s)
    exits = explaining_exits([stopped, exit_of(1, -9, at_s=10.0)], [])
    assert exit_code(exits, first_failure(tmp_path, exits)) == code
    assert (interruption(exits) is not None) == (code == 130)


def test_lost_ranks_follow_those_that_failed():
    failed = exit_of(2, 1, at_s=1.0)
    assert explaining_exits([exit_of(0, 0), failed], [1]) == (failed, lost_exit(1))
    assert explaining_exits([exit_of(2, -15, stopped=True)], [1]) == (lost_exit(1),)


def test_a_rank_that_ends_well_when_asked_to_stop_was_not_stopped():
    assert exit_of(1, 0, stopped=True) == RankExit(rank=1, code=0)


def test_ranks_that_left_before_the_failure_come_last():
    left, late = exit_of(2, 0, at_s=9.0), exit_of(3, 0, at_s=11.0)
    failed = exit_of(0, 1, at_s=10.0)
    assert explaining_exits([late, failed, left], []) == (failed, left)
