"""What a report says of training out of core: bytes, hidden and exposed seconds, a step."""

import json
import re

import pytest
from support.traces import data_parallel, write_run

from paceline.core.errors import CorruptData
from paceline.report.model import gather, to_json
from paceline.report.page.document import render_html
from paceline.runs.result import MemoryUse, PhaseTime, RankResult, RunResult
from paceline.schedules.memory import (
    ManagedTensor,
    SpillTier,
    StepProfile,
    plan_memory,
    replay,
)

MIB = 1 << 20
SLOW = SpillTier(write_bytes_per_s=1e9, read_bytes_per_s=1e9)


def profile():
    """Return a step of four layers, each of which saves 16 MiB for its backward pass."""
    tensors = [
        ManagedTensor(f"layer {i}", "activation", 16 * MIB, i, i + 1, 7 - i) for i in range(4)
    ]
    return StepProfile(compute_s=(0.01,) * 8, floor_bytes=(40 * MIB,) * 8, tensors=tuple(tensors))


def run_of(folder, memory, *, planned=True):
    run = write_run(folder, data_parallel(2, 40))
    ranks = tuple(
        RankResult(
            rank=rank,
            steps=40,
            loop_wall_s=0.4,
            peak_memory_bytes=60 * MIB,
            phases=(PhaseTime(name="forward", measured_s=0.1),),
            memory=use,
        )
        for rank, use in enumerate(memory)
    )
    result = RunResult(exit_code=0, world_size=2, step_time_s=0.01, loop_wall_s=0.4, ranks=ranks)
    (run / "result.json").write_text(result.to_text())
    if planned:
        parts = {
            "profile": profile(),
            "plan": plan_memory(profile(), SLOW, 60 * MIB),
            "tier": SLOW,
        }
        step = {name: part.to_json() for name, part in parts.items()}
        (run / "memory").mkdir()
        for rank in range(2):
            path = run / "memory" / f"rank-{rank:05}.json"
            path.write_text(json.dumps({"version": 1, "planned_step": step}))
    return run


def use(exposed_s, spilled=48 * MIB):
    return MemoryUse(
        budget_bytes=60 * MIB,
        predicted_peak_bytes=60 * MIB,
        peak_used_bytes=59 * MIB,
        planned_steps=38,
        spilled_bytes=spilled,
        transfer_s=0.005,
        exposed_s=exposed_s,
    )


def test_the_rank_that_waits_longest_is_described(tmp_path):
    report = gather(run_of(tmp_path, [use(0.0), use(0.002)]))
    assert report.spilling.rank == 1
    assert (
        "To stay within 60.0 MiB, a step spills 48.0 MiB and reads them back: 3.00 ms of that are "
        "hidden behind computing, 2.00 ms (20 % of a step) exposed."
    ) in report.verdict
    (advice,) = (found for found in report.advice if found.rule == "faster_spilling")
    assert advice.saving_s == pytest.approx(0.002)
    assert "(88.0 MiB spill nothing)" in advice.action
    assert to_json(report)["spilling"]["exposed_s"] == pytest.approx(0.002)


def test_hidden_transfers_are_no_advice(tmp_path):
    report = gather(run_of(tmp_path, [use(0.0), use(0.0)]))
    assert "5.00 ms of that are hidden" in report.verdict
    assert "faster_spilling" not in {found.rule for found in report.advice}


def test_the_page_draws_the_step_under_its_plan(tmp_path):
    page = render_html(gather(run_of(tmp_path, [use(0.0), use(0.002)])))
    assert "A step out of core" in page
    assert "measured peak" in page
    assert "59.0 MiB" in page
    plan = plan_memory(profile(), SLOW, 60 * MIB)
    spilled = [action.action for action in plan.actions].count("spill")
    assert spilled > 0
    # Each spilled tensor is written and read.
    assert len(re.findall(r"<title>layer \d, 16.0 MiB</title>", page)) == 2 * spilled


def test_without_a_budget_nothing_is_said(tmp_path):
    report = gather(run_of(tmp_path, [None, None], planned=False))
    assert report.spilling is None
    assert "spill" not in report.verdict
    assert "Out of core" not in render_html(report)


def test_a_result_of_before_has_figures_without_a_picture(tmp_path):
    report = gather(run_of(tmp_path, [use(0.0), use(0.002)], planned=False))
    page = render_html(report)
    assert "Out of core" in page
    assert "A step out of core" not in page


def test_a_damaged_plan_is_named(tmp_path):
    run = run_of(tmp_path, [use(0.0), use(0.002)])
    (run / "memory/rank-00001.json").write_text('{"planned_step": {"profile": 3}}')
    with pytest.raises(CorruptData, match="rank-00001"):
        gather(run)


def test_replayed_intervals_and_transfers_add_up():
    plan = plan_memory(profile(), SLOW, 60 * MIB)
    found = replay(profile(), plan.actions, SLOW)
    assert max(interval.bytes for interval in found.intervals) == found.peak_bytes
    assert sum(interval.waited_s for interval in found.intervals) == pytest.approx(found.exposed_s)
    writes = [move for move in found.transfers if move.is_write and move.begin_s >= 0]
    reads = [move for move in found.transfers if not move.is_write and move.begin_s >= 0]
    assert len(writes) == len(reads) == [a.action for a in plan.actions].count("spill")
    assert all(move.end_s - move.begin_s == pytest.approx(16 * MIB / 1e9) for move in reads)
