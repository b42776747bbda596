"""Counts the distinct operators of a real step, and times each the first time that it is called.

Timing at the first call needs the inputs of one operator at a time, not those of the whole step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.measured_step import OperatorCalls, OperatorTime
from paceline.training.measured.calls import is_bookkeeping, is_repeatable, signature_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from paceline.core.machine import Phase


class CallRecorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed for us
    """Records the operators of a step.

    Args:
        known: times of operators by signature: these are not timed again.
        time_call: returns the time of a call of (operator, args, kwargs).

    Attributes:
        phase: of the step that runs; None: operators are not counted.
    """

    def __init__(
        self,
        known: Mapping[str, OperatorTime],
        time_call: Callable[[Any, Any, Any], OperatorTime | None],
    ) -> None:
        super().__init__()
        self.phase: Phase | None = None
        self._known = known
        self._time_call = time_call
        self._times: dict[str, OperatorTime | None] = {}
        self._counts: dict[tuple[Phase, str], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.phase is not None and not is_bookkeeping(func):
            signature = signature_of(func, args, kwargs)
            if signature not in self._times:
                self._times[signature] = self._known.get(signature) or self._timed(
                    func, args, kwargs
                )
            key = (self.phase, signature)
            self._counts[key] = self._counts.get(key, 0) + 1
        return func(*args, **kwargs)

    def _timed(self, func: Any, args: Any, kwargs: Any) -> OperatorTime | None:
        return self._time_call(func, args, kwargs) if is_repeatable(func) else None

    def calls(self) -> tuple[OperatorCalls, ...]:
        """Return the distinct operators of the recorded step, in order of their first call."""
        return tuple(
            OperatorCalls(phase, signature, count, self._times[signature])
            for (phase, signature), count in self._counts.items()
        )
