"""What a verification of a ledger is given, and what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage(Record):
    """The first row that is not as it was written.

    Attributes:
        table: of the row; "schema" for a table or trigger, "file" for what cannot be read.
        row: its number or name.
        reason: what is wrong.
    """

    table: str
    row: str
    reason: str

    def place(self) -> str:
        """Return which row it is."""
        return f"{self.table} row {self.row}" if self.row else self.table

    def text(self) -> str:
        """Return the row and what is wrong."""
        return f"{self.place()}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerReport(Record):
    """What a verification found.

    Attributes:
        ledger: name of the ledger.
        blocks: that were checked, up to the first bad row.
        transactions: that were checked.
        postings: that were checked.
        head: hash of the last block.
        circulating: micro-tokens in circulation.
        signatures: "checked"; "none" if the ledger has no key; "unchecked" if the library
            `cryptography` is missing here.
        receipts: how many receipts of clients and of the server were checked.
        damage: the first bad row, if there is one.
        public_key: 64 hexadecimal digits, by which the ledger says that it is signed; "" if it has
            none.
        is_expected_key: whether that is the key that was asked for; None if none was.
    """

    ledger: str
    blocks: int
    transactions: int
    postings: int
    head: str
    circulating: int
    signatures: str
    receipts: int
    damage: Damage | None = None
    public_key: str = ""
    is_expected_key: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether all is as it was written."""
        return self.damage is None


class ExpectedBlock(NamedTuple):
    """A block's hash, noted elsewhere."""

    number: int
    hash: str
