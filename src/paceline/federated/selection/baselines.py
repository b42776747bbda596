"""Published selectors, to compare with: random, power of choice, TiFL, Oort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from paceline.federated.selection.view import ClientsView

_TRIALS = 20


class RandomSelector:
    """Any free client, with equal probability."""

    name = "random"

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choose(self, view: ClientsView, count: int) -> np.ndarray:
        """Return the numbers of at most `count` free clients."""
        free = np.flatnonzero(view.is_free)
        return self._rng.choice(free, min(count, free.size), replace=False)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._rng.bit_generator.state = state["rng"]


class PowerOfChoice(RandomSelector):
    """Of `factor` times as many random clients, those with the largest losses.

    Source: Y. Cho, J. Wang, G. Joshi, Towards Understanding Biased Client Selection in Federated
    Learning, AISTATS 2022.
    """

    name = "power-of-choice"

    def __init__(self, rng: np.random.Generator, *, factor: float = 3.0) -> None:
        super().__init__(rng)
        self._factor = factor

    def choose(self, view: ClientsView, count: int) -> np.ndarray:
        """Return the numbers of at most `count` free clients."""
        candidates = super().choose(view, round(self._factor * count))
        losses = np.where(np.isnan(view.loss), np.inf, view.loss)[candidates]
        return candidates[np.argsort(-losses, kind="stable")[:count]]


class TiflSelector(RandomSelector):
    """All clients of a round from one tier of latencies; tiers of large losses more often.

    Source: Z. Chai et al., TiFL: A Tier-based Federated Learning System, HPDC 2020. In place of
    the accuracy of each tier stand the losses that its clients report.
    """

    name = "tifl"

    def __init__(
        self, rng: np.random.Generator, *, tiers: int = 5, interval: int = 10, most: int = 10**9
    ) -> None:
        super().__init__(rng)
        self._count, self._interval = tiers, interval
        self._credits = np.full(tiers, most)
        self._odds = np.full(tiers, 1 / tiers)

    def choose(self, view: ClientsView, count: int) -> np.ndarray:
        """Return the numbers of at most `count` free clients."""
        tiers = np.array_split(np.argsort(view.expected_s, kind="stable"), self._count)
        if view.round and view.round % self._interval == 0:
            losses = np.array([_mean(view.loss[tier]) for tier in tiers])
            self._odds = losses / losses.sum()
        for _ in range(_TRIALS):
            odds = self._odds * (self._credits > 0)
            if not odds.any():  # all credits are spent
                break
            chosen = int(self._rng.choice(self._count, p=odds / odds.sum()))
            free = tiers[chosen][view.is_free[tiers[chosen]]]
            if free.size >= max(1, count // 2):
                self._credits[chosen] -= 1
                chosen_clients: np.ndarray = self._rng.choice(
                    free, min(count, free.size), replace=False
                )
                return chosen_clients
        return super().choose(view, count)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        own = {"credits": self._credits.tolist(), "odds": self._odds.tolist()}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        super().load_state_dict(state)
        self._credits[:], self._odds[:] = state["credits"], state["odds"]


def _mean(losses: np.ndarray) -> float:
    known = losses[np.isfinite(losses)]
    return float(known.mean()) if known.size else 1.0


class OortSelector(RandomSelector):
    """Large losses on many samples first, slow clients later, new ones with a falling probability.

    Source: F. Lai et al., Oort: Efficient Federated Learning via Guided Participant Selection,
    OSDI 2021; the constants are the published ones.
    """

    name = "oort"
    _PENALTY, _WINDOW, _STEP = 2.0, 20, 0.05
    _EXPLORED, _LEAST_EXPLORED, _DECAY = 0.9, 0.2, 0.98
    _CUT, _CLIP = 0.95, 0.95

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__(rng)
        self._explored = self._EXPLORED
        self._quantile = 0.5  # of expected seconds: what counts as slow
        self._utilities: list[float] = []  # of each round

    def choose(self, view: ClientsView, count: int) -> np.ndarray:
        """Return the numbers of at most `count` free clients."""
        self._explored = max(self._LEAST_EXPLORED, self._explored * self._DECAY)
        tried = np.isfinite(view.loss)
        new = np.flatnonzero(view.is_free & ~tried)
        known = np.flatnonzero(view.is_free & tried)
        exploring = min(new.size, round(count * self._explored))
        exploiting = min(known.size, count - exploring)
        exploring = min(new.size, count - exploiting)
        chosen: list[int] = []
        if exploiting:
            chosen += self._exploit(view, known, tried, exploiting)
        if exploring:
            odds = 1 / view.expected_s[new]
            chosen += self._rng.choice(new, exploring, replace=False, p=odds / odds.sum()).tolist()
        return np.array(chosen, np.int64)

    def _exploit(
        self, view: ClientsView, known: np.ndarray, tried: np.ndarray, count: int
    ) -> list[int]:
        utility = (view.loss * view.samples)[known]
        self._pace(float(utility.sum()))
        utility = np.minimum(utility, np.quantile(utility, self._CLIP))
        utility = (utility - utility.min()) / max(float(np.ptp(utility)), 1e-9)
        since = np.maximum(view.last_round[known] + 1, 1)
        utility += np.sqrt(0.1 * np.log(max(view.round + 1, 2)) / since)
        preferred_s = float(np.quantile(view.expected_s[tried], self._quantile))
        expected_s = view.expected_s[known]
        slow = expected_s > preferred_s
        utility[slow] *= (preferred_s / expected_s[slow]) ** self._PENALTY
        least = self._CUT * float(np.sort(utility)[::-1][count - 1])
        pool = np.flatnonzero(utility >= least)
        odds = utility[pool] / utility[pool].sum()
        picked = self._rng.choice(pool, min(count, int((odds > 0).sum())), replace=False, p=odds)
        return [int(number) for number in known[picked]]

    def _pace(self, utility: float) -> None:
        """Accept slower clients when the utility of rounds has stopped to grow, and the reverse."""
        self._utilities.append(utility)
        window = self._WINDOW
        if len(self._utilities) < 2 * window or len(self._utilities) % window:
            return
        before = sum(self._utilities[-2 * window : -window])
        now = sum(self._utilities[-window:])
        if abs(now - before) <= 0.1 * before:
            self._quantile = min(1.0, self._quantile + self._STEP)
        elif abs(now - before) >= 5 * before:
            self._quantile = max(self._STEP, self._quantile - self._STEP)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes."""
        own = {"explored": self._explored, "quantile": self._quantile, "rounds": self._utilities}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        super().load_state_dict(state)
        self._explored, self._quantile = state["explored"], state["quantile"]
        self._utilities = list(state["rounds"])
