"""Optimizers of the server: how the aggregated change of a round moves the model.

The change D takes the place of a negative gradient; x is the model.

    SGD    m = momentum m + D                                 x += rate m
    Adam   m = b1 m + (1-b1) D    v = b2 v + (1-b2) D^2       x += rate m / (sqrt(v) + tau)
    Yogi   m as Adam              v -= (1-b2) D^2 sign(v-D^2) x as Adam

Limits: SGD with rate 1 and momentum 0 is FedAvg. A large tau makes Adam and Yogi momentum with rate
rate / tau; a small one moves each parameter by about `rate` per round. v begins with tau^2, and
there is no correction of its bias, as in the source.
Source: S. J. Reddi et al., Adaptive Federated Optimization, ICLR 2021, algorithm 2; for momentum
T. Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.core.errors import UsageError


class ServerSgd:
    """SGD with momentum; FedAvg with the defaults.

    Args:
        parameters: of the model.
        rate: factor of the change.
        momentum: in [0, 1); 0 keeps no state.
    """

    def __init__(self, parameters: int, *, rate: float = 1.0, momentum: float = 0.0) -> None:
        if not rate > 0 or not 0 <= momentum < 1:
            raise UsageError(
                f"a rate of {rate:g} and a momentum of {momentum:g} do not train",
                where="server optimizer",
                fix="Give a rate above 0 and a momentum in [0, 1)",
            )
        self.parameters, self.rate, self.momentum = parameters, rate, momentum
        self._mean = np.zeros(parameters if momentum else 0, np.float32)

    def step(self, model: np.ndarray, change: np.ndarray) -> np.ndarray:
        """Return the next model; the arguments stay as they are. All float32, (parameters,)."""
        _check_length(self.parameters, model, change)
        if not self.momentum:
            return np.asarray(model + np.float32(self.rate) * change)
        self._mean *= np.float32(self.momentum)
        self._mean += change
        return np.asarray(model + np.float32(self.rate) * self._mean)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"kind": type(self).__name__, "mean": self._mean.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            UsageError: the state is of another optimizer or model.
        """
        _load(self, state, {"mean": self._mean})


class ServerAdam:
    """FedAdam.

    Args:
        parameters: of the model.
        rate: about how far a parameter moves per round while all rounds agree.
        beta1, beta2: decay of the means of the change and of its square.
        tau: degree of adaptivity; changes well below it are not amplified.
    """

    def __init__(
        self,
        parameters: int,
        *,
        rate: float = 0.01,
        beta1: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        if not rate > 0 or not 0 <= beta1 < 1 or not 0 <= beta2 < 1 or not tau > 0:
            raise UsageError(
                f"rate {rate:g}, betas {beta1:g} and {beta2:g}, tau {tau:g} do not train",
                where="server optimizer",
                fix="Give a rate and a tau above 0, and betas in [0, 1)",
            )
        self.parameters, self.rate, self.tau = parameters, rate, tau
        self.beta1, self.beta2 = beta1, beta2
        self._mean = np.zeros(parameters, np.float32)
        self._square = np.full(parameters, tau**2, np.float32)

    def step(self, model: np.ndarray, change: np.ndarray) -> np.ndarray:
        """Return the next model; the arguments stay as they are. All float32, (parameters,)."""
        _check_length(self.parameters, model, change)
        self._mean *= np.float32(self.beta1)
        self._mean += np.float32(1 - self.beta1) * change
        self._update_square(np.square(change))
        step = np.sqrt(self._square)
        step += np.float32(self.tau)
        np.divide(self._mean, step, out=step)
        step *= np.float32(self.rate)
        step += model
        return np.asarray(step)

    def _update_square(self, square: np.ndarray) -> None:
        """Move the mean of the squares; may overwrite `square`."""
        self._square *= np.float32(self.beta2)
        square *= np.float32(1 - self.beta2)
        self._square += square

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        kind = type(self).__name__
        return {"kind": kind, "mean": self._mean.copy(), "square": self._square.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            UsageError: the state is of another optimizer or model.
        """
        _load(self, state, {"mean": self._mean, "square": self._square})


class ServerYogi(ServerAdam):
    """FedYogi: as FedAdam, but a small change does not make it forget large ones quickly."""

    def _update_square(self, square: np.ndarray) -> None:
        sign = np.sign(self._square - square)
        sign *= square
        sign *= np.float32(1 - self.beta2)
        self._square -= sign


def _check_length(parameters: int, model: np.ndarray, change: np.ndarray) -> None:
    if model.shape != (parameters,) or change.shape != (parameters,):
        raise UsageError(
            f"model and change must have {parameters} parameters",
            where="server optimizer",
            why=f"their shapes are {model.shape} and {change.shape}",
            fix="Make the optimizer for the model that it moves",
        )


def _load(optimizer: object, state: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    kind = type(optimizer).__name__
    fits = state.get("kind") == kind and all(
        name in state and np.shape(state[name]) == array.shape for name, array in arrays.items()
    )
    if not fits:
        shapes = {name: np.shape(value) for name, value in state.items() if name != "kind"}
        raise UsageError(
            f"this is not the state of this {kind}",
            where="server optimizer",
            why=f"it is of {state.get('kind')} with {shapes}",
            fix="Load it into the optimizer and the model that it was taken from",
        )
    for name, array in arrays.items():
        array[:] = state[name]
