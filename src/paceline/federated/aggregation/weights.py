"""How much each client's update counts: by samples, equally, by local steps, by age.

What clients say of themselves decides these weights except `equal_shares`. A client that claims ten
times its samples gets ten times the weight: where clients have a reason to lie, weigh equally.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def equal_shares(clients: int) -> np.ndarray:
    """Return 1 / clients for each client; float64, shape (clients,)."""
    if clients < 1:
        raise UsageError(
            f"shares of {clients} clients do not exist",
            where="aggregation",
            fix="Keep the model as it is in a round that no update was accepted in",
        )
    return np.full(clients, 1 / clients)


def sample_shares(samples: Sequence[int]) -> np.ndarray:
    """Return each client's share of all samples: the weights of FedAvg, and of FedProx.

    FedProx changes the clients' objective and lets them do fewer steps; its server weighs as FedAvg
    does.
    Source: T. Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, algorithm 2.

    Raises:
        UsageError: a number is negative, or all are 0.
    """
    counts = np.asarray(samples, np.float64)
    if not counts.size or (counts < 0).any() or not counts.sum() > 0:
        raise UsageError(
            "samples must be numbers from 0 on, and not all 0",
            where="aggregation",
            why=f"they are {list(samples)[:8]}",
            fix="Use equal_shares where clients do not say how many samples they have",
        )
    return np.asarray(counts / counts.sum())


def nova_weights(shares: Sequence[float] | np.ndarray, steps: Sequence[int]) -> np.ndarray:
    """Return FedNova's weights: as if all clients had done the mean number of local steps.

    With shares p and steps t the change is (sum p_i t_i) x sum p_i delta_i / t_i, so that a client
    does not count more because it did more steps. With equal steps these are the shares themselves.
    They need not add up to 1.

    Args:
        shares: of the clients, which add up to 1.
        steps: plain SGD steps of each; at least 1.

    Raises:
        UsageError: a number of steps is below 1, or the lengths differ.
    Source: J. Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated
        Optimization, NeurIPS 2020, equation 4 with the local steps of plain SGD.
    """
    fractions, counts = np.asarray(shares, np.float64), np.asarray(steps, np.float64)
    if fractions.shape != counts.shape or not counts.size or (counts < 1).any():
        raise UsageError(
            "each client needs a share and 1 or more local steps",
            where="aggregation",
            why=f"the shares are {list(shares)[:8]} and the steps {list(steps)[:8]}",
            fix="Refuse updates without a step before they are weighed",
        )
    return np.asarray((fractions * counts).sum() * fractions / counts)


def staleness_weights(versions_missed: Sequence[int], *, power: float = 0.5) -> np.ndarray:
    """Return (1 + versions missed)^-power for each update.

    Args:
        versions_missed: new models between the one that the update started from and the present.
        power: 0 counts late updates in full.

    Raises:
        UsageError: an update is of a version that does not exist yet, or the power is negative.
    Source: J. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS
        2022, section 5; C. Xie et al., Asynchronous Federated Optimization, 2019, polynomial.
    """
    missed = np.asarray(versions_missed, np.float64)
    if (missed < 0).any() or power < 0:
        raise UsageError(
            "versions missed and the power must be 0 or more",
            where="aggregation",
            why=f"they are {list(versions_missed)[:8]} and {power}",
            fix="Aggregate updates of earlier versions only",
        )
    return np.asarray((1 + missed) ** -power)
