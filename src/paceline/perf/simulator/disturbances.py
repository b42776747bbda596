"""What disturbs the ranks of a simulation: slow ranks, jitter, links that fail for a while."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """A rank that computes slower than the others.

    Attributes:
        rank: global number.
        factor: times that its compute takes, at least 1 if it is slower.
    """

    rank: int
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkOutage:
    """A rank that cannot communicate for a while; what it would send or receive waits.

    Attributes:
        rank: global number.
        begin_s: of the simulated time.
        seconds: that the outage lasts.
    """

    rank: int
    begin_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        """When the link is there again."""
        return self.begin_s + self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Disturbances:
    """All that disturbs a simulation.

    Attributes:
        slow: ranks that compute slower.
        outages: links that fail for a while.
        jitter: standard deviation of each pass over its mean, log-normal; 0: none.
        seed: of the jitter.
    """

    slow: tuple[SlowRank, ...] = ()
    outages: tuple[LinkOutage, ...] = ()
    jitter: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [item for item in self.slow if item.factor <= 0]
        wrong_outages = [item for item in self.outages if item.seconds < 0 or item.begin_s < 0]
        if wrong or wrong_outages or not 0 <= self.jitter < 1:
            raise ConfigError(
                "a factor is not above 0, an outage is negative, or a jitter is not in [0, 1)",
                where="Disturbances",
                fix="Give factors above 0, seconds from 0, a jitter below 1",
            )

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks that differ from the others."""
        slow = {item.rank for item in self.slow}
        return frozenset(slow | {item.rank for item in self.outages})

    def factor_of(self, rank: int) -> float:
        """Return the times that a rank's compute takes."""
        return next((item.factor for item in self.slow if item.rank == rank), 1.0)

    def outages_of(self, rank: int) -> tuple[tuple[float, float], ...]:
        """Return the (begin, end) of a rank's outages in seconds, in order."""
        found = (item for item in self.outages if item.rank == rank)
        return tuple(sorted((item.begin_s, item.end_s) for item in found))
