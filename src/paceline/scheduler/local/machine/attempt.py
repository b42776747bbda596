"""The files of an attempt: how its supervisor and the daemon speak, and survive each other.

    JOB/                      kept between the starts of a job; its checkpoints belong here
      1/  2/  ...             a folder for each attempt
        order.json            what the supervisor is to start (daemon)
        claim.json            which process it is: id, start time, boot (supervisor, once)
        exit.json             how the command ended (supervisor, at the end)
        log                   what the command printed
        supervisor            what the supervisor printed: nothing, unless it failed
        progress              what it reported of its progress (the command)

Each file is written once, whole and durable. The claim is a hard link, which fails if there is one
already: a daemon that was killed may have started a supervisor without anybody knowing, and its
successor starts another one; whichever links first runs the command, the other one ends. The daemon
claims an attempt itself when it shall not run any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import StorageError, storage_errors
from paceline.core.files import commit_text, free_middle, sync_folder
from paceline.core.processes import boot_id, started_ticks
from paceline.core.record import Record
from paceline.scheduler.local.jobs.records import Exit

if TYPE_CHECKING:
    from pathlib import Path

_TAIL_BYTES = 4096
_TAIL_LINES = 5
_PROGRESS_BYTES = 4096
_EXIT_BYTES = 16384  # more than the longest path of a program that cannot be started
# What a line of a progress file that is not a report can raise: it is the job's, not ours.
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)
_FIX = "Free space on that file system, or make it writable again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Order(Record):
    """What a supervisor starts.

    Attributes:
        command: program and arguments.
        folder: working directory.
        environ: all environment variables.
        cores: to which all processes are bound; empty: unbound.
        stop_signal: number of the signal by which the command saves its state and ends.
        grace_s: from that signal to SIGKILL.
        log_bytes: of the log that are kept on the disk, its begin and its end; 0: all.
    """

    command: tuple[str, ...]
    folder: str
    environ: dict[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()
    log_bytes: int = 0
    stop_signal: int = int(signal.SIGUSR1)
    grace_s: float = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim(Record):
    """The process that runs an attempt: an id alone may belong to another process by now.

    Attributes:
        pid: of the supervisor; 0: the daemon claimed the attempt, so that it never runs.
        start_ticks: start time of the process, in clock ticks since the boot.
        boot: id of the boot.
    """

    pid: int
    start_ticks: int
    boot: str

    @staticmethod
    def of_this_process() -> Claim:
        """Return the claim of this process."""
        pid = os.getpid()
        return Claim(pid=pid, start_ticks=started_ticks(pid) or 0, boot=boot_id())

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the machine has run since, so that its ids can mean its processes."""
        return bool(self.pid) and self.boot == boot_id()

    def open(self) -> int | None:
        """Return a descriptor of the process, by which it can be waited for and signalled.

        None: it has ended.
        """
        if not self.is_of_this_boot:
            return None
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        # The descriptor holds the process of this moment: only now its start time is a proof.
        if started_ticks(self.pid) == self.start_ticks:
            return descriptor
        os.close(descriptor)
        return None


class ProgressReport(NamedTuple):
    """What a job reported of its progress.

    Attributes:
        work_done: units of work since the job's begin.
        rate: units of work per second; None if it did not say.
        at_s: when it wrote that, seconds since 1970.
    """

    work_done: float
    rate: float | None
    at_s: float = 0.0

    def rate_since(self, before: ProgressReport | None) -> float | None:
        """Return the rate that it said, else that since a report before; None if not known."""
        if self.rate is not None or before is None:
            return self.rate
        passed_s, work = self.at_s - before.at_s, self.work_done - before.work_done
        return work / passed_s if passed_s > 0 and work > 0 else None


class AttemptFolder:
    """The files of one attempt."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = path / "log"
        self.supervisor = path / "supervisor"
        self.progress = path / "progress"
        self._reserved = path / f".exit.{os.getpid()}"

    def order(self, order: Order) -> None:
        """Write what the supervisor is to start."""
        with storage_errors("cannot prepare a job's start", where=self.path, fix=_FIX):
            self.path.mkdir(parents=True, exist_ok=True)
            commit_text(self.path / "order.json", order.to_text())

    def read_order(self) -> Order:
        """Return what the daemon wrote."""
        path = self.path / "order.json"
        return Order.from_text(path.read_text(encoding="utf-8"), where=str(path))

    def claim(self, claim: Claim) -> bool:
        """Claim the attempt; return whether nobody had done so before."""
        path = self.path / f".claim.{os.getpid()}"
        with storage_errors("cannot claim a job's start", where=self.path, fix=_FIX):
            self.path.mkdir(parents=True, exist_ok=True)
            commit_text(path, claim.to_text())
            try:
                os.link(path, self.path / "claim.json")
            except FileExistsError:
                return False
            finally:
                path.unlink()
            sync_folder(self.path)
        return True

    def read_claim(self) -> Claim | None:
        """Return who claimed the attempt, or None."""
        path = self.path / "claim.json"
        try:
            return Claim.from_text(path.read_text(encoding="utf-8"), where=str(path))
        except FileNotFoundError:
            return None

    def withdraw(self) -> bool:
        """See to it that the attempt never runs; return False if it was claimed before.

        A daemon before this one may have started a supervisor that is still on its way.
        """
        try:
            return self.claim(Claim(pid=0, start_ticks=0, boot=""))
        except StorageError:  # a full disk: taking something away needs no space
            (self.path / "order.json").unlink(missing_ok=True)
            return True

    def reserve(self) -> None:
        """Take the space of `finish` before the command runs: then the disk may be full."""
        with self._reserved.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _EXIT_BYTES)

    def release(self) -> None:
        """Give back the space that `reserve` took."""
        self._reserved.unlink(missing_ok=True)

    def finish(self, ended: Exit) -> None:
        """Write how the command ended; `reserve` came before."""
        with self._reserved.open("r+b") as file:
            file.write(ended.to_text().encode(errors="backslashreplace"))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._reserved.replace(self.path / "exit.json")
        sync_folder(self.path)

    def read_exit(self) -> Exit | None:
        """Return how the command ended, with the end of its log; None if it was not written."""
        path = self.path / "exit.json"
        try:
            ended = Exit.from_text(path.read_text(encoding="utf-8"), where=str(path))
        except FileNotFoundError:
            return None
        return replace(ended, tail=self.tail())

    def bound_log(self, most_bytes: int) -> None:
        """Free the middle of the log if it takes more than this; 0: it may take anything."""
        if most_bytes:
            note = f"[the middle of this log was removed: it took more than {most_bytes:,} bytes]"
            free_middle(self.log, most_bytes, note)

    def tail(self) -> str:
        """Return the last lines of the log."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])

    def read_progress(self) -> ProgressReport | None:
        """Return what the job reported last; None if it reported nothing that can be read.

        A job may write at any moment: a line that is not complete yet does not count.
        """
        try:
            with self.progress.open("rb") as file:
                at_s = os.fstat(file.fileno()).st_mtime
                file.seek(max(0, file.seek(0, os.SEEK_END) - _PROGRESS_BYTES))
                lines = file.read(_PROGRESS_BYTES).splitlines(keepends=True)
        except OSError:
            return None
        for line in reversed(lines):
            with contextlib.suppress(*_UNREADABLE):
                return _report(line)._replace(at_s=at_s)
        return None


def _report(line: bytes) -> ProgressReport:
    """Return a line of the progress file, ``{"work_done": 120, "rate": 3.5}``.

    Raises:
        Exception: it is not one; one of `_UNREADABLE`.
    """
    if not line.endswith(b"\n"):
        raise ValueError
    data = json.loads(line)
    work_done, rate = float(data["work_done"]), data.get("rate")
    rate = None if rate is None else float(rate)
    if not 0 <= work_done < float("inf") or (rate is not None and not 0 <= rate < float("inf")):
        raise ValueError
    return ProgressReport(work_done, rate)
