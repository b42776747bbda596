"""Says when a training loop leaves cores free: while it communicates, and in its optimizer.

Works without a recorder. Whoever knows of such a phase calls `PHASES.cores_are_free`: a hook before
each optimizer's step, Paceline's engine when a backward pass has computed all gradients, and for
DistributedDataParallel a hook of `paceline run`. Whoever paces input listens (`PHASES.add`), as
long as it lives; hooks come with the first listener (`PHASES.when_listened`). The phase ends when
the listener's own next batch is taken.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class PhaseListener(Protocol):
    """What is called when a phase begins, from whichever thread notices."""

    def cores_are_free(self) -> None:
        """The loop waits for other ranks, or updates parameters."""


class LoopPhases:
    """Passes the phases of this process's training loop on to listeners."""

    def __init__(self) -> None:
        self._listeners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_listened = False
        self._sources: list[Callable[[], None]] = []

    def add(self, listener: PhaseListener) -> None:
        """Call `listener` from now on, until nothing else refers to it."""
        self._listeners.add(listener)
        self._has_listened = True
        while self._sources:
            self._sources.pop()()

    def when_listened(self, begin: Callable[[], None]) -> None:
        """Call `begin`, which starts to look for such phases, once there is a listener."""
        if self._has_listened:
            begin()
        else:
            self._sources.append(begin)

    def cores_are_free(self) -> None:
        """Pass on that such a phase begins."""
        if self._listeners:
            for listener in list(self._listeners):
                listener.cores_are_free()


PHASES = LoopPhases()


def _follow_optimizers() -> None:
    """Have the step of each optimizer in this process begin such a phase. Imports torch."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    register_optimizer_step_pre_hook(_before_step)


def _before_step(*_: Any) -> None:
    PHASES.cores_are_free()


PHASES.when_listened(_follow_optimizers)
