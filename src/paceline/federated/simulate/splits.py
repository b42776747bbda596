"""Divides a data set among clients, unequally, as data of many owners are."""

from __future__ import annotations

import numpy as np

_TRIALS = 50


def dirichlet_split(
    labels: np.ndarray,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    *,
    least: int = 20,
    most: int = 600,
) -> list[np.ndarray]:
    """Return the samples of each client.

    Each class is divided among the clients by a Dirichlet distribution: the smaller `alpha`, the
    fewer classes a client has. A client with fewer than `least` samples gets others at random.
    Source: T. Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated
    Visual Classification, 2019.

    Args:
        labels: class of each sample, from 0; shape (samples,).
        clients: how many.
        alpha: of the distribution.
        rng: that everything is drawn from.
        least: samples of a client.
        most: samples of a client.
    """
    parts: list[list[int]] = []
    for _ in range(_TRIALS):
        parts = [[] for _ in range(clients)]
        for label in range(int(labels.max()) + 1):
            members = rng.permutation(np.flatnonzero(labels == label))
            bounds = (np.cumsum(rng.dirichlet([alpha] * clients)) * members.size).astype(int)
            for part, share in zip(parts, np.split(members, bounds[:-1]), strict=True):
                part.extend(share.tolist())
        if alpha < 0.2 or np.mean([len(part) >= least for part in parts]) >= 0.99:
            break
    found = []
    for part in parts:
        samples = rng.permutation(np.array(part, np.int64))
        if samples.size < least:
            added = rng.integers(0, labels.size, least - samples.size)
            samples = np.concatenate([samples, added])
        found.append(samples[:most])
    return found
