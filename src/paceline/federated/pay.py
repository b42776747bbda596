"""Scores the updates of each new model, and enters what they are paid into the ledger.

    updates of a model -> Contribution.score -> factors of the aggregate (0: refused), clipped
                                |
                                +-> Ledger.pay_round, committed before the model changes

Pay is held for the audit delay, and released by the clock of the federation.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from paceline.federated.aggregation.clipping import clip
from paceline.federated.ledger import RoundWork, improvement_ppm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

    from paceline.federated.contribution import Contribution
    from paceline.federated.ledger import Ledger, RunTerms
    from paceline.federated.updates import ModelUpdate, Refusal

_RUN = "run"  # a ledger of `PaidRounds` has one
_LEAST_NORM = 1e-12


class Judged(NamedTuple):
    """What the next model is made of: clipped updates, and a factor of each one's weight."""

    deltas: list[np.ndarray]
    factors: list[float]


class PaidRounds:
    """Scores and pays the clients of one run.

    Args:
        ledger: that is open for writing.
        terms: of the run; its budget is issued to and deposited by the consumer.
        contribution: scores updates.
        utility: of a model's parameters, on data that the server trusts; higher is better. None:
            the server has no data.
        consumer: who pays.

    Attributes:
        paid: micro-tokens of each client, by its id.
        refused: updates that passed no gate, by client.
    """

    def __init__(
        self,
        ledger: Ledger,
        terms: RunTerms,
        contribution: Contribution,
        *,
        utility: Callable[[np.ndarray], float] | None = None,
        consumer: str = "consumer",
    ) -> None:
        self._ledger, self._terms = ledger, terms
        self._contribution, self._utility = contribution, utility
        self._round = 0
        self.paid: dict[str, int] = {}
        self.refused: dict[str, int] = {}
        with ledger.block(now_ms=0) as block:
            block.issue(consumer, terms.budget, "the run's budget")
            block.deposit(_RUN, consumer, terms.budget, "the run's budget")
            block.begin_run(_RUN, terms)

    def judge(self, now_s: float, model: np.ndarray, updates: Sequence[ModelUpdate]) -> Judged:
        """Score and pay the updates of a new model; return what it is made of.

        Of several updates of one client the last one is scored; all of them count in the model as
        that one does.

        Args:
            now_s: seconds of the federation's clock.
            model: parameters before; float32, shape (parameters,).
            updates: whose shapes and values were checked.
        """
        last = {update.client: update for update in updates}
        of_model = self._utility

        def utility(change: np.ndarray) -> float:
            assert of_model is not None
            return of_model(model + change)

        given = list(last.values())
        scores = self._contribution.score(given, utility if of_model is not None else None)
        by_client = {score.client: score for score in scores.clients}
        works = [
            RoundWork(
                client=client,
                score=by_client[client].score,
                update=hashlib.sha256(update.delta.tobytes()).hexdigest(),
                samples=update.samples,
                reason=_reason(by_client[client].refusal),
            )
            for client, update in last.items()
        ]
        with self._ledger.block(now_ms=round(now_s * 1000)) as block:
            receipts = block.pay_round(_RUN, self._round, works)
            block.release_due()
        self._round += 1
        for client, receipt in receipts.items():
            self.paid[client] = self.paid.get(client, 0) + receipt.amount
            if by_client[client].refusal is not None:
                self.refused[client] = self.refused.get(client, 0) + 1
        largest = max(scores.clip_norm, _LEAST_NORM)
        return Judged(
            [clip(update.delta, largest) for update in updates],
            [float(by_client[update.client].weight > 0) for update in updates],
        )

    def applied(self, change: np.ndarray) -> None:
        """Note how the model changed: everybody can replay it from now on."""
        self._contribution.applied(change)

    def end(self, now_s: float, before: float, after: float) -> None:
        """Release what is due and reimburse the consumer.

        Args:
            now_s: seconds of the federation's clock.
            before: accuracy, or another utility above 0, of the first model.
            after: of the last one.
        """
        end_ms = round(now_s * 1000) + self._terms.audit_delay_ms
        with self._ledger.block(now_ms=end_ms) as block:
            block.release_due()
            block.end_run(_RUN, improvement_ppm(before=before, after=after))


def _reason(refusal: Refusal | None) -> str:
    return "" if refusal is None else f"{refusal.check}: {refusal.reason}"
