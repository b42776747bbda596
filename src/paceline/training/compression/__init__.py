"""Sends little of each gradient where the link between hosts is slow.

    gradients -> `selection`    momentum, accumulation, the largest entries by a sampled threshold
              -> `wire`         entries as a compact message: gaps or a bitmap, 32- or 16-bit values
              -> `exchange`     sparse all-gather, or reduce-scatter + all-gather, between hosts
              -> `dgc`          Deep Gradient Compression: all of it, with state by parameter name

`hooks` puts compressors into DistributedDataParallel, `half` sends 16-bit values, `momentum` takes
momentum away from the user's optimizer, `cost` says whether compressing pays, with the numbers.
What is imported from here is loaded when it is first accessed, since it needs torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.training.compression.cost import CompressionEstimate, estimate, measure
    from paceline.training.compression.density import DensitySchedule
    from paceline.training.compression.dgc import DeepGradientCompression, DGCOptions
    from paceline.training.compression.half import HalfCompression
    from paceline.training.compression.hooks import register_hook, register_powersgd
    from paceline.training.compression.momentum import MomentumTakeover

__all__ = [
    "CompressionEstimate",
    "DGCOptions",
    "DeepGradientCompression",
    "DensitySchedule",
    "HalfCompression",
    "MomentumTakeover",
    "estimate",
    "measure",
    "register_hook",
    "register_powersgd",
]

_MODULES = {
    "CompressionEstimate": "cost",
    "DGCOptions": "dgc",
    "DeepGradientCompression": "dgc",
    "DensitySchedule": "density",
    "HalfCompression": "half",
    "MomentumTakeover": "momentum",
    "estimate": "cost",
    "measure": "cost",
    "register_hook": "hooks",
    "register_powersgd": "hooks",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
