"""Contribution: Shapley values against their definition, and what each gate sees."""

import itertools
import json
import math

import numpy as np
import pytest

from paceline.core.errors import UsageError
from paceline.federated.contribution import (
    AccuracyRecords,
    CoalitionGame,
    Contribution,
    ContributionOptions,
    ShapleyOptions,
    exact_shapley,
    gtg_shapley,
)
from paceline.federated.contribution.gate import RoundEvidence
from paceline.federated.contribution.sketches import Sketcher
from paceline.federated.updates import ModelUpdate

PARAMETERS = 20_000


# --- Shapley values --------------------------------------------------------------------------


def curved_game(players, *, averaged=False, seed=0):
    """A game that is neither additive nor convex: distance to a target, with a curved scale."""
    rng = np.random.default_rng(seed)
    target = rng.normal(0, 1, 12)
    deltas = [
        (target * rng.uniform(0, 2) + rng.normal(0, 1, 12)).astype(np.float32)
        for _ in range(players)
    ]
    return CoalitionGame(
        deltas,
        lambda change: -math.sqrt(1 + float(((change - target) ** 2).sum())),
        averaged=averaged,
    )


def values_by_definition(game):
    """Return the mean marginal value over all orders: the definition, in factorial time."""
    totals = np.zeros(game.players)
    for order in itertools.permutations(range(game.players)):
        for length in range(game.players):
            gain = game.value(sorted(order[: length + 1])) - game.value(sorted(order[:length]))
            totals[order[length]] += gain
    return totals / math.factorial(game.players)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("players", [1, 2, 6])
def test_exact_values_are_those_of_the_definition(players, averaged):
    found = exact_shapley(curved_game(players, averaged=averaged))
    expected = values_by_definition(curved_game(players, averaged=averaged))
    assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("players", [3, 5, 8])
def test_gtg_approaches_the_exact_values(players, seed):
    exact = exact_shapley(curved_game(players, seed=seed))
    options = ShapleyOptions(order_tolerance=0.001, convergence=0.0, most_sweeps=40)
    found = gtg_shapley(curved_game(players, seed=seed), np.random.default_rng(1), options)
    assert np.abs(found - exact).max() < 0.08 * np.abs(exact).max()
    whole = curved_game(players, seed=seed)
    assert found.sum() == pytest.approx(whole.value(range(players)) - whole.value(()), abs=0.01)


def test_gtg_with_the_defaults_ranks_as_the_exact_values_and_asks_less():
    game, oracle = curved_game(8), curved_game(8)
    found = gtg_shapley(game, np.random.default_rng(1))
    exact = exact_shapley(oracle)
    assert game.evaluations < oracle.evaluations
    assert np.corrcoef(found, exact)[0, 1] > 0.97


def test_a_round_that_changes_nothing_pays_nobody():
    game = CoalitionGame([np.ones(3, np.float32)] * 4, lambda _change: 0.7)
    assert (gtg_shapley(game, np.random.default_rng(0)) == 0).all()
    assert game.evaluations == 2


def test_with_fixed_weights_an_empty_update_is_worth_nothing_and_with_averages_something():
    target = np.zeros(6)
    deltas = [np.full(6, 2, np.float32), np.full(6, 3, np.float32), np.zeros(6, np.float32)]
    # Each client overshoots: to average with nothing improves the model.
    found = {}
    for averaged in (False, True):
        game = CoalitionGame(
            deltas, lambda change: -float(((change - target) ** 2).sum()), averaged=averaged
        )
        found[averaged] = exact_shapley(game)[2]
    assert found[False] == 0
    assert found[True] > 1


def test_a_utility_that_is_not_finite_is_an_error():
    game = CoalitionGame([np.ones(3, np.float32)] * 3, lambda _change: math.nan)
    with pytest.raises(UsageError, match="utility of a coalition of 0 clients is nan"):
        exact_shapley(game)
    with pytest.raises(UsageError, match="take 2\\^17 evaluations"):
        exact_shapley(CoalitionGame([np.ones(3, np.float32)] * 17, lambda _change: 0.0))


# --- sketches --------------------------------------------------------------------------------


def test_sketches_keep_cosines_to_one_over_the_root_of_their_size():
    rng = np.random.default_rng(0)
    sketcher = Sketcher(PARAMETERS, size=1024, seed=3)
    errors = []
    for wanted in np.linspace(-0.9, 0.9, 40):
        first, other = (part / np.linalg.norm(part) for part in rng.normal(0, 1, (2, PARAMETERS)))
        second = wanted * first + math.sqrt(1 - wanted**2) * other
        exact = first @ second / np.linalg.norm(second)
        rows = [sketcher.sketch(part.astype(np.float32)).astype(float) for part in (first, second)]
        errors.append(rows[0] @ rows[1] / np.prod([np.linalg.norm(row) for row in rows]) - exact)
    assert np.std(errors) < 1.5 / math.sqrt(1024)
    assert np.abs(errors).max() < 5 / math.sqrt(1024)


# --- the gate --------------------------------------------------------------------------------


class Clients:
    """Clients with data of their own: each pulls the model to its own optimum, with noise.

    The first one has rare data: it pulls where hardly another one does. With kin, each of the
    others has one whose data are much like its own.
    """

    def __init__(self, count=8, *, seed=0, kin=False):
        self.rng = np.random.default_rng(seed)
        common = self.rng.normal(0, 1, PARAMETERS)
        own = self.rng.normal(0, 1, (count, PARAMETERS))
        self.optima = [common + 1.5 * row for row in own]
        if kin:
            shared = self.rng.normal(0, 1, (count, PARAMETERS))
            self.optima = [
                common + 1.2 * shared[index // 2] + 0.8 * row for index, row in enumerate(own)
            ]
        self.optima[0] = 0.6 * common + 1.7 * own[0]  # rare data: little in common
        self.rare_share = 1 / count  # of the server's data
        self.model = np.zeros(PARAMETERS)
        self.steps = []

    def delta(self, client):
        pull = self.optima[client] - self.model
        noise = self.rng.normal(0, 1, PARAMETERS)
        return 0.2 * pull + noise * (0.1 * np.linalg.norm(pull) / np.linalg.norm(noise))

    def noise(self):
        part = self.rng.normal(0, 1, PARAMETERS)
        return part * (np.linalg.norm(self.delta(1)) / np.linalg.norm(part))

    def utility(self, change):
        others = np.mean(self.optima[1:], axis=0)
        target = self.rare_share * self.optima[0] + (1 - self.rare_share) * others
        return -float(((self.model + change - target) ** 2).mean())

    def play(self, contribution, deltas, *, with_data=True):
        """Score a round, apply it, and return the scores by client."""
        updates = [
            ModelUpdate(
                client=name,
                version=len(self.steps),
                delta=delta.astype(np.float32),
                samples=10,
                steps=5,
                loss=1.0,
            )
            for name, delta in deltas.items()
        ]
        scores = contribution.score(updates, self.utility if with_data else None)
        change = sum(
            score.weight * update.delta.astype(np.float64)
            for score, update in zip(scores.clients, updates, strict=True)
        )
        self.model = self.model + change
        self.steps.append(change)
        contribution.applied(np.asarray(change, np.float32))
        return {score.client: score for score in scores.clients}

    def honest(self, count=8):
        return {f"client-{index}": self.delta(index) for index in range(count)}


def contribution():
    options = ContributionOptions(window=6, shapley=ShapleyOptions(most_sweeps=2))
    return Contribution(PARAMETERS, seed=5, options=options)


@pytest.mark.parametrize("with_data", [True, False])
def test_honest_clients_pass_and_the_owner_of_rare_data_is_paid_as_the_others(with_data):
    clients, scorer, income = Clients(), contribution(), np.zeros(8)
    clients.rare_share = 0.5
    for _ in range(6):
        scores = clients.play(scorer, clients.honest(), with_data=with_data)
        assert [score.refusal for score in scores.values()] == [None] * 8
        assert sum(score.weight for score in scores.values()) == pytest.approx(1)
        income += [score.score for score in scores.values()]
    assert income[0] >= 0.8 * income[1:].mean()


@pytest.mark.parametrize("with_data", [True, False])
def test_noise_is_refused_whoever_sends_it(with_data):
    clients, scorer = Clients(), contribution()
    clients.play(scorer, clients.honest(), with_data=with_data)
    for number in range(3):
        deltas = clients.honest() | {"old": clients.noise(), f"new-{number}": clients.noise()}
        scores = clients.play(scorer, deltas, with_data=with_data)
        for name in ("old", f"new-{number}"):
            assert scores[name].score == scores[name].weight == 0
            assert scores[name].refusal.check == "noise"
        assert "limit" in scores["old"].refusal.reason
        assert scores["client-3"].refusal is None
        assert scores["old"].likelihood > 0.4 > scores["client-3"].likelihood


def test_a_steady_direction_that_means_nothing_earns_next_to_nothing():
    for with_data in (True, False):
        clients, scorer = Clients(kin=True), contribution()
        direction, income = clients.noise(), {"steady": 0.0, "client-3": 0.0}
        for _ in range(8):
            deltas = clients.honest() | {"steady": direction + 0.3 * clients.noise()}
            scores = clients.play(scorer, deltas, with_data=with_data)
            for name in income:
                income[name] += scores[name].score
        assert income["steady"] <= 0.3 * income["client-3"]


def test_replays_of_global_steps_are_refused_mixed_or_scaled_too():
    clients, scorer = Clients(), contribution()
    for _ in range(4):
        clients.play(scorer, clients.honest())
    mixed = 0.6 * clients.steps[-1] + 0.8 * clients.steps[-3]
    noise = clients.noise()
    deltas = clients.honest() | {
        "last": clients.steps[-1],
        "mixed": 1.7 * mixed,
        "half": clients.steps[-1] / np.linalg.norm(clients.steps[-1])
        + noise / np.linalg.norm(noise),
    }
    scores = clients.play(scorer, deltas)
    checks = {name: score.refusal and score.refusal.check for name, score in scores.items()}
    assert checks["last"] == checks["mixed"] == "replay"
    assert checks["half"] is not None
    assert [checks[f"client-{index}"] for index in range(8)] == [None] * 8


@pytest.mark.parametrize("noise", [0.01, 0.3, 1.0])
def test_clients_with_equal_data_pass_however_noisy_their_steps_are(noise):
    clients, scorer = Clients(), contribution()
    clients.optima = [clients.optima[1]] * 8
    for number in range(8):
        deltas = {}
        for index in range(8):
            pull = 0.2 * (clients.optima[index] - clients.model)
            part = clients.noise()
            deltas[f"client-{index}"] = pull + noise * np.linalg.norm(pull) * (
                part / np.linalg.norm(part)
            )
        scores = clients.play(scorer, deltas)
        refusals = {score.refusal for score in scores.values()}
        assert refusals == {None}, f"round {number}"


def test_giants_are_refused_and_said_so():
    clients, scorer = Clients(), contribution()
    deltas = clients.honest() | {"giant": 30 * clients.delta(3)}
    found = clients.play(scorer, deltas)["giant"]
    assert found.refusal.check == "norm"
    assert found.refusal.reason.endswith("limit 5")
    assert found.score == 0


def test_copies_share_the_score_of_one_client_and_pay_back_what_they_had_before():
    clients, scorer, income = Clients(), contribution(), dict.fromkeys(["one", *"abc"], 0.0)
    for number in range(12):
        copied = clients.delta(2)
        names = "abc" if number > 2 else "abc"[number % 3]  # alone at first: nothing to see
        deltas = {f"client-{index}": clients.delta(index) for index in range(8) if index != 2}
        deltas |= {name: copied + 0.01 * clients.noise() for name in names}
        deltas["one"] = deltas.pop("client-5")
        scores = clients.play(scorer, deltas, with_data=False)
        for name in income:
            income[name] += scores[name].score if name in scores else 0.0
    assert income["a"] + income["b"] + income["c"] <= 1.2 * income["one"]
    assert scores["a"].likelihood > 0.5 > scores["one"].likelihood


def test_a_late_copy_of_another_clients_update_is_refused():
    clients, scorer = Clients(), contribution()
    stolen = clients.delta(4)
    clients.play(scorer, clients.honest() | {"client-4": stolen})
    scores = clients.play(scorer, clients.honest() | {"thief": stolen})
    assert scores["thief"].refusal.check == "copy"
    assert scores["thief"].refusal.reason == "a copy of the update of client-4 in round 0"


def test_a_client_that_sends_much_the_same_again_is_no_thief_and_one_that_sends_the_same_is():
    clients, scorer = Clients(), contribution()
    first = clients.delta(4)
    clients.play(scorer, clients.honest() | {"client-4": first})
    alike = first + 0.1 * clients.noise()
    scores = clients.play(scorer, clients.honest() | {"client-4": alike})
    assert scores["client-4"].refusal is None
    scores = clients.play(scorer, clients.honest() | {"client-4": first})
    assert scores["client-4"].refusal.reason == "a copy of the update of client-4 in round 0"


@pytest.mark.parametrize("with_data", [True, False])
def test_the_opposite_of_training_earns_little(with_data):
    clients, scorer, income = Clients(), contribution(), {"bad": 0.0, "client-3": 0.0}
    for _ in range(12):
        deltas = clients.honest() | {"bad": -clients.delta(1)}
        scores = clients.play(scorer, deltas, with_data=with_data)
        for name in income:
            income[name] += scores[name].score
    assert income["bad"] <= 0.3 * income["client-3"]
    assert scores["bad"].likelihood > scores["client-3"].likelihood


def test_claimed_samples_change_nothing():
    def play(samples):
        clients, scorer = Clients(), contribution()
        updates = [
            ModelUpdate(
                client=name,
                version=0,
                delta=delta.astype(np.float32),
                samples=samples if name == "client-1" else 10,
                steps=5,
                loss=1.0,
            )
            for name, delta in clients.honest().items()
        ]
        return scorer.score(updates, clients.utility)

    assert play(10) == play(10_000)


def test_a_new_identity_is_not_worth_more_than_an_old_one():
    clients, scorer = Clients(), contribution()
    for _ in range(6):
        scores = clients.play(scorer, clients.honest(), with_data=True)
    known = scores["client-3"].reputation
    deltas = clients.honest()
    deltas["client-3-again"] = deltas.pop("client-3")
    renewed = clients.play(scorer, deltas, with_data=True)["client-3-again"]
    assert renewed.reputation <= known


def test_scores_continue_from_the_state_to_the_bit():
    clients, whole, first, second = Clients(), contribution(), contribution(), contribution()
    rounds = [clients.honest() | {"noise": clients.noise()} for _ in range(6)]
    expected = [Clients().play(whole, deltas) for deltas in rounds]
    found = [Clients().play(first, deltas) for deltas in rounds[:3]]
    state = first.state_dict()
    json.dumps(state, default=lambda array: np.asarray(array).tolist())
    second.load_state_dict(state)
    Clients().play(first, rounds[0])  # the state is a copy
    found += [Clients().play(second, deltas) for deltas in rounds[3:]]
    assert found == expected
    with pytest.raises(UsageError, match="cannot be continued"):
        Contribution(PARAMETERS, seed=6).load_state_dict(state)


def test_small_rounds_are_scored():
    clients, scorer = Clients(), contribution()
    assert scorer.score([]).clients == ()
    assert clients.play(scorer, {"client-1": clients.delta(1)})["client-1"].score == 1
    two = {f"client-{index}": clients.delta(index) for index in (1, 2)}
    assert sum(score.score for score in clients.play(scorer, two).values()) == pytest.approx(1)
    nothing = {f"client-{index}": np.zeros(PARAMETERS) for index in range(4)}
    assert all(score.score == 0 for score in clients.play(scorer, nothing).values())


def test_impossible_options_are_errors():
    with pytest.raises(UsageError, match="clip_ratio <= refuse_ratio"):
        ContributionOptions(clip_ratio=9)
    with pytest.raises(UsageError, match="above 0 and at most 1"):
        ContributionOptions(memory=0)


# --- accuracy records ------------------------------------------------------------------------


def test_records_choose_the_best_and_explore():
    records = AccuracyRecords(exploration=0.4, memory=0.5)
    names = [f"client-{index}" for index in range(10)]
    rng = np.random.default_rng(0)
    assert len(set(records.select(names, 5, rng))) == 5
    reached = {name: index / 10 for index, name in enumerate(names)}
    assert records.scores(reached) == pytest.approx(reached)
    drawn = [records.select(names, 5, rng) for _ in range(200)]
    assert all(chosen[:3] == ("client-9", "client-8", "client-7") for chosen in drawn)
    assert {name for chosen in drawn for name in chosen} == set(names)
    again = AccuracyRecords(exploration=0.4, memory=0.5)
    again.load_state_dict(json.loads(json.dumps(records.state_dict())))
    found = again.scores({"client-2": 1.0})
    assert found == records.scores({"client-2": 1.0})
    assert found["client-2"] == pytest.approx(0.6)


def test_updates_unlike_a_clients_earlier_ones_are_suspicious():
    def evidence(steadiness):
        size = len(steadiness)
        return RoundEvidence(
            norm_ratio=np.ones(size),
            explained=np.zeros(size),
            is_outlier=np.zeros(size, bool),
            agreement=np.zeros(size),
            accord=np.zeros(size),
            steadiness=np.array(steadiness),
            kinship=np.full(size, np.nan),
            copies=[[index] for index in range(size)],
            earlier=[None] * size,
            noise=1 / 64,
        )

    nan = float("nan")
    # A newcomer, three honest clients, one half as steady as half of them, one that changed sides.
    found = evidence([nan, 0.4, 0.4, 0.4, 0.1, -0.3]).unsteadiness()
    assert found.tolist() == pytest.approx([0, 0, 0, 0, 0.5, 1])
    assert not evidence([0.01, 0.02, -0.01]).unsteadiness().any()  # nobody is steady
