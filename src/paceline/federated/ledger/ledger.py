"""A token ledger in one SQLite file: one writer, which adds blocks, and any number of readers.

    with Ledger.create(path, now_ms=now_ms) as ledger:
        with ledger.block(now_ms) as block:            # committed together, or not at all
            block.issue("hospital-a", 50 * MICRO_TOKENS, "invoice 17")
            block.deposit("run-1", "hospital-a", 40 * MICRO_TOKENS, "1")
            block.begin_run("run-1", RunTerms(budget_per_round=4 * MICRO_TOKENS, rounds=10))
        with ledger.block(now_ms) as block:
            block.pay_round("run-1", 0, works)
            block.release_due()

What operations mean is in `payments`; what SQLite itself enforces in `schema`. A ledger that was
damaged opens for reading only: `damage` names the first bad row.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from paceline.core.errors import CorruptData, DestinationExists, UsageError
from paceline.federated.ledger import database, queries
from paceline.federated.ledger.accounts import check_name
from paceline.federated.ledger.block import LedgerBlock
from paceline.federated.ledger.receipts import block_text
from paceline.federated.ledger.statement import (
    LedgerStatement,
    csv_lines,
    json_lines,
    statement,
)
from paceline.federated.ledger.transactions import NO_BLOCK, Block, text_hash
from paceline.federated.ledger.verify import check_ledger, check_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from paceline.federated.ledger.damage import Damage, ExpectedBlock, LedgerReport
    from paceline.federated.ledger.database import Connection
    from paceline.federated.ledger.keys import SigningKey
    from paceline.federated.ledger.payments import Payment

_LOG = logging.getLogger(__name__)
Check = Literal["all", "last"]


class Head(NamedTuple):
    """The last block: who has noted its hash elsewhere can tell if what led to it was changed.

    Attributes:
        number: from 0.
        hash: 64 hexadecimal digits.
        at_ms: milliseconds since 1970, or of a virtual clock.
    """

    number: int
    hash: str
    at_ms: int


class Ledger:
    """An open ledger; use it from one thread, and close it."""

    def __init__(
        self,
        sql: Connection,
        *,
        lock: int | None = None,
        key: SigningKey | None = None,
        damage: Damage | None = None,
    ) -> None:
        """Wrap a connection; use `create`, `open` or `read`."""
        self.path = sql.path
        self.damage = damage
        self._sql = sql
        self._lock = lock
        self._key = key
        self._settings = database.settings_of(sql)
        self._is_open = False
        self._has_warned = False  # that the clock went back

    @classmethod
    def create(
        cls, path: Path, *, now_ms: int, key: SigningKey | None = None, name: str = ""
    ) -> Ledger:
        """Make a new ledger and open it for writing.

        Args:
            path: of the new file.
            now_ms: milliseconds since 1970, or of a virtual clock.
            key: of the server, which signs blocks and payments; None: hashes alone chain them.
            name: identifies it in signatures; by default a random one. Must differ from any other
                ledger's that the same clients sign for.

        Raises:
            DestinationExists: a file is there.
            StorageError: it cannot be written.
        """
        name = check_name(name or secrets.token_hex(16), "a ledger")
        public_key = key.public_key if key else ""
        descriptor = database.lock(path)
        try:
            if path.exists():
                raise DestinationExists(
                    "a file is there already", where=str(path), fix="Open it, or name a new file"
                )
            # Under another name first: a ledger that is there has its first block.
            partial = path.with_name(path.name + ".partial")
            database.create(partial, {"ledger": name, "public_key": public_key})
            with (
                cls(database.open_writer(partial), lock=os.dup(descriptor), key=key) as begun,
                begun.block(now_ms) as block,
            ):
                block.begin_ledger(name, public_key)
            database.rename(partial, path)
            return cls(database.open_writer(path), lock=descriptor, key=key)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def open(cls, path: Path, *, key: SigningKey | None = None, check: Check = "all") -> Ledger:
        """Open a ledger for writing; a damaged one opens for reading, with `damage` set.

        Args:
            path: of the file.
            key: of the server, if the ledger has one.
            check: "all" verifies every row (seconds for each million), "last" the last block and
                the sum of all balances: for restarts between full verifications.

        Raises:
            NotFound: there is no such file.
            UsageError: another process writes to it, or the key is another one.
            CorruptData: it is no ledger, or damaged beyond reading.
        """
        settings = _settings_at(path)
        _check_key(path, settings["public_key"], key)
        descriptor = database.lock(path)
        try:
            sql = database.open_writer(path)
            with contextlib.ExitStack() as stack:
                stack.callback(sql.close)
                damage = check_tail(sql) if check == "last" else check_ledger(sql).damage
                if damage is None:
                    stack.pop_all()
                    return cls(sql, lock=descriptor, key=key)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        _LOG.error("%s is damaged and opens for reading only: %s", path, damage.text())
        return cls(database.open_reader(path), damage=damage)

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """Open a ledger for reading, also while another process writes; it is not verified.

        Raises:
            NotFound: there is no such file.
            CorruptData: it is no ledger.
        """
        return cls(database.open_reader(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and let another process write to it."""
        self._sql.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def name(self) -> str:
        """What identifies the ledger in signatures."""
        return self._settings["ledger"]

    @property
    def public_key(self) -> str:
        """The server's, 64 hexadecimal digits; empty if the ledger is not signed."""
        return self._settings["public_key"]

    def head(self) -> Head:
        """Return the last block."""
        return self._head()

    def balance(self, account: str) -> int:
        """Return the balance of an account in micro-tokens; 0 if it has no postings."""
        return queries.balance(self._sql, account)

    def balances(self) -> dict[str, int]:
        """Return all balances in micro-tokens by account; their sum is 0."""
        return dict(self._sql.rows("SELECT account, balance FROM balances ORDER BY account"))

    def held(self) -> list[Payment]:
        """Return all payments that wait for the end of their audit delay."""
        return queries.held_payments(self._sql)

    def statement(self, client: str) -> LedgerStatement:
        """Return a client's balances and transactions, and nobody else's; see `statement`."""
        return statement(self._sql, client)

    def verify(
        self,
        *,
        expected: ExpectedBlock | None = None,
        public_key: str | None = None,
        with_receipts: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> LedgerReport:
        """Verify every row; see `verify.check_ledger`.

        Raises:
            UsageError: a block is open: what it has added is not complete.
        """
        if self._is_open:
            raise UsageError(
                "cannot verify", where=str(self.path), why="a block is open", fix="End the block"
            )
        return check_ledger(
            self._sql,
            expected=expected,
            public_key=public_key,
            with_receipts=with_receipts,
            on_progress=on_progress,
        )

    def json_lines(self) -> Iterator[str]:
        """Yield all of the ledger as lines of JSON; see `statement.json_lines`."""
        return json_lines(self._sql)

    def csv_lines(self) -> Iterator[str]:
        """Yield all postings as lines of CSV."""
        return csv_lines(self._sql)

    @contextlib.contextmanager
    def block(self, now_ms: int) -> Iterator[LedgerBlock]:
        """Commit the operations of the context as one block; after an exception, none of them.

        Args:
            now_ms: milliseconds since 1970, or of a virtual clock. If it is before the last
                block's time, the clock went back: the block then takes the last one's time, so
                that order and audit delays hold, and a warning is logged.

        Raises:
            UsageError: the ledger is open for reading, or this process has begun a block already.
            CorruptData: the ledger is damaged.
            StorageError: the disk is full, or another program held the file for 10 s; nothing was
                written.
        """
        self._check_writable(now_ms)
        self._is_open = True
        try:
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                block = self._begin(now_ms)
                yield block
                self._end(block)
            except BaseException:
                self._sql.rollback()
                raise
        finally:
            self._is_open = False

    def _check_writable(self, now_ms: int) -> None:
        if self.damage is not None:
            raise CorruptData(
                "the ledger is damaged, and open for reading only",
                where=f"{self.path}: {self.damage.place()}",
                why=self.damage.reason,
                fix="Restore the file from a copy; what is in it can be exported",
            )
        if self._lock is None or self._is_open:
            raise UsageError(
                "cannot begin a block",
                where=str(self.path),
                why="the one before is open" if self._is_open else "the ledger is open for reading",
                fix="End the block before" if self._is_open else "Use Ledger.open",
            )
        if type(now_ms) is not int or now_ms < 0:
            raise UsageError(
                f"a block's time cannot be {now_ms!r}", fix="Give milliseconds, an integer"
            )

    def _head(self) -> Head:
        row = self._sql.row("SELECT number, hash, at_ms FROM blocks ORDER BY number DESC LIMIT 1")
        return Head(*row) if row else Head(-1, NO_BLOCK, 0)

    def _begin(self, now_ms: int) -> LedgerBlock:
        head = self._head()
        if now_ms < head.at_ms and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the clock went back by %d ms: block %d of %s takes the time of block %d",
                head.at_ms - now_ms,
                head.number + 1,
                self.path,
                head.number,
            )
        return LedgerBlock(
            self._sql,
            self._settings,
            self._key,
            head.number + 1,
            max(now_ms, head.at_ms),
        )

    def _end(self, open_block: LedgerBlock) -> None:
        """Chain the block to the one before and commit; without transactions there is no block."""
        if not open_block.hashes:
            self._sql.rollback()
            return
        block = Block(
            ledger=self.name,
            number=open_block.number,
            previous=self._head().hash,
            at_ms=open_block.at_ms,
            transactions=tuple(open_block.hashes),
        )
        hashed = text_hash(block.body())
        signature = self._key.sign(block_text(hashed)) if self._key else ""
        self._sql.execute(
            "INSERT INTO blocks VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                block.number,
                block.previous,
                block.at_ms,
                hashed,
                signature,
                open_block.last_transaction,
                open_block.last_posting,
            ),
        )
        self._sql.execute("COMMIT")


def _settings_at(path: Path) -> dict[str, str]:
    with contextlib.closing(database.open_reader(path)) as sql:
        return database.settings_of(sql)


def _check_key(path: Path, public_key: str, key: SigningKey | None) -> None:
    given = key.public_key if key else ""
    if given != public_key:
        raise UsageError(
            "the key is not the ledger's" if public_key else "the ledger has no key",
            where=str(path),
            why=f"it was made with the public key {public_key}"
            if public_key
            else "it was made without one",
            fix="Give the key that it was made with" if public_key else "Open it without a key",
        )
