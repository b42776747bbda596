"""Describes the content of a pack and the location of a sample, for `paceline store stat`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from paceline.core.errors import NotFound
from paceline.core.record import Record
from paceline.native import EncodedSamples, decode_s, encoding_of
from paceline.store.format.layout import INDEX_NAME

if TYPE_CHECKING:
    from paceline.store.format.index import IndexFile
    from paceline.store.read.pack import Pack


_MEASURED_SAMPLES = 1024
_MEASURED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStat(Record):
    """What is in a pack; bytes stored are those of the samples, without padding and index.

    `kind` is pack, or of data in place: files, tar, lmdb, tfrecord. `is_verified` says whether the
    samples have checksums. `capacity_factor` says how many times as many bytes of samples as
    without a codec fit into the same space; `decode_bytes_per_s` how many of them one thread
    decodes and verifies, measured on compressed samples here and now: 0 where there are none, or
    they cannot be read.
    """

    version: ClassVar[int] = 2

    path: str
    format_version: int
    identity: str
    sample_count: int
    folder_count: int
    class_count: int
    sample_bytes: int
    stored_bytes: int
    capacity_factor: float
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
    dictionary_bytes: int = 0
    decode_bytes_per_s: float = 0.0

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 called `capacity_factor` `ratio`."""
        assert from_version == 1
        factor = data.pop("ratio")
        return {**data, "capacity_factor": factor}


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
    """Return what is in `pack`; its index is read, and some compressed samples.

    Raises:
        CorruptPack: the index contradicts itself.
    """
    index = pack.index
    index.check()
    sample_bytes = int(index.lengths.sum())
    stored_bytes = int(index.stored_lengths.sum())
    taken_bytes = stored_bytes + len(index.dictionary)
    counts = np.bincount(index.codecs)
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
        capacity_factor=sample_bytes / taken_bytes if taken_bytes else 1.0,
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
        dictionary_bytes=len(index.dictionary),
        decode_bytes_per_s=_decode_rate(index),
    )


def _decode_rate(index: IndexFile) -> float:
    """Measure how many bytes of samples one thread decodes in a second; 0 = none can be read."""
    encoded = np.flatnonzero(index.codecs)
    if not len(encoded):
        return 0.0
    chosen: list[int] = []
    stored: list[bytes] = []
    size = 0
    # From all over the pack, so that samples of all kinds are among them.
    for extent in encoded[:: max(len(encoded) // _MEASURED_SAMPLES, 1)].tolist():
        size += max(int(index.stored_lengths[extent]), int(index.lengths[extent]))
        content = _stored_bytes(index, extent) if size <= _MEASURED_BYTES or not chosen else None
        if content is None:
            break
        chosen.append(extent)
        stored.append(content)
    lengths = index.lengths[chosen]
    sizes = np.array([len(content) for content in stored], np.uint64)
    samples = EncodedSamples(
        data=np.frombuffer(b"".join(stored), np.uint8),
        positions=np.cumsum(sizes, dtype=np.uint64) - sizes,
        lengths=sizes,
        codecs=index.codecs[chosen],
    )
    if not chosen:
        return 0.0
    seconds = decode_s(samples, lengths, index.dictionary)
    return int(lengths.sum()) / seconds if seconds > 0 else 0.0


def _stored_bytes(index: IndexFile, extent: int) -> bytes | None:
    length = int(index.stored_lengths[extent])
    try:
        with index.shard_path(int(index.shards[extent])).open("rb") as file:
            content = os.pread(file.fileno(), length, int(index.offsets[extent]))
    except OSError:
        return None
    return content if len(content) == length else None


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


def _codec_name(code: int) -> str:
    """Return the name of a codec, with the bytes of an element if the elements are shuffled.

    >>> _codec_name(1), _codec_name(0x22), _codec_name(99)
    ('zstd', 'lz4 shuffled by 4', 'codec 99')
    """
    encoding = encoding_of(code)
    if encoding is None:
        return f"codec {code}"
    codec, element_bits = encoding
    return f"{codec} shuffled by {1 << element_bits}" if element_bits else codec
