"""The thin part that only a GPU has: streams that copy, and how its memory is counted.

    host, in order of events   take a     event: a's memory is needed     next event
    compute stream             ...........|wait for a's copy|.............
    write stream               |wait for what made a|copy a|

The host runs ahead of the device; what holds the budget is the order of what it enqueues. A tensor
that was copied is let go of after the compute stream waits for the copy: what is computed later may
have its memory. `record_stream` would bring a block back at a time that depends on the device, and
serves only where a tensor is used on another stream than the one that its memory is of.

Not measured on a GPU yet.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from paceline.training.out_of_core.transfers import Copy, Lane, SpillTransfer

if TYPE_CHECKING:
    from collections.abc import Callable


class _Flight(NamedTuple):
    """A copy that the device may not have done yet, and what must not be freed until then."""

    begin: torch.cuda.Event
    end: torch.cuda.Event
    size_bytes: int
    held: list[Any]


class StreamLane(Lane):
    """A stream of its own that copies; of the step's threads, one at a time.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._flights: collections.deque[_Flight] = collections.deque()
        # Events on the compute stream, around its waiting.
        self._waits: collections.deque[tuple[torch.cuda.Event, torch.cuda.Event]] = (
            collections.deque()
        )

    def start(self, copy: Copy) -> StreamTransfer:
        """Enqueue a copy behind all that is enqueued to compute so far."""
        self._sweep()
        compute = torch.cuda.current_stream(self._device)
        memory = copy.allocate() if copy.allocate is not None else None  # of that stream
        self._stream.wait_stream(compute)
        if copy.after is not None:
            assert isinstance(copy.after, StreamTransfer)
            self._stream.wait_event(copy.after.flight.end)
        flight = _Flight(_event(), _event(), copy.size_bytes, [copy, memory])
        with torch.cuda.stream(self._stream):
            flight.begin.record(self._stream)
            copy.run(memory)
            flight.end.record(self._stream)
        self._flights.append(flight)
        return StreamTransfer(self, flight, copy.finish, memory, compute)

    def wait(self, end: torch.cuda.Event, begun_on: torch.cuda.Stream) -> torch.cuda.Stream:
        """Have what is computed from now on come after an event of this stream.

        Args:
            end: the event.
            begun_on: the stream whose memory was copied.

        Returns:
            The stream that computes now.
        """
        compute = torch.cuda.current_stream(self._device)
        waiting = _event(), _event()
        waiting[0].record(compute)
        compute.wait_event(end)
        waiting[1].record(compute)
        self._waits.append(waiting)
        if begun_on != compute:
            begun_on.wait_event(end)
        return compute

    def close(self) -> bool:
        """Wait for what is still to be done."""
        torch.cuda.synchronize(self._device)
        self._sweep()
        return True

    def _sweep(self) -> None:
        """Count what is over, and let go of its memory."""
        while self._flights and self._flights[0].end.query():
            flight = self._flights.popleft()
            self.moved_bytes += flight.size_bytes
            self.busy_s += flight.begin.elapsed_time(flight.end) / 1e3
        while self._waits and self._waits[0][1].query():
            begin, end = self._waits.popleft()
            self.waited_s += begin.elapsed_time(end) / 1e3


class StreamTransfer(SpillTransfer):
    """A copy on a lane's stream."""

    def __init__(
        self,
        lane: StreamLane,
        flight: _Flight,
        finish: Callable[[], None] | None,
        memory: torch.Tensor | None,
        begun_on: torch.cuda.Stream,
    ) -> None:
        self.flight = flight
        self._lane = lane
        self._finish = finish
        self._memory = memory
        self._begun_on = begun_on
        self._is_waited = False

    @property
    def is_done(self) -> bool:
        """Whether the device has come to its end."""
        return bool(self.flight.end.query())

    def wait(self) -> None:
        """Have what is computed from now on come after the copy; the host goes on."""
        if self._is_waited:
            return
        self._is_waited = True
        compute = self._lane.wait(self.flight.end, self._begun_on)
        if self._memory is not None and compute != self._begun_on:
            self._memory.record_stream(compute)  # else its stream would use it again at once
        self.bytes, self._memory = self._memory, None
        # From here on memory is free in the order of the compute stream, which is after the copy.
        self.flight.held.clear()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


class DeviceMemory:
    """The memory of a GPU that tensors of this process take.

    Blocks that torch's allocator keeps without a tensor do not count: it hands them out again, or
    gives them back where there is no other memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self) -> None:
        """Begin to watch for a peak, when all before is computed."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)

    def settle(self) -> None:
        """Wait until the device has computed all: an interval that is timed ends."""
        torch.cuda.synchronize(self._device)

    def peak_bytes(self) -> int:
        """Return the most memory since `start`."""
        return int(torch.cuda.max_memory_allocated(self._device))

    def now_bytes(self) -> int:
        """Return the memory at this moment."""
        return int(torch.cuda.memory_allocated(self._device))

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class CachingAllocator:
    """Torch's own allocator of a GPU, which keeps freed blocks for the next tensors."""

    is_pooled = True

    def begin(self) -> None:
        """Give back what no tensor has."""
        torch.cuda.empty_cache()

    def end(self) -> None:
        """Do nothing: torch goes on."""

    def keep_nothing(self) -> None:
        """Do nothing: blocks without a tensor do not count."""

    def begin_interval(self, now_bytes: Callable[[], int]) -> None:
        """Do nothing: torch's own statistics have the peak."""

    def end_interval(self, peak_bytes: Callable[[], int]) -> None:
        """Do nothing, as before."""

    def keep_within(self, budget_bytes: int, now_bytes: Callable[[], int]) -> None:
        """Do nothing, as before."""

    def end_step(self) -> int:
        """Return 0: torch's own statistics have the peak."""
        return 0

    def page_fault_s(self) -> float:
        """Return 0: no page comes from the system."""
        return 0.0


def device_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that this process may take: what is free, and what it has."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + int(torch.cuda.memory_reserved(device))
