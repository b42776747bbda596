"""How collectives between hosts run: the configuration of the backend ``paceline``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from paceline.core.config import Configuration
from paceline.core.errors import ConfigError

KIB = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectivesConfig(Configuration):
    """How collectives between hosts run; rank 0's values hold for all ranks.

    Changes results: `wire`.
    Changes speed: `flat_below_bytes`.

    Attributes:
        wire: ``bfloat16`` sends float32 sums between hosts in half the bytes: each host's sum is
            rounded, the hosts' sums are added in float32, and the total is rounded; ``same`` sends
            what the tensor has.
        flat_below_bytes: an all-reduce of fewer bytes runs on one flat gloo group: there two levels
            take longer, for they have more messages one after the other (bench/hierarchy.py).
    """

    section: ClassVar[str] = "collectives"
    wire: Literal["same", "bfloat16"] = "same"
    flat_below_bytes: int = 256 * KIB

    def __post_init__(self) -> None:
        if self.flat_below_bytes < 0:
            raise ConfigError(
                f"flat_below_bytes must be at least 0, got {self.flat_below_bytes}",
                fix="Give a number of bytes",
            )
