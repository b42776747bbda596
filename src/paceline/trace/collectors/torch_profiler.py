"""Has torch.profiler look at a few steps, and records its operators and kernels.

Off unless a run asks for it: the profiler makes each operator several microseconds longer. It has a
clock of its own; marks that it sees, too, say how that differs from the recorder's.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from paceline.native import monotonic_ns
from paceline.trace.collectors.torch_hooks import RecordedKind
from paceline.trace.format.events import EVENT_DTYPE, MAIN, PROFILED, Kind, LocationType

if TYPE_CHECKING:
    from paceline.native import Recorder

FIRST_STEP = 5  # after the first step whose layers are timed
NAME_MAX = 200  # characters: names of kernels can be longer than a line
_MARK = "paceline's mark"
_MARKS = 5
_HOST = int(Kind.HOST)


class ProfilerRecorder:
    """Used by the main thread alone.

    Args:
        recorder: of the rank.
        steps: how many to profile.

    Attributes:
        profiled: whether steps are profiled; it stops when that fails.
    """

    def __init__(self, recorder: Recorder, steps: int) -> None:
        self.profiled = RecordedKind("operators and kernels of the profiled steps", self._forget)
        self._recorder = recorder
        self._last_step = FIRST_STEP + steps - 1
        self._name = recorder.intern(PROFILED)
        self._profile: Any = None
        self._marks_ns: list[tuple[int, int]] = []  # before and after the beginning of each mark
        self._ends_ns: list[int] = []  # of the profiled steps

    def next_step(self) -> float:
        """Return the first step from the next one on that begins or follows a profiled step."""
        if self._profile is not None:
            return 0
        is_to_come = self.profiled.on and self._recorder.step < FIRST_STEP
        return FIRST_STEP if is_to_come else math.inf

    def end_step(self, now_ns: int) -> None:
        """Note that a step ends now, as a part of it."""
        step = self._recorder.step
        if self._profile is not None:
            self._ends_ns.append(now_ns)
            if step >= self._last_step:
                self.close()
        elif step + 1 == FIRST_STEP:
            self._start(now_ns)

    def close(self) -> None:
        """Record what the profiler has found so far; nothing if it is not running."""
        if self._profile is None:
            return
        begin_ns = monotonic_ns()
        profile, self._profile = self._profile, None
        profile.stop()
        self._record(list(profile.events() or ()))
        self._recorder.record(_HOST, MAIN, self._name, begin_ns, monotonic_ns())

    def _start(self, begin_ns: int) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():  # pragma: no cover - needs a GPU
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=activities)
        profile.start()
        self._profile = profile
        self._marks_ns = [_mark() for _ in range(_MARKS)]
        self._recorder.record(_HOST, MAIN, self._name, begin_ns, monotonic_ns())

    def _forget(self) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            with contextlib.suppress(Exception):  # it is what failed
                profile.stop()

    def _record(self, found: list[Any]) -> None:
        marks = sorted(
            (event for event in found if event.name == _MARK),
            key=lambda event: event.time_range.start,
        )
        # That which the least came between: the first one is slow, and any may lose its core.
        mark, (before_ns, after_ns) = min(
            zip(marks, self._marks_ns, strict=True), key=lambda pair: pair[1][1] - pair[1][0]
        )
        offset_ns = (before_ns + after_ns) // 2 - round(1e3 * mark.time_range.start)
        kept = [event for event in found if event.name != _MARK and not event.is_async]
        events = np.zeros(len(kept), EVENT_DTYPE)
        places: dict[tuple[bool, int, int], int] = {}
        for row, event in enumerate(kept):
            on_cpu = event.device_type == torch.autograd.DeviceType.CPU
            key = (on_cpu, event.device_index, event.thread if on_cpu else _stream_of(event))
            if key not in places:
                places[key] = self._location(key, is_main=event.thread == mark.thread)
            own_us = event.self_cpu_time_total if on_cpu else 0.0
            events[row] = (
                *(round(1e3 * event.time_range.start), round(1e3 * event.time_range.end)),
                *(max(0, round(1e3 * own_us)), 0, 0, -1, 0),
                self._recorder.intern(event.name[:NAME_MAX]),
                *(0, places[key], int(Kind.OPERATOR if on_cpu else Kind.KERNEL), 0),
            )
        events["begin_ns"] += np.uint64(offset_ns)
        events["end_ns"] = np.maximum(events["begin_ns"], events["end_ns"] + np.uint64(offset_ns))
        steps = FIRST_STEP + np.searchsorted(self._ends_ns, events["begin_ns"], side="left")
        events["step"] = np.minimum(steps, FIRST_STEP + max(0, len(self._ends_ns) - 1))
        order = np.argsort(events["end_ns"], kind="stable")
        self._recorder.record_events(events[order].tobytes())

    def _location(self, key: tuple[bool, int, int], *, is_main: bool) -> int:
        on_cpu, device, number = key
        if on_cpu:
            name = "operators" if is_main else f"operators of thread {number}"
            return self._recorder.define_location(int(LocationType.THREAD), name, 0, number)
        name = f"cuda:{device} stream {number}"  # pragma: no cover - needs a GPU
        return self._recorder.define_location(int(LocationType.STREAM), name, 0, number)


def _mark() -> tuple[int, int]:
    """Make a mark in the profile; return the recorder's times between which it begins."""
    before_ns = monotonic_ns()
    with torch.profiler.record_function(_MARK):
        return before_ns, monotonic_ns()


def _stream_of(event: Any) -> int:  # pragma: no cover - needs a GPU
    return int(getattr(event, "device_resource_id", event.thread))
