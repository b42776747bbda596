"""Sees every collective of a PyTorch program at the dispatcher, without touching process groups.

Kernels on the autograd keys of ``c10d::*`` (DDP's reducer, torch.distributed calls, FSDP2,
pipelining, checkpoints) and ``_c10d_functional::*`` (DTensor, compiled collectives) note the call
and redispatch below autograd. The call returns when the work is issued; completion comes from the
work's future where the backend has one, otherwise from whoever waits for it.

DDP waits in C++ at the end of backward, where no wait can be seen. A callback queued in the
autograd engine marks the moment when computing is done: what follows is the wait ("drain").
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from paceline.native import monotonic_ns
from paceline.trace.events import DRAIN, Kind, Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.native import Recorder

_LOG = logging.getLogger(__name__)

# Operator -> the field's word for it, and which argument holds the bytes this rank gives.
_C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "recv_any_source_": ("recv", 0),
}
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_reduce_coalesced_": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "isend": "send",
    "irecv": "recv",
}
# Operators of these namespaces that move nothing, or are recorded elsewhere.
_NO_COLLECTIVES = frozenset(
    {"check_for_nan", "wait_tensor", "_wrap_tensor_autograd", "batch_p2p_ops"}
)
_PEER_ARGUMENTS = ("root_rank", "dst", "src")
_OUR_REFERENCES = 2  # to a work that nobody else holds: the table's, and getrefcount's argument
_PENDING_MAX = 64  # works that nobody waits for must not pile up: they hold their tensors


@dataclass(slots=True)
class _Issued:
    """A collective on its way."""

    name: int
    begin_ns: int
    amount: int
    group: int
    sequence: int
    peer: int
    step: int
    keep: object  # the work: its identity stays its own as long as it lives
    has_future: bool = False
    done: bool = False


@dataclass(slots=True)
class Loop:
    """Where the training loop is: what both sides of the collector must know."""

    main_thread: int
    phase: int = int(Kind.STEP)  # which stands for "between phases"


class CollectiveRecorder:
    """The collective side of the torch collector."""

    def __init__(self, recorder: Recorder, loop: Loop) -> None:
        self.recorder = recorder
        self.loop = loop
        self.drain_name = self.recorder.intern(DRAIN)
        self.in_backward = False
        self.callback_queued = False
        self.issued_before: set[int] = set()
        self.computed_ns = 0  # when this backward's computing was done, if it has collectives
        self.sequences: dict[str, int] = {}
        self.kept_threads: set[int] = set()
        self.works: dict[int, _Issued] = {}  # by id of the work
        self.tensors: dict[int, _Issued] = {}  # functional collectives: by data pointer
        self.libraries: list[torch.library.Library] = []

    def install(self) -> None:
        """Put kernels on the dispatcher's autograd keys, and see waits."""
        keys = ["AutogradCPU", "AutogradCUDA"] if torch.cuda.is_available() else ["AutogradCPU"]
        for namespace, table in (("c10d", _C10D), ("_c10d_functional", _FUNCTIONAL)):
            library = torch.library.Library(namespace, "IMPL")
            self.libraries.append(library)  # kernels live as long as their library
            known = {
                name.partition("::")[2]
                for name in torch._C._dispatch_get_all_op_names()  # noqa: SLF001  # no public list of operators
                if name.startswith(namespace + "::")
            }
            unseen = known - table.keys() - _NO_COLLECTIVES
            if unseen:  # of a newer torch
                _LOG.warning("these collectives are not recorded: %s", ", ".join(sorted(unseen)))
            for operator in sorted(table.keys() & known):
                overload = getattr(getattr(torch.ops, namespace), operator).default
                make = self._c10d_kernel if table is _C10D else self._functional_kernel
                for key in keys:
                    library.impl(operator, make(operator, overload), key)
            if namespace == "_c10d_functional":
                wait = torch.ops._c10d_functional.wait_tensor.default  # noqa: SLF001  # the operator's name
                for key in keys:
                    library.impl("wait_tensor", self._wait_tensor_kernel(wait), key)
        self._wrap_wait()
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
                int(Kind.WAIT), int(Lane.MAIN), self.drain_name, self.computed_ns, monotonic_ns()
            )

    def _forget_works(self, but: set[int]) -> None:
        """Let go of works that C++ has waited for by now: those that no Python object holds.

        A work that the script holds is still to be waited for, and may be on its way.
        """
        for key in self.works.keys() - but:
            issued = self.works[key]
            if sys.getrefcount(issued.keep) > _OUR_REFERENCES:
                continue
            self._complete(issued, monotonic_ns())  # its callback may come late, after the GIL
            del self.works[key]

    def _computed(self) -> None:
        self.computed_ns = monotonic_ns()

    def _watch_backward(self) -> None:
        """Have the engine tell when computing ends; before DDP's own callback, queued later."""
        if self.in_backward and not self.callback_queued:
            self.callback_queued = True
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP2 does
            try:
                engine.queue_callback(self._computed)
            except RuntimeError:  # a thread without a running graph: then there is no drain
                self.callback_queued = False

    def _issue(
        self, name: int, group_name: str, amount: int, peer: int, begin_ns: int, keep: object
    ) -> _Issued:
        sequence = self.sequences[group_name] = self.sequences.get(group_name, 0) + 1
        return _Issued(
            name=name,
            begin_ns=begin_ns,
            amount=amount,
            group=self.recorder.intern(f"group {group_name}"),
            sequence=sequence,
            peer=peer,
            step=self.recorder.step,
            keep=keep,
        )

    def _make_room(self, table: dict[int, _Issued]) -> dict[int, _Issued]:
        """Return `table` with room in it: the oldest goes, as nobody has waited for it so far."""
        if len(table) >= _PENDING_MAX:
            oldest = table.pop(next(iter(table)))
            if not oldest.has_future:
                self._complete(oldest, oldest.begin_ns)
        return table

    def _complete(self, issued: _Issued, end_ns: int) -> None:
        if issued.done:
            return
        issued.done = True
        self.recorder.record(
            int(Kind.COLLECTIVE),
            int(Lane.COMMUNICATION),
            issued.name,
            issued.begin_ns,
            end_ns,
            issued.amount,
            issued.group,
            issued.sequence,
            issued.peer,
            issued.step,
        )

    def _c10d_kernel(self, operator: str, overload: Any) -> Callable[..., Any]:
        word, payload = _C10D[operator]
        name = self.recorder.intern(word)
        group_at, peer_at = _argument_places(overload)

        def kernel(*args: Any) -> Any:
            begin_ns = monotonic_ns()
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001  # what a redispatch is
                result = overload(*args)
            group = c10d.ProcessGroup.unbox(args[group_at])
            amount = 0 if payload is None else sum(_bytes(args[payload]))
            peer = int(args[peer_at]) if peer_at is not None else -1
            work = _work_of(result)
            issued = self._issue(name, group.group_name, amount, peer, begin_ns, work)
            if work is None:  # monitored_barrier returns when it is over
                self._record_wait(issued, begin_ns)
                return result
            self._make_room(self.works)[id(work)] = issued
            self._watch_future(work, issued)
            self._watch_backward()
            return result

        return kernel

    def _watch_future(self, work: Any, issued: _Issued) -> None:
        """Have the work's future tell when it ends; gloo's send and receive have none."""
        with contextlib.suppress(RuntimeError):
            work.get_future().add_done_callback(functools.partial(self._completed, issued))
            issued.has_future = True

    def _completed(self, issued: _Issued, _: object) -> None:
        self._complete(issued, monotonic_ns())
        thread = threading.get_ident()
        if thread not in self.kept_threads:
            # Python forgets a foreign thread after each call, and maps and unmaps memory to greet
            # it again at the next: 45 us a collective, which stop the main thread too. One
            # reference too many keeps the state of the backend's few threads.
            self.kept_threads.add(thread)
            ctypes.pythonapi.PyGILState_Ensure()

    def _functional_kernel(self, operator: str, overload: Any) -> Callable[..., Any]:
        name = self.recorder.intern(_FUNCTIONAL[operator])
        group_at, peer_at = _argument_places(overload)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            begin_ns = monotonic_ns()
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001  # what a redispatch is
                result = overload(*args, **kwargs)
            peer = int(args[peer_at]) if peer_at is not None else -1
            amount = sum(_bytes(args[0]))
            issued = self._issue(name, _group_name(args[group_at]), amount, peer, begin_ns, None)
            for tensor in _tensors(result):
                self._make_room(self.tensors)[tensor.data_ptr()] = issued
            self._watch_backward()
            return result

        return kernel

    def _wait_tensor_kernel(self, overload: Any) -> Callable[..., Any]:
        def kernel(tensor: torch.Tensor) -> Any:
            issued = self.tensors.pop(tensor.data_ptr(), None)
            begin_ns = self.recorder.begin(int(Kind.WAIT))
            try:
                with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001  # what a redispatch is
                    return overload(tensor)
            finally:
                self._record_wait(issued, begin_ns)

        return kernel

    def _wrap_wait(self) -> None:
        original = c10d.Work.wait

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

        c10d.Work.wait = wait  # type: ignore[method-assign,assignment]  # a hook

    def _wrap_broadcast_coalesced(self) -> None:
        """Record DDP's broadcast of buffers, which comes twice a step, as the one call that it is.

        It waits in C++ for the works that it issues, so that its end is theirs. Dispatched below
        autograd, they pass by our kernels: a kernel in Python costs 100 us amid a step.
        """
        original = dist._broadcast_coalesced  # noqa: SLF001  # what DDP calls
        name = self.recorder.intern("broadcast")

        @functools.wraps(original)
        def broadcast(process_group: Any, tensors: Any, buffer_size: int, src: int = 0) -> Any:
            amount = sum(_bytes(tensors))
            begin_ns = self.recorder.begin(int(Kind.WAIT))
            issued = self._issue(name, process_group.group_name, amount, src, begin_ns, None)
            try:
                with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001  # as a kernel redispatches
                    return original(process_group, tensors, buffer_size, src)
            finally:
                self._record_wait(issued, begin_ns)

        dist._broadcast_coalesced = broadcast  # noqa: SLF001  # what DDP calls

    def _record_wait(self, issued: _Issued | None, begin_ns: int) -> None:
        """Record that the main thread was blocked until now, and for which collective."""
        recorder = self.recorder
        number = int(Kind.WAIT)
        if issued is None:
            recorder.end(number, 0, begin_ns, 0, self.loop.phase)
            return
        end_ns = recorder.begin(self.loop.phase)  # back to the phase around the wait
        recorder.record(
            number,
            int(Lane.MAIN),
            issued.name,
            begin_ns,
            end_ns,
            0,
            issued.group,
            issued.sequence,
            issued.peer,
        )
        self._complete(issued, end_ns)


def _argument_places(overload: Any) -> tuple[int, int | None]:
    """Return where an operator takes its group, and its root or other side if it has one."""
    names = [argument.name for argument in overload._schema.arguments]  # noqa: SLF001  # no public schema
    group = names.index("process_group") if "process_group" in names else names.index("group_name")
    peer = next((names.index(one) for one in _PEER_ARGUMENTS if one in names), None)
    return group, peer


def _work_of(result: Any) -> Any:
    boxed = result[-1] if isinstance(result, (tuple, list)) and result else result
    return c10d.Work.unbox(boxed) if isinstance(boxed, torch.ScriptObject) else None


def _group_name(argument: Any) -> str:
    return argument if isinstance(argument, str) else str(argument.group_name)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _bytes(value: Any) -> Iterator[int]:
    for tensor in _tensors(value):
        yield tensor.numel() * tensor.element_size()
