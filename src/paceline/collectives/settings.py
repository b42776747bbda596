"""What all ranks of a group must decide alike: rank 0 decides it, the store carries it.

Rank 0 reads its configuration and its machine file. If that fails, all ranks raise, each with rank
0's reason: a rank that only rank 0's log could explain would wait for its deadline.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.collectives.choice import Crossover, PathChoice, measured_crossovers
from paceline.collectives.hosts import from_first_rank
from paceline.collectives.options import FLAT_BELOW_BYTES, CollectivesConfig
from paceline.core.config import resolve
from paceline.core.errors import ConfigError, CorruptData, StorageError
from paceline.core.machine_file import machine_path, read_machine
from paceline.core.record import Record

if TYPE_CHECKING:
    from paceline.collectives.hosts import KeyValueStore
    from paceline.core.machine import CollectiveCost

_LOG = logging.getLogger(__name__)
_MEASURE = (
    "start `paceline probe --collectives` as the ranks of a job on these hosts, for example with "
    "srun"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSettings(Record):
    """What holds for all ranks of a group.

    Attributes:
        config: rank 0's.
        choice: which calls take two levels.
    """

    config: CollectivesConfig
    choice: PathChoice


def common_settings(
    store: KeyValueStore,
    rank: int,
    hosts: int,
    ranks: int,
    timeout_s: float,
    config: CollectivesConfig | None = None,
) -> GroupSettings:
    """Return rank 0's settings; every rank of the group calls this.

    Args:
        store: of the group.
        rank: this rank within the group.
        hosts: of the group.
        ranks: of the group.
        timeout_s: the longest wait for rank 0.
        config: in place of what file and environment say.

    Raises:
        ConfigError, NotFound, StorageError: rank 0's configuration or machine file is not valid;
            on other ranks a UsageError with that reason.
        DeadlineExceeded: rank 0 did not come.
    """

    def decide() -> str:
        own = config or resolve(CollectivesConfig).config
        return GroupSettings(config=own, choice=choose(own, hosts, ranks)).to_text()

    text = from_first_rank(store, "settings", rank, decide, timeout_s)
    return GroupSettings.from_text(text, where="rank 0's settings")


def choose(config: CollectivesConfig, hosts: int, ranks: int) -> PathChoice:
    """Return which calls take two levels: by a number, by a machine's table, by the default.

    On one host none does; a machine file that `config` names is read all the same.

    Raises:
        ConfigError, NotFound, StorageError: the machine file that `config` names cannot be read.
    """
    if hosts == 1:
        if config.machine:
            _costs_between_hosts(config.machine)  # an error here, as it will be on several hosts
        return PathChoice(otherwise=Crossover(sizes_bytes=(float(FLAT_BELOW_BYTES),)))
    if config.flat_below_bytes is not None:
        return PathChoice(otherwise=Crossover(sizes_bytes=(float(config.flat_below_bytes),)))
    costs = _named_table(config.machine) if config.machine else _own_table()
    return PathChoice(
        measured=measured_crossovers(costs, hosts, ranks),
        otherwise=Crossover(sizes_bytes=(float(FLAT_BELOW_BYTES),)),
    )


@functools.cache  # a job makes many groups: a warning is given once
def _named_table(path: str) -> tuple[CollectiveCost, ...]:
    table = _costs_between_hosts(path)
    if not table:
        _LOG.warning(
            "%s has no costs of collectives between hosts: calls below %d bytes go to gloo, others "
            "in two levels; to measure them, %s",
            *(path, FLAT_BELOW_BYTES, _MEASURE),
        )
    return table


@functools.cache
def _own_table() -> tuple[CollectiveCost, ...]:
    """Return the table of this host's probed machine; a job runs without one, too."""
    path = machine_path()
    if not path.exists():
        return ()
    try:
        return _costs_between_hosts(str(path))
    except (ConfigError, StorageError, CorruptData) as problem:
        _LOG.warning("the probed machine is not used for collectives: %s", problem)
        return ()


@functools.cache  # and the file is read once
def _costs_between_hosts(path: str) -> tuple[CollectiveCost, ...]:
    return tuple(cost for cost in read_machine(Path(path)).collectives if cost.hosts > 1)
