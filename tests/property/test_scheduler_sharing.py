"""Groups of jobs that share devices: each pays, none holds more than exists, values are exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.scheduler_worlds import CLUSTERS, random_job, rate_model

from paceline.scheduler.decide import decide
from paceline.scheduler.events import Submitted
from paceline.scheduler.planning.assignment import assign
from paceline.scheduler.planning.candidates import Objective, Options, candidates_of
from paceline.scheduler.planning.sharing import GroupFormer
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.rates.model import RateModel
from paceline.scheduler.rates.sharing import ResourceVectors
from paceline.scheduler.state.state import State

LEAST_GAIN = 0.1
VECTORS = {"compute": (0.9, 0.3), "input": (0.2, 0.8), "exchange": (0.4, 0.2)}


def rates_of(cluster, most):
    """Return rates under which up to `most` jobs share, by memory and what each class uses."""
    pairs = rate_model(cluster)
    if most == 2:
        return pairs
    memory = {node.device_type: node.memory_bytes for node in cluster.nodes}
    vectors = ResourceVectors(VECTORS, memory, most=most, interference=0.02)
    return RateModel(pairs.profiles, vectors)


def planned(seed, cluster, rates):
    """Return a state in which some jobs run, the candidates of its next plan, and an assignment."""
    rng = np.random.default_rng(seed)
    state, policy = State(cluster, rates), Paceline(sharing=1)
    for number in range(30):
        job = random_job(rng, f"j{number}", 60.0 * number, cluster)
        decide(policy, state, [Submitted(at_s=60.0 * number, job=job)])
    jobs = [*state.running.values(), *state.waiting.values()]
    candidates = candidates_of(state, jobs, Objective(), Options())
    return state, candidates, assign(candidates, dict(state.inventory.usable))


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    cluster=st.sampled_from(sorted(CLUSTERS)),
    most=st.integers(1, 4),
    window=st.sampled_from([0, 64]),
)
def test_groups_pay_and_hold_no_more_than_exists(seed, cluster, most, window):
    rates = rates_of(CLUSTERS[cluster], most)
    state, candidates, assignment = planned(seed, CLUSTERS[cluster], rates)
    former = GroupFormer(candidates, rates, most, state.inventory, LEAST_GAIN, window=window)
    groups = former.form(assignment)
    members = [index for group in groups for index in group.members]
    assert len(set(members)) == len(members)
    for kind, usable in state.inventory.usable.items():
        assert sum(g.devices for g in groups if g.device_type == kind) <= usable
    for group in groups:
        shape = state.inventory.closest(group.device_type, group.devices)
        jobs = [candidates[index].job.job for index in group.members]
        kept = [rates.kept(job, [o for o in jobs if o is not job], shape) for job in jobs]
        assert len(jobs) <= max(1, most)
        assert len(jobs) == 1 or (all(job.shares for job in jobs) and min(kept) > 0)
        assert sum(kept) >= 1 + LEAST_GAIN * (len(jobs) - 1) - 1e-9
        memory = sum(job.memory_bytes for job in jobs)
        assert state.inventory.memory_suffices(memory, group.device_type)
        value = 0.0
        for index, share in zip(group.members, kept, strict=True):
            candidate = candidates[index]
            option = candidate.option_on(group.device_type, group.devices)
            slot = candidate.job.slot
            stays = slot is not None and slot.parts == group.home
            value += (candidate.values if stays else candidate.moved)[option] * share
        assert group.value == pytest.approx(value)
