"""Describes the content of a pack and the location of a sample, for `paceline store stat`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import NotFound
from paceline.core.record import Record
from paceline.store.format.layout import INDEX_NAME

if TYPE_CHECKING:
    from paceline.store.read.pack import Pack

_CODECS = ("none", "zstd")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStat(Record):
    """What is in a pack; bytes stored are those of the samples, without padding and index.

    `kind` is pack, or of data in place: files, tar, lmdb, tfrecord. `is_verified` says whether the
    samples have checksums.
    """

    path: str
    format_version: int
    identity: str
    sample_count: int
    folder_count: int
    class_count: int
    sample_bytes: int
    stored_bytes: int
    ratio: float
    chunked_count: int
    codecs: dict[str, int]
    shard_count: int
    shard_bytes: int
    index_bytes: int
    parity_group: int
    parity_count: int
    parity_bytes: int
    has_shard_digests: bool
    kind: str = "pack"
    is_verified: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtentStat(Record):
    """An extent of a sample.

    The checksum is the CRC-32C of the decoded bytes; it is empty if it is not known yet.
    """

    shard: str
    offset: int
    stored_bytes: int
    bytes: int
    codec: str
    checksum: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStat(Record):
    """The location of a sample, and the metadata of its file."""

    path: str
    name: str
    sample: int
    bytes: int
    label: int
    class_name: str
    mode: int
    mtime_ns: int
    extents: tuple[ExtentStat, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderStat(Record):
    """What lies below a folder of a pack, at any depth."""

    path: str
    name: str
    sample_count: int
    folder_count: int
    sample_bytes: int


def describe_pack(pack: Pack) -> PackStat:
    """Return what is in `pack`; only its index is read.

    Raises:
        CorruptPack: the index contradicts itself.
    """
    index = pack.index
    index.check()
    sample_bytes = int(index.lengths.sum())
    stored_bytes = int(index.stored_lengths.sum())
    counts = np.bincount(index.codecs, minlength=len(_CODECS))
    chunked = np.diff(index.first_extents) > 1 if len(index.first_extents) else ()
    return PackStat(
        path=str(pack.path),
        format_version=index.version,
        identity=index.identity,
        sample_count=index.sample_count,
        folder_count=index.folder_count,
        class_count=index.class_count,
        sample_bytes=sample_bytes,
        stored_bytes=stored_bytes,
        ratio=sample_bytes / stored_bytes if stored_bytes else 1.0,
        chunked_count=int(np.count_nonzero(chunked)),
        codecs={_codec_name(k): int(count) for k, count in enumerate(counts) if count},
        shard_count=len(index.shard_lengths),
        shard_bytes=int(index.shard_lengths.sum()),
        index_bytes=(pack.side_file or pack.path / INDEX_NAME).stat().st_size,
        parity_group=index.parity_group,
        parity_count=len(index.parity_lengths),
        parity_bytes=int(index.parity_lengths.sum()),
        has_shard_digests=bool(index.shard_digests),
        kind="pack" if index.sources is None else index.sources.kind.name.lower(),
        is_verified=index.has_checksums,
    )


def describe_name(pack: Pack, name: str | bytes) -> SampleStat | FolderStat:
    """Return where the sample `name` lies, or what lies below the folder of that name.

    Raises:
        NotFound: the pack has neither.
    """
    try:
        sample = pack.find(name)
    except NotFound:
        return _describe_folder(pack, name)
    pack.index.check()
    label = int(pack.labels[sample])
    return SampleStat(
        path=str(pack.path),
        name=os.fsdecode(name),
        sample=sample,
        bytes=int(pack.lengths[sample]),
        label=label,
        class_name=pack.class_names[label] if label >= 0 else "",
        mode=int(pack.modes[sample]),
        mtime_ns=int(pack.mtimes_ns[sample]),
        extents=tuple(
            ExtentStat(
                shard=pack.index.shard_path(extent.shard).name,
                offset=extent.offset,
                stored_bytes=extent.stored_length,
                bytes=extent.length,
                codec=_codec_name(extent.codec),
                checksum=f"0x{extent.checksum:08x}" if pack.is_verified else "",
            )
            for extent in pack.extents(sample)
        ),
    )


def _describe_folder(pack: Pack, name: str | bytes) -> FolderStat:
    samples = folders = size = 0
    try:
        for _, entries in pack.walk(name):
            samples += sum(not entry.is_folder for entry in entries)
            folders += sum(entry.is_folder for entry in entries)
            size += sum(entry.size for entry in entries)
    except NotFound:
        raise NotFound(
            f"no sample or folder named {os.fsdecode(name)!a}",
            where=str(pack.path),
            fix=f"List the names: paceline store ls {pack.path} --recursive",
        ) from None
    return FolderStat(
        path=str(pack.path),
        name=os.fsdecode(name).strip("/"),
        sample_count=samples,
        folder_count=folders,
        sample_bytes=size,
    )


def _codec_name(codec: int) -> str:
    return _CODECS[codec] if codec < len(_CODECS) else f"codec {codec}"
