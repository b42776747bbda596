"""Records what an unchanged PyTorch script does: phases of its loop, and every collective.

Phases are seen where a script meets torch (`torch_phases`): the DataLoader's iterator, the
outermost module call, `torch.autograd.backward`, `torch.save`, and optimizers (`torch_steps`).
Where a step may end is marked (`torch_marks`). Other work of the script is seen by name
(`torch_host`) or sampled (`sampler`).
Collectives are seen at the dispatcher (`torch_collectives`), below every front end, and the actions
of a model in stages where our own runtime performs them (`torch_pipeline`). What is not
torch's public interface is in `torch_internals`. Nothing that the script can ask about changes.

Forward lasts from the call of the outermost module until backward starts, so that it includes the
loss. Times are the host's: work that a device still has queued counts where the host waits for it.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
from typing import TYPE_CHECKING

import torch

from paceline.core.on_import import on_import
from paceline.native import Recorder, monotonic_ns
from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.hook_registry import HookRegistry
from paceline.trace.collectors.numbers import ObjectNumbers
from paceline.trace.collectors.sampler import StackSampler
from paceline.trace.collectors.served_data import ServedDataRecorder
from paceline.trace.collectors.torch_collectives import CollectiveRecorder
from paceline.trace.collectors.torch_hooks import Loop, RecordedKind, callback, phase_of
from paceline.trace.collectors.torch_host import HostRecorder
from paceline.trace.collectors.torch_in_flight import InFlight
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.collectors.torch_loaders import LoaderRecorder
from paceline.trace.collectors.torch_marks import StepMarks
from paceline.trace.collectors.torch_memory import MemoryRecorder
from paceline.trace.collectors.torch_phases import PhaseRecorder
from paceline.trace.collectors.torch_pipeline import PipelineRecorder
from paceline.trace.collectors.torch_profiler import ProfilerRecorder
from paceline.trace.collectors.torch_python_groups import PythonGroupRecorder
from paceline.trace.collectors.torch_steps import StepRecorder
from paceline.trace.format.events import IDLE, MAIN, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["TorchCollector", "discarded_recording", "phase_of"]


class TorchCollector:
    """Hooks into torch once per process; `install` before the script runs, `close` after it.

    Args:
        recorder: of the rank.
        profile_steps: steps of which torch.profiler adds operators and kernels.
    """

    def __init__(self, recorder: Recorder, *, profile_steps: int = 0) -> None:
        self.recorder = recorder
        self.loop = Loop(main_thread=threading.get_ident())
        self.available = internals.available()
        self.hooks = HookRegistry()
        self.in_flight = InFlight(recorder, self.loop, self.available)
        self.collectives = CollectiveRecorder(self.in_flight, self.hooks)
        self.python_groups = PythonGroupRecorder(
            self.in_flight, self.hooks, self.collectives.collectives
        )
        self.marks = StepMarks(recorder)
        self.loaders = LoaderRecorder(recorder, self.hooks)
        self.phases = PhaseRecorder(
            *(recorder, self.loop, self.in_flight, self.marks, self.available, self.hooks),
            loader_times=self.loaders,
        )
        self.host = HostRecorder(recorder, self.loop, self.phases)
        self.pipeline = PipelineRecorder(recorder, self.hooks, self.marks)
        self.sampler = StackSampler(recorder, self.loop)
        self.marks.on_first = self.sampler.start
        self.optimizers = ObjectNumbers()
        self.layers = self.phases.layers
        self.memory = MemoryRecorder(recorder, self.phases.modules, self.optimizers)
        self.profiler = ProfilerRecorder(recorder, profile_steps) if profile_steps else None
        self.closer_step = 0.0  # the next step at whose begin or end something is to be done

    def install(self) -> None:
        """Put the hooks in place. What fails is not recorded, and a warning says so."""
        checkpoints = self.phases.recorded(Kind.CHECKPOINT)
        waits = self.phases.recorded(Kind.INPUT)
        RecordedKind("phases of the loop").attempt(self.phases.install)
        if Capability.WORKER_LOOP in self.available:
            RecordedKind(Capability.WORKER_LOOP.value).attempt(self.loaders.install)
        RecordedKind("the script's host work by name").attempt(self.host.install)
        RecordedKind("steps that the script marks").attempt(self.hooks.add, self.marks.listen)
        RecordedKind(Capability.OPTIMIZER_HOOKS.value).attempt(self._see_steps)
        self.marks.on_step.append(self._note_step)
        self.phases.before_backward.append(self._before_backward)
        RecordedKind(Capability.DISPATCHER.value).attempt(self.collectives.install)
        on_import("torch.distributed.checkpoint", self.phases.wrap_checkpoint, checkpoints.attempt)
        on_import(
            "torch._dynamo.callback",
            self.phases.wrap_compilation,
            self.phases.recorded(Kind.COMPILATION).attempt,
        )
        on_import("paceline.store.feed.loader", self.phases.wrap_loader, waits.attempt)
        on_import(
            "paceline.collectives.backend",
            self.python_groups.see_groups,
            self.collectives.collectives.attempt,
        )
        on_import(
            "paceline.collectives.tensor_heap",
            self.python_groups.see_heap,
            self.collectives.collectives.attempt,
        )
        on_import(
            "paceline.training.pipeline.runtime",
            self.pipeline.see_runtime,
            self.pipeline.actions.attempt,
        )
        if Capability.WORKS in self.available:
            on_import(
                "paceline.collectives.works",
                self.collectives.see_works,
                self.collectives.waits.attempt,
            )
        if Capability.DYNAMO_FRAMES in self.available:
            hidden = RecordedKind(Capability.DYNAMO_FRAMES.value)
            hidden.attempt(internals.hide_from_dynamo, __package__)

    def _see_steps(self) -> None:
        StepRecorder(
            self.recorder,
            self.loop,
            self.phases,
            self.marks,
            self.optimizers,
            self.available,
            self.hooks,
        )

    def _note_step(self) -> None:
        """Note that a step ends: most steps are not looked at closely, nor is the next one."""
        if self.recorder.step + 1 < self.closer_step:
            return
        now_ns = monotonic_ns()
        self.layers.timed.attempt(self.layers.end_step, now_ns)
        self.memory.counted.attempt(self.memory.end_step, now_ns)
        if self.profiler is not None:
            self.profiler.profiled.attempt(self.profiler.end_step, now_ns)
        self.closer_step = self._next_closer_step()

    def _next_closer_step(self) -> float:
        # As at the end of the open step: the recorder counts it when all have noted it.
        steps = [self.layers.next_step(), self.memory.next_step()]
        return min([*steps, self.profiler.next_step()] if self.profiler is not None else steps)

    def _before_backward(self) -> None:
        if self.memory.sampling:
            self.memory.counted.attempt(self.memory.before_backward)
        if self.layers.sampling:
            self.layers.timed.attempt(self.layers.before_backward)

    def see_served_data(self, memories: Iterable[str]) -> None:
        """Record what the data servers of this node do.

        Args:
            memories: see `ServedDataRecorder`.
        """
        counters = RecordedKind("what data servers do")

        def install() -> None:
            served = ServedDataRecorder(self.recorder, memories)
            self.marks.on_step.append(callback(counters, served.note))

        counters.attempt(install)

    def pause(self) -> None:
        """Take all hooks out of torch: what comes until `resume` runs, and costs, as unrecorded.

        To be called between steps. What is on its way is recorded with an unknown completion.
        """
        self.in_flight.close()
        self.phases.loss_begin_ns = 0
        self.layers.pause()
        self.memory.pause()
        self.hooks.remove()
        self.sampler.stop()

    def resume(self) -> None:
        """Put the hooks back. The next recorded step seems to begin where the last one ended."""
        self.hooks.put_back()
        self.marks.on_first = self.sampler.start

    def close(self) -> None:
        """Record what is still open, and the memory high-water mark of an accelerator."""
        RecordedKind("the end of sampling").attempt(self.sampler.stop)
        if self.profiler is not None:
            self.profiler.profiled.attempt(self.profiler.close)
        RecordedKind("the end of garbage collections").attempt(self.host.close)
        self.loaders.close()
        RecordedKind("collectives that had not completed").attempt(self.in_flight.close)
        self.collectives.close()
        RecordedKind("the accelerator's peak of memory").attempt(self._note_device_memory)

    def _note_device_memory(self) -> None:
        if torch.cuda.is_initialized():  # pragma: no cover - needs a GPU
            name = self.recorder.intern("device_peak_memory_bytes")
            now = self.recorder.begin(IDLE)
            peak = torch.cuda.max_memory_allocated()
            self.recorder.record(int(Kind.COUNTER), MAIN, name, now, now, peak)


@contextlib.contextmanager
def discarded_recording(rank: int, world_size: int) -> Iterator[None]:
    """Record this process and discard the trace, so that what is timed costs as much as in a run.

    Args:
        rank: of this process.
        world_size: number of ranks.
    """
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(f"{folder}/rank-{rank:05}.trace", rank, world_size)
        collector = TorchCollector(recorder)
        collector.install()
        try:
            yield
        finally:
            collector.pause()
            collector.close()
            recorder.close()
