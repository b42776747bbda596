"""Packs a folder of small files into one checksummed data set, and feeds training from it.

Seven sub-packages, with imports in one direction (an import contract checks it):

      feed    care    posix     order, batches, loader | damage, repair | mounts for programs
        '------.-------'
        in_place        open packs, and data as they are: LMDB, tar, TFRecord, folders
           |
         write          pack, append
           |
         read           read, describe, extract
           |
        format          what lies on disk: layout, header, index

`pack` writes a pack of a source (`Folder`, `Archives` or `Samples`; docs/reference/pack-format.md),
`open_pack` reads it, and `Loader` (or `PackDataset` and `PackSampler`, for torch's own DataLoader)
feeds PyTorch from it. Only these three import torch, when they are first accessed.
"""

from typing import Any

from paceline.store.feed.crops import CenterCrop, RandomCrop
from paceline.store.feed.options import LoaderConfig, LoaderOptions
from paceline.store.feed.order import SampleOrder
from paceline.store.in_place.checksums import add_checksums
from paceline.store.in_place.opening import open_pack
from paceline.store.in_place.packing import find_source
from paceline.store.read.pack import Pack
from paceline.store.write.append import append
from paceline.store.write.codec_choice import CodecChoice
from paceline.store.write.options import PackOptions, PackProgress, PackSummary
from paceline.store.write.pack import pack, plan_pack
from paceline.store.write.sources.archives import Archives
from paceline.store.write.sources.folder import Folder
from paceline.store.write.sources.samples import Samples

__all__ = [
    "Archives",
    "CenterCrop",
    "CodecChoice",
    "Folder",
    "Loader",
    "LoaderConfig",
    "LoaderOptions",
    "Pack",
    "PackDataset",
    "PackOptions",
    "PackProgress",
    "PackSampler",
    "PackSummary",
    "RandomCrop",
    "SampleOrder",
    "Samples",
    "add_checksums",
    "append",
    "find_source",
    "open_pack",
    "pack",
    "plan_pack",
]


def __getattr__(name: str) -> Any:
    if name == "Loader":
        from paceline.store.feed.loader import Loader

        return Loader
    if name in ("PackDataset", "PackSampler"):
        from paceline.store.feed import dataset

        return getattr(dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
