"""Calls back when a module is loaded, in a process whose script may never load it.

Loads nothing itself: `trace.collectors.on_import`, for hooks of the recorder, comes with torch.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paceline.launch.startup.sitecustomize import ModuleWatch

if TYPE_CHECKING:
    from collections.abc import Callable


def when_loaded(name: str, change: Callable[[Any], None]) -> None:
    """Call `change` with the module `name` when it has been loaded, or now if it has been."""
    if (module := sys.modules.get(name)) is not None:
        change(module)
    else:
        sys.meta_path.insert(0, ModuleWatch(name, change))
