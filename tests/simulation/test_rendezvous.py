"""A job's tasks under a virtual clock: faults by seed, which the name of a failing test shows.

What must hold, whatever the network does: all live tasks come to the same end; a good run is never
called lost; a dead or failing task ends the run in bounded time, and is the one that is named.
"""

import pytest

from paceline.core.processes import StopRequested
from paceline.core.randomness import make_generator
from paceline.launch.exits import ExitOutcome, interrupted_exit
from paceline.launch.rendezvous.member import RankEnded
from paceline.launch.rendezvous.memory import NetworkFaults, SimulatedJob
from paceline.launch.rendezvous.messages import JobEnd, JobPhase
from paceline.launch.rendezvous.root import Deadlines, ResultWritten, StopAsked

DEADLINES = Deadlines(
    rendezvous_timeout_s=120, heartbeat_interval_s=5, heartbeat_timeout_s=30, stop_timeout_s=10
)
SEEDS = range(40)
BAD = NetworkFaults(loss=0.2, repetition=0.3, delay_s=3.0, break_s=40.0)


def job(size, seed=0, faults=None, **options):
    return SimulatedJob(
        world_size=size,
        deadlines=DEADLINES,
        seed=seed,
        faults=faults or NetworkFaults(),
        **options,
    )


def start_all(simulation, dice=None, spread_s=0.0, **options):
    """Start the root and a task per rank, in any order."""
    delays = [0.0] * (simulation.world_size + 1)
    if dice is not None:
        delays = [float(delay) for delay in dice.uniform(0, spread_s, simulation.world_size + 1)]
    simulation.at(delays[-1], simulation.start_root)
    for rank in range(simulation.world_size):
        simulation.at(delays[rank], lambda rank=rank: simulation.add_task(rank, **options))


def write_result(simulation):
    """Do what rank 0 does: write the result as soon as all have ended."""

    def look():
        if simulation.outcome is not None and simulation.root is not None:
            code = simulation.outcome.exits[0].code if simulation.outcome.exits else 0
            simulation.root_event(ResultWritten(JobEnd(exit_code=code)))
        elif not simulation.finished:
            simulation.at(simulation.now_s + 0.1, look)

    simulation.at(0.0, look)


def play(simulation, until_s=10_000.0):
    write_result(simulation)
    simulation.run(until_s)
    return simulation


def test_a_good_run_without_faults():
    simulation = job(8)
    start_all(simulation)
    play(simulation)
    assert simulation.outcome.exits == ()
    assert all(task.started_s is not None for task in simulation.tasks)
    assert all(task.leave and not task.leave.problem for task in simulation.tasks)
    assert simulation.finished


@pytest.mark.parametrize("seed", SEEDS)
def test_a_good_run_is_never_called_lost(seed):
    dice = make_generator(seed, "test")
    simulation = job(int(dice.integers(1, 9)), seed, BAD)
    start_all(simulation, dice, 60.0, run_s=float(dice.uniform(1, 500)))
    play(simulation)
    assert simulation.outcome.exits == ()
    assert simulation.outcome.missing == ()
    assert all(task.started_s is not None and not task.stop_reason for task in simulation.tasks)
    assert all(task.leave and not task.leave.problem for task in simulation.tasks)


def test_a_rank_may_end_long_after_rank_0():
    """The old deadline was 600 s after rank 0: a checkpoint may take longer (B8)."""
    simulation = job(2)
    simulation.start_root()
    simulation.add_task(0, run_s=1.0)
    simulation.add_task(1, run_s=50_000.0)
    play(simulation, until_s=100_000.0)
    assert simulation.now_s > 50_000
    assert simulation.outcome.exits == ()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_fails_is_named_and_stops_all(seed):
    dice = make_generator(seed, "test")
    size = int(dice.integers(2, 9))
    culprit = int(dice.integers(size))
    simulation = job(size, seed, BAD)
    start_all(simulation, dice, 60.0, run_s=1e6)

    def fail():
        task = simulation.tasks_by_rank[culprit]
        if task.started_s is None:
            simulation.at(simulation.now_s + 1, fail)
            return
        simulation.end_rank(task, 1)

    simulation.at(100.0, fail)
    play(simulation)
    assert simulation.outcome.exits[0].rank == culprit
    assert simulation.outcome.exits[0].outcome is ExitOutcome.ENDED
    assert simulation.now_s < 300
    for task in simulation.tasks:
        assert task.leave is not None
        assert task.ended


def test_without_faults_a_failure_stops_all_at_once():
    simulation = job(64)
    start_all(simulation, run_s=1e6)
    simulation.at(50.0, lambda: simulation.end_rank(simulation.tasks_by_rank[7], 1))
    play(simulation)
    assert simulation.now_s < 51
    assert {task.stop_reason for task in simulation.tasks} == {"", "rank 7 failed"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_task_that_dies_is_lost_and_named(seed):
    dice = make_generator(seed, "test")
    size = int(dice.integers(2, 9))
    victim = int(dice.integers(1, size))
    simulation = job(size, seed, BAD)
    start_all(simulation, dice, 10.0, run_s=1e6)
    simulation.at(200.0, lambda: simulation.kill_task(simulation.tasks_by_rank[victim].index))
    play(simulation)
    lost = simulation.outcome.exits[0]
    assert (lost.rank, lost.outcome) == (victim, ExitOutcome.LOST)
    assert simulation.now_s < 300
    assert all(task.leave for task in simulation.tasks if task.alive)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_dead_root_ends_every_member(seed):
    dice = make_generator(seed, "test")
    simulation = job(int(dice.integers(2, 9)), seed, BAD)
    start_all(simulation, dice, 10.0, run_s=1e6)
    simulation.at(200.0, simulation.kill_root)
    play(simulation)
    assert simulation.now_s < 300
    for task in simulation.tasks:
        assert "rank 0 was not heard of for 30 s" in task.leave.problem
        assert task.ended


@pytest.mark.parametrize("seed", SEEDS)
def test_tasks_that_do_not_arrive_are_named(seed):
    dice = make_generator(seed, "test")
    size = int(dice.integers(3, 9))
    absent = sorted({int(rank) for rank in dice.integers(1, size, 2)})
    simulation = job(size, seed, BAD)
    simulation.start_root()
    for rank in range(size):
        if rank not in absent:
            simulation.add_task(rank)
    play(simulation)
    assert simulation.outcome.missing == tuple(absent)
    assert simulation.outcome.present == tuple(r for r in range(size) if r not in absent)
    assert simulation.now_s < 250
    assert not [task for task in simulation.tasks if task.started_s is not None]
    assert all(task.leave or task.stop_reason for task in simulation.tasks)


def test_a_task_that_arrives_after_another_failed_learns_of_it():
    simulation = job(3)
    simulation.start_root()
    simulation.add_task(1)
    simulation.at(1.0, lambda: simulation.end_rank(simulation.tasks[0], 2))
    simulation.at(1.01, lambda: simulation.add_task(0))
    play(simulation)
    assert simulation.outcome.exits[0].rank == 1
    assert simulation.tasks[1].leave.end.exit_code == 2
    assert simulation.tasks[1].started_s is None
    assert simulation.now_s < 30


def test_members_without_a_root_give_up():
    simulation = job(2)
    simulation.add_task(1)
    play(simulation)
    (task,) = simulation.tasks
    assert task.leave.problem == "rank 0 did not arrive"
    assert 120 <= simulation.now_s < 125


def test_a_task_that_restarts_before_the_start_takes_its_place():
    simulation = job(2)
    simulation.start_root()
    first = simulation.add_task(1)
    simulation.at(5.0, lambda: simulation.kill_task(first))
    simulation.at(6.0, lambda: simulation.add_task(1))
    simulation.at(20.0, lambda: simulation.add_task(0))
    play(simulation)
    assert simulation.outcome.exits == ()
    assert simulation.tasks[1].started_s is not None


def test_two_tasks_of_one_rank_are_not_both_taken():
    simulation = job(2)
    simulation.start_root()
    simulation.add_task(1, run_s=30.0)
    simulation.add_task(1, run_s=30.0)
    simulation.at(10.0, lambda: simulation.add_task(0, run_s=30.0))
    simulation.run(20.0)
    starts = [task.started_s is not None for task in simulation.tasks]
    assert sorted(starts[:2]) == [False, True]
    assert simulation.tasks[starts.index(False)].state.refusal in (
        "another task is rank 1 already",
        "the run has begun without this task",
    )
    play(simulation)
    assert simulation.outcome.exits == ()


def test_a_task_that_restarts_after_the_start_is_lost():
    simulation = job(2)
    start_all(simulation, run_s=1e6)
    simulation.at(50.0, lambda: simulation.kill_task(1))
    simulation.at(50.1, lambda: simulation.add_task(1))
    play(simulation)
    assert [(ended.rank, ended.outcome) for ended in simulation.outcome.exits] == [
        (1, ExitOutcome.LOST)
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_members_of_an_earlier_run_never_join_the_next(seed):
    """Two runs in one folder: the first root died, the second listens in its place."""
    simulation = job(3, seed, NetworkFaults(delay_s=2.0, repetition=0.3))
    simulation.start_root("run-1")
    for rank in range(3):
        simulation.add_task(rank, run_s=1e6)
    simulation.at(60.0, simulation.kill_root)

    def second():
        simulation.start_root("run-2")
        for rank in range(3):
            simulation.add_task(rank, run_s=5.0)

    simulation.at(60.5, second)
    play(simulation)
    old, new = simulation.tasks[:3], simulation.tasks[3:]
    assert simulation.outcome.exits == ()
    assert all(task.state.run == "run-1" and task.leave.problem for task in old)
    assert all(task.state.run == "run-2" and not task.leave.problem for task in new)


def test_tasks_of_another_job_are_refused():
    simulation = job(1)
    simulation.start_root()
    simulation.add_task(0)
    simulation.job = "another job"
    simulation.add_task(0)
    simulation.run(2.0)
    assert simulation.tasks[1].state.refusal.startswith("this is the root of another job: ")
    assert simulation.tasks[1].started_s is None


@pytest.mark.parametrize("rank", [0, 2])
def test_an_interruption_stops_all_and_is_the_outcome(rank):
    simulation = job(3)
    start_all(simulation, run_s=1e6)
    ended = interrupted_exit(rank, StopRequested("SIGTERM"), 50.0)
    simulation.at(
        50.0, lambda: simulation.member_event(simulation.tasks_by_rank[rank], RankEnded(ended))
    )
    play(simulation)
    (outcome,) = simulation.outcome.exits
    assert (outcome.outcome, outcome.signal) == (ExitOutcome.INTERRUPTED, "SIGTERM")
    assert all(task.leave.end.exit_code == 130 for task in simulation.tasks)


def test_an_interruption_while_the_others_are_awaited():
    simulation = job(2)
    simulation.start_root()
    simulation.add_task(0, run_s=1.0)
    simulation.add_task(1, run_s=1e6)
    ended = interrupted_exit(0, StopRequested("SIGINT"), 50.0)
    simulation.at(50.0, lambda: simulation.root_event(StopAsked(ended)))
    play(simulation)
    assert simulation.outcome.exits == (ended,)
    assert simulation.tasks[1].ended


def test_phases_only_advance():
    simulation = job(2, faults=NetworkFaults(delay_s=20.0, repetition=0.5))
    start_all(simulation, run_s=30.0)
    seen = []
    for second in range(200):
        simulation.at(
            float(second), lambda: seen.append([task.state.phase for task in simulation.tasks])
        )
    play(simulation)
    for rank in range(2):
        phases = [phase[rank] for phase in seen if len(phase) == 2]
        assert phases == sorted(phases)
        assert JobPhase.RUNNING in phases


def test_4096_tasks_meet_and_report_with_few_messages():
    simulation = job(4096)
    start_all(simulation, run_s=30.0)
    play(simulation)
    assert simulation.outcome.exits == ()
    running = [simulation.root_messages.get(second, 0) for second in range(5, 30)]
    assert sum(running) / len(running) <= 2 * 4096 / DEADLINES.heartbeat_interval_s * 1.1
