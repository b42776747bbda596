"""Captures the Workload of a user's model, in a process of its own, with torch and their code.

The worker of `capture_process`: it answers a CaptureRequest with a CapturedStep. Whatever the
user's code raises, other than a Paceline error, becomes ScriptFailed; its traceback goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import sys
import traceback
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import PacelineError, ScriptFailed, UsageError
from paceline.core.record import nearest
from paceline.core.worker_process import serve
from paceline.training.capture import TrainingStep, capture
from paceline.training.capture_process import CapturedStep, CaptureRequest, StageDivision
from paceline.training.out_of_core.capturing import capture_events
from paceline.training.out_of_core.recompute import recomputable, recomputed
from paceline.training.pipeline.stage_memory import capture_stages
from paceline.training.pipeline.workload import ResizableBatch, capture_layers, resized
from paceline.training.resident_memory import base_bytes

if TYPE_CHECKING:
    from paceline.core.workload import Workload
    from paceline.schedules.memory import StepEvents

FIELDS = tuple(field.name for field in dataclasses.fields(TrainingStep))


def load_function(path: Path, name: str) -> Any:
    """Return the function `name` of the file at `path`, which is run as a module.

    Raises:
        UsageError: the file has no such function.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        own = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        fix = nearest(name, own) if own else "Write one that returns what a training step needs"
        raise UsageError(f"no function '{name}'", where=str(path), fix=fix)
    return function


def to_step(value: Any, where: str) -> TrainingStep:
    """Return what the user's function returned as a TrainingStep.

    Args:
        value: a TrainingStep, a dict with its fields' names, or a tuple in their order.
        where: names the function in errors.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(value, tuple):
        value = dict(zip(FIELDS, value, strict=False))
    if isinstance(value, dict):
        for key in value:
            if key not in FIELDS:
                raise UsageError(f"unknown key '{key}'", where=where, fix=nearest(key, FIELDS))
        if "module" in value and "inputs" in value:
            value = TrainingStep(**value)
    if not isinstance(value, TrainingStep):
        raise UsageError(
            "the function must return what a training step needs",
            where=where,
            fix=f"Return a tuple or dict of {', '.join(FIELDS)}; only the first two are required",
        )
    return value


def run(request: CaptureRequest) -> CapturedStep:
    """Return the Workloads of the requested function's training step.

    Raises:
        UsageError: the function does not exist, or does not return what a training step needs.
        ScriptFailed: the user's code raised.
    """
    target = f"{request.path}:{request.function}"
    try:
        function = load_function(Path(request.path), request.function)
        process_bytes = base_bytes()
        captured = _capture(to_step(function(), target), request)
        return _with_process(captured, process_bytes)
    except PacelineError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise ScriptFailed(
            "the model's code failed",
            where=target,
            why=f"{type(error).__name__}: {error}; its traceback stands above",
            fix="Fix the error; the function must run on its own, without the training script",
        ) from error


def _capture(step: TrainingStep, request: CaptureRequest) -> CapturedStep:
    workload = _own_step(step, request)
    events = capture_events(step) if request.memory else None
    batch = request.batch or workload.batch * request.copies
    splits: dict[tuple[int, bool, int, bool], Workload] = {}
    recomputes = bool(recomputable(step.module))
    keys = [
        (
            split.sizes(batch)[1],
            split.microbatches > 0,
            split.passes,
            split.recompute and recomputes,
        )
        for split in request.splits
    ]
    own = ResizableBatch(step)
    for key in keys:
        if key not in splits:
            splits[key] = _divided(own, request.function, *key)
    return CapturedStep(
        workload=workload,
        batch=batch,
        splits=tuple(splits[key] for key in keys),
        recomputes=recomputes,
        events=events,
        stage_events=_stage_events(step, request.stages) if request.stages else (),
    )


def _divided(
    batch: ResizableBatch, name: str, samples: int, in_stages: bool, passes: int, recompute: bool
) -> Workload:
    """Return the Workload of a part of a batch."""
    part = batch.with_shape(samples)
    if in_stages:
        return capture_layers(part, name=name)
    with recomputed(part.module) if recompute else contextlib.nullcontext():
        return capture(dataclasses.replace(part, accumulation=passes), name=name)


def _own_step(step: TrainingStep, request: CaptureRequest) -> Workload:
    try:
        return capture(step, name=request.function)
    except UsageError:
        if not request.may_run:
            raise
    return capture(step, name=request.function, runs=True)


def _with_process(captured: CapturedStep, process_bytes: int) -> CapturedStep:
    """Return the Workloads with what a process has before its model."""
    return dataclasses.replace(
        captured,
        workload=dataclasses.replace(captured.workload, process_bytes=process_bytes),
        splits=tuple(
            dataclasses.replace(workload, process_bytes=process_bytes)
            for workload in captured.splits
        ),
    )


def _stage_events(step: TrainingStep, division: StageDivision) -> tuple[StepEvents, ...]:
    return capture_stages(
        resized(step, division.batch),
        list(accumulate(division.layers))[:-1],
        microbatches=division.microbatches,
        schedule=division.schedule,
    )


if __name__ == "__main__":
    serve(CaptureRequest, run)
