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
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from paceline.federated.contribution import Contribution
    from paceline.federated.ledger import Ledger, RunTerms
    from paceline.federated.updates import ModelUpdate, Refusal

RUN = "run"  # a ledger of `PaidRounds` has one
CONSUMER = "consumer"
_LEAST_NORM = 1e-12


class Judged(NamedTuple):
    """What the next model is made of.

    Attributes:
        deltas: the updates, clipped.
        factors: of their weights; 0: refused.
        refusals: of updates that passed no gate.
    """

    deltas: list[np.ndarray]
    factors: list[float]
    refusals: list[Refusal]


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
    """

    def __init__(
        self,
        ledger: Ledger,
        terms: RunTerms,
        contribution: Contribution,
        *,
        utility: Callable[[np.ndarray], float] | None = None,
        consumer: str = CONSUMER,
    ) -> None:
        self._ledger, self._terms = ledger, terms
        self._contribution, self._utility = contribution, utility
        self._round = 0
        self.paid: dict[str, int] = {}
        with ledger.block(now_ms=0) as block:
            block.issue(consumer, terms.budget, "the run's budget")
            block.deposit(RUN, consumer, terms.budget, "the run's budget")
            block.begin_run(RUN, terms)

    def judge(
        self,
        now_s: float,
        model: np.ndarray,
        updates: Sequence[ModelUpdate],
        unpaid: Mapping[str, Refusal],
    ) -> Judged:
        """Score and pay the updates of a new model; return what it is made of.

        Of several updates of one client the last one is scored; all of them count in the model as
        that one does.

        Args:
            now_s: seconds of the federation's clock.
            model: parameters before; float32, shape (parameters,).
            updates: whose shapes and values were checked.
            unpaid: why clients that were asked have sent nothing of use since the last model; the
                ledger says so.
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
        works += [
            RoundWork(client=client, score=0.0, update="", samples=0, reason=_reason(refusal))
            for client, refusal in unpaid.items()
            if client not in last
        ]
        with self._ledger.block(now_ms=round(now_s * 1000)) as block:
            receipts = block.pay_round(RUN, self._round, works)
            block.release_due()
        self._round += 1
        for client, receipt in receipts.items():
            self.paid[client] = self.paid.get(client, 0) + receipt.amount
        largest = max(scores.clip_norm, _LEAST_NORM)
        return Judged(
            [clip(update.delta, largest) for update in updates],
            [float(by_client[update.client].weight > 0) for update in updates],
            [score.refusal for score in scores.clients if score.refusal is not None],
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
            block.end_run(RUN, improvement_ppm(before=before, after=after))


def _reason(refusal: Refusal | None) -> str:
    return "" if refusal is None else f"{refusal.check}: {refusal.reason}"
