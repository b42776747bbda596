"""Sees the script's own work between phases that has a name, and values that are not a number.

Logging, learning-rate schedules, reading a tensor's value (which waits for a device), garbage
collection. What no hook knows is sampled (`sampler`).
"""

from __future__ import annotations

import gc
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import lr_scheduler

from paceline.native import monotonic_ns
from paceline.trace.collectors.torch_hooks import RecordedKind, around, callback
from paceline.trace.format.events import GARBAGE_COLLECTION, IDLE, MAIN, NAN_READ, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.native import Recorder
    from paceline.trace.collectors.torch_hooks import Loop
    from paceline.trace.collectors.torch_phases import PhaseRecorder

# Shorter reads and collections are not recorded: their events would cost more than they tell.
LEAST_NS = 20_000
NANS_MAX = 100
_HOST = int(Kind.HOST)


class HostRecorder:
    """Records host work; used by the main thread alone."""

    def __init__(self, recorder: Recorder, loop: Loop, phases: PhaseRecorder) -> None:
        self.recorder = recorder
        self.loop = loop
        self.phases = phases
        self.nan_name = recorder.intern(NAN_READ)
        self.nan_count = 0
        self.collection_name = recorder.intern(GARBAGE_COLLECTION)
        self.collection_begin_ns = 0
        self.reads = RecordedKind("reads of a tensor's value, and whether it is a number")
        collections = RecordedKind("garbage collections (they count as other time)")
        self.on_collection = callback(collections, self._on_collection)

    def install(self) -> None:
        """Put the hooks in place."""
        self.phases.wrap(logging.Logger, "handle", Kind.HOST, "logging")
        for scheduler in vars(lr_scheduler).values():
            is_scheduler = isinstance(scheduler, type) and issubclass(
                scheduler, lr_scheduler.LRScheduler
            )
            if is_scheduler and "step" in vars(scheduler):
                self.phases.wrap(scheduler, "step", Kind.HOST, "lr_scheduler")
        for name, label in (("item", "item"), ("tolist", "tolist"), ("__float__", "float")):
            self._wrap_read(name, label)
        self.phases.hooks.add(self._hook_collections)

    def close(self) -> None:
        """Take the callback of garbage collection away again."""
        if self.on_collection in gc.callbacks:
            gc.callbacks.remove(self.on_collection)

    def _hook_collections(self) -> Callable[[], None]:
        gc.callbacks.append(self.on_collection)
        return self.close

    def _wrap_read(self, attribute: str, label: str) -> None:
        """Record reads of a tensor's value that take long, and values that are not a number.

        Nothing waits for a device that would not have: the value is one that the script reads.
        """
        recorder, loop, name = self.recorder, self.loop, self.recorder.intern(label)

        def before(*_: object) -> int:
            return monotonic_ns()

        def after(begin_ns: int, value: Any, *_: object) -> None:
            end_ns = monotonic_ns()
            is_long = end_ns - begin_ns >= LEAST_NS and loop.phase == IDLE
            if is_long and threading.get_ident() == loop.main_thread:
                recorder.record(_HOST, MAIN, name, begin_ns, end_ns)
            if type(value) is float and value != value:  # only a NaN differs from itself
                self._note_nan()

        original = getattr(torch.Tensor, attribute)
        read = around(original, self.reads, before, after)
        self.phases.hooks.replace(torch.Tensor, attribute, read)

    def _note_nan(self) -> None:
        if self.nan_count < NANS_MAX and threading.get_ident() == self.loop.main_thread:
            self.nan_count += 1
            now_ns = monotonic_ns()
            self.recorder.record(int(Kind.COUNTER), MAIN, self.nan_name, now_ns, now_ns, 1)

    def _on_collection(self, phase: str, _: dict[str, int]) -> None:
        if threading.get_ident() != self.loop.main_thread:
            return
        now_ns = monotonic_ns()
        if phase == "start":
            self.collection_begin_ns = now_ns
        elif now_ns - self.collection_begin_ns >= LEAST_NS:
            self.recorder.record(
                _HOST, MAIN, self.collection_name, self.collection_begin_ns, now_ns
            )
