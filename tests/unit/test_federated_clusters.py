"""Clusters of clients by their updates, and accuracy for each of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.federated.clusters import ClientClusters
from paceline.federated.config import FederationConfig
from paceline.federated.groups import class_mixes
from paceline.federated.simulate.engine import FederationSimulation
from paceline.federated.simulate.world import SimulatedClients
from paceline.federated.strategies import make_strategy
from paceline.federated.study import read_data

CLIENTS, PARAMETERS = 24, 3000


def updates_of(families, rng, noise=0.5):
    """Return updates: what all have in common, what a family has, and noise."""
    common, *own = np.random.default_rng(9).standard_normal((families.max() + 2, PARAMETERS))
    noises = noise * rng.standard_normal((families.size, PARAMETERS))
    return (3 * common + np.stack(own)[families] + noises).astype(np.float32)


def test_clients_with_alike_updates_are_a_cluster_and_keep_its_number():
    families = np.arange(CLIENTS) % 4
    rng, clusters = np.random.default_rng(0), ClientClusters(CLIENTS, PARAMETERS)
    numbers = []
    for round_ in range(4):
        for client, update in enumerate(updates_of(families, rng)):
            clusters.note(client, update, 0.2 * families[client])
        accuracies = clusters.evaluate()
        found = clusters.cluster_of
        assert len(accuracies) == 4
        if round_ == 0:  # the first clients were compared with hardly any others
            continue
        for family in range(4):
            (number,) = set(found[families == family].tolist())
            assert accuracies[number] == pytest.approx(0.2 * family)
        numbers.append(found.tolist())
    assert numbers[0] == numbers[1] == numbers[2]


def test_too_few_clients_are_no_clusters_and_more_become_more():
    families = np.arange(CLIENTS) % 4
    clusters, found = ClientClusters(CLIENTS, PARAMETERS), []
    for client, update in enumerate(updates_of(families, np.random.default_rng(1))):
        clusters.note(client, update, 0.5)
        found.append(len(clusters.evaluate()))
    assert found == [0] * 5 + [2] * 3 + [3] * 3 + [4] * 13


def test_a_client_without_an_accuracy_is_in_no_cluster():
    clusters = ClientClusters(CLIENTS, PARAMETERS)
    families = np.arange(CLIENTS) % 2
    for client, update in enumerate(updates_of(families, np.random.default_rng(2))):
        clusters.note(client, update, math.nan if client < 4 else 7.0)  # more than all: a lie
    assert set(clusters.evaluate()) == {1.0}
    assert (clusters.cluster_of[:4] == -1).all()
    assert (clusters.cluster_of[4:] >= 0).all()


def test_no_cluster_is_empty_although_all_updates_are_the_same():
    clusters = ClientClusters(CLIENTS, PARAMETERS)
    for client in range(CLIENTS):
        clusters.note(client, np.ones(PARAMETERS, np.float32), 0.5)
    assert clusters.evaluate() == (0.5,) * 4
    assert set(clusters.cluster_of.tolist()) == set(range(4))


def test_a_simulation_finds_who_has_the_same_classes():
    config = FederationConfig.small()
    data, _ = read_data(config)
    families = np.arange(20) % 2
    halves = [np.flatnonzero((data.labels < 5) == (family == 0)) for family in (0, 1)]
    rng = np.random.default_rng(0)
    parts = [rng.choice(halves[family], 60, replace=False) for family in families]
    world = SimulatedClients.make(20, config.devices, np.random.default_rng(0))
    strategy = make_strategy("paceline", 5)
    simulation = FederationSimulation(data, parts, world, strategy, work=config.work)
    outcome = simulation.run(3600.0, 60)
    mixes = class_mixes(data.labels, parts, 10)[:, :5].sum(1)
    accuracies = outcome.monitor.evaluations[-1].by_cluster
    assert len(accuracies) == 4
    for number in range(4):
        assert np.ptp(mixes[outcome.cluster_of == number]) < 1e-9  # of one half alone
    assert min(accuracies) > 0.3
