"""Records what limits torch's DataLoader: seconds of its workers by stage, as counters.

The workers add up (`torch_workers`); the loop takes the sums when it takes a batch, 20 times a
second at most, and records by how much they grew. A loader without workers fetches in the loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_hooks import RecordedKind
from paceline.trace.collectors.torch_workers import (
    FetchTimer,
    QueuedClock,
    SharedTimes,
    Sum,
    WorkerLoop,
    files_clock,
)
from paceline.trace.format.events import DATALOADER_COUNTERS, MAIN, Kind

if TYPE_CHECKING:
    import numpy as np

    from paceline.native import Recorder
    from paceline.trace.collectors.hook_registry import HookRegistry

_LEAST_NS = 50_000_000  # between two readings of a loader's sums
_HAND_OVER = "hand_over"


class LoaderRecorder:
    """The side of the torch collector that sees what loaders do; used by the main thread alone.

    A loader is meant by its number, as in events.
    """

    def __init__(self, recorder: Recorder, hooks: HookRegistry) -> None:
        self._recorder = recorder
        self._hooks = hooks
        self._times: SharedTimes | None = None  # until hooks are in place
        self._timer = FetchTimer()
        self._loop: WorkerLoop | None = None
        self._known: dict[int, np.ndarray] = {}
        self._hand_over_ns: dict[int, int] = {}
        self._noted_ns: dict[int, int] = {}
        self._kind = RecordedKind(internals.Capability.WORKER_LOOP.value)
        counted = dict(DATALOADER_COUNTERS)
        if files_clock() is None:
            del counted["files"]
        if not QueuedClock.is_there():
            del counted["queued"]
        self._names = {stage: recorder.intern(name) for stage, name in counted.items()}

    def install(self) -> None:
        """Put the hooks in place."""
        times = SharedTimes.create()
        for owner, attribute, hooked in self._timer.hooks():
            self._hooks.replace(owner, attribute, hooked)
        self._loop = WorkerLoop(internals.worker_loop(), times, self._timer)
        self._hooks.replace(internals.worker_module(), internals.WORKER_LOOP, self._loop)
        self._times = times

    def begins(self, loader: int) -> None:
        """Note that the loop begins to iterate over a loader, which may start workers now."""
        if self._loop is not None:
            self._loop.loader = loader

    def has_begun(self) -> None:
        """Note that the workers have been started."""
        if self._loop is not None:
            self._loop.loader = 0

    def waits(self, loader: int) -> None:
        """Note that the loop asks a loader for a batch: what it fetches now is the loader's."""
        if self._times is not None and self._times.has(loader):
            self._timer.row = self._times.sums[loader, 0]

    def delivered(self, iterator: Any, loader: int, begin_ns: int, end_ns: int) -> None:
        """Note that the loop got a batch, or the end of its data, between two times."""
        self._timer.row = None
        if self._times is not None and self._times.has(loader):
            self._kind.attempt(self._note, iterator, loader, begin_ns, end_ns)

    def close(self) -> None:
        """Record what has been counted since the last batches."""
        for loader in self._known:
            self._kind.attempt(self._record, loader, monotonic_ns())

    def _note(self, iterator: Any, loader: int, begin_ns: int, end_ns: int) -> None:
        assert self._times is not None
        number = internals.delivered_number(iterator)
        if number is not None:
            ready_ns = self._times.ready_ns(loader, number)
            if ready_ns is not None:
                taken_ns = max(0, end_ns - max(begin_ns, ready_ns))
                self._hand_over_ns[loader] = self._hand_over_ns.get(loader, 0) + taken_ns
        if end_ns - self._noted_ns.get(loader, 0) >= _LEAST_NS:
            self._record(loader, end_ns)

    def _record(self, loader: int, now_ns: int) -> None:
        assert self._times is not None
        self._noted_ns[loader] = now_ns
        sums = self._times.sums[loader].sum(axis=0)
        grown = sums - self._known[loader] if loader in self._known else sums
        self._known[loader] = sums
        if not grown[Sum.BATCHES]:
            return  # what was handed over waits for the batches that it is counted with
        for stage, name in self._names.items():
            if stage == _HAND_OVER:
                amount = self._hand_over_ns.pop(loader, 0)
            else:
                amount = int(grown[Sum[stage.upper()]])
            self._recorder.record(int(Kind.COUNTER), MAIN, name, now_ns, now_ns, amount, tag=loader)
