"""Sees the calls of process groups that are written in Python, which pass by the dispatcher.

torch's own groups dispatch ``c10d::*``, where `torch_collectives` sees each call. A Python subclass
of ProcessGroup (`paceline.collectives.backend`) overrides the methods that would do so: here these
methods are seen themselves. A call from a functional collective was seen by that one.

A call of such a group may be over when it returns. Then the thread that made it was blocked for all
of it, as if it had waited; `ran_inline` of the work says so. The calls of a heap of shared tensors
(`paceline.collectives.tensor_heap`) are such calls of its process group.

Threads: any thread may call a group; what each thread has open is its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors import torch_operators as operators
from paceline.trace.collectors.torch_hooks import RAISED, RecordedKind, around
from paceline.trace.collectors.torch_in_flight import ANY_SOURCE
from paceline.trace.format.events import COMPLETION_UNKNOWN, RECV, SEND, Kind

OTHER_PATH = "gloo"  # of a work that says no path: torch's own backend has made it

if TYPE_CHECKING:
    from types import ModuleType

    from paceline.trace.collectors.hook_registry import HookRegistry
    from paceline.trace.collectors.torch_hooks import Arguments, Keywords
    from paceline.trace.collectors.torch_in_flight import InFlight

# Method -> the field's word for it, and which argument (after the group) holds the bytes that this
# rank gives.
_METHODS: dict[str, tuple[str, int | None]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "reduce_scatter": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1),
    "all_gather_single": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1),
    "allgather_into_tensor_coalesced": ("all_gather", 1),
    "allgather_coalesced": ("all_gather", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "alltoall": ("all_to_all", 1),
    "all_to_all_single": ("all_to_all", 1),
    "alltoall_base": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier": ("barrier", None),
    "send": (SEND, 0),
    "recv": (RECV, 0),
    "recv_anysource": (RECV, 0),
}


# Of a heap: method -> the word, and which argument holds the bytes, likewise.
_HEAP_METHODS: dict[str, tuple[str, int | None]] = {
    "average": ("all_reduce", 0),
    "average_part": ("reduce_scatter", 0),
    "average_at_root": ("reduce", 0),
    "barrier": ("barrier", None),
}


class _OpenCall(NamedTuple):
    """A call of a group that this thread has open: the state of the hook around it."""

    begin_ns: int
    word: str
    payload: operators.Payload


class PythonGroupRecorder:
    """Puts hooks around the methods of classes of process groups, and tells `in_flight` of calls.

    Args:
        in_flight: where calls are noted until they end.
        hooks: where the hooks are registered.
        kind: what these hooks record.
    """

    def __init__(self, in_flight: InFlight, hooks: HookRegistry, kind: RecordedKind) -> None:
        self.in_flight = in_flight
        self.hooks = hooks
        self.kind = kind
        self.recorder = in_flight.recorder
        self._thread = threading.local()  # .open: whether it is in a call that is recorded
        self._names = {word: self.recorder.intern(word) for word, _ in _METHODS.values()}

    def see_groups(self, module: ModuleType) -> None:
        """See the calls of the classes of process groups that a module defines."""
        base = internals.c10d().ProcessGroup
        for cls in list(vars(module).values()):
            if isinstance(cls, type) and issubclass(cls, base) and cls is not base:
                for name in _METHODS.keys() & vars(cls).keys():
                    self._see_method(cls, name, *_METHODS[name])

    def see_heap(self, module: ModuleType) -> None:
        """See the calls of the heap of tensors that a module defines."""
        for name, (word, payload) in _HEAP_METHODS.items():
            self._see_method(module.TensorHeap, name, word, payload)

    def _see_method(self, cls: type, method: str, word: str, payload: int | None) -> None:
        def before(args: Arguments, _kwargs: Keywords) -> _OpenCall | None:
            if getattr(self._thread, "open", False) or internals.is_below_autograd():
                return None  # part of a call that is recorded
            given = operators.payload_of(args[1:] if payload is None else args[1 + payload])
            if given.is_traced:
                return None
            self._thread.open = True
            if word not in (SEND, RECV):
                group = getattr(args[0], "process_group", args[0])
                record = self.in_flight.groups.record_of(group)
                self.in_flight.enter(self._names[word], record, given)
            in_main = threading.get_ident() == self.in_flight.loop.main_thread
            begin_ns = self.recorder.begin(int(Kind.WAIT)) if in_main else monotonic_ns()
            return _OpenCall(begin_ns, word, given)

        def after(state: _OpenCall, result: Any, args: Arguments, kwargs: Keywords) -> None:
            self._thread.open = False
            if result is not RAISED:
                self._note(state, result, args, kwargs)
            if threading.get_ident() == self.in_flight.loop.main_thread:
                self.recorder.begin(self.in_flight.loop.phase)

        self.hooks.replace(cls, method, around(vars(cls)[method], self.kind, before, after))

    def _note(self, call: _OpenCall, work: Any, args: Arguments, kwargs: Keywords) -> None:
        """Note a call that has returned `work`, or nothing where it is over."""
        group, given = getattr(args[0], "process_group", args[0]), args[1:]
        record = self.in_flight.groups.record_of(group)
        peer, tag = _other_side(call.word, given, kwargs)
        if call.word not in (SEND, RECV):
            path = getattr(args[0], "path", OTHER_PATH)  # a heap has one, and no works
            tag = self.recorder.intern(getattr(work, "path", path))
        issued = self.in_flight.issue(
            operators.kind_of(call.word),
            self._names[call.word],
            record,
            call.payload.size_bytes,
            call.begin_ns,
            peer=peer,
            tag=tag,
            work=work,
        )
        if work is None or getattr(work, "ran_inline", False):
            if threading.get_ident() == self.in_flight.loop.main_thread:
                self.in_flight.record_wait(issued, call.begin_ns)
            else:
                self.in_flight.complete(issued, monotonic_ns())
            return
        self.in_flight.hold_work(work, issued)
        if self.in_flight.groups.sees_completion(group, record, call.payload.device_type):
            self.in_flight.watch_future(work, issued)
        else:
            self.in_flight.complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
        self.in_flight.watch_backward()


def _other_side(word: str, given: Arguments, kwargs: Keywords) -> tuple[int, int]:
    """Return root or other rank within the group, -1 for none, and the tag of a message."""
    if word in (SEND, RECV):  # tensors, rank, tag; or tensors, tag
        return (int(given[1]), int(given[2])) if len(given) > 2 else (ANY_SOURCE, int(given[1]))
    options = kwargs.get("opts", given[-1] if given else None)
    return int(getattr(options, "rootRank", -1)), 0
