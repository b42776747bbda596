"""The token ledger of a federation: rates of writing and verifying, and what kills leave.

    python bench/ledger.py --json > bench/results/ledger.json

Writes rounds of 1,000 paid clients and releases them, each round a block that is synced to disk
(not signed, then signed by clients and server), verifies 1,000,000 postings, changes rows at random
places and looks whether each is named, and kills a writer 1,000 times in 1,000,000 operations.
`--quick`: a tenth of the postings, 2 % of the kills.
"""

import random
import shutil
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from harness import Report, options, tell

from paceline.federated.ledger import Ledger, RoundWork, RunTerms, SigningKey, work_text
from paceline.federated.ledger.torture.campaign import torture_ledger

CLIENTS = 1000
UPDATE = "5f" * 32
TERMS = RunTerms(budget_per_round=1_000_000_000, rounds=100_000, audit_delay_ms=5000)
SERVER = SigningKey.from_seed(b"s" * 32)


def works(number, client_keys):
    """Return what the clients of a round did, signed if they have keys."""
    rng = random.Random(number)
    made = []
    for client in range(CLIENTS):
        work = RoundWork(
            client=f"client-{client}", score=rng.random(), update=UPDATE, samples=client
        )
        if client_keys:
            text = work_text("bench", "run", number, work)
            signature = client_keys[client].sign(text)
            work = RoundWork(
                client=work.client,
                score=work.score,
                update=UPDATE,
                samples=client,
                signature=signature,
            )
        made.append(work)
    return made


def fill(path, postings, *, is_signed):
    """Write rounds until there are so many postings; return postings and seconds."""
    client_keys = []
    if is_signed:
        client_keys = [
            SigningKey.from_seed(client.to_bytes(32, "big")) for client in range(CLIENTS)
        ]
    with Ledger.create(path, now_ms=0, key=SERVER if is_signed else None, name="bench") as ledger:
        with ledger.block(0) as block:
            block.issue("consumer", TERMS.budget, "1")
            block.deposit("run", "consumer", TERMS.budget, "1")
            block.begin_run("run", TERMS)
            for client, key in enumerate(client_keys):
                block.register(f"client-{client}", key.public_key)
        count, number, spent_s = 0, 0, 0.0
        while count < postings:
            round_works = works(number, client_keys)  # the clients' time, not the ledger's
            begin = time.perf_counter()
            with ledger.block(1000 * number) as block:
                block.pay_round("run", number, round_works)
                released = len(block.release_due())
            spent_s += time.perf_counter() - begin
            count += 2 * (1 + CLIENTS + released)
            number += 1
    return count, spent_s


def verify(path, **kwargs):
    with Ledger.read(path) as ledger:
        begin = time.perf_counter()
        report = ledger.verify(**kwargs)
        return report, time.perf_counter() - begin


def changed_rows(path, cases, seed=1):
    """Change one row at a time in a copy; return how many were named as the first bad row."""
    rng = random.Random(seed)
    named = 0
    copy = path.with_name("changed.db")
    for _ in range(cases):
        shutil.copy(path, copy)
        table, column, change = rng.choice(
            (
                ("postings", "amount", "amount + 1"),
                ("postings", "account", "'client:thief'"),
                ("transactions", "body", "replace(body, 'client', 'clieNt')"),
                ("transactions", "hash", "upper(hash)"),
                ("transactions", "kind", "'gift'"),
            )
        )
        with closing(sqlite3.connect(copy)) as sql, sql:
            name = f"{table}_update"
            trigger = sql.execute("SELECT sql FROM sqlite_master WHERE name = ?", (name,))
            text = trigger.fetchone()[0]
            sql.execute(f"DROP TRIGGER {name}")
            last = sql.execute(f"SELECT MAX(id) FROM {table}").fetchone()[0]
            row = rng.randint(2, last)
            before = sql.execute(f"SELECT {column} FROM {table} WHERE id = ?", (row,)).fetchone()
            sql.execute(f"UPDATE {table} SET {column} = {change} WHERE id = ?", (row,))
            after = sql.execute(f"SELECT {column} FROM {table} WHERE id = ?", (row,)).fetchone()
            sql.execute(text)
        damage = verify(copy)[0].damage
        if before == after:
            named += damage is None
        else:
            named += damage is not None and (damage.table, damage.row) == (table, str(row))
    return named


def main():
    flags = options(__doc__)
    report = Report("ledger", flags.json)
    postings = 100_000 if flags.quick else 1_000_000
    operations, kills = (20_000, 20) if flags.quick else (1_000_000, 1000)
    cases = 10 if flags.quick else 40
    with tempfile.TemporaryDirectory() as folder:
        for is_signed in (False, True):
            path = Path(folder) / f"signed-{is_signed}.db"
            wanted = postings // 5 if is_signed else postings
            count, spent_s = fill(path, wanted, is_signed=is_signed)
            rate = count / spent_s
            signed = "signed" if is_signed else "not signed"
            report.row(
                what=f"write, {signed}",
                postings=count,
                postings_per_s=rate,
                bytes_per_posting=path.stat().st_size / count,
            )
            report.bar(f"postings written per second, {signed}", rate, 10_000, at_least=True)
            found, verify_s = verify(path)
            report.row(what=f"verify, {signed}", postings=found.postings, verify_s=verify_s)
            if not is_signed:
                million_s = verify_s * 1_000_000 / found.postings
                report.bar("seconds to verify 1,000,000 postings", million_s, 30)
            report.bar(f"intact ledger that was called damaged, {signed}", int(not found.ok), 0)
        found, verify_s = verify(path, with_receipts=True)
        report.row(what="verify with receipts", receipts=found.receipts, verify_s=verify_s)
        small = Path(folder) / "small.db"
        fill(small, 10_000, is_signed=False)
        named = changed_rows(small, cases)
        report.row(what="changed rows", cases=cases, named=named)
        report.bar(f"changed rows that were not named, of {cases}", cases - named, 0)
        done = torture_ledger(Path(folder), operations=operations, kills=kills)
        for failure in done.failures:
            tell(f"FAILED: {failure}")
        report.row(
            what="kills",
            operations=done.operations,
            kills=done.kills,
            repeated=done.repeated,
            refused=done.refused,
            postings=done.postings,
            elapsed_s=done.elapsed_s,
        )
        report.bar(
            f"differences from the model, {operations:,} operations, {done.kills:,} kills",
            done.failure_count,
            0,
        )
        report.bar("kills of the writer", done.kills, int(0.9 * kills), at_least=True)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
