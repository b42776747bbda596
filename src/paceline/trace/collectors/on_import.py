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

    from paceline.trace.collectors.torch_hooks import RecordedKind


def on_import(name: str, callback: Callable[[ModuleType], None], kind: RecordedKind) -> None:
    """Call `callback` with the module `name` when it has been imported, or now if it has been.

    A callback that fails stops the recording of `kind`; the import goes on.
    """
    if name in sys.modules:
        kind.attempt(callback, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, callback, kind))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(
        self, name: str, callback: Callable[[ModuleType], None], kind: RecordedKind
    ) -> None:
        self.name = name
        self.callback = callback
        self.kind = kind
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
            self.kind.attempt(self._follow, spec.loader)
        return spec

    def _follow(self, loader: Any) -> None:
        execute = loader.exec_module  # this loader is this module's own
        loader.exec_module = functools.partial(_execute, execute, self.callback, self.kind)


def _execute(
    execute: Callable[[ModuleType], None],
    callback: Callable[[ModuleType], None],
    kind: RecordedKind,
    module: ModuleType,
) -> None:
    execute(module)
    kind.attempt(callback, module)


internals.calls_the_script(_execute)
