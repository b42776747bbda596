"""A replayed pipeline as text: what runs when can be read, whatever the scale."""

import pytest
from support.pipeline_cases import chain

from paceline.report.timeline import MAX_RANKS, timeline
from paceline.schedules.pipeline import (
    PipelineSchedule,
    StageCosts,
    interleaved,
    one_forward_one_backward,
    replay,
    zero_bubble,
)


def drawn(schedule, forward_s=1.0, backward_s=2.0, **options):
    costs = StageCosts.uniform(schedule.stages, forward_s, backward_s)
    return timeline(schedule, replay(schedule, chain(schedule.stages), costs), **options)


def test_each_action_is_drawn_where_it_runs():
    assert drawn(one_forward_one_backward(2, 3)) == (
        "rank 0  F0 F1 ......B0--- F2 B1--- ...B2---   25 % idle\n"
        "rank 1  ...F0 B0--- F1 B1--- F2 B2--- ......  25 % idle\n"
        "1f1b: 12.0 s, ranks idle for 25 % of it\n"
    )


def test_the_parts_of_a_backward_have_letters_of_their_own():
    assert drawn(zero_bubble(2, 2)).splitlines()[:2] == [
        "rank 0  F0 F1 ...I0 W0 I1 W1   14 % idle",
        "rank 1  ...F0 I0 F1 I1 W0 W1   14 % idle",
    ]


def test_a_rank_with_several_stages_names_them():
    first, _, last = drawn(interleaved(2, 2, 2)).splitlines()
    assert first.startswith("rank 0  F0.0 F0.1 F2.0 F2.1 ")
    assert last.startswith("interleaved: ")
    short, *_ = drawn(interleaved(2, 2, 2), width=48).splitlines()
    assert short.startswith("rank 0  F0-F0-F2-F2-......B2.0- ")


def test_equal_actions_are_equally_long_at_any_width():
    for width in range(8, 120):
        rows = drawn(one_forward_one_backward(3, 5), width=width).splitlines()[:3]
        bars = [row[8:].rpartition("  ")[0] for row in rows]
        assert len(set(map(len, bars))) == 1
        assert len(bars[0]) <= width
        if width >= 21:  # time units of the batch: a column each
            assert bars[0].count("F") == bars[0].count("B") == 5


def test_many_ranks_are_not_all_drawn():
    lines = drawn(one_forward_one_backward(40, 2)).splitlines()
    assert len(lines) == MAX_RANKS + 2
    assert lines[-2] == "... and 8 more ranks"


@pytest.mark.parametrize("forward_s", [0.0, 1e-12])
def test_actions_that_take_no_time_are_no_bars(forward_s):
    text = drawn(one_forward_one_backward(2, 2), forward_s, forward_s)
    assert text.startswith("rank 0  ")
    assert (" 0 s" in text) == (forward_s == 0.0)


def test_a_rank_without_actions_is_idle():
    schedule = PipelineSchedule(
        name="test",
        stages=1,
        microbatches=1,
        rank_of=(0,),
        actions=(*one_forward_one_backward(1, 1).actions, ()),
    )
    assert drawn(schedule).splitlines()[1] == "rank 1  .........  100 % idle"
