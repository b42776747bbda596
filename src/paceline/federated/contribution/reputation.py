"""What is known of a client over rounds: reputation, likelihood of an attack, linked identities.

Reputation is an exponentially weighted mean of outcomes in [0, 1]; a client begins below what
honest ones reach, so that a new identity is never worth more than an old one.

The likelihood of an attack is 1 - (1 - mean suspicion)(1 - harm / 2). Suspicion is what a round's
gate saw in the update itself. Harm is how far the mean of the client's values is below 0: a single
value says little, since those of honest clients with unequal data are below 0 in two rounds of
five.

Clients whose updates were copies of each other are linked for good: what they were paid before
beyond one client's income is a debt, which is withheld from what they earn later, and from then on
each of them is paid for its share of one client.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

_PRIOR_ROUNDS = 1.0  # without suspicion and value


@dataclass(slots=True)
class ClientRecord:
    """What is kept of one client.

    Attributes:
        reputation: in [0, 1].
        rounds: that it was scored in.
        suspicion: sum over those rounds, each in [0, 1].
        value: sum over those rounds, each in [-1, 1].
        paid: sum of its scores, as shares of the rounds' pools.
        debt: share of a pool that is still withheld from it.
        linked: the identity that stands for all that this one is linked with.
    """

    reputation: float
    rounds: int = 0
    suspicion: float = 0.0
    value: float = 0.0
    paid: float = 0.0
    debt: float = 0.0
    linked: str = ""


class Reputations:
    """Records of all clients that were ever scored.

    Args:
        newcomer: reputation to begin with.
        memory: weight of a new outcome.
    """

    def __init__(self, *, newcomer: float, memory: float) -> None:
        self._newcomer, self._memory = newcomer, memory
        self._records: dict[str, ClientRecord] = {}

    def of(self, client: str) -> float:
        """Return the reputation of a client, known or not."""
        known = self._records.get(client)
        return known.reputation if known else self._newcomer

    def likelihood(self, client: str) -> float:
        """Return how likely the client attacks, in [0, 1]: a score to rank clients by."""
        record = self._record(client)
        rounds = record.rounds + _PRIOR_ROUNDS
        innocence = 1 - record.suspicion / rounds
        # The small slope above 0 ranks clients that nothing speaks against by what they are worth.
        value = record.value / rounds
        harm = max(0.0, -value) / 2 + 0.02 * (1 - value)
        return 1 - innocence * (1 - min(1.0, harm))

    def value(self, client: str) -> float:
        """Return the mean of the client's values, in [-1, 1]; 0: not known."""
        record = self._record(client)
        return record.value / (record.rounds + _PRIOR_ROUNDS)

    def rounds(self, client: str) -> int:
        """Return how many rounds the client was scored in."""
        return self._record(client).rounds

    def observe(self, client: str, *, outcome: float, suspicion: float, value: float) -> None:
        """Take a round of a client.

        Args:
            client: its id.
            outcome: 0 bad to 1 good.
            suspicion: of the update itself, in [0, 1].
            value: in units of the round's typical one, in [-1, 1].
        """
        record = self._record(client)
        record.reputation += self._memory * (outcome - record.reputation)
        record.rounds += 1
        record.suspicion += suspicion
        record.value += value

    def link(self, clients: Sequence[str]) -> None:
        """Note that clients are one; what they were paid beyond one client's income is a debt."""
        groups = {self._record(client).linked for client in clients}
        if len(groups) < 2:
            return
        members = [name for name, record in self._records.items() if record.linked in groups]
        fair = sum(self._records[name].paid for name in members) / len(members)
        debts = sum(self._records[name].debt for name in members)
        leader = min(groups)
        paid = {group: self._paid(group) for group in groups}
        owed = debts + sum(paid.values()) - max(fair, max(paid.values()))
        for name in members:
            self._records[name].linked = leader
            self._records[name].debt = owed / len(members)

    def _paid(self, group: str) -> float:
        """Return what the identities of a group were paid, all together."""
        return sum(record.paid for record in self._records.values() if record.linked == group)

    def identities(self, client: str) -> int:
        """Return how many identities are linked with this one; 1 if it is alone."""
        group = self._record(client).linked
        return sum(record.linked == group for record in self._records.values())

    def pay(self, client: str, share: float) -> float:
        """Record a share of a round's pool, and return what of it is not withheld."""
        record = self._record(client)
        withheld = min(share, record.debt)
        record.debt -= withheld
        record.paid += share - withheld
        return share - withheld

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes; JSON data."""
        return {client: asdict(record) for client, record in self._records.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._records = {client: ClientRecord(**record) for client, record in state.items()}

    def _record(self, client: str) -> ClientRecord:
        if client not in self._records:
            self._records[client] = ClientRecord(self._newcomer, linked=client)
        return self._records[client]
