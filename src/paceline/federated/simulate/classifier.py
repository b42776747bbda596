"""A small classifier that clients train: one hidden layer, in NumPy, parameters as one vector."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_LEAST = 1e-9  # probability, before its logarithm


@dataclass(frozen=True, kw_only=True, slots=True)
class Classifier:
    """Its shape.

    Attributes:
        inputs, hidden, classes: units of the layers.
    """

    inputs: int = 784
    hidden: int = 64
    classes: int = 10

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return (self.inputs + 1) * self.hidden + (self.hidden + 1) * self.classes

    def initial(self, rng: np.random.Generator) -> np.ndarray:
        """Return parameters to begin with; float32, shape (parameters,)."""
        first = rng.standard_normal((self.inputs, self.hidden)) * np.sqrt(2 / self.inputs)
        second = rng.standard_normal((self.hidden, self.classes)) * np.sqrt(1 / self.hidden)
        zeros = np.zeros(self.hidden), np.zeros(self.classes)
        parts = first.ravel(), zeros[0], second.ravel(), zeros[1]
        return np.concatenate(parts).astype(np.float32)

    def views(self, vector: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return weights and biases of both layers, as views of the vector."""
        shapes = (self.inputs, self.hidden), (self.hidden,), (self.hidden, self.classes)
        ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
        first, bias, second, last = np.split(vector, ends)
        return first.reshape(shapes[0]), bias, second.reshape(shapes[2]), last

    def probabilities(self, vector: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        """Return the probabilities of the classes; shape (samples, classes)."""
        first, bias, second, last = self.views(vector)
        return _softmax(np.maximum(inputs @ first + bias, 0) @ second + last)

    def train(
        self,
        vector: np.ndarray,
        inputs: np.ndarray,
        labels: np.ndarray,
        *,
        batch: int,
        steps: int,
        learning_rate: float,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, float]:
        """Return the parameters after some steps of SGD, and the root mean square loss.

        Args:
            vector: parameters before; unchanged.
            inputs: float32, shape (samples, inputs).
            labels: shape (samples,).
            batch: samples of a step.
            steps: over as many passes of the samples as they take.
            learning_rate: of SGD.
            rng: shuffles the samples before each pass.
        """
        vector = vector.copy()
        first, bias, second, last = self.views(vector)
        rate = np.float32(learning_rate)
        squares, count, begin = 0.0, 0, labels.size
        order = np.arange(labels.size)
        for _ in range(steps):
            if begin + batch > labels.size:
                order, begin = rng.permutation(labels.size), 0
            chosen = order[begin : begin + batch]
            begin += batch
            images, classes = inputs[chosen], labels[chosen]
            hidden = np.maximum(images @ first + bias, 0)
            error = _softmax(hidden @ second + last)
            rows = np.arange(classes.size)
            losses = -np.log(error[rows, classes] + _LEAST)
            squares, count = squares + float((losses**2).sum()), count + classes.size
            error[rows, classes] -= 1
            error /= np.float32(classes.size)
            back = (error @ second.T) * (hidden > 0)
            second -= rate * (hidden.T @ error)
            last -= rate * error.sum(0)
            first -= rate * (images.T @ back)
            bias -= rate * back.sum(0)
        return vector, float(np.sqrt(squares / max(1, count)))


def _softmax(scores: np.ndarray) -> np.ndarray:
    scores = scores - scores.max(1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(1, keepdims=True)
    return scores
