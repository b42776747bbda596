"""The file that describes a federation: TOML, one table per part.

    clients = 100
    strategy = "paceline"

    [data]
    folder = "fashion-mnist"
    alpha = 0.3

    [devices]
    link_mbit_per_s = 5.0

An unknown key is an error that names the place.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.record import Record
from paceline.federated.selection import Goals
from paceline.federated.simulate.engine import ClientWork
from paceline.federated.simulate.faults import FaultOptions
from paceline.federated.simulate.world import DeviceOptions

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions(Record):
    """Which data, and how they are divided.

    Attributes:
        folder: with the four IDX files of MNIST's format, perhaps compressed by gzip; "": the
            digits of scikit-learn.
        alpha: of the Dirichlet distribution by which classes are divided among clients.
        most_samples: of a client.
        slow_classes: classes whose owners get the slowest devices.
        test_samples: to evaluate with; 0: all.
    """

    folder: str = ""
    alpha: float = 0.3
    most_samples: int = 600
    slow_classes: tuple[int, ...] = ()
    test_samples: int = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class FederationConfig(Record):
    """A federation.

    Attributes:
        clients: how many.
        cohort: updates that make a new model.
        strategy: how it is run; see `paceline.federated.strategies`.
        seed: of everything that is drawn.
        budget_s: simulated seconds.
        rounds: new models, at most.
        target: accuracy that is asked for.
        goals: of selection.
        work: of a client that is asked.
        data: that clients have.
        devices: that they have.
        faults: clients that fail.
        scores: file of benchmark scores of phones: a JSON list of objects with cpu_f_score.
    """

    clients: int = 100
    cohort: int = 10
    strategy: str = "paceline"
    seed: int = 0
    budget_s: float = 9000.0
    rounds: int = 400
    target: float = 0.8
    goals: Goals = field(default_factory=Goals)
    work: ClientWork = field(default_factory=ClientWork)
    data: DataOptions = field(default_factory=DataOptions)
    devices: DeviceOptions = field(default_factory=DeviceOptions)
    faults: FaultOptions = field(default_factory=FaultOptions)
    scores: str = ""

    @classmethod
    def small(cls) -> FederationConfig:
        """Return a federation of 20 clients, for whom the digits of scikit-learn suffice."""
        work = ClientWork(epochs=2.0, learning_rate=0.05)
        return cls(clients=20, cohort=5, rounds=200, work=work)

    @classmethod
    def from_toml(cls, path: Path) -> FederationConfig:
        """Return what a file describes; relative paths in it begin at its folder.

        Raises:
            ConfigError: it is not TOML, or a key or value in it is wrong.
            NotFound: there is no such file.
        """
        try:
            data = tomllib.loads(read_text(path))
        except tomllib.TOMLDecodeError as problem:
            raise ConfigError(
                "a federation's file is not TOML",
                where=str(path),
                why=str(problem),
                fix="Write it as docs/guides/federated.md shows",
            ) from problem
        found = cls.from_json(data, where=str(path))
        found.check(str(path))
        images = str(path.parent / found.data.folder) if found.data.folder else ""
        scores = str(path.parent / found.scores) if found.scores else ""
        return replace(found, data=replace(found.data, folder=images), scores=scores)

    def check(self, where: str) -> None:
        """Refuse numbers that no federation can have.

        Args:
            where: names the source in errors.

        Raises:
            ConfigError: a number is too small.
        """
        least = {"clients": 1, "cohort": 1, "rounds": 1, "budget_s": 1e-9}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise ConfigError(
                    f"{name} = {getattr(self, name)}",
                    where=where,
                    fix=f"Give at least {value:g}",
                )
        if self.cohort > self.clients:
            raise ConfigError(
                f"a cohort of {self.cohort} of {self.clients} clients",
                where=where,
                fix="Give a cohort of at most as many as there are clients",
            )
        self.faults.check(self.clients, where)
        if self.data.alpha <= 0:
            raise ConfigError(
                f"data.alpha = {self.data.alpha}", where=where, fix="Give a number above 0"
            )
