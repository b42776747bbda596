"""The live attempts of a daemon: their supervisors, started by it or by a daemon before it.

A supervisor is watched by a descriptor of its process, which works for processes that are not
children, too, and cannot mean another process that got the same id later.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.scheduler.local.attempt import AttemptFolder, Claim, ProgressReport
from paceline.scheduler.local.records import Attempt, Exit, Stop
from paceline.scheduler.local.supervisor import CANCEL, PREEMPT
from paceline.scheduler.local.turns import Began, Exited, Input, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.scheduler.local.attempt import Order

_NEVER_BEGAN = Exit(code=None, error="it was stopped before it began")


@dataclass(eq=False, slots=True)
class Watch:
    """A supervisor that is watched.

    Attributes:
        attempt: that it runs.
        folder: of the attempt.
        process: descriptor of its process.
        notify: of its pipe, until it has begun; None if another daemon started it.
        child: if this daemon started it.
        reported: its last report of progress.
    """

    attempt: Attempt
    folder: AttemptFolder
    process: int
    notify: int | None = None
    child: subprocess.Popen[bytes] | None = None
    reported: ProgressReport | None = None


class Running:
    """The live attempts; use it from the daemon's thread."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._watches: dict[str, Watch] = {}

    def start(
        self, attempt: Attempt, folder: AttemptFolder, order: Callable[[], Order]
    ) -> Iterator[Input]:
        """Start a supervisor; yield the attempt's end if that is impossible."""
        reader, writer = os.pipe()
        try:
            folder.order(order())
            with (folder.path / "supervisor").open("ab") as output:
                child = subprocess.Popen(
                    [
                        *(sys.executable, "-P", "-m", "paceline.scheduler.local.supervisor"),
                        *(str(folder.path), str(writer)),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writer,),
                    start_new_session=True,
                )
        except OSError as problem:  # no process, no memory, no space: perhaps later
            os.close(reader)
            why = f"its supervisor cannot be started: {problem}"
            yield Exited(attempt.job, attempt.number, Exit(code=127, error=why))
            return
        finally:
            os.close(writer)
        self._watch(Watch(attempt, folder, os.pidfd_open(child.pid), reader, child))

    def adopt(
        self, attempt: Attempt, folder: AttemptFolder, order: Callable[[], Order]
    ) -> Iterator[Input]:
        """Yield what happened to an attempt of a daemon before this one, and watch it."""
        claim = folder.read_claim()
        if claim is None:
            if attempt.stop and folder.claim(Claim(pid=0, start_ticks=0, boot="")):
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
            began = bool(os.read(watch.notify, 1))
            self._close_notify(watch)
            if began:
                yield Began(attempt.job, attempt.number)
        if descriptor != watch.process:
            return
        self._unwatch(watch)
        claim = watch.folder.read_claim()
        if watch.child is not None:
            watch.child.wait()  # it has ended already
            if claim is not None and claim.pid not in (0, watch.child.pid):
                # A supervisor that a daemon before this one had started was faster.
                yield Began(attempt.job, attempt.number)
                process = claim.open()
                if process is not None:
                    self._watch(Watch(attempt, watch.folder, process))
                    return
        report = watch.folder.read_progress()
        if report is not None and report != watch.reported:
            yield Progress(attempt.job, attempt.number, *report)
        yield Exited(attempt.job, attempt.number, _exit_of(watch.folder, claim))

    def progress(self) -> Iterator[Input]:
        """Yield what jobs reported since the last call."""
        for watch in self._watches.values():
            report = watch.folder.read_progress()
            if report is not None and report != watch.reported:
                watch.reported = report
                yield Progress(watch.attempt.job, watch.attempt.number, *report)

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
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == claim.pid and int(fields[19]) >= claim.start_ticks:
                os.kill(int(folder.name), signal.SIGKILL)
