"""Promises of Paceline's own policy, on queues of a few jobs."""

import pytest

from paceline.scheduler.cluster import Cluster, Level, Node
from paceline.scheduler.decide import decide
from paceline.scheduler.events import Ended, Submitted, Timer
from paceline.scheduler.job import Job
from paceline.scheduler.planning.candidates import Objective
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.topology import Exchange
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


def test_a_gang_gets_its_turn_within_the_bound_of_its_patience_although_a_queue_grows():
    stream = [
        Job(name=f"s{i}", submitted_s=i * HOUR_S / 10, work=HOUR_S, restart_s=30.0)
        for i in range(400)
    ]
    gang = Job(name="gang", submitted_s=HOUR_S, devices=8, work=HOUR_S, restart_s=30.0)
    policy = Paceline()
    world = World(jobs=[*stream, gang], cluster=Cluster.of_text("1x8"), rates=PLAIN)
    ended = Simulation(world, policy, PLAIN).run().jobs["gang"]
    aged_s = policy.objective.patience * 8**policy.objective.alpha * HOUR_S
    assert aged_s < 10 * HOUR_S  # the stream lasts for 40 h
    # What runs has less left than a new job, half on average, and is worth more for it.
    assert ended.started_s <= gang.submitted_s + 1.5 * aged_s
    assert ended.starts == 1


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


def test_a_gang_wider_than_a_switch_starts_where_nothing_is_closer():
    """Devices of two switches are scattered, but the closest that so many can be."""
    exchange = {"gpu": Exchange(message_bytes=1e9, compute_s=0.1, overlap=0.0)}
    profile = Profile(alone={"gpu": {16: 1.0}}, exchange=exchange)
    levels = (
        Level(name="node", bandwidth_bytes_per_s=1e11),
        Level(name="leaf", bandwidth_bytes_per_s=1e10),
        Level(name="spine", bandwidth_bytes_per_s=1e9),
    )
    nodes = tuple(
        Node(name=f"n{i}", device_type="gpu", devices=8, switches=(f"leaf{i}", "spine"))
        for i in range(2)
    )
    rates = RateModel({"wide": profile}, levels=levels)
    gang = Job(name="gang", devices=16, profile="wide", work=100.0)
    world = World(jobs=[gang], cluster=Cluster(nodes=nodes, levels=levels), rates=rates)
    assert Simulation(world, Paceline(), rates).run().jobs["gang"].started_s == 0.0


def test_jobs_on_scattered_devices_stay_where_distance_costs_nothing():
    jobs = [
        Job(name="a", devices=3, work=100.0, preemptible=False),
        Job(name="b", devices=3, work=300.0, preemptible=False),
        Job(name="c", submitted_s=1.0, devices=2, work=1000.0, restart_s=600.0),
    ]
    world = World(jobs=jobs, cluster=Cluster.of_text("2x4"), rates=PLAIN)
    assert Simulation(world, Paceline(), PLAIN).run().jobs["c"].starts == 1


class WiderLater:
    """Rates of a job that gains nothing by a second device before half of its work is done."""

    most_sharing = 1

    def alone(self, job, shape, work_done=0.0):
        return float(shape.devices) if work_done >= 50.0 else 1.0

    def kept(self, job, neighbours, shape):
        return 0.0 if neighbours else 1.0

    def constant_until(self, job, work_done):
        return 50.0 if work_done < 50.0 else float("inf")


def test_a_job_alone_grows_when_its_progress_makes_more_devices_pay():
    job = Job(name="a", devices=1, max_devices=2, work=100.0)
    world = World(jobs=[job], cluster=Cluster.of_text("1x2"), rates=WiderLater())
    assert Simulation(world, Paceline(), WiderLater()).run().jobs["a"].ended_s == 75.0
