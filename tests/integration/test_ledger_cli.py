"""``paceline fed ledger``: what users see, and a campaign of kills at a small size."""

import json
import sqlite3
from contextlib import closing

import pytest
from support.command_line import without_torch
from support.ledgers import audited

from paceline.federated.ledger import Ledger, SigningKey
from paceline.federated.ledger.torture import campaign, operations


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "federation.db"
    audited(made, key=SigningKey.from_seed(b"k" * 32)).close()
    return made


def _run(*args):
    return without_torch("fed", "ledger", *map(str, args), text=True)


def test_verify_names_the_head(path):
    done = _run("verify", path)
    assert done.returncode == 0, done.stderr
    assert "6 blocks, 24 transactions" in done.stdout
    assert "signatures are those of the key below" in done.stdout
    head = next(line for line in done.stdout.splitlines() if line.startswith("head "))
    assert _run("verify", path, "--expect", head.split()[1]).returncode == 0
    wrong = _run("verify", path, "--expect", "5:" + "0" * 64)
    assert wrong.returncode == 4
    assert "DAMAGED: blocks row 5" in wrong.stdout
    assert _run("verify", path, "--expect", "5").returncode == 2
    report = json.loads(_run("verify", path, "--receipts", "--json").stdout)
    assert report["version"] == 1
    assert report["receipts"] == 9
    assert report["damage"] is None


def test_a_ledger_that_was_forged_with_another_key_is_found_by_the_server_s(path, tmp_path):
    """`verify` called its signatures the server's."""
    key = SigningKey.from_seed(b"k" * 32).public_key
    done = _run("verify", path, "--public-key", key)
    assert (done.returncode, "their signatures are the server's" in done.stdout) == (0, True)
    assert f"key {key}" in _run("verify", path).stdout
    for forged, said in ((SigningKey.from_seed(b"f" * 32), "signed by "), (None, "not signed")):
        other = tmp_path / f"{said.strip()}.db"
        audited(other, key=forged).close()
        assert _run("verify", other).returncode == 0
        done = _run("verify", other, "--public-key", key)
        assert done.returncode == 4
        assert f"DAMAGED: settings row public_key: the ledger is {said}" in done.stdout
        assert (
            json.loads(_run("verify", other, "--public-key", key, "--json").stdout)[
                "is_expected_key"
            ]
            is False
        )
    assert _run("verify", path, "--public-key", "12").returncode == 2


def test_a_changed_row_is_named_and_the_rest_can_be_read(path, tmp_path):
    with closing(sqlite3.connect(path)) as sql, sql:
        text = sql.execute(
            "SELECT sql FROM sqlite_master WHERE name = 'postings_update'"
        ).fetchone()[0]
        sql.execute("DROP TRIGGER postings_update")
        sql.execute("UPDATE postings SET amount = amount + 5 WHERE id = 9")
        sql.execute(text)
    done = _run("verify", path)
    assert done.returncode == 4
    assert "DAMAGED: postings row 9: it has" in done.stdout
    damage = json.loads(_run("verify", path, "--json").stdout)["damage"]
    assert (damage["table"], damage["row"]) == ("postings", "9")
    shown = _run("statement", path, "--client", "a")
    assert shown.returncode == 0
    assert "warning: the ledger is damaged: postings row 9" in shown.stderr


def test_export_has_everything_and_statement_only_the_clients_own(path, tmp_path):
    out = tmp_path / "ledger.jsonl"
    assert _run("export", path, "--out", out).returncode == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert lines[0]["ledger"] == "tests"
    assert [line["number"] for line in lines[1:]] == [0, 1, 2, 3, 4, 5]
    assert _run("export", path, "--out", out).returncode == 2  # it is there
    table = _run("export", path, "--format", "csv").stdout.splitlines()
    assert table[0].split(",")[-2:] == ["account", "amount"]
    assert sum(int(row.rsplit(",", 1)[1]) for row in table[1:]) == 0
    shown = _run("statement", path, "--client", "b").stdout
    assert "0.450000 tokens to spend, 0.000000 within the audit delay" in shown
    assert "replayed an update" in shown
    assert "hospital" not in shown
    made = json.loads(_run("statement", path, "--client", "b", "--json").stdout)
    assert made["client"] == "b"
    assert len(made["lines"]) == 7
    unknown = _run("statement", path, "--client", "nobody")
    assert unknown.returncode == 2
    assert "no client nobody" in unknown.stderr


def test_what_is_no_ledger_is_an_error(tmp_path):
    assert _run("verify", tmp_path / "none.db").returncode == 2
    (tmp_path / "text.db").write_text("hello " * 1000)
    assert _run("verify", tmp_path / "text.db").returncode == 4


def test_kills_lose_nothing_and_double_nothing(tmp_path):
    options = ("--dir", str(tmp_path), "--operations", "3000", "--kills", "50", "--json")
    done = without_torch("torture", "ledger", *options, text=True)
    report = json.loads(done.stdout)
    assert report["ok"], report["failures"]
    assert done.returncode == 0
    assert report["kills"] >= 40
    assert report["repeated"] > 500
    assert report["refused"] > 100
    assert list(tmp_path.iterdir()) == []


@pytest.mark.campaign("faults")
def test_many_kills_lose_nothing_and_double_nothing(tmp_path):
    options = ("--dir", str(tmp_path), "--operations", "100000", "--kills", "150", "--json")
    done = without_torch("torture", "ledger", *options, text=True, timeout=1200)
    assert json.loads(done.stdout)["ok"], done.stdout


def _compare(tmp_path, change):
    """Return what the campaign sees in a ledger that was written with a mistake."""
    path = tmp_path / "ledger.db"
    compared = campaign._Campaign(path, 400, 0, 1, None)
    with Ledger.create(path, now_ms=0, name="torture") as ledger:
        operations.found_ledger(ledger)
        change(ledger)
        transactions = ledger.verify().transactions
        compared._compare(ledger, transactions)
    return compared._failures


def test_the_campaign_sees_what_it_looks_for(tmp_path, monkeypatch):
    def write(ledger):
        assert list(operations.write_operations(ledger, 1, 0, 400))[-1] == 400

    def lose(ledger):
        list(operations.write_operations(ledger, 1, 0, 399))

    def double(ledger):
        write(ledger)
        with ledger.block(10**9) as block:
            block.issue("client-1", 1, "once more")

    for name, change, is_seen in (
        ("right", write, False),
        ("lost", lose, True),
        ("twice", double, True),
    ):
        (tmp_path / name).mkdir()
        assert bool(_compare(tmp_path / name, change)) is is_seen, name
    monkeypatch.setattr(operations, "_TOO_MUCH", 1)
    with pytest.raises(AssertionError, match="overdraw"):
        _compare(tmp_path, write)
