"""One federation from its file to its folder: trained, scored, paid, reported.

FOLDER/ledger.db     every token, append-only
FOLDER/server.key    that signed it, where the extra `ledger` is installed
FOLDER/result.json   accuracy, participation
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.errors import DestinationExists, Missing
from paceline.core.files import commit_text
from paceline.core.randomness import make_generator
from paceline.federated.contribution import Contribution
from paceline.federated.ledger import MICRO_TOKENS, Ledger, RunTerms, SigningKey, accounts
from paceline.federated.pay import CONSUMER, RUN, PaidRounds
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.study import FederationResult, simulate
from paceline.report.federation.model import FederationPay

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from paceline.federated.config import FederationConfig
    from paceline.federated.ledger import LedgerReport
    from paceline.federated.simulate.images import ImageData

_VALIDATED = 1000  # test samples that scores rest on, at most; accuracy is of the others
_PER_ROUND = 100 * MICRO_TOKENS
_AUDIT_MS = 600_000
_LEAST = 1e-9  # probability, before its logarithm


class PaidRun(NamedTuple):
    """What a federation came to.

    Attributes:
        result: of the training.
        balances: of the ledger's accounts, in micro-tokens.
        pay: what became of the tokens, for the report.
        is_signed: whether the ledger is.
    """

    result: FederationResult
    balances: dict[str, int]
    pay: FederationPay
    is_signed: bool


def run(
    config: FederationConfig, data: ImageData, scores: Sequence[float], folder: Path
) -> PaidRun:
    """Run a federation, and write its folder.

    Args:
        config: of the federation.
        data: that clients share out; of the test samples some are kept to score updates with.
        scores: of devices.
        folder: new, or empty.

    Raises:
        DestinationExists: the folder has files.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DestinationExists(
            "the folder of a federation has files",
            where=str(folder),
            fix="Name a new folder with --out",
        )
    folder.mkdir(parents=True, exist_ok=True)
    kept = min(_VALIDATED, len(data.test_labels) // 2)
    tested = data._replace(
        test_images=data.test_images[:-kept], test_labels=data.test_labels[:-kept]
    )
    classifier = Classifier(inputs=data.images.shape[1])
    images, labels = data.test_images[-kept:], data.test_labels[-kept:]

    def utility(model: np.ndarray) -> float:
        rows = classifier.probabilities(model, images)[np.arange(kept), labels]
        return float(np.log(rows + _LEAST).mean())

    terms = RunTerms(budget_per_round=_PER_ROUND, rounds=config.rounds, audit_delay_ms=_AUDIT_MS)
    key = _server_key(folder)
    with Ledger.create(folder / "ledger.db", now_ms=0, key=key) as ledger:
        secret = int(make_generator(config.seed, "gate").integers(2**31))
        scored = Contribution(classifier.parameters, seed=secret)
        pay = PaidRounds(ledger, terms, scored, utility=utility)
        result = simulate(config, tested, scores, config.strategy, config.seed, pay=pay)
        first = result.curve[0].accuracy if result.curve else 1.0
        pay.end(result.seconds, max(first, _LEAST), max(result.final, _LEAST))
        balances, checked = ledger.balances(), ledger.verify()
    commit_text(folder / "result.json", result.to_text())
    return PaidRun(result, balances, pay_of(balances, checked), key is not None)


def pay_of(balances: Mapping[str, int], checked: LedgerReport) -> FederationPay:
    """Return what became of the tokens of a run.

    Args:
        balances: of all accounts of its ledger, in micro-tokens.
        checked: what a verification of the ledger found.
    """
    earned: dict[str, int] = {}
    for account, amount in balances.items():
        for prefix in (accounts.spendable(""), accounts.held_pay(""), accounts.stake("")):
            if account.startswith(prefix) and account != accounts.spendable(CONSUMER):
                client = account.removeprefix(prefix)
                earned[client] = earned.get(client, 0) + amount
    flows = (
        ("providers", sum(earned.values())),
        ("infrastructure", balances.get(accounts.INFRASTRUCTURE, 0)),
        ("consumer, reimbursed", balances.get(accounts.spendable(CONSUMER), 0)),
        ("treasury, for the next run", balances.get(accounts.TREASURY, 0)),
        ("reserved for this run", balances.get(accounts.budget(RUN), 0)),
        ("slashed", balances.get(accounts.SLASHED, 0)),
    )
    return FederationPay(
        issued=-balances.get(accounts.ISSUED, 0),
        flows=tuple(flow for flow in flows if flow[1]),
        by_client=earned,
        consumers=(CONSUMER,),
        verification=_verification(checked),
        is_sound=checked.ok,
    )


def _verification(checked: LedgerReport) -> str:
    if checked.damage is not None:
        return f"The ledger is damaged: {checked.damage.text()}."
    signatures = {
        "checked": "signed by the server",
        "none": "chained by hashes, not signed",
        "unchecked": "chained by hashes; the signatures were not checked",
    }[checked.signatures]
    return (
        f"All {checked.blocks:,} blocks, {checked.transactions:,} transactions and "
        f"{checked.postings:,} postings of the ledger were verified; they are {signatures}. "
        f"Its head is {checked.blocks - 1}:{checked.head}."
    )


def _server_key(folder: Path) -> SigningKey | None:
    """Return a new key that is saved in the folder; None where the extra is not installed."""
    try:
        key = SigningKey.generate()
    except Missing:
        return None
    key.save(folder / "server.key")
    return key
