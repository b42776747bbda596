"""`paceline fed simulate`: real training of simulated clients, compared side by side."""

import json
import re
import sys
from pathlib import Path

import pytest
from support import forking

from paceline.federated.config import FederationConfig
from paceline.federated.study import read_data, simulate

CONFIG = """
clients = 20
cohort = 4
rounds = 30
budget_s = 4000.0
target = 0.7
[data]
alpha = 0.5
[work]
learning_rate = 0.05
epochs = 2.0
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    path = tmp_path_factory.mktemp("fed") / "federation.toml"
    path.write_text(CONFIG)
    return path


def fed(*args):
    command = [sys.executable, "-m", "paceline", "fed", *map(str, args)]
    return forking.run(command, capture_output=True, text=True, timeout=120)


def test_strategies_side_by_side(config):
    done = fed("simulate", config, "--strategy", "all", "--json")
    assert done.returncode == 0, done.stderr
    results = {r["strategy"]: r for r in json.loads(done.stdout)["results"]}
    assert len(results) == 7
    for name, result in results.items():
        assert result["final"] > 0.5, name  # of ten classes: it has learnt
        assert sum(result["returned"]) >= result["rounds"]
        assert 0 <= result["waste"] < 0.6
        assert result["curve"] == sorted(result["curve"], key=lambda point: point["at_s"])
    # Only those who start more clients than they wait for throw work away on purpose.
    assert results["over-selected"]["waste"] > results["paceline"]["waste"]
    table = fed("simulate", config)
    assert "worst class" in table.stdout
    assert "paceline, seed 0:" in table.stderr


def test_the_same_seed_brings_the_same_result(config):
    given = FederationConfig.from_toml(config)
    data, scores = read_data(given)
    one, again, other = (simulate(given, data, scores, "paceline", s) for s in (3, 3, 4))
    assert one == again
    assert one != other


def test_wrong_files_are_named(tmp_path, config):
    unknown = tmp_path / "unknown.toml"
    unknown.write_text("[devices]\nkind = 'phones'\nspeed = 3\n")
    for args, message in (
        (["simulate", tmp_path / "none.toml"], "none.toml"),
        (["simulate", unknown], "speed"),
        (["simulate", config, "--strategy", "oortt"], "Did you mean 'oort'"),
    ):
        done = fed(*args)
        assert done.returncode == 2, done.stderr
        assert message in done.stderr
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "train-images-idx3-ubyte").write_bytes(b"not an image")
    images = tmp_path / "images.toml"
    images.write_text(f"[data]\nfolder = '{folder}'\n")
    assert "IDX format" in fed("simulate", images).stderr


def test_a_run_is_scored_and_paid(tmp_path, config):
    folder = tmp_path / "run"
    done = fed("run", config, "--out", folder, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    balances = found["balances"]
    assert sum(balances.values()) == 0
    paid = [balances.get(f"client:{number}", 0) for number in range(20)]
    assert min(paid) >= 0
    assert sum(amount > 0 for amount in paid) > 10
    # 100 tokens for each model; a tenth is the infrastructure's.
    assert balances["infrastructure"] == found["result"]["rounds"] * 10_000_000
    assert found["result"]["final"] > 0.5
    assert found["signed"]
    page = (folder / "report.html").read_text()
    for title in ("Classes", "Groups of clients", "Participation", "Tokens"):
        assert f"<h2>{title}" in page
    assert "that were issued, exactly" in page
    verified = fed("ledger", "verify", folder / "ledger.db", "--receipts")
    assert verified.returncode == 0, verified.stderr
    again = fed("run", config, "--out", folder)
    assert again.returncode == 2
    assert "has files" in again.stderr


def test_silos_of_a_facility_whose_jobs_wait_in_queues():
    facility = Path(__file__).parents[2] / "examples/facility.toml"
    done = fed("simulate", facility, "--strategy", "paceline", "--strategy", "random", "--json")
    assert done.returncode == 0, done.stderr
    results = {result["strategy"]: result for result in json.loads(done.stdout)["results"]}
    ours, waiting = results["paceline"], results["random"]
    assert len(ours["returned"]) == 8
    assert ours["never_used"] == ours["never_online"] == 0
    # A synchronous round waits for the longest queue.
    assert 2 * ours["to_target_s"] < waiting["to_target_s"]
    assert ours["final"] > 0.9


def test_clients_that_fail_are_named_and_unpaid_and_the_others_go_on(tmp_path, config):
    faulty = tmp_path / "faulty.toml"
    kinds = "silent = [0]\nnot_finite = [1]\nwrong_shape = [2]\ngiant = [3]\n"
    faulty.write_text(f"{CONFIG}[devices]\nonline = false\n[faults]\n{kinds}")
    folder = tmp_path / "run"
    done = fed("run", faulty, "--out", folder)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert re.search(r"client 0, \d+x \(deadline: no answer within \d+ s\)", said)
    result = json.loads((folder / "result.json").read_text())
    assert result["rounds"] == 30
    assert result["final"] > 0.5
    assert not any(result["returned"][:4])
    reasons = {row["client"]: row for row in result["unpaid"] if row["client"] in "0123"}
    assert [reasons[client]["check"] for client in "0123"] == [
        "deadline",
        "values",
        "values",
        "norm",
    ]
    assert "parameter 0 changes by nan" in reasons["1"]["reason"]
    assert "of shape (4809,), and the model has (4810,)" in reasons["2"]["reason"]
    for client in "0123":
        told = json.loads(
            fed("ledger", "statement", folder / "ledger.db", "--client", client, "--json").stdout
        )
        assert told["spendable"] == told["held"] == 0
        assert all(reasons[client]["check"] in line["note"]["reason"] for line in told["lines"])
        assert len(told["lines"]) <= reasons[client]["count"]
    assert fed("ledger", "verify", folder / "ledger.db", "--receipts").returncode == 0
