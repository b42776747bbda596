"""Paces the input of a rank: torch's DataLoaders, and the phases of DistributedDataParallel.

Imports torch: a rank's worker imports this module with importlib, after it has set its threads and
cores.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from paceline.store.feed.paced_workers import pace_data_loaders
from paceline.store.feed.phases import PHASES

if TYPE_CHECKING:
    from torch import nn

    from paceline.store.feed.options import Pace


def pace_input(pace: Pace) -> None:
    """Pace each DataLoader that the script makes, by the phases of its loop."""
    pace_data_loaders(pace)
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        model = weakref.ref(self.module)
        PHASES.when_listened(lambda: _follow_backward(model()))

    DistributedDataParallel.__init__ = init


def _follow_backward(model: nn.Module | None) -> None:
    """Have the end of a model's backward passes begin a phase in which cores are free."""
    parameters = model.parameters() if model is not None else ()
    first = next((parameter for parameter in parameters if parameter.requires_grad), None)
    if first is not None:  # its gradient comes last: what follows is communication
        first.register_post_accumulate_grad_hook(_after_backward)


def _after_backward(_parameter: Any) -> None:
    PHASES.cores_are_free()
