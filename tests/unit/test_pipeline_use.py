"""What the trace of a model in stages says of its ranks: how long they idle, and why."""

import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.examples import examples
from support.traces import pipelined, write_run

from paceline.core.machine import Link, Quantity
from paceline.report.model import gather, to_json
from paceline.report.page.document import render_html
from paceline.report.terminal import render_details
from paceline.schedules.pipeline import (
    StageCosts,
    StageEdge,
    fill_drain,
    interleaved,
    one_forward_one_backward,
    replay,
    zero_bubble,
)
from paceline.trace.analysis import analyse
from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run

STEPS = 24
EVEN = StageCosts.uniform(2, 0.002, 0.004)
ORDERS = [
    one_forward_one_backward(2, 4),
    one_forward_one_backward(3, 6),
    one_forward_one_backward(4, 2),
    fill_drain(2, 4),
    zero_bubble(2, 4),
    interleaved(2, 2, 4),
]


def report_of(folder, schedule, costs, **options):
    return gather(write_run(folder, pipelined(schedule, costs, steps=STEPS, **options)))


def link(latency_s):
    fast = Quantity(value=1e12, source="datasheet")
    latency = Quantity(value=latency_s, source="datasheet")
    return Link(level="loopback", sharing="pair", latency_s=latency, bandwidth_bytes_per_s=fast)


def test_a_batch_that_a_killed_rank_has_a_part_of_is_left_out(tmp_path):
    schedule = one_forward_one_backward(2, 4)
    by_rank = pipelined(schedule, EVEN, steps=3)
    batches = [event.sequence for event in by_rank[1] if event.kind is Kind.STAGE]
    last = max(place for place, event in enumerate(by_rank[1]) if event.kind is Kind.STAGE)
    by_rank[1] = by_rank[1][: last - 2]
    report = gather(write_run(tmp_path, by_rank))
    assert max(batches) == 3
    assert report.pipeline.batches == 1  # the second: the first makes what is made once


@pytest.mark.parametrize("schedule", ORDERS, ids=lambda order: f"{order.name}-{order.stages}")
def test_idle_time_is_that_of_the_schedule(tmp_path, schedule):
    costs = StageCosts.uniform(schedule.stages, 0.002, 0.004)
    report = report_of(tmp_path, schedule, costs)
    use, bubble = report.pipeline, report.bubble
    expected = replay(schedule, _chain(schedule), costs).bubble_share
    assert use.idle_share == pytest.approx(expected, abs=1e-6)
    assert bubble.by_schedule == pytest.approx(expected, abs=1e-6)
    assert (bubble.schedule, use.microbatches) == (schedule.name, schedule.microbatches)
    assert use.batches == STEPS - 1
    for rank in use.ranks:
        assert rank.busy_s + rank.idle_s == pytest.approx(use.batch_s, abs=1e-6)
        assert rank.exposed_s == pytest.approx(0, abs=1e-6)


def test_the_formula_and_twice_the_microbatches_are_said(tmp_path):
    report = report_of(tmp_path, one_forward_one_backward(2, 4), EVEN)
    assert report.bubble.by_schedule == pytest.approx(1 / 5, abs=1e-6)
    assert report.bubble.with_more == pytest.approx(1 / 9, abs=1e-6)
    step_ms = 5 * 6 + 1
    share = 6 / step_ms
    more = 3 / (9 * 3 + 1)  # each pass takes half as long: 27 ms, of which ranks idle 3
    assert report.verdict.split(". ")[1] == (
        f"Ranks idle {share:.0%} of a step in the pipeline: {share:.0%} is warm-up and drain, "
        f"4 microbatches for 2 stages (8 would make it {more:.0%} in all)"
    ).replace("%", " %")
    advice = {found.rule: found for found in report.advice}
    assert "even_batches" not in advice
    assert advice["more_microbatches"].saving_s == pytest.approx(3e-3, rel=0.01)


def test_the_rank_of_the_first_stage_waits_in_warm_up_and_drain(tmp_path):
    ranks = report_of(tmp_path, one_forward_one_backward(2, 4), EVEN).pipeline.ranks
    # Rank 0: a backward pass of the other stage, then a forward pass of it before the last one.
    assert [rank.warm_up_s for rank in ranks] == pytest.approx([0.004, 0.002], abs=1e-6)
    assert [rank.drain_s for rank in ranks] == pytest.approx([0.002, 0.004], abs=1e-6)
    assert [rank.between_s for rank in ranks] == pytest.approx([0, 0], abs=1e-6)


def test_the_slower_stage_is_named(tmp_path):
    costs = StageCosts(forward_s=(0.001, 0.002), backward_s=(0.002, 0.004))
    report = report_of(tmp_path, one_forward_one_backward(2, 8), costs)
    assert report.pipeline.ranks[0].between_s > report.pipeline.ranks[1].between_s
    assert "since stage 1 computes 2.0 times as long as the other" in report.verdict
    assert {"even_stages"} <= {found.rule for found in report.advice}
    assert report.bubble.by_rest == pytest.approx(0, abs=1e-6)


def test_values_on_their_way_are_hidden_or_exposed(tmp_path):
    report = report_of(
        tmp_path, one_forward_one_backward(2, 4), EVEN, link=link(0.001), amount=1_000_000
    )
    use = report.pipeline
    replayed = replay(one_forward_one_backward(2, 4), _chain(ORDERS[0]), EVEN, link(0.001))
    assert sum(rank.exposed_s for rank in use.ranks) == pytest.approx(
        sum(replayed.exposed_transfer_s), rel=1e-3
    )
    assert use.transfers.exposed_s == pytest.approx(sum(replayed.exposed_transfer_s), rel=1e-3)
    assert use.transfers.hidden_s + use.transfers.exposed_s == pytest.approx(8 * 0.001, rel=1e-3)
    assert use.transfers.hidden_bytes + use.transfers.exposed_bytes == 8_000_000
    assert 0 < use.transfers.hidden_bytes < 8_000_000


def test_a_model_in_one_piece_has_no_pipeline(tmp_path):
    schedule = one_forward_one_backward(1, 4)
    report = report_of(tmp_path, schedule, StageCosts.uniform(1, 0.002, 0.004))
    assert report.pipeline is None
    assert report.bubble is None


def test_a_rank_without_a_trace_leaves_nothing_to_say(tmp_path):
    events = pipelined(one_forward_one_backward(2, 4), EVEN, steps=STEPS)
    run = write_run(tmp_path, events)
    (run / "trace/rank-00001.trace").unlink()
    assert gather(run).pipeline is None


def test_page_terminal_and_json_show_it(tmp_path):
    report = report_of(tmp_path, one_forward_one_backward(2, 4), EVEN)
    page = render_html(report)
    assert "<h2>Pipeline</h2>" in page
    assert page.count("backward, stage 1, microbatch") == 4
    text = io.StringIO()
    Console(file=text, width=120).print(render_details(report))
    assert "warm-up and drain of 1f1b, with equal stages" in text.getvalue()
    found = to_json(report)
    assert found["pipeline"]["ranks"][1]["stages"] == [1]
    assert found["bubble"]["schedule"] == "1f1b"


@settings(max_examples=examples(25), deadline=None)
@given(
    stages=st.integers(2, 4),
    microbatches=st.integers(1, 6),
    seconds=st.lists(st.floats(0.0005, 0.01), min_size=8, max_size=8),
    order=st.sampled_from([one_forward_one_backward, fill_drain, zero_bubble]),
    latency_s=st.sampled_from([0.0, 0.0005]),
)
def test_idle_time_is_that_of_any_replay(
    tmp_path_factory, stages, microbatches, seconds, order, latency_s
):
    schedule = order(stages, microbatches)
    costs = StageCosts(forward_s=tuple(seconds[:stages]), backward_s=tuple(seconds[4 : 4 + stages]))
    slow = link(latency_s) if latency_s else None
    run = write_run(tmp_path_factory.mktemp("run"), pipelined(schedule, costs, steps=3, link=slow))
    use = analyse(load_run(run)).pipeline
    replayed = replay(schedule, _chain(schedule), costs, slow)
    assert use.idle_share == pytest.approx(replayed.bubble_share, abs=1e-4)
    for rank, busy_s, exposed_s in zip(
        use.ranks, replayed.busy_s, replayed.exposed_transfer_s, strict=True
    ):
        assert rank.busy_s == pytest.approx(busy_s, abs=1e-5)
        assert rank.exposed_s == pytest.approx(exposed_s, abs=1e-5)


def _chain(schedule):
    return [StageEdge(a, b, 1000) for a, b in itertools.pairwise(range(schedule.stages))]
