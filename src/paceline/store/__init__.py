"""The data path: a folder of small files becomes a pack, and a pack feeds training.

`pack_folder` writes a pack (docs/reference/pack-format.md), `open_pack` reads it, and `PackDataset`
hands it to PyTorch. Only the last imports torch, and only when it is asked for.
"""

from typing import Any

from paceline.store.packing import PackOptions, PackProgress, PackSummary, pack_folder, plan_pack
from paceline.store.reader import Pack, open_pack

__all__ = [
    "Pack",
    "PackDataset",
    "PackOptions",
    "PackProgress",
    "PackSummary",
    "open_pack",
    "pack_folder",
    "plan_pack",
]


def __getattr__(name: str) -> Any:
    if name == "PackDataset":
        from paceline.store.loader import PackDataset

        return PackDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
