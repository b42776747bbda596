from dataclasses import replace

import pytest

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.job import Job
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.policies.reasons import why
from paceline.scheduler.rates.model import RateModel
from paceline.scheduler.simulate.engine import Simulation, World


def small_jobs(*, preemptible, count=400):
    """Return jobs of one device that come faster than two of four devices can serve them."""
    return [
        Job(
            name=f"small {number}",
            submitted_s=25.0 * number,
            work=90.0 + number % 7,
            preemptible=preemptible,
        )
        for number in range(count)
    ]


def played(jobs, **options):
    rates = RateModel({})
    world = World(jobs=jobs, cluster=Cluster.of_text("1x4"), rates=rates)
    return Simulation(world, Paceline(**options), rates).run()


def test_a_wide_job_gets_its_turn_among_small_ones_that_cannot_be_preempted():
    wide = Job(name="wide", submitted_s=100.0, devices=4, work=500.0)
    for small_queue in (256, 0):  # planned at each event, and between plans by backfill
        outcome = played([*small_jobs(preemptible=False), wide], small_queue=small_queue)
        waited_s = outcome.jobs["wide"].started_s - 100.0
        assert waited_s < 300.0  # three jobs one after the other at most


def test_short_jobs_start_before_a_reservation_and_long_ones_wait_behind_it():
    jobs = [
        Job(name="running", work=100.0, preemptible=False),
        Job(name="wide", submitted_s=1.0, devices=4, work=50.0, preemptible=False),
        Job(name="short", submitted_s=2.0, work=60.0, preemptible=False),
        Job(name="long", submitted_s=3.0, work=500.0, preemptible=False),
    ]
    outcome = played(jobs)
    started = {name: job.started_s for name, job in outcome.jobs.items()}
    assert started["short"] == 2.0
    assert started["wide"] == 100.0
    assert started["long"] == 150.0


def test_a_job_that_is_held_back_says_for_whom():
    rates = RateModel({})
    jobs = [
        Job(name="running", work=100.0, preemptible=False),
        Job(name="wide", submitted_s=1.0, devices=4, work=50.0),
        Job(name="long", submitted_s=3.0, work=500.0, preemptible=False),
    ]
    policy = Paceline()
    simulation = Simulation(
        World(jobs=jobs, cluster=Cluster.of_text("1x4"), rates=rates), policy, rates
    )
    while simulation.now_s < 3.0:
        simulation.step()
    reason = why(simulation.state, policy, "long")
    assert "held back for wide" in reason
    assert "97 s" in reason


def test_jobs_that_can_be_preempted_make_way_for_a_wide_one():
    wide = Job(name="wide", submitted_s=100.0, devices=4, work=500.0)
    outcome = played([*small_jobs(preemptible=True), wide])
    assert outcome.jobs["wide"].ended_s is not None
    assert all(job.ended_s is not None for job in outcome.jobs.values())


@pytest.mark.parametrize("preemptible", [True, False])
def test_a_reservation_comes_true_among_jobs_of_both_kinds(preemptible):
    """Jobs that can be preempted leave when its moment has come, until it has ended."""
    small = [
        replace(job, preemptible=number % 2 == 0, submitted_s=30.0 * number)
        for number, job in enumerate(small_jobs(preemptible=True))
    ]
    wide = Job(name="wide", submitted_s=100.0, devices=4, work=500.0, preemptible=preemptible)
    outcome = played([*small, wide])
    ended = outcome.jobs["wide"]
    assert ended.starts == 1
    assert ended.started_s - 100.0 < 300.0
    waits_s = [
        job.started_s - job.job.submitted_s
        for job in outcome.jobs.values()
        if job.job.name != "wide" and not job.job.preemptible
    ]
    assert max(waits_s) < 2000.0
