"""Sees every collective and message of a PyTorch program at the dispatcher, below every front end.

Kernels on the autograd keys of ``c10d::*`` and ``_c10d_functional::*`` note the call and redispatch
below autograd. The call returns when the work is issued; completion comes from the work's future
where the backend has one, otherwise from whoever waits for it. Where neither tells (NCCL), the
event says that its completion is unknown.

DDP waits in C++ at the end of backward, where no wait can be seen. A callback queued in the
autograd engine marks the moment when computing is done: what follows is the wait ("drain").

Threads: the main thread and the threads of a backward pass issue; the backend's threads complete.
All of it runs under the GIL, and none of it blocks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors import torch_operators as operators
from paceline.trace.collectors.torch_groups import GroupRecord, Groups
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.events import (
    COMMUNICATION,
    COMPLETION_UNKNOWN,
    DRAIN,
    IDLE,
    MAIN,
    RECV,
    SEND,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.native import Recorder

_LOG = logging.getLogger(__name__)

_PENDING_MAX = 64  # works that nobody waits for must not pile up: they hold their tensors
_ANY_SOURCE = -2  # peer of a receive until its source is known
_KINDS = {SEND: Kind.SEND, RECV: Kind.RECV}


@dataclass(slots=True)
class _Issued:
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


@dataclass(slots=True)
class Loop:
    """Where the training loop is: what both sides of the collector must know."""

    main_thread: int
    phase: int = IDLE


class CollectiveRecorder:
    """The communication side of the torch collector."""

    def __init__(
        self, recorder: Recorder, loop: Loop, available: frozenset[Capability] | None = None
    ) -> None:
        self.recorder = recorder
        self.loop = loop
        self.available = internals.available() if available is None else available
        self.groups = Groups(recorder, self.available)
        self.drain_name = self.recorder.intern(DRAIN)
        self.in_backward = False
        self.callback_queued = False
        self.issued_before: set[int] = set()
        self.computed_ns = 0  # when this backward's computing was done, if it has collectives
        self.works: dict[int, _Issued] = {}  # by id of the work
        self.tensors: dict[int, _Issued] = {}  # functional collectives: by their result
        self.libraries: list[torch.library.Library] = []

    def install(self) -> None:
        """Put kernels on the dispatcher's autograd keys, and see waits."""
        if Capability.DISPATCHER not in self.available:
            return
        self._install_kernels("c10d", operators.C10D, self._c10d_kernel)
        library = self._install_kernels(
            "_c10d_functional", operators.FUNCTIONAL, self._functional_kernel
        )
        if Capability.FUNCTIONAL_WAIT in self.available:
            wait = internals.operators("_c10d_functional")["wait_tensor"]
            for key in _autograd_keys():
                library.impl("wait_tensor", self._wait_tensor_kernel(wait), key)
        if Capability.WORKS in self.available:
            self._wrap_wait()
        if Capability.BUFFER_BROADCAST in self.available:
            self._wrap_broadcast_coalesced()

    def close(self) -> None:
        """Record what was issued and never seen to complete, as complete when issued."""
        for issued in list(self.works.values()) + list(self.tensors.values()):
            self._complete(issued, issued.begin_ns)
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

    def _install_kernels(
        self,
        namespace: str,
        table: Mapping[str, tuple[str, int | None]],
        make: Callable[[str, Any, operators.Places], Callable[..., Any]],
    ) -> torch.library.Library:
        library = torch.library.Library(namespace, "IMPL")
        self.libraries.append(library)  # kernels live as long as their library
        known = internals.operators(namespace)
        unseen = known.keys() - table.keys() - operators.NOT_COMMUNICATION
        if unseen:  # of a newer torch
            _LOG.warning("these collectives are not recorded: %s", ", ".join(sorted(unseen)))
        for name in sorted(table.keys() & known.keys()):
            word, payload = table[name]
            kernel = make(word, known[name], operators.places(known[name], payload))
            for key in _autograd_keys():
                library.impl(name, kernel, key)
        return library

    def _forget_works(self, but: set[int]) -> None:
        """Let go of works that C++ has waited for by now: those that no Python object holds.

        A work that the script holds is still to be waited for, and may be on its way.
        """
        for key in self.works.keys() - but:
            issued = self.works[key]
            if internals.is_held_elsewhere(issued):
                continue
            self._complete(issued, monotonic_ns())  # its callback may come late, after the GIL
            del self.works[key]

    def _computed(self) -> None:
        self.computed_ns = monotonic_ns()

    def _watch_backward(self) -> None:
        """Have the engine tell when computing ends; before DDP's own callback, queued later."""
        if not self.in_backward or self.callback_queued:
            return
        self.callback_queued = Capability.ENGINE_CALLBACK in self.available
        if self.callback_queued:
            try:
                internals.queue_engine_callback(self._computed)
            except RuntimeError:  # a thread without a running graph: then there is no drain
                self.callback_queued = False

    def _issue(
        self,
        word: str,
        name: int,
        group: GroupRecord,
        amount: int,
        begin_ns: int,
        *,
        peer: int = -1,
        tag: int = 0,
        work: object = None,
    ) -> _Issued:
        """Return the record of a call that was just issued; `peer` is a rank within the group."""
        kind = _KINDS.get(word, Kind.COLLECTIVE)
        peer = peer if peer == _ANY_SOURCE else group.global_rank(peer)
        if kind is Kind.COLLECTIVE:
            sequence = group.next_collective()
        else:
            sequence = 0 if peer == _ANY_SOURCE else group.next_message(word == SEND, peer, tag)
        return _Issued(
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

    def _make_room(self, table: dict[int, _Issued]) -> dict[int, _Issued]:
        """Return `table` with room in it: the oldest goes, as nobody has waited for it so far."""
        if len(table) >= _PENDING_MAX:
            oldest = table.pop(next(iter(table)))
            if not oldest.has_future:
                self._complete(oldest, oldest.begin_ns)
        return table

    def _complete(self, issued: _Issued, end_ns: int, flags: int = 0) -> None:
        if issued.done:
            return
        issued.done = True
        self._find_source(issued)
        self.recorder.record(
            int(issued.kind),
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

    def _find_source(self, issued: _Issued) -> None:
        """Number a receive from any source, now that its source is known."""
        if issued.peer != _ANY_SOURCE:
            return
        issued.peer = issued.group.global_rank(internals.source_of(issued.keep))
        if issued.peer >= 0:
            issued.sequence = issued.group.next_message(False, issued.peer, issued.tag)

    def _c10d_kernel(
        self, word: str, overload: Any, places: operators.Places
    ) -> Callable[..., Any]:
        name = self.recorder.intern(word)

        def kernel(*args: Any) -> Any:
            begin_ns = monotonic_ns()
            with internals.below_autograd():
                result = overload(*args)
            group = internals.unbox_group(args[places.group])
            record = self.groups.of(group)
            payload = () if places.payload is None else args[places.payload]
            peer = _ANY_SOURCE if word == RECV else -1
            if places.peer is not None:
                peer = int(args[places.peer])
            tag = int(args[places.tag]) if places.tag is not None else 0
            work = internals.work_of(result)
            issued = self._issue(
                *(word, name, record, operators.size_bytes(payload), begin_ns),
                peer=peer,
                tag=tag,
                work=work,
            )
            if work is None:  # monitored_barrier returns when it is over
                self._record_wait(issued, begin_ns)
                return result
            self._make_room(self.works)[id(work)] = issued
            if self.groups.sees_completion(group, record, operators.device_type(args)):
                self._watch_future(work, issued)
            else:
                self._complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
            self._watch_backward()
            return result

        return kernel

    def _watch_future(self, work: Any, issued: _Issued) -> None:
        """Have the work's future tell when it ends; gloo's send and receive have none."""
        if Capability.FUTURES not in self.available:
            return
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(functools.partial(self._completed, issued))
            issued.has_future = True

    def _completed(self, issued: _Issued, _: object) -> None:
        self._complete(issued, monotonic_ns())
        if Capability.THREAD_STATE in self.available:
            internals.keep_thread_state()

    def _functional_kernel(
        self, word: str, overload: Any, places: operators.Places
    ) -> Callable[..., Any]:
        name = self.recorder.intern(word)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            begin_ns = monotonic_ns()
            with internals.below_autograd():
                result = overload(*args, **kwargs)
            group = internals.unbox_group(args[places.group])
            record = self.groups.of(group)
            issued = self._issue(
                *(word, name, record, operators.size_bytes(args[places.payload or 0]), begin_ns),
                peer=int(args[places.peer]) if places.peer is not None else -1,
                tag=int(args[places.tag]) if places.tag is not None else 0,
            )
            if not self.groups.sees_completion(group, record, operators.device_type(args)):
                self._complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
            for tensor in operators.tensors(result):
                self._make_room(self.tensors)[internals.tensor_identity(tensor)] = issued
            self._watch_backward()
            return result

        return kernel

    def _wait_tensor_kernel(self, overload: Any) -> Callable[..., Any]:
        def kernel(tensor: torch.Tensor) -> Any:
            issued = self.tensors.pop(internals.tensor_identity(tensor), None)
            begin_ns = self.recorder.begin(int(Kind.WAIT))
            try:
                with internals.below_autograd():
                    return overload(tensor)
            finally:
                self._record_wait(issued, begin_ns)

        return kernel

    def _wrap_wait(self) -> None:
        work_class = internals.c10d().Work
        original = work_class.wait

        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.loop.main_thread:
                return original(work, *args, **kwargs)
            issued = self.works.get(id(work))
            begin_ns = self.recorder.begin(int(Kind.WAIT))
            try:
                return original(work, *args, **kwargs)
            finally:
                self._record_wait(issued, begin_ns)
                if issued is not None:
                    self.works.pop(id(work), None)

        work_class.wait = wait

    def _wrap_broadcast_coalesced(self) -> None:
        """Record DDP's broadcast of buffers, which comes twice a step, as the one call that it is.

        It waits in C++ for the works that it issues, so that its end is theirs. Dispatched below
        autograd, they pass by our kernels: a kernel in Python costs 100 us amid a step.
        """
        original = dist._broadcast_coalesced  # noqa: SLF001  # what DDP calls
        name = self.recorder.intern("broadcast")

        @functools.wraps(original)
        def broadcast(process_group: Any, tensors: Any, buffer_size: int, src: int = 0) -> Any:
            record = self.groups.of(process_group)
            begin_ns = self.recorder.begin(int(Kind.WAIT))
            issued = self._issue(
                "broadcast", name, record, operators.size_bytes(tensors), begin_ns, peer=src
            )
            if not self.groups.sees_completion(
                process_group, record, operators.device_type(tensors)
            ):
                self._complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
            try:
                with internals.below_autograd():
                    return original(process_group, tensors, buffer_size, src)
            finally:
                self._record_wait(issued, begin_ns)

        dist._broadcast_coalesced = broadcast  # noqa: SLF001  # what DDP calls

    def _record_wait(self, issued: _Issued | None, begin_ns: int) -> None:
        """Record that the main thread was blocked until now, and for what."""
        recorder = self.recorder
        number = int(Kind.WAIT)
        if issued is None:
            recorder.end(number, 0, begin_ns, 0, self.loop.phase)
            return
        end_ns = recorder.begin(self.loop.phase)  # back to the phase around the wait
        self._complete(issued, end_ns)  # first: by now a receive knows its source
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


def _autograd_keys() -> list[str]:
    return ["AutogradCPU", "AutogradCUDA"] if torch.cuda.is_available() else ["AutogradCPU"]
