"""What does it cost 4,096 tasks to find each other and to notice each other's end?

Counted in a simulation of 4,096 tasks under a virtual clock, with the state machines of real runs:
messages per second at the root while tasks arrive (within 10 s) and while they run. Timed here:
what the root's state machine and codec take for a report, and several hundred real members over
loopback.

The peer is the rendezvous through files of commit 0deccb6, by the arithmetic of its polling: each
task looked at two names every 0.05 s until the start, and at one every 0.25 s while it ran. Of the
present one the shared file system sees one small file, which rank 0 writes, and rank 0's listing of
its folder once a second; members look at it only where the launcher does not tell the root's host.

    python bench/rendezvous.py --json [--quick]

`--quick` takes 512 simulated tasks and 100 real members.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import Report, options

from paceline.core.clock import SystemClock
from paceline.core.randomness import make_generator
from paceline.launch.exits import exit_of
from paceline.launch.rendezvous import messages
from paceline.launch.rendezvous.job import TaskRendezvous
from paceline.launch.rendezvous.memory import SimulatedJob
from paceline.launch.rendezvous.messages import JobEnd
from paceline.launch.rendezvous.root import (
    AddressChosen,
    Deadlines,
    Received,
    ResultWritten,
    RootState,
)
from paceline.launch.task_placement import TaskPlacement

ARRIVAL_S, RUN_S = 10.0, 120.0
OLD_MEETING_LOOKS_PER_S, OLD_RUN_LOOKS_PER_S = 2 / 0.05, 1 / 0.25  # commit 0deccb6, per task
LISTINGS_PER_S = 1.0  # server.py, _POLL_INTERVAL_S: by rank 0 alone
DEADLINES = Deadlines()


def simulate(size):
    """Return messages per second at the root: as tasks arrive, at the most, and while all run."""
    job = SimulatedJob(world_size=size, deadlines=DEADLINES)
    job.start_root()
    arrivals = make_generator(0, "arrivals").uniform(0, ARRIVAL_S, size)
    for rank in range(size):
        job.at(float(arrivals[rank]), lambda rank=rank: job.add_task(rank, run_s=RUN_S))

    def end():
        if job.outcome is None:
            job.at(job.now_s + 0.1, end)
        else:
            assert job.outcome.exits == ()
            job.root_event(ResultWritten(JobEnd(exit_code=0)))

    job.at(0.0, end)
    job.run(10 * RUN_S)
    assert job.finished
    first = int(ARRIVAL_S) + 2
    last = int(RUN_S) - 2
    running = [job.root_messages.get(second, 0) for second in range(first, last)]
    arriving = [job.root_messages.get(second, 0) for second in range(first)]
    return (
        sum(arriving) / len(arriving),
        max(job.root_messages.values()),
        sum(running) / len(running),
    )


def report_cost_s(size, rounds=3):
    """Return the seconds that the root takes to parse a report, handle it and write the answer."""
    root = RootState(job="j", run="r", world_size=size, deadlines=DEADLINES, begin_s=0.0)
    lines = [
        messages.TaskReport(
            job="j",
            run="",
            task=str(rank),
            rank=rank,
            world_size=size,
            host=f"node-{rank // 4}",
            cores=tuple(range(32)),
        ).to_line()
        for rank in range(size)
    ]
    best_s = float("inf")
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        for rank, line in enumerate(lines):
            for action in root.handle(Received(rank, messages.parse_report(line)), float(turn)):
                if hasattr(action, "notice"):
                    action.notice.to_line()
        if turn:  # the first one is the arrival
            best_s = min(best_s, (time.perf_counter() - begin) / size)
        else:
            root.handle(AddressChosen("node-0", 4711), 0.0)
    return best_s


def real_members(size):
    """Return the seconds until `size` members over loopback have started, and until all left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(max(soft, 8 * size + 200), hard), hard))
    started = [0.0] * size

    def body(rank, run):
        placement = TaskPlacement(
            source="bench",
            task_number=rank,
            task_count=size,
            local_task_number=rank,
            local_task_count=size,
        )
        clock = SystemClock()
        task = TaskRendezvous(
            run, placement, host="here", cores=(0,), deadlines=DEADLINES, clock=clock
        )
        with task:
            task.start()
            task.await_start()
            started[rank] = time.perf_counter()
            task.report(exit_of(rank, 0))
            if rank == 0:
                assert task.gather() == ()
                task.announce(JobEnd(exit_code=0))
            else:
                task.await_end()

    with tempfile.TemporaryDirectory() as folder:
        threads = [threading.Thread(target=body, args=(rank, Path(folder))) for rank in range(size)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
    assert all(started)
    return max(started) - begin, time.perf_counter() - begin


def main():
    flags = options(__doc__)
    report = Report("rendezvous", flags.json)
    size, members = (512, 100) if flags.quick else (4096, 500)
    arriving, most, running = simulate(size)
    report.row(
        tasks=size,
        simulated=True,
        heartbeat_interval_s=DEADLINES.heartbeat_interval_s,
        root_messages_per_s_arriving=arriving,
        root_messages_in_the_busiest_second=most,
        root_messages_per_s_running=running,
        shared_file_system_operations_per_s=LISTINGS_PER_S,
    )
    report.row(
        tasks=size,
        peer="files of commit 0deccb6, by arithmetic",
        stats_per_s_arriving=OLD_MEETING_LOOKS_PER_S * size,
        stats_per_s_running=OLD_RUN_LOOKS_PER_S * size,
    )
    cost_s = report_cost_s(size)
    share = cost_s * size / DEADLINES.heartbeat_interval_s
    report.row(tasks=size, seconds_per_report=cost_s, share_of_a_core_running=share)
    started_s, left_s = real_members(members)
    report.row(members=members, simulated=False, all_started_s=started_s, all_left_s=left_s)
    report.bar(
        "messages per second at the root while all run",
        running,
        2.2 * size / DEADLINES.heartbeat_interval_s,
    )
    report.bar(
        "operations per second on the shared file system, part of the peer's",
        LISTINGS_PER_S / (OLD_RUN_LOOKS_PER_S * size),
        0.001,
    )
    report.bar("share of one core that the root takes while all run", share, 0.1)
    report.bar(f"{members} real members over loopback have started, s", started_s, 10.0)
    return report.print()


if __name__ == "__main__":
    sys.exit(main())
