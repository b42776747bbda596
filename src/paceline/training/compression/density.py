"""How many gradient entries a step sends: a warm-up from many to few."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class DensitySchedule:
    """The share of gradient entries to send, which falls by one factor per stage of the warm-up.

    The default stages send 25 %, 6.3 %, 1.6 % and 0.4 %, then 0.1 %: the published warm-up, whose
    stages are epochs. Here they are steps, since who sends gradients knows no epochs; by default
    1,000 together, which is how long an entry waits on average at 0.1 %.

    Attributes:
        density: after the warm-up, in (0, 1].
        stages: of the warm-up.
        steps_per_stage: optimizer steps of a stage; 0 = no warm-up.

    Source: Lin, Han, Mao, Wang, Dally, Deep Gradient Compression, ICLR 2018, section 3.3.
    """

    density: float = 0.001
    stages: int = 4
    steps_per_stage: int = 250

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

    def __str__(self) -> str:
        """Return the schedule in words.

        >>> str(DensitySchedule())
        '25%, 6.3%, 1.6%, 0.4% of the entries for 250 steps each, then 0.1%'
        >>> str(DensitySchedule(density=0.01, steps_per_stage=0))
        '1% of the entries from the first step'
        """
        if not self.warmup_steps:
            return f"{100 * self.density:.2g}% of the entries from the first step"
        firsts = range(0, self.warmup_steps, self.steps_per_stage)
        stages = ", ".join(f"{100 * self.at(step):.2g}%" for step in firsts)
        return (
            f"{stages} of the entries for {self.steps_per_stage} steps each, "
            f"then {100 * self.density:.2g}%"
        )

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
