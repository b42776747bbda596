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


def on_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback` with the module `name` when it has been imported, or now if it has been."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self.name = name
        self.callback = callback

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Find `name` as everybody else does, but call back after it is executed."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = functools.partial(_execute, spec.loader.exec_module, self.callback)
        spec.loader.exec_module = execute  # type: ignore[method-assign]  # this loader is this module's own
        return spec


def _execute(
    execute: Callable[[ModuleType], None],
    callback: Callable[[ModuleType], None],
    module: ModuleType,
) -> None:
    execute(module)
    callback(module)


internals.calls_the_script(_execute)
