"""Verification of a ledger: every row, in order, until the first that is not as it was written.

    1  the tables and triggers are those of a ledger; pages and indexes are as SQLite writes them
       (by its index of keys a ledger finds what was paid already), and values of their types
    2  rows are numbered without gaps; each transaction's hash is that of its body, and its columns
       and postings are what the body says
    3  each block's hash is that of its transactions and of the block before; times do not go back;
       the server signed it
    4  no balance ever falls below zero, no payment is settled twice or with another amount
    5  the derived tables (balances, held payments) are what the postings come to
    6  with `with_receipts`: clients and server signed what the transactions say

A row that was changed by itself is named. Who can write the file, and has the server's key, can
forge all rows after a block; who noted the hash of a later block elsewhere (`expected`) sees that.
Who has no key of the server can forge a whole ledger with one of his own: who knows the server's
(`public_key`) sees that.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from paceline.core.errors import CorruptData, StorageError
from paceline.federated.ledger import accounts, database, keys, receipts
from paceline.federated.ledger.damage import Damage, ExpectedBlock, LedgerReport
from paceline.federated.ledger.payments import RoundWork, RunTerms
from paceline.federated.ledger.transactions import (
    NO_BLOCK,
    Block,
    Posting,
    Transaction,
    parse_body,
    text_hash,
)

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator

    from paceline.federated.ledger.database import Connection

_PROGRESS_BLOCKS = 256


class _BlockRow(NamedTuple):
    number: int
    previous: str
    at_ms: int
    hash: str
    signature: str
    last_transaction: int
    last_posting: int


class _Found(Exception):
    """The first bad row was found."""

    def __init__(self, table: str, row: int | str, reason: str) -> None:
        super().__init__(reason)
        self.damage = Damage(table=table, row=str(row), reason=reason)


def check_ledger(
    sql: Connection,
    *,
    expected: ExpectedBlock | None = None,
    public_key: str | None = None,
    with_receipts: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> LedgerReport:
    """Verify every row of a ledger.

    Args:
        sql: a connection to it.
        expected: a block's hash that was noted elsewhere.
        public_key: by which the ledger must be signed, 64 hexadecimal digits.
        with_receipts: check the signatures of payments too: about 0.1 ms each.
        on_progress: is given blocks done and blocks in all.

    Returns:
        What was checked, and the first bad row if there is one.

    Raises:
        StorageError: the file cannot be read.
        Missing: `with_receipts` or `public_key`, and the library `cryptography` is not installed.
    """
    check = _Verification(sql, expected, with_receipts, public_key)
    damage = None
    try:
        sql.execute("BEGIN")  # one state of the file, whatever is written meanwhile
        check.run(on_progress or (lambda _done, _all: None))
    except _Found as found:
        damage = found.damage
    except StorageError:
        raise
    except CorruptData as problem:  # SQLite cannot read the page
        where = f"{check.table} after row {check.last_row}" if check.table else ""
        damage = Damage(table="file", row=where, reason=problem.why)
    finally:
        sql.rollback()
    return check.report(damage)


def check_tail(sql: Connection) -> Damage | None:
    """Verify the last block, and that balances are conserved; return the first bad row."""
    check = _Verification(sql, None, False, None)
    try:
        check.check_schema()
        check.check_settings()
        last = sql.row("SELECT MAX(number) FROM blocks")[0]
        if last is None:
            return Damage(table="blocks", row="0", reason="there is none")
        check.check_blocks(first=last)
        check.check_conserved()
    except _Found as found:
        return found.damage
    except CorruptData as problem:
        return Damage(table="file", row="", reason=problem.why)
    except (TypeError, AttributeError) as problem:  # only a damaged page has values of other types
        return Damage(table=check.table, row=str(check.last_row), reason=str(problem))
    return None


class _Verification:
    """One pass over the rows; counts what it has checked."""

    def __init__(
        self,
        sql: Connection,
        expected: ExpectedBlock | None,
        with_receipts: bool,
        expected_key: str | None,
    ) -> None:
        self.table = ""
        self.last_row: int | str = ""
        self._sql = sql
        self._expected = expected
        self._settings = database.settings_of(sql)
        self._public_key = self._settings["public_key"]
        self._signs = bool(self._public_key) and keys.signatures_available()
        self._with_receipts = with_receipts
        self._expected_key = expected_key
        if (with_receipts and self._public_key) or expected_key is not None:
            keys.require_signatures()
        self._counts = {"blocks": 0, "transactions": 0, "postings": 0}
        self._receipts = 0
        self._head = NO_BLOCK
        self._balances: dict[str, int] = {}
        self._last_posting = 0
        self._held: dict[tuple[Any, ...], tuple[int, int]] = {}
        self._terms: dict[str, RunTerms] = {}
        self._client_keys: dict[str, str] = {}

    def run(self, on_progress: Callable[[int, int], None]) -> None:
        """Check everything."""
        self.check_schema()
        found = self._sql.row("PRAGMA integrity_check(1)")[0]
        if found != "ok":
            raise _Found("file", "", str(found))
        self.check_settings()
        self.check_blocks(on_progress=on_progress)
        self._check_derived()
        expected = self._expected
        if expected is not None and expected.number >= self._counts["blocks"]:
            raise _Found("blocks", expected.number, "it is missing: it was noted elsewhere")

    def report(self, damage: Damage | None) -> LedgerReport:
        """Return what was checked."""
        unchecked = "unchecked" if self._public_key else "none"
        return LedgerReport(
            ledger=self._settings["ledger"],
            head=self._head,
            circulating=-self._balances.get(accounts.ISSUED, 0),
            signatures="checked" if self._signs else unchecked,
            receipts=self._receipts,
            damage=damage,
            public_key=self._public_key,
            is_expected_key=None
            if self._expected_key is None
            else self._public_key == self._expected_key,
            **self._counts,
        )

    def check_schema(self) -> None:
        """Compare tables and triggers with those of a ledger."""
        expected = database.expected_schema()
        with database.errors(self._sql.path):
            found = database.schema_of(self._sql.sql)
        for name in sorted({*expected, *found}):
            if found.get(name) != expected.get(name):
                how = "is missing" if name not in found else "was added or changed"
                raise _Found("schema", name, f"it {how}, so that rows could be changed")

    def check_settings(self) -> None:
        """Compare the settings with the first transaction, which the chain covers."""
        row = self._sql.row("SELECT body FROM transactions WHERE id = 1")
        if row is None:
            raise _Found("transactions", 1, "it is missing")
        note = self._parse(1, row[0]).note
        if self._expected_key not in (None, self._public_key):
            signed = f"signed by {self._public_key}" if self._public_key else "not signed"
            raise _Found("settings", "public_key", f"the ledger is {signed}")
        for key in ("ledger", "public_key"):
            if self._settings.get(key) != note.get(key):
                raise _Found("settings", key, "it is not what the first transaction says")

    def check_blocks(
        self, *, first: int = 0, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Check the blocks from `first` on; replay balances if that is all of them."""
        sql = self._sql.sql
        with database.errors(self._sql.path):
            before = self._before(first)
            total = sql.execute("SELECT COUNT(*) FROM blocks").fetchone()[0]
            transactions = self._transactions(sql, before)
            following = next(transactions, None)
            rows = sql.execute("SELECT * FROM blocks WHERE number >= ? ORDER BY number", (first,))
            for number, row in enumerate(itertools.starmap(_BlockRow, rows), first):
                self.table, self.last_row = "blocks", number
                if row.number != number:
                    raise _Found("blocks", number, "it is missing")
                if row.previous != before.hash:
                    raise _Found("blocks", number, "its previous hash is not the block before's")
                if row.at_ms < before.at_ms:
                    raise _Found("blocks", number, "its time is before that of the block before")
                hashes = []
                while following is not None and following[0] == number:
                    hashes.append(following[2])
                    if first == 0:
                        self._replay(following[1], row.at_ms)
                    following = next(transactions, None)
                self.table, self.last_row = "blocks", number
                self._check_block(row, before, hashes)
                before = row
                self._head = row.hash
                self._counts["blocks"] += 1
                if on_progress and number % _PROGRESS_BLOCKS == 0:
                    on_progress(number, total)
            if following is not None:
                raise _Found("blocks", following[0], "it is missing: a transaction is in it")

    def check_conserved(self) -> None:
        """Check that all balances sum to zero."""
        total = self._sql.row("SELECT COALESCE(SUM(balance), 0) FROM balances")[0]
        if total:
            raise _Found("balances", "", f"they sum to {total:,} micro-tokens in place of 0")

    def _before(self, first: int) -> _BlockRow:
        if first == 0:
            return _BlockRow(-1, "", 0, NO_BLOCK, "", 0, 0)
        row = self._sql.row("SELECT * FROM blocks WHERE number = ?", (first - 1,))
        if row is None:
            raise _Found("blocks", first - 1, "it is missing")
        return _BlockRow(*row)

    def _check_block(self, row: _BlockRow, before: _BlockRow, hashes: list[str]) -> None:
        number, stated = row.number, row.hash
        block = Block(
            ledger=self._settings["ledger"],
            number=number,
            previous=row.previous,
            at_ms=row.at_ms,
            transactions=tuple(hashes),
        )
        if text_hash(block.body()) != stated:
            raise _Found("blocks", number, "its hash is not that of its time and transactions")
        if row.last_transaction != before.last_transaction + len(hashes):
            raise _Found("blocks", number, "its last transaction is another one")
        if row.last_posting != self._last_posting:
            raise _Found("blocks", number, "its last posting is another one")
        if self._signs and not keys.is_signed(
            self._public_key, row.signature, receipts.block_text(stated)
        ):
            raise _Found("blocks", number, "its signature is not that of the ledger's key")
        expected = self._expected
        if expected is not None and expected.number == number and expected.hash != stated:
            raise _Found("blocks", number, "its hash is not the one that was noted elsewhere")

    def _transactions(
        self, sql: sqlite3.Connection, before: _BlockRow
    ) -> Iterator[tuple[int, Transaction, str]]:
        """Yield block, transaction and hash of each row, checked against its body and postings."""
        postings = sql.execute(
            "SELECT id, transaction_id, account, amount FROM postings WHERE id > ? ORDER BY id",
            (before.last_posting,),
        )
        waiting = postings.fetchone()
        posting_number = before.last_posting
        rows = sql.execute(
            "SELECT id, block, key, kind, body, hash FROM transactions WHERE id > ? ORDER BY id",
            (before.last_transaction,),
        )
        for number, (found, block, key, kind, body, stated) in enumerate(
            rows, before.last_transaction + 1
        ):
            self.table, self.last_row = "transactions", number
            self._last_posting = posting_number
            if found != number:
                raise _Found("transactions", number, "it is missing")
            if not body.isascii() or text_hash(body) != stated:
                raise _Found("transactions", number, "its hash is not that of its body")
            transaction = self._parse(number, body)
            if transaction.kind != kind or transaction.key_text != key:
                raise _Found("transactions", number, "its key or kind is not what its body says")
            for posting in transaction.postings:
                posting_number += 1
                if waiting != (posting_number, number, *posting):
                    self._name_posting(waiting, posting_number, number, posting)
                waiting = postings.fetchone()
            self._counts["transactions"] += 1
            self._counts["postings"] += len(transaction.postings)
            yield block, transaction, stated
        self._last_posting = posting_number
        if waiting is not None:
            raise _Found("postings", waiting[0], "no transaction's body has it")

    def _name_posting(
        self,
        row: tuple[int, int, str, int] | None,
        number: int,
        transaction: int,
        posting: Posting,
    ) -> NoReturn:
        """Name a posting's row that is not what the transaction's body says."""
        if row is None or row[0] != number:
            raise _Found("postings", number, "it is missing")
        raise _Found(
            "postings",
            number,
            f"it has {row[3]:,} micro-tokens for {row[2]} in transaction {row[1]}; the body of "
            f"transaction {transaction} has {posting.amount:,} for {posting.account}",
        )

    def _parse(self, number: int, body: str) -> Transaction:
        try:
            return parse_body(body)
        except ValueError as problem:
            raise _Found("transactions", number, str(problem)) from None

    def _replay(self, transaction: Transaction, at_ms: int) -> None:
        """Apply a transaction that follows all before it."""
        try:
            self._apply(transaction, at_ms)
        except (ValueError, LookupError, TypeError, AttributeError):
            self._refuse(f"its body is not what a transaction of kind {transaction.kind!r} has")

    def _apply(self, transaction: Transaction, at_ms: int) -> None:
        for account, amount in transaction.postings:
            balance = self._balances.get(account, 0) + amount
            self._balances[account] = balance
            if balance < 0 and account != accounts.ISSUED:
                self._refuse(f"{account} falls to {balance:,} micro-tokens")
        kind, key = transaction.kind, transaction.key
        if kind == "run":
            self._terms[str(key[1])] = RunTerms.from_json(transaction.note["terms"])
        elif kind == "client":
            self._client_keys[str(key[1])] = str(transaction.note["public_key"])
        elif kind == "pay":
            terms = self._terms[str(key[1])]
            amount = transaction.postings[0].amount if transaction.postings else 0
            if amount:
                self._held[key[1:]] = (-amount, at_ms + terms.audit_delay_ms)
            if self._with_receipts:
                self._check_receipts(transaction, -amount, terms)
        elif key[0] == "settle":
            self._check_settled(transaction, at_ms)

    def _check_settled(self, transaction: Transaction, at_ms: int) -> None:
        amount, release_ms = self._held.pop(transaction.key[1:], (0, 0))
        if amount != -transaction.postings[0].amount:
            self._refuse("it settles no payment that is within its audit delay")
        if transaction.kind == "release" and at_ms < release_ms:
            self._refuse("it releases a payment before the end of its audit delay")

    def _check_receipts(self, transaction: Transaction, amount: int, terms: RunTerms) -> None:
        _, run, number, client = transaction.key
        note = transaction.note
        work = RoundWork(
            client=str(client),
            score=0.0,
            update=str(note["update"]),
            samples=int(note["samples"]),  # type: ignore[arg-type]  # by its kind
        )
        place = (self._settings["ledger"], str(run), int(number), work)
        if self._public_key:
            text = receipts.payment_text(*place, amount, terms.audit_delay_ms)
            if not keys.is_signed(self._public_key, str(note.get("server", "")), text):
                self._refuse("the server's receipt is not signed with the ledger's key")
            self._receipts += 1
        if amount and work.client in self._client_keys:
            public_key = self._client_keys[work.client]
            if not keys.is_signed(
                public_key, str(note.get("client", "")), receipts.work_text(*place)
            ):
                self._refuse("the client's receipt is not signed with the client's key")
            self._receipts += 1

    def _refuse(self, reason: str) -> None:
        raise _Found("transactions", self.last_row, reason)

    def _check_derived(self) -> None:
        """Compare balances and held payments with what the postings come to."""
        rows = self._sql.rows("SELECT account, balance FROM balances")
        found: dict[Any, Any] = dict(rows)
        for account in sorted({*found, *self._balances}):
            if found.get(account, 0) != self._balances.get(account, 0):
                raise _Found(
                    "balances",
                    account,
                    f"it says {found.get(account, 0):,} micro-tokens, and the postings come to "
                    f"{self._balances.get(account, 0):,}",
                )
        rows = self._sql.rows("SELECT run, round, client, amount, release_ms FROM held")
        found = {(run, number, client): rest for run, number, client, *rest in rows}
        for key in sorted({*found, *self._held}):
            if list(found.get(key, ())) != list(self._held.get(key, ())):
                place = json.dumps(key)
                raise _Found("held", place, "it is not what the payments come to")
