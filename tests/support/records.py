"""Golden files of records: one example for each class and version.

``python -m support.records`` writes the golden files that are missing for the current versions. It
never changes a file that is there: an old golden file stands for the files that users have kept.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import types
import typing
from pathlib import Path

import paceline
from paceline.core.machine import Quantity
from paceline.core.record import Record
from paceline.core.worker_process import WorkerMessage
from paceline.scheduler.job import Job
from paceline.schedules import Transfer
from paceline.schedules.memory import ManagedTensor
from paceline.schedules.pipeline import LayerEdge, PipelineAction

GOLDEN = Path(__file__).parents[1] / "golden" / "records"
# Fields whose values are checked: what the type alone would give is refused.
VALUES = {
    "BlameRules": {},
    "FrameworkOverhead": {
        "framework": "ddp",
        "what": "wrapper",
        "phase": "forward",
        "threads": 1,
        "processes": 2,
        "seconds": Quantity(value=1e-4, source="probe", low=9e-5, high=2e-4),
    },
    "Mesh": {"data": 2, "pipeline": 1, "tensor": 1},
    "Efficiency": {
        name: Quantity(value=0.7, source="fit", low=0.6, high=0.8, reference="12 measured steps")
        for name in (
            *("matmul", "attention", "bandwidth", "link", "network", "unaligned"),
            "layer_s",
        )
    },
    "Fabric": {
        "topology": "dragonfly",
        "group_nodes": 128,
        "taper": Quantity(value=0.5, source="recalled", reference="a user guide"),
    },
    "Architecture": {
        "name": "llama-7b",
        "layers": 32,
        "hidden": 4096,
        "heads": 32,
        "kv_heads": 8,
        "ffn": 11008,
        "vocab": 32000,
        "sequence": 4096,
        "gated": True,
        "tied": False,
        "rotary": True,
        "biases": False,
    },
    "DeviceOptions": {"kind": "silos", "sample_ms": 1.5, "queue_s": 120.0},
    "ForecastSettings": {"window_steps": 30, "most_share": 2.0, "tail": "pareto", "seed": 7},
    "Injection": {"rank": 1, "late_ms": 20.0, "cause": "compute"},
    "PackOptions": {},
    "LoaderOptions": {},
    "RunConfig": {"ranks": 2, "record": True, "budget": "off"},
    "RankBudget": {
        "rank": 1,
        "compute": "4-6",
        "compute_threads": 3,
        "launch": "4",
        "autograd": "4",
        "communication": "7",
        "loader": "12-14",
        "loader_workers": 3,
        "loader_nice": 10,
    },
    "CpuBudget": {"state": "bound", "allowed": "0-15", "source": "lstopo", "server": "8"},
    "Submission": {
        "job": Job(name="train-1", devices=2, work=5000.0),
        "command": ("python", "train.py"),
        "folder": "/home/user",
        "environ": {"PATH": "/usr/bin"},
        "launcher": "/usr/bin/python3",
        "token": "5f2c",
    },
    "StepProfile": {
        "compute_s": (0.1, 0.2),
        "floor_bytes": (100, 120),
        "tensors": (ManagedTensor("saved tensor 0", "activation", 50, 0, 0, 1),),
    },
    "Schedule": {
        "operation": "reduce",
        "algorithm": "chain",
        "ranks": 2,
        "chunks": 2,
        "root": 0,
        "transfers": (Transfer(0, 1, 0, 0, 1, True), Transfer(1, 1, 0, 1, 2, True)),
    },
    "LayerCosts": {
        "forward_s": (1e-3, 2e-3),
        "backward_s": (2e-3, 4e-3),
        "parameter_bytes": (4096, 8192),
        "activation_bytes": (1024, 2048),
        "edges": (LayerEdge(0, (1,), 1024),),
    },
    "PipelineSchedule": {
        "name": "1f1b",
        "stages": 1,
        "microbatches": 1,
        "rank_of": (0,),
        "actions": ((PipelineAction("forward", 0, 0), PipelineAction("backward", 0, 0)),),
    },
    "Goals": {
        "fast": 1.5,
        "resource_fair": 2.5,
        "accuracy_fair": 3.5,
        "quality": 4.5,
        "floor": 0.5,
        "ceiling": 1.5,
    },
}
# Classes that share their name with another one.
NAMES = {("paceline.store.care.repair", "Finding"): "RepairFinding"}


def record_classes() -> list[type[Record]]:
    """Return every record class of the package, by qualified name."""
    for module in pkgutil.walk_packages(paceline.__path__, "paceline."):
        # Importing the transport would start MPI in this process.
        if module.name.rpartition(".")[2] not in ("__main__", "mpi"):
            try:
                importlib.import_module(module.name)
            except ImportError:  # needs torch, or another framework that is not installed
                continue
    found = []
    waiting = [Record]
    while waiting:
        children = waiting.pop().__subclasses__()
        waiting += children
        # A slotted dataclass is made anew from the class as written: only the second one is used.
        found += [
            child
            for child in children
            if child.__module__.startswith("paceline.")
            and dataclasses.is_dataclass(child)
            and not issubclass(child, WorkerMessage)  # never stored
            and getattr(importlib.import_module(child.__module__), child.__name__, None) is child
        ]
    return sorted(set(found), key=lambda cls: (cls.__name__, cls.__module__))


def golden_name(cls: type[Record], version: int) -> str:
    """Return the name of the golden file of a class and version."""
    name = NAMES.get((cls.__module__, cls.__name__), cls.__name__)
    return f"{name}-v{version}.json"


def example(cls: type[Record]) -> Record:
    """Return a record of the class with a value in every field, the same on every call."""
    hints = typing.get_type_hints(cls)
    given = VALUES.get(cls.__name__)
    if given is not None:
        return cls(**given)
    values = {field.name: _value(hints[field.name], field.name) for field in _fields(cls)}
    return cls(**values)


def _fields(cls: type[Record]) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(cls)  # type: ignore[arg-type]


def _value(hint: typing.Any, name: str) -> typing.Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _value(next(option for option in arguments if option is not type(None)), name)
    if origin is typing.Literal:
        return arguments[0]
    if origin is tuple:
        return (_value(arguments[0], name),)
    if origin is dict:
        return {"key": _value(arguments[1], name)}
    if isinstance(hint, type) and issubclass(hint, Record):
        return example(hint)
    if isinstance(hint, type) and issubclass(hint, tuple):  # a named one
        hints = typing.get_type_hints(hint)
        return hint(**{field: _value(hints[field], field) for field in hints})
    return {bool: True, int: 3, float: 1.5, str: name, typing.Any: name}[hint]


def write_missing() -> list[Path]:
    """Write the golden files of current versions that are not there, and return their paths."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    written = []
    for cls in record_classes():
        path = GOLDEN / golden_name(cls, cls.version)
        if not path.exists():
            text = example(cls).to_text()
            assert cls.from_text(text).to_text() == text
            path.write_text(text)
            written.append(path)
    return written


if __name__ == "__main__":
    for made in write_missing():
        print(made)
