"""How many gradient entries a step sends: a warm-up from many to few."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DensitySchedule:
    """The share of gradient entries to send, which falls by one factor per stage of the warm-up.

    The default stages send 25 %, 6.3 %, 1.6 % and 0.4 %, then 0.1 %: the published warm-up.

    Attributes:
        density: after the warm-up, in (0, 1].
        stages: of the warm-up; the published ones are epochs.
        steps_per_stage: optimizer steps of a stage; 0 = no warm-up.

    Source: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018, section 3.3.
    """

    density: float = 0.001
    stages: int = 4
    steps_per_stage: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise ConfigError(
                f"density must be above 0 and at most 1, got {self.density:g}",
                where="DensitySchedule",
                fix="Give the share of entries to send, for example 0.001",
            )
        if self.stages < 0 or self.steps_per_stage < 0:
            raise ConfigError(
                f"stages and steps_per_stage must be 0 or more, got {self.stages} and "
                f"{self.steps_per_stage}",
                where="DensitySchedule",
                fix="Give 0 for no warm-up",
            )

    @property
    def warmup_steps(self) -> int:
        """Steps before the final density."""
        return self.stages * self.steps_per_stage

    def at(self, step: int) -> float:
        """Return the density of a step, counted from 0.

        >>> schedule = DensitySchedule(density=0.001, steps_per_stage=10)
        >>> [round(schedule.at(step), 4) for step in (0, 9, 10, 20, 30, 40)]
        [0.2512, 0.2512, 0.0631, 0.0158, 0.004, 0.001]
        """
        if step >= self.warmup_steps:
            return self.density
        stage = step // self.steps_per_stage
        return float(self.density ** ((stage + 1) / (self.stages + 1)))
