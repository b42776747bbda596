"""The daemon of a queue: takes requests, asks `decide`, starts and stops jobs. One thread.

    wait for: a request, a process that began or ended, the policy's timer, a report of progress
      -> inputs -> JobQueue.handle -> Database.commit -> start and stop processes -> answer clients

Nothing is carried out, and nobody is answered, before it is stored. So the daemon may be killed at
any moment: the next one finds in the database what was to happen, and in the folders of the live
attempts what did happen, and goes on from there.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import PacelineError, UsageError, storage_errors
from paceline.core.files import LockOutcome, append_lines, try_lock
from paceline.scheduler.local.jobs.records import JobStatus
from paceline.scheduler.local.jobs.submission import TRY_AGAIN
from paceline.scheduler.local.machine.attempt import AttemptFolder
from paceline.scheduler.local.machine.device_watch import CHECK_S, DeviceWatch
from paceline.scheduler.local.machine.orders import order_for
from paceline.scheduler.local.machine.running import Running, Watch
from paceline.scheduler.local.protocol.connections import Connections, Peer
from paceline.scheduler.local.protocol.messages import Reply, Request
from paceline.scheduler.local.protocol.requests import Requests
from paceline.scheduler.local.queue.database import Database
from paceline.scheduler.local.queue.resume import resume
from paceline.scheduler.local.queue.setup import make_queue
from paceline.scheduler.local.queue.turns import Exited, Input, TimerExpired

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from paceline.core.clock import Clock
    from paceline.scheduler.local.jobs.records import Attempt
    from paceline.scheduler.local.machine.attempt import Order
    from paceline.scheduler.local.paths import QueuePaths
    from paceline.scheduler.local.queue.setup import Setup
    from paceline.scheduler.local.queue.turns import DevicesSeen, Turn

PROGRESS_S = 2.0  # how often reports of progress are looked for, and logged at most
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Retention(NamedTuple):
    """How much a queue remembers.

    Attributes:
        events: of the log; a new segment begins after a fifth of them.
        jobs: that have ended; those before them are lines of ``ended.jsonl``.
    """

    events: int = 100_000
    jobs: int = 1000


DEFAULT_RETENTION = Retention()


class _Waiting(NamedTuple):
    """A client that waits for the end of a job."""

    peer: Peer
    name: str
    until_s: float


class Daemon:
    """Serves one queue; see the module."""

    def __init__(
        self,
        paths: QueuePaths,
        setup: Setup,
        clock: Clock,
        say: Callable[[str], None],
        *,
        check_s: float = CHECK_S,
        retention: Retention = DEFAULT_RETENTION,
    ) -> None:
        """Take the queue's lock, and find out where the last daemon left it.

        Args:
            paths: of the queue.
            setup: what it decides by.
            clock: for deadlines, and for the times of events.
            say: gets a line for each thing that happens.
            check_s: between two looks whether the devices are there.
            retention: how much of the past is kept.

        Raises:
            UsageError: another daemon serves the queue, or there is no such policy or option.
            StorageError: its folder cannot be used.
            CorruptData: its database is damaged.
        """
        self.paths = paths
        self.devices = setup.devices
        self.clock = clock
        self.say = say
        self._setup = setup
        self.queue = make_queue(setup)
        self._lock = _take(paths)
        self.database = Database(paths.database, first_s=clock.wall_s())
        # A wall clock may be set at any time: it counts once, and never takes the queue back.
        begin_s = max(clock.wall_s() - self.database.first_s, self.database.last_s())
        self._ahead_s = begin_s - clock.now_s()
        self._selector = selectors.DefaultSelector()
        self._connections = Connections(paths.socket, self._selector)
        self._running = Running(self._selector)
        self._watch = DeviceWatch(setup.devices, self._selector, check_s=check_s)
        self._judged_later: list[tuple[int, Exited]] = []
        self._waiting: list[_Waiting] = []
        self._stop = ""
        self._progress_s = clock.now_s()
        self._retention = retention
        self._requests = Requests(paths, self.database)
        self.queue, self._segment = resume(self.database, setup, self.now_s(), say)
        self._events = self.database.event_count(self._segment.number)

    def run(self, *, once: bool = False) -> bool:
        """Serve until a stop signal; jobs go on then.

        Args:
            once: serve until all jobs have ended, waiting for the first one.

        Returns:
            Whether all jobs ended, and well; also True after a stop signal.
        """
        with self._signals():
            node, policy = self.devices.cluster.nodes[0], self._setup.policy
            what = f"{node.devices} {node.device_type} devices, policy {policy}"
            self.say(f"serving {what}, at {self.paths.socket}")
            self._adopt()
            while not self._stop and not (once and self._all_ended()):
                self._turn()
        self._leave()
        if self._stop:
            self.say(f"stopped by {self._stop}; {len(self.queue.live())} jobs go on")
            return True
        return all(entry.status == JobStatus.DONE for entry in self.queue.entries.values())

    def close(self) -> None:
        """Let the queue go; jobs that run go on."""
        self._running.close()
        self._watch.close()
        self._connections.close()
        self._selector.close()
        self.database.close()
        os.close(self._lock)

    # One turn of the loop.

    def _turn(self) -> None:
        inputs: list[Input] = []
        seen: list[Input] = []
        requests: list[tuple[Peer, Request]] = []
        for key, events in self._selector.select(self._timeout_s()):
            if isinstance(key.data, Watch):
                inputs.extend(self._running.read(key.data, key.fd))
            elif key.data is self._watch:
                seen.extend(self._seen(self._watch.read()))
            elif isinstance(key.data, Peer):
                if events & selectors.EVENT_WRITE:
                    self._connections.send(key.data)
                elif request := self._connections.receive(key.data, self.clock.now_s()):
                    requests.append((key.data, request))
            elif key.data is self._connections:
                self._connections.accept(self.clock.now_s())
            else:  # a signal
                os.read(key.fd, 64)
        now_s = self.clock.now_s()
        inputs = [*seen, *self._to_judge(inputs), *self._seen(self._watch.look(now_s))]
        if now_s >= self._progress_s:
            self._progress_s = now_s + PROGRESS_S
            inputs.extend(self._running.progress())
        wake_s = self.queue.wake_s()
        if wake_s is not None and wake_s <= self.now_s():
            inputs.append(TimerExpired())
        answers = [answer for asked in requests if (answer := self._ask(*asked, inputs))]
        self.take(inputs, answers)
        self._connections.drop_late(self.clock.now_s())

    def _to_judge(self, inputs: list[Input]) -> list[Input]:
        """Return the inputs without failures of jobs that may come from a lost device.

        They are judged when somebody has looked at the devices: a job that lost its device waits
        again, any other one has failed.
        """
        later = [
            given
            for given in inputs
            if isinstance(given, Exited)
            and self._watch.exits_tell
            and given.exit.code not in (0, TRY_AGAIN, None)
            and not given.exit.error
        ]
        if later:
            # A look that has begun before a job ended says nothing of it.
            self._judged_later += [(self._watch.begun + 1, given) for given in later]
            self._watch.hurry()
        return [given for given in inputs if given not in later]

    def _seen(self, seen: DevicesSeen | None) -> list[Input]:
        """Return inputs of a look at the devices, and of the jobs that it was for."""
        if seen is None:
            return []
        ended = [given for begun, given in self._judged_later if begun <= self._watch.begun]
        self._judged_later = [held for held in self._judged_later if held[0] > self._watch.begun]
        return [seen, *ended]

    def _timeout_s(self) -> float:
        """Return seconds after which there is something to do although nothing happens."""
        now_s = self.clock.now_s()
        at_s = [self._watch.wake_s, *(waiting.until_s for waiting in self._waiting)]
        if len(self._running):
            at_s.append(self._progress_s)
        wake_s = self.queue.wake_s()
        if wake_s is not None:
            at_s.append(now_s + wake_s - self.now_s())
        return max(0.0, min(at_s) - now_s)

    def now_s(self) -> float:
        """Return seconds since the queue's first moment; it never goes back."""
        return max(self.queue.now_s, self._ahead_s + self.clock.now_s())

    def take(self, inputs: list[Input], answers: Sequence[Callable[[], None]] = ()) -> None:
        """Pass inputs on, answer clients by what follows, and bound the log."""
        self._handle(inputs)
        for answer in answers:
            answer()
        self._answer_waiting()
        if self._events > self._retention.events // 5:
            self._shorten()

    def _handle(self, inputs: list[Input]) -> None:
        """Pass inputs on, and what follows from them, until nothing is left to do."""
        while inputs:
            turn = self.queue.handle(inputs, self.now_s())
            self.database.commit(self._segment.number, turn, self.queue.entries)
            self._events += len(turn.events)
            inputs = list(self._carry_out(turn))

    def _shorten(self) -> None:
        """Begin a new segment of the log with all jobs as they stand, and forget the oldest."""
        setup = self._setup.after(self.queue.learned_rates(self._segment.setup.rates))
        fresh = make_queue(setup)
        turn = fresh.carry_on(self.queue, self.now_s())
        self.queue = fresh
        self._segment = self.database.begin_segment(setup, turn, fresh.entries)
        self._events = len(turn.events)
        old = fresh.ended_before_last(self._retention.jobs)
        if old:  # first here, then not there: after a crash a line may come twice
            append_lines(
                self.paths.ended,
                [json.dumps(self._requests.view(entry).to_json()) for entry in old],
            )
        self.database.forget([entry.name for entry in old], keep_events=self._retention.events)
        for entry in old:
            del fresh.entries[entry.name]
        self._handle(list(self._carry_out(turn)))

    def _carry_out(self, turn: Turn) -> Iterator[Input]:
        """Start and stop what a stored turn says; yield what went wrong at once."""
        for note in turn.notes:
            self.say(note)
        for attempt in turn.stops:
            self._running.stop(attempt)
        for attempt in turn.starts:
            yield from self._running.start(attempt, *self._files(attempt))

    def _files(self, attempt: Attempt) -> tuple[AttemptFolder, Callable[[], Order]]:
        """Return an attempt's folder, and what makes its order, if it still has to be started.

        An attempt of another daemon may hold devices that are not there any more.
        """
        submission = self.queue.entries[attempt.job].submission
        folder = AttemptFolder(self.paths.attempt(attempt.job, attempt.number))
        return folder, lambda: order_for(submission, attempt, self.devices, self.paths)

    # Requests.

    def _ask(self, peer: Peer, request: Request, inputs: list[Input]) -> Callable[[], None] | None:
        """Add what a request changes to the inputs; return what answers it after that."""
        try:
            answer = self._requests.act_on(request, inputs, self.queue, self.now_s())
        except PacelineError as problem:
            self._connections.refuse(peer, problem, self.clock.now_s())
            return None
        if request.verb == "wait":
            until_s = self.clock.now_s() + request.timeout_s
            self._waiting.append(_Waiting(peer, request.name, until_s))
            return None
        return lambda: self._connections.reply(peer, answer(), self.clock.now_s())

    def _answer_waiting(self) -> None:
        now_s = self.clock.now_s()
        left = []
        for waiting in self._waiting:
            entry = self.queue.entries[waiting.name]
            if entry.ended or now_s >= waiting.until_s:
                self._connections.reply(
                    waiting.peer, Reply(jobs=(self._requests.view(entry),)), now_s
                )
            elif self._connections.alive(waiting.peer):
                left.append(waiting)
        self._waiting = left

    # Begin and end.

    def _adopt(self) -> None:
        """Find out what became of the live attempts, and carry out what was decided for them."""
        inputs: list[Input] = []
        live = self.queue.live()
        for attempt in live:
            inputs.extend(self._running.adopt(attempt, *self._files(attempt)))
        if live:
            self.say(f"found {len(self._running)} of {len(live)} jobs running")
        for attempt in live:
            if attempt.stop:
                self._running.stop(attempt)
        self._handle(self._to_judge(inputs))

    def _all_ended(self) -> bool:
        return bool(self.queue.entries) and not self.queue.active

    def _leave(self) -> None:
        """Answer clients that wait for an answer, within their patience."""
        self._answer_waiting()
        while self._connections.busy:
            for key, _ in self._selector.select(1.0):
                if isinstance(key.data, Peer):
                    self._connections.send(key.data)
            self._connections.drop_late(self.clock.now_s())

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have stop signals end the loop after its turn."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._selector.register(reader, selectors.EVENT_READ, None)

        def stop(number: int, _frame: FrameType | None) -> None:
            self._stop = signal.Signals(number).name

        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handlers = {
            number: signal.signal(number, stop)
            for number in _STOP_SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before)
            self._selector.unregister(reader)
            os.close(reader)
            os.close(writer)


def _take(paths: QueuePaths) -> int:
    """Make the queue's folder and lock it; return the descriptor of the lock.

    Raises:
        UsageError: another daemon has it.
    """
    fix = "Give a --dir on a local file system that you may write to"
    with storage_errors("cannot serve a queue", where=paths.folder, fix=fix):
        paths.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (paths.folder / "jobs").mkdir(exist_ok=True, mode=0o700)
        descriptor = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if try_lock(descriptor) is LockOutcome.HELD:
        os.close(descriptor)
        raise UsageError(
            "another daemon serves this queue",
            where=str(paths.folder),
            fix="Use it: paceline queue ls; or give another --dir",
        )
    return descriptor
