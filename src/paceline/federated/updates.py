"""What a client sends back, and what is refused before anything uses it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.errors import UsageError


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
    """

    client: str
    version: int
    delta: np.ndarray
    samples: int
    steps: int
    loss: float


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
