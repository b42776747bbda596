"""Pay for the clients of a federation: an append-only ledger of tokens in one SQLite file.

`accounts`, `division`, `payments` and `transactions` say what deposits, rounds, audits and refunds
mean, as pure functions; `Ledger` stores it. It is no blockchain: one server writes, and clients
check what it signed (docs/guides/federated-ledger.md).
"""

from paceline.federated.ledger.accounts import MICRO_TOKENS
from paceline.federated.ledger.block import LedgerBlock, PaymentReceipt
from paceline.federated.ledger.damage import ExpectedBlock, LedgerReport
from paceline.federated.ledger.keys import SigningKey
from paceline.federated.ledger.ledger import Ledger
from paceline.federated.ledger.payments import RoundWork, RunTerms, improvement_ppm
from paceline.federated.ledger.receipts import work_text

__all__ = [
    "MICRO_TOKENS",
    "ExpectedBlock",
    "Ledger",
    "LedgerBlock",
    "LedgerReport",
    "PaymentReceipt",
    "RoundWork",
    "RunTerms",
    "SigningKey",
    "improvement_ppm",
    "work_text",
]
