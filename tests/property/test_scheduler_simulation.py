"""In the simulator every job ends, equal seeds give equal logs, and no policy beats the bounds."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.scheduler_worlds import CLUSTERS, random_job, rate_model

from paceline.scheduler.policies import POLICIES
from paceline.scheduler.policies.fitting import never_fits
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.simulate.engine import NodeFailure, Simulation, World
from paceline.scheduler.simulate.metrics import alone_times_s, mean_jobs, metrics
from paceline.scheduler.state.state import State

JOBS = 40


def world(seed, cluster, *, told):
    rng = np.random.default_rng(seed)
    nodes = CLUSTERS[cluster].nodes
    arrivals_s = np.cumsum(rng.exponential(120, JOBS))
    jobs = [
        random_job(rng, f"j{index}", float(at_s), CLUSTERS[cluster])
        for index, at_s in enumerate(arrivals_s)
    ]
    failures = [
        NodeFailure(nodes[int(rng.integers(len(nodes)))].name, 1000.0 * index, 900.0)
        for index in range(1, 6)
    ]
    factors = dict(zip([job.name for job in jobs], 2 ** rng.uniform(-1, 1, JOBS), strict=True))
    tells = {
        "truth": lambda job: job,
        "wrong": lambda job: dataclasses.replace(job, work=job.work * factors[job.name]),
        "nothing": lambda job: dataclasses.replace(job, work=None),
    }
    return World(
        jobs=jobs,
        cluster=CLUSTERS[cluster],
        rates=rate_model(CLUSTERS[cluster]),
        failures=failures,
        told=tells[told],
        report_s=float(rng.choice([0, 250])),
    )


def uneven(rates, rng):
    """Return rates of which each number of devices was measured, neither monotone nor concave."""
    profiles = {
        name: Profile(
            alone={
                kind: {n: n**0.7 * float(rng.uniform(0.5, 1.5)) for n in range(1, 17)}
                for kind in profile.alone
            },
            spread=profile.spread,
        )
        for name, profile in rates.profiles.items()
    }
    return RateModel(profiles, rates.sharing)


def simulated(name, the_world):
    return Simulation(the_world, POLICIES[name](), the_world.rates).run()


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(12))
@given(
    told=st.sampled_from(["truth", "wrong", "nothing"]),
    seed=st.integers(0, 2**32),
    cluster=st.sampled_from(sorted(CLUSTERS)),
)
def test_every_job_ends_and_equal_seeds_give_equal_logs(name, told, seed, cluster):
    the_world = world(seed, cluster, told=told)
    outcome = simulated(name, the_world)
    empty = State(the_world.cluster, the_world.rates)
    for job in outcome.jobs.values():
        assert (job.ended_s is None) == bool(job.refused)
        assert job.refused == never_fits(empty, job.job)
        if job.ended_s is not None:
            assert job.work_done >= job.job.work * (1 - 1e-6)
    again = simulated(name, world(seed, cluster, told=told))
    assert again.decisions == outcome.decisions
    assert again.jobs == outcome.jobs


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=examples(8))
@given(seed=st.integers(0, 2**32), cluster=st.sampled_from(sorted(CLUSTERS)), shared=st.booleans())
def test_no_policy_beats_the_lower_bounds(name, seed, cluster, shared):
    """Whatever numbers of devices it chooses, and whichever of them happen to be the fastest."""
    the_world = world(seed, cluster, told="truth")
    jobs = [dataclasses.replace(job, shares=shared) for job in the_world.jobs]
    rates = uneven(the_world.rates, np.random.default_rng(seed))
    the_world = dataclasses.replace(the_world, jobs=jobs, rates=rates)
    outcome = simulated(name, the_world)
    figures = metrics(outcome, the_world.rates)
    ended = [job for job in outcome.jobs.values() if job.ended_s is not None]
    alone_s = alone_times_s([job.job for job in ended], the_world.cluster, the_world.rates)
    for job, least_s in zip(ended, alone_s, strict=True):
        assert job.ended_s - job.job.submitted_s >= least_s * (1 - 1e-6)
    if not any(job.job.shares for job in ended):
        assert figures.useful <= figures.allocated * (1 + 1e-6)
    assert figures.jct_mean_s >= figures.jct_bound_s * (1 - 1e-9)
    assert figures.makespan_s >= figures.makespan_bound_s * (1 - 1e-9)
    assert 0 < figures.allocated <= 1 + 1e-9
    assert figures.rho_worst >= figures.rho_p99


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(1, 50)).map(lambda t: (t[0], t[0] + t[1])),
        min_size=1,
        max_size=12,
    )
)
def test_mean_jobs_equals_the_sum_of_overlaps(spans):
    begin, end = np.array(spans, float).T
    naive = [
        sum(max(0, min(e, other_e) - max(b, other_b)) for other_b, other_e in spans) / (e - b)
        for b, e in spans
    ]
    assert mean_jobs(begin, end) == pytest.approx(naive)
