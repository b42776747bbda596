"""What the executor of schedules does with buffers: the same four operations on NumPy and torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Arrays(Protocol):
    """Operations on the arrays of one library."""

    def flat(self, buffer: Any) -> Any:
        """Return the buffer in one dimension, on the same memory.

        Raises:
            UsageError: it is not contiguous.
        """

    def scratch(self, like: Any, count: int) -> Any:
        """Return new memory for `count` elements of the dtype, and on the device, of `like`."""

    def combine(self, op: str, target: Any, values: Any) -> None:
        """Reduce `values` into `target`; `op` as in `ScheduleExecutor.run`."""

    def divide(self, target: Any, count: int) -> None:
        """Divide `target` by `count` in place; integers towards zero."""


def arrays_for(buffer: Any) -> Arrays:
    """Return the operations for a buffer's library.

    Raises:
        UsageError: it is neither a NumPy array nor a torch tensor.
    """
    if isinstance(buffer, np.ndarray):
        return NumpyArrays()
    library = type(buffer).__module__.partition(".")[0]
    if library == "torch":  # loaded only where there is a tensor
        arrays: Arrays = importlib.import_module("paceline.collectives.torch_arrays").TorchArrays()
        return arrays
    raise UsageError(
        f"cannot communicate a {type(buffer).__name__}", fix="Give a NumPy array or a torch tensor"
    )


class NumpyArrays:
    """NumPy's arrays."""

    COMBINE: ClassVar[dict[str, Any]] = {
        "sum": np.add,
        "average": np.add,
        "min": np.minimum,
        "max": np.maximum,
        "product": np.multiply,
    }

    def flat(self, buffer: NDArray[Any]) -> NDArray[Any]:
        """Return a view in one dimension."""
        if not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise UsageError(
                f"the array of shape {buffer.shape} is not contiguous or not writeable",
                fix="Pass a contiguous copy, and copy the result back",
            )
        return buffer.reshape(-1)

    def scratch(self, like: NDArray[Any], count: int) -> NDArray[Any]:
        """Return an array with undefined values."""
        return np.empty(count, like.dtype)

    def combine(self, op: str, target: NDArray[Any], values: NDArray[Any]) -> None:
        """Reduce in place."""
        self.COMBINE[op](target, values, out=target)

    def divide(self, target: NDArray[Any], count: int) -> None:
        """Divide in place."""
        if np.issubdtype(target.dtype, np.integer):
            target -= np.fmod(target, count)  # its remainder has the sign of the dividend
            target //= count
        else:
            target /= count
