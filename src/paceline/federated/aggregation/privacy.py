"""Differential privacy of clients: clipped updates, Gaussian noise, and what epsilon that makes.

Each client can change the sum of a round by at most `clip_norm`; noise of `noise_multiplier` times
that hides whether a client took part. The sum is divided by a fixed number of clients, since
the number of those that answered says something about each of them. All updates count equally: a
weight that the client chose would break the bound.

What this does not give: noise comes from NumPy's generator in floating point, which is enough
against who sees the models, and not against who can predict the generator (a secret seed is
needed) or reads the last bits of the noise (I. Mironov, CCS 2012). Scores and payments are
computed from raw updates, and so are not private.
Source: H. B. McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import Missing, UsageError
from paceline.federated.aggregation.chunks import parameters_of, ranges
from paceline.federated.updates import norm

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianMechanism:
    """The private mean of a round.

    Attributes:
        clip_norm: bound of the norm of each update.
        noise_multiplier: standard deviation of the noise of the sum, over `clip_norm`.
        expected_clients: that the sum is divided by: clients x probability of each to be chosen.
    """

    clip_norm: float
    noise_multiplier: float
    expected_clients: float

    def __post_init__(self) -> None:
        values = self.clip_norm, self.noise_multiplier, self.expected_clients
        if not all(np.isfinite(values)) or not min(values) > 0:
            raise UsageError(
                "clip_norm, noise_multiplier and expected_clients must be above 0",
                where="differential privacy",
                why=f"they are {values}",
                fix="Give finite values above 0",
            )

    def mean(self, deltas: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Return the noisy mean of the clipped updates; float32, shape (parameters,).

        Args:
            deltas: of the clients, of which none may come twice; finite.
            rng: of the noise; its seed must be secret, and must not be used again.

        Raises:
            UsageError: there is no update, the vectors differ in length, or one is not finite.
        """
        result = np.empty(parameters_of(deltas), np.float32)
        norms = np.array([norm(delta) for delta in deltas])
        if not np.isfinite(norms).all():
            raise UsageError(
                "an update is not finite",
                where="differential privacy",
                fix="Pass the updates through check_updates first",
            )
        factors = np.minimum(1, self.clip_norm / np.maximum(norms, 1e-300))
        deviation = self.noise_multiplier * self.clip_norm
        for part in ranges(result.size, len(deltas)):
            total = rng.normal(0, deviation, part.stop - part.start)
            for delta, factor in zip(deltas, factors, strict=True):
                total += factor * delta[part]
            result[part] = total / self.expected_clients
        return result


def epsilon(
    *, noise_multiplier: float, sampling_probability: float, rounds: int, delta: float
) -> float:
    """Return the epsilon of `rounds` rounds of a GaussianMechanism.

    It holds where each client is chosen independently with the given probability in every round
    (Poisson sampling), for neighbouring federations that differ by one client. Rounds of a fixed
    size are not sampled like that: for them give a probability of 1, which claims no gain.

    Args:
        noise_multiplier: of the mechanism.
        sampling_probability: of a client, in each round.
        rounds: all that a client could be chosen in.
        delta: of (epsilon, delta); well below 1 / clients.

    Raises:
        UsageError: an argument is out of range.
        Missing: dp-accounting is not installed.
    Source: Renyi differential privacy by Google's dp-accounting: I. Mironov et al., Renyi
        Differential Privacy of the Sampled Gaussian Mechanism, 2019.
    """
    if not (noise_multiplier > 0 and 0 < sampling_probability <= 1 and rounds >= 0):
        raise UsageError(
            "noise, sampling probability and rounds are out of range",
            where="differential privacy",
            why=f"they are {noise_multiplier:g}, {sampling_probability:g} and {rounds}",
            fix="Give a multiplier above 0, a probability in (0, 1] and 0 or more rounds",
        )
    if not 0 < delta < 1:
        raise UsageError(
            f"delta must be between 0 and 1, got {delta:g}",
            where="differential privacy",
            fix="Give a delta well below 1 / clients",
        )
    try:
        import dp_accounting
        from dp_accounting.rdp import RdpAccountant
    except ImportError as problem:
        raise Missing(
            "epsilon needs dp-accounting, which is not installed",
            where="differential privacy",
            fix="pip install 'paceline[privacy]'",
        ) from problem
    if not rounds:
        return 0.0
    noise = dp_accounting.GaussianDpEvent(noise_multiplier)
    event = dp_accounting.PoissonSampledDpEvent(sampling_probability, noise)
    return float(RdpAccountant().compose(event, rounds).get_epsilon(delta))
