"""Progress of simulations on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Protocol

import click

from paceline.cli.streams import terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.clock import Clock

_LINE_S = 10.0
_BAR_S = 0.2
_INSTANTS = 64  # of a simulation between two looks at the clock


class _Simulation(Protocol):
    @property
    def jobs_left(self) -> int: ...


@contextlib.contextmanager
def shown_progress(
    policies: list[str], jobs: int, clock: Clock
) -> Iterator[Callable[[int], Callable[[_Simulation], None]]]:
    """Yield a function that returns what to call after each instant of a policy's simulation.

    Args:
        policies: names, in the order in which they run.
        jobs: of one simulation.
        clock: that paces the output.
    """
    if not sys.stderr.isatty():
        yield lambda index: _every(_line_printer(policies, jobs, index, clock))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with Progress(*columns, console=Console(file=terminal()), transient=True) as bar:
        task = bar.add_task("jobs", total=jobs * len(policies))

        def of_policy(index: int) -> Callable[[_Simulation], None]:
            bar.update(task, description=policies[index], completed=index * jobs)
            shown_s = clock.now_s()

            def show(left: int) -> None:
                nonlocal shown_s
                if clock.now_s() - shown_s >= _BAR_S:
                    shown_s = clock.now_s()
                    bar.update(task, completed=(index + 1) * jobs - left)

            return _every(show)

        yield of_policy


def _line_printer(
    policies: list[str], jobs: int, index: int, clock: Clock
) -> Callable[[int], None]:
    begin_s = shown_s = clock.now_s()

    def show(left: int) -> None:
        nonlocal shown_s
        now_s = clock.now_s()
        if now_s - shown_s < _LINE_S:
            return
        shown_s = now_s
        done = jobs - left
        words = f"simulate: {policies[index]}, {done:,} of {jobs:,} jobs done"
        if done:
            words += f", about {(now_s - begin_s) / done * left:.0f} s left"
        if index + 1 < len(policies):
            words += f", then {', '.join(policies[index + 1 :])}"
        click.echo(words, err=True)

    return show


def _every(show: Callable[[int], None]) -> Callable[[_Simulation], None]:
    """Return what shows the jobs left at every so many instants."""
    instants = 0

    def after_instant(simulation: _Simulation) -> None:
        nonlocal instants
        instants += 1
        if instants % _INSTANTS == 0:
            show(simulation.jobs_left)

    return after_instant
