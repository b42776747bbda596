"""Rebalancing of unchanged scripts on two real ranks: what they train on, and what they learn."""

from __future__ import annotations

import itertools
import json

import pytest
from launching import SCRIPTS, last_json, paceline

from paceline.runs.balance import read_balance
from paceline.runs.folder import RunFolder

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return what scripts say without rebalancing, by their arguments."""
    said = {}

    def run(*args):
        if args not in said:
            folder = tmp_path_factory.mktemp("reference")
            done = paceline(folder, "run", "-n", 2, "--no-record", SCRIPTS / "rebalanced.py", *args)
            assert done.code == 0, done.err
            said[args] = last_json(done.out)
        return said[args]

    return run


def rebalance(folder, *args, options=("--shares", "1,0.5")):
    done = paceline(
        folder, "run", "-n", 2, "--out", "RUN", *options, SCRIPTS / "rebalanced.py", *args
    )
    assert done.code == 0, done.err
    return done, last_json(done.out)


def step_samples(said):
    return [sorted(itertools.chain(*batches)) for batches in zip(*said["steps"], strict=True)]


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((), ("--no-record",)),
        (("--workers", "2"), ()),
        (("--accumulate", "2"), ("--no-record",)),
        ((), ("--collectives", "paceline")),
        (("--prepare",), ("--no-record",)),
    ],
    ids=["plain", "workers", "accumulation", "paceline", "prepared"],
)
def test_weights_are_those_of_the_balanced_run(tmp_path, reference, args, options):
    _, said = rebalance(tmp_path, *args, options=("--shares", "1,0.5", *options))
    expected = reference(*args)
    assert step_samples(said) == step_samples(expected)
    counts = [list(map(len, steps)) for steps in said["steps"]]
    assert (11, 5) in set(zip(*counts, strict=True))
    assert said["evaluated"] == expected["evaluated"]
    weights = torch.tensor(said["weights"], dtype=torch.float64)
    torch.testing.assert_close(
        weights, torch.tensor(expected["weights"], dtype=torch.float64), rtol=1e-9, atol=1e-12
    )
    actions = read_balance(tmp_path / "RUN").actions
    assert actions[0].kind == "restored"
    assert actions[0].new_samples == (11, 5)
    assert counts[0][actions[0].from_step - 1] == 11
    assert counts[0][actions[0].from_step - 2] == 8


def test_a_slow_rank_gets_fewer_samples_and_its_node_is_reported(tmp_path, reference):
    args = ("--slow", "1", "--epochs", "3")
    done, said = rebalance(tmp_path, *args, options=("--rebalance",))
    assert step_samples(said) == step_samples(reference(*args))
    balance = RunFolder(tmp_path / "RUN").read_result().balance
    changed = next(action for action in balance.actions if action.kind == "rebalanced")
    assert changed.rank == 1
    assert changed.new_samples[1] < 8 < changed.new_samples[0]
    assert [node.rank for node in balance.slow_nodes] == [1]
    assert "slow node: host=" in done.err
    nodes = json.loads((tmp_path / "RUN" / "slow_nodes.json").read_text())["nodes"]
    assert nodes[0]["rank"] == 1
    weights = torch.tensor(said["weights"], dtype=torch.float64)
    expected = torch.tensor(reference(*args)["weights"], dtype=torch.float64)
    torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--loss", "sum"), "the loss is a sum over samples"),
        (("--ahead",), "takes batches ahead"),
    ],
)
def test_what_cannot_be_weighted_is_left_alone_and_said(tmp_path, reference, args, why):
    done, said = rebalance(tmp_path, *args, options=("--no-record", "--shares", "1,0.5"))
    assert said == reference(*args)
    assert done.err.count(why) == 1


def test_a_run_begins_with_the_shares_of_another(tmp_path):
    rebalance(tmp_path, options=("--no-record", "--shares", "1,0.5"))
    folder = tmp_path / "next"
    done = paceline(
        folder, "run", "-n", 2, "--no-record", "--shares", tmp_path / "RUN", "--dry-run", "--json",
        SCRIPTS / "rebalanced.py",
    )  # fmt: skip
    assert done.code == 0, done.err
    refused = paceline(folder, "run", "-n", 3, "--shares", "1,0.5", SCRIPTS / "rebalanced.py")
    assert refused.code == 2
    assert "2 shares are given for 3 ranks" in refused.err
