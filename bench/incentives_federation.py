"""The federation that `incentives.py` pays: data, split, local training, and clients that cheat.

Real training of a small classifier; no clock, no links. A world is a pure function of its seed.

    World.train(weights, client, rng) -> ModelUpdate       what an honest client sends
    Attack.update(world, weights, client, rng)             what a client of that kind sends
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from paceline.core.randomness import make_generator
from paceline.federated.simulate.classifier import Classifier
from paceline.federated.simulate.splits import dirichlet_split
from paceline.federated.updates import ModelUpdate

CLASSES = 10
STEPS, BATCH, RATE = 15, 20, 0.03
RARE_CLASS = 8


def split(labels, clients, alpha, rng, *, rare=(), largest=600):
    """Return the sample indices of each client, at most `largest`.

    Args:
        rare: clients that own all samples of RARE_CLASS, as half of their data; without any, the
            class is divided as the others are.
    """
    if not rare:
        return dirichlet_split(labels, clients, alpha, rng, least=40, most=largest)
    others = np.flatnonzero(labels != RARE_CLASS)
    parts = dirichlet_split(labels[others], clients, alpha, rng, least=40, most=largest)
    parts = [others[part] for part in parts]
    owned = np.flatnonzero(labels == RARE_CLASS)
    for client in rare:
        half = parts[client][: largest // 2]
        parts[client] = np.concatenate([half, rng.choice(owned, len(half), replace=False)])
    return parts


# ------------------------------------------------------------------ world


@dataclass
class World:
    """Clients with data, the model, and what everyone saw of the global model so far."""

    images: object  # simulate.images.ImageData
    parts: list
    seed: int
    classifier: Classifier
    steps: list = field(default_factory=list)  # of the global model, the latest last

    def train(self, weights, client, rng, *, steps=STEPS, relabel=None):
        """Return the honest update of `client` (an index) from `weights`."""
        part = self.parts[client]
        labels = self.images.labels[part]
        if relabel is not None:
            labels = relabel(labels)
        trained, loss = self.classifier.train(
            weights,
            self.images.images[part],
            labels,
            batch=BATCH,
            steps=steps,
            learning_rate=RATE,
            rng=rng,
        )
        return ModelUpdate(
            client=name(client),
            version=len(self.steps),
            delta=trained - weights,
            samples=len(part),
            steps=STEPS,
            loss=loss,
        )


def name(client):
    return f"client-{client:02d}"


def make_world(images, seed, *, clients, alpha, rare=()):
    parts = split(images.labels, clients, alpha, make_generator(seed, "split"), rare=rare)
    return World(images, parts, seed, Classifier(inputs=images.images.shape[1]))


def losses(classifier, weights, inputs, labels):
    """Return the cross entropy of each sample."""
    chances = classifier.probabilities(weights, inputs)
    return -np.log(chances[np.arange(len(labels)), labels] + 1e-9)


def accuracy(classifier, weights, inputs, labels):
    return float((classifier.probabilities(weights, inputs).argmax(1) == labels).mean())


# ------------------------------------------------------------------ attacks


class Honest:
    """Trains on its data and sends what came of it."""

    def __init__(self, attackers):
        self.attackers = attackers
        self.cache = (-1, None)

    def update(self, world, weights, client, rng):
        return world.train(weights, client, rng)

    def identity(self, client):
        """Return the name that the client shows."""
        return name(client)

    def shared(self, world, make):
        """Return what the attackers agreed on for this round; made by the first of them."""
        if self.cache[0] != len(world.steps):
            self.cache = (len(world.steps), make())
        return self.cache[1]

    def refused(self, client):
        """Learn that the server refused an update of the client."""


def scaled_to(vector, norm):
    return (vector * (norm / max(float(np.linalg.norm(vector)), 1e-12))).astype(np.float32)


def typical_norm(world):
    """What a client can know of a plausible norm: a bit above that of the last global step."""
    return 1.5 * float(np.linalg.norm(world.steps[-1])) if world.steps else 1.0


def fake(world, client, delta):
    """Return an update without training, with claims that look like an honest one's."""
    return ModelUpdate(
        client=name(client),
        version=len(world.steps),
        delta=delta.astype(np.float32),
        samples=len(world.parts[client]),
        steps=STEPS,
        loss=1.0,
    )


class NoiseFreeRider(Honest):
    """Sends Gaussian noise of a plausible norm."""

    def update(self, world, weights, client, rng):
        return fake(
            world, client, scaled_to(rng.standard_normal(weights.size), typical_norm(world))
        )


class SteadyNoise(Honest):
    """Sends noise in the same direction each time, with 30 % of new noise: steady without data."""

    def update(self, world, weights, client, rng):
        own = make_generator(world.seed, "direction", client).standard_normal(weights.size)
        delta = scaled_to(own, 1.0) + scaled_to(rng.standard_normal(weights.size), 0.3)
        return fake(world, client, scaled_to(delta, typical_norm(world)))


class Replay(Honest):
    """Sends one of the last five global steps, with 20 % of noise, at a plausible norm."""

    def update(self, world, weights, client, rng):
        noise = scaled_to(rng.standard_normal(weights.size), 0.2)
        if not world.steps:
            return fake(world, client, noise)
        step = world.steps[-int(rng.integers(1, min(5, len(world.steps)) + 1))]
        return fake(world, client, scaled_to(scaled_to(step, 1.0) + noise, typical_norm(world)))


class LabelFlip(Honest):
    """Trains on labels 9 - y."""

    def update(self, world, weights, client, rng):
        return world.train(weights, client, rng, relabel=lambda labels: CLASSES - 1 - labels)


class Inflation(Honest):
    """Is honest but for the number of samples, which it claims to be ten times as large."""

    def update(self, world, weights, client, rng):
        update = world.train(weights, client, rng)
        return replace(update, samples=10 * update.samples)


class Sybils(Honest):
    """All send the update of the first of them, with noise of 1 % of its norm."""

    noise = 0.01

    def update(self, world, weights, client, rng):
        leader = min(self.attackers)
        own = self.shared(world, lambda: world.train(weights, leader, rng))
        noise = rng.standard_normal(weights.size)
        norm = float(np.linalg.norm(own.delta))
        return replace(
            own, client=name(client), delta=own.delta + scaled_to(noise, self.noise * norm)
        )


class NoisySybils(Sybils):
    """Sybils that add noise of half the norm, to look different."""

    noise = 0.5


class Colluders(Honest):
    """Agree each round on a random direction, and add noise of three quarters of its norm."""

    def update(self, world, weights, client, rng):
        common = self.shared(world, lambda: scaled_to(rng.standard_normal(weights.size), 1.0))
        delta = common + scaled_to(rng.standard_normal(weights.size), 0.75)
        return fake(world, client, scaled_to(delta, typical_norm(world)))


class SignFlip(Honest):
    """Sends the negative of its honest update."""

    def update(self, world, weights, client, rng):
        update = world.train(weights, client, rng)
        return replace(update, delta=-update.delta)


class Scaled(Honest):
    """Sends ten times an update that was trained to call everything class 0."""

    def update(self, world, weights, client, rng):
        update = world.train(weights, client, rng, relabel=np.zeros_like)
        return replace(update, delta=10 * update.delta)


class Lazy(Honest):
    """Does one of the steps that it claims."""

    def update(self, world, weights, client, rng):
        return world.train(weights, client, rng, steps=1)


class LazyScaled(Honest):
    """Does one step, and multiplies it to a plausible norm."""

    def update(self, world, weights, client, rng):
        update = world.train(weights, client, rng, steps=1)
        return replace(update, delta=scaled_to(update.delta, typical_norm(world)))


class Whitewash(LabelFlip):
    """Flips labels, and takes a new identity as soon as an update was refused."""

    def __init__(self, attackers):
        super().__init__(attackers)
        self.identities = dict.fromkeys(attackers, 0)

    def identity(self, client):
        number = self.identities.get(client, 0)
        return name(client) + (f"-{number}" if number else "")

    def refused(self, client):
        if client in self.identities:
            self.identities[client] += 1


class Sporadic(Honest):
    """Flips labels in three of ten rounds, and is honest in the others."""

    def update(self, world, weights, client, rng):
        if rng.random() < 0.3:
            return world.train(weights, client, rng, relabel=lambda labels: CLASSES - 1 - labels)
        return world.train(weights, client, rng)


ATTACKS = {
    "none": Honest,
    "noise": NoiseFreeRider,
    "noise_steady": SteadyNoise,
    "replay": Replay,
    "flip": LabelFlip,
    "inflate": Inflation,
    "sybil": Sybils,
    "sybil_noisy": NoisySybils,
    "collude": Colluders,
    "sign": SignFlip,
    "scaled": Scaled,
    "lazy": Lazy,
    "lazy_scaled": LazyScaled,
    "whitewash": Whitewash,
    "sporadic": Sporadic,
    "rare": Honest,
    "rare_flip": LabelFlip,
}
