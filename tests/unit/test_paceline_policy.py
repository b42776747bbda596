"""Promises of Paceline's own policy, on queues of a few jobs."""

import pytest

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.decide import decide
from paceline.scheduler.events import Ended, Submitted, Timer
from paceline.scheduler.job import Job
from paceline.scheduler.planning.candidates import Objective
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.simulate.engine import Simulation, World
from paceline.scheduler.state.state import State

PLAIN = RateModel({})
HOUR_S = 3600.0


def test_a_gang_whose_waiting_gave_it_devices_keeps_them_while_short_jobs_come():
    """What it waited for must not be forgotten as soon as it runs."""
    stream = [
        Job(name=f"s{i}", submitted_s=i * HOUR_S / 6, work=HOUR_S, restart_s=30.0)
        for i in range(120)
    ]
    gang = Job(name="gang", submitted_s=HOUR_S, devices=8, work=HOUR_S, restart_s=30.0)
    policy = Paceline(objective=Objective(patience=2.0))
    world = World(jobs=[*stream, gang], cluster=Cluster.of_text("1x8"), rates=PLAIN)
    ended = Simulation(world, policy, PLAIN).run().jobs["gang"]
    assert ended.starts == 1
    assert ended.ended_s < stream[-1].submitted_s


@pytest.mark.parametrize("preemptible", [True, False])
def test_plan_and_backfill_count_a_quota_alike(preemptible):
    """An elastic job holds 2 of the 6 devices that it may take: no other one fits beside it."""
    rates = RateModel({"m": Profile(alone={"gpu": {1: 1.0, 8: 8.0}})})
    state = State(Cluster.of_text("1x12"), rates)
    policy = Paceline(quotas={"ann": 6}, small_queue=0)
    hog = Job(name="hog", devices=10, work=1e6, preemptible=False)
    elastic = Job(name="a", max_devices=6, profile="m", work=1e5, tenant="ann")
    rigid = Job(name="b", devices=4, work=1e5, tenant="ann", preemptible=preemptible)
    decide(policy, state, [Submitted(at_s=0.0, job=hog)])
    decide(policy, state, [Submitted(at_s=100.0, job=elastic)])
    decide(policy, state, [Ended(at_s=101.0, name="hog"), Submitted(at_s=101.0, job=rigid)])
    decide(policy, state, [Timer(at_s=161.0)])
    held = {name: job.slot.shape.devices for name, job in state.running.items()}
    assert held == {"a": 6}
