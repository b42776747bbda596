"""Captures the Workload of a user's model, in a process of its own, with torch and their code.

``python -m paceline.training.capture_worker FILE FUNCTION`` writes one JSON object to stdout: the
Workload, or an ``error``. What the user's code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import json
import sys
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError, UsageError
from paceline.core.record import nearest
from paceline.training.capture import TrainingStep, capture

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


def main(path: Path, name: str) -> dict[str, Any]:
    """Return the Workload as JSON data, or the error that prevented it."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            step = to_step(load_function(path, name)(), f"{path}:{name}")
            return capture(step, name=name).to_json()
    except PacelineError as error:
        return error.to_json()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
