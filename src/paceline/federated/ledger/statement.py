"""What a ledger tells a client about itself, and what it tells its operator: everything.

A statement has only the client's own transactions. Each of them concerns at most one client, so
that nothing in it says what others earned or how they were scored.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.core.errors import NotFound
from paceline.core.record import Record
from paceline.federated.ledger import accounts, database
from paceline.federated.ledger.transactions import canonical_json, parse_body

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.federated.ledger.database import Connection

# At which place of a transaction's key its client stands, by the key's first word.
_CLIENT_AT = {
    "client": 1,
    "issue": 1,
    "stake": 1,
    "unstake": 1,
    "slash stake": 1,
    "deposit": 2,
    "reimburse": 2,
    "pay": 3,
    "settle": 3,
}
_OF_ROUNDS = ("pay", "settle")
_OF_RUNS = ("deposit", "reimburse", *_OF_ROUNDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class StatementLine(Record):
    """One of a client's transactions.

    Attributes:
        block: that it is in.
        at_ms: time of the block, milliseconds since 1970 or of a virtual clock.
        kind: issue, deposit, pay, release, slash, ...
        run: that it is about, or None.
        round: that it is about, or None.
        spendable: change of what the client may spend, in micro-tokens.
        held: change of its pay within the audit delay.
        stake: change of its stake.
        note: what it rests on: hash of the update, claimed samples, signatures, a reason.
        hash: of the transaction.
    """

    block: int
    at_ms: int
    kind: str
    run: str | None
    round: int | None
    spendable: int
    held: int
    stake: int
    note: dict[str, str | int]
    hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerStatement(Record):
    """A client's balances, and all its transactions.

    Attributes:
        ledger: name of the ledger.
        public_key: of the server, for its signatures; empty if it signs nothing.
        client: whose statement it is.
        spendable: in micro-tokens, as `held` and `stake`.
        held: pay within its audit delay.
        stake: that it has put up.
        lines: its transactions, oldest first.
    """

    ledger: str
    public_key: str
    client: str
    spendable: int
    held: int
    stake: int
    lines: tuple[StatementLine, ...]


def statement(sql: Connection, client: str) -> LedgerStatement:
    """Return a client's statement.

    Raises:
        NotFound: the ledger has nothing about such a client.
        CorruptData: one of its rows cannot be read.
    """
    settings = database.settings_of(sql)
    # The scan for the name in keys is SQLite's; that it is the client's place is seen below.
    rows = sql.rows(
        "SELECT block, blocks.at_ms, key, body, transactions.hash FROM transactions "
        "JOIN blocks ON blocks.number = block WHERE instr(key, ?) ORDER BY id",
        (canonical_json(client),),
    )
    lines = []
    for block, at_ms, key, body, hashed in rows:
        with database.readable_rows(sql.path):
            words = json.loads(key)
            place = _CLIENT_AT.get(words[0])
            is_own = place is not None and words[place] == client
        if is_own:
            lines.append(_line(sql, client, block, at_ms, words, body, hashed))
    if not lines:
        raise NotFound(
            f"the ledger has no client {client}",
            where=str(sql.path),
            fix="Give the id with which the client takes part",
        )
    return LedgerStatement(
        ledger=settings["ledger"],
        public_key=settings["public_key"],
        client=client,
        spendable=sum(line.spendable for line in lines),
        held=sum(line.held for line in lines),
        stake=sum(line.stake for line in lines),
        lines=tuple(lines),
    )


def json_lines(sql: Connection) -> Iterator[str]:
    """Yield the ledger as lines of JSON: its settings, then each block with its transactions.

    A block's ``transactions`` are bodies, as they were hashed: SHA-256 of each is what the block's
    hash is made of (`transactions.Block`).
    """
    yield canonical_json(dict(database.settings_of(sql)))
    with database.errors(sql.path):
        for number, previous, at_ms, hashed, signature, *_ in sql.sql.execute(
            "SELECT * FROM blocks ORDER BY number"
        ):
            bodies = sql.rows(
                "SELECT body FROM transactions WHERE id > ? AND id <= ? ORDER BY id",
                _span(sql, number),
            )
            yield canonical_json(
                {
                    "number": number,
                    "previous": previous,
                    "at_ms": at_ms,
                    "hash": hashed,
                    "signature": signature,
                    "transactions": [body for (body,) in bodies],
                }
            )


def csv_lines(sql: Connection) -> Iterator[str]:
    """Yield the ledger's postings as lines of CSV, for spreadsheets; amounts in micro-tokens."""
    yield "block,at_ms,transaction,kind,key,account,amount"
    with database.errors(sql.path):
        for row in sql.sql.execute(
            "SELECT block, at_ms, transaction_id, kind, key, account, amount FROM postings "
            "JOIN transactions ON transactions.id = transaction_id "
            "JOIN blocks ON blocks.number = block ORDER BY postings.id"
        ):
            buffer = io.StringIO()
            csv.writer(buffer, lineterminator="").writerow(row)
            yield buffer.getvalue()


def _span(sql: Connection, number: int) -> tuple[int, int]:
    """Return the last transaction before a block, and its own last one."""
    rows = sql.rows(
        "SELECT last_transaction FROM blocks WHERE number IN (?, ?) ORDER BY number",
        (number - 1, number),
    )
    return (rows[0][0] if len(rows) > 1 else 0), rows[-1][0]


def _line(
    sql: Connection, client: str, block: int, at_ms: int, key: list[Any], body: str, hashed: str
) -> StatementLine:
    with database.readable_rows(sql.path):
        transaction = parse_body(body)
    changes = dict(transaction.postings)
    return StatementLine(
        block=block,
        at_ms=at_ms,
        kind=transaction.kind,
        run=key[1] if key[0] in _OF_RUNS else None,
        round=key[2] if key[0] in _OF_ROUNDS else None,
        spendable=changes.get(accounts.spendable(client), 0),
        held=changes.get(accounts.held_pay(client), 0),
        stake=changes.get(accounts.stake(client), 0),
        note={
            name: value for name, value in transaction.note.items() if isinstance(value, str | int)
        },
        hash=hashed,
    )
