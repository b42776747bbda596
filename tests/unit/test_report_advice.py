"""What a run's traces lead to advise, and when nothing is advised."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from support.traces import MS, Event, Late, data_parallel, write_run

from paceline.cli.why import why
from paceline.report.model import gather
from paceline.report.terminal import render_why
from paceline.runs.result import Failure, RunResult
from paceline.trace.format.events import (
    BUFFER_BYTES,
    EVALUATION_MODE,
    WITHOUT_GRADIENTS,
    Kind,
)
from paceline.trace.format.files import trace_name

EPOCHS = (11, 37, 53, 71)  # the steps at whose begin rank 0 evaluates
EVALUATION_MS = 180


def _evaluating(ranks, steps=80):
    """Return the events of training in which rank 0 evaluates alone and the others wait for it."""
    late = tuple(Late(0, EVALUATION_MS, step, step) for step in EPOCHS)
    by_rank = data_parallel(ranks, steps, late=late)
    by_rank[0] = [part for event in by_rank[0] for part in _evaluation(event)]
    return by_rank


def _evaluation(event, passes=4):
    """Replace the long wait for data of a late step by an evaluation of some of four batches."""
    if event.kind != Kind.INPUT or event.end_ns - event.begin_ns < EVALUATION_MS * MS:
        return [event]
    flags = WITHOUT_GRADIENTS | EVALUATION_MODE
    each_ns = EVALUATION_MS * MS // 4
    events = []
    for at in range(event.begin_ns, event.begin_ns + passes * each_ns, each_ns):
        events += [
            Event(Kind.INPUT, at, at + MS, "evaluation loader", event.step, tag=2),
            Event(Kind.EVALUATION, at + MS, at + each_ns, "forward", event.step, flags=flags),
        ]
    return [*events, dataclasses.replace(event, begin_ns=event.begin_ns + passes * each_ns)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_an_evaluation_on_one_rank_alone_is_to_be_shared(tmp_path, ranks):
    report = gather(write_run(tmp_path, _evaluating(ranks)))
    rules = [advice.rule for advice in report.advice]
    assert "even_batches" not in rules
    assert not any(rule.startswith("straggler") for rule in rules)
    shared = next(advice for advice in report.advice if advice.rule == "share_evaluation")
    waited_s, loop_s = 4 * EVALUATION_MS / 1e3, report.total.total_s
    others = "the other rank waits" if ranks == 2 else "the other 3 ranks wait"
    assert shared.evidence == (
        f"Rank 0 evaluates while {others} 720 ms ({waited_s / loop_s:.0%} of the loop)."
    ).replace("%", " %")
    assert shared.share == pytest.approx(waited_s * (1 - 1 / ranks) / loop_s, rel=0.02)
    assert sum(advice.share for advice in report.advice if "evaluation" in advice.rule) <= (
        waited_s / loop_s
    )


def test_ranks_that_evaluate_at_different_times_share_each_evaluation(tmp_path):
    late = tuple(Late(i % 2, EVALUATION_MS, step, step) for i, step in enumerate(EPOCHS))
    by_rank = [
        [part for event in events for part in _evaluation(event)]
        for events in data_parallel(2, 80, late=late)
    ]
    report = gather(write_run(tmp_path, by_rank))
    assert "in 2 of steps 11 to 53, because it evaluates" in report.verdict
    advised = {advice.rule: advice for advice in report.advice}
    assert not {"even_batches", "share_evaluation"} & set(advised)
    waited_s = 2 * EVALUATION_MS / 1e3
    saved = advised["straggler_evaluation"].share * report.total.total_s
    assert saved == pytest.approx(waited_s / 2, rel=0.05)


def test_data_that_all_ranks_wait_for_is_advised_on_beside_a_rank_that_is_late(tmp_path):
    all_ranks = tuple(Late(rank, 30, 0, 79) for rank in (0, 1))
    facts = data_parallel(2, 80, late=(*all_ranks, Late(1, 8, 0, 79, cause="compute")))
    report = gather(write_run(tmp_path, facts))
    assert [late.cause for late in report.stragglers] == ["compute"]
    assert report.verdict.startswith("The largest loss is waiting for data: ")
    (advice,) = (advice for advice in report.advice if advice.rule == "loader_workers")
    assert advice.share > 0.3
    assert "in the other steps" not in advice.action


def test_batches_of_like_length_are_for_ranks_that_wait_in_most_steps(tmp_path):
    def report(late):
        return gather(write_run(tmp_path / str(len(late)), data_parallel(4, 80, late=late)))

    def rules(report):
        return [advice.rule for advice in report.advice]

    random = np.random.default_rng(1)
    turns = report(tuple(Late(int(random.integers(4)), 8, step, step) for step in range(80)))
    assert "even_batches" in rules(turns)
    steps = (7, 17, 22, 31, 44, 52, 59, 71)
    few = report(tuple(Late(i % 4, 50, step, step) for i, step in enumerate(steps)))
    assert not few.stragglers
    assert few.total.waiting > 0.1 * few.total.total_s
    assert "even_batches" not in rules(few)


def test_an_evaluation_on_all_ranks_is_not_to_be_shared(tmp_path):
    late = tuple(Late(rank, EVALUATION_MS, step, step) for rank in (0, 1) for step in EPOCHS)
    by_rank = [
        [part for event in events for part in _evaluation(event)]
        for events in data_parallel(2, 80, late=late)
    ]
    report = gather(write_run(tmp_path, by_rank))
    rules = {advice.rule for advice in report.advice}
    assert "rarer_evaluation" in rules
    assert "share_evaluation" not in rules


def test_an_evaluation_that_takes_one_rank_longer_is_not_to_be_shared(tmp_path):
    """Both evaluate; a rank that waits for the other one evaluates, too."""
    late = tuple(Late(rank, EVALUATION_MS, step, step) for rank in (0, 1) for step in EPOCHS)
    by_rank = data_parallel(2, 80, late=late)
    by_rank[0] = [part for event in by_rank[0] for part in _evaluation(event)]
    by_rank[1] = [part for event in by_rank[1] for part in _evaluation(event, passes=1)]
    report = gather(write_run(tmp_path, by_rank))
    assert "share_evaluation" not in {advice.rule for advice in report.advice}


def test_one_evaluation_cannot_be_made_half_as_often(tmp_path):
    late = (Late(0, EVALUATION_MS, 40, 40), Late(1, EVALUATION_MS, 40, 40))
    by_rank = [
        [part for event in events for part in _evaluation(event)]
        for events in data_parallel(2, 80, late=late)
    ]
    report = gather(write_run(tmp_path, by_rank))
    assert report.total.evaluation > 0.1 * report.total.total_s
    assert "rarer_evaluation" not in {advice.rule for advice in report.advice}


@pytest.mark.parametrize("has_buffers", [True, False])
def test_only_broadcasts_of_buffers_are_to_be_left_out(tmp_path, has_buffers):
    """Others broadcast in each step, too: Lightning sends 8 bytes."""
    by_rank = [_with_broadcasts(events, has_buffers) for events in data_parallel(2, 80)]
    report = gather(write_run(tmp_path, by_rank))
    rules = {advice.rule for advice in report.advice}
    assert ("no_buffer_broadcasts" in rules) is has_buffers


def _with_broadcasts(events, has_buffers):
    """Add a broadcast of 4,096 bytes to the end of each step, which takes 2 ms."""
    made, shift_ns = [], 0
    for event in events:
        moved = dataclasses.replace(
            event, begin_ns=event.begin_ns + shift_ns, end_ns=event.end_ns + shift_ns
        )
        if event.kind != Kind.STEP:
            made.append(moved)
            continue
        begin_ns, end_ns = moved.end_ns, moved.end_ns + 2 * MS
        given = {"step": event.step, "amount": 4096}
        call = {**given, "sequence": 1000 + event.step, "group": "group 0", "members": (0, 1)}
        made += [
            Event(Kind.COLLECTIVE, begin_ns, end_ns, "broadcast", **call),
            Event(Kind.WAIT, begin_ns, end_ns, "broadcast", **call),
            dataclasses.replace(moved, end_ns=end_ns),
        ]
        if has_buffers:
            made.append(Event(Kind.COUNTER, begin_ns, begin_ns, BUFFER_BYTES, **given))
        shift_ns += 2 * MS
    return made


def test_a_missing_trace_makes_no_advice_of_communication(tmp_path):
    delays = (Late(1, 8, 0, 79, "compute"),)
    run = write_run(tmp_path, data_parallel(3, 80, late=delays))
    whole = gather(run)
    assert {advice.phase for advice in whole.advice} >= {"waiting", "transfer"}
    (run / "trace" / trace_name(1)).unlink()
    report = gather(run)
    assert [advice.phase for advice in report.advice] == ["input"]
    assert "What is called communication may include waiting for rank 1." in report.verdict


@pytest.mark.parametrize(
    ("failure", "code"),
    [(None, 130), (Failure(rank=1, signal="SIGKILL", step=40), 5), (Failure(rank=1, error="x"), 0)],
)
def test_a_run_that_ended_badly_gets_no_advice(tmp_path, failure, code):
    run = write_run(tmp_path, data_parallel(2, 80, late=(Late(1, 8, 0, 79),)))
    assert gather(run).advice
    result = RunResult(
        exit_code=code, world_size=2, step_time_s=0, loop_wall_s=0, ranks=(), failure=failure
    )
    (run / "result.json").write_text(result.to_text())
    assert gather(run).advice == ()


class _Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "widest"), [(_Terminal(), 60), (io.StringIO(), None)])
def test_why_wraps_on_a_terminal_and_nowhere_else(tmp_path, monkeypatch, stream, widest):
    run = write_run(tmp_path, data_parallel(2, 80, late=(Late(1, 8, 0, 79),)))
    console = Console(file=stream, width=60, highlight=False, force_terminal=True)
    monkeypatch.setattr("rich.console.Console", lambda **_: console)
    CliRunner().invoke(why, [str(run)], catch_exceptions=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    lines = [line.rstrip() for line in text.splitlines()]
    report = gather(run)
    sentences = [report.verdict, *(f"What would help: {item.sentence}" for item in report.advice)]
    if widest is None:
        assert lines == sentences
    else:
        assert max(map(len, lines)) <= widest
        assert " ".join(lines) == " ".join(sentences)  # no word is broken


def test_why_names_the_paths_of_the_collectives_where_the_backend_says_them(tmp_path):
    by_rank = data_parallel(2, 80)
    unnamed = write_run(tmp_path / "unnamed", by_rank)
    report = gather(unnamed)
    assert report.collective_paths == {"": 80}
    assert "Paths" not in CliRunner().invoke(why, [str(unnamed)]).output
    (line,) = report.traffic
    lines = (
        dataclasses.replace(line, path="gloo", count=2),
        dataclasses.replace(line, path="shared memory"),
        dataclasses.replace(line, path="gloo", operation="broadcast", count=1),
        dataclasses.replace(line, path="", operation="send"),
    )
    named = dataclasses.replace(report, traffic=lines)
    console = Console(file=io.StringIO(), width=200)
    console.print(render_why(named))
    last = console.file.getvalue().splitlines()[-1]
    assert last == "Paths of the collectives: shared memory (80), gloo (3)."
    data = json.loads(CliRunner().invoke(why, [str(unnamed), "--json"]).output)
    assert data["collective_paths"] == {"": 80}
