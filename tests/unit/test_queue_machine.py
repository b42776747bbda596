"""The state machine of a machine's queue: no process, no clock, no file."""

import json
import sqlite3

import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import ConfigError, UsageError
from paceline.scheduler.cluster import Cluster, Node
from paceline.scheduler.events import Rated, Submitted
from paceline.scheduler.job import Job
from paceline.scheduler.local.daemon import Daemon, Retention
from paceline.scheduler.local.jobs.devices import LocalDevices, cpu_devices, gpus_of
from paceline.scheduler.local.jobs.rates import MeasuredRates, MeasuredSharing
from paceline.scheduler.local.jobs.records import Attempt, Exit, Stop
from paceline.scheduler.local.jobs.submission import Submission
from paceline.scheduler.local.machine.attempt import AttemptFolder, ProgressReport
from paceline.scheduler.local.machine.running import Running
from paceline.scheduler.local.paths import queue_paths
from paceline.scheduler.local.queue.database import Database, decision_text
from paceline.scheduler.local.queue.replay import replay
from paceline.scheduler.local.queue.setup import PolicyOptions, Setup, make_queue
from paceline.scheduler.local.queue.turns import (
    Began,
    Cancel,
    DevicesSeen,
    Exited,
    Progress,
    Submit,
    TimerExpired,
    Turn,
)
from paceline.scheduler.placement import NodeDevices, Placement

DEVICES = 2


def setup_of(policy="srtf", devices=DEVICES):
    node = Node(name="local", device_type="cpu", devices=devices)
    found = LocalDevices(cluster=Cluster(nodes=(node,)), cores=tuple(range(devices)))
    return Setup(policy, found, MeasuredRates(learns=True))


def submit(name, devices=1, work=None, **options):
    job = Job(name=name, devices=devices, work=work, **options)
    return Submit(Submission(job=job, command=("true",), folder="/"))


def begin(queue, now_s, *submissions):
    """Submit jobs, and let those that start begin."""
    turn = queue.handle(submissions, now_s)
    queue.handle([Began(attempt.job, attempt.number) for attempt in turn.starts], now_s)
    return turn


@pytest.fixture
def no_processes(monkeypatch):
    """Let a daemon start no process: a test says what becomes of its attempts."""
    monkeypatch.setattr(Running, "start", lambda *_: iter(()))


class TestAttempts:
    def test_a_job_starts_when_its_devices_are_free(self):
        queue = make_queue(setup_of())
        turn = queue.handle([submit("a", 2)], 1.0)
        assert [(start.job, start.number) for start in turn.starts] == [("a", 1)]
        assert turn.starts[0].placement.devices == 2

    def test_devices_are_given_away_only_when_the_process_that_held_them_has_ended(self):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("long", 2, work=1000))
        turn = queue.handle([submit("short", 1, work=1)], 2.0)
        assert [(stop.job, stop.stop) for stop in turn.stops] == [("long", Stop.PREEMPT)]
        assert turn.starts == []
        assert "gets local[0] when long left" in queue.why("short", 2.0)
        turn = queue.handle([Exited("long", 1, Exit(code=75))], 3.0)
        assert [start.job for start in turn.starts] == ["short"]
        assert queue.entries["long"].status == "waiting"

    def test_a_job_that_is_done_although_it_was_asked_to_stop_is_done(self):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("long", 2, work=1000))
        queue.handle([submit("short", 2, work=1)], 2.0)
        queue.handle([Exited("long", 1, Exit(code=0))], 3.0)
        assert queue.entries["long"].status == "done"
        turn = queue.handle([Exited("short", 1, Exit(code=0))], 4.0)
        assert turn.starts == []

    @pytest.mark.parametrize("code", [-9, -10, 1, 130, None])
    def test_whatever_a_stopped_job_ends_with_it_waits_again(self, code):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("long", 2, work=1000))
        queue.handle([submit("short", 2, work=1)], 2.0)
        queue.handle([Exited("long", 1, Exit(code=code))], 3.0)
        assert queue.state.job("long").job.preemptible is (code != -10)
        turn = queue.handle([Exited("short", 1, Exit(code=0))], 4.0)
        assert [(start.job, start.number) for start in turn.starts] == [("long", 2)]

    @pytest.mark.parametrize("ended", [Exit(code=-10), Exit(code=138), Exit(code=-9, killed=True)])
    @pytest.mark.parametrize("policy", ["srtf", "paceline", "las"])
    def test_what_its_preemption_kills_is_not_preempted_again(self, policy, ended):
        """Five jobs of a second each killed one of 100 s."""
        queue = make_queue(setup_of(policy))
        begin(queue, 1.0, submit("long", 2, work=1000))
        queue.entries["long"].wanted = None
        queue.handle([], 2.0)  # whatever the policy: it is asked to stop
        queue.handle([submit("short", 2, work=1), Exited("long", 1, ended)], 3.0)
        job = queue.state.job("long")
        assert (job.job.preemptible, job.work_done) == (False, 0.0)
        at_s = 4.0
        while queue.entries["long"].attempt is None:  # others first, if they were there first
            running = next(entry for entry in queue.active if entry.attempt)
            queue.handle([Exited(running.name, running.starts, Exit(code=0))], at_s)
            at_s += 1.0
        queue.handle([Began("long", 2)], at_s)
        turn = queue.handle([submit("later", 1, work=1)], at_s + 200.0)
        assert turn.stops == []
        assert "It is not preempted again: asked to stop, it did" in queue.why("long", at_s)

    def test_a_signal_waits_until_the_process_can_hear_it(self):
        queue = make_queue(setup_of())
        queue.handle([submit("long", 2, work=1000)], 1.0)
        queue.handle([submit("short", 2, work=1)], 2.0)
        turn = queue.handle([Began("long", 1)], 3.0)
        assert [stop.job for stop in turn.stops] == ["long"]

    def test_a_cancelled_job_holds_its_devices_until_it_has_ended(self):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("a", 2))
        queue.handle([submit("b", 2)], 2.0)
        turn = queue.handle([Cancel("a")], 3.0)
        assert [stop.stop for stop in turn.stops] == [Stop.CANCEL]
        assert turn.starts == []
        turn = queue.handle([Exited("a", 1, Exit(code=143))], 4.0)
        assert [start.job for start in turn.starts] == ["b"]
        assert queue.entries["a"].status == "cancelled"

    def test_news_of_an_attempt_that_is_over_change_nothing(self):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("a"))
        queue.handle([Exited("a", 1, Exit(code=75))], 2.0)
        before = queue.state.inputs
        queue.handle([Exited("a", 1, Exit(code=0)), Progress("a", 1, 5.0, None)], 3.0)
        assert queue.entries["a"].attempt.number == 2
        assert queue.state.inputs == before

    def test_a_job_that_always_asks_to_be_started_again_fails_in_the_end(self):
        queue = make_queue(setup_of())
        begin(queue, 0.0, submit("a"))
        for number in range(1, 1000):
            if queue.entries["a"].ended:
                break
            queue.handle([Exited("a", number, Exit(code=75))], float(number))
        assert queue.entries["a"].status == "failed"
        assert "101 times" in queue.entries["a"].reason

    def test_progress_of_a_job_reaches_the_policy(self):
        queue = make_queue(setup_of())
        begin(queue, 0.0, submit("a", work=100))
        queue.handle([Progress("a", 1, 60.0, 2.0)], 1.0)
        assert queue.state.running["a"].work_done == 60.0
        assert queue.state.running["a"].rate == 2.0


class TestFailedStarts:
    NO_SPACE = Exit(code=127, error="no space left on device", passing=True)

    def test_a_start_that_may_succeed_later_is_tried_again_and_others_go_first(self):
        queue = make_queue(setup_of("fifo"))
        first = queue.handle([submit("a", 2), submit("b", 2)], 0.0)
        assert [start.job for start in first.starts] == ["a"]
        turn = queue.handle([Exited("a", 1, self.NO_SPACE)], 1.0)
        assert [start.job for start in turn.starts] == ["b"]
        assert queue.why("a", 1.25) == (
            "It is tried again in 1 s: start 1 failed: no space left on device."
        )
        assert queue.wake_s() == 2.0
        queue.handle([TimerExpired()], 2.0)
        assert "2 devices" in queue.why("a", 2.0)
        assert "no space left on device" in queue.why("a", 2.0)
        turn = queue.handle([Exited("b", 1, Exit(code=0))], 3.0)
        assert [(start.job, start.number) for start in turn.starts] == [("a", 2)]

    def test_tries_come_at_growing_intervals_and_end_with_a_failure_that_counts_them(self):
        queue = make_queue(setup_of())
        queue.handle([submit("a")], 0.0)
        waits_s = []
        while not queue.entries["a"].ended:
            now_s = queue.now_s
            queue.handle([Exited("a", queue.entries["a"].starts, self.NO_SPACE)], now_s)
            if not queue.entries["a"].ended:
                waits_s.append(queue.wake_s() - now_s)
                queue.handle([TimerExpired()], queue.wake_s())
        assert waits_s == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
        entry = queue.entries["a"]
        assert entry.status == "failed"
        assert entry.reason == "it could not be started 12 times: no space left on device"

    def test_only_failures_in_a_row_count(self):
        queue = make_queue(setup_of())
        queue.handle([submit("a")], 0.0)
        for _ in range(30):
            queue.handle([Exited("a", queue.entries["a"].starts, self.NO_SPACE)], queue.now_s)
            queue.handle([TimerExpired()], queue.wake_s())
            queue.handle([Exited("a", queue.entries["a"].starts, Exit(code=75))], queue.now_s)
        assert queue.entries["a"].status == "starting"

    def test_a_job_that_waits_to_be_tried_again_can_be_cancelled(self):
        queue = make_queue(setup_of())
        queue.handle([submit("a")], 0.0)
        queue.handle([Exited("a", 1, self.NO_SPACE)], 0.0)
        queue.handle([Cancel("a")], 0.5)
        assert queue.entries["a"].status == "cancelled"
        assert queue.wake_s() is None

    def test_the_next_daemon_tries_again_at_the_same_time(self, tmp_path):
        setup = setup_of()
        queue = make_queue(setup)
        database = Database(tmp_path / "queue.db", first_s=0.0)
        segment = database.begin_segment(setup, queue.begin_anew(0.0), queue.entries)
        for given in (submit("a"), Exited("a", 1, self.NO_SPACE)):
            database.commit(segment.number, queue.handle([given], 1.0), queue.entries)
        again = make_queue(setup)
        again.entries = database.entries()
        for instant in database.instants(segment.number):
            again.repeat(instant.events)
        assert again.wake_s() == queue.wake_s() == 2.0
        assert again.handle([TimerExpired()], 2.0).starts == [
            Attempt(job="a", number=2, placement=again.entries["a"].wanted)
        ]
        database.close()


class TestReports:
    @pytest.mark.parametrize(
        "garbage",
        [
            '{"rate": 3}',
            "[" * 4000,
            '{"work_done": 1' + 400 * "0" + "}",
            '{"work_done": null}',
            "[1]",
            "\udcff",
        ],
    )
    def test_a_line_that_is_not_a_report_does_not_count(self, tmp_path, garbage):
        folder = AttemptFolder(tmp_path)
        text = f"{garbage}\n".encode(errors="surrogateescape")
        folder.progress.write_bytes(text)
        assert folder.read_progress() is None
        folder.progress.write_bytes(b'{"work_done": 2}\n' + text)
        report = folder.read_progress()
        assert report is None or report.work_done == 2  # None: the garbage fills what is read


class TestReportedRates:
    @pytest.mark.parametrize(
        ("before", "now", "rate"),
        [
            (None, ProgressReport(10.0, None, 5.0), None),
            (None, ProgressReport(10.0, 3.0, 5.0), 3.0),
            (ProgressReport(4.0, None, 3.0), ProgressReport(10.0, None, 5.0), 3.0),
            (ProgressReport(4.0, None, 3.0), ProgressReport(10.0, 2.0, 5.0), 2.0),
            (ProgressReport(4.0, None, 5.0), ProgressReport(10.0, None, 5.0), None),
            (ProgressReport(10.0, None, 3.0), ProgressReport(10.0, None, 5.0), None),
        ],
    )
    def test_it_is_what_the_job_said_or_what_it_did_since_the_report_before(
        self, before, now, rate
    ):
        assert now.rate_since(before) == rate

    def test_the_log_keeps_few_reports_of_a_long_job_and_the_queue_the_last(self):
        queue = make_queue(setup_of())
        begin(queue, 0.0, submit("a", work=1e6))
        logged = 0
        for step in range(1, 10_000):
            turn = queue.handle([Progress("a", 1, float(step), 0.5)], step * 2.0)
            logged += len(turn.events)
            assert queue.entries["a"].work_done == step
        assert logged < 700


class TestRebuilding:
    def test_a_stored_queue_decides_as_the_one_that_was_killed(self, tmp_path):
        setup = setup_of()
        queue = make_queue(setup)
        database = Database(tmp_path / "queue.db", first_s=0.0)
        segment = database.begin_segment(setup, queue.begin_anew(0.0), queue.entries)

        def handle(queue, inputs, now_s):
            turn = queue.handle(inputs, now_s)
            database.commit(segment.number, turn, queue.entries)
            return turn

        handle(queue, [submit("long", 2, work=1000), submit("other", 1, work=2000)], 1.0)
        handle(queue, [Began("long", 1)], 1.5)
        handle(queue, [Progress("long", 1, 3.0, 1.0)], 2.0)
        handle(queue, [submit("short", 1, work=1)], 3.0)

        again = make_queue(setup)
        again.entries = database.entries()
        for instant in database.instants(segment.number):
            decisions = again.repeat(instant.events)
            assert [decision_text(decision) for decision in decisions] == instant.decisions
        assert again.state.inputs == queue.state.inputs
        for name, entry in queue.entries.items():
            assert again.entries[name] == entry
        ended = [Exited("long", 1, Exit(code=75))]
        assert again.handle(ended, 4.0).starts == queue.handle(ended, 4.0).starts
        database.close()

    @pytest.mark.parametrize("code", [-10, -15, 0, 1, 75, None])
    @pytest.mark.parametrize("given", [Cancel("long"), submit("short", 2, work=1)])
    def test_a_stored_stop_means_the_same_to_the_next_daemon(self, tmp_path, given, code):
        setup = setup_of()
        queue = make_queue(setup)
        database = Database(tmp_path / "queue.db", first_s=0.0)
        segment = database.begin_segment(setup, queue.begin_anew(0.0), queue.entries)
        for inputs in ([submit("long", 2, work=1000)], [Began("long", 1)], [given]):
            turn = queue.handle(inputs, queue.now_s + 1.0)
            database.commit(segment.number, turn, queue.entries)
        assert queue.entries["long"].status == "stopping"

        again = make_queue(setup)
        again.entries = database.entries()
        for instant in database.instants(segment.number):
            again.repeat(instant.events)
        ended = [Exited("long", 1, Exit(code=code))]
        assert again.handle(ended, 9.0).events == queue.handle(ended, 9.0).events
        assert again.entries == queue.entries
        database.close()

    def test_a_turn_is_stored_in_full_or_not_at_all(self, tmp_path):
        setup = setup_of()
        queue = make_queue(setup)
        database = Database(tmp_path / "queue.db", first_s=0.0)
        segment = database.begin_segment(setup, queue.begin_anew(0.0), queue.entries)
        turn = queue.handle([submit("a")], 1.0)
        turn.changed["nobody"] = None  # fails when the events are written already
        with pytest.raises(KeyError):
            database.commit(segment.number, turn, queue.entries)
        assert list(database.instants(segment.number)) == []
        assert database.entries() == {}
        database.close()

    def test_on_other_devices_all_jobs_are_submitted_anew_and_running_ones_are_stopped(self):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("a", 2, work=10))
        fewer = make_queue(setup_of(devices=1))
        fewer.entries = queue.entries
        turn = fewer.begin_anew(2.0, same_devices=False)
        assert [stop.job for stop in turn.stops] == ["a"]
        fewer.handle([Exited("a", 1, Exit(code=75))], 3.0)
        assert fewer.entries["a"].status == "waiting"
        assert "needs 2 devices" in fewer.why("a", 3.0)
        more = make_queue(setup_of())
        more.entries = fewer.entries
        assert [(start.job, start.number) for start in more.begin_anew(4.0).starts] == [("a", 2)]

    def test_under_another_policy_a_job_that_keeps_its_devices_goes_on(self):
        queue = make_queue(setup_of("fifo"))
        begin(queue, 1.0, submit("a", 2, work=10))
        other = make_queue(setup_of("srtf"))
        other.entries = queue.entries
        turn = other.begin_anew(2.0)
        assert (turn.stops, turn.starts) == ([], [])
        turn = other.handle([submit("b", 1, work=1)], 3.0)
        assert [stop.job for stop in turn.stops] == ["a"]

    def test_on_other_devices_no_job_goes_on_although_its_indices_exist(self):
        queue = make_queue(setup_of())
        begin(queue, 1.0, submit("a", 2, work=10))
        other = make_queue(setup_of())
        other.entries = queue.entries
        turn = other.begin_anew(2.0, same_devices=False)
        assert [stop.job for stop in turn.stops] == ["a"]
        turn = other.handle([Exited("a", 1, Exit(code=75))], 3.0)
        assert [start.number for start in turn.starts] == [2]


class TestShortening:
    def daemon(self, tmp_path, clock, events=20, jobs=3):
        retention = Retention(events, jobs)
        paths = queue_paths(tmp_path, {})
        return Daemon(paths, setup_of("fifo"), clock, lambda _: None, retention=retention)

    def run_jobs(self, daemon, clock, names):
        for name in names:
            clock.advance(1)
            daemon.take([submit(name)])
            attempt = daemon.queue.entries[name].attempt
            clock.advance(1)
            daemon.take([Began(name, attempt.number)])
            clock.advance(1)
            daemon.take([Exited(name, attempt.number, Exit(code=0))])

    @pytest.mark.usefixtures("no_processes")
    def test_old_events_and_jobs_are_forgotten_and_what_is_kept_is_replayed(self, tmp_path):
        clock = ManualClock()
        daemon = self.daemon(tmp_path, clock)
        self.run_jobs(daemon, clock, [f"job-{number}" for number in range(40)])
        counts = [daemon.database.event_count(s.number) for s in daemon.database.segments()]
        assert 5 <= sum(counts) <= 20 + 5
        assert 3 <= len(daemon.database.entries()) <= 3 + 3
        assert daemon.database.entries().keys() == daemon.queue.entries.keys()
        lines = [json.loads(line) for line in daemon.paths.ended.read_text().splitlines()]
        forgotten = [line["name"] for line in lines]
        assert [*forgotten, *daemon.queue.entries] == [f"job-{number}" for number in range(40)]
        assert {line["status"] for line in lines} == {"done"}
        daemon.close()
        assert replay(daemon.paths.database).difference is None

    @pytest.mark.usefixtures("no_processes")
    def test_jobs_that_run_and_wait_go_on_and_the_next_daemon_finds_them_as_they_are(
        self, tmp_path
    ):
        clock = ManualClock()
        daemon = self.daemon(tmp_path, clock)
        daemon.take([submit("long", work=100.0)])
        daemon.take([Began("long", 1)])
        daemon.take([submit("wide", 2)])
        first = daemon.database.segments()[-1].number
        for step in range(1, 40):
            clock.advance(100)
            daemon.take([Progress("long", 1, float(step), 0.01)])
        assert daemon.database.segments()[-1].number > first + 3
        assert daemon.queue.entries["long"].starts == 1
        state = daemon.queue.state
        assert (state.running["long"].work_done, state.running["long"].rate) == (39.0, 0.01)
        assert state.running["long"].starts == 1
        assert list(state.waiting) == ["wide"]
        daemon.close()
        again = self.daemon(tmp_path, clock)
        assert again.queue.entries == daemon.queue.entries
        assert again.queue.state.inputs == state.inputs
        again.close()


class TestLostDevices:
    def see(self, queue, *present, reason="it fell off the bus"):
        return queue.handle([DevicesSeen(frozenset(present), reason)], queue.now_s + 1)

    def test_a_job_of_a_lost_device_is_stopped_and_waits_and_others_go_on(self):
        queue = make_queue(setup_of("fifo"))
        begin(queue, 1.0, submit("a"), submit("b"))
        turn = self.see(queue, 0)
        assert [(stop.job, stop.stop) for stop in turn.stops] == [("b", Stop.PREEMPT)]
        queue.handle([Exited("b", 1, Exit(code=-6))], 3.0)
        assert queue.entries["b"].status == "waiting"
        why = queue.why("b", 3.0)
        assert "core 1 lost: it fell off the bus" in why
        assert queue.entries["a"].status == "running"
        turn = self.see(queue, 0, 1)
        assert [(start.job, start.number) for start in turn.starts] == [("b", 2)]

    def test_why_counts_the_lost_devices(self):
        queue = make_queue(setup_of("fifo"))
        self.see(queue, 0)
        queue.handle([submit("wide", 2)], 2.0)
        assert queue.entries["wide"].status == "waiting"
        assert "It needs 2 devices of one type; 1 device lost, 1 cpu left." in queue.why(
            "wide", 2.0
        )

    def test_a_job_that_waits_for_a_device_to_be_left_does_not_get_a_lost_one(self):
        queue = make_queue(setup_of("srtf"))
        begin(queue, 1.0, submit("long", 2, work=1000))
        queue.handle([submit("short", 1, work=1)], 2.0)
        assert queue.entries["short"].wanted is not None
        self.see(queue)
        turn = queue.handle([Exited("long", 1, Exit(code=75))], 4.0)
        assert turn.starts == []

    def test_what_was_seen_before_changes_nothing(self):
        queue = make_queue(setup_of())
        self.see(queue, 0)
        before = queue.state.inputs
        assert self.see(queue, 0).events == []
        assert queue.state.inputs == before

    def test_the_next_daemon_knows_which_devices_are_lost(self, tmp_path):
        setup = setup_of()
        queue = make_queue(setup)
        database = Database(tmp_path / "queue.db", first_s=0.0)
        segment = database.begin_segment(setup, queue.begin_anew(0.0), queue.entries)
        for given in (submit("a", 2), DevicesSeen(frozenset({1}), "gone"), submit("b")):
            turn = queue.handle([given], queue.now_s + 1)
            database.commit(segment.number, turn, queue.entries)
        again = make_queue(setup)
        again.entries = database.entries()
        for instant in database.instants(segment.number):
            decisions = again.repeat(instant.events)
            assert [decision_text(decision) for decision in decisions] == instant.decisions
        assert again.entries == queue.entries
        assert again.state.inventory.lost_bits == [0b01]
        database.close()


class TestClock:
    @pytest.mark.usefixtures("no_processes")
    def test_a_wall_clock_before_the_queues_first_moment_does_not_take_it_back(self, tmp_path):
        paths = queue_paths(tmp_path, {})
        times_s = []
        for wall_s, policy in [(2e9, "fifo"), (1e9, "srtf"), (2e9 + 500, "fifo")]:
            clock = ManualClock(wall=wall_s)
            daemon = Daemon(paths, setup_of(policy), clock, lambda _: None)
            clock.advance(10)
            job = submit(f"of-{policy}-{len(times_s)}", DEVICES)
            daemon.take([job])
            times_s.append(daemon.queue.now_s)
            daemon.close()
        assert times_s == [10.0, 20.0, 510.0]
        assert replay(paths.database).difference is None


class TestDevices:
    def test_slots_are_bound_to_allowed_cores(self):
        devices = cpu_devices(3)
        placement = Placement(parts=(NodeDevices(node="local", devices=(0, 2)),))
        assert set(devices.cores_of(placement)) == {devices.cores[0], devices.cores[2]}
        assert devices.environment(placement, {}) == {}
        with pytest.raises(ConfigError):
            cpu_devices(0)

    LISTED = "GPU-a, NVIDIA H200, 143771\nGPU-b, NVIDIA H200, 143771\n"

    def test_a_job_sees_its_gpus_only(self):
        devices = gpus_of(self.LISTED)
        assert devices.cluster.device_counts() == {"h200": 2}
        placement = Placement(parts=(NodeDevices(node="local", devices=(1,)),))
        assert devices.environment(placement, {}) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
        assert gpus_of(self.LISTED, "1").gpus == ("GPU-b",)

    def test_a_share_of_a_gpu_limits_processors_and_memory(self):
        placement = Placement(parts=(NodeDevices(node="local", devices=(0,)),), share=0.5)
        own = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        variables = gpus_of(self.LISTED).environment(placement, own)
        assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=71885M"
        assert variables["PYTORCH_CUDA_ALLOC_CONF"] == (
            "expandable_segments:True,per_process_memory_fraction:0.5"
        )


class TestPaths:
    def test_a_socket_whose_path_the_system_would_cut_is_refused(self, tmp_path):
        with pytest.raises(UsageError, match="107"):
            queue_paths(tmp_path / ("x" * 120), {})

    def test_the_users_own_queue_follows_the_xdg_folders(self, tmp_path):
        environ = {"XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/1"}
        paths = queue_paths(None, environ)
        assert paths.database == tmp_path / "paceline" / "queue" / "queue.db"
        assert str(paths.socket) == "/run/user/1/paceline-queue.sock"


class TestSetup:
    def test_a_tenant_gets_no_more_than_its_quota(self):
        options = PolicyOptions(quotas={"ann": 1})
        queue = make_queue(setup_of("paceline")._replace(options=options))
        queue.handle([submit(name, work=10, tenant="ann") for name in "ab"], 0.0)
        assert [attempt.job for attempt in queue.live()] == ["a"]
        assert "the 1 device of its quota" in queue.why("b", 0.0)

    def test_a_job_that_its_quota_can_never_let_in_is_refused_at_submission(self):
        options = PolicyOptions(quotas={"ann": 1}, round_s=10.0)
        queue = make_queue(setup_of("paceline")._replace(options=options))
        assert "the quota of ann is 1" in queue.refusal(submit("a", 2, tenant="ann").submission)
        assert queue.refusal(submit("a", 2, tenant="bob").submission) == ""

    def test_options_that_a_policy_does_not_have_are_refused(self):
        with pytest.raises(UsageError, match="fifo has no quotas"):
            make_queue(setup_of("fifo")._replace(options=PolicyOptions(quotas={"ann": 1})))
        with pytest.raises(UsageError, match="can choose its objective"):
            make_queue(setup_of("fifo")._replace(options=PolicyOptions(objective="jct")))

    def test_a_log_of_format_1_is_replayed_and_carried_on(self, root, tmp_path):
        paths = queue_paths(tmp_path, {})
        sqlite3.connect(paths.database).executescript(
            (root / "tests" / "golden" / "queue-1.sql").read_text()
        )
        before = replay(paths.database)
        assert (before.events, before.difference) == (9, None)
        daemon = Daemon(paths, setup_of(), ManualClock(wall=1.7e9 + 100), lambda _: None)
        assert daemon.queue.why("long", 100.0).startswith("It is stopping on local[0-1]")
        assert [entry.name for entry in daemon.queue.active] == ["long", "short"]
        daemon.close()
        after = replay(paths.database)
        assert (after.segments, after.difference) == (2, None)


class TestLearning:
    """Two jobs share a device by an estimate; their reports say otherwise."""

    SHARING = MeasuredSharing(used={"small": (0.3,)}, most=2)

    def sharing_queue(self):
        measured = MeasuredRates(
            alone={"small": {"": {"1": 10.0}}}, sharing=self.SHARING, learns=True
        )
        setup = setup_of("paceline", devices=1)._replace(rates=measured)
        queue = make_queue(setup)
        events = begin(queue, 0.0, *(submit(n, work=1e5, profile="small") for n in "ab")).events
        assert len(queue.live()) == 2
        return setup, queue, [events]

    def report(self, queue, log, rate, times):
        for _ in range(times):
            now_s = queue.now_s + 60.0
            work = now_s * rate
            reports = [Progress(a.job, a.number, work, rate) for a in queue.live() if not a.stop]
            log.append(queue.handle(reports, now_s))
        return [stop.job for turn in log if isinstance(turn, Turn) for stop in turn.stops]

    def test_a_group_of_which_reports_say_that_it_does_not_pay_is_parted_and_not_formed_again(self):
        _, queue, log = self.sharing_queue()
        (parted,) = self.report(queue, log, 3.0, 4)
        turn = queue.handle([Exited(parted, 1, Exit(code=75))], queue.now_s + 1)
        assert turn.starts == []
        assert queue.entries[parted].status == "waiting"

    def test_a_group_that_pays_stays(self):
        _, queue, log = self.sharing_queue()
        assert self.report(queue, log, 9.0, 10) == []

    def test_a_report_of_an_interval_in_which_a_neighbour_came_teaches_nothing(self):
        _, queue, _ = self.sharing_queue()
        queue.handle([Exited("b", 1, Exit(code=1))], 1.0)
        queue.handle([submit("c", work=1e5, profile="small")], 2.0)
        assert queue.entries["c"].status == "starting"
        turn = queue.handle([Progress("a", 1, 20.0, 10.0)], 70.0)  # c does not run yet
        assert [event.rate for event in turn.events] == [None]
        queue.handle([Began("c", 1)], 71.0)
        rates = []
        for now_s in (140.0, 210.0):
            turn = queue.handle([Progress("a", 1, now_s, 9.0)], now_s)
            rates += [event.rate for event in turn.events]
        assert rates == [None, 9.0]

    def test_what_was_learned_comes_with_the_events_and_goes_to_the_next_log(self):
        setup, queue, log = self.sharing_queue()
        self.report(queue, log, 3.0, 4)
        rates = queue.learned_rates(setup.rates)
        assert [group.group for group in rates.learned.slow] == [("small", "small")]
        assert MeasuredRates.from_json(rates.to_json()) == rates
        after = make_queue(setup.after(rates))
        after.handle([submit(name, work=1e5, profile="small") for name in "de"], 0.0)
        assert len(after.live()) == 1

    def test_rates_that_come_with_a_submission_count_for_its_class(self):
        queue = make_queue(setup_of("paceline"))
        # A second device adds nothing to this job, so that another one gets it.
        given = Submission(
            job=Job(name="a", max_devices=2, work=100, profile="flat"),
            command=("true",),
            folder="/",
            rates={"": {"1": 10.0, "2": 10.5}},
        )
        turn = queue.handle([Submit(given), submit("b", work=100)], 0.0)
        assert [type(event) for event in turn.events] == [Rated, Submitted, Submitted]
        assert sorted(attempt.placement.devices for attempt in queue.live()) == [1, 1]
        assert queue.state.running["a"].rate == 10.0
        carried = queue.learned_rates(MeasuredRates(learns=True))
        assert carried.given == {"flat": given.rates}


class TestMeasuredSharing:
    @pytest.mark.parametrize(("kept", "shares"), [(0.9, True), (0.5, False)])
    def test_a_measured_pair_decides_and_not_what_both_use(self, kept, shares):
        used = {"a": (1.0,) if shares else (0.1,)}  # by itself it would say the opposite
        sharing = MeasuredSharing(used=used, pairs={"a": {"a": kept}}, most=2)
        setup = setup_of("paceline", devices=1)
        queue = make_queue(setup._replace(rates=MeasuredRates(sharing=sharing)))
        queue.handle([submit(name, work=100, profile="a") for name in ("1", "2")], now_s=0.0)
        assert (len(queue.live()) == 2) is shares

    def test_a_share_above_one_is_refused(self):
        with pytest.raises(ConfigError, match=r"keeps 1\.5 of its rate beside 'b'"):
            MeasuredSharing(pairs={"a": {"b": 1.5}})
