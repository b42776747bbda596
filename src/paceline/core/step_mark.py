"""The script's own mark of the end of a step: what `paceline.step()` calls.

A recorder sets a listener; without one the call does nothing, so that the line may stay in the
script.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_listener: Callable[[], None] | None = None


def set_listener(listener: Callable[[], None] | None) -> None:
    """Have `step` call `listener`, or nothing again."""
    global _listener  # a process has one recorder
    _listener = listener


def step() -> None:
    """End a step of the training loop here.

    Paceline finds the steps of most loops by itself (docs/guides/steps.md). Where it does not, call
    this once per iteration: from the first call on, nothing else ends a step. Without recording it
    does nothing. It may be called from any thread, and inside functions that torch compiles it has
    no effect.

    >>> step()
    """
    if _listener is not None:
        _listener()
