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
    Changes speed: `flat_below_bytes`, `chunk_bytes`.

    Attributes:
        wire: ``bfloat16`` has float32 sums travel between hosts in half the bytes: each host's sum
            is rounded to it, and so is each addition of another host's; ``same`` sends what the
            tensor has.
        flat_below_bytes: a call of fewer bytes runs on one flat gloo group. On emulated hosts two
            levels were faster at all measured sizes, from 16 KiB (bench/hierarchy.py).
        chunk_bytes: a tensor travels between H hosts in chunks of H times as many bytes: two are on
            the wire while the host sums the next (bench/hierarchy.py).
    """

    section: ClassVar[str] = "collectives"
    wire: Literal["same", "bfloat16"] = "same"
    flat_below_bytes: int = 4 * KIB
    chunk_bytes: int = 512 * KIB

    def __post_init__(self) -> None:
        for name, least in (("flat_below_bytes", 0), ("chunk_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name} must be at least {least}, got {getattr(self, name)}",
                    fix="Give a number of bytes",
                )
