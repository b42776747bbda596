"""Ledgers that tests begin with."""

from __future__ import annotations

from paceline.federated.ledger import Ledger, RoundWork, RunTerms

TERMS = RunTerms(budget_per_round=1_000_000, rounds=10, audit_delay_ms=1000)
UPDATE = "ab" * 32


def work(client, score, **fields):
    return RoundWork(client=client, score=score, update=UPDATE, samples=10, **fields)


def funded(path, *, terms=TERMS, key=None):
    """Return an open ledger in which a run has begun, paid for by two consumers."""
    ledger = Ledger.create(path, now_ms=1000, key=key, name="tests")
    with ledger.block(1000) as block:
        block.issue("hospital", 30_000_000, "invoice 1")
        block.issue("clinic", 5_000_000, "invoice 2")
        block.deposit("run", "hospital", 16_000_000, "1")
        block.deposit("run", "clinic", 4_000_000, "1")
        block.begin_run("run", terms)
    return ledger


def audited(path, **options):
    """Return a funded ledger with rounds that were paid, released and slashed."""
    ledger = funded(path, **options)
    for number in range(3):
        with ledger.block(2000 + 1000 * number) as block:
            block.pay_round("run", number, [work("a", 3.0), work("b", 1.0), work("c", 0.0)])
            block.release_due()
    with ledger.block(4500) as block:
        block.slash("b", "case 1", "replayed an update", "cd" * 32)
    return ledger
