"""What a user submits, and how it is started: a job for the scheduler, and a command for it."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError
from paceline.core.record import Record, nearest
from paceline.scheduler.job import Job

TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the job saved its state and wants to be started again
_STOP_SIGNALS = ("SIGUSR1", "SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission(Record):
    """A job and its command.

    Attributes:
        job: as the scheduler sees it; an empty name asks for one.
        command: program and arguments.
        folder: working directory.
        environ: all environment variables of the command.
        launcher: Python that starts the command through `paceline run`, one rank on each device;
            empty: the command is started as it is, once.
        stop_signal: that asks the job's processes to save their state and end with `TRY_AGAIN`.
        grace_s: seconds from that signal to SIGKILL.
        rates: of the job's profile, units of work per second by device type (empty: any) and number
            of devices; empty: as they are known to the queue.
        log_bytes: of the log of each start that are kept, its begin and its end; 0: all.
        token: the same for every try of one submission, so that it is accepted once.
    """

    job: Job
    command: tuple[str, ...]
    folder: str
    environ: dict[str, str] = field(default_factory=dict)
    launcher: str = ""
    stop_signal: str = "SIGUSR1"
    grace_s: float = 30.0
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    log_bytes: int = 0
    token: str = ""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("the job has no command", fix="Write it after --")
        if self.stop_signal not in _STOP_SIGNALS:
            raise ConfigError(
                f"'{self.stop_signal}' cannot stop a job",
                fix=nearest(self.stop_signal, _STOP_SIGNALS),
            )
        if not self.grace_s >= 0:
            raise ConfigError(
                f"the grace period must be at least 0 s, got {self.grace_s}", fix="Give seconds"
            )
        if self.log_bytes < 0:
            raise ConfigError(
                f"a log cannot have {self.log_bytes} bytes", fix="Give a size, or 0 for no limit"
            )
        for by_count in self.rates.values():
            for count, rate in by_count.items():
                if not count.isdecimal() or int(count) < 1 or not 0 < rate < float("inf"):
                    raise ConfigError(
                        f"a rate of {rate} on {count} devices cannot be",
                        fix="Give positive rates on one or more devices",
                    )
        name = self.job.name
        if name and not (
            name.replace("-", "").replace("_", "").replace(".", "").isalnum()
            and name[0].isalnum()
            and len(name) <= 100
        ):
            raise ConfigError(
                f"'{name}' cannot be a job's name: it names a folder, too",
                fix="Use up to 100 letters, digits, '.', '-' and '_'; begin with a letter or digit",
            )

    @property
    def signal_number(self) -> signal.Signals:
        """The number of `stop_signal`."""
        return signal.Signals[self.stop_signal]
