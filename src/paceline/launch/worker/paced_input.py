"""Paces the input of a rank: torch's DataLoaders, and the phases of DistributedDataParallel.

Imports torch: a rank's worker imports this module with importlib, after it has set its threads and
cores.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from paceline.store.feed.paced_workers import pace_data_loaders
from paceline.store.feed.phases import PHASES

if TYPE_CHECKING:
    from paceline.store.feed.options import Pace


def pace_input(pace: Pace) -> None:
    """Pace each DataLoader that the script makes, by the phases of its loop."""
    pace_data_loaders(pace)
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        first = next((p for p in self.module.parameters() if p.requires_grad), None)
        if first is not None:  # its gradient comes last: what follows is communication
            first.register_post_accumulate_grad_hook(_after_backward)

    DistributedDataParallel.__init__ = init


def _after_backward(_parameter: Any) -> None:
    PHASES.cores_are_free()
