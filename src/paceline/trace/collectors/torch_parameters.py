"""How many bytes of parameters a run trains: what tells a run of one model from that of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.native import monotonic_ns
from paceline.trace.format.events import TRAINED_BYTES, Kind

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from paceline.native import Recorder


class TrainedParameters:
    """Records the bytes of all parameters that optimizers stepped, when an optimizer first steps.

    Used by the main thread alone.

    Attributes:
        optimizers: the numbers of those that stepped.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._name = recorder.intern(TRAINED_BYTES)
        self.optimizers: set[int] = set()
        self._counted: set[int] = set()  # parameters by identity: one may be in two optimizers
        self._bytes = 0

    def note_first_step(self, optimizer: Optimizer, number: int) -> None:
        """Count the parameters that an optimizer's first step updated."""
        self.optimizers.add(number)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._counted:
                    self._counted.add(id(parameter))
                    self._bytes += parameter.numel() * parameter.element_size()
        now_ns = monotonic_ns()
        self._recorder.record(Kind.COUNTER, 0, self._name, now_ns, now_ns, self._bytes)
