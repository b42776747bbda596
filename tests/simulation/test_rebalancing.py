"""The controller of shares against simulated ranks: who is slow, noise, drift, hogs that go."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from paceline.runs.balance import BalanceAction
from paceline.training.balance.controller import (
    Controller,
    RankWindow,
    _medians_of_others,
)

Slowness = Callable[[int, int], float]  # of a rank at a step, 1: as the others


@dataclass
class World:
    """Ranks in a training loop: a rank is busy, then all exchange gradients."""

    slowness: Slowness
    ranks: int = 2
    batch: int = 32
    seed: int = 0
    noise: float = 0.03  # sigma of a step's logarithm
    spikes: float = 0.0  # probability of a step that takes three times as long
    fixed: float = 4.0  # of a step, in samples
    per_sample_s: float = 1e-3
    exchange_s: float = 2e-3
    delay: int = 0  # batches that loader workers have drawn ahead
    weights: tuple[float, ...] = ()
    step_s: list[float] = field(default_factory=list)
    actions: list[BalanceAction] = field(default_factory=list)

    def run(self, steps: int) -> World:
        generator = random.Random(self.seed)
        self.controller = Controller(self.batch, self.ranks, weights=self.weights)
        samples, generation = self.controller.samples, 0
        begins: list[tuple[int, int, tuple[int, ...]]] = []
        busy: list[list[float]] = [[] for _ in range(self.ranks)]
        generations: set[int] = set()
        for step in range(1, steps + 1):
            if begins and begins[0][0] == step:
                _, generation, samples = begins.pop(0)
            generations.add(generation)
            now = [
                self.per_sample_s * (self.fixed + samples[rank]) * self.slowness(rank, step)
                * generator.lognormvariate(0, self.noise)
                * (3 if generator.random() < self.spikes else 1)
                for rank in range(self.ranks)
            ]  # fmt: skip
            self.step_s.append(max(now) + self.exchange_s)
            for rank, seconds in enumerate(now):
                busy[rank].append(seconds)
            if step % self.controller.every:
                continue
            windows = []
            for rank in range(self.ranks):
                middle = statistics.median(busy[rank])
                spread = statistics.median(abs(value - middle) for value in busy[rank])
                windows.append(
                    RankWindow(
                        steps=len(busy[rank]),
                        generation=generation if len(generations) == 1 else -1,
                        samples=samples[rank],
                        busy_s=middle,
                        spread_s=spread,
                        step_s=statistics.median(self.step_s[-len(busy[rank]) :]),
                        running_s=middle,
                    )
                )
            busy = [[] for _ in range(self.ranks)]
            generations.clear()
            decided = self.controller.decide(windows, step)
            self.actions += decided
            if any(action.new_samples for action in decided):
                place = step + 1 + self.delay
                begins.append((place, self.controller.generation, self.controller.samples))
        return self

    def kinds(self) -> list[str]:
        return [action.kind for action in self.actions]

    def mean_s(self, first: int, last: int) -> float:
        return statistics.fmean(self.step_s[first:last])


def alike(_rank: int, _step: int) -> float:
    return 1.0


def hog(rank: int, step: int) -> float:
    """A process takes half of rank 1's core from step 101 to step 300."""
    return 2.0 if rank == 1 and 100 < step <= 300 else 1.0


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05, 0.1])
def test_nothing_happens_where_ranks_are_alike(noise):
    acted = [
        world.actions
        for seed in range(100)
        if (world := World(alike, seed=seed, noise=noise, spikes=0.02).run(200)).actions
    ]
    assert acted == []


@pytest.mark.parametrize("delay", [0, 4, 12])
@pytest.mark.parametrize("seed", range(5))
def test_a_hog_is_found_within_20_steps_and_what_can_be_recovered_is(seed, delay):
    world = World(hog, seed=seed, delay=delay).run(500)
    found = next(action for action in world.actions if action.kind == "found")
    assert 100 < found.step <= 120
    assert (found.rank, found.cause) == (1, "compute")
    changed = next(action for action in world.actions if action.kind == "rebalanced")
    assert changed.step <= 120
    clean_s, slow_s = world.mean_s(0, 100), world.mean_s(101, 110)
    # Rank 1 takes twice as long for each sample and for what is fixed.
    ideal_s = 1e-3 * (64 + 8) / (1 + 1 / 2) + 2e-3
    balanced_s = world.mean_s(150, 300)
    assert (slow_s - balanced_s) / (slow_s - ideal_s) > 0.8
    assert world.mean_s(340 + delay, 500) < 1.08 * clean_s  # the hog has gone
    assert "undone" not in world.kinds()
    assert len(world.actions) < 12


def test_a_change_is_told_with_its_figures_and_its_effect():
    world = World(hog, seed=3).run(200)
    changed = next(action for action in world.actions if action.kind == "rebalanced")
    measured = next(action for action in world.actions if action.kind == "measured")
    assert changed.samples == (32, 32)
    assert sum(changed.new_samples) == 64
    assert changed.new_samples[1] < 26
    assert changed.busy_s[1] / changed.busy_s[0] == pytest.approx(2, rel=0.1)
    assert changed.predicted_step_s < changed.step_s
    assert measured.predicted_step_s == changed.predicted_step_s
    assert measured.measured_step_s < measured.step_s == changed.step_s


def test_a_change_that_made_steps_longer_is_undone_within_20_steps_and_not_tried_again():
    def stubborn(rank, step):
        """Rank 1 seems slow, but whoever gets its samples becomes slower still."""
        return {0: 1.0, 1: 2.0}[rank] * punished.get(rank, 1.0)

    punished: dict[int, float] = {}
    world = World(lambda rank, step: stubborn(rank, step), seed=1)
    original = Controller._change

    def change(controller, samples):
        original(controller, samples)
        punished.update({0: 4.0} if samples[0] > 32 else {0: 1.0})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Controller, "_change", change)
        world.run(400)
    changed = [action for action in world.actions if action.kind == "rebalanced"]
    undone = [action for action in world.actions if action.kind == "undone"]
    assert [len(changed), len(undone)] == [1, 1]
    assert undone[0].step - changed[0].step <= 20
    assert undone[0].new_samples == (32, 32)
    assert undone[0].measured_step_s > undone[0].step_s
    assert world.controller.samples == (32, 32)


def test_shares_follow_a_rank_that_becomes_slower_and_slower():
    def drift(rank, step):
        return 1.0 + (step / 400 if rank == 0 else 0.0)

    world = World(drift, ranks=4, seed=2).run(400)
    shares = [action.new_samples[0] for action in world.actions if action.kind == "rebalanced"]
    assert len(shares) >= 2
    assert shares == sorted(shares, reverse=True)
    unbalanced_s = 1e-3 * 36 * 1.95 + 2e-3
    assert world.mean_s(360, 400) < 0.7 * unbalanced_s


def test_ranks_of_different_speed_get_shares_of_it():
    speeds = (1.0, 0.6, 0.8, 1.2)
    world = World(lambda rank, _: 1 / speeds[rank], ranks=4, fixed=0.0, noise=0.01).run(60)
    ideal = [128 * speed / sum(speeds) for speed in speeds]
    assert world.controller.samples == pytest.approx(ideal, abs=1.5)


def test_speeds_that_are_given_are_the_shares_from_the_first_exchange_on():
    world = World(lambda rank, _: (1.0, 1 / 0.6)[rank], weights=(1, 0.6), fixed=0.0).run(200)
    assert [(action.kind, action.step) for action in world.actions[:1]] == [("restored", 5)]
    assert world.actions[0].new_samples == (40, 24)
    assert "rebalanced" not in world.kinds()


@pytest.mark.parametrize("seed", range(10))
def test_shares_stay_within_their_bounds(seed):
    generator = random.Random(seed)
    speeds = [generator.choice([0.05, 0.3, 1.0, 1.0, 8.0]) for _ in range(5)]
    world = World(lambda rank, _: 1 / speeds[rank], ranks=5, seed=seed).run(200)
    for action in world.actions:
        if action.new_samples:
            assert sum(action.new_samples) == 5 * 32
            assert all(8 <= count <= 96 for count in action.new_samples)


def test_a_rank_that_stays_slow_is_reported_until_it_recovers():
    world = World(hog, seed=4).run(280)
    assert set(world.controller.persistent) == {1}
    slow = world.controller.persistent[1]
    assert 100 < slow.since_step <= 110
    assert slow.ratio == pytest.approx(2, rel=0.2)
    assert World(hog, seed=4).run(400).controller.persistent == {}


@pytest.mark.parametrize("seed", range(20))
def test_the_median_of_the_others_is_that(seed):
    generator = random.Random(seed)
    values = [float(generator.randint(0, 9)) for _ in range(generator.randint(2, 9))]
    assert _medians_of_others(values) == [
        statistics.median(values[:i] + values[i + 1 :]) for i in range(len(values))
    ]


def test_all_ranks_decide_alike():
    worlds = [World(hog, ranks=3, seed=5).run(400) for _ in range(2)]
    assert worlds[0].actions == worlds[1].actions
    assert worlds[0].actions
