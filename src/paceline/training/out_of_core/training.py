"""Trains a model out of core: installs the hooks of a session, and takes them away."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.config import environment
from paceline.core.errors import UsageError
from paceline.core.node import memory_bytes
from paceline.training.out_of_core.optimizer_files import OptimizerFiles
from paceline.training.out_of_core.recompute import Recomputing
from paceline.training.out_of_core.saved_tensors import SavedTensors, check_no_budget
from paceline.training.out_of_core.session import Session

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Self

    import torch
    from torch import nn

    from paceline.schedules.memory import MemoryPlan

LIMIT_PART = 0.95  # of a control group's limit: the rest is for the kernel's own memory and pages


class OutOfCore:
    """Keeps the steps of a training within a memory budget, from its construction to `close`.

        with OutOfCore(model, optimizer, budget_bytes=2 << 30):
            for batch, target in loader:
                optimizer.zero_grad()
                loss_fn(model(batch), target).backward()
                optimizer.step()

    A step ends with the optimizer's step; of several backward passes in between the gradients add
    up as always. Gradients and updates are equal to the bit to those of a training in core.

    Args:
        model: on CPU.
        optimizer: of its parameters; hooks that other code registers before its steps must be
            registered already. One step of it ends one step of the training.
        budget_bytes: that the process's memory stays under, without pages of files; None: what the
            control group of the process allows, or the machine has, divided among the node's ranks
            (``LOCAL_WORLD_SIZE``).
        spill_folder: of the file that tensors are spilled to, on a local disk; None: the folder for
            temporary files (``TMPDIR``).
        recompute: whether layers may be computed again in place of keeping what they save.
        say: is called with each line for the user.

    Raises:
        UsageError: the model is not on CPU, the budget no positive number, or there is a memory
            budget already: of this thread (``paceline run --memory-budget``) or of the optimizer.
        StorageError: no file can be made in `spill_folder`, or its files are memory (tmpfs).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        budget_bytes: int | None = None,
        spill_folder: str | os.PathLike[str] | None = None,
        recompute: bool = True,
        say: Callable[[str], None] | None = None,
    ) -> None:
        if budget_bytes is None:
            ranks = environment().get("LOCAL_WORLD_SIZE", "")  # on this node, which they share
            budget_bytes = int(memory_bytes() * LIMIT_PART) // (int(ranks) if ranks else 1)
        if budget_bytes <= 0:
            raise UsageError(
                f"the memory budget must be above 0 bytes, got {budget_bytes}",
                where="OutOfCore",
                fix="Give the bytes that a process may take",
            )
        tensors = [*model.parameters(), *model.buffers()]
        if any(tensor.device.type != "cpu" for tensor in tensors):
            raise UsageError(
                "the model is not on CPU", where="OutOfCore", fix="Train without a memory budget"
            )
        check_no_budget()  # a second session would take the first one's pool
        folder = Path(spill_folder or tempfile.gettempdir())
        self.session = Session(budget_bytes, folder, say or _nothing)
        self._is_closed = False
        self._saved = SavedTensors(self.session)
        try:
            self._saved.install()
            self._optimizer = OptimizerFiles(optimizer, self.session)
        except BaseException:
            self._saved.remove()
            self.session.close()
            raise
        self._recomputing = Recomputing(model, self.session)
        if recompute:
            self.session.recompute = self._recomputing.apply

    @property
    def plan(self) -> MemoryPlan | None:
        """The plan in use; None while steps are recorded."""
        return self.session.plan

    def to_json(self) -> dict[str, Any]:
        """Return what the steps under a plan came to, and the plan in short."""
        return self.session.to_json()

    def close(self) -> None:
        """Bring the optimizer's state back, and train in core from now on."""
        if self._is_closed:
            return
        self._is_closed = True
        self._saved.remove()
        self._recomputing.remove()
        try:
            self._optimizer.remove()
        finally:
            self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _nothing(_line: str) -> None:
    return None
