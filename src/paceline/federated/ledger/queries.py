"""What a ledger's tables hold, for the block that is being made and for readers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paceline.federated.ledger import accounts
from paceline.federated.ledger.payments import Payment
from paceline.federated.ledger.transactions import canonical_json

if TYPE_CHECKING:
    from paceline.federated.ledger.database import Connection


def balance(sql: Connection, account: str) -> int:
    """Return the balance of an account in micro-tokens; 0 if it has no postings."""
    row = sql.row("SELECT balance FROM balances WHERE account = ?", (account,))
    return int(row[0]) if row else 0


def body_of(sql: Connection, key: tuple[str | int, ...]) -> str | None:
    """Return the body of the transaction with a key, or None."""
    text = canonical_json(list(key))
    row = sql.row("SELECT body FROM transactions WHERE key = ?", (text,))
    return row[0] if row else None


def deposits(sql: Connection, run: str) -> dict[str, int]:
    """Return what each consumer deposited for a run, in micro-tokens."""
    # Keys are JSON lists: those of the run's deposits are neighbours in the index.
    prefix = canonical_json(["deposit", run]).removesuffix("]") + ","
    sums: dict[str, int] = {}
    rows = sql.rows(
        "SELECT key, amount FROM transactions JOIN postings "
        "ON transaction_id = transactions.id AND account = ? WHERE key >= ? AND key < ?",
        (accounts.TREASURY, prefix, prefix + "\x7f"),
    )
    for key, amount in rows:
        client = json.loads(key)[2]
        sums[client] = sums.get(client, 0) + amount
    return sums


def held_payments(sql: Connection) -> list[Payment]:
    """Return all payments within their audit delay, by release."""
    return _payments(sql, "TRUE", ())


def due_payments(sql: Connection, at_ms: int) -> list[Payment]:
    """Return the payments that may be released at a time, in milliseconds."""
    return _payments(sql, "release_ms <= ?", (at_ms,))


def payments_of(sql: Connection, client: str) -> list[Payment]:
    """Return a client's payments within their audit delay."""
    return _payments(sql, "client = ?", (client,))


def payment_for(sql: Connection, run: str, number: int, client: str) -> Payment | None:
    """Return a client's payment for a round, if it is within its audit delay."""
    found = _payments(sql, "run = ? AND round = ? AND client = ?", (run, number, client))
    return found[0] if found else None


def _payments(sql: Connection, condition: str, values: tuple[str | int, ...]) -> list[Payment]:
    rows = sql.rows(
        "SELECT run, round, client, amount, release_ms FROM held "
        f"WHERE {condition} ORDER BY release_ms, run, round, client",
        values,
    )
    return [
        Payment(run=run, round=number, client=client, amount=amount, release_ms=release_ms)
        for run, number, client, amount, release_ms in rows
    ]
