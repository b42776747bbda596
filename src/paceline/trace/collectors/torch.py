"""Records what an unchanged PyTorch script does: phases of its loop, and every collective.

Phases are seen where a script meets torch: the DataLoader's iterator, the outermost module call,
`torch.autograd.backward`, optimizers, `torch.save`. Collectives are seen at the dispatcher
(collectives.py), below every front end. Nothing that the script can ask about changes.

Forward lasts from the call of the outermost module until backward starts, so that it includes the
loss. Times are the host's: work that a device still has queued counts where the host waits for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.native import monotonic_ns
from paceline.trace.collectors.torch_collectives import CollectiveRecorder, Loop
from paceline.trace.events import IDLE, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

    from paceline.native import Recorder

_OUTSIDE = IDLE
_OPTIMIZER = int(Kind.OPTIMIZER)
# What torch wraps around the step of each class of optimizers; all wrappers share its code.
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__


class TorchCollector:
    """Hooks into torch once per process; `install` before the script runs, `close` after it."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.loop = Loop(main_thread=threading.get_ident())
        self.loss_begin_ns = 0  # end of the last training forward, when nothing came after it
        self.stepped_in_backward = False
        self.collectives = CollectiveRecorder(recorder, self.loop)

    def install(self) -> None:
        """Put the hooks in place."""
        self._wrap(_BaseDataLoaderIter, "__next__", Kind.INPUT, "next")
        self._wrap(DataLoader, "__iter__", Kind.INPUT, "iter")
        self._wrap(torch.optim.Optimizer, "zero_grad", Kind.OPTIMIZER, "zero_grad")
        self._wrap(torch.nn.Module, "zero_grad", Kind.OPTIMIZER, "zero_grad")
        self._wrap(torch.nn.utils, "clip_grad_norm_", Kind.OPTIMIZER, "clip_grad_norm")
        self._wrap(torch, "save", Kind.CHECKPOINT, "save", amount=_saved_bytes)
        self._wrap(torch.nn.Module, "__call__", Kind.FORWARD, "forward", after=self._await_loss)
        self._wrap_backward()
        for name in ("to", "cpu", "cuda", "copy_"):
            if hasattr(torch.Tensor, name):
                self._wrap_copy(name)
        self._hook_optimizers()
        self.collectives.install()
        sys.meta_path.insert(0, _OnImport("torch.distributed.checkpoint", self._wrap_checkpoint))
        sys.meta_path.insert(0, _OnImport("paceline.store.feed.loader", self._wrap_loader))

    def close(self) -> None:
        """Record what is still open, and the memory high-water mark of an accelerator."""
        self.collectives.close()
        if torch.cuda.is_initialized():  # pragma: no cover - needs a GPU
            name = self.recorder.intern("device_peak_memory_bytes")
            now = self.recorder.begin(_OUTSIDE)
            peak = torch.cuda.max_memory_allocated()
            self.recorder.record(Kind.COUNTER, 0, name, now, now, peak)

    def _opens(self, number: int) -> bool:
        """Return whether a call opens a phase, rather than being part of one that is open.

        What a loader calls is input, and what is computed again inside backward is backward; but
        an optimizer may call a closure that runs the model.
        """
        if self.loop.phase != _OUTSIDE and (self.loop.phase != _OPTIMIZER or number == _OPTIMIZER):
            return False
        return threading.get_ident() == self.loop.main_thread

    def _await_loss(self, end_ns: int) -> None:
        self.loss_begin_ns = end_ns if torch.is_grad_enabled() else 0

    def _wrap(
        self,
        owner: Any,
        attribute: str,
        kind: Kind,
        label: str,
        *,
        amount: Callable[..., int] | None = None,
        after: Callable[[int], None] | None = None,
    ) -> None:
        """Replace a callable by one that records its outermost calls on the main thread."""
        original = getattr(owner, attribute)
        recorder, number, name = self.recorder, int(kind), self.recorder.intern(label)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._opens(number):
                return original(*args, **kwargs)
            outer, self.loop.phase = self.loop.phase, number
            self.loss_begin_ns = 0
            begin_ns = recorder.begin(number)
            try:
                return original(*args, **kwargs)
            finally:
                self.loop.phase = outer
                size = amount(*args, **kwargs) if amount else 0
                end_ns = recorder.end(number, name, begin_ns, size, outer)
                if after and outer == _OUTSIDE:
                    after(end_ns)

        setattr(owner, attribute, timed)

    def _wrap_backward(self) -> None:
        original = torch.autograd.backward
        recorder, number = self.recorder, int(Kind.BACKWARD)
        backward_name, loss_name = recorder.intern("backward"), recorder.intern("loss")

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if not self._opens(number):
                return original(*args, **kwargs)
            outer, self.loop.phase = self.loop.phase, number
            begin_ns = recorder.begin(number)
            if self.loss_begin_ns:
                forward, since_ns = int(Kind.FORWARD), self.loss_begin_ns
                recorder.record(forward, 0, loss_name, since_ns, begin_ns)
                self.loss_begin_ns = 0
            self.collectives.enter_backward()
            try:
                return original(*args, **kwargs)
            finally:
                self.loop.phase = outer
                recorder.end(number, backward_name, begin_ns, 0, outer)
                self.collectives.leave_backward()
                if self.stepped_in_backward:
                    self.stepped_in_backward = False
                    recorder.end_step()

        torch.autograd.backward = backward

    def _wrap_copy(self, attribute: str) -> None:
        """Record copies between devices; one within a device is not a copy in our sense."""
        original = getattr(torch.Tensor, attribute)
        recorder, name = self.recorder, self.recorder.intern(f"copy {attribute}")
        number = int(Kind.COPY)

        @functools.wraps(original)
        def copied(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self.loop.phase in (number, int(Kind.INPUT)):
                return original(tensor, *args, **kwargs)
            begin_ns = monotonic_ns()
            result = original(tensor, *args, **kwargs)
            source = args[0] if attribute == "copy_" and args else tensor
            if (
                getattr(source, "device", None) != result.device
                and threading.get_ident() == self.loop.main_thread
            ):
                size = result.numel() * result.element_size()
                recorder.end(number, name, begin_ns, size, self.loop.phase)
            return result

        setattr(torch.Tensor, attribute, copied)

    def _hook_optimizers(self) -> None:
        recorder = self.recorder
        name = recorder.intern("step")
        # An optimizer may step others inside its own step.
        open_steps: list[tuple[int, int]] = []

        def before(*_: Any) -> None:
            if threading.get_ident() != self.loop.main_thread:
                return
            if open_steps and (outer_count := _steps_on_stack() - 1) < len(open_steps):
                self.loop.phase = open_steps[outer_count][1]  # that step raised, the script went on
                del open_steps[outer_count:]
            open_steps.append((recorder.begin(_OPTIMIZER), self.loop.phase))
            self.loop.phase = _OPTIMIZER
            self.loss_begin_ns = 0

        def after(*_: Any) -> None:
            if threading.get_ident() != self.loop.main_thread or not open_steps:
                return
            begin_ns, self.loop.phase = open_steps.pop()
            if open_steps:
                return
            recorder.end(_OPTIMIZER, name, begin_ns, 0, self.loop.phase)
            if self.loop.phase == int(Kind.BACKWARD):  # a step per parameter, as gradients come
                self.stepped_in_backward = True
            else:
                recorder.end_step()

        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)

    def _wrap_checkpoint(self, module: ModuleType) -> None:
        for attribute in ("save", "async_save"):
            if hasattr(module, attribute):
                self._wrap(module, attribute, Kind.CHECKPOINT, f"checkpoint {attribute}")

    def _wrap_loader(self, module: ModuleType) -> None:
        """Count waiting for the store's loader as input, and what it left out as a counter."""
        iterator, recorder = module.LoaderIterator, self.recorder
        skipped_name, skipped = recorder.intern("loader_skipped_samples"), 0

        def delivered(batches: Any) -> int:
            nonlocal skipped
            if batches.skipped_count != skipped:
                skipped, now_ns = batches.skipped_count, monotonic_ns()
                recorder.record(Kind.COUNTER, 0, skipped_name, now_ns, now_ns, skipped)
            return int(batches.delivered_bytes)

        self._wrap(iterator, "__next__", Kind.INPUT, "next", amount=delivered)
        self._wrap(module.Loader, "__iter__", Kind.INPUT, "iter")


def _steps_on_stack() -> int:
    """Return how many optimizers are in their step right now, the calling one included."""
    count = 0
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  # the stack is what is asked for
    while frame is not None:
        count += frame.f_code is _STEP_CODE
        frame = frame.f_back
    return max(1, count)


def phase_of(error: BaseException) -> str:
    """Return the phase in which `error` was raised, or nothing if it was between phases."""
    frames = error.__traceback__
    while frames is not None:
        frame = frames.tb_frame
        if frame.f_code.co_filename == __file__ and "number" in frame.f_locals:
            return Kind(frame.f_locals["number"]).name.lower()
        frames = frames.tb_next
    return ""


def _saved_bytes(_: object, target: object = None, *__: object, **___: object) -> int:
    """Return the size of the file that `torch.save` wrote; 0 for a stream."""
    try:
        return os.stat(target).st_size if isinstance(target, (str, os.PathLike)) else 0  # noqa: PTH116  # str or path
    except OSError:
        return 0


class _OnImport(importlib.abc.MetaPathFinder):
    """Calls back when a module is first imported: what a script may never use stays unloaded."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Find `name` as everybody else does, but call back after it is executed."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute, callback = spec.loader.exec_module, self.callback

        def exec_module(module: ModuleType) -> None:
            execute(module)
            callback(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader is this module's own
        return spec
