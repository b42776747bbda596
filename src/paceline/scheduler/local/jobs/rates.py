"""Rates of a queue's jobs: what sizes of elastic jobs, and sharing, are decided by.

They are measured before, given with a submission, and corrected by what running jobs report.

rates.csv       units of work per second by profile, device type and number of devices, as
`queue simulate` reads them (docs/reference/queue-csv.md)
sharing.json    {"version": 1, "most": 2, "used": {"digits": [0.6, 0.3]},
                 "pairs": {"digits": {"digits": 0.8}}}
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, UsageError
from paceline.core.files import read_text
from paceline.core.record import Record, nearest
from paceline.core.scaling_profile import is_profile
from paceline.runs.folder import RunFolder
from paceline.scheduler.formats.queue_csv import read_rates
from paceline.scheduler.rates.corrected import CorrectedRates, Learned
from paceline.scheduler.rates.model import ANY_TYPE, Profile, RateModel
from paceline.scheduler.rates.sharing import MeasuredPairs, ResourceVectors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paceline.scheduler.cluster import Cluster
    from paceline.scheduler.rates.rates import Rates

DOUBT = 0.1  # about shares that were not measured, before any report
_LEARNED_MOST = 1000  # factors of a kind that a segment of the log hands on to the next


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSharing(Record):
    """What jobs use of a device, and how many may share one.

    Attributes:
        used: fractions of a device's resources (compute, memory bandwidth, ...) that a job of a
            profile uses; a job of a profile that is missing here fills its devices.
        pairs: share of its rate that a job of the first profile keeps beside one of the second,
            where both were measured together; other groups are estimated by what they use.
        most: jobs on one set of devices; 1: none share.
        interference: share of its rate that a job loses to each neighbour in any case.
    """

    used: dict[str, tuple[float, ...]] = field(default_factory=dict)
    pairs: dict[str, dict[str, float]] = field(default_factory=dict)
    most: int = 1
    interference: float = 0.05

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ConfigError(f"{self.most} jobs share devices", fix="Give at least 1")
        for profile, kept_beside in self.pairs.items():
            for neighbour, kept in kept_beside.items():
                if not 0 <= kept <= 1:
                    raise ConfigError(
                        f"a job of '{profile}' keeps {kept} of its rate beside '{neighbour}'",
                        fix="Give a share between 0 (they must not share) and 1",
                    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRates(Record):
    """Rates by profile, as the log of a queue has them.

    Attributes:
        alone: units of work per second by profile, device type (empty: any) and number of devices.
        sharing: what jobs use of devices that they share.
        learns: whether reports of jobs correct the rates; logs of before have uncorrected ones.
        given: as `alone`, with submissions; goes before it.
        learned: from reports, before this segment of the log.
    """

    alone: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    sharing: MeasuredSharing = MeasuredSharing()  # frozen
    learns: bool = False
    given: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)
    learned: Learned | None = None

    def learning(self, cluster: Cluster) -> RateModel | CorrectedRates:
        """Return the rates that a queue begins with, corrected by reports if they learn."""
        model = self.model(cluster)
        if not self.learns:
            return model
        # Pairs that were measured together are not in doubt.
        doubt = 0.0 if self.sharing.pairs else DOUBT
        return CorrectedRates(
            model, doubt=doubt, learned=self.learned, is_measured=model.profiles.__contains__
        )

    def given_also(self, profile: str, alone: dict[str, dict[str, float]]) -> MeasuredRates:
        """Return these rates with those of a profile that a submission brought."""
        kept = {name: rates for name, rates in self.given.items() if name != profile}
        return replace(self, given=dict([*kept.items(), (profile, alone)][-_LEARNED_MOST:]))

    def after(self, state_rates: Rates) -> MeasuredRates:
        """Return these rates with what was given and learned in a segment of the log."""
        if not isinstance(state_rates, CorrectedRates):
            return self
        return replace(self, learned=state_rates.learned(_LEARNED_MOST))

    def model(self, cluster: Cluster) -> RateModel:
        """Return the rate model for a cluster, as measured."""
        profiles = {
            name: Profile(
                alone={
                    device_type: {int(count): rate for count, rate in by_count.items()}
                    for device_type, by_count in by_type.items()
                }
            )
            for name, by_type in {**self.alone, **self.given}.items()
        }
        if self.sharing.most == 1:
            return RateModel(profiles)
        vectors = ResourceVectors(
            used=self.sharing.used,
            memory_bytes={node.device_type: node.memory_bytes for node in cluster.nodes},
            most=self.sharing.most,
            interference=self.sharing.interference,
        )
        return RateModel(profiles, MeasuredPairs(self.sharing.pairs, vectors))


def read_measured(rates: Path | None, sharing: Path | None) -> MeasuredRates:
    """Return what is known of rates.

    Args:
        rates: CSV file, or scaling profile of `paceline characterize`; None: every job
            makes a unit of work per second.
        sharing: JSON file; None: no job shares devices.

    Raises:
        NotFound: a file is not there.
        CorruptData: a line of the CSV file cannot be read.
        ConfigError: the JSON file is not one of sharing.
    """
    alone = {
        name: {
            device_type: {str(count): rate for count, rate in by_count.items()}
            for device_type, by_count in profile.alone.items()
        }
        for name, profile in (read_rates(rates) if rates is not None else {}).items()
    }
    if sharing is None:
        return MeasuredRates(alone=alone, learns=True)
    shared = MeasuredSharing.from_text(read_text(sharing), where=str(sharing))
    return MeasuredRates(alone=alone, sharing=shared, learns=True)


def read_given(paths: Sequence[Path], profile: str) -> tuple[str, dict[str, dict[str, float]]]:
    """Return a profile and its rates by device type and number of devices, from files of a user.

    Args:
        paths: CSV files and scaling profiles as of `read_measured`, and folders of runs: these
            count steps on as many devices as they had ranks, of any type.
        profile: name of the rates' class; empty: the only one that the CSV files have.

    Raises:
        NotFound: a file is not there.
        CorruptData: a line, or the result of a run, cannot be read.
        UsageError: a file has no rates of the profile, or it is not clear which is meant.
    """
    by_profile: dict[str, dict[str, dict[str, float]]] = {}
    of_runs: dict[str, float] = {}
    for path in paths:
        if path.is_dir() and not is_profile(path):
            ranks, rate = _rate_of_run(path)
            of_runs[str(ranks)] = rate
            continue
        for name, measured in read_rates(path).items():
            for device_type, by_count in measured.alone.items():
                known = by_profile.setdefault(name, {}).setdefault(device_type, {})
                known.update({str(count): rate for count, rate in by_count.items()})
    if not profile and len(by_profile) == 1:
        (profile,) = by_profile
    if by_profile and profile not in by_profile:
        raise UsageError(
            f"no rates of a profile '{profile}'" if profile else "rates of several profiles",
            where=", ".join(str(path) for path in paths),
            fix=f"Give --profile: {nearest(profile, by_profile)}",
        )
    rates = by_profile.get(profile, {})
    if of_runs:
        rates[ANY_TYPE] = {**rates.get(ANY_TYPE, {}), **of_runs}
    return profile, rates


def _rate_of_run(path: Path) -> tuple[int, float]:
    """Return the ranks of a run, and its steps per second."""
    result = RunFolder.open(path).read_result()
    if result is None or not result.step_time_s > 0:
        raise UsageError(
            "the run has no steps to take a rate from",
            where=str(path),
            fix="Name a run that ended, with steps: see paceline why RUN",
        )
    return result.world_size, 1 / result.step_time_s
