"""Sees every collective and message of a PyTorch program at the dispatcher, below every front end.

Kernels on the autograd keys of ``c10d::*`` and ``_c10d_functional::*`` note the call and redispatch
below autograd; waits are seen where the script's works, functional collectives and DDP's broadcasts
of buffers wait. What becomes of a call after it was issued is the matter of `torch_in_flight`.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.native import monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors import torch_operators as operators
from paceline.trace.collectors.torch_groups import GroupRecord
from paceline.trace.collectors.torch_hooks import RecordedKind, around
from paceline.trace.collectors.torch_in_flight import ANY_SOURCE
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import BUFFER_BYTES, COMPLETION_UNKNOWN, MAIN, RECV, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from paceline.trace.collectors.hook_registry import HookRegistry
    from paceline.trace.collectors.torch_hooks import Arguments, Keywords
    from paceline.trace.collectors.torch_in_flight import InFlight, Issued

_LOG = logging.getLogger(__name__)
# What a kernel finds out before the call, and needs after it: the payload, the process group (torch
# has two classes for it) and its record.
_Entered = tuple[operators.Payload, Any, GroupRecord]


class CollectiveRecorder:
    """Puts the hooks in place that see communication, and tells `in_flight` of it."""

    def __init__(self, in_flight: InFlight, hooks: HookRegistry) -> None:
        self.in_flight = in_flight
        self.hooks = hooks
        self.recorder = in_flight.recorder
        self.available = in_flight.available
        self.collectives = RecordedKind(
            Capability.DISPATCHER.value, when_stopped=in_flight.forget_all
        )
        self.waits = RecordedKind(Capability.WORKS.value)
        self._waits = False  # whether the main thread waits for a work
        self.ended_group: Any = None  # the last one that was destroyed

    def install(self) -> None:
        """Put kernels on the dispatcher's autograd keys, and see waits."""
        if Capability.DISPATCHER not in self.available:
            return
        self._install_kernels("c10d", self._kernels("c10d", operators.C10D, self._c10d_kernel))
        functional = self._kernels(
            "_c10d_functional", operators.FUNCTIONAL, self._functional_kernel
        )
        if Capability.FUNCTIONAL_WAIT in self.available:
            wait = internals.operators("_c10d_functional")["wait_tensor"]
            functional["wait_tensor"] = self._wait_tensor_kernel(wait)
        self._install_kernels("_c10d_functional", functional)
        if Capability.WORKS in self.available:
            self._see_waits(internals.c10d().Work)
        if Capability.BUFFER_BROADCAST in self.available:
            self._wrap_broadcast_coalesced()
        self._settle_before_groups_end()

    def close(self) -> None:
        """Let go of the process group that was destroyed."""
        self.ended_group = None

    def _install_kernels(self, namespace: str, kernels: dict[str, Callable[..., Any]]) -> None:
        """Put kernels on the autograd keys of a namespace's operators."""

        def put() -> Callable[[], None]:
            library = torch.library.Library(namespace, "IMPL")
            for name, kernel in kernels.items():
                for key in _autograd_keys():
                    library.impl(name, kernel, key)
            # Kernels live as long as their library, which the registry holds by this.
            return functools.partial(internals.remove_kernels, library)

        self.hooks.add(put)

    def _kernels(
        self,
        namespace: str,
        table: Mapping[str, tuple[str, int | None]],
        make: Callable[[str, Any, operators.Places], Callable[..., Any]],
    ) -> dict[str, Callable[..., Any]]:
        """Return the kernels of a namespace's operators, by name."""
        known = internals.operators(namespace)
        unseen = known.keys() - table.keys() - operators.NOT_COMMUNICATION
        if unseen:  # of a newer torch
            _LOG.warning("these collectives are not recorded: %s", ", ".join(sorted(unseen)))
        kernels = {}
        for name in sorted(table.keys() & known.keys()):
            word, payload = table[name]
            kernels[name] = make(word, known[name], operators.places(known[name], payload))
        return kernels

    def _c10d_kernel(
        self, word: str, overload: Any, places: operators.Places
    ) -> Callable[..., Any]:
        kind, name = operators.kind_of(word), self.recorder.intern(word)
        in_flight, groups = self.in_flight, self.in_flight.groups

        def enter(args: tuple[Any, ...]) -> _Entered | None:
            payload = operators.payload_of(args if places.payload is None else args[places.payload])
            if payload.is_traced:
                return None
            group = internals.unbox_group(args[places.group])
            record = groups.record_of(group)
            if kind is Kind.COLLECTIVE:
                in_flight.enter(name, record, payload)
            return payload, group, record

        def note(entered: _Entered, args: tuple[Any, ...], result: Any, begin_ns: int) -> None:
            payload, group, record = entered
            peer = ANY_SOURCE if word == RECV else -1
            if places.peer is not None:
                peer = int(args[places.peer])
            work = internals.work_of(result)
            issued = in_flight.issue(
                kind,
                name,
                record,
                0 if places.payload is None else payload.size_bytes,
                begin_ns,
                peer=peer,
                tag=0 if places.tag is None else int(args[places.tag]),
                work=work,
            )
            if work is None:  # monitored_barrier returns when it is over
                in_flight.record_wait(issued, begin_ns)
                return
            in_flight.hold_work(work, issued)
            if groups.sees_completion(group, record, payload.device_type):
                in_flight.watch_future(work, issued)
            else:
                in_flight.complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
            in_flight.watch_backward()

        return self._kernel(overload, enter, note)

    def _kernel(
        self,
        overload: Any,
        enter: Callable[[tuple[Any, ...]], _Entered | None],
        note: Callable[[_Entered, tuple[Any, ...], Any, int], None],
    ) -> Callable[..., Any]:
        """Return a kernel that calls `enter`, `overload`, and then `note` with what `enter` gave.

        Most calls only issue. But the first one of an NCCL group makes its communicator, and blocks
        until all ranks have come: `enter` is what the launcher sees of it.
        """
        redispatch = internals.redispatch_of(overload)
        collectives = self.collectives

        def kernel(*args: Any, **kwargs: Any) -> Any:
            begin_ns = monotonic_ns()
            entered = collectives.attempt(enter, args)
            with internals.below_autograd():
                result = redispatch(*args, **kwargs)
            if entered is not None:
                collectives.attempt(note, entered, args, result, begin_ns)
            return result

        internals.calls_the_script(kernel)
        return kernel

    def _functional_kernel(
        self, word: str, overload: Any, places: operators.Places
    ) -> Callable[..., Any]:
        kind, name = operators.kind_of(word), self.recorder.intern(word)

        def enter(args: tuple[Any, ...]) -> _Entered | None:
            payload = operators.payload_of(args[places.payload or 0])
            if payload.is_traced:
                return None
            group = internals.unbox_group(args[places.group])
            record = self.in_flight.groups.record_of(group)
            if kind is Kind.COLLECTIVE:
                self.in_flight.enter(name, record, payload)
            return payload, group, record

        def note(entered: _Entered, args: tuple[Any, ...], result: Any, begin_ns: int) -> None:
            payload, group, record = entered
            issued = self.in_flight.issue(
                *(kind, name, record, payload.size_bytes, begin_ns),
                peer=int(args[places.peer]) if places.peer is not None else -1,
                tag=int(args[places.tag]) if places.tag is not None else 0,
            )
            if not self.in_flight.groups.sees_completion(group, record, payload.device_type):
                self.in_flight.complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
            for tensor in operators.tensors(result):
                self.in_flight.hold_result(tensor, issued)
            self.in_flight.watch_backward()

        return self._kernel(overload, enter, note)

    def _wait_tensor_kernel(self, overload: Any) -> Callable[..., Any]:
        redispatch = internals.redispatch_of(overload)

        def wait(tensor: torch.Tensor) -> Any:
            with internals.below_autograd():
                return redispatch(tensor)

        def before(args: Arguments, _kwargs: Keywords) -> tuple[Issued | None, int] | None:
            (tensor,) = args
            if operators.payload_of(tensor).is_traced:
                return None
            issued = self.in_flight.tensors.pop(internals.tensor_identity(tensor), None)
            if threading.get_ident() != self.in_flight.loop.main_thread:
                return issued, 0  # not the loop that waits
            return issued, self.recorder.begin(int(Kind.WAIT))

        def after(state: tuple[Issued | None, int], *_: Any) -> None:
            issued, begin_ns = state
            if begin_ns:
                self.in_flight.record_wait(issued, begin_ns)
            elif issued is not None:
                self.in_flight.complete(issued, monotonic_ns())

        internals.calls_the_script(wait)
        return around(wait, self.waits, before, after)

    def see_works(self, module: ModuleType) -> None:
        """See the waits for works whose classes a module writes in Python."""
        base = internals.c10d().Work
        for cls in list(vars(module).values()):
            is_work = isinstance(cls, type) and issubclass(cls, base) and cls is not base
            # A call that ran in its caller is recorded as the wait that it is.
            if is_work and "wait" in vars(cls) and getattr(cls, "ran_inline", None) is not True:
                self._see_waits(cls)

    def _see_waits(self, work_class: Any) -> None:
        def before(args: Arguments, _kwargs: Keywords) -> tuple[Issued | None, int] | None:
            if self._waits or threading.get_ident() != self.in_flight.loop.main_thread:
                return None  # part of a wait for several works, or not the loop that waits
            self._waits = True
            issued = self.in_flight.works.get(id(args[0]))
            if issued is not None and issued.kind is not Kind.COLLECTIVE:
                self.in_flight.enter_message(issued)
            return issued, self.recorder.begin(int(Kind.WAIT))

        def after(
            state: tuple[Issued | None, int], _result: Any, args: Arguments, _kwargs: Keywords
        ) -> None:
            self._waits = False
            issued, begin_ns = state
            self.in_flight.record_wait(issued, begin_ns)
            if issued is not None:
                self.in_flight.works.pop(id(args[0]), None)
                if issued.kind is not Kind.COLLECTIVE:
                    self.recorder.leave()

        wait = around(work_class.wait, self.waits, before, after)
        self.hooks.replace(work_class, "wait", wait)

    def _wrap_broadcast_coalesced(self) -> None:
        """Record DDP's broadcast of buffers, which comes twice a step, as the one call that it is.

        It waits in C++ for the works that it issues, so that its end is theirs. Dispatched below
        autograd, they pass by our kernels: a kernel in Python costs 100 us amid a step.
        """
        original = dist._broadcast_coalesced  # noqa: SLF001  # what DDP calls
        name, buffers = self.recorder.intern("broadcast"), self.recorder.intern(BUFFER_BYTES)

        @functools.wraps(original)
        def broadcast(*args: Any, **kwargs: Any) -> Any:
            with internals.below_autograd():
                return original(*args, **kwargs)

        def given(
            process_group: Any, tensors: Any, buffer_size: int, src: int = 0
        ) -> tuple[Any, Any, int]:
            del buffer_size
            return process_group, tensors, src

        def before(args: Arguments, kwargs: Keywords) -> tuple[Issued, int]:
            process_group, tensors, src = given(*args, **kwargs)
            record = self.in_flight.groups.record_of(process_group)
            begin_ns = self.recorder.begin(int(Kind.WAIT))
            payload = operators.payload_of(tensors)
            counted = (begin_ns, begin_ns, payload.size_bytes)
            self.recorder.record(int(Kind.COUNTER), MAIN, buffers, *counted)
            self.in_flight.enter(name, record, payload)
            issued = self.in_flight.issue(
                *(Kind.COLLECTIVE, name, record, payload.size_bytes, begin_ns),
                peer=src,
                tag=self._path_of(process_group, tensors) if payload.device_type == "cpu" else 0,
            )
            if not self.in_flight.groups.sees_completion(
                process_group, record, payload.device_type
            ):
                self.in_flight.complete(issued, monotonic_ns(), COMPLETION_UNKNOWN)
            return issued, begin_ns

        def after(state: tuple[Issued, int], *_: object) -> None:
            self.in_flight.record_wait(*state)

        internals.calls_the_script(broadcast)
        hooked = around(broadcast, self.collectives, before, after)
        self.hooks.replace(dist, "_broadcast_coalesced", hooked)

    def _settle_before_groups_end(self) -> None:
        """Have no callback of ours on a backend's thread when its process group is destroyed.

        The destructor of a group joins these threads. Called by the last reference of a
        DistributedDataParallel, it holds the GIL, for which such a thread may wait to release a
        tensor that was shown to Python. So the last reference is one of Python's, whose destructor
        holds no GIL.
        """

        def before(*_: object) -> None:
            self.in_flight.settle()
            self.ended_group = dist.group.WORLD

        def after(*_: object) -> None:
            """Nothing is recorded."""

        ends = RecordedKind("the last completions of a process group")
        hooked = around(dist.destroy_process_group, ends, before, after)
        for module in (dist, dist.distributed_c10d):
            self.hooks.replace(module, "destroy_process_group", hooked)

    def _path_of(self, process_group: Any, tensors: Any) -> int:
        """Return the name of the path that a broadcast takes; 0 if the group does not say."""
        path_of = getattr(process_group, "broadcast_path", None)
        return self.recorder.intern(path_of(tensors)) if path_of else 0


def _autograd_keys() -> list[str]:
    return ["AutogradCPU", "AutogradCUDA"] if torch.cuda.is_available() else ["AutogradCPU"]
