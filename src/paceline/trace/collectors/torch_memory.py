"""Counts a rank's memory by what holds it, in some steps: parameters, gradients and so on.

Tensors are counted by their storages at the end of a sampled step (`sampled_steps`). What the
forward pass leaves for the backward pass is the memory in use when a backward pass begins, less
that at the end of the step, without gradients. Memory in use is the CUDA allocator's where the
model is on a GPU, else that of the C library's malloc.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from paceline.native import monotonic_ns
from paceline.trace.collectors.sampled_steps import SampledSteps
from paceline.trace.collectors.torch_hooks import RecordedKind
from paceline.trace.format.events import (
    MAIN,
    MEMORY_COUNTERS,
    MEMORY_HOST,
    SAMPLED_MEMORY,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from paceline.native import Recorder
    from paceline.trace.collectors.numbers import ObjectNumbers

SHARE, MOST_NS = 0.0005, 10_000
_COUNTER = int(Kind.COUNTER)


class MemoryRecorder:
    """Used by the main thread alone.

    Args:
        recorder: of the rank.
        models: the modules that the script calls.
        optimizers: those that have stepped.

    Attributes:
        counted: whether memory is counted; it stops when that fails.
        sampling: whether the open step is sampled.
    """

    def __init__(
        self, recorder: Recorder, models: ObjectNumbers, optimizers: ObjectNumbers
    ) -> None:
        self.counted = RecordedKind("memory by what holds it")
        self.sampling = False
        self._recorder = recorder
        self._models = models
        self._optimizers = optimizers
        self._steps = SampledSteps(SHARE, MOST_NS)
        self._names = {kind: recorder.intern(name) for kind, name in MEMORY_COUNTERS.items()}
        self._host_name = recorder.intern(MEMORY_HOST)
        self._cost_name = recorder.intern(SAMPLED_MEMORY)
        self._begin_ns = self._cost_ns = 0
        self._before_backward: int | None = None  # the most in use then, without gradients

    def next_step(self) -> float:
        """Return the first step from the next one on that begins or follows a sampled step."""
        if self.sampling:
            return 0
        return self._steps.next_step(self._recorder.step) if self.counted.on else math.inf

    def end_step(self, now_ns: int) -> None:
        """Note that a step ends now, as a part of it; the next one may be sampled."""
        if self.sampling:
            self.sampling = False
            self._count()
            end_ns = monotonic_ns()
            cost_ns = self._cost_ns + end_ns - now_ns
            self._record(self._cost_name, cost_ns)
            self._steps.note_cost(self._recorder.step, self._begin_ns, cost_ns)
        if self.counted.on and self._steps.is_sampled(self._recorder.step + 1, now_ns):
            self.sampling = True
            self._begin_ns, self._cost_ns, self._before_backward = now_ns, 0, None

    def pause(self) -> None:
        """Forget the open step."""
        self.sampling = False

    def before_backward(self) -> None:
        """Note what is in use when a backward pass begins."""
        begin_ns = monotonic_ns()
        parameters = list(self._parameters())
        in_use = _in_use_bytes(_is_on_gpu(parameters))
        if in_use is not None:
            left = in_use - _storage_bytes(_gradients(parameters), set())
            self._before_backward = max(left, self._before_backward or 0)
        self._cost_ns += monotonic_ns() - begin_ns

    def _count(self) -> None:
        parameters = list(self._parameters())
        counted: set[int] = set()
        sizes = {
            "parameters": _storage_bytes([*parameters, *self._buffers()], counted),
            "gradients": _storage_bytes(_gradients(parameters), counted),
            "optimizer": _storage_bytes(self._states(), counted),
        }
        in_use = _in_use_bytes(_is_on_gpu(parameters))
        held = sum(sizes.values())
        if in_use is not None and in_use >= held:  # else another allocator has the tensors
            sizes["other"] = in_use - held
            if self._before_backward is not None:
                after = in_use - sizes["gradients"]
                sizes["activations"] = max(0, self._before_backward - after)
        for kind, size in sizes.items():
            self._record(self._names[kind], size)
        if anonymous := _anonymous_bytes():
            self._record(self._host_name, anonymous)

    def _record(self, name: int, value: int) -> None:
        now_ns = monotonic_ns()
        self._recorder.record(_COUNTER, MAIN, name, now_ns, now_ns, value)

    def _parameters(self) -> Iterator[torch.Tensor]:
        seen: set[int] = set()
        for parameter in self._all_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter

    def _all_parameters(self) -> Iterator[torch.Tensor]:
        for model in self._models.living():
            yield from model.parameters()
        for optimizer in self._optimizers.living():
            for group in optimizer.param_groups:
                yield from group["params"]

    def _buffers(self) -> Iterator[torch.Tensor]:
        for model in self._models.living():
            yield from model.buffers()

    def _states(self) -> Iterator[torch.Tensor]:
        for optimizer in self._optimizers.living():
            for state in optimizer.state.values():
                if isinstance(state, dict):
                    yield from (part for part in state.values() if isinstance(part, torch.Tensor))


def _gradients(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (parameter.grad for parameter in parameters if parameter.grad is not None)


def _is_on_gpu(parameters: list[torch.Tensor]) -> bool:
    return any(parameter.is_cuda for parameter in parameters[:1])


def _storage_bytes(tensors: Iterable[torch.Tensor], counted: set[int]) -> int:
    """Return the bytes of the tensors' storages without those that are counted, and count them.

    A storage that was emptied, as those of sharded parameters between their uses, has none.
    """
    total = 0
    for tensor in tensors:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's size is that of all ranks
        if local.is_meta or local.layout is not torch.strided:
            continue
        storage = local.untyped_storage()
        key = storage._cdata  # noqa: SLF001  # a storage has no other identity
        if key not in counted:
            counted.add(key)
            total += storage.nbytes()
    return total


def _in_use_bytes(on_gpu: bool) -> int | None:
    """Return the bytes that the allocator has given out; None if it cannot be asked."""
    if on_gpu:  # pragma: no cover - needs a GPU
        return int(torch.cuda.memory_allocated())
    ask = _mallinfo()
    if ask is None:  # pragma: no cover - not glibc
        return None
    found = ask()
    return int(found.uordblks + found.hblkhd)


class _Mallinfo(ctypes.Structure):
    """What glibc's mallinfo2 returns (malloc/malloc.h)."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@functools.cache
def _mallinfo() -> Callable[[], Any] | None:
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is not None:
        ask.restype = _Mallinfo
    return ask


def _anonymous_bytes() -> int:
    """Return the resident anonymous memory of this process; 0 if the kernel does not say."""
    for line in Path("/proc/self/status").read_bytes().splitlines():
        if line.startswith(b"RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0
