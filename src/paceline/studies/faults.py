"""Makes the k-th system call of an operation fail, or kill it: fault injection of the campaigns.

The seam is the `os` module: the store writes through `os.write`, `os.fsync`, `os.rename` and their
like, one call each, so that replacing them in this process reaches every call that changes a disk.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WRITING_CALLS = (
    "write",
    "writev",
    "pwrite",
    "pwritev",
    "ftruncate",
    "fsync",
    "fdatasync",
    "rename",
    "replace",
    "link",
)


class Faults:
    """While in its context, does `action` in place of the `at`-th of these calls; counts them all.

    Calls are counted in the order in which they come, whichever thread they come from.

    Args:
        at: which call, from 0; -1 for none.
        action: is given the function and its arguments.
        names: of functions in `os`.
    """

    def __init__(
        self,
        at: int = -1,
        action: Callable[..., Any] | None = None,
        names: Sequence[str] = WRITING_CALLS,
    ) -> None:
        self._at = at
        self._action = action
        self._names = names
        self._lock = threading.Lock()
        self._originals: dict[str, Any] = {}
        self.seen: list[tuple[str, Any]] = []

    @property
    def struck(self) -> bool:
        """Whether the call came."""
        return 0 <= self._at < len(self.seen)

    def __enter__(self) -> Self:
        self._originals = {name: getattr(os, name) for name in self._names}
        for name, function in self._originals.items():
            setattr(os, name, self._wrapped(name, function))
        return self

    def __exit__(self, *problem: object) -> None:
        for name, function in self._originals.items():
            setattr(os, name, function)

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                number = len(self.seen)
                self.seen.append((name, args[0] if args else None))
            if number == self._at and self._action is not None:
                return self._action(function, *args, **kwargs)
            return function(*args, **kwargs)

        return call


def fail_with(code: int) -> Callable[..., Any]:
    """Return an action that fails with this errno."""

    def fail(_function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail
