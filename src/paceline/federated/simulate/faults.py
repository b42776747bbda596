"""Clients that fail in a simulation, to see what the server does about them.

silent        asked, and never heard of again
not_finite    a NaN in each update
wrong_shape   one parameter too few
giant         a million times the update
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import ConfigError
from paceline.core.record import Record

if TYPE_CHECKING:
    from paceline.federated.updates import ModelUpdate

_GIANT = np.float32(1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOptions(Record):
    """Which clients fail, by their numbers from 0.

    Attributes:
        silent: never answer.
        not_finite: send NaN.
        wrong_shape: send vectors that do not fit the model.
        giant: send updates that would drown all others.
    """

    silent: tuple[int, ...] = ()
    not_finite: tuple[int, ...] = ()
    wrong_shape: tuple[int, ...] = ()
    giant: tuple[int, ...] = ()

    def check(self, clients: int, where: str) -> None:
        """Refuse clients that are not there.

        Args:
            clients: how many there are.
            where: names the source in errors.

        Raises:
            ConfigError: a number is too large, or below 0.
        """
        for field in fields(self):
            for client in getattr(self, field.name):
                if not 0 <= client < clients:
                    raise ConfigError(
                        f"faults.{field.name} names client {client}",
                        where=where,
                        why=f"there are {clients} clients, numbered from 0",
                        fix=f"Give numbers from 0 to {clients - 1}",
                    )

    def spoil(self, client: int, update: ModelUpdate) -> ModelUpdate:
        """Return what a client sends in place of its update."""
        if client in self.not_finite:
            delta = update.delta.copy()
            delta[0] = np.nan
            return replace(update, delta=delta)
        if client in self.wrong_shape:
            return replace(update, delta=update.delta[:-1])
        if client in self.giant:
            return replace(update, delta=update.delta * _GIANT)
        return update
