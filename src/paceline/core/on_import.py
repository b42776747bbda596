"""Calls back when a module is first imported: what a script may never use stays unloaded."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Attempt = Callable[[Callable[[ModuleType], None], ModuleType], object]


def _call(callback: Callable[[ModuleType], None], module: ModuleType) -> None:
    callback(module)


def on_import(name: str, callback: Callable[[ModuleType], None], attempt: Attempt = _call) -> None:
    """Call `callback` with the module `name` when it has been imported, or now if it has been.

    The import fails with what `callback` raises, unless `attempt` lets nothing pass.

    Args:
        name: of the module, with its packages'.
        callback: what is called with it.
        attempt: calls what it is given first with what it is given next; the `attempt` of
            `RecordedKind` is one that lets no exception pass.
    """
    if (module := sys.modules.get(name)) is not None:
        attempt(callback, module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback, attempt))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[ModuleType], None], attempt: Attempt) -> None:
        self.name = name
        self.callback = callback
        self.attempt = attempt
        self.found = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Find `name` as everybody else does, but call back after it is executed."""
        if fullname != self.name or self.found:
            return None
        self.found = True  # the other finders are asked next, and must not be asked through here
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader  # this loader is this module's own
            loader.exec_module = functools.partial(
                _execute, loader.exec_module, self.callback, self.attempt
            )
        return spec


def _execute(
    execute: Callable[[ModuleType], None],
    callback: Callable[[ModuleType], None],
    attempt: Attempt,
    module: ModuleType,
) -> None:
    execute(module)
    attempt(callback, module)
