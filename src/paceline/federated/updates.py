"""What a client sends back, and what is refused before anything uses it.

    updates of a round -> check_updates -> accepted -> contribution, aggregation
                                |
                                +-> Refusal(client, check, reason): logged, unpaid, never averaged

A refusal is an outcome rather than an exception: one broken client must not end the others' round.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_CHUNK = 1 << 16
_LEAST_OTHERS = 2  # whose median norm is a scale
_LARGEST_NORM_RATIO = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUpdate:
    """How one client would change the global model.

    Attributes:
        client: its id.
        version: of the global model that it started from.
        delta: change of the parameters; float32, shape (parameters,).
        samples: that the client says it trained on.
        steps: local optimizer steps.
        loss: root mean square of the losses of its samples, as the client says.
        accuracy: of the model that it started from, on its samples, as it says; nan: it does not.
    """

    client: str
    version: int
    delta: np.ndarray
    samples: int
    steps: int
    loss: float
    accuracy: float = math.nan


def check_update(update: ModelUpdate, parameters: int) -> None:
    """Refuse an update that cannot be aggregated.

    Args:
        update: of a client.
        parameters: of the model.

    Raises:
        UsageError: its shape or type is not the model's, or a number in it is not finite.
    """
    delta = update.delta
    where = f"client {update.client}, model version {update.version}"
    if delta.shape != (parameters,) or delta.dtype != np.float32:
        raise UsageError(
            "an update does not fit the model",
            where=where,
            why=f"{delta.dtype} of shape {delta.shape}, and the model has ({parameters},) float32",
            fix="Run the client with the model of this federation",
        )
    if not np.isfinite(delta).all():
        first = int(np.flatnonzero(~np.isfinite(delta))[0])
        raise UsageError(
            "an update has a number that is not finite",
            where=where,
            why=f"parameter {first} changes by {delta[first]}",
            fix="Lower the client's learning rate, or clip its gradients",
        )


def norm(delta: np.ndarray) -> float:
    """Return the Euclidean norm, summed in float64; NaN or infinite where a value is.

    In float32 the squares of values above 1.8e19 overflow; a copy in float64 would be twice as
    large as the vector.
    """
    total = 0.0
    for begin in range(0, delta.size, _CHUNK):
        part = delta[begin : begin + _CHUNK].astype(np.float64)
        total += float(part @ part)
    return math.sqrt(total) if total >= 0 else math.nan


def norm_limit(others: Sequence[float], *, ratio: float = _LARGEST_NORM_RATIO) -> float:
    """Return the largest norm that an update may have; infinite while there is no scale.

    Args:
        others: norms of other clients' updates: a client can neither set the scale of its own
            update nor hide below it.
        ratio: over their median.
    """
    median = float(np.median(others)) if len(others) >= _LEAST_OTHERS else 0.0
    return ratio * median if median > 0 else math.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """An update that is not used, or that did not come.

    Attributes:
        client: who sent it, or should have.
        check: that it failed, for example "values", "norm", "replay" or "deadline".
        reason: a clause with the value and the limit.
    """

    client: str
    check: str
    reason: str


def check_updates(
    updates: Sequence[ModelUpdate],
    parameters: int,
    *,
    largest_norm_ratio: float = _LARGEST_NORM_RATIO,
) -> tuple[list[ModelUpdate], list[Refusal]]:
    """Return the updates of a round that can be used, in order, and why each other one cannot.

    Refused is what has a wrong shape or type, a value that is not finite, a second update of one
    client, or a giant norm: above `largest_norm_ratio` times the median of the round's other
    checked updates.

    Args:
        updates: of a round.
        parameters: of the model.
        largest_norm_ratio: applies from three updates on.

    Cost: one pass over each vector, without a copy.
    """
    fitting: list[ModelUpdate] = []
    refusals: list[Refusal] = []
    clients: set[str] = set()
    for update in updates:
        try:
            check_update(update, parameters)
        except UsageError as problem:
            refusals.append(Refusal(client=update.client, check="values", reason=problem.why))
            continue
        if update.client in clients:
            reason = "the client has sent another update in this round"
            refusals.append(Refusal(client=update.client, check="once", reason=reason))
            continue
        clients.add(update.client)
        fitting.append(update)
    norms = [norm(update.delta) for update in fitting]
    accepted = []
    for index, update in enumerate(fitting):
        others = norms[:index] + norms[index + 1 :]
        bound = norm_limit(others, ratio=largest_norm_ratio)
        if norms[index] <= bound:
            accepted.append(update)
            continue
        reason = f"norm {norms[index]:.3g}, and {bound:.3g} is the limit"
        refusals.append(Refusal(client=update.client, check="norm", reason=reason))
    for refusal in refusals:
        logger.warning(
            "update of client %s refused (%s): %s", refusal.client, refusal.check, refusal.reason
        )
    return accepted, refusals
