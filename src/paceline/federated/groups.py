"""Groups of clients: how accurate the global model is for each, from its accuracy on each class.

    class mix of each client   (clients, classes)
      -> groups, for example thirds by speed -> class mix of a group -> x accuracy by class

A client's accuracy here is what the model would reach on samples with the client's class mix. Only
a simulation knows class mixes; a real server knows of its clients what they say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPEEDS = ("fast", "middle", "slow")
_POOREST = 0.1  # quantile of the clients by accuracy


def class_mixes(labels: np.ndarray, parts: Sequence[np.ndarray], classes: int) -> np.ndarray:
    """Return the share of each class in each client's samples; shape (clients, classes)."""
    counts = [np.bincount(labels[part], minlength=classes)[:classes] for part in parts]
    mixes: np.ndarray = np.array(counts) / np.maximum(1, np.sum(counts, 1, keepdims=True))
    return mixes


def thirds_by_speed(mixes: np.ndarray, seconds: np.ndarray) -> dict[str, np.ndarray]:
    """Return the class mixes of the fast, middle and slow third of the clients.

    Args:
        mixes: of the clients; shape (clients, classes).
        seconds: that each client takes; shape (clients,).
    """
    thirds = np.array_split(np.argsort(seconds, kind="stable"), len(_SPEEDS))
    return {
        name: mixes[third].mean(0)
        for name, third in zip(_SPEEDS, thirds, strict=True)
        if third.size
    }


def poorest(mixes: np.ndarray, by_class: np.ndarray) -> float:
    """Return the accuracy at the tenth of the clients for which the model is poorest.

    Args:
        mixes: of the clients; shape (clients, classes).
        by_class: accuracy of the model on each class; shape (classes,).
    """
    return float(np.quantile(mixes @ by_class, _POOREST))
