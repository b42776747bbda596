"""Trains a model out of core: installs the hooks of a session, and takes them away."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.config import environment
from paceline.core.errors import UsageError
from paceline.core.node import memory_bytes
from paceline.training.out_of_core.device import device_bytes
from paceline.training.out_of_core.optimizer_files import OptimizerFiles
from paceline.training.out_of_core.places import offload_to_host, spill_to_file
from paceline.training.out_of_core.recompute import Recomputing
from paceline.training.out_of_core.saved_tensors import SavedTensors, check_no_budget
from paceline.training.out_of_core.session import Session
from paceline.training.out_of_core.step_order import CPU

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from typing import Self

    import torch
    from torch import nn

    from paceline.schedules.memory import MemoryPlan
    from paceline.training.out_of_core.places import Place

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
        model: on CPU, or all of it on one GPU.
        optimizer: of its parameters; hooks that other code registers before its steps must be
            registered already. One step of it ends one step of the training.
        budget_bytes: that the process's memory stays under, without pages of files; None: what the
            control group of the process allows, or the machine has, divided among the node's ranks
            (``LOCAL_WORLD_SIZE``). On a GPU: that its tensors there stay under; None: what is free.
        spill_folder: of the file that tensors are spilled to, on a local disk; None: the folder for
            temporary files (``TMPDIR``). Tensors of a GPU go to pinned memory of the host.
        recompute: whether layers may be computed again in place of keeping what they save.
        say: is called with each line for the user.
        place: where it trains and where tensors go, in place of what `spill_folder` and the model's
            device say.

    Raises:
        UsageError: the model is on several devices, or neither on CPU nor on a GPU; the budget is
            no positive number; or there is a memory budget already: of this thread (``paceline run
            --memory-budget``) or of the optimizer.
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
        place: Place | None = None,
    ) -> None:
        device = _device_of(model)
        if device.type != "cpu" and spill_folder is not None:
            raise UsageError(
                f"tensors on {device} go to the memory of the host, to no folder",
                where="OutOfCore",
                fix="Leave out spill_folder",
            )
        if budget_bytes is None:
            budget_bytes = _default_budget_bytes(device)
        if budget_bytes <= 0:
            raise UsageError(
                f"the memory budget must be above 0 bytes, got {budget_bytes}",
                where="OutOfCore",
                fix="Give the bytes that a process may take",
            )
        check_no_budget()  # a second session would take the first one's pool
        if place is None and device.type == "cpu":
            place = spill_to_file(Path(spill_folder or tempfile.gettempdir()))
        self.session = Session(budget_bytes, place or offload_to_host(device), say or _nothing)
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
            self.session.planning.recompute = self._recomputing.apply

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


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of a model.

    Raises:
        UsageError: it has several, or another kind than a session knows.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if not devices:
        return CPU
    device = min(devices, key=str)
    if len(devices) > 1 or device.type not in ("cpu", "cuda"):
        names = ", ".join(sorted(map(str, devices)))
        raise UsageError(
            f"a memory budget is for a model on CPU or on one GPU, and this one is on {names}",
            where="OutOfCore",
            fix="Move the model, or train without a memory budget",
        )
    return device


def _default_budget_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return int(device_bytes(device) * LIMIT_PART)
    ranks = environment().get("LOCAL_WORLD_SIZE", "")  # on this node, which they share
    return int(memory_bytes() * LIMIT_PART) // (int(ranks) if ranks else 1)


def _nothing(_line: str) -> None:
    return None
