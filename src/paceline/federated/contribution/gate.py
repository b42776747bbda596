"""What the updates of a round are to each other and to the past, without any data.

All of it is computed from sketches (`Sketcher`), so that its cost does not grow with the model:

    norm         over the median of the round: giants are refused, shirkers have little of it
    explained    share of the update that lies in the span of the last global steps. Everybody saw
                 these: what is in their span can be sent without data
    copies       pairs that are much nearer to each other than clients of this round usually are,
                 and updates that are that near to one of an earlier round
    steadiness   cosine of the rest of the update (without that span) with the rests of the client's
                 own earlier updates: the same data pull the same way. Noise and replays have none
    kinship      largest cosine with another client's update of an earlier round: for clients
                 without earlier updates, and for all where the server has no data, since a client
                 can be steady in a direction that means nothing
    agreement    cosine of the rest with the mean rest of the others
    accord       the same of the whole updates: whether it moves the model as the others do

An update is refused as noise only if nothing speaks for data behind it, neither steadiness nor
kinship nor agreement, while something does for most of the round. Where data are alike, clients
agree; where they are not, they are steady: on Fashion-MNIST divided by Dirichlet(0.5) the cosine of
an honest update with the others' median is 0.06, from -0.2 to 0.36, and its steadiness 0.4, from
0.26 to 0.58; that of noise and of replays lies within 0.02 of 0. So a client with rare data, which
no other vouches for, is not starved. With few clients the global steps may span all that they do:
then nothing speaks for anybody, and the check says nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.federated.contribution.options import ContributionOptions

_TINY = 1e-12
_LEAST_TYPICAL = 1e-5  # 1 - cosine: what differs by less is equal to rounding
_FAR_BELOW = 1 / 3  # of the round's median: too little to be one of them
_NOTHING = 1e-3  # of an update's norm: what is left is rounding
_LITTLE = 0.3  # of the round's usual rest; squared norms
_USUAL_SHARE = 0.5  # of the round's median steadiness
_UNSTEADY_DEVIATIONS = 5.0  # of noise: where nobody is steadier, it says nothing
_OWN_SKETCHES = 3  # of a client
# A client with large batches sends much the same again: only what is equal to the eye is a replay.
_OWN_LIKENESS = 50
_MEMORY = 0.2  # weight of a round in the typical distance of a pair


class EarlierUpdate(NamedTuple):
    """An earlier update that one is a copy of."""

    client: str
    round: int


@dataclass(slots=True)
class RoundEvidence:
    """Of a round with n updates.

    Attributes:
        norm_ratio: over the median of the round; shape (n,).
        explained: in [0, 1]; shape (n,).
        is_outlier: whether the rest that earlier global steps do not explain is much less than the
            round's usual one; shape (n,). With equal data and large batches it is little for all.
        agreement: cosine of the rest with the others', NaN without any; shape (n,).
        accord: cosine of the update with the others, NaN without any; shape (n,).
        steadiness: mean cosine with the client's own earlier updates, NaN without any; shape (n,).
        kinship: largest cosine with an update of another client of an earlier round; in the first
            round, of this one; NaN where it was not asked for; shape (n,).
        copies: indices that are copies of each other, each index once; alone: a group of one.
        earlier: of each update, what it is a copy of.
        noise: standard deviation of the cosine of noise with anything.
    """

    norm_ratio: np.ndarray
    explained: np.ndarray
    is_outlier: np.ndarray
    agreement: np.ndarray
    accord: np.ndarray
    steadiness: np.ndarray
    kinship: np.ndarray
    copies: list[list[int]]
    earlier: list[EarlierUpdate | None]
    noise: float

    def is_noise(self, limit: float, *, is_blind: bool) -> np.ndarray:
        """Return which updates resemble nothing, while most of the round does; bool, shape (n,).

        Args:
            limit: cosine of something with data behind it.
            is_blind: the server has no data: where most clients have kin, a client's own earlier
                updates do not speak for it.
        """
        by_others = np.fmax(self.agreement, self.kinship)
        likeness = np.fmax(by_others, self.steadiness)
        if is_blind and _median(by_others) >= limit:
            likeness = by_others
        usual = _median(likeness)
        if not usual >= limit:
            return np.zeros(len(likeness), bool)
        return np.asarray(likeness < min(limit, _FAR_BELOW * usual))

    def unsteadiness(self) -> np.ndarray:
        """Return how far updates are from their clients' own earlier ones, in [0, 1]; shape (n,).

        0 down to half of the round's usual steadiness: honest clients stay above it, whatever data
        they have; work that is not done, or that changes sides, does not.
        """
        usual = _median(self.steadiness)
        if not usual > _UNSTEADY_DEVIATIONS * self.noise:
            return np.zeros(len(self.steadiness))
        missing = 1 - self.steadiness / (_USUAL_SHARE * usual)
        return np.clip(np.nan_to_num(missing, nan=0.0), 0.0, 1.0)


class SketchMemory:
    """Sketches of the last rounds: global steps, and updates with their clients."""

    def __init__(self, options: ContributionOptions) -> None:
        self._options = options
        self._steps: deque[np.ndarray] = deque(maxlen=options.window)
        self._updates: deque[tuple[int, list[str], np.ndarray]] = deque(maxlen=options.window)
        self._own: dict[str, list[np.ndarray]] = {}  # the last sketches; the stalest client first
        self._typical: float | None = None  # 1 - cosine of a pair of a round

    def examine(
        self, clients: Sequence[str], sketches: np.ndarray, trust: np.ndarray, *, all_kin: bool
    ) -> RoundEvidence:
        """Return what a round's updates show; nothing is remembered yet.

        Args:
            clients: who sent them.
            sketches: shape (n, size).
            trust: reputations, the weights of the clients' say; shape (n,).
            all_kin: kinship of all clients, and not only of those without earlier updates.
        """
        norms = np.linalg.norm(sketches, axis=1)
        units = sketches / np.maximum(norms, _TINY)[:, None]
        cosines = units @ units.T
        explained, rest = self._without_steps(units)
        steadiness = self._steadiness(clients, rest)
        kinship = np.full(len(units), np.nan)
        if (unknown := np.isnan(steadiness) | all_kin).any():
            kinship[unknown] = self._kinship(clients, rest, np.flatnonzero(unknown))
        return RoundEvidence(
            norm_ratio=norms / max(float(np.median(norms)), _TINY),
            explained=explained,
            is_outlier=(1 - explained**2) < _LITTLE * np.median(1 - explained**2),
            agreement=self._agreement(rest, trust),
            accord=self._agreement(units, trust),
            steadiness=steadiness,
            kinship=kinship,
            copies=_groups(1 - cosines, self._limit(cosines)),
            earlier=self._earlier(clients, units, self._limit(cosines)),
            noise=1 / np.sqrt(sketches.shape[1]),
        )

    def remember(self, round_: int, clients: Sequence[str], sketches: np.ndarray) -> None:
        """Keep a round's updates for the rounds to come."""
        norms = np.linalg.norm(sketches, axis=1)
        units = (sketches / np.maximum(norms, _TINY)[:, None]).astype(np.float32)
        typical = _typical(units @ units.T)
        if typical is not None:
            last = typical if self._typical is None else self._typical
            self._typical = last + _MEMORY * (typical - last)
        self._updates.append((round_, list(clients), units))
        for client, unit in zip(clients, units, strict=True):
            own = [*self._own.pop(client, []), unit.astype(np.float16)]
            self._own[client] = own[-_OWN_SKETCHES:]
        while len(self._own) > self._options.remembered_clients:
            del self._own[next(iter(self._own))]

    def remember_step(self, sketch: np.ndarray) -> None:
        """Keep how a round changed the model."""
        length = float(np.linalg.norm(sketch))
        if length > 0:
            self._steps.append((sketch / length).astype(np.float32))

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: arrays and JSON data."""
        return {
            "steps": [step.copy() for step in self._steps],
            "updates": [(number, list(c), units.copy()) for number, c, units in self._updates],
            "own": {client: [unit.copy() for unit in own] for client, own in self._own.items()},
            "typical": self._typical,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._steps = deque(state["steps"], maxlen=self._options.window)
        updates = [(int(number), list(c), units) for number, c, units in state["updates"]]
        self._updates = deque(updates, maxlen=self._options.window)
        self._own = {client: list(own) for client, own in state["own"].items()}
        self._typical = state["typical"]

    def _limit(self, cosines: np.ndarray) -> float:
        """Return the distance below which a pair are copies."""
        found = [value for value in (self._typical, _typical(cosines)) if value is not None]
        return (1 - self._options.duplicate_cosine) * max(max(found, default=1), _LEAST_TYPICAL)

    def _without_steps(self, units: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the share in the span of the global steps, and the rest as unit vectors."""
        if not self._steps:
            return np.zeros(len(units)), units
        basis, _ = np.linalg.qr(np.stack(self._steps).T.astype(np.float64))
        within = units @ basis
        rest = units - within @ basis.T
        lengths = np.linalg.norm(rest, axis=1)
        rest[lengths < _NOTHING] = 0
        return np.linalg.norm(within, axis=1), rest / np.maximum(lengths, _NOTHING)[:, None]

    def _agreement(self, rest: np.ndarray, trust: np.ndarray) -> np.ndarray:
        """Return each one's cosine with the mean of the others, without those most alike."""
        count = len(rest)
        alike = rest @ rest.T
        left_out = min(int(np.ceil(self._options.common_share * (count - 1))), count - 2)
        found = np.full(count, np.nan)
        for index in range(count if count > 1 else 0):
            order = np.argsort(alike[index])[::-1]
            others = order[order != index][max(left_out, 0) :]
            centre = trust[others] @ rest[others]
            found[index] = rest[index] @ centre / max(float(np.linalg.norm(centre)), _TINY)
        return found

    def _steadiness(self, clients: Sequence[str], rest: np.ndarray) -> np.ndarray:
        found = np.full(len(clients), np.nan)
        for index, client in enumerate(clients):
            if own := self._own.get(client):
                _, earlier = self._without_steps(np.stack(own).astype(np.float64))
                found[index] = float((earlier @ rest[index]).mean())
        return found

    def _kinship(self, clients: Sequence[str], rest: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """Return the largest cosine of the chosen clients' updates with those of other clients."""
        names = [name for _, names, _ in self._updates for name in names]
        if names:
            rows = np.concatenate([units for _, _, units in self._updates])
            _, others = self._without_steps(rows.astype(np.float64))
        else:
            names, others = list(clients), rest
        cosines = rest[chosen] @ others.T
        cosines[np.array(clients)[chosen, None] == np.array(names)[None, :]] = -np.inf
        largest = cosines.max(axis=1, initial=-np.inf)
        return np.where(np.isfinite(largest), largest, np.nan)

    def _earlier(
        self, clients: Sequence[str], units: np.ndarray, limit: float
    ) -> list[EarlierUpdate | None]:
        found: list[EarlierUpdate | None] = [None] * len(units)
        nearest = np.full(len(units), limit)
        for number, names, before in self._updates:
            distance = 1 - units @ before.T
            is_own = np.array(clients)[:, None] == np.array(names)[None, :]
            distance[is_own] *= _OWN_LIKENESS
            column = distance.argmin(axis=1)
            for index, other in enumerate(column):
                if distance[index, other] < nearest[index]:
                    nearest[index] = distance[index, other]
                    found[index] = EarlierUpdate(names[other], number)
        return found


def _median(values: np.ndarray) -> float:
    """Return the median of the values that are known; NaN without any."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else float("nan")


def _typical(cosines: np.ndarray) -> float | None:
    """Return the median of 1 - cosine over pairs: it holds up to two thirds of copies."""
    if len(cosines) < 3:
        return None
    return float(np.median(1 - cosines[np.triu_indices(len(cosines), 1)]))


def _groups(distances: np.ndarray, limit: float) -> list[list[int]]:
    """Return the connected groups of indices that are nearer than the limit."""
    groups: list[list[int]] = []
    for index in range(len(distances)):
        near = [group for group in groups if (distances[index, group] < limit).any()]
        merged = sorted([index, *(member for group in near for member in group)])
        groups = [group for group in groups if group not in near]
        groups.append(merged)
    return sorted(groups)
