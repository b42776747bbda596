"""The ledger's operations: exactly once, never below zero, all of a block or nothing."""

import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest
from support.ledgers import TERMS, audited, funded, work

from paceline.core.errors import (
    CorruptData,
    DestinationExists,
    Missing,
    NewerFormat,
    NotFound,
    StorageError,
    UsageError,
)
from paceline.federated.ledger import Ledger, RunTerms, SigningKey, keys, work_text
from paceline.federated.ledger.ledger import Head


@pytest.fixture
def ledger(tmp_path):
    with funded(tmp_path / "ledger.db") as opened:
        yield opened


def test_tokens_move_from_consumers_to_providers_and_infrastructure(ledger):
    with ledger.block(2000) as block:
        receipts = block.pay_round("run", 0, [work("a", 3.0), work("b", 1.0)])
        assert block.release_due() == []
    assert {client: receipt.amount for client, receipt in receipts.items()} == {
        "a": 675_000,
        "b": 225_000,
    }
    assert ledger.balance("infrastructure") == 100_000
    assert ledger.balance("escrow:pay:a") == 675_000
    assert ledger.balance("client:a") == 0
    with ledger.block(3000) as block:
        assert [payment.client for payment in block.release_due()] == ["a", "b"]
    assert ledger.balance("client:a") == 675_000
    assert sum(ledger.balances().values()) == 0


def test_without_an_audit_delay_pay_is_immediate_as_published(tmp_path):
    terms = RunTerms(budget_per_round=100, rounds=1, audit_delay_ms=0)
    with funded(tmp_path / "ledger.db", terms=terms) as ledger:
        with ledger.block(2000) as block:
            block.pay_round("run", 0, [work("a", 1.0)])
            block.release_due()
        assert ledger.balance("client:a") == 90


def test_what_is_repeated_is_done_once(ledger):
    works = [work("a", 3.0), work("b", 1.0)]
    for _ in range(3):
        with ledger.block(2000) as block:
            block.pay_round("run", 0, works)
            block.issue("hospital", 30_000_000, "invoice 1")
            block.deposit("run", "clinic", 4_000_000, "1")
            block.begin_run("run", TERMS)
    assert ledger.head().number == 2  # a block with nothing new is none
    for _ in range(2):
        with ledger.block(3000) as block:
            block.release("run", 0, "a")
            block.slash("b", "case", "proven")
            block.end_run("run", 50_000)
    assert ledger.balance("slashed") == 225_000
    assert ledger.verify().ok


@pytest.mark.parametrize(
    ("repeat", "match"),
    [
        (lambda block: block.pay_round("run", 0, [work("a", 3.0), work("b", 2.0)]), "already"),
        (lambda block: block.pay_round("run", 0, [work("a", 4.0)]), "already"),
        (lambda block: block.issue("hospital", 1, "invoice 1"), "already"),
        (lambda block: block.begin_run("run", RunTerms(budget_per_round=5, rounds=1)), "already"),
        (lambda block: block.slash("b", "case 1", "another reason"), "already"),
        (lambda block: block.pay_round("run", 10, []), "pays no round 10"),
        (lambda block: block.pay_round("other", 0, []), "has not begun"),
        (lambda block: block.release("run", 2, "b"), "no pay for round 2"),
        (lambda block: block.release("run", 0, "c"), "no pay for round 0"),
        (lambda block: block.release("run", 2, "a"), "stays in escrow"),
        (lambda block: block.deposit("run", "clinic", 9_000_000, "2"), "client:clinic has"),
        (lambda block: block.lock_stake("nobody", 1, "1"), "client:nobody has 0"),
        (lambda block: block.return_stake("hospital", 1, "1"), "escrow:stake:hospital has 0"),
        (lambda block: block.return_stake("a", 1, "1"), "stake of client a stays"),
        (lambda block: block.begin_run("next", RunTerms(budget_per_round=10**9, rounds=9)), "tre"),
        (lambda block: block.issue("a", 2**62, "2"), "cannot issue"),
        (lambda block: block.issue("a", -5, "2"), "cannot be -5"),
        (lambda block: block.issue("a", 2**70, "2"), "cannot be"),
        (lambda block: block.register("a", "xyz"), "no public key"),
        (lambda block: block.end_run("run", -1), "improvement of -1"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path, repeat, match):
    with audited(tmp_path / "ledger.db") as ledger:
        before = ledger.balances(), ledger.head()
        with ledger.block(4600) as block, pytest.raises(UsageError, match=match):
            repeat(block)
        assert (ledger.balances(), ledger.head()) == before
        assert ledger.verify().ok


def test_an_operation_that_fails_leaves_the_rest_of_its_block(ledger):
    with ledger.block(2000) as block:
        block.issue("a", 5, "1")
        with pytest.raises(UsageError):
            block.lock_stake("a", 6, "1")
        block.lock_stake("a", 4, "2")
    assert ledger.balance("client:a") == 1
    assert ledger.verify().ok


def _issue_and_fail(ledger):
    with ledger.block(2000) as block:
        block.issue("a", 5, "1")
        raise ZeroDivisionError


def _issue_many(ledger, count):
    with ledger.block(2000) as block:
        for number in range(count):
            block.issue(f"client-{number}", 10, "1")


def test_an_exception_in_a_block_leaves_nothing_of_it(ledger):
    before = ledger.balances()
    with pytest.raises(ZeroDivisionError):
        _issue_and_fail(ledger)
    assert ledger.balances() == before
    with ledger.block(2000) as block:
        assert block.issue("a", 5, "1")


def test_slashing_takes_stake_and_held_pay_but_not_what_was_released(tmp_path):
    with audited(tmp_path / "ledger.db") as ledger:
        # Of the pay for rounds 0, 1 and 2, the first two were released.
        assert ledger.balance("slashed") == 225_000
        assert ledger.balance("client:b") == 2 * 225_000
        with ledger.block(9000) as block:
            block.lock_stake("b", 100_000, "1")
            assert block.slash("b", "case 2", "again") == 100_000
            assert block.slash("b", "case 2", "again") == 0
        assert ledger.balance("escrow:stake:b") == 0


def test_a_stake_comes_back_when_no_pay_is_audited(ledger):
    with ledger.block(2000) as block:
        block.issue("a", 100, "1")
        block.lock_stake("a", 100, "1")
        block.pay_round("run", 0, [work("a", 1.0)])
        with pytest.raises(UsageError, match="stays"):
            block.return_stake("a", 100, "1")
    with ledger.block(3000) as block:
        block.release_due()
        assert block.return_stake("a", 100, "1")
        assert not block.return_stake("a", 100, "1")
    assert ledger.balance("escrow:stake:a") == 0


def test_the_end_of_a_run_reimburses_consumers(ledger):
    with ledger.block(2000) as block:
        for number in range(5):
            block.pay_round("run", number, [work("a", 1.0)])
        block.end_run("run", 50_000)
        with pytest.raises(UsageError, match="has ended"):
            block.pay_round("run", 5, [work("a", 1.0)])
        with pytest.raises(UsageError, match="has ended"):
            block.deposit("run", "hospital", 1, "2")
        with pytest.raises(UsageError, match="already"):
            block.end_run("run", 60_000)
        assert not block.end_run("run", 50_000)
    # Half of the budget was not spent, half of the target was reached; 4 of 5 tokens were the
    # hospital's, and deposits were twice the budget.
    assert ledger.balance("client:hospital") == 14_000_000 + 2_000_000
    assert ledger.balance("client:clinic") == 1_000_000 + 500_000
    assert ledger.balance("escrow:budget:run") == 0


def test_a_clock_that_goes_back_changes_neither_order_nor_delays(ledger, caplog):
    with ledger.block(50_000) as block:
        block.pay_round("run", 0, [work("a", 1.0)])
    for now_ms in (10, 20):
        with ledger.block(now_ms) as block:
            block.pay_round("run", now_ms // 10, [work("a", 1.0)])
            assert block.release_due() == []
    assert ledger.head().at_ms == 50_000
    assert caplog.text.count("went back") == 1
    with ledger.block(51_000) as block:
        assert len(block.release_due()) == 3
    assert ledger.verify().ok


def test_a_second_writer_is_refused_at_once_and_readers_are_not(ledger, tmp_path):
    code = (
        "import sys; from pathlib import Path; from paceline.federated.ledger import Ledger;"
        "path = Path(sys.argv[1]); print(len(Ledger.read(path).balances())); Ledger.open(path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ledger.path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"{len(ledger.balances())}\n"
    assert "UsageError: another process writes to this ledger" in done.stderr
    assert f"process {os.getpid()} holds its lock" in done.stderr
    path = ledger.path
    ledger.close()
    with Ledger.open(path) as again, again.block(2000) as block:
        block.issue("a", 1, "1")


def test_a_program_that_holds_the_file_is_waited_for_with_a_deadline(ledger, monkeypatch):
    ledger._sql.execute("PRAGMA busy_timeout = 10")
    with closing(sqlite3.connect(ledger.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="another program held it"), ledger.block(2000):
            pass
        other.execute("ROLLBACK")
    with ledger.block(2000) as block:
        block.issue("a", 1, "1")


def test_a_full_disk_leaves_nothing_half_written(ledger):
    pages = ledger._sql.row("PRAGMA page_count")[0]
    before = ledger.balances(), ledger.head()
    ledger._sql.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(StorageError, match="full"):
        _issue_many(ledger, 500)
    assert (ledger.balances(), ledger.head()) == before
    ledger._sql.execute(f"PRAGMA max_page_count = {pages + 1000}")
    with ledger.block(2000) as block:
        block.pay_round("run", 0, [work("a", 1.0)])
    assert ledger.verify().ok


def test_a_file_that_may_not_grow_leaves_nothing_half_written(tmp_path):
    """The log cannot be written to the end: commit fails, in a process of its own."""
    path = tmp_path / "ledger.db"
    funded(path).close()
    code = """
import resource, signal, sys
from pathlib import Path
from paceline.core.errors import StorageError
from paceline.federated.ledger import Ledger
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with Ledger.open(Path(sys.argv[1])) as ledger:
    before = ledger.balances(), ledger.head()
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))
    try:
        with ledger.block(2000) as block:
            for number in range(3000):
                block.issue(f"client-{number}", 10, "1")
        print("committed")
    except StorageError as problem:
        print("refused")
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print((ledger.balances(), ledger.head()) == before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["refused", "True"], done.stderr
    with Ledger.open(path) as ledger:
        assert ledger.damage is None
        assert ledger.head().number == 1


def test_a_ledger_is_made_once(tmp_path):
    path = tmp_path / "ledger.db"
    funded(path).close()
    content = path.read_bytes()
    with pytest.raises(DestinationExists):
        Ledger.create(path, now_ms=0)
    assert path.read_bytes() == content
    with pytest.raises(StorageError):
        Ledger.create(tmp_path / "missing" / "ledger.db", now_ms=0)


def test_what_a_killed_creation_left_is_replaced(tmp_path):
    (tmp_path / "ledger.db.partial").write_bytes(b"half")
    (tmp_path / "ledger.db.partial-wal").write_bytes(b"half")
    funded(tmp_path / "ledger.db").close()
    assert {file.name for file in tmp_path.iterdir()} == {"ledger.db", "ledger.db.lock"}


def test_what_is_no_ledger_is_said(tmp_path):
    with pytest.raises(NotFound):
        Ledger.open(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("hello " * 1000)
    for opens in (Ledger.open, Ledger.read):
        with pytest.raises(CorruptData):
            opens(tmp_path / "text.db")
    with closing(sqlite3.connect(tmp_path / "other.db")) as sql:
        sql.execute("CREATE TABLE settings (key, value)")
    with pytest.raises(CorruptData, match="not a ledger"):
        Ledger.open(tmp_path / "other.db")


def test_a_newer_format_is_said(tmp_path):
    path = tmp_path / "ledger.db"
    funded(path).close()
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("DROP TRIGGER settings_update")
        sql.execute("UPDATE settings SET value = '99' WHERE key = 'format'")
    with pytest.raises(NewerFormat, match="format 99"):
        Ledger.open(path)


def test_readers_and_open_blocks_cannot_begin_another(ledger):
    with (
        Ledger.read(ledger.path) as reader,
        pytest.raises(UsageError, match="reading"),
        reader.block(2000),
    ):
        pass
    with ledger.block(2000), pytest.raises(UsageError, match="open"), ledger.block(2000):
        pass
    with ledger.block(2000), pytest.raises(UsageError, match="verify"):
        ledger.verify()
    with pytest.raises(UsageError, match="time"), ledger.block(1.5):
        pass


def test_read_only_storage_can_be_read(tmp_path):
    path = tmp_path / "ledger.db"
    audited(path).close()
    path.with_name("ledger.db.lock").unlink()
    path.chmod(0o444)
    with Ledger.read(path) as ledger:
        assert ledger.verify().ok


def test_client_and_server_sign(tmp_path):
    server, client = SigningKey.generate(), SigningKey.generate()
    with funded(tmp_path / "ledger.db", key=server) as ledger:
        unsigned = work("a", 1.0)
        text = work_text("tests", "run", 0, unsigned)
        signed = work("a", 1.0, signature=client.sign(text))
        stolen = work("b", 1.0, signature=signed.signature)
        with ledger.block(2000) as block:
            block.register("a", client.public_key)
            block.register("b", SigningKey.generate().public_key)
            receipts = block.pay_round("run", 0, [signed, stolen, work("keyless", 1.0)])
            with pytest.raises(UsageError, match="already"):
                block.register("a", server.public_key)
        assert receipts["a"].amount == receipts["keyless"].amount == 450_000
        assert receipts["b"].amount == 0
        assert "signature" in receipts["b"].reason
        assert not keys.is_signed(client.public_key, signed.signature + " " * 1000, text)
        # A receipt is for one round: the same one does not serve for the next.
        with ledger.block(2000) as block:
            assert block.pay_round("run", 1, [signed])["a"].amount == 0
        report = ledger.verify(with_receipts=True)
        assert report.ok
        assert report.signatures == "checked"
        assert report.receipts == 5
        assert "client" not in ledger.statement("b").lines[1].note
        line = ledger.statement("a").lines[1]
        assert keys.is_signed(client.public_key, line.note["client"], text)


def test_the_key_of_a_ledger_is_asked_for(tmp_path):
    key = SigningKey.generate()
    path = tmp_path / "ledger.db"
    funded(path, key=key).close()
    for other in (None, SigningKey.generate()):
        with pytest.raises(UsageError, match="key is not"):
            Ledger.open(path, key=other)
    key.save(tmp_path / "key")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    with pytest.raises(DestinationExists):
        key.save(tmp_path / "key")
    with Ledger.open(path, key=SigningKey.load(tmp_path / "key")) as ledger:
        assert ledger.public_key == key.public_key
    (tmp_path / "key").write_text("nonsense")
    with pytest.raises(CorruptData, match="private key"):
        SigningKey.load(tmp_path / "key")
    with pytest.raises(NotFound):
        SigningKey.load(tmp_path / "none")
    unsigned = tmp_path / "unsigned.db"
    funded(unsigned).close()
    with pytest.raises(UsageError, match="no key"):
        Ledger.open(unsigned, key=key)


def test_without_the_library_hashes_alone_are_checked_and_that_is_said(tmp_path, monkeypatch):
    path = tmp_path / "ledger.db"
    funded(path, key=SigningKey.generate()).close()
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    with Ledger.read(path) as ledger:
        report = ledger.verify()
        assert report.ok
        assert report.signatures == "unchecked"
        with pytest.raises(Missing, match="paceline\\[ledger\\]"):
            ledger.verify(with_receipts=True)
    with pytest.raises(Missing):
        SigningKey.generate()
    with audited(tmp_path / "unsigned.db") as ledger:
        assert ledger.verify(with_receipts=True).signatures == "none"


def test_a_statement_has_the_clients_own_lines_alone(tmp_path):
    with audited(tmp_path / "ledger.db") as ledger:
        made = ledger.statement("b")
        assert (made.spendable, made.held, made.stake) == (450_000, 0, 0)
        assert [line.kind for line in made.lines].count("pay") == 3
        assert made.lines[-1].note["reason"] == "replayed an update"
        text = made.to_text()
        for foreign in ("hospital", "675000", '"a"', "infrastructure"):
            assert foreign not in text
        unpaid = ledger.statement("c")
        assert [line.held for line in unpaid.lines] == [0, 0, 0]
        with pytest.raises(NotFound, match="no client nobody"):
            ledger.statement("nobody")


def test_the_head_is_that_of_the_last_block(ledger):
    head = ledger.head()
    assert head == Head(1, ledger.verify().head, 1000)
