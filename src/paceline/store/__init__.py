"""The data path: a folder of small files becomes a pack, and a pack feeds training.

`pack_folder` writes a pack (docs/reference/pack-format.md), `open_pack` reads it, and `Loader` (or
`PackDataset`, for torch's own DataLoader) feeds PyTorch from it. Only these two import torch, and
only when they are asked for.
"""

from typing import Any

from paceline.store.feed.options import LoaderOptions
from paceline.store.feed.order import SampleOrder
from paceline.store.feed.sampler import PackSampler
from paceline.store.read.pack import Pack, open_pack
from paceline.store.write.append import append_pack
from paceline.store.write.options import PackOptions, PackProgress, PackSummary
from paceline.store.write.pack import (
    pack_archives,
    pack_folder,
    pack_paths,
    pack_samples,
    plan_pack,
)

__all__ = [
    "Loader",
    "LoaderOptions",
    "Pack",
    "PackDataset",
    "PackOptions",
    "PackProgress",
    "PackSampler",
    "PackSummary",
    "SampleOrder",
    "append_pack",
    "open_pack",
    "pack_archives",
    "pack_folder",
    "pack_paths",
    "pack_samples",
    "plan_pack",
]


def __getattr__(name: str) -> Any:
    if name in ("Loader", "PackDataset"):
        from paceline.store.feed import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
