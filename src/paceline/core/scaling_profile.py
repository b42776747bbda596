"""The profile of a program on a machine: how its throughput grows with ranks, and what it takes.

`paceline characterize` writes it from repeated runs, or from predictions. The report draws it, the
scheduler takes its rates from it, and `paceline plan --from` the runs that it names.

::

    profile.json                     one program, one machine
      curves                         one for each combination of settings but the ranks
        points                       one for each number of ranks: throughput with its interval,
                                     efficiency, phases of a step, transfer rates, accuracy
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.record import Record

if TYPE_CHECKING:
    from pathlib import Path

PROFILE_NAME = "profile.json"  # in the folder of a sweep
# Of the throughput of a rank, relative to the fewest ranks: below it a job wastes its devices.
EFFICIENT = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatedFigure(Record):
    """A figure that was measured several times, or predicted with its interval.

    Attributes:
        value: the geometric mean of the repeats, or the prediction.
        low: lower end of the 95 % interval; None after a single repeat.
        high: upper end.
        variation: coefficient of variation, the standard deviation of repeats over their mean;
            None after a single one.
        repeats: how many; 0 of a prediction.
    """

    value: float
    low: float | None = None
    high: float | None = None
    variation: float | None = None
    repeats: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPoint(Record):
    """What a job does on a number of ranks; seconds and bytes are per step, means over ranks.

    Attributes:
        ranks: of the job.
        throughput: of all ranks together, in units of the profile per second.
        efficiency: throughput of a rank over that on the curve's fewest ranks.
        step_s: the median step.
        step_s_p95: the step that 5 % of steps exceed; 0 of a prediction.
        phases: seconds of a step by the names of `Breakdown`.
        limit: what the largest part of a step goes to, in words.
        busy_cores: cores of a node that the ranks' threads used on average, 0 if not known.
        peak_memory_bytes: of the largest rank.
        reduced_bytes: that a rank gives to collectives.
        reduced_bytes_per_s: rate of the costliest class of them; 0 without.
        input_bytes_per_s: stored bytes of samples that all ranks took in; 0 if not known.
        spread: throughput on devices of different nodes over that on devices close together; None
            if not known.
        scores: what the script said of its training, by name, as its accuracy.
        run: folder of the run with the median throughput, beside the profile, if its plan can
            correct predictions; else empty.
    """

    ranks: int
    throughput: RepeatedFigure
    efficiency: float
    step_s: float
    step_s_p95: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    limit: str = ""
    busy_cores: float = 0.0
    peak_memory_bytes: int = 0
    reduced_bytes: float = 0.0
    reduced_bytes_per_s: float = 0.0
    input_bytes_per_s: float = 0.0
    spread: float | None = None
    scores: dict[str, RepeatedFigure] = field(default_factory=dict)
    run: str = ""

    @property
    def computing_s(self) -> float:
        """Seconds of a step in which a rank does not exchange gradients or wait for other ranks."""
        exchange_s = self.phases.get("transfer", 0.0) + self.phases.get("waiting", 0.0)
        return max(0.0, sum(self.phases.values()) - exchange_s)

    @property
    def wasted(self) -> float:
        """Share of the ranks' time that does nothing for the throughput, 0 to 1."""
        return min(1.0, max(0.0, 1 - self.efficiency))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingCurve(Record):
    """Throughput by the number of ranks, at equal settings.

    Attributes:
        name: unique in the profile; jobs of a queue name it as their profile.
        settings: values of the sweep's axes, by the axis's name.
        points: with rising ranks.
    """

    name: str
    settings: dict[str, str]
    points: tuple[RankPoint, ...]

    @property
    def efficient_ranks(self) -> int:
        """The most ranks up to which every measured number of them is efficient (`EFFICIENT`)."""
        most = self.points[0].ranks
        for point in self.points[1:]:
            if point.efficiency < EFFICIENT:
                break
            most = point.ranks
        return most

    def point(self, ranks: int) -> RankPoint | None:
        """Return what was measured on so many ranks; None if it was not."""
        return next((point for point in self.points if point.ranks == ranks), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedCell(Record):
    """Settings with which the program did not run to its end.

    Attributes:
        name: of the curve.
        ranks: of the job.
        why: in words.
    """

    name: str
    ranks: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingProfile(Record):
    """A program on a machine; see the module.

    Attributes:
        program: that was run or predicted.
        machine: name of it.
        device: what a rank computes on.
        device_type: for which the scheduler takes the rates; empty: for any.
        source: whether cells were run or predicted.
        unit: of the throughput.
        samples: of an epoch of the training data; 0 if not known.
        epochs: of each run; 0 if not known.
        axes: values that the sweep asked for, by the axis's name; the first one is the baseline.
        curves: the baseline's first.
        failed: settings that do not run.
        left_out: settings that the time budget left out, in words.
        repeats: that were asked for.
        elapsed_s: of all runs.
        foreign_cores: cores that other processes used meanwhile, on average; None if not known.
    """

    kind: Literal["scaling-profile"] = "scaling-profile"
    program: str
    machine: str
    device: str = ""
    device_type: str = ""
    source: Literal["measured", "predicted"] = "measured"
    unit: str = "samples"
    samples: int = 0
    epochs: int = 0
    axes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    curves: tuple[ScalingCurve, ...]
    failed: tuple[FailedCell, ...] = ()
    left_out: tuple[str, ...] = ()
    repeats: int = 1
    elapsed_s: float = 0.0
    foreign_cores: float | None = None

    def curve(self, name: str) -> ScalingCurve:
        """Return the curve of a name, as `curves` has it."""
        return next(curve for curve in self.curves if curve.name == name)


def read_profile(path: Path) -> ScalingProfile:
    """Return the profile at `path`: its file, or the folder of the sweep that wrote it.

    Raises:
        NotFound: there is no such file.
        ConfigError: it is no profile, or one without a curve.
    """
    file = path / PROFILE_NAME if path.is_dir() else path
    profile = ScalingProfile.from_text(read_text(file), where=str(file))
    empty = [curve.name for curve in profile.curves if not curve.points]
    if not profile.curves or empty:
        raise ConfigError(
            "the profile has no measured throughput",
            where=f"{file}: {', '.join(empty) or 'curves'}",
            fix="Let `paceline characterize` go on with this sweep, with a larger --budget",
        )
    return profile


def is_profile(path: Path) -> bool:
    """Return whether `path` is the file of a profile or the folder of a sweep with one."""
    file = path / PROFILE_NAME if path.is_dir() else path
    try:
        with file.open("rb") as stream:
            return b'"scaling-profile"' in stream.read(200)
    except OSError:
        return False
