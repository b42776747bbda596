"""Scores the clients of each round: gate, Shapley values of those that pass, reputation.

    updates --gate--> refused: score 0, and why
               |
               +----> passed --Shapley value--> x reputation x norm (at most the median)
                                                / linked identities - debt --> scores

Without a utility all that pass are worth the same, unless a client's agreement with the others is
negative round after round.

A pure state machine: `score` for each round, then `applied` with how the model changed. It keeps no
update, only sketches and records, and its state can be saved between rounds. Sizes that clients
claim are not used anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.randomness import make_generator
from paceline.federated.aggregation.clipping import clip
from paceline.federated.contribution.gate import RoundEvidence, SketchMemory
from paceline.federated.contribution.options import ContributionOptions
from paceline.federated.contribution.reputation import Reputations
from paceline.federated.contribution.shapley import CoalitionGame, gtg_shapley
from paceline.federated.contribution.sketches import Sketcher
from paceline.federated.updates import ModelUpdate, Refusal, norm

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VERSION = 1
_ADMITTED = 0.7  # likelihood of an attack
_LEAST_ROUNDS = 3  # before a client can be left out
# Of a newcomer's reputation: who is above it is averaged in although it was of no use in this
# round. A newcomer that does harm in its first round falls below.
_TRUSTED = 0.8
_REFUSED_BEFORE = 0.25  # reputation of a client without a utility whose updates were refused
_NEUTRAL, _OPPOSED = -0.05, -0.2  # mean accord that costs nothing, and all, without a utility


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientScore:
    """What a client's update of a round is worth, and why.

    Attributes:
        client: its id.
        score: share of the round's pool, before the scores of all are normalised; not negative.
        weight: of its update in the aggregate; the weights of a round add up to 1, or are all 0.
        likelihood: that the client attacks, from all of its rounds; in [0, 1].
        refusal: the gate that its update did not pass; None: it passed.
        value: Shapley value; without a utility 1 for each that passes.
        norm_ratio: norm over the median of the round.
        reputation: after this round.
        withheld: of the score, for copies that were paid before they were found.
    """

    client: str
    score: float
    weight: float
    likelihood: float
    refusal: Refusal | None
    value: float
    norm_ratio: float
    reputation: float
    withheld: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundScores:
    """The scores of a round.

    Attributes:
        round: its number.
        clients: one score for each update, in their order.
        clip_norm: that accepted updates are to be clipped to before they are aggregated.
        evaluations: of the utility.
    """

    round: int
    clients: tuple[ClientScore, ...]
    clip_norm: float
    evaluations: int


class Contribution:
    """Scores rounds; see the module.

    Args:
        parameters: of the model.
        seed: secret of the server, see `Sketcher`.
        options: of gate and scores.
    """

    def __init__(
        self, parameters: int, *, seed: int, options: ContributionOptions | None = None
    ) -> None:
        self._options = options or ContributionOptions()
        self._seed = seed
        self._sketcher = Sketcher(parameters, size=self._options.sketch_size, seed=seed)
        self._memory = SketchMemory(self._options)
        self._reputations = Reputations(
            newcomer=self._options.newcomer, memory=self._options.memory
        )
        self._round = 0

    def score(
        self,
        updates: Sequence[ModelUpdate],
        utility: Callable[[np.ndarray], float] | None = None,
    ) -> RoundScores:
        """Score the updates of a round, which `check_updates` has accepted.

        Args:
            updates: one for each client.
            utility: of the model after a change of it, on data that the server trusts; finite,
                higher is better. None: the server has no data.

        Cost: one pass over each vector for its sketch; with a utility, its evaluations.
        """
        if not updates:
            self._round += 1
            return RoundScores(round=self._round - 1, clients=(), clip_norm=0.0, evaluations=0)
        clients = [update.client for update in updates]
        sketches = np.stack([self._sketcher.sketch(update.delta) for update in updates])
        trust = np.array([self._reputations.of(client) for client in clients])
        is_blind = utility is None
        evidence = self._memory.examine(clients, sketches, trust, all_kin=is_blind)
        norms = np.array([norm(update.delta) for update in updates])
        clip_norm = self._options.clip_ratio * float(np.median(norms))
        refusals = [
            self._refusal(clients, evidence, index, is_blind=is_blind)
            for index in range(len(updates))
        ]
        passed = [index for index, refusal in enumerate(refusals) if refusal is None]
        players = _players(evidence.copies, passed)
        values = np.zeros(len(updates))
        evaluations = 0
        if utility is None:
            values[players] = 1
        elif players and clip_norm > 0:
            deltas = [clip(updates[index].delta, clip_norm) for index in players]
            game = CoalitionGame(deltas, utility)
            rng = make_generator(self._seed, "shapley", self._round)
            values[players] = gtg_shapley(game, rng, self._options.shapley)
            evaluations = game.evaluations
        scores = self._settle(clients, evidence, refusals, players, values, is_blind=is_blind)
        self._memory.remember(self._round, clients, sketches)
        self._round += 1
        return RoundScores(
            round=self._round - 1,
            clients=scores,
            clip_norm=clip_norm,
            evaluations=evaluations,
        )

    def applied(self, change: np.ndarray) -> None:
        """Note how the model changed after a round: everybody can replay it from now on."""
        self._memory.remember_step(self._sketcher.sketch(change))

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: arrays and JSON data."""
        return {
            "version": _VERSION,
            "sketch": [self._sketcher.parameters, self._sketcher.size, self._seed],
            "round": self._round,
            "memory": self._memory.state_dict(),
            "reputations": self._reputations.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            UsageError: it is of another model, seed, size of sketches or format.
        """
        sketch = [self._sketcher.parameters, self._sketcher.size, self._seed]
        if state.get("version") != _VERSION or list(state["sketch"]) != sketch:
            raise UsageError(
                "this state of contributions cannot be continued here",
                where="Contribution.load_state_dict",
                why="it is of another format, model, seed or size of sketches",
                fix="Make the Contribution with the arguments that the state was taken with",
            )
        self._round = int(state["round"])
        self._memory.load_state_dict(state["memory"])
        self._reputations.load_state_dict(state["reputations"])

    def admits(self, client: str) -> bool:
        """Return whether a client is worth asking: false for one that most likely attacks.

        Ask one that is not admitted now and then all the same, so that a mistake can be seen.
        """
        return (
            self._reputations.rounds(client) < _LEAST_ROUNDS
            or self._reputations.likelihood(client) < _ADMITTED
        )

    def _refusal(
        self, clients: list[str], evidence: RoundEvidence, index: int, *, is_blind: bool
    ) -> Refusal | None:
        """Return why an update does not pass the gate."""
        options, client = self._options, clients[index]
        ratio, explained = float(evidence.norm_ratio[index]), float(evidence.explained[index])
        largest = options.refuse_ratio_blind if is_blind else options.refuse_ratio
        if ratio > largest:
            reason = f"norm {ratio:.3g} times the round's median; limit {largest:g}"
            return Refusal(client=client, check="norm", reason=reason)
        if explained > options.replay_share and evidence.is_outlier[index]:
            reason = (
                f"{explained:.2f} of it lies in earlier global steps; limit "
                f"{options.replay_share:g}"
            )
            return Refusal(client=client, check="replay", reason=reason)
        if (copy := evidence.earlier[index]) is not None:
            reason = f"a copy of the update of {copy.client} in round {copy.round}"
            return Refusal(client=client, check="copy", reason=reason)
        limit = options.noise_deviations * evidence.noise
        if evidence.is_noise(limit, is_blind=is_blind)[index]:
            return Refusal(
                client=client, check="noise", reason=_noise_reason(evidence, index, limit)
            )
        return None

    def _settle(
        self,
        clients: list[str],
        evidence: RoundEvidence,
        refusals: list[Refusal | None],
        players: list[int],
        values: np.ndarray,
        *,
        is_blind: bool,
    ) -> tuple[ClientScore, ...]:
        """Turn values into scores, weights and records."""
        self._link_copies(clients, evidence, refusals)
        scale = float(np.median(np.abs(values[players]))) if players else 0.0
        shared = _shared_values(evidence.copies, players, values, refusals)
        earned, weights = np.zeros(len(clients)), np.zeros(len(clients))
        unsteady = evidence.unsteadiness()
        for index, client in enumerate(clients):
            value = float(shared[index])
            relative = min(1.0, max(-1.0, value / scale)) if scale > 0 else 0.0
            if is_blind:
                relative = float(np.nan_to_num(evidence.accord[index]))
            standing, identities = self._observe(
                client,
                refusals[index],
                value,
                relative,
                float(evidence.norm_ratio[index]),
                float(unsteady[index]),
            )
            if is_blind:
                standing = self._blind_standing(client)
            work = min(1.0, float(evidence.norm_ratio[index]))
            earned[index] = max(0.0, value) * standing * work / _divisor(identities)
            if index in players and (value > 0 or standing > _TRUSTED * self._options.newcomer):
                weights[index] = standing
        shares, weights = _normalised(earned), _normalised(weights)
        found = []
        for index, client in enumerate(clients):
            paid = self._reputations.pay(client, float(shares[index]))
            found.append(
                ClientScore(
                    client=client,
                    score=paid,
                    weight=float(weights[index]),
                    likelihood=self._reputations.likelihood(client),
                    refusal=refusals[index],
                    value=float(values[index]),
                    norm_ratio=float(evidence.norm_ratio[index]),
                    reputation=self._reputations.of(client),
                    withheld=float(shares[index]) - paid,
                )
            )
        return tuple(found)

    def _link_copies(
        self, clients: list[str], evidence: RoundEvidence, refusals: list[Refusal | None]
    ) -> None:
        """Link the senders of copies: those of this round, and of earlier updates."""
        for group in evidence.copies:
            self._reputations.link([clients[index] for index in group])
        for client, copy, refusal in zip(clients, evidence.earlier, refusals, strict=True):
            if copy is not None and refusal is not None and refusal.check == "copy":
                self._reputations.link([client, copy.client])

    def _observe(
        self,
        client: str,
        refusal: Refusal | None,
        value: float,
        relative: float,
        ratio: float,
        unsteady: float,
    ) -> tuple[float, int]:
        """Record a client's round; return its reputation and how many identities it has."""
        identities = self._reputations.identities(client)
        suspicion, outcome = 1.0, 0.0
        if refusal is None:
            suspicion = max(unsteady, _suspicion(ratio, identities, is_good=value > 0))
            outcome = 0.5 + 0.5 * relative
        self._reputations.observe(client, outcome=outcome, suspicion=suspicion, value=relative)
        return self._reputations.of(client), identities

    def _blind_standing(self, client: str) -> float:
        """Return what is left of a client's pay without a utility.

        All of it, unless its updates were refused or opposed the others round after round.
        """
        if self._reputations.of(client) <= _REFUSED_BEFORE:
            return 0.0
        accord = self._reputations.value(client)
        return min(1.0, max(0.0, (accord - _OPPOSED) / (_NEUTRAL - _OPPOSED)))


def _noise_reason(evidence: RoundEvidence, index: int, limit: float) -> str:
    likeness = {
        "the client's earlier updates": float(evidence.steadiness[index]),
        "any earlier update of others": float(evidence.kinship[index]),
        "the others' of this round": float(evidence.agreement[index]),
    }
    known = [
        f"{cosine:.3f} with {what}" for what, cosine in likeness.items() if np.isfinite(cosine)
    ]
    return f"cosines of noise: {', '.join(known)}; limit {limit:.3f}"


def _shared_values(
    copies: list[list[int]],
    players: list[int],
    values: np.ndarray,
    refusals: list[Refusal | None],
) -> np.ndarray:
    """Return the value of each update: of a copy that of the one that played, refused: 0."""
    shared = np.zeros(len(values))
    for group in copies:
        player = next((index for index in group if index in players), None)
        for index in group:
            if player is not None and refusals[index] is None:
                shared[index] = values[player]
    return shared


def _normalised(parts: np.ndarray) -> np.ndarray:
    """Return parts that add up to 1, or are all 0."""
    total = parts.sum()
    return parts / total if total > 0 else parts


def _players(copies: list[list[int]], passed: list[int]) -> list[int]:
    """Return the indices that play: of copies of one update, the first that passed."""
    allowed = set(passed)
    firsts = [[index for index in group if index in allowed][:1] for group in copies]
    return sorted(index for first in firsts for index in first)


def _divisor(identities: int) -> float:
    """Return what a client's pay is divided by for the identities that it is linked with.

    Two may be a mistake, and share one client's pay. With more, all together get 2 / identities of
    it: a client with good data must not gain by names either.
    """
    return max(float(identities), identities**2 / 2)


def _suspicion(ratio: float, identities: int, *, is_good: bool) -> float:
    """Return how suspicious an update that passed is, in [0, 1].

    A norm well below the round's median is work not done. One well above it is half as suspicious
    where the update is good for the model: its client may have done more steps.
    """
    too_large = min(1.0, max(0.0, ratio - 1.5)) * (0.5 if is_good else 1.0)
    return max(1 - 1 / identities, too_large, 1 - 2 * ratio)
