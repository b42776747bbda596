"""The round controller under any order of events: nobody is lost, counted twice or waited for."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.federated.clients import Profiler, Timing
from paceline.federated.monitor import Evaluation
from paceline.federated.rounds import (
    Aggregate,
    CancelClient,
    RoundController,
    RoundOptions,
    StartClient,
)
from paceline.federated.selection import Goals, GoalSelector, OortSelector, RandomSelector
from paceline.federated.server import FederationServer
from paceline.federated.strategies import make_strategy
from paceline.federated.updates import ModelUpdate

CLIENTS = 12
SELECTORS = {
    "random": RandomSelector,
    "oort": OortSelector,
    "goals": lambda rng: GoalSelector(Goals(accuracy_fair=0.5), rng),
}


def controller_of(options, selector, seed):
    rng = np.random.default_rng(seed)
    return RoundController(
        options, SELECTORS[selector](rng), Profiler(CLIENTS), np.full(CLIENTS, 20), 1000
    )


def update_of(client, version):
    return ModelUpdate(
        client=str(client),
        version=version,
        delta=np.ones(1, np.float32),
        samples=20,
        steps=1,
        loss=1.0 + client,
    )


TIMING = Timing(samples=20, compute_s=1.0, bytes=1000, transfer_s=1.0)
OPTIONS = st.builds(
    RoundOptions,
    cohort=st.integers(1, 5),
    in_flight=st.integers(0, 8),
    over_selection=st.sampled_from([1.0, 1.3, 2.0]),
)


@settings(max_examples=examples(150))
@given(
    options=OPTIONS,
    selector=st.sampled_from(sorted(SELECTORS)),
    seed=st.integers(0, 5),
    steps=st.lists(st.tuples(st.integers(0, 11), st.sampled_from("aaaldo")), max_size=80),
)
def test_any_order_of_events(options, selector, seed, steps):
    controller = controller_of(options, selector, seed)
    online = np.ones(CLIENTS, bool)
    working, waiting, now_s, version, late = {}, 0, 0.0, 0, {}
    for client, event in [(0, "d"), *steps]:
        now_s += 1.0
        if event == "o":
            online[client] ^= True
        elif event == "d":
            now_s += 25.0
        elif event == "a" and client in working:
            assert controller.arrived(now_s, client, update_of(client, working.pop(client)), TIMING)
            waiting += 1
        elif event == "a" and client in late:
            update = update_of(client, late.pop(client))
            assert not controller.arrived(now_s, client, update, TIMING)
        elif event == "l" and working.pop(client, None) is not None:
            controller.lost(now_s, client)
        before = len(working)
        actions = controller.advance(now_s, online)
        for action in actions:
            if isinstance(action, StartClient):
                assert online[action.client]
                assert action.client not in working
                assert action.version == controller.version
                assert action.deadline_s > now_s
                working[action.client] = action.version
            elif isinstance(action, CancelClient):
                late[action.client] = working.pop(action.client)
            else:
                assert isinstance(action, Aggregate)
                assert 1 <= len(action.updates) <= options.cohort
                assert len(set(action.clients)) == len(action.clients) or options.in_flight
                assert all(0 < weight <= 1 for weight in action.staleness)
                waiting = 0 if not options.in_flight else waiting - len(action.updates)
                version += 1
        assert controller.version == version
        assert controller.working == working.keys()
        most = options.in_flight or round(options.cohort * options.over_selection)
        assert len(working) <= max(most, before)
        assert controller.wasted_s <= controller.spent_s
        if options.in_flight:
            assert waiting >= 0
            assert int(controller.returned.sum()) == options.cohort * version


def test_a_round_ends_although_clients_do_not_answer():
    controller = controller_of(RoundOptions(cohort=3, in_flight=0), "random", 0)
    online = np.ones(CLIENTS, bool)
    first, second, third = controller.advance(0.0, online)
    assert controller.arrived(1.0, first.client, update_of(first.client, 0), TIMING)
    assert controller.advance(1.0, online) == []
    deadline_s = controller.next_deadline_s
    assert deadline_s == second.deadline_s == third.deadline_s
    actions = controller.advance(deadline_s, online)
    assert [type(action) for action in actions[:3]] == [CancelClient, CancelClient, Aggregate]
    assert actions[2].clients == (first.client,)
    assert controller.wasted_s == 2 * deadline_s


@given(cohorts=st.integers(1, 4), rounds=st.integers(1, 4))
def test_no_model_is_made_beyond_the_rounds(cohorts, rounds):
    """Answers of several cohorts may wait at once, as after one look at what nodes have sent."""
    options = RoundOptions(cohort=2, in_flight=8)
    server = FederationServer(
        controller_of(options, "random", 0),
        np.zeros(1, np.float32),
        np.full(CLIENTS, 20.0),
        strategy=make_strategy("fedbuff", 2),
        evaluate=lambda now_s, version, _: Evaluation(now_s, version, 0.5, (0.5, 0.5)),
    )
    online = np.ones(CLIENTS, bool)
    started = server.advance(0.0, online, rounds)
    for action in started[: 2 * cohorts]:
        server.arrived(1.0, action.client, update_of(action.client, 0), TIMING)
    server.advance(1.0, online, rounds)
    assert server.version == min(cohorts, rounds)
