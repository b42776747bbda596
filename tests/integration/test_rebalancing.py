"""Rebalancing of unchanged loops on two real ranks: what they train on, and what they learn."""

from __future__ import annotations

import itertools
import json

import pytest
from support.launching import SCRIPTS, last_json, paceline
from support.process_groups import run_ranks

from paceline.runs.balance import read_balance
from paceline.runs.folder import RunFolder

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def loops(tmp_path_factory):
    """What loops did with and without shares of 1 and 0.5: by case, then by rank."""
    folder = tmp_path_factory.mktemp("loops")
    by_rank = run_ranks(SCRIPTS / "rebalanced_ranks.py", folder, 2, folder)
    cases = {case: [said[case] for said in by_rank] for case in by_rank[0]}
    return folder, cases


def step_samples(by_rank):
    return [sorted(itertools.chain(*batches)) for batches in zip(*by_rank, strict=True)]


def same_weights(one, other):
    """Check that they differ by no more than float64 rounds."""
    tensors = [torch.tensor(weights, dtype=torch.float64) for weights in (one, other)]
    torch.testing.assert_close(*tensors, rtol=1e-9, atol=1e-12)


SHARED = [
    "plain",
    "workers",
    "accumulation",
    "store threads",
    "store processes",
    "accelerated",
    "prepared",
]


@pytest.mark.parametrize("case", SHARED)
def test_weights_are_those_of_equal_shares(loops, case):
    folder, cases = loops
    plain, shared = ([rank[kind] for rank in cases[case]] for kind in ("plain", "shared"))
    assert step_samples(rank["steps"] for rank in shared) == step_samples(
        rank["steps"] for rank in plain
    )
    for rank in (0, 1):
        assert shared[rank]["evaluated"] == plain[rank]["evaluated"]
        assert shared[rank]["warnings"] == []
        same_weights(shared[rank]["weights"], plain[rank]["weights"])
    action = read_balance(folder / case).actions[0]
    assert (action.kind, action.new_samples) == ("restored", (11, 5))
    counts = [[len(batch) for batch in rank["steps"]] for rank in shared]
    assert [count[action.from_step - 1] for count in counts] == [11, 5]
    assert [count[action.from_step - 2] for count in counts] == [8, 8]


@pytest.mark.parametrize(
    ("case", "why"),
    [("sum", "the loss is a sum over samples"), ("ahead", "takes batches ahead")],
)
def test_what_cannot_be_weighted_is_left_alone_and_said(loops, case, why):
    for rank, said in enumerate(loops[1][case]):
        warnings = said["shared"].pop("warnings")
        assert said["shared"] == said["plain"]
        assert len(warnings) == (rank == 0)
        assert all(why in line for line in warnings)


def test_a_slow_rank_gets_fewer_samples_and_its_node_is_reported(tmp_path):
    script = (SCRIPTS / "rebalanced.py", "--slow", 1)
    plain = paceline(tmp_path, "run", "-n", 2, "--no-record", *script)
    done = paceline(tmp_path, "run", "-n", 2, "--rebalance", "--out", "RUN", *script)
    assert done.code == 0, done.err
    said, expected = last_json(done.out), last_json(plain.out)
    assert step_samples(said["steps"]) == step_samples(expected["steps"])
    same_weights(said["weights"], expected["weights"])
    balance = RunFolder(tmp_path / "RUN").read_result().balance
    changed = next(action for action in balance.actions if action.kind == "rebalanced")
    assert changed.rank == 1
    assert changed.new_samples[1] < 8 < changed.new_samples[0]
    assert [node.rank for node in balance.slow_nodes] == [1]
    assert "slow node: host=" in done.err
    nodes = json.loads((tmp_path / "RUN" / "slow_nodes.json").read_text())["nodes"]
    assert nodes[0]["rank"] == 1
    again = paceline(
        tmp_path, "run", "-n", 2, "--shares", "RUN", "--dry-run", "--json", script[0]
    )  # fmt: skip
    assert again.code == 0, again.err


def test_shares_of_another_number_of_ranks_are_refused(tmp_path):
    refused = paceline(
        tmp_path, "run", "-n", 3, "--shares", "1,0.5", "--dry-run", SCRIPTS / "rebalanced.py"
    )  # fmt: skip
    assert refused.code == 2
    assert "2 shares are given for 3 ranks" in refused.err
