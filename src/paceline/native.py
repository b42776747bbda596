"""The only interface to the compiled module: all other modules import it from here.

What crosses the boundary gets its names and types here: tuples become named tuples, and an error of
the core becomes one of ours (`_pack_error`), once, for all callers. The signatures of the module
itself are `_native.pyi`, which ``scripts/stub`` writes.

There is no fallback in Python: an installation without the compiled module is broken, and it is
better to say so at once than to be a hundred times slower.
"""

from __future__ import annotations

import errno
import os
import re
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from paceline.core.errors import (
    CollectiveMismatch,
    CorruptData,
    CorruptPack,
    DataChanged,
    DeadlineExceeded,
    MemoryExceeded,
    Missing,
    PacelineError,
    RankLost,
    StorageError,
    UsageError,
)

try:
    from paceline import _native
except ImportError as problem:  # pragma: no cover - needs a broken installation
    raise ImportError(
        f"Paceline's compiled module cannot be loaded ({problem}). "
        "Install the package again with a C++20 compiler on the path: pip install ."
    ) from problem

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

_OF_A_PACK = re.compile(r"index\.pace|(shard|parity)-\d+\.pace")

PACK_FORMAT_VERSION = _native.PACK_FORMAT_VERSION
ExtentPlan = _native.ExtentPlan
HostGroup = _native.HostGroup
HostMessage = _native.HostMessage
HostSegment = _native.HostSegment
PeerLink = _native.PeerLink
RangeRequests = _native.RangeRequests
Recorder = _native.Recorder
SharedWords = _native.SharedWords
SortedPlan = _native.SortedPlan
SortedReader = _native.SortedReader
TensorPool = _native.TensorPool
TlsContext = _native.TlsContext
accumulate_and_select = _native.accumulate_and_select
acquire_buffer = _native.acquire_buffer
codec_available = _native.codec_available
crc32c = _native.crc32c
decode_jpeg_part = _native.decode_jpeg_part
encoding_of = _native.encoding_of
gather = _native.gather
jpeg_available = _native.jpeg_available
lower_bounds = _native.lower_bounds
monotonic_ns = _native.monotonic_ns
mount_fuse = _native.mount_fuse
name_hashes = _native.name_hashes
pack_events = _native.pack_events
redirect_allocations = _native.redirect_allocations
scatter_add = _native.scatter_add
sorted_order = _native.sorted_order
start_writeback = _native.start_writeback
train_dictionary = _native.train_dictionary
unmount = _native.unmount
unpack_events = _native.unpack_events
use_pool = _native.use_pool

NPY_ELEMENTS = -1  # pack_writer.hpp

__all__ = [
    "NPY_ELEMENTS",
    "PACK_FORMAT_VERSION",
    "BadSample",
    "EncodedSamples",
    "Extent",
    "ExtentPlan",
    "FileProblem",
    "FilesRead",
    "FolderListing",
    "FuseServer",
    "FuseStats",
    "HostGroup",
    "HostMessage",
    "HostSegment",
    "LmdbBlock",
    "LmdbMeta",
    "LmdbRecords",
    "MergedNames",
    "NameMerger",
    "Otf2Written",
    "PackEntry",
    "PackReader",
    "PeerLink",
    "PeerServer",
    "PeerStats",
    "RangeRequests",
    "Recorder",
    "SampleEncoding",
    "SharedWords",
    "SortedPlan",
    "SortedReader",
    "TensorPool",
    "TfRecordBlock",
    "TfRecords",
    "accumulate_and_select",
    "acquire_buffer",
    "codec_available",
    "corrupt_sample",
    "crc32c",
    "decode_jpeg_part",
    "decode_s",
    "encode",
    "encoding_of",
    "gather",
    "io_library",
    "jpeg_available",
    "list_folder",
    "lmdb_meta",
    "lower_bounds",
    "missing_library",
    "monotonic_ns",
    "mount_fuse",
    "mpi_library",
    "name_hashes",
    "pack_events",
    "posix_library",
    "read_files",
    "require_codec",
    "scatter_add",
    "sorted_order",
    "start_writeback",
    "train_dictionary",
    "unmount",
    "unpack_events",
]


def posix_library() -> Path:
    """Return the path of the library that is preloaded into programs with mounts (native/posix)."""
    return Path(_native.__file__).with_name("libpaceline_posix.so")


def io_library() -> Path:
    """Return the path of the library that counts a program's calls for files (native/io)."""
    return Path(_native.__file__).with_name("libpaceline_io.so")


def mpi_library(interface: str) -> Path:
    """Return the path of the library that records MPI programs (native/mpi).

    Args:
        interface: binary interface of the MPI: ``mpich``, ``openmpi`` or ``standard``.
    """
    return Path(_native.__file__).with_name(f"libpaceline_mpi_{interface}.so")


def preloaded(library: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that has programs preload a library, before those of `environ`."""
    others = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    names = [str(library), *(name for name in others if name != str(library))]
    return {"LD_PRELOAD": ":".join(names)}


# Reading packs (pack_reader.hpp)


class Extent(NamedTuple):
    """A contiguous stored part of one sample; lengths and offset in bytes.

    The checksum is the CRC-32C of the decoded bytes; `encoding_of` says what the codec stands for.
    """

    shard: int
    offset: int
    stored_length: int
    length: int
    checksum: int
    codec: int


class PackEntry(NamedTuple):
    """An entry of a folder of a pack; for a folder, size, mode and mtime_ns are 0."""

    name: str
    is_folder: bool
    number: int  # of the sample, or of the folder
    size: int  # bytes
    mode: int  # st_mode of the file that was packed
    mtime_ns: int  # when that was last written, since 1970


class BadSample(NamedTuple):
    """A sample that does not match its checksum, the shard in which it begins, and why."""

    sample: int
    shard: int
    name: bytes  # empty if the index is damaged there
    why: str


class PackReader(_native.PackReader):
    """A pack of which the index is mapped and, unless `index_only`, the shards as well.

    Whatever it does may raise CorruptPack, StorageError and, for a pack of a newer format,
    UsageError. An index that is out of range is an IndexError.
    """

    def entries(self, folder: int) -> list[PackEntry]:  # type: ignore[override]  # of one kind
        """Return the entries of a folder; -1 is the root of the pack."""
        return super().entries(folder, PackEntry)  # type: ignore[return-value]  # of that kind

    def extents(self, sample: int) -> list[Extent]:  # type: ignore[override]  # named
        """Return where the bytes of a sample lie, in order."""
        return [Extent(*fields) for fields in super().extents(sample)]

    def verify(self, first: int, end: int) -> list[BadSample]:  # type: ignore[override]  # named
        """Read samples `first` to `end` - 1 and return the damaged ones."""
        return [BadSample(*fields) for fields in super().verify(first, end)]


def corrupt_sample(path: str, bad: BadSample) -> CorruptPack:
    """Return the error for a damaged sample.

    Args:
        path: of its shard.
        bad: the damaged sample.
    """
    name = os.fsdecode(bad.name) or "?"
    return CorruptPack(
        f"sample {bad.sample} {name!a} is damaged",
        where=path,
        why=bad.why,
        fix=_repair_fix(path),
    )


class _PackProblem(NamedTuple):
    """The fields of a PackError of the core."""

    kind: Literal[
        "io",
        "corrupt",
        "sample",
        "version",
        "memory",
        "source",
        "changed",
        "unsupported",
        "library",
    ]
    file: bytes
    why: str
    error: int  # errno of `io`
    direct: bool  # of `io`: it was opened past the page cache
    sample: int  # of `sample` and `memory`, as are shard and name
    shard: int
    name: bytes
    version: int  # of `version`: what a reader needs; 0 = an unknown section


def _pack_error(**fields: Any) -> PacelineError:
    """Return our error for a PackError of the core; the core raises what this returns."""
    problem = _PackProblem(**fields)
    where = os.fsdecode(problem.file)
    if problem.kind == "sample":
        bad = BadSample(problem.sample, problem.shard, problem.name, problem.why)
        return corrupt_sample(where, bad)
    if problem.kind == "memory":
        name = os.fsdecode(problem.name) or "?"
        return MemoryExceeded(
            "the samples do not fit into memory",
            where=f"{where}: sample {problem.sample} {name!a} is the largest",
            why=problem.why,
            fix="Read fewer samples at a time; if the sizes cannot be true, do not trust the pack",
        )
    if problem.kind == "version":
        needed = f"format version {problem.version}" if problem.version else "a newer format"
        return UsageError(
            f"the pack needs a Paceline that reads {needed}",
            where=where,
            why=f"{problem.why}; this Paceline reads up to version {PACK_FORMAT_VERSION}",
            fix="Use a newer Paceline",
        )
    if problem.kind == "library":
        return missing_library(where, fix="")
    if problem.kind in ("source", "changed", "unsupported"):
        return _source_error(problem.kind, where, problem.why)
    if problem.kind == "io" and problem.error != errno.ENOENT:
        no_direct = problem.direct and problem.error == errno.EINVAL
        return StorageError(
            "cannot open the pack",
            where=where,
            why="its file system has no O_DIRECT" if no_direct else problem.why,
            fix="Open it without `direct`" if no_direct else "Check that you may read it",
        )
    what = "a file of the pack is missing" if problem.kind == "io" else "the pack is damaged"
    if _is_side_file(where):
        what = f"the index of the data is {'missing' if problem.kind == 'io' else 'damaged'}"
    return CorruptPack(what, where=where, why=problem.why, fix=_repair_fix(where))


def missing_library(library: str, *, fix: str) -> Missing:
    """Return the error for a library of a codec that this machine lacks.

    Args:
        library: its name, as the system's loader knows it.
        fix: what to do instead of installing it, if anything.
    """
    name = "zstd" if "zstd" in library else "lz4"
    package = {"zstd": ("libzstd1", "libzstd"), "lz4": ("liblz4-1", "lz4-libs")}[name]
    install = f"Install it: apt-get install {package[0]}, or dnf install {package[1]}"
    return Missing(
        f"{name} is not installed, and samples are compressed by it",
        where=library,
        fix=f"{install}; or {fix}" if fix else install,
    )


def _source_error(kind: str, where: str, why: str) -> PacelineError:
    """Return the error for data in place: the user's own files."""
    if kind == "source":
        fix = "Restore the file from a copy"
        if why.startswith("the record at byte") and why.endswith("is truncated"):  # of TFRecord
            fix += ", or read what is there: open_pack(..., allow_truncated=True)"
        return CorruptData("the data is damaged", where=where, why=why, fix=fix)
    if kind == "changed":
        return DataChanged(
            "the data was changed since it was indexed",
            where=where,
            why=why,
            fix="Open it again when no other program writes to it: it is then indexed again",
        )
    return UsageError(
        "the data cannot be read in place",
        where=where,
        why=why,
        fix="Pack what a program reads from it: paceline.store.pack(store.Samples(...), DEST)",
    )


def _is_side_file(file: str) -> bool:
    """Return whether a file is the index of data in place, by the names of a pack's files."""
    name = os.path.basename(file)  # noqa: PTH119  # a string in, a string out
    return name.endswith(".pace") and not _OF_A_PACK.fullmatch(name)


def _repair_fix(file: str) -> str:
    if not file.endswith(".pace"):  # data in place
        return "Restore the file from a copy; if it was changed on purpose, delete its .pace file"
    if _is_side_file(file):
        return "Delete it, if it is there, and open the data again: it is then made again"
    pack = os.path.dirname(file)  # noqa: PTH120  # a string in, a string out
    return f"Repair it: paceline store repair {pack} --source FOLDER, or --replica COPY"


_native.set_pack_error_maker(_pack_error)


# Indexing data in place (lmdb_records.hpp, tfrecord_records.hpp)


class LmdbMeta(NamedTuple):
    """What the newest meta page of an LMDB database says."""

    page_bytes: int
    has_reversed_order: bool  # keys are compared from the last byte to the first
    last_page: int
    transaction: int
    checksum: int  # CRC-32C of the main tree, the last page and the transaction


class LmdbBlock(NamedTuple):
    """The next records of a database, in the order of their keys; none at the end."""

    offsets: NDArray[np.uint64]  # of the values in the file
    lengths: NDArray[np.uint64]
    name_offsets: NDArray[np.uint64]
    names: bytes
    are_paths: bool  # whether each name may name a sample
    has_folders: bool  # whether some name has a slash


class TfRecordBlock(NamedTuple):
    """The next records of a TFRecord file; none at the end."""

    offsets: NDArray[np.uint64]  # of the data in the file
    lengths: NDArray[np.uint64]
    checksums: NDArray[np.uint32]  # CRC-32C of the data


def lmdb_meta(path: bytes) -> LmdbMeta:
    """Return what the newest meta page of the LMDB database at `path` says.

    Raises:
        CorruptData: it is no database, or a damaged one.
        UsageError: it is of a version that is not read.
        StorageError: it cannot be read.
    """
    return LmdbMeta(*_native.lmdb_meta(path))


class LmdbRecords(_native.LmdbRecords):
    """One pass over the records of an LMDB database; see `lmdb_meta` for the errors."""

    def next(self, count: int) -> LmdbBlock:
        """Return at most `count` records."""
        return LmdbBlock(*super().next(count))


class TfRecords(_native.TfRecords):
    """One pass over a TFRecord file; CorruptData says where it is damaged.

    Args:
        path: of the file.
        to_cut: a file that ends amid a record ends with the record before it; `cut_bytes` is what
            follows, once all records were read.
    """

    def next(self, count: int) -> TfRecordBlock:
        """Return at most `count` records."""
        return TfRecordBlock(*super().next(count))


# Mounts by FUSE (fuse_server.hpp)


class FuseStats(NamedTuple):
    """What a mount served so far."""

    requests: int
    reads: int  # of them
    bytes: int  # of files
    errors: int


class FuseServer(_native.FuseServer):
    """Serves a pack to the kernel from threads of its own.

    Args:
        place: the pack's folder, or the index of data in place.

    Raises:
        PacelineError: as opening the pack does.
    """

    def __init__(self, place: str) -> None:
        super().__init__(os.fsencode(place))

    def stats(self) -> FuseStats:
        """Return what was served so far."""
        return FuseStats(*super().stats())


# Packing (pack_writer.hpp). Names come as two arrays: where each begins (one offset more than
# names), and the bytes of all.


class FolderListing(NamedTuple):
    """The entries of one folder, sorted, in columns."""

    names: bytes  # each behind the prefix; folders end in a slash
    offsets: NDArray[np.uint64]  # of names
    modes: NDArray[np.uint32]
    sizes: NDArray[np.uint64]
    mtimes_ns: NDArray[np.int64]
    devices: NDArray[np.uint64]
    inodes: NDArray[np.uint64]
    errors: NDArray[np.int32]  # errno of each, or 0
    links: NDArray[np.uint8]  # whether it is a symbolic link


class FileProblem(NamedTuple):
    """The first file of a batch that could not be read as it was listed."""

    number: int  # of the file in the batch
    outcome: Literal["unreadable", "gone", "no_file", "resized", "touched"]
    error: int  # errno of `unreadable`
    size: int  # of `resized`: the size found


class FilesRead(NamedTuple):
    """The checksums of files that were read, up to the first problem."""

    checksums: NDArray[np.uint32]
    problem: FileProblem | None


class EncodedSamples(NamedTuple):
    """Samples as they are stored; those that do not get smaller by enough stay as they were."""

    data: NDArray[np.uint8]  # aligned as the samples were
    positions: NDArray[np.uint64]  # in `data`
    lengths: NDArray[np.uint64]
    codecs: NDArray[np.uint8]


class MergedNames(NamedTuple):
    """The next names of a merge; none at its end."""

    lists: NDArray[np.uint32]  # the list that each is from
    lengths: NDArray[np.uint64]
    names: bytes  # end to end
    ends_in_duplicate: bool  # the last name came before: merging ends here


class NameMerger:
    """Merges lists of names, each sorted, into one ascending sequence.

    Args:
        lists: offsets and bytes of each; they must stay as they are.
    """

    def __init__(self, lists: Sequence[tuple[NDArray[np.uint64], NDArray[np.uint8]]]) -> None:
        self._merger = _native.NameMerger(list(lists))

    def next(self, count: int) -> MergedNames:
        """Return at most `count` names."""
        return MergedNames(*self._merger.next(count))


def list_folder(descriptor: int, prefix: bytes, *, follow: bool) -> FolderListing:
    """Return the entries of an open folder.

    Args:
        descriptor: of the folder.
        prefix: to put before each name.
        follow: say what symbolic links lead to.

    Raises:
        OSError: the folder cannot be read.
    """
    return FolderListing(*_native.list_folder(descriptor, prefix, follow))


def read_files(
    descriptor: int,
    names: tuple[NDArray[np.uint64], NDArray[np.uint8]],
    lengths: NDArray[np.uint64],
    mtimes_ns: NDArray[np.int64],
    positions: NDArray[np.uint64],
    target: NDArray[np.uint8],
    *,
    follow: bool,
    threads: int,
) -> FilesRead:
    """Read files below an open folder to their places in `target`; zero what lies between.

    Args:
        descriptor: of the folder.
        names: offsets and bytes of their relative paths.
        lengths: expected length of each file.
        mtimes_ns: expected time of the last write of each file.
        positions: of each in `target`, ascending.
        target: takes them all.
        follow: read what symbolic links lead to.
        threads: that share the work.
    """
    checksums, problem = _native.read_files(
        descriptor, *names, lengths, mtimes_ns, positions, target, follow, threads
    )
    return FilesRead(checksums, FileProblem(*problem) if problem else None)  # type: ignore[arg-type]  # C++ has these outcomes


class SampleEncoding(NamedTuple):
    """How samples are compressed."""

    codec: str  # zstd, lz4, or zstd-dict
    level: int = 3  # 1 to 19; lz4 has levels up to 12
    # log2 of the bytes of an element, to shuffle elements where that makes a sample smaller;
    # NPY_ELEMENTS: as the header of each .npy file says; 0: nothing is shuffled.
    element_bits: int = 0
    keep_ratio: float = 1.0  # a sample stays as it is if more than this part of it would remain
    dictionary: bytes = b""  # of zstd-dict


def encode(
    source: NDArray[np.uint8],
    positions: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    compression: SampleEncoding,
    *,
    threads: int = 1,
) -> EncodedSamples:
    """Compress samples.

    Args:
        source: holds them all.
        positions: of each in `source`.
        lengths: of each.
        compression: how.
        threads: that share the work.
    """
    return EncodedSamples(*_native.encode(source, positions, lengths, *compression, threads))


def decode_s(
    samples: EncodedSamples, lengths: NDArray[np.uint64], dictionary: bytes = b""
) -> float:
    """Return the processor time in which one thread decodes and verifies samples, as a reader does.

    Negative if one cannot be decoded: it is damaged, or this machine lacks its library.

    Args:
        samples: as they are stored.
        lengths: of each when it is decoded.
        dictionary: that they were compressed with, if any.
    """
    return _native.decode_s(
        samples.data,
        samples.positions,
        samples.lengths,
        lengths,
        samples.codecs,
        dictionary,
    )


def require_codec(codec: str, *, fix: str = "") -> None:
    """Refuse a codec whose library this machine lacks.

    Raises:
        Missing: it lacks it; `fix` says what to do instead of installing it.
    """
    if not codec_available(codec):
        raise missing_library(_native.codec_library(codec), fix=fix)


# Collectives of the ranks of one host (host_group.hpp)

_GROUP_ERRORS: dict[str, tuple[type[PacelineError], str]] = {
    "lost": (RankLost, "Look at the output of that rank; start the job again"),
    "deadline": (
        DeadlineExceeded,
        "Look at what that rank does (py-spy dump), or give a longer timeout",
    ),
    "mismatch": (
        CollectiveMismatch,
        "Call the same collectives with the same sizes and dtypes in the same order on all ranks",
    ),
    "aborted": (RankLost, "Look at the output of that rank"),
    "usage": (UsageError, "Change the call; the group is as it was"),
}


def _group_error(kind: str, rank: int, text: str) -> PacelineError:
    """Return our error for a GroupError of the core; the core raises what this returns."""
    error_class, fix = _GROUP_ERRORS[kind]
    what, _, why = text.partition(": ")
    return error_class(what, where=f"rank {rank}" if rank >= 0 else "", why=why, fix=fix)


_native.set_group_error_maker(_group_error)


# Nodes that serve shards of a pack (peer_server.hpp, peer_link.hpp)

_PEER_ERRORS: dict[str, tuple[type[PacelineError], str, str]] = {
    "lost": (
        RankLost,
        "a node of the store cannot be reached",
        "Start it again: paceline store serve",
    ),
    "deadline": (
        DeadlineExceeded,
        "a node of the store did not answer before its deadline",
        "Look at that node's load and network, or give a longer wait",
    ),
    "token": (
        UsageError,
        "a node of the store refused this client",
        "Give the token that the node was started with",
    ),
    "pack": (
        UsageError,
        "a node of the store serves another pack",
        "Give the index of the pack that the node serves",
    ),
    "tls": (
        UsageError,
        "a node of the store and this process cannot agree on TLS",
        "Give all nodes and readers the same token, and TLS to all or none",
    ),
    "protocol": (
        RankLost,
        "a node of the store cannot be understood",
        "Check the address, and that all nodes run the same Paceline",
    ),
}


def peer_error(kind: str, why: str, node: str) -> PacelineError:
    """Return our error for a problem with a node that serves shards.

    Args:
        kind: as PeerLink returned it.
        why: likewise.
        node: its name and address.
    """
    error_class, what, fix = _PEER_ERRORS[kind]
    return error_class(what, where=node, why=why, fix=fix)


def tls_context(token: bytes) -> TlsContext:
    """Return what encrypts connections between nodes and clients with one token.

    Args:
        token: its digest.

    Raises:
        Missing: there is no OpenSSL that can do it.
    """
    try:
        return TlsContext(token)
    except RuntimeError as problem:
        raise Missing(
            "nodes cannot use TLS here",
            why=str(problem),
            fix="Install OpenSSL 1.1.1 or 3 (Debian: libssl3), or leave TLS out",
        ) from None


class ServedCount(IntEnum):
    """What programs and the servers of a node count in the memory of requests.

    The meaning of each stands in range_requests.hpp, in this order.
    """

    LOCAL_READS = 0
    LOCAL_BYTES = 1
    REMOTE_READS = 2
    PEER_BYTES = 3
    REQUEST_SOURCE_BYTES = 4
    PROGRAM_SOURCE_BYTES = 5
    READ_NS = 6
    STAGED_SOURCE_BYTES = 7
    STAGED_PEER_BYTES = 8
    SENT_BYTES = 9
    PEAK_QUEUE = 10
    PEAK_COPIES = 11
    SERVER_STARTS = 12


def served_counts(requests: RangeRequests) -> dict[ServedCount, int]:
    """Return what was counted in a memory of requests so far."""
    return dict(zip(ServedCount, requests.counts(), strict=True))


class PeerStats(NamedTuple):
    """What a node served so far."""

    connections: int
    refused_connections: int  # malformed, without the token, too many, or silent
    reads: int
    ranges: int
    bytes: int


class PeerServer(_native.PeerServer):
    """Serves byte ranges of shards over TCP from threads of its own."""

    def stats(self) -> PeerStats:
        """Return what was served so far."""
        return PeerStats(*super().stats())


class Otf2Written(NamedTuple):
    """What was written of a location.

    Attributes:
        events: number of OTF2's events.
        clipped: spans that ended after the span around them, and were cut there.
        clipped_ns: by so much in all.
        error: OTF2's first error; 0 for none.
    """

    events: int
    clipped: int
    clipped_ns: int
    error: int


def write_otf2_events(
    library: str, writer: int, spans: NDArray[np.void], records: NDArray[np.void]
) -> Otf2Written:
    """Write the events of a location to an OTF2 archive, in order of time.

    Args:
        library: path or name of OTF2's C library.
        writer: address of the location's event writer.
        spans: regions, rows of otf2_events.hpp's `Otf2Span`, by (begin, -end).
        records: at moments, rows of its `Otf2Record`, by time, those first that end something.

    Raises:
        Missing: the library lacks a function of OTF2 3.
    Cost: one call of OTF2 per event, without the GIL.
    """
    found = _native.write_otf2_events(library, writer, spans, records)
    events, clipped, clipped_ns, error, loaded = found
    if not loaded:
        fix = "Install OTF2 3: pip install 'paceline[otf2]'"
        raise Missing("OTF2 cannot be used", where=library, why="it lacks functions", fix=fix)
    return Otf2Written(events, clipped, clipped_ns, error)
