"""Trains a model on many ranks, and captures the Workload of a model before it trains.

    model, optimizer = paceline.training.prepare(model, optimizer)

`prepare` wraps a model and its optimizer; `engine` is what reduces gradients. `capture.capture`
derives a Workload from one step on fake tensors; `operators` sorts operators into the classes that
`perf` has costs for. All of it needs torch, and is loaded when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.training.options import TrainingOptions
    from paceline.training.out_of_core.training import OutOfCore
    from paceline.training.preparation import prepare
    from paceline.training.prepared import Prepared
    from paceline.training.trainer import Epoch, Trainer

_MODULES = {
    "Epoch": "trainer",
    "OutOfCore": "out_of_core.training",
    "Prepared": "prepared",
    "Trainer": "trainer",
    "TrainingOptions": "options",
    "prepare": "preparation",
}
__all__ = ["Epoch", "OutOfCore", "Prepared", "Trainer", "TrainingOptions", "prepare"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
