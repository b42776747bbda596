"""Transactions, the blocks that chain them, and the canonical JSON of which hashes are taken.

A transaction moves micro-tokens between accounts; its postings sum to zero. Its key says what it is
about (a payment: run, round, client): a ledger has each key once, so that nothing is paid twice.

::

    body        canonical JSON of {"key", "kind", "note", "postings": [[account, amount], ...]}
    hash        SHA-256 of the body, as 64 hexadecimal digits
    block hash  SHA-256 of the canonical JSON of {"at_ms", "ledger", "number", "previous",
                "transactions": [hash, ...], "version"}

`previous` is the hash of the block before, so that a block's hash stands for everything up to it.
Canonical JSON here: ASCII, keys sorted, no white space, and no floats, whose text may differ
between programs.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_VERSION = 1
NO_BLOCK = "0" * 64  # the "previous" of the first block

Plain: TypeAlias = "str | int | list[Plain] | dict[str, Plain] | None"
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


class Posting(NamedTuple):
    """A change of one account, in micro-tokens."""

    account: str
    amount: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Transaction:
    """Postings that happen together or not at all.

    Attributes:
        kind: deposit, pay, release, slash, ...
        key: of which a ledger has one transaction: strings and integers.
        postings: sum to zero; no account occurs twice.
        note: what it rests on: the hash of an update, signatures, a reason; strings and integers.
    """

    kind: str
    key: tuple[str | int, ...]
    postings: tuple[Posting, ...]
    note: dict[str, Plain]

    def __post_init__(self) -> None:
        assert not imbalance(self.postings), (imbalance(self.postings), self)

    @property
    def key_text(self) -> str:
        """The key as the ledger has it."""
        return _encode(self.key)

    def body(self) -> str:
        """Return the canonical JSON that is stored and hashed."""
        return _encode(
            {
                "key": self.key,
                "kind": self.kind,
                "note": self.note,
                "postings": self.postings,
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Transactions that were committed together.

    Attributes:
        ledger: the ledger's id, so that no block fits into another ledger.
        number: from 0.
        previous: the hash of the block before.
        at_ms: milliseconds since 1970 (or of a virtual clock); never before the block before.
        transactions: their hashes.
    """

    ledger: str
    number: int
    previous: str
    at_ms: int
    transactions: tuple[str, ...]

    def body(self) -> str:
        """Return the canonical JSON that is hashed."""
        return _encode(
            {
                "at_ms": self.at_ms,
                "ledger": self.ledger,
                "number": self.number,
                "previous": self.previous,
                "transactions": self.transactions,
                "version": BLOCK_VERSION,
            }
        )


def imbalance(postings: Sequence[Posting]) -> str:
    """Return why postings cannot be those of a transaction; empty if they can."""
    accounts = [account for account, _ in postings]
    if total := sum(amount for _, amount in postings):
        return f"its postings sum to {total:,} micro-tokens in place of 0"
    if len(set(accounts)) < len(accounts) or not all(amount for _, amount in postings):
        return "an account occurs twice, or with 0 micro-tokens"
    return ""


def canonical_json(data: Plain) -> str:
    r"""Return the one text of `data`: ASCII, keys sorted, no white space.

    >>> canonical_json({"b": [1, None], "a": "ü"})
    '{"a":"\\u00fc","b":[1,null]}'
    """
    return _encode(data)


def text_hash(body: str) -> str:
    """Return the SHA-256 of a body, as 64 hexadecimal digits."""
    return hashlib.sha256(body.encode("ascii")).hexdigest()


def parse_body(body: str) -> Transaction:
    """Return the transaction that `Transaction.body` wrote.

    Raises:
        ValueError: the text is not of this form.
    """
    try:
        data = json.loads(body)
        postings = tuple([Posting(account, amount) for account, amount in data["postings"]])
        if flaw := imbalance(postings):
            raise ValueError(flaw)
        return Transaction(
            kind=data["kind"], key=tuple(data["key"]), postings=postings, note=data["note"]
        )
    except (KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"not a transaction: {type(problem).__name__}: {problem}") from None
