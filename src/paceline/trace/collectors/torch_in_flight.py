"""Collectives and messages on their way: from the call that issued one to its end.

Completion comes from the work's future where the backend has one, otherwise from the thread that
waits. Where neither tells (NCCL), the event says that its completion is unknown. A work is held
until it is waited for, so that its identity stays its own; a work that nobody waits for is let go
after a while, and at the end of the backward pass that issued it.

DDP waits in C++ at the end of backward, where no wait can be seen. A callback queued in the
autograd engine marks the moment when computing is done: what follows is the wait ("drain").

Threads: the main thread and the threads of a backward pass issue; the backend's threads complete.
All of it runs under the GIL, and none of it blocks.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_groups import GroupRecord, Groups
from paceline.trace.collectors.torch_hooks import Loop, RecordedKind, callback
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import (
    COMMUNICATION,
    COMPLETION_UNKNOWN,
    DRAIN,
    MAIN,
    Kind,
)

if TYPE_CHECKING:
    import torch

    from paceline.native import Recorder
    from paceline.trace.collectors.torch_operators import Payload

ANY_SOURCE = -2  # peer of a receive until its source is known
_PENDING_MAX = 64  # works that nobody waits for must not pile up: they hold their tensors
# How long the end of a group, or of the script, waits for calls that have not completed, and for
# the callbacks of those that have: a busy machine may let a backend's thread wait for a core.
_COMPLETION_S, _CALLBACK_S, _POLL_S = 0.2, 10.0, 0.002


@dataclass(slots=True)
class Issued:
    """A collective or message on its way; the fields of its event, and its work."""

    kind: Kind
    name: int
    begin_ns: int
    amount: int
    group: GroupRecord
    sequence: int
    peer: int
    tag: int
    step: int
    keep: object  # the work: its identity stays its own as long as it lives
    has_future: bool = False
    done: bool = False


class InFlight:
    """What this process has issued and not seen to end, and the waits for it."""

    def __init__(self, recorder: Recorder, loop: Loop, available: frozenset[Capability]) -> None:
        self.recorder = recorder
        self.loop = loop
        self.available = available
        self.groups = Groups(recorder, available)
        self._on_completed = RecordedKind(Capability.FUTURES.value)
        on_computed = RecordedKind(Capability.ENGINE_CALLBACK.value)
        self._call_when_computed = callback(on_computed, self._computed)
        # Asked once: that a member of an Enum is in a set costs three functions of Python.
        self._has_futures = Capability.FUTURES in available
        self._has_engine_callback = Capability.ENGINE_CALLBACK in available
        self._keeps_thread_state = Capability.THREAD_STATE in available
        self.drain_name = recorder.intern(DRAIN)
        self._elements: dict[Any, int] = {}  # numbers of the names of types
        self.in_backward = False
        self.callback_queued = False
        self.issued_before: set[int] = set()
        self.computed_ns = 0  # when this backward's computing was done, if it has collectives
        self.works: dict[int, Issued] = {}  # by id of the work
        self.tensors: dict[int, Issued] = {}  # functional collectives: by their result
        # Callbacks that futures still hold. Not a WeakSet: it forgets members in a Python function,
        # which runs wherever the future ends and which Dynamo sees amid a compiled region.
        self.callbacks: set[weakref.ref[functools.partial[None]]] = set()

    def close(self) -> None:
        """Record what was issued and never seen to complete."""
        self.settle()
        for issued in list(self.works.values()) + list(self.tensors.values()):
            self.complete(issued, issued.begin_ns, COMPLETION_UNKNOWN)
        self.forget_all()

    def settle(self) -> None:
        """Let the backend's threads run the callbacks of what has completed, and drop them.

        Before the interpreter ends: a thread that asks for the GIL then is ended amid C++, which
        aborts the process. And before a group is destroyed: a DistributedDataParallel that outlives
        it joins the backend's threads while it holds the GIL, for which they would wait for ever.
        """
        never, begin_s = threading.Event(), time.monotonic()
        while self.callbacks:
            waited_s = time.monotonic() - begin_s
            if waited_s >= _COMPLETION_S and not self._has_callback_to_come():
                return
            if waited_s >= _CALLBACK_S:
                return
            never.wait(_POLL_S)

    def _has_callback_to_come(self) -> bool:
        """Return whether a call has completed whose callback the backend's thread still holds."""
        for reference in list(self.callbacks):
            completed = reference()
            if completed is not None and completed.args[0].keep.get_future().done():
                return True
        return False

    def forget_all(self) -> None:
        """Let go of all works and results."""
        self.works.clear()
        self.tensors.clear()

    def enter_backward(self) -> None:
        """Note that collectives from here on are issued by a backward pass."""
        self.in_backward = True
        self.issued_before = set(self.works)
        self.callback_queued = False
        self.computed_ns = 0

    def leave_backward(self) -> None:
        """Record the wait for the collectives that the backward pass issued."""
        self.in_backward = False
        self._forget_works(self.issued_before)
        if self.computed_ns:
            # Now and not when backward ended: no completion that it awaited may be noted later.
            self.recorder.record(
                int(Kind.WAIT), MAIN, self.drain_name, self.computed_ns, monotonic_ns()
            )

    def enter(self, name: int, group: GroupRecord, payload: Payload) -> None:
        """Publish that this rank is about to issue a collective: `issue` gives it its sequence."""
        dtype = payload.dtype
        element = self._elements.get(dtype)
        if element is None:
            element = self.recorder.intern(str(dtype).removeprefix("torch.")) if dtype else 0
            self._elements[dtype] = element
        number, sequence = group.number, group.collectives + 1
        published = (number, sequence, -1, payload.size_bytes, element)
        self.recorder.enter(int(Kind.COLLECTIVE), name, *published)

    def enter_message(self, issued: Issued) -> None:
        """Publish that the main thread waits for a message, until `Recorder.leave`."""
        self.recorder.enter(
            int(issued.kind), issued.name, issued.group.number, issued.sequence, issued.peer
        )

    def issue(
        self,
        kind: Kind,
        name: int,
        group: GroupRecord,
        amount: int,
        begin_ns: int,
        *,
        peer: int = -1,
        tag: int = 0,
        work: object = None,
    ) -> Issued:
        """Return the record of a call that was just issued; `peer` is a rank within the group."""
        if peer >= 0:
            peer = group.global_rank(peer)
        if kind is Kind.COLLECTIVE:
            sequence = group.next_collective()
        elif peer == ANY_SOURCE:
            sequence = 0
        else:
            sequence = group.next_message(kind is Kind.SEND, peer, tag)
        return Issued(
            kind=kind,
            name=name,
            begin_ns=begin_ns,
            amount=amount,
            group=group,
            sequence=sequence,
            peer=peer,
            tag=tag,
            step=self.recorder.step,
            keep=work,
        )

    def hold_work(self, work: object, issued: Issued) -> None:
        """Hold a work until it is waited for."""
        self._with_room(self.works)[id(work)] = issued

    def hold_result(self, tensor: torch.Tensor, issued: Issued) -> None:
        """Hold what a functional collective returned until it is waited for."""
        self._with_room(self.tensors)[internals.tensor_identity(tensor)] = issued

    def _with_room(self, table: dict[int, Issued]) -> dict[int, Issued]:
        """Return `table` with room in it: the oldest goes, as nobody has waited for it so far."""
        if len(table) >= _PENDING_MAX:
            oldest = table.pop(next(iter(table)))
            if not oldest.has_future:
                self.complete(oldest, oldest.begin_ns, COMPLETION_UNKNOWN)
        return table

    def complete(self, issued: Issued, end_ns: int, flags: int = 0) -> None:
        """Record the event of a call, unless that was done before."""
        if issued.done:
            return
        issued.done = True
        if issued.peer == ANY_SOURCE:
            self._find_source(issued)
        self.recorder.record(
            issued.kind,
            COMMUNICATION,
            issued.name,
            issued.begin_ns,
            end_ns,
            issued.amount,
            issued.group.number,
            issued.sequence,
            issued.peer,
            issued.tag,
            issued.step,
            flags,
        )

    def _find_source(self, issued: Issued) -> None:
        """Number a receive from any source, now that its source is known."""
        issued.peer = issued.group.global_rank(internals.source_of(issued.keep))
        if issued.peer >= 0:
            issued.sequence = issued.group.next_message(False, issued.peer, issued.tag)

    def watch_future(self, work: Any, issued: Issued) -> None:
        """Have the work's future tell when it ends; gloo's send and receive have none."""
        if not self._has_futures:
            return
        completed = functools.partial(self._completed, issued)
        try:  # a context manager would cost more than the rest of it
            work.get_future().add_done_callback(completed)
        except RuntimeError:
            return
        self.callbacks.add(weakref.ref(completed, self.callbacks.discard))
        issued.has_future = True

    def _completed(self, issued: Issued, _: object) -> None:
        """Record a call's completion; torch calls this on the backend's thread."""
        if not self._on_completed.on:
            return
        try:
            self.complete(issued, monotonic_ns())
            if self._keeps_thread_state:
                internals.keep_thread_state()
        except Exception as problem:  # noqa: BLE001  # whatever it is, the script must not see it
            self._on_completed.stop(problem)

    def record_wait(self, issued: Issued | None, begin_ns: int) -> None:
        """Record that the main thread was blocked until now, and for what."""
        recorder = self.recorder
        number = int(Kind.WAIT)
        if issued is None:
            recorder.end(number, 0, begin_ns, 0, self.loop.phase)
            return
        end_ns = recorder.begin(self.loop.phase)  # back to the phase around the wait
        self.complete(issued, end_ns)  # first: by now a receive knows its source
        recorder.record(
            number,
            MAIN,
            issued.name,
            begin_ns,
            end_ns,
            0,
            issued.group.number,
            issued.sequence,
            issued.peer,
            issued.tag,
        )

    def _forget_works(self, but: set[int]) -> None:
        """Let go of works that C++ has waited for by now: those that no Python object holds.

        A work that the script holds is still to be waited for, and may be on its way.
        """
        for key in self.works.keys() - but:
            issued = self.works[key]
            if internals.is_held_elsewhere(issued):
                continue
            self.complete(issued, monotonic_ns())  # its callback may come late, after the GIL
            del self.works[key]

    def _computed(self) -> None:
        self.computed_ns = self.recorder.begin(int(Kind.WAIT))
        self.recorder.begin(self.loop.phase)  # what a crash reports is the phase around the drain

    def watch_backward(self) -> None:
        """Have the engine tell when computing ends; before DDP's own callback, queued later."""
        if not self.in_backward or self.callback_queued:
            return
        self.callback_queued = self._has_engine_callback
        if self.callback_queued:
            try:
                internals.queue_engine_callback(self._call_when_computed)
            except RuntimeError:  # a thread without a running graph: then there is no drain
                self.callback_queued = False
