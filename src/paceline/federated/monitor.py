"""Watches the global model: accuracy in all, per class and per cluster of clients, and alarms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_SMOOTHED = 3  # evaluations
_PLATEAU, _PLATEAU_GAIN = 20, 0.002  # evaluations, accuracy
_FALL = 0.1  # of accuracy below the best: the model diverges


class Alarm(NamedTuple):
    """What is wrong with the training.

    Attributes:
        kind: "divergence" or "plateau".
        text: a sentence with the numbers.
    """

    kind: str
    text: str


class Evaluation(NamedTuple):
    """The global model at one moment.

    Attributes:
        at_s: seconds since the begin.
        round: version of the model.
        accuracy: share of samples that are classified rightly.
        by_class: the same of each class.
        by_cluster: the same for each cluster of clients, as they report it.
    """

    at_s: float
    round: int
    accuracy: float
    by_class: tuple[float, ...]
    by_cluster: tuple[float, ...] = ()


def evaluate(at_s: float, version: int, predicted: np.ndarray, labels: np.ndarray) -> Evaluation:
    """Return the evaluation of a model's predictions; both arrays have the shape (samples,)."""
    right = predicted == labels
    classes = range(int(labels.max()) + 1)
    by_class = tuple(
        float(right[labels == n].mean()) if (labels == n).any() else 0.0 for n in classes
    )
    return Evaluation(at_s, version, float(right.mean()), by_class)


@dataclass(slots=True)
class Monitor:
    """What became of the model.

    Attributes:
        evaluations: of a federation, oldest first.
        smoothed: mean accuracy of each evaluation and up to two before it.
    """

    evaluations: list[Evaluation] = field(default_factory=list, init=False)
    smoothed: list[float] = field(default_factory=list, init=False)

    def add(self, evaluation: Evaluation) -> Alarm | None:
        """Take an evaluation; return an alarm, if there is reason for one."""
        self.evaluations.append(evaluation)
        last = [found.accuracy for found in self.evaluations[-_SMOOTHED:]]
        self.smoothed.append(float(np.mean(last)))
        smoothed = self.smoothed
        if smoothed[-1] < max(smoothed) - _FALL:
            fall = f"accuracy fell from {max(smoothed):.3f} to {smoothed[-1]:.3f}"
            return Alarm("divergence", f"{fall}: the model diverges")
        if len(smoothed) > _PLATEAU:
            gain = max(smoothed[-_PLATEAU:]) - max(smoothed[:-_PLATEAU])
            if gain < _PLATEAU_GAIN:
                text = f"accuracy has not risen for {_PLATEAU} evaluations"
                return Alarm("plateau", f"{text}: more rounds may be of no use")
        return None

    def seconds_to(self, accuracy: float) -> float | None:
        """Return when the smoothed accuracy first reached a value; None: never."""
        pairs = zip(self.evaluations, self.smoothed, strict=True)
        return next((e.at_s for e, value in pairs if value >= accuracy), None)

    @property
    def final(self) -> float:
        """The last smoothed accuracy."""
        return self.smoothed[-1]

    @property
    def by_class(self) -> np.ndarray:
        """Accuracy on each class, mean over the last evaluations; shape (classes,)."""
        last = [evaluation.by_class for evaluation in self.evaluations[-_SMOOTHED:]]
        means: np.ndarray = np.mean(last, axis=0)
        return means

    @property
    def worst_class(self) -> float:
        """The least accuracy of a class, mean over the last evaluations."""
        return float(np.mean([min(e.by_class) for e in self.evaluations[-_SMOOTHED:]]))
