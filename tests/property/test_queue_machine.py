"""A machine's queue under random events and crashes: devices, attempts, and what was stored."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.cluster import Cluster, Node
from paceline.scheduler.job import Job
from paceline.scheduler.local.jobs.devices import LocalDevices
from paceline.scheduler.local.jobs.rates import MeasuredRates
from paceline.scheduler.local.jobs.records import Exit
from paceline.scheduler.local.jobs.submission import Submission
from paceline.scheduler.local.queue.setup import Setup, make_queue
from paceline.scheduler.local.queue.turns import (
    Began,
    Cancel,
    DevicesSeen,
    Exited,
    Progress,
    Submit,
    TimerExpired,
)

DEVICES = 4
POLICIES = (
    "fifo",
    "srtf",
    "las",
    "marble",
    "optimus",
    "paceline",
)  # without measured sharing all are exclusive

KINDS = ("submit", "begin", "end", "cancel", "report", "crash", "devices", "shorten")
NEVER_BEGAN = Exit(code=None, error="never began", passing=True)
NOT_STARTED = Exit(code=127, error="no space", passing=True)


class World:
    """Processes as they would be, and a daemon that may be killed between storing and doing."""

    def __init__(self, policy):
        node = Node(name="local", device_type="cpu", devices=DEVICES)
        devices = LocalDevices(cluster=Cluster(nodes=(node,)), cores=tuple(range(DEVICES)))
        self.setup = Setup(policy, devices, MeasuredRates(learns=True))
        self.queue = make_queue(self.setup)
        self.log = []  # events of instants
        self.present = frozenset(range(DEVICES))
        self.processes = {}  # (job, number) -> asked to stop
        self.completed = []
        self.now_s = 0.0

    def give(self, *inputs, crash=False):
        """Pass inputs; with `crash` the daemon is killed before it carries anything out."""
        self.now_s += 1.0
        turn = self.queue.handle(inputs, self.now_s)
        if turn.events:
            self.log.append(turn.events)
        self.carry_out(turn, crash=crash)

    def carry_out(self, turn, *, crash):
        if crash:
            self.restart()
            return
        for attempt in turn.stops:
            self.stop(attempt)
        for attempt in turn.starts:
            self.start(attempt)
        self.check()

    def shorten(self, *, crash):
        """Begin a new log with the jobs as they stand."""
        self.now_s += 1.0
        before, self.queue = self.queue, make_queue(self.setup)
        work = {name: job.work_done_at(self.now_s) for name, job in before.state.running.items()}
        turn = self.queue.carry_on(before, self.now_s)
        self.log = [turn.events] if turn.events else []
        for name in work.keys() & self.queue.state.running.keys():
            if self.queue.state.running[name].starts == before.state.running[name].starts:
                assert self.queue.state.running[name].work_done_at(self.now_s) == work[name]
        self.carry_out(turn, crash=crash)

    def start(self, attempt):
        assert (attempt.job, attempt.number) not in self.processes
        self.processes[attempt.job, attempt.number] = False

    def stop(self, attempt):
        if attempt.began:
            self.processes[attempt.job, attempt.number] = True

    def restart(self):
        """Rebuild the queue from what was stored, as the daemon does."""
        stored = copy.deepcopy(self.queue.entries)
        inputs = self.queue.state.inputs
        self.queue = make_queue(self.setup)
        self.queue.entries = stored
        for events in self.log:
            self.queue.repeat(events)
        assert self.queue.state.inputs == inputs
        for attempt in self.queue.live():
            key = attempt.job, attempt.number
            if key not in self.processes:
                assert not attempt.began
                if attempt.stop:  # the daemon claims it, so that it never runs
                    self.processes[key] = False
                    self.end(key, NEVER_BEGAN)
                    continue
                self.start(attempt)
            if attempt.stop:
                self.stop(attempt)
        self.check()

    def end(self, key, ended):
        del self.processes[key]
        if ended.code == 0:
            self.completed.append(key[0])
        self.give(Exited(*key, ended))

    def see(self, present, *, crash=False):
        """Lose devices, or get them back."""
        self.present = frozenset(present)
        self.give(DevicesSeen(self.present, "gone"), crash=crash)

    def wake(self):
        """Let the time pass to the next retry."""
        self.now_s = max(self.now_s, self.queue.wake_s())
        self.give(TimerExpired())

    def run_out(self):
        """Let what is left run to its end; who is asked to stop, saves."""
        self.see(range(DEVICES))
        for _ in range(1000):
            if not self.queue.active:
                return
            if not self.processes:
                self.wake()
                continue
            key, asked = next(iter(self.processes.items()))
            if not asked:
                self.give(Began(*key))
            self.end(key, Exit(code=75 if self.processes.get(key) else 0))

    def check(self):
        live = self.queue.live()
        assert {(attempt.job, attempt.number) for attempt in live} == set(self.processes)
        held = [d for attempt in live for part in attempt.placement.parts for d in part.devices]
        assert len(held) == len(set(held)), "two processes hold one device"
        assert set(held) <= set(range(DEVICES))
        stay = [attempt for attempt in live if not attempt.stop]
        used = {d for attempt in stay for part in attempt.placement.parts for d in part.devices}
        assert used <= self.present, "a job stays on a device that was lost"


@given(data=st.data(), policy=st.sampled_from(POLICIES))
def test_no_device_is_given_twice_and_every_job_ends_whatever_happens(data, policy):
    world = World(policy)
    names = []
    for _ in range(data.draw(st.integers(1, 40), "instants")):
        what = data.draw(st.sampled_from(KINDS))
        crash = data.draw(st.booleans(), "crash")
        running = sorted(world.processes)
        if what == "submit":
            names.append(f"job-{len(names)}")
            work = data.draw(st.none() | st.floats(1.0, 1000.0))
            job = Job(name=names[-1], devices=data.draw(st.integers(1, DEVICES)), work=work)
            submission = Submission(job=job, command=("true",), folder="/")
            world.give(Submit(submission), crash=crash)
        elif what == "cancel" and names:
            world.give(Cancel(data.draw(st.sampled_from(names))), crash=crash)
        elif what == "crash":
            world.restart()
        elif what == "shorten":
            world.shorten(crash=crash)
        elif what == "devices":
            world.see(data.draw(st.sets(st.integers(0, DEVICES - 1))), crash=crash)
        elif running:
            key = data.draw(st.sampled_from(running))
            if what == "begin":
                world.give(Began(*key), crash=crash)
            elif what == "report":
                world.give(Progress(*key, data.draw(st.floats(0.0, 900.0)), None), crash=crash)
            elif what == "end":
                ends = [Exit(code=code) for code in (0, 1, 75, -9)]
                world.end(key, data.draw(st.sampled_from([*ends, NOT_STARTED])))
    world.run_out()
    assert not world.queue.active, "a job waits for ever"
    assert len(world.completed) == len(set(world.completed)), "a job ran twice to its end"
    done = {name for name, entry in world.queue.entries.items() if entry.status == "done"}
    assert done == set(world.completed) - {
        name for name, entry in world.queue.entries.items() if entry.status == "cancelled"
    }
