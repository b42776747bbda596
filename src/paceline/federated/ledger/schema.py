"""The tables of a ledger, and the triggers by which the database itself refuses to forget.

::

    settings       key, value                            id, format, public key; written once
    blocks         number, previous, at_ms, hash,        with the last rows that are part of it
                   signature, last_transaction, last_posting
    transactions   id, block, key, kind, body, hash      `body` is what was hashed
    postings       id, transaction_id, account, amount   the body's postings, for sums
    balances       account, balance                      derived from postings, by a trigger
    held           run, round, client, ...               derived: payments within their audit delay

The first four only grow: a trigger refuses every UPDATE and DELETE, a row whose number is not the
next one (so that INSERT OR REPLACE replaces nothing), and rows for a block that is complete. Its
row in `blocks` completes a block; it is refused while postings of a transaction do not sum to zero.
A balance below zero violates a CHECK. All this holds for whatever program writes; who drops a
trigger first is found by `verify`.
"""

from __future__ import annotations

FORMAT = 1

_TABLES = (
    "CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID",
    """CREATE TABLE blocks (
    number INTEGER PRIMARY KEY, previous TEXT NOT NULL, at_ms INTEGER NOT NULL,
    hash TEXT NOT NULL, signature TEXT NOT NULL, last_transaction INTEGER NOT NULL,
    last_posting INTEGER NOT NULL) STRICT""",
    """CREATE TABLE transactions (
    id INTEGER PRIMARY KEY, block INTEGER NOT NULL, key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL) STRICT""",
    """CREATE TABLE postings (
    id INTEGER PRIMARY KEY, transaction_id INTEGER NOT NULL, account TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount <> 0)) STRICT""",
    """CREATE TABLE balances (
    account TEXT PRIMARY KEY, balance INTEGER NOT NULL
    CHECK (balance >= 0 OR (account = 'issued' AND balance >= -4611686018427387904))
    ) STRICT, WITHOUT ROWID""",
    """CREATE TABLE held (
    run TEXT NOT NULL, round INTEGER NOT NULL, client TEXT NOT NULL, amount INTEGER NOT NULL,
    release_ms INTEGER NOT NULL, PRIMARY KEY (run, round, client)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX held_by_release ON held (release_ms)",
    "CREATE INDEX held_by_client ON held (client)",
)
# By table: what a new row must not be, and what the refusal says.
_REFUSED = {
    "settings": (
        """EXISTS (SELECT 1 FROM settings WHERE key = NEW.key) OR EXISTS (SELECT 1 FROM blocks)""",
        "settings are written once",
    ),
    "blocks": (
        """NEW.number <> (SELECT COALESCE(MAX(number), -1) + 1 FROM blocks)
    OR NEW.last_transaction <> (SELECT MAX(id) FROM transactions)
    OR NEW.last_transaction =
        (SELECT MAX(last_transaction) FROM blocks WHERE number = NEW.number - 1)
    OR NEW.last_posting <> (SELECT COALESCE(MAX(id), 0) FROM postings)
    OR EXISTS (SELECT 1 FROM postings WHERE id >
                   (SELECT COALESCE(MAX(last_posting), 0) FROM blocks WHERE number = NEW.number - 1)
               GROUP BY transaction_id HAVING SUM(amount) <> 0)""",
        "not the next block, or one whose postings do not sum to zero",
    ),
    "transactions": (
        """NEW.id <> (SELECT COALESCE(MAX(id), 0) + 1 FROM transactions)
    OR NEW.block <> (SELECT COALESCE(MAX(number), -1) + 1 FROM blocks)
    OR EXISTS (SELECT 1 FROM transactions WHERE key = NEW.key)""",
        "not the next transaction, or a key that there is already",
    ),
    "postings": (
        """NEW.id <> (SELECT COALESCE(MAX(id), 0) + 1 FROM postings)
    OR NEW.transaction_id NOT BETWEEN
        (SELECT last_transaction + 1 FROM blocks ORDER BY number DESC LIMIT 1)
        AND (SELECT MAX(id) FROM transactions)""",
        "not the next posting, or one of a block that is complete",
    ),
}
_BALANCE = """CREATE TRIGGER postings_balance AFTER INSERT ON postings
BEGIN
    INSERT INTO balances SELECT NEW.account, 0
        WHERE NOT EXISTS (SELECT 1 FROM balances WHERE account = NEW.account);
    UPDATE balances SET balance = balance + NEW.amount WHERE account = NEW.account;
END"""


def statements() -> list[str]:
    """Return the statements that make an empty ledger, in order."""
    made = list(_TABLES)
    for table, (refused, reason) in _REFUSED.items():
        made += [
            f"CREATE TRIGGER {table}_{verb.lower()} BEFORE {verb} ON {table}\n"
            f"BEGIN SELECT RAISE(ABORT, 'a ledger only grows: {table} refuse {verb}'); END"
            for verb in ("UPDATE", "DELETE")
        ]
        made.append(
            f"CREATE TRIGGER {table}_next BEFORE INSERT ON {table}\nWHEN {refused}\n"
            f"BEGIN SELECT RAISE(ABORT, '{reason}'); END"
        )
    return [*made, _BALANCE]
