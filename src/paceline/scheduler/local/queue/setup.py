"""What the decisions of a queue depend on beside its events, as each segment of the log has it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import ConfigError, UsageError
from paceline.core.record import Record, nearest
from paceline.scheduler.local.queue.job_queue import JobQueue
from paceline.scheduler.policies import POLICIES
from paceline.scheduler.policies.choose import make_policies
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.policies.rounds import Rounds
from paceline.scheduler.state.state import State

if TYPE_CHECKING:
    from paceline.scheduler.decide import Policy
    from paceline.scheduler.local.jobs.devices import LocalDevices
    from paceline.scheduler.local.jobs.rates import MeasuredRates


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyOptions(Record):
    """What a policy is given beside its name.

    Attributes:
        objective: what is planned for; empty: the policy's own.
        round_s: it decides at multiples of this time only; 0: whenever something happens.
        quotas: most devices of a tenant at a time, by its name; others have no limit.
    """

    objective: str = ""
    round_s: float = 0.0
    quotas: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for tenant, devices in self.quotas.items():
            if devices < 0:
                raise ConfigError(
                    f"tenant '{tenant}' may take {devices} devices", fix="Give 0 or more"
                )

    def make(self, name: str) -> Policy:
        """Return a new policy.

        Raises:
            UsageError: no policy has this name, or it has no such option.
        """
        if name not in POLICIES:
            raise UsageError(f"no policy is called '{name}'", fix=nearest(name, POLICIES))
        chosen = make_policies(
            [name], objective=self.objective or None, round_s=self.round_s or None
        )
        policy = chosen[0]
        inner = policy.policy if isinstance(policy, Rounds) else policy
        if isinstance(inner, Paceline):
            inner.quotas = self.quotas
        elif self.quotas:
            raise UsageError(
                f"the policy {name} has no quotas",
                fix="Serve with --policy paceline, or without --quota",
            )
        return policy


class Setup(NamedTuple):
    """What decisions depend on beside events.

    Attributes:
        policy: its name.
        devices: of the machine.
        rates: as measured.
        options: of the policy.
    """

    policy: str
    devices: LocalDevices
    rates: MeasuredRates
    options: PolicyOptions = PolicyOptions()

    @property
    def declared(self) -> Setup:
        """The setup as `serve` was given it, without what was learned meanwhile."""
        return self._replace(rates=replace(self.rates, given={}, learned=None))

    def after(self, rates: MeasuredRates) -> Setup:
        """Return the setup with what a queue before this one had learned."""
        return self._replace(rates=replace(self.rates, given=rates.given, learned=rates.learned))


def make_queue(setup: Setup) -> JobQueue:
    """Return an empty queue, the same whenever its log is decided again.

    Raises:
        UsageError: there is no such policy, or it has no such option.
    """
    cluster = setup.devices.cluster
    policy = setup.options.make(setup.policy)
    return JobQueue(policy, State(cluster, setup.rates.learning(cluster)), setup.devices)
