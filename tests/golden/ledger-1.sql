CREATE TABLE settings (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE blocks (
    number INTEGER PRIMARY KEY, previous TEXT NOT NULL, at_ms INTEGER NOT NULL,
    hash TEXT NOT NULL, signature TEXT NOT NULL, last_transaction INTEGER NOT NULL,
    last_posting INTEGER NOT NULL) STRICT;
CREATE TABLE transactions (
    id INTEGER PRIMARY KEY, block INTEGER NOT NULL, key TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL, body TEXT NOT NULL, hash TEXT NOT NULL) STRICT;
CREATE TABLE postings (
    id INTEGER PRIMARY KEY, transaction_id INTEGER NOT NULL, account TEXT NOT NULL,
    amount INTEGER NOT NULL CHECK (amount <> 0)) STRICT;
CREATE TABLE balances (
    account TEXT PRIMARY KEY, balance INTEGER NOT NULL
    CHECK (balance >= 0 OR (account = 'issued' AND balance >= -4611686018427387904))
    ) STRICT, WITHOUT ROWID;
CREATE TABLE held (
    run TEXT NOT NULL, round INTEGER NOT NULL, client TEXT NOT NULL, amount INTEGER NOT NULL,
    release_ms INTEGER NOT NULL, PRIMARY KEY (run, round, client)) STRICT, WITHOUT ROWID;
CREATE INDEX held_by_release ON held (release_ms);
CREATE INDEX held_by_client ON held (client);
CREATE TRIGGER settings_update BEFORE UPDATE ON settings
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: settings refuse UPDATE'); END;
CREATE TRIGGER settings_delete BEFORE DELETE ON settings
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: settings refuse DELETE'); END;
CREATE TRIGGER settings_next BEFORE INSERT ON settings
WHEN EXISTS (SELECT 1 FROM settings WHERE key = NEW.key) OR EXISTS (SELECT 1 FROM blocks)
BEGIN SELECT RAISE(ABORT, 'settings are written once'); END;
CREATE TRIGGER blocks_update BEFORE UPDATE ON blocks
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: blocks refuse UPDATE'); END;
CREATE TRIGGER blocks_delete BEFORE DELETE ON blocks
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: blocks refuse DELETE'); END;
CREATE TRIGGER blocks_next BEFORE INSERT ON blocks
WHEN NEW.number <> (SELECT COALESCE(MAX(number), -1) + 1 FROM blocks)
    OR NEW.last_transaction <> (SELECT MAX(id) FROM transactions)
    OR NEW.last_transaction =
        (SELECT MAX(last_transaction) FROM blocks WHERE number = NEW.number - 1)
    OR NEW.last_posting <> (SELECT COALESCE(MAX(id), 0) FROM postings)
    OR EXISTS (SELECT 1 FROM postings WHERE id >
                   (SELECT COALESCE(MAX(last_posting), 0) FROM blocks WHERE number = NEW.number - 1)
               GROUP BY transaction_id HAVING SUM(amount) <> 0)
BEGIN SELECT RAISE(ABORT, 'not the next block, or one whose postings do not sum to zero'); END;
CREATE TRIGGER transactions_update BEFORE UPDATE ON transactions
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: transactions refuse UPDATE'); END;
CREATE TRIGGER transactions_delete BEFORE DELETE ON transactions
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: transactions refuse DELETE'); END;
CREATE TRIGGER transactions_next BEFORE INSERT ON transactions
WHEN NEW.id <> (SELECT COALESCE(MAX(id), 0) + 1 FROM transactions)
    OR NEW.block <> (SELECT COALESCE(MAX(number), -1) + 1 FROM blocks)
    OR EXISTS (SELECT 1 FROM transactions WHERE key = NEW.key)
BEGIN SELECT RAISE(ABORT, 'not the next transaction, or a key that there is already'); END;
CREATE TRIGGER postings_update BEFORE UPDATE ON postings
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: postings refuse UPDATE'); END;
CREATE TRIGGER postings_delete BEFORE DELETE ON postings
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: postings refuse DELETE'); END;
CREATE TRIGGER postings_next BEFORE INSERT ON postings
WHEN NEW.id <> (SELECT COALESCE(MAX(id), 0) + 1 FROM postings)
    OR NEW.transaction_id NOT BETWEEN
        (SELECT last_transaction + 1 FROM blocks ORDER BY number DESC LIMIT 1)
        AND (SELECT MAX(id) FROM transactions)
BEGIN SELECT RAISE(ABORT, 'not the next posting, or one of a block that is complete'); END;
CREATE TRIGGER postings_balance AFTER INSERT ON postings
BEGIN
    INSERT INTO balances SELECT NEW.account, 0
        WHERE NOT EXISTS (SELECT 1 FROM balances WHERE account = NEW.account);
    UPDATE balances SET balance = balance + NEW.amount WHERE account = NEW.account;
END;
