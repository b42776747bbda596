"""A damaged ledger opens for reading only, and the first bad row is named with the reason."""

import json
import random
import shutil
import sqlite3
from contextlib import closing

import pytest
from support.ledgers import audited

from paceline.core.errors import CorruptData
from paceline.federated.ledger import ExpectedBlock, Ledger, SigningKey
from paceline.federated.ledger.transactions import Block, text_hash


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "ledger.db"
    audited(path, key=SigningKey.from_seed(b"k" * 32)).close()
    return path


@pytest.fixture
def path(intact, tmp_path):
    return shutil.copy(intact, tmp_path / "ledger.db")


def change(path, *statements):
    """Change rows as somebody does who may write the file, and puts the triggers back."""
    with closing(sqlite3.connect(path)) as sql, sql:
        triggers = sql.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'")
        triggers = triggers.fetchall()
        for name, _ in triggers:
            sql.execute(f"DROP TRIGGER {name}")
        for statement in statements:
            assert sql.execute(statement).rowcount == 1, statement
        for _, text in triggers:
            sql.execute(text)


def damage_of(path, **options):
    with Ledger.read(path) as ledger:
        return ledger.verify(**options).damage


def test_an_intact_ledger_is_verified(path):
    with Ledger.read(path) as ledger:
        report = ledger.verify(with_receipts=True)
    assert report.ok
    assert (report.blocks, report.transactions, report.receipts) == (6, 24, 9)
    assert report.circulating == 35_000_000
    assert report.signatures == "checked"


CHANGES = [
    # (statement, table, row, part of the reason)
    ("UPDATE postings SET amount = amount + 1 WHERE id = 9", "postings", "9", "the body of"),
    ("UPDATE postings SET account = 'client:x' WHERE id = 9", "postings", "9", "client:x"),
    ("UPDATE postings SET transaction_id = 3 WHERE id = 9", "postings", "9", "transaction 3"),
    ("DELETE FROM postings WHERE id = 9", "postings", "9", "missing"),
    ("INSERT INTO postings VALUES (900, 24, 'client:x', 5)", "postings", "900", "no transaction"),
    ("UPDATE transactions SET body = body || ' ' WHERE id = 7", "transactions", "7", "hash"),
    ("UPDATE transactions SET hash = upper(hash) WHERE id = 7", "transactions", "7", "hash"),
    ("UPDATE transactions SET kind = 'gift' WHERE id = 7", "transactions", "7", "key or kind"),
    ("UPDATE transactions SET key = '[1]' WHERE id = 7", "transactions", "7", "key or kind"),
    ("DELETE FROM transactions WHERE id = 7", "transactions", "7", "missing"),
    ("UPDATE transactions SET block = 3 WHERE id = 7", "blocks", "2", "hash"),
    ("UPDATE blocks SET previous = hash WHERE number = 3", "blocks", "3", "previous"),
    ("UPDATE blocks SET hash = previous WHERE number = 3", "blocks", "3", "hash"),
    ("UPDATE blocks SET at_ms = at_ms + 1 WHERE number = 3", "blocks", "3", "hash"),
    ("UPDATE blocks SET at_ms = 1 WHERE number = 3", "blocks", "3", "time"),
    ("UPDATE blocks SET signature = '00' WHERE number = 3", "blocks", "3", "signature"),
    ("UPDATE blocks SET last_posting = 3 WHERE number = 3", "blocks", "3", "last posting"),
    ("UPDATE blocks SET last_transaction = 3 WHERE number = 3", "blocks", "3", "last transaction"),
    ("DELETE FROM blocks WHERE number = 3", "blocks", "3", "missing"),
    ("DELETE FROM blocks WHERE number = 5", "blocks", "5", "missing"),
    ("UPDATE balances SET balance = 1 WHERE account = 'slashed'", "balances", "slashed", "1"),
    ("DELETE FROM balances WHERE account = 'slashed'", "balances", "slashed", "0"),
    ("INSERT INTO balances VALUES ('client:x', 5)", "balances", "client:x", "5"),
    ("DELETE FROM held WHERE client = 'a'", "held", '["run", 2, "a"]', "come to"),
    ("UPDATE held SET release_ms = 0 WHERE client = 'a'", "held", '["run", 2, "a"]', "come to"),
    ("UPDATE settings SET value = 'x' WHERE key = 'ledger'", "settings", "ledger", "first"),
    ("UPDATE settings SET value = '' WHERE key = 'public_key'", "settings", "public_key", "first"),
]


@pytest.mark.parametrize(("statement", "table", "row", "reason"), CHANGES)
def test_a_changed_row_is_named(path, statement, table, row, reason):
    change(path, statement)
    damage = damage_of(path)
    assert damage is not None
    assert (damage.table, damage.row) == (table, row), damage.text()
    assert reason in damage.reason


@pytest.mark.parametrize(
    ("statement", "name", "reason"),
    [
        ("DROP TRIGGER postings_delete", "postings_delete", "missing"),
        ("CREATE TABLE more (x)", "more", "added"),
        ("DROP INDEX held_by_client", "held_by_client", "missing"),
    ],
)
def test_a_changed_schema_is_named(path, statement, name, reason):
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute(statement)
    damage = damage_of(path)
    assert (damage.table, damage.row) == ("schema", name)
    assert reason in damage.reason


def test_the_first_of_several_bad_rows_is_named(path):
    change(
        path,
        "UPDATE postings SET amount = 7 WHERE id = 20",
        "UPDATE postings SET amount = 7 WHERE id = 11",
        "UPDATE transactions SET kind = 'x' WHERE id = 20",
    )
    assert damage_of(path).place() == "postings row 11"


def test_a_damaged_ledger_opens_for_reading_only(path, caplog):
    change(path, "UPDATE postings SET amount = amount + 1 WHERE id = 9")
    with Ledger.open(path, key=SigningKey.from_seed(b"k" * 32)) as ledger:
        assert "postings row 9" in caplog.text
        assert ledger.damage.place() == "postings row 9"
        with pytest.raises(CorruptData, match="reading only") as caught, ledger.block(9000):
            pass
        assert "postings row 9" in caught.value.where
        assert ledger.statement("a").lines  # what can be read still can
        assert len(list(ledger.json_lines())) == 7
        # No lock is held: a copy that is put in its place can be opened.
        with Ledger.open(path, key=SigningKey.from_seed(b"k" * 32)) as other:
            assert other.damage == ledger.damage


def test_the_check_of_the_last_block_finds_damage_there(path):
    change(
        path, "UPDATE postings SET amount = -225001 WHERE id = (SELECT MAX(id) - 1 FROM postings)"
    )
    with Ledger.open(path, key=SigningKey.from_seed(b"k" * 32), check="last") as ledger:
        assert ledger.damage.table == "postings"


def _rehash(path):
    """Compute all hashes anew from the bodies, as they are now."""
    with closing(sqlite3.connect(path)) as sql:
        bodies = sql.execute("SELECT id, body FROM transactions ORDER BY id").fetchall()
        blocks = sql.execute("SELECT number, at_ms, last_transaction FROM blocks").fetchall()
    statements, previous, before = [], "0" * 64, 0
    for number, body in bodies:
        hashed = text_hash(body)
        statements.append(f"UPDATE transactions SET hash = '{hashed}' WHERE id = {number}")
    for number, at_ms, last in blocks:
        hashes = tuple(text_hash(body) for row, body in bodies if before < row <= last)
        block = Block(
            ledger="tests", number=number, previous=previous, at_ms=at_ms, transactions=hashes
        )
        hashed, before = text_hash(block.body()), last
        statements.append(
            f"UPDATE blocks SET hash = '{hashed}', previous = '{previous}' WHERE number = {number}"
        )
        previous = hashed
    change(path, *statements)


def _forge(path):
    """Give client a's pay to client z, and compute all hashes anew."""
    with closing(sqlite3.connect(path)) as sql:
        held = sql.execute("SELECT id FROM transactions WHERE instr(body, ':a\"')").fetchall()
        posted = sql.execute("SELECT id, account FROM postings WHERE account LIKE '%:a'").fetchall()
        balances = sql.execute("SELECT account FROM balances WHERE account LIKE '%:a'").fetchall()
    change(
        path,
        *(
            f"UPDATE transactions SET body = replace(replace(body, ':a\"', ':z\"'), ',\"a\"]',"
            f" ',\"z\"]'), key = replace(key, ',\"a\"]', ',\"z\"]') WHERE id = {number}"
            for (number,) in held
        ),
        *(
            f"UPDATE postings SET account = '{account[:-1]}z' WHERE id = {number}"
            for number, account in posted
        ),
        *(
            f"UPDATE balances SET account = '{account[:-1]}z' WHERE account = '{account}'"
            for (account,) in balances
        ),
        "UPDATE held SET client = 'z' WHERE client = 'a'",
    )
    _rehash(path)


@pytest.mark.parametrize(
    "body",
    [
        '{"key":["pay","run",0,"c"],"kind":"run","note":{},"postings":[]}',
        '{"key":["pay","run",0,"c"],"kind":"run","note":{"terms":{"x":1}},"postings":[]}',
        '{"key":["pay","run",0,"c"],"kind":"client","note":[],"postings":[]}',
        '{"key":["pay"],"kind":"pay","note":{},"postings":[]}',
        '{"key":["settle","run",0,"c"],"kind":"release","note":{},"postings":[]}',
        '{"key":[],"kind":"pay","note":{},"postings":[]}',
    ],
)
def test_a_body_that_makes_no_sense_is_named_even_if_all_hashes_are_right(tmp_path, body):
    path = tmp_path / "ledger.db"
    with audited(path) as ledger:
        unpaid = '["pay","run",0,"c"]'
        number = ledger._sql.row("SELECT id FROM transactions WHERE key = ?", (unpaid,))[0]
    key, kind = json.dumps(json.loads(body)["key"], separators=(",", ":")), json.loads(body)["kind"]
    change(
        path,
        f"UPDATE transactions SET body = '{body}', key = '{key}', kind = '{kind}'"
        f" WHERE id = {number}",
    )
    _rehash(path)
    damage = damage_of(path)
    assert damage.place() == f"transactions row {number}", damage.text()


def test_a_forged_ledger_has_not_the_servers_signatures(path):
    _forge(path)
    damage = damage_of(path)
    assert damage.place() == "blocks row 2"
    assert "signature" in damage.reason


def test_without_a_key_a_forged_ledger_is_found_by_a_hash_noted_elsewhere(tmp_path):
    path = tmp_path / "ledger.db"
    with audited(path) as ledger:
        head = ledger.head()
    _forge(path)
    assert damage_of(path) is None  # hashes alone cannot show it: the guide says so
    damage = damage_of(path, expected=ExpectedBlock(head.number, head.hash))
    assert damage.place() == f"blocks row {head.number}"
    assert "noted elsewhere" in damage.reason
    beyond = damage_of(path, expected=ExpectedBlock(99, head.hash))
    assert beyond.place() == "blocks row 99"


def test_pages_that_cannot_be_read_are_damage_too(intact, tmp_path):
    """Other bytes in the file: an error of ours or damage that is named, nothing else."""
    rng = random.Random(5)
    content = intact.read_bytes()
    outcomes = set()
    for case in range(100):
        path = tmp_path / f"{case}.db"
        damaged = bytearray(content)
        place = rng.randrange(100, len(content) - 64)
        count = rng.choice((1, 8, 64))
        damaged[place : place + count] = rng.randbytes(count) if case % 2 else b"7" * count
        path.write_bytes(damaged)
        try:
            with Ledger.read(path) as ledger:
                damage = ledger.verify().damage
                outcomes.add(damage.table if damage else "unused bytes")
        except CorruptData:
            outcomes.add("unreadable")
    assert {"transactions", "file", "unused bytes"} <= outcomes


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE postings SET amount = 1",
        "UPDATE transactions SET kind = 'x'",
        "UPDATE blocks SET at_ms = 1",
        "UPDATE settings SET value = 'x'",
        "DELETE FROM postings",
        "DELETE FROM transactions",
        "DELETE FROM blocks",
        "DELETE FROM settings",
        "INSERT INTO settings VALUES ('more', 'x')",
        "INSERT OR REPLACE INTO settings VALUES ('ledger', 'x')",
        "INSERT OR REPLACE INTO blocks SELECT number, previous, 1, hash, signature,"
        " last_transaction, last_posting FROM blocks WHERE number = 1",
        "INSERT OR REPLACE INTO transactions SELECT id, block, key, 'x', body, hash"
        " FROM transactions WHERE id = 3",
        "INSERT OR REPLACE INTO transactions SELECT (SELECT MAX(id) + 1 FROM transactions), 6, key,"
        " 'x', body, hash FROM transactions WHERE id = 3",
        "INSERT OR REPLACE INTO postings VALUES (3, 4, 'client:x', 5)",
        "INSERT INTO postings VALUES ((SELECT MAX(id) + 1 FROM postings), 24, 'client:x', 5)",
        "INSERT INTO blocks VALUES (6, 'x', 9000, 'x', '', 24, 44)",
        "INSERT INTO postings VALUES ((SELECT MAX(id) + 1 FROM postings), 24, 'a', 'text')",
    ],
)
def test_the_database_itself_only_grows(path, statement):
    with closing(sqlite3.connect(path)) as sql, pytest.raises(sqlite3.IntegrityError):
        sql.execute(statement)
    assert damage_of(path) is None


def test_the_database_itself_refuses_what_does_not_add_up(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as sql:
        sql.execute("BEGIN")
        sql.execute("INSERT INTO transactions VALUES (25, 6, '[9]', 'gift', '{}', 'x')")
        last = sql.execute("SELECT MAX(id) FROM postings").fetchone()[0]
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            sql.execute(f"INSERT INTO postings VALUES ({last + 1}, 25, 'client:poor', -5)")
        sql.execute(f"INSERT INTO postings VALUES ({last + 1}, 25, 'client:x', 5)")
        with pytest.raises(sqlite3.IntegrityError, match="sum to zero"):
            sql.execute(f"INSERT INTO blocks VALUES (6, 'x', 9000, 'x', '', 25, {last + 1})")
        sql.execute(f"INSERT INTO postings VALUES ({last + 2}, 25, 'issued', -5)")
        sql.execute(f"INSERT INTO blocks VALUES (6, 'x', 9000, 'x', '', 25, {last + 2})")
        sql.execute("ROLLBACK")
