"""Measures a step in a process of its own, with torch and the user's code; see `protocol`.

Ranks that share a node measure at the same time: each runs whole steps in step with the others, and
times each operator while they time the same one, so that what they share (memory bandwidth, cache,
cores) is in the times.
"""

from __future__ import annotations

import functools
import os
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core import node
from paceline.core.errors import PacelineError, ScriptFailed
from paceline.core.foreign_cpu import cpu_use
from paceline.core.measured_step import MeasuredPhase, MeasuredStep, OperatorCalls
from paceline.core.worker_process import serve
from paceline.training.capture_worker import load_function, to_step
from paceline.training.measured.protocol import CpuSpan, StepAnswer, StepRequest
from paceline.training.measured.recording import CallRecorder
from paceline.training.measured.steps import (
    PHASES,
    WholeSteps,
    make_runner,
    run_round,
)
from paceline.training.measured.timing import time_call
from paceline.training.operators import bytes_of, tensors_in
from paceline.training.resident_memory import base_bytes, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.foreign_cpu import CpuUse
    from paceline.core.machine import Phase
    from paceline.training.capture import TrainingStep
    from paceline.training.measured.steps import StepRunner

_COLD_BYTES = 48 << 20  # where the kernel does not name a cache


def run(request: StepRequest) -> StepAnswer:
    """Return the measurement that `request` asks for.

    Raises:
        UsageError: the function does not return what a training step needs.
        ScriptFailed: the user's code raised.
    """
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    torch.set_num_threads(request.threads)
    if request.ranks > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{request.store}",
            rank=request.rank,
            world_size=request.ranks,
            timeout=timedelta(seconds=request.deadline_s),
        )
    target = f"{request.path}:{request.function}"
    try:
        function = load_function(Path(request.path), request.function)
        base = base_bytes()
        return _measure(to_step(function(), target), request, base)
    except PacelineError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ScriptFailed(
            "the model's code failed",
            where=target,
            why=f"{type(error).__name__}: {error}; its traceback stands above",
            fix="Fix the error, or plan with --compute rates, which does not run the step",
        ) from error
    finally:
        if request.ranks > 1:
            dist.destroy_process_group()


def _measure(step: TrainingStep, request: StepRequest, base: int) -> StepAnswer:
    synchronize: Callable[[], None] = dist.barrier if request.ranks > 1 else lambda: None
    agree = _leading if request.ranks > 1 else float
    runner, times = make_runner(step), WholeSteps()
    begin = cpu_use()
    round_ = functools.partial(
        run_round, runner, times, round_s=request.round_s, synchronize=synchronize, agree=agree
    )
    round_()
    peak_bytes = resident_bytes("VmHWM")
    operators = _operators(runner, request, synchronize)
    round_()
    cpu = _span(begin, cpu_use())
    measured = MeasuredStep(
        torch=str(torch.__version__),
        threads=request.threads,
        processes=request.ranks,
        allocator=request.allocator,
        phases={
            phase: _phase(operators, phase, times.phase(number))
            for number, phase in enumerate(PHASES)
        },
        operators=operators,
        peak_bytes=peak_bytes,
        base_bytes=base,
        whole_steps=len(times.steps()),
    )
    return StepAnswer(
        step=measured, whole_s=tuple(sum(seconds) for seconds in times.steps()), cpu=cpu
    )


def _operators(
    runner: StepRunner, request: StepRequest, synchronize: Callable[[], None]
) -> tuple[OperatorCalls, ...]:
    """Return the operators of one more step, each timed at its first call."""
    cold_bytes = _cold_bytes(runner)

    def timed(function: Any, args: Any, kwargs: Any) -> Any:
        synchronize()
        return time_call(function, args, kwargs, cold_bytes=cold_bytes, budget_s=request.budget_s)

    recorder = CallRecorder(request.known, timed)

    def phase(name: Phase | None) -> None:
        recorder.phase = name

    runner.phase = phase
    try:
        with recorder:
            runner.run()
    finally:
        runner.phase = lambda _: None
    return recorder.calls()


def _cold_bytes(runner: StepRunner) -> int:
    """Return the bytes that a step touches, at most twice the cache."""
    parameters = bytes_of(list(runner.step.module.parameters()))
    state = bytes_of(tensors_in(list(runner.optimizer.state.values()))) if runner.optimizer else 0
    activations = max(0, resident_bytes("VmHWM") - resident_bytes("VmRSS"))
    touched = 2 * parameters + state + bytes_of(tensors_in(runner.step.inputs)) + activations
    return min(touched, 2 * (node.cache_bytes() or _COLD_BYTES // 2))


def _phase(
    operators: tuple[OperatorCalls, ...], phase: Phase, whole: tuple[float, float, float]
) -> MeasuredPhase:
    operators_s = sum(
        equal.calls * equal.time.seconds
        for equal in operators
        if equal.phase == phase and equal.time is not None
    )
    middle_s, low_s, high_s = whole
    return MeasuredPhase(
        operators_s=operators_s, residual_s=middle_s - operators_s, low_s=low_s, high_s=high_s
    )


def _leading(value: float) -> float:
    shared = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(shared, 0)
    return float(shared)


def _span(begin: CpuUse | None, end: CpuUse | None) -> CpuSpan | None:
    if begin is None or end is None:
        return None
    return CpuSpan(
        span_s=end.at_s - begin.at_s,
        busy_s=end.busy_s - begin.busy_s,
        own_s=end.own_s - begin.own_s,
    )


if __name__ == "__main__":
    serve(StepRequest, run)
