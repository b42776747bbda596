"""What can be switched in a process that trains, without a change of its results but in last bits.

Sizes of gradient buckets cannot: torch fixes them when it wraps the model. The number of loader
workers cannot either: it is fixed when an epoch begins.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing
import os
import resource
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import UsageError
from paceline.core.record import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST_NICE = 19


class TunedSetting(NamedTuple):
    """A setting that can be switched at a step's end, on the thread that trains.

    Attributes:
        words: what it is.
        least: smallest value.
        most: largest value.
        current: returns its value; None if it cannot be read.
        apply: sets it.
    """

    words: str
    least: int
    most: int
    current: Callable[[], int | None]
    apply: Callable[[int], None]


@dataclass(frozen=True, slots=True)
class TuneQuestion:
    """The setting to try, and its two values; the first one is kept unless the second is better."""

    setting: str
    first: int
    second: int

    def __str__(self) -> str:
        return f"{self.setting}={self.first},{self.second}"


def parse_tune(text: str) -> TuneQuestion:
    """Return the question that ``--tune`` asks, for example ``threads=1,2``.

    Raises:
        UsageError: the setting is not known, or its values are not two different ones in its
            limits; or the priority of loader workers could not be raised again.
    """
    name, _, values = text.partition("=")
    settings = tuned_settings()
    if name not in settings:
        raise UsageError(
            f"cannot tune '{name}' in a running job", where="--tune", fix=nearest(name, settings)
        )
    setting = settings[name]
    parts = values.split(",")
    known = all(part.strip().isdecimal() for part in parts)
    numbers = [int(part) for part in parts] if known else []
    inside = all(setting.least <= number <= setting.most for number in numbers)
    if len(set(numbers)) != 2 or len(numbers) != 2 or not inside:
        raise UsageError(
            f"'{values}' are not two values of {name}",
            where="--tune",
            fix=f"Give two different numbers from {setting.least} to {setting.most}: "
            f"--tune {name}={setting.least},{min(setting.most, setting.least + 10)}",
        )
    if name == "loader-nice" and not _may_raise_priority(min(numbers)):
        raise UsageError(
            "this user may lower the priority of processes, but not raise it again",
            where=f"--tune {text}",
            why="the limit of `ulimit -e` is too small",
            fix="Ask the administrator for a larger limit, or tune another setting",
        )
    return TuneQuestion(name, *numbers)


def tuned_settings() -> dict[str, TunedSetting]:
    """Return the settings by name. They are applied to this process; torch must be imported."""
    return {
        "threads": TunedSetting(
            "compute threads of each rank", 1, os.cpu_count() or 1, _threads, _set_threads
        ),
        "loader-nice": TunedSetting(
            "niceness of loader workers", 0, _MOST_NICE, lambda: None, _set_loader_nice
        ),
        "gc-threshold": TunedSetting(
            "allocations until Python collects garbage",
            100,
            10_000_000,
            lambda: gc.get_threshold()[0],
            lambda count: gc.set_threshold(count, *gc.get_threshold()[1:]),
        ),
    }


def _threads() -> int:
    import torch

    return int(torch.get_num_threads())


def _set_threads(count: int) -> None:
    """Set torch's threads by its own function: one around it takes the caller for the script."""
    import torch

    inspect.unwrap(torch.set_num_threads)(count)


def _set_loader_nice(nice: int) -> None:
    """Set the niceness of this rank's loader workers that run now."""
    for child in multiprocessing.active_children():
        if child.pid is not None:
            try:
                os.setpriority(os.PRIO_PROCESS, child.pid, nice)
            except ProcessLookupError:  # it has ended
                continue


def _may_raise_priority(nice: int) -> bool:
    limit = resource.getrlimit(resource.RLIMIT_NICE)[0]
    return os.geteuid() == 0 or limit == resource.RLIM_INFINITY or 20 - limit <= nice
