"""Calls back when a module is first imported: what a script may never use stays unloaded."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from paceline.trace.collectors import torch_internals as internals

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    Attempt = Callable[[Callable[..., None], object], object]


def on_import(name: str, callback: Callable[[ModuleType], None], attempt: Attempt) -> None:
    """Call `callback` with the module `name` when it has been imported, or now if it has been.

    Args:
        name: of the module, with its packages'.
        callback: what is called with it.
        attempt: calls what it is given first with what it is given next, and lets no exception
            pass: the import goes on. `RecordedKind.attempt` is one.
    """
    if name in sys.modules:
        attempt(callback, sys.modules[name])
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
            self.attempt(self._follow, spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module  # this loader is this module's own
        loader.exec_module = functools.partial(_execute, execute, self.callback, self.attempt)


def _execute(
    execute: Callable[[ModuleType], None],
    callback: Callable[[ModuleType], None],
    attempt: Attempt,
    module: ModuleType,
) -> None:
    execute(module)
    attempt(callback, module)


internals.calls_the_script(_execute)
