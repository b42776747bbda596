"""What the operations come to, without SQLite: what a ledger is compared with."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from typing import TYPE_CHECKING

from paceline.federated.ledger.torture.operations import CLIENTS, GRANT, TERMS

if TYPE_CHECKING:
    from paceline.federated.ledger.torture.operations import LedgerOperation


class Model:
    """What the operations come to, in dictionaries: written to be obvious, and shares no code."""

    def __init__(self) -> None:
        """Begin as `_found` does."""
        self.balances: Counter[str] = Counter()
        self.held: dict[tuple[str, int, str], int] = {}
        self.settled: dict[tuple[str, int, str], str] = {}
        self.deposits: dict[str, Counter[str]] = {}
        self.transactions = 1
        self.refused = 0
        for client in (f"client-{i}" for i in range(CLIENTS)):
            self._move("issued", f"client:{client}", GRANT)
        self._move("client:client-0", "treasury", GRANT // 2)

    def apply(self, wanted: LedgerOperation) -> None:
        """Do an operation."""
        client = f"client:{wanted.client}"
        budget = f"escrow:budget:{wanted.run}"
        match wanted.kind:
            case "issue":
                self._move("issued", client, wanted.amount)
            case "stake":
                self._move(client, f"escrow:stake:{wanted.client}", wanted.amount)
            case "deposit":
                self._move(client, "treasury", wanted.amount)
                of_run = self.deposits.setdefault(wanted.run, Counter())
                of_run[wanted.client] += wanted.amount
            case "begin":
                self._move("treasury", budget, TERMS.budget_per_round * TERMS.rounds)
            case "round":
                self._pay(wanted, budget)
            case "release":
                self._release(wanted)
            case "slash":
                self._slash(wanted.client)
            case "end":
                self._end(wanted, budget)
            case "overdraw" | "rewrite":
                self.refused += 1

    def _move(self, source: str, target: str, amount: int) -> None:
        self.balances[source] -= amount
        self.balances[target] += amount
        assert source == "issued" or self.balances[source] >= 0, source
        self.transactions += 1

    def _pay(self, wanted: LedgerOperation, budget: str) -> None:
        fee = TERMS.budget_per_round * TERMS.infrastructure_ppm // 1_000_000
        self._move(budget, "infrastructure", fee)
        pool = TERMS.budget_per_round - fee
        for client, amount in _shares(
            pool, {work.client: Fraction(work.score) for work in wanted.works}
        ).items():
            self._move(budget, f"escrow:pay:{client}", amount)
            if amount:
                self.held[wanted.run, wanted.round, client] = amount

    def _release(self, wanted: LedgerOperation) -> None:
        key = wanted.run, wanted.round, wanted.client
        if key in self.held:
            self._move(f"escrow:pay:{wanted.client}", f"client:{wanted.client}", self.held.pop(key))
            self.settled[key] = "release"
        elif self.settled.get(key) != "release":
            self.refused += 1

    def _slash(self, client: str) -> None:
        account = f"escrow:stake:{client}"
        self._move(account, "slashed", self.balances[account])
        for key in [key for key in self.held if key[2] == client]:
            self._move(f"escrow:pay:{client}", "slashed", self.held.pop(key))
            self.settled[key] = "slash"

    def _end(self, wanted: LedgerOperation, budget: str) -> None:
        deposits = self.deposits.pop(wanted.run, Counter())
        planned = TERMS.budget_per_round * TERMS.rounds
        unspent = self.balances[budget]
        gained = min(Fraction(wanted.amount, TERMS.target_ppm), Fraction(1))
        covered = min(Fraction(deposits.total(), planned), Fraction(1))
        pool = int(unspent * covered * gained)
        weights = {client: Fraction(amount) for client, amount in deposits.items()}
        for client, amount in _shares(pool, weights).items():
            self._move(budget, f"client:{client}", amount)
        self._move(budget, "treasury", self.balances[budget])


def _shares(amount: int, weights: dict[str, Fraction]) -> dict[str, int]:
    """Divide by largest remainder, in fractions."""
    total = sum(weights.values())
    if not total:
        return dict.fromkeys(weights, 0)
    quotas = {client: amount * weight / total for client, weight in weights.items()}
    parts = {client: int(quota) for client, quota in quotas.items()}
    order = sorted(quotas, key=lambda client: (parts[client] - quotas[client], client))
    for client in order[: amount - sum(parts.values())]:
        parts[client] += 1
    return parts
