"""A waiting job has a reason that says what it lacks, with numbers."""

import pytest

from paceline.core.errors import NotFound
from paceline.scheduler.cluster import Cluster, Node
from paceline.scheduler.decide import decide
from paceline.scheduler.events import NodeLost, Stopped, Submitted
from paceline.scheduler.job import Job
from paceline.scheduler.policies import POLICIES
from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.policies.marble import Marble
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.policies.reasons import why
from paceline.scheduler.policies.srtf import ShortestRemaining
from paceline.scheduler.rates.model import RateModel
from paceline.scheduler.state.state import State


def queue(policy, cluster, *jobs):
    state = State(cluster, RateModel({}))
    decide(policy, state, [Submitted(at_s=0.0, job=job) for job in jobs])
    return state


def job(name, devices, **fields):
    return Job(name=name, devices=devices, work=fields.pop("work", 3600.0), **fields)


def test_too_few_devices_and_who_is_before():
    policy = Fifo()
    state = queue(
        policy, Cluster.of_text("v100=1x4"), job("a", 2), job("b", 1), job("c", 3), job("d", 1)
    )
    assert why(state, policy, "c") == (
        "It needs 3 devices of one type; 1 v100 free, the rest held by 2 jobs. "
        "It is the first in the queue."
    )
    assert why(state, policy, "d") == (
        "It needs 1 device; 1 v100 free. "
        "1 job before it in the queue; the first, c, waits for 3 devices."
    )
    assert why(state, policy, "a") == "It runs on v100-0[0-1]."


def test_devices_are_free_but_not_in_one_node():
    policy = Marble()
    jobs = [job(name, 3) for name in "ab"]
    state = queue(policy, Cluster.of_text("2x4"), *jobs, job("c", 2))
    assert why(state, policy, "c") == (
        "It needs 2 devices; 2 gpu free, but at most 1 gpu of them in one node. It pays on 2 gpu."
    )


def test_more_time_left_than_the_running_jobs():
    policy = ShortestRemaining()
    state = queue(policy, Cluster.of_text("1x2"), job("a", 2), job("b", 1, work=9000.0))
    assert why(state, policy, "b").endswith("2.50 h left; less is left of 1 running job.")


def test_lost_nodes_and_what_was_lost_with_them():
    policy = Fifo()
    state = queue(policy, Cluster.of_text("2x4"), job("a", 8))
    stopped = Stopped(at_s=5.0, name="a", reason="node n1 was lost")
    decide(policy, state, [stopped, NodeLost(at_s=5.0, node="n1")])
    assert why(state, policy, "a") == (
        "It needs 8 devices of one type; 1 node lost, 4 gpu left. "
        "It was stopped: node n1 was lost. It is the first in the queue."
    )


def test_what_can_never_run_says_so():
    state = State(
        Cluster(nodes=(Node(name="n", device_type="gpu", devices=4, memory_bytes=8 << 30),)),
        RateModel({}),
    )
    big = job("a", 1, memory_bytes=9 << 30)
    state.apply(Submitted(at_s=0.0, job=big))
    assert why(state, Fifo(), "a") == (
        "It can never run: it needs 9.0 GiB on each device, the largest has 8.0 GiB."
    )


def test_a_policy_in_rounds_says_when_the_next_one_begins():
    policy = POLICIES["optimus"]()
    state = queue(policy, Cluster.of_text("1x4"), job("a", 4))
    decide(policy, state, [Submitted(at_s=60.0, job=job("b", 2))])
    assert why(state, policy, "b").endswith("The next round begins in 540 s.")


def test_a_tenant_over_its_quota():
    policy = Paceline(quotas={"ann": 3})
    state = queue(
        policy, Cluster.of_text("1x8"), job("a", 2, tenant="ann"), job("b", 2, tenant="ann")
    )
    assert why(state, policy, "b") == (
        "It needs 2 devices; 6 gpu free. "
        "Running jobs of tenant ann may take 2 of the 3 devices of its quota, and the job 2."
    )


def test_jobs_whose_progress_is_worth_more():
    policy = Paceline()
    # The longest job decides the makespan, so it comes before one that is not that much shorter.
    jobs = [job(name, 4, work=work) for name, work in (("a", 10.0), ("b", 1e4), ("c", 1e5))]
    state = queue(policy, Cluster.of_text("1x4"), *jobs)
    assert why(state, policy, "b").endswith(
        "1 waiting job before it by what a second of progress on a device is worth."
    )


def test_a_job_that_is_gone_is_not_found():
    state = queue(Fifo(), Cluster.of_text("1x4"))
    with pytest.raises(NotFound, match="no job 'x' waits or runs"):
        why(state, Fifo(), "x")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_explains_each_waiting_job(name):
    policy = POLICIES[name]()
    jobs = [job(f"j{i}", 1 + i % 4, work=100.0 * (i + 1)) for i in range(12)]
    state = queue(policy, Cluster.of_text("2x4"), *jobs)
    assert state.waiting
    for waiting in state.waiting:
        text = why(state, policy, waiting)
        assert text.startswith("It ")
        assert text.endswith(".")
        assert any(letter.isdigit() for letter in text)
