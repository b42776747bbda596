"""Keeps the steps of an unchanged script within a memory budget: `paceline run --memory-budget`.

Imports torch: a rank's worker imports this module with importlib, after it has set its threads and
cores. The hooks on saved tensors are torch's defaults of the script's main thread; the optimizer
whose step comes first ends the steps, and has its state moved.
"""

from __future__ import annotations

import json
import sys
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.core.files import commit_bytes
from paceline.training.out_of_core.optimizer_files import OptimizerFiles, is_managed
from paceline.training.out_of_core.places import spill_to_file
from paceline.training.out_of_core.saved_tensors import SavedTensors
from paceline.training.out_of_core.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


class ScriptMemory:
    """The memory of one rank that runs a script.

    Args:
        budget_bytes: of this rank's process.
        spill_folder: of the spill file; empty: the folder for temporary files.
        result: the file that says at the end what the steps came to.
        rank: of the process; rank 0 says what is planned.
    """

    def __init__(self, budget_bytes: int, spill_folder: str, result: Path, rank: int) -> None:
        self._result = result
        folder = Path(spill_folder or tempfile.gettempdir())
        self.session = Session(budget_bytes, spill_to_file(folder), _say if rank == 0 else _nothing)
        self._optimizer: OptimizerFiles | None = None
        self._its_optimizer: Callable[[], Optimizer | None] = _nothing_yet
        self._hook = register_optimizer_step_pre_hook(self._before_step)
        SavedTensors(self.session).install()

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # Its own hooks are called after the global ones, in this step already.
        if self._optimizer is None and not is_managed(optimizer):
            self._optimizer = OptimizerFiles(optimizer, self.session)
            self._its_optimizer = weakref.ref(optimizer)
        elif self._optimizer is not None and self._its_optimizer() is optimizer:
            self._optimizer.come_last()

    def close(self) -> None:
        """Write the result. The session ends with the process: saved tensors may still be used."""
        session = self.session
        found = {"version": 1, **session.to_json(), "planned_step": session.planned_step()}
        text = json.dumps(found) + "\n"
        self._result.parent.mkdir(parents=True, exist_ok=True)
        commit_bytes(self._result, text.encode())


def _say(line: str) -> None:
    sys.stderr.write(f"paceline: {line}\n")


def _nothing_yet() -> None:
    return None


def _nothing(_line: str) -> None:
    return None
