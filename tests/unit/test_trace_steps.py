"""What ends a step of a training loop: sequences of marks whose steps are known."""

import numpy as np
import pytest
from support.traces import MS, Event, set_dropped_count, write_run

from paceline.launch.run import summarize
from paceline.runs.result import Failure
from paceline.trace.analysis import analyse
from paceline.trace.analysis.phases import step_time_s
from paceline.trace.format.events import (
    BY_BACKWARD,
    BY_BATCH,
    BY_OPTIMIZER,
    BY_SCRIPT,
    NEXT,
    RUNNING,
    Kind,
)
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run
from paceline.trace.merge.steps import StepRule, round_ends


def steps_of(turns, *, batches=False):
    """Return turns of optimizers, a letter each, with a bar after each step of the loop."""
    numbers = np.array([ord(turn) for turn in turns])
    ends = round_ends(numbers, np.full(len(numbers), batches))
    return "".join(turn + "|" * bool(end) for turn, end in zip(turns, ends, strict=True))


@pytest.mark.parametrize(
    ("turns", "steps"),
    [
        ("AAAA", "A|A|A|A|"),
        ("DGDGDG", "DG|DG|DG|"),
        ("CATCATCAT", "CAT|CAT|CAT|"),
        ("DDDGDDDG", "DDDG|DDDG|"),
        ("GDDDGDDD", "GDDD|GDDD|"),
        ("DGDDGDG", "DG|DDG|DG|"),  # a step of G that a gradient scaler left out
        ("DG", "DG|"),
        ("DGDGD", "DG|DG|D|"),
        ("AAAABBB", "A|A|A|A|B|B|B|"),  # one model after the other
        ("AAAADGDGDG", "A|A|A|A|DG|DG|DG|"),  # first alone, then in turn
        (100 * "G" + 40 * "GD", 100 * "G|" + 40 * "GD|"),  # G learns alone before that
        (20 * "A" + "B" + 20 * "A" + "B", 19 * "A|" + "AB|" + 19 * "A|" + "AB|"),
    ],
)
def test_a_round_of_optimizers_is_a_step(turns, steps):
    assert steps_of(turns) == steps


def test_critics_with_a_batch_each_are_steps_of_their_own():
    assert steps_of("DDDGDDDG", batches=True) == "D|D|DG|D|D|DG|"
    assert steps_of("DGDG", batches=True) == "DG|DG|"


class Marked:
    """Builds the events of a rank: phases of 1 ms, and marks."""

    def __init__(self):
        self.events = []
        self.at = self.begun = 0
        self.step = 0

    def phase(self, kind, name="", **fields):
        self.events.append(Event(kind, self.at, self.at + MS, name, self.step, **fields))
        self.at += MS
        return self

    def mark(self, name=BY_OPTIMIZER, tag=0, running_ns=10):
        counter = Event(Kind.COUNTER, self.begun, self.at, RUNNING, self.step, running_ns)
        self.events += [Event(Kind.STEP, self.begun, self.at, name, self.step, tag=tag), counter]
        self.begun, self.step = self.at, self.step + 1
        return self


def load(tmp_path, *by_rank):
    return load_run(write_run(tmp_path, [marked.events for marked in by_rank]))


def gan(count):
    marked = Marked()
    for _ in range(count):
        marked.phase(Kind.FORWARD).mark(tag=1).phase(Kind.FORWARD).phase(Kind.BACKWARD).mark(tag=2)
    return marked


def test_joined_marks_make_one_step_with_their_counters(tmp_path):
    trace = load(tmp_path, gan(5))
    (rank,) = trace.ranks
    assert trace.step_rule == StepRule.OPTIMIZERS
    steps = rank.events_of(Kind.STEP)
    assert steps["step"].tolist() == [0, 1, 2, 3, 4]
    assert (steps["end_ns"] - steps["begin_ns"]).tolist() == [3 * MS] * 5
    assert rank.events_of(Kind.BACKWARD)["step"].tolist() == [0, 1, 2, 3, 4]
    (phases,) = analyse(trace).phases
    assert phases.step_s.tolist() == pytest.approx([0.003] * 5)
    assert phases.running_s.tolist() == pytest.approx([0] + [20e-9] * 4)
    assert phases.breakdown().forward == pytest.approx(0.010)
    assert rank.marks_within_steps == 5


def test_ranks_count_alike_when_one_of_them_loads_the_batches_for_all(tmp_path):
    """The critic takes two steps, each on a batch of its own that rank 0 sends to rank 1."""

    def critics(rank, count=4):
        marked = Marked()
        for turn in "DDG" * count:
            if rank == 0 and turn == "D":
                marked.phase(Kind.INPUT, NEXT)
            marked.phase(Kind.FORWARD).mark(tag=ord(turn))
        return marked

    trace = load(tmp_path, critics(0), critics(1), critics(1, count=3))
    steps = [len(rank.events_of(Kind.STEP)) for rank in trace.ranks]
    assert steps == [8, 8, 6]


def test_a_failure_is_in_a_step_of_the_loop(tmp_path):
    """The header of a trace counts marks: the eighth mark is in the fourth round."""
    run = write_run(tmp_path, [gan(4).events])
    result = summarize(run, 1, 1, Failure(rank=0, error="x", step=8))
    assert result.failure is not None
    assert result.failure.step == 4
    assert result.step_rule == StepRule.OPTIMIZERS


def test_ordinary_steps_stay_as_they_were_recorded(tmp_path):
    marked = Marked()
    for _ in range(4):
        marked.phase(Kind.FORWARD).mark()
    trace = load(tmp_path, marked)
    assert trace.step_rule == StepRule.OPTIMIZER
    assert trace.ranks[0].events_of(Kind.STEP)["step"].tolist() == [0, 1, 2, 3]
    assert trace.ranks[0].marks_within_steps == 0


def test_a_step_that_lost_a_mark_has_no_duration(tmp_path):
    marked = gan(6)
    marked.events = [e for e in marked.events if e.kind != Kind.STEP or e.step not in (4, 5)]
    run = write_run(tmp_path, [marked.events])
    set_dropped_count(run / "trace" / trace_name(0), 2)
    (phases,) = analyse(load_run(run)).phases
    assert not phases.recorded.all()
    assert phases.loop_wall_s == pytest.approx(0.018)
    assert step_time_s((phases,)) == pytest.approx(0.003)


def test_the_scripts_own_marks_override_all_others(tmp_path):
    """The first optimizer's step comes before the first call of paceline.step()."""
    marked = Marked()
    marked.phase(Kind.FORWARD).mark().phase(Kind.BACKWARD).mark().phase(Kind.OPTIMIZER)
    marked.mark(BY_SCRIPT)
    for _ in range(3):
        marked.phase(Kind.FORWARD).phase(Kind.BACKWARD).mark(BY_SCRIPT)
    trace = load(tmp_path, marked)
    assert trace.step_rule == StepRule.SCRIPT
    (phases,) = analyse(trace).phases
    assert phases.step_s.tolist() == pytest.approx([0.003, 0.002, 0.002, 0.002])


def test_batches_before_the_first_optimizer_step_are_part_of_it(tmp_path):
    marked = Marked()
    marked.phase(Kind.FORWARD).mark(BY_BATCH, 1).phase(Kind.FORWARD).mark(BY_BACKWARD)
    marked.phase(Kind.FORWARD).mark().phase(Kind.FORWARD).mark()
    trace = load(tmp_path, marked)
    assert trace.step_rule == StepRule.OPTIMIZER
    (phases,) = analyse(trace).phases
    assert phases.step_s.tolist() == pytest.approx([0.003, 0.001])


def batch_loop(count, *, loaders=(1,), ahead=False, asks_at_end=True):
    """Return a loop without an optimizer; `ahead`: each batch is asked for before it is needed."""
    marked = Marked()
    if ahead:
        marked.phase(Kind.INPUT, NEXT)
    for i in range(count):
        for j, loader in enumerate(loaders):
            if i or j or ahead:
                marked.mark(BY_BATCH, loaders[j - 1])
            marked.phase(Kind.INPUT, NEXT, tag=loader)
        marked.phase(Kind.FORWARD).phase(Kind.BACKWARD)
    if asks_at_end and not ahead:
        marked.mark(BY_BATCH, loaders[-1]).phase(Kind.INPUT, NEXT, tag=loaders[0])
    return marked


@pytest.mark.parametrize("asks_at_end", [True, False])
@pytest.mark.parametrize("loaders", [(1,), (1, 2)])
def test_without_an_optimizer_a_batch_is_a_step(tmp_path, loaders, asks_at_end):
    marked = batch_loop(6, loaders=loaders, asks_at_end=asks_at_end)
    trace = load(tmp_path, marked)
    assert trace.step_rule == StepRule.LOADER
    (phases,) = analyse(trace).phases
    assert phases.steps == 6
    assert phases.breakdown().backward == pytest.approx(0.006)


def test_batches_that_are_fetched_ahead_count_once(tmp_path):
    (phases,) = analyse(load(tmp_path, batch_loop(6, ahead=True))).phases
    assert phases.steps == 6


def test_without_optimizer_and_loader_a_backward_pass_is_a_step(tmp_path):
    marked = Marked()
    for i in range(5):
        if i:
            marked.mark(BY_BACKWARD)
        marked.phase(Kind.FORWARD).phase(Kind.BACKWARD)
    trace = load(tmp_path, marked)
    assert trace.step_rule == StepRule.BACKWARD
    assert analyse(trace).phases[0].step_s.tolist() == pytest.approx([0.002] * 5)
