"""What a report says of rebalancing, and where it advises it."""

import dataclasses
import json

import pytest
from support.traces import Late, data_parallel, write_run

from paceline.core.errors import ConfigError
from paceline.report.advice.gather import gather_facts
from paceline.report.advice.rules import advise
from paceline.report.balance import balance_words, slow_node_lines
from paceline.report.model import gather
from paceline.runs.balance import Balance, BalanceAction, SlowNode, SlowNodes, read_balance
from paceline.trace.analysis import analyse
from paceline.trace.merge import load_run

FOUND = BalanceAction(kind="found", step=50, rank=1, ratio=2.04, cause="not_running")
CHANGED = BalanceAction(
    kind="rebalanced",
    step=50,
    from_step=55,
    rank=1,
    ratio=2.04,
    cause="not_running",
    busy_s=(0.1, 0.2),
    samples=(32, 32),
    new_samples=(43, 21),
    step_s=0.21,
    predicted_step_s=0.14,
)
MEASURED = dataclasses.replace(CHANGED, kind="measured", new_samples=(), measured_step_s=0.147)
NODE = SlowNode(host="node17", rank=1, ratio=2.04, cause="not_running", since_step=45)


def test_a_change_is_told_with_its_reason_and_its_effect():
    words = balance_words(Balance(actions=(FOUND, CHANGED, MEASURED)))
    assert words == (
        "From step 55 on the ranks have 43 and 21 samples of a batch: rank 1 takes 2 times as long "
        "for a sample as the others, because its threads waited for a core (another process took "
        "it). That brought steps of 147 ms in place of 210 ms (30 % shorter; 140 ms were "
        "predicted)."
    )


def test_what_was_undone_or_only_found_is_told():
    undone = dataclasses.replace(MEASURED, kind="undone", measured_step_s=0.3)
    assert "undone, and not tried again" in balance_words(Balance(actions=(undone,)))
    assert balance_words(Balance(actions=(FOUND,))).startswith("Rank 1 takes 2 times as long")
    assert "no rank" in balance_words(Balance())
    assert balance_words(None) == ""


def test_a_slow_node_has_a_line_that_a_scheduler_can_read():
    assert slow_node_lines(Balance(slow_nodes=(NODE,))) == [
        "slow node: host=node17 rank=1 ratio=2.04 cause=not_running since_step=45"
    ]
    assert slow_node_lines(None) == []


def test_the_files_of_a_run_are_read_back(tmp_path):
    assert read_balance(tmp_path) is None
    lines = [json.dumps(action.to_json()) for action in (FOUND, CHANGED)]
    file = tmp_path / "balance.jsonl"
    file.write_text("\n".join([*lines, '{"kind": "meas']))  # a rank was killed as it wrote
    (tmp_path / "slow_nodes.json").write_text(SlowNodes(nodes=(NODE,)).to_text())
    read = read_balance(tmp_path)
    assert read == Balance(samples=(43, 21), actions=(FOUND, CHANGED), slow_nodes=(NODE,))
    file.write_text("\n".join([lines[0], "{", lines[1]]))
    with pytest.raises(ConfigError, match="valid JSON"):
        read_balance(tmp_path)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rebalancing_is_advised_where_a_rank_is_late_to_the_end(tmp_path, ranks):
    run = write_run(tmp_path, data_parallel(ranks, 80, late=(Late(1, 12, 0, 79, "compute"),)))
    analysis = analyse(load_run(run))
    facts = gather_facts(analysis, config={}, machine=None)
    advised = next(advice for advice in advise(facts) if advice.rule == "rebalance")
    waiting = next(advice for advice in advise(facts) if advice.rule == "straggler_compute")
    # Others take over what the rank does not do: it saves less than to remove the cause, and more
    # than if all had the mean of the ranks' times.
    assert 0.95 * 0.012 * (1 - 1 / ranks) < advised.saving_s < waiting.saving_s
    assert "paceline run --rebalance" in advised.sentence
    done = {"values": {"rebalance": {"value": True, "provenance": "flag"}}}
    again = gather_facts(analysis, config=done, machine=None)
    assert "rebalance" not in {advice.rule for advice in advise(again)}
    assert any(advice.rule == "rebalance" for advice in gather(run).advice)


def test_rebalancing_is_not_advised_for_what_a_rank_does_between_phases(tmp_path):
    """A log that rank 1 alone writes takes as long with fewer samples."""
    run = write_run(tmp_path, data_parallel(2, 80, late=(Late(1, 12, 0, 79, "compute"),)))
    facts = gather_facts(analyse(load_run(run)), config={}, machine=None)
    (late,) = facts.stragglers
    placed = dataclasses.replace(late, place="train.py:12")
    advised = {
        advice.rule: advice.sentence
        for advice in advise(dataclasses.replace(facts, stragglers=(placed,)))
    }
    assert "rebalance" not in advised
    assert "in a thread, what rank 1 does at train.py:12 would" in advised["straggler_compute"]


def test_rebalancing_is_not_advised_for_a_rank_that_recovered(tmp_path):
    run = write_run(tmp_path, data_parallel(2, 80, late=(Late(1, 12, 0, 30, "compute"),)))
    rules = {advice.rule for advice in gather(run).advice}
    assert "straggler_compute" in rules
    assert "rebalance" not in rules
