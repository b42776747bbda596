"""Receipts both ways: what a client and the server sign, so that each can prove it to others.

::

    client -> server   work receipt      "in this round I gave this update, of so many samples"
    server -> client   payment receipt   "for it I owe so much, released after this delay"

What is signed names the ledger, the run, the round and the client, so that a receipt cannot be
presented for another payment or in another federation. Keys are in `keys`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.federated.ledger.transactions import canonical_json

if TYPE_CHECKING:
    from paceline.federated.ledger.payments import RoundWork
    from paceline.federated.ledger.transactions import Plain


def work_text(ledger: str, run: str, number: int, work: RoundWork) -> bytes:
    """Return what a client signs for its work in a round.

    Args:
        ledger: the ledger's id.
        run: name of the run.
        number: of the round.
        work: its client, update and samples; the rest of it is the server's.
    """
    data: dict[str, Plain] = {"client": work.client, "update": work.update, "samples": work.samples}
    return _text("work", ledger, run, number, data)


def payment_text(
    ledger: str, run: str, number: int, work: RoundWork, amount: int, audit_delay_ms: int
) -> bytes:
    """Return what the server signs for a client's pay of `amount` micro-tokens; see `work_text`."""
    data: dict[str, Plain] = {
        "client": work.client,
        "update": work.update,
        "amount": amount,
        "audit_delay_ms": audit_delay_ms,
    }
    return _text("payment", ledger, run, number, data)


def block_text(block_hash: str) -> bytes:
    """Return what the server signs for a block, whose hash names the ledger."""
    return canonical_json({"block": block_hash, "type": "paceline block 1"}).encode()


def _text(kind: str, ledger: str, run: str, number: int, data: dict[str, Plain]) -> bytes:
    place: dict[str, Plain] = {"ledger": ledger, "run": run, "round": number}
    return canonical_json({"type": f"paceline {kind} 1", **place, **data}).encode()
