"""Clusters of clients whose updates are alike, and how accurate the global model is for each.

    update of a client -> sketch - mean of the clients' last sketches -> unit vector
      -> k-means by cosine, from the centres of the last time -> mean of what the clients report

Clients with alike data change the model alike: a cluster is found without anybody's labels. It
keeps its number from one evaluation to the next. Accuracies are those of the models that clients
were sent, on their own samples, as they say.
Source of the idea: F. Sattler et al., Clustered Federated Learning: Model-Agnostic Distributed
Multitask Optimization under Privacy Constraints, IEEE TNNLS 2021. Seeds of the centres:
D. Arthur, S. Vassilvitskii, k-means++: The Advantages of Careful Seeding, SODA 2007.
"""

from __future__ import annotations

import numpy as np

from paceline.core.randomness import make_generator
from paceline.federated.contribution.sketches import Sketcher

_SIZE = 256  # buckets of a sketch
_MOST = 4  # clusters
_LEAST_CLIENTS = 3  # per cluster, on average
_STEPS = 20  # of k-means, at most


class ClientClusters:
    """Clusters of the clients that have reported an accuracy.

    Args:
        clients: how many there are.
        parameters: of the model.
    """

    def __init__(self, clients: int, parameters: int) -> None:
        self._parameters = parameters
        self._sketcher: Sketcher | None = None  # until a client reports an accuracy
        self._rng = make_generator(0, "clusters")
        self._last: dict[int, np.ndarray] = {}  # sketches
        self._sum = np.zeros(_SIZE)  # of them
        self._direction = np.zeros((clients, _SIZE), np.float32)
        self._accuracy = np.full(clients, np.nan)
        self._centres = np.zeros((0, _SIZE), np.float32)
        self._cluster_of = np.full(clients, -1)

    @property
    def cluster_of(self) -> np.ndarray:
        """The cluster of each client as of the last evaluation; -1: none. Shape (clients,)."""
        return self._cluster_of.copy()

    def note(self, client: int, delta: np.ndarray, accuracy: float) -> None:
        """Take an update, and the accuracy that its client reports; nan: it reports none."""
        if not np.isfinite(accuracy):
            return
        if self._sketcher is None:
            self._sketcher = Sketcher(self._parameters, size=_SIZE, seed=0)
        sketch = self._sketcher.sketch(delta)
        self._sum += sketch - self._last.get(client, 0.0)
        self._last[client] = sketch
        self._direction[client] = _unit(sketch - self._sum / len(self._last))
        self._accuracy[client] = min(1.0, max(0.0, accuracy))

    def evaluate(self) -> tuple[float, ...]:
        """Return the accuracy for each cluster; empty while there are too few clients."""
        known = np.flatnonzero(np.isfinite(self._accuracy))
        count = min(_MOST, known.size // _LEAST_CLIENTS)
        if count < 2:
            return ()
        points = self._direction[known]
        self._centres = _added_centres(points, self._centres, count, self._rng)
        labels, self._centres = _clustered(points, self._centres)
        self._cluster_of[known] = labels
        accuracy = self._accuracy[known]
        return tuple(float(accuracy[labels == n].mean()) for n in range(count))


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Return vectors of length 1; what is zero remains so."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    units: np.ndarray = vectors / np.where(lengths > 0, lengths, 1)
    return units


def _added_centres(
    points: np.ndarray, centres: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Return `count` centres: the given ones, and points that are far from them."""
    while len(centres) < count:
        odds = np.ones(len(points))
        if len(centres):
            odds = np.maximum(1e-9, 1 - (points @ centres.T).max(1))
        centres = np.vstack([centres, points[rng.choice(len(points), p=odds / odds.sum())]])
    return centres


def _clustered(points: np.ndarray, centres: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cluster of each point, none empty, and the centres; k-means by cosine."""
    labels = np.full(len(points), -1)
    for _ in range(_STEPS):
        before, cosines = labels, points @ centres.T
        labels = cosines.argmax(1)
        for empty in np.flatnonzero(np.bincount(labels, minlength=len(centres)) == 0):
            is_alone = np.bincount(labels, minlength=len(centres))[labels] == 1
            labels[np.where(is_alone, 2.0, cosines.max(1)).argmin()] = empty
        if (labels == before).all():
            break
        centres = _unit(np.stack([points[labels == n].sum(0) for n in range(len(centres))]))
    return labels, centres
