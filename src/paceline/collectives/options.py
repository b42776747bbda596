"""How collectives between hosts run: the configuration of the backend ``paceline``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.core.config import Configuration
from paceline.core.errors import ConfigError

KIB = 1024
# Without a table: two levels were faster at all measured sizes, from 16 KiB (bench/hierarchy.py).
FLAT_BELOW_BYTES = 4 * KIB


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesConfig(Configuration):
    """How collectives between hosts run; rank 0's values hold for all ranks.

    Changes results: `wire`.
    Changes speed: `between_hosts`, `flat_below_bytes`, `machine`, `chunk_bytes`.

    Attributes:
        wire: ``bfloat16`` has float32 sums travel between hosts in half the bytes: each host's sum
            is rounded to it, and so is each addition of another host's; ``same`` sends what the
            tensor has.
        between_hosts: what carries the data of two levels between hosts: gloo's TCP, or the MPI by
            whose launcher the ranks were started. Tables are measured over gloo.
        flat_below_bytes: a call of fewer bytes runs on one flat gloo group, whatever was measured;
            None leaves it to the table of the machine, and is 4 KiB for what the table lacks.
        machine: path of a machine file with costs of collectives between hosts (`paceline probe
            --collectives`); None takes the probed machine of rank 0's host, if it has such costs.
        chunk_bytes: a tensor travels between H hosts in chunks of H times as many bytes: two are on
            the wire while the host sums the next (bench/hierarchy.py).
    """

    section: ClassVar[str] = "collectives"
    wire: Literal["same", "bfloat16"] = "same"
    between_hosts: Literal["gloo", "mpi"] = "gloo"
    flat_below_bytes: int | None = None
    machine: str | None = None
    chunk_bytes: int = 512 * KIB

    def __post_init__(self) -> None:
        for name, least in (("flat_below_bytes", 0), ("chunk_bytes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(
                    f"{name} must be at least {least}, got {value}",
                    fix="Give a number of bytes",
                )
