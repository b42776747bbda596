"""The errors that Paceline raises, and the exit code of a command that each error ends.

::

    PacelineError                                exit code
    +-- UsageError (ValueError)                      2   the command or call is impossible
    |   +-- ConfigError                              2
    |   |   +-- NewerFormat                          2   a file of a newer Paceline
    |   +-- CollectiveMismatch                       2   ranks called different collectives
    |   +-- InvalidSchedule                          2   an order that would go wrong
    |   +-- DestinationExists (FileExistsError)      2
    |   +-- NotFound (FileNotFoundError)             2   a path that the user gave
    +-- ScriptFailed (RuntimeError)                  1   the user's script raised
    +-- WorkerFailed (RuntimeError)                  1   a worker process of Paceline
    +-- StorageError (OSError)                       1   disk full, file not readable
    |   +-- DataChanged                              1   data in place were written to
    +-- MemoryExceeded (MemoryError)                 1   more memory is needed than there is
    +-- Missing (ImportError)                        3   a package or tool is missing
    +-- CorruptData (ValueError)                     4
    |   +-- CorruptPack                              4
    |   +-- CorruptTrace                             4
    +-- RankLost (ConnectionError)                   5   a rank was killed
    |   +-- DeadlineExceeded (TimeoutError)          5   a rank or peer did not answer
    +-- Preempted (RuntimeError)                    75   to be started again
    +-- Interrupted (RuntimeError)                 130

Each error holds what failed, where (rank, file, sample), why, and what to do about it.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator


class PacelineError(Exception):
    """What failed, where, why, and what to do: the root of every error raised on purpose."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        text = self.what
        if place := self._unsaid_place():
            text += f" ({place})"
        if self.why:
            text += f": {self.why}"
        if self.fix:
            text += f". {self.fix}"
        return text

    def _unsaid_place(self) -> str:
        """Return where it failed, without a rank or file that the text next to it begins with."""
        first, _, rest = self.where.partition("; ")
        is_said = any(text.startswith(f"{first} ") for text in (self.what, self.why))
        return rest if is_said else self.where

    def to_json(self) -> dict[str, dict[str, str]]:
        """Return the error as every ``--json`` prints it."""
        return {
            "error": {
                "code": type(self).__name__,
                "what": self.what,
                "where": self.where,
                "why": self.why,
                "fix": self.fix,
            }
        }

    @staticmethod
    def from_json(data: dict[str, dict[str, str]]) -> PacelineError:
        """Return the error that `to_json` wrote, as an instance of the same class.

        A class that this module does not define becomes a PacelineError.
        """
        fields = dict(data["error"])
        cls = globals().get(fields.pop("code"), PacelineError)
        if not (isinstance(cls, type) and issubclass(cls, PacelineError)):
            cls = PacelineError
        return cls(fields.pop("what"), **fields)


class UsageError(PacelineError, ValueError):
    """The command or call asks for something impossible."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value is not valid."""


class NewerFormat(ConfigError):
    """A file has a later format version than this Paceline reads."""


class CollectiveMismatch(UsageError):
    """The ranks of a group called different collectives, or with different sizes."""


class InvalidSchedule(UsageError):
    """A schedule of messages or actions does not compute what it is for, or would deadlock."""


class DestinationExists(UsageError, FileExistsError):
    """The destination exists already; nothing was changed."""


class NotFound(UsageError, FileNotFoundError):
    """A path that the user named does not exist."""


class ScriptFailed(PacelineError, RuntimeError):
    """The user's script raised an exception."""


class WorkerFailed(PacelineError, RuntimeError):
    """A process that Paceline started for some work crashed, was killed, or raised."""


class StorageError(PacelineError, OSError):
    """The file system failed: it is full, not readable or not writable."""


class DataChanged(StorageError):
    """Data in place are no longer, or do not stay, what they were when they were indexed."""


class MemoryExceeded(PacelineError, MemoryError):
    """What was asked for does not fit into memory."""


class Missing(PacelineError, ImportError):
    """A package, tool or device that the command needs is missing."""

    exit_code = 3


class CorruptData(PacelineError, ValueError):
    """Stored bytes differ from the bytes that were written, or are not of the format they claim."""

    exit_code = 4


class CorruptPack(CorruptData):
    """A pack's index or sample is damaged."""


class CorruptTrace(CorruptData):
    """A trace file is damaged."""


class RankLost(PacelineError, ConnectionError):
    """A rank was killed."""

    exit_code = 5


class DeadlineExceeded(RankLost, TimeoutError):
    """A rank, task or peer did not answer before its deadline."""


class Preempted(PacelineError, RuntimeError):
    """The ranks saved their state and ended, to be started again (EX_TEMPFAIL)."""

    exit_code = 75


class Interrupted(PacelineError, RuntimeError):
    """Stopped by Ctrl-C or SIGTERM."""

    exit_code = 130


def reason(problem: OSError) -> str:
    """Return the operating system's text for the error."""
    return problem.strerror or str(problem)


def first_line(problem: BaseException) -> str:
    r"""Return the first line of an error's text; of one without a text, its class.

    >>> first_line(RuntimeError("no answer\nC++ frames")), first_line(TimeoutError())
    ('no answer', 'TimeoutError')
    """
    return (str(problem).splitlines() or [type(problem).__name__])[0]


@contextmanager
def storage_errors(what: str, *, where: str | os.PathLike[str], fix: str) -> Iterator[None]:
    """Let an OSError leave the context as a StorageError; Paceline's own errors pass unchanged.

    Args:
        what: the failed action, for example "cannot write the pack".
        where: the file or folder.
        fix: what the user can do about it.
    """
    with os_errors_as(
        lambda problem: StorageError(what, where=str(where), why=reason(problem), fix=fix)
    ):
        yield


@contextmanager
def os_errors_as(make_error: Callable[[OSError], PacelineError]) -> Iterator[None]:
    """Let an OSError leave the context as the error that `make_error` returns for it.

    For messages that depend on the OSError; use `storage_errors` for all others.
    """
    try:
        yield
    except PacelineError:
        raise
    except OSError as problem:
        raise make_error(problem) from problem
