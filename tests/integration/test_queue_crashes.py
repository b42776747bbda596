"""The daemon of a queue is killed again and again while jobs run, wait and are preempted."""

import random
import threading
from collections import Counter

import pytest
from support.launching import SCRIPTS, await_true
from support.local_queues import PYTHON, QueueUnderTest

from paceline.core.clock import SystemClock
from paceline.scheduler.local.paths import queue_paths
from paceline.scheduler.local.protocol.client import ask
from paceline.scheduler.local.protocol.messages import Request

JOBS, KILLS = 40, 20


@pytest.mark.campaign("faults")
@pytest.mark.parametrize("policy", ["srtf", "paceline"])
def test_no_job_is_lost_or_run_twice_though_the_daemon_is_killed_20_times(tmp_path, policy):
    seed = 10
    generator = random.Random(seed)
    done = tmp_path / "done"
    never = threading.Event()
    names = [f"job-{number}" for number in range(JOBS)]
    with QueueUnderTest(policy, slots=3) as queue:
        paths, clock = queue_paths(queue.folder, {}), SystemClock()
        left = iter(names)
        for _ in range(KILLS):
            for name in (next(left), next(left)):
                steps = generator.choice((1, 5, 50, 100, 300))
                options = ("--name", name, "-n", generator.choice((1, 1, 2, 3)), "--grace", 5)
                options += ("--work", steps) if generator.random() < 0.8 else ()
                queue.submit(*options, "--", PYTHON, SCRIPTS / "queue_steps.py", steps, done)
            # At any moment: what the daemon does now, nobody knows.
            never.wait(generator.uniform(0.0, 0.4))
            queue.kill()
            queue.serve()

        def all_ended() -> bool:
            return not ask(paths, Request(verb="list"), clock).jobs

        await_true(all_ended, f"all jobs to end, seed {seed}", 300)
        jobs = queue.jobs()
        assert {name: job["status"] for name, job in jobs.items()} == dict.fromkeys(names, "done")
        assert Counter(done.read_text().split()) == Counter(names)
        assert sum(job["starts"] for job in jobs.values()) > JOBS, "nothing was preempted"
        replay = queue.replay()
        assert replay["difference"] is None
        assert replay["events"] > 3 * JOBS
        assert queue.processes() == []
