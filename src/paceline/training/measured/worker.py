"""Measures a step in a process of its own, with torch and the user's code; see `protocol`.

Ranks that share a node measure at the same time: each runs whole steps in step with the others, and
times each operator while they time the same one, so that what they share (memory bandwidth, cache,
cores) is in the times.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import statistics
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core import node
from paceline.core.affinity import allowed_cores, bind_threads
from paceline.core.errors import PacelineError, ScriptFailed
from paceline.core.foreign_cpu import cpu_use
from paceline.core.measured_step import MeasuredPhase, OperatorCalls, StepMeasurement
from paceline.core.worker_process import serve
from paceline.training.capture_worker import load_function, to_step
from paceline.training.measured.protocol import CpuSpan, FormsAnswer, StepAnswer, StepRequest
from paceline.training.measured.recording import CallRecorder
from paceline.training.measured.steps import (
    LEAST_STEPS,
    PHASES,
    WholeSteps,
    formed,
    make_runner,
    run_round,
)
from paceline.training.measured.timing import time_call
from paceline.training.operators import bytes_of, tensors_in
from paceline.training.pipeline.workload import ResizableBatch
from paceline.training.resident_memory import base_bytes, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.foreign_cpu import CpuUse
    from paceline.core.machine import Phase
    from paceline.training.capture import TrainingStep
    from paceline.training.measured.steps import StepRunner

FORM_ROUNDS = 4  # of which the first is one step
SLOW_FORM = 2.0  # times the fastest one's step: a form that runs no further rounds
REDUCED_BYTES = 25 << 20  # at most: DDP's bucket
REDUCTIONS = 12  # in each of two rounds, as the machine drifts
_COLD_BYTES = 48 << 20  # where the kernel does not name a cache


def run(request: StepRequest) -> StepAnswer | FormsAnswer:
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
        if request.forms:
            return _measure_forms(lambda: to_step(function(), target), request)
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
    synchronize, agree = _together(request)
    runner, times = make_runner(step), WholeSteps()
    begin = cpu_use()
    round_ = functools.partial(
        run_round,
        runner,
        times,
        round_s=request.round_s,
        synchronize=synchronize,
        agree=agree,
        meet=_meeting(request),
    )
    reduced_bytes = _reduced_bytes(step, request)
    round_()
    peak_bytes = resident_bytes("VmHWM")
    reductions_s = _reductions_s(reduced_bytes)
    operators = _operators(runner, request, synchronize)
    round_()
    reductions_s += _reductions_s(reduced_bytes)
    cpu = _span(begin, cpu_use())
    answer = _answer(request, request.threads, operators, times, cpu)
    step_ = dataclasses.replace(
        answer.step,
        reduced_bytes=reduced_bytes,
        reduced_s=statistics.median(reductions_s) if reductions_s else 0.0,
        peak_bytes=peak_bytes,
        base_bytes=base,
    )
    return dataclasses.replace(answer, step=step_)


def _answer(
    request: StepRequest,
    threads: int,
    operators: tuple[OperatorCalls, ...],
    times: WholeSteps,
    cpu: CpuSpan | None,
) -> StepAnswer:
    measured = StepMeasurement(
        torch=str(torch.__version__),
        threads=threads,
        processes=request.ranks,
        allocator=request.allocator,
        phases={
            phase: _phase(operators, phase, times.phase(number))
            for number, phase in enumerate(PHASES)
        },
        operators=operators,
        whole_steps=len(times.steps()),
    )
    return StepAnswer(
        step=measured,
        whole_s=tuple(sum(seconds) for seconds in times.steps()),
        met_s=tuple(times.met_s),
        cpu=cpu,
    )


def _measure_forms(make: Callable[[], TrainingStep], request: StepRequest) -> FormsAnswer:
    """Time the whole steps of each form, in turn: what changes meanwhile changes for all."""
    synchronize, agree = _together(request)
    batch = ResizableBatch(make())
    runners = [make_runner(formed(make(), form, batch)) for form in request.forms]
    times = [WholeSteps() for _ in runners]
    spans: list[list[CpuSpan | None]] = [[] for _ in runners]
    waiting = list(range(len(runners)))
    for turn in range(FORM_ROUNDS):
        for number in waiting:
            bind_threads(request.cores_of_forms[number])
            torch.set_num_threads(request.forms[number].threads)
            begin = cpu_use()
            run_round(
                runners[number],
                times[number],
                round_s=request.round_s if turn else 0.0,
                synchronize=synchronize,
                agree=agree,
                least=LEAST_STEPS if turn else 1,
                meet=_meeting(request) if turn else None,
            )
            spans[number].append(_span(begin, cpu_use()))
        step_s = [agree(own.step_s()) for own in times]
        waiting = [n for n in waiting if step_s[n] <= SLOW_FORM * min(step_s)]
    return FormsAnswer(
        forms=tuple(
            _answer(request, form.threads, (), own, _sum(span))
            for form, own, span in zip(request.forms, times, spans, strict=True)
        )
    )


def _together(request: StepRequest) -> tuple[Callable[[], None], Callable[[float], float]]:
    """Return what waits for the other ranks, and what returns the value of rank 0."""
    return (dist.barrier, _leading) if request.ranks > 1 else (lambda: None, float)


def _reduced_bytes(step: TrainingStep, request: StepRequest) -> int:
    """Return the bytes of an all-reduce like those of the step; 0 if it has none."""
    if request.ranks == 1:
        return 0
    trained = (value for value in step.module.parameters() if value.requires_grad)
    return min(REDUCED_BYTES, sum(map(bytes_of, trained)) & ~3)


def _reductions_s(size_bytes: int) -> list[float]:
    """Return the seconds of all-reduces, one after the other as the probe times them."""
    if not size_bytes:
        return []
    data = torch.zeros(size_bytes // 4)
    dist.barrier()
    dist.all_reduce(data)
    seconds = []
    for _ in range(REDUCTIONS):
        begin = time.perf_counter()
        dist.all_reduce(data)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _meeting(request: StepRequest) -> Callable[[], None] | None:
    """Return what lets ranks meet within a step, if they outnumber the cores; else None.

    Where each has cores of its own, a meeting takes what its collective takes.
    """
    if request.ranks <= len(allowed_cores()):
        return None
    number = torch.zeros(1)
    return lambda: dist.all_reduce(number)


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


def _sum(spans: Sequence[CpuSpan | None]) -> CpuSpan | None:
    known = [span for span in spans if span is not None]
    if not known:
        return None
    return CpuSpan(
        span_s=sum(span.span_s for span in known),
        busy_s=sum(span.busy_s for span in known),
        own_s=sum(span.own_s for span in known),
    )


if __name__ == "__main__":
    serve(StepRequest, run)
