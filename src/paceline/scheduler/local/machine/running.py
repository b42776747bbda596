"""The live attempts of a daemon: their supervisors, started by it or by a daemon before it.

A supervisor is watched by a descriptor of its process, which works for processes that are not
children, too, and cannot mean another process that got the same id later.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.processes import running_processes, stat_fields
from paceline.scheduler.local.jobs.records import Attempt, Exit, Stop
from paceline.scheduler.local.machine.attempt import AttemptFolder, Claim, ProgressReport
from paceline.scheduler.local.machine.supervisor import BEGAN, CANCEL, PREEMPT
from paceline.scheduler.local.queue.turns import Began, Exited, Input, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.scheduler.local.machine.attempt import Order

_NEVER_BEGAN = Exit(code=None, error="it was stopped before it began", passing=True)


@dataclass(eq=False, slots=True)
class Watch:
    """A supervisor that is watched.

    Attributes:
        attempt: that it runs.
        folder: of the attempt.
        process: descriptor of its process.
        notify: of its pipe, until it has begun; None if another daemon started it.
        child: if this daemon started it.
        problem: why the supervisor could not begin, if it said so.
        reported: its last report of progress.
    """

    attempt: Attempt
    folder: AttemptFolder
    process: int
    notify: int | None = None
    child: subprocess.Popen[bytes] | None = None
    problem: str = ""
    reported: ProgressReport | None = None


class Running:
    """The live attempts; use it from the daemon's thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._watches: dict[str, Watch] = {}

    def start(
        self, attempt: Attempt, folder: AttemptFolder, order: Callable[[], Order]
    ) -> Iterator[Input]:
        """Start a supervisor; yield the attempt's end if that is impossible now."""
        with contextlib.ExitStack() as undo:
            try:
                reader, writer = os.pipe()
                undo.callback(os.close, reader)
                with os.fdopen(writer, "wb") as pipe:
                    child = _supervisor(folder, order(), pipe.fileno())
                undo.callback(_end, child)
                process = os.pidfd_open(child.pid)
            except OSError as problem:  # no process, no descriptor, no space: perhaps later
                why = problem
            else:
                undo.pop_all()
                self._watch(Watch(attempt, folder, process, reader, child))
                return
        if folder.withdraw():
            yield _not_started(attempt, str(why))
        else:  # it was started by a daemon before this one
            yield from self.adopt(attempt, folder, order)

    def adopt(
        self, attempt: Attempt, folder: AttemptFolder, order: Callable[[], Order]
    ) -> Iterator[Input]:
        """Yield what happened to an attempt of a daemon before this one, and watch it."""
        claim = folder.read_claim()
        if claim is None:
            if attempt.stop and folder.withdraw():
                yield Exited(attempt.job, attempt.number, _NEVER_BEGAN)
            else:  # its supervisor was not started, or is on its way: then one of the two leaves
                yield from self.start(attempt, folder, order)
            return
        if not claim.pid:
            yield Exited(attempt.job, attempt.number, _NEVER_BEGAN)
            return
        yield Began(attempt.job, attempt.number)
        process = claim.open()
        if process is None:
            yield Exited(attempt.job, attempt.number, _exit_of(folder, claim))
        else:
            self._watch(Watch(attempt, folder, process))

    def stop(self, attempt: Attempt) -> None:
        """Have a supervisor end its command; if it has not begun, that waits until it has."""
        watch = self._watches.get(attempt.job)
        if watch is None or watch.notify is not None:
            return
        number = CANCEL if attempt.stop == Stop.CANCEL else PREEMPT
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(watch.process, number)

    def read(self, watch: Watch, descriptor: int) -> Iterator[Input]:
        """Yield what a descriptor of a watch has to say.

        A job may begin and end before anybody looks: both descriptors are ready then, in any order.
        """
        attempt = watch.attempt
        if self._watches.get(attempt.job) is not watch:
            return  # it was read to its end just before
        if watch.notify is not None:  # also when the process has ended: then this does not block
            heard = os.read(watch.notify, select.PIPE_BUF)
            self._close_notify(watch)
            if heard == BEGAN:
                yield Began(attempt.job, attempt.number)
            elif heard:
                watch.problem = heard.decode(errors="replace")
        if descriptor != watch.process:
            return
        self._unwatch(watch)
        if watch.child is not None:
            watch.child.wait()  # it has ended already
        claim = watch.folder.read_claim()
        if claim is None and watch.folder.withdraw():
            yield _not_started(attempt, watch.problem or "it ended before it began")
            return
        if watch.child is not None:
            claim = claim or watch.folder.read_claim()
            if claim is not None and claim.pid not in (0, watch.child.pid):
                # A supervisor that a daemon before this one had started was faster.
                yield Began(attempt.job, attempt.number)
                process = claim.open()
                if process is not None:
                    self._watch(Watch(attempt, watch.folder, process))
                    return
        yield from _news(watch)
        yield Exited(attempt.job, attempt.number, _exit_of(watch.folder, claim))

    def progress(self) -> Iterator[Input]:
        """Yield what jobs reported since the last call."""
        for watch in self._watches.values():
            yield from _news(watch)

    def __len__(self) -> int:
        return len(self._watches)

    def close(self) -> None:
        """Stop watching; the supervisors go on."""
        for watch in list(self._watches.values()):
            self._unwatch(watch)
            if watch.child is not None:
                watch.child.returncode = 0  # it is not ours to wait for any more

    def _watch(self, watch: Watch) -> None:
        self._watches[watch.attempt.job] = watch
        for descriptor in (watch.process, watch.notify):
            if descriptor is not None:
                self._selector.register(descriptor, selectors.EVENT_READ, watch)

    def _unwatch(self, watch: Watch) -> None:
        del self._watches[watch.attempt.job]
        self._close_notify(watch)
        self._selector.unregister(watch.process)
        os.close(watch.process)

    def _close_notify(self, watch: Watch) -> None:
        if watch.notify is not None:
            self._selector.unregister(watch.notify)
            os.close(watch.notify)
            watch.notify = None


def _supervisor(folder: AttemptFolder, order: Order, writer: int) -> subprocess.Popen[bytes]:
    folder.order(order)
    module = "paceline.scheduler.local.machine.supervisor"
    with folder.supervisor.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(folder.path), str(writer)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(writer,),
            start_new_session=True,
        )


def _not_started(attempt: Attempt, why: str) -> Exited:
    """Return the end of an attempt whose supervisor could not do its work: nothing of the job."""
    error = f"its supervisor cannot be started: {why}"
    return Exited(attempt.job, attempt.number, Exit(code=127, error=error, passing=True))


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill a supervisor that cannot be watched; the kernel kills its command."""
    child.kill()
    child.wait()


def _news(watch: Watch) -> Iterator[Progress]:
    """Yield what a job reported since the last look, if it did."""
    report, before = watch.folder.read_progress(), watch.reported
    if report is not None and report != before:
        watch.reported = report
        attempt, rate = watch.attempt, report.rate_since(before)
        yield Progress(attempt.job, attempt.number, report.work_done, rate)


def _exit_of(folder: AttemptFolder, claim: Claim | None) -> Exit:
    """Return how an attempt ended whose supervisor has ended."""
    ended = folder.read_exit()
    if ended is not None:
        return ended
    if claim is not None and claim.is_of_this_boot:
        _kill_session(claim)
    return Exit(code=None, tail=folder.tail())


def _kill_session(claim: Claim) -> None:
    """Kill what is left of a job whose supervisor was killed; its children are its session."""
    for pid in running_processes():
        with contextlib.suppress(OSError):
            fields = stat_fields(pid)
            if int(fields[3]) == claim.pid and int(fields[19]) >= claim.start_ticks:
                os.kill(pid, signal.SIGKILL)
