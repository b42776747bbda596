"""Reads packs: by index, by name, in batches; the work is in C++ with the GIL released.

What is returned was verified: its checksum over the very bytes handed out, or (policy `first`) an
earlier check of pages that never left this process's memory since. A `Pack` may be used from many
threads, survives fork (its mappings are read-only and shared) and pickles as its path: the process
that unpickles it maps the files anew when it first needs them.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from paceline.core.errors import CorruptPack, NotFound, PacelineError, StorageError, UsageError
from paceline.native import PACK_FORMAT_VERSION, PackError, PackReader
from paceline.store.format.layout import INDEX_NAME, PARTIAL_SUFFIX, shard_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

_VERIFY_SAMPLES = 256  # a call: short enough that Ctrl-C and progress come through
_MAX_THREADS = 8  # a few fill the memory bus; more only take cores from training
_DIRECT_THREADS = 8  # reads past the page cache are one a thread: a disk wants several
_IDENTITY_DIGITS = 32
_POLICIES = ("first", "always", "never")


class Extent(NamedTuple):
    """A contiguous stored piece of one sample; lengths and offset in bytes.

    The checksum is the CRC-32C of the decoded bytes; codec 0 is none, 1 is zstd.
    """

    shard: int
    offset: int
    stored_length: int
    length: int
    checksum: int
    codec: int


class PackEntry(NamedTuple):
    """What lies in a folder of a pack; for a folder, size, mode and mtime_ns are 0."""

    name: str
    is_folder: bool
    number: int  # of the sample, or of the folder
    size: int  # bytes
    mode: int  # st_mode of the file that was packed
    mtime_ns: int  # when that was last written, since 1970


class Pack:
    """A data set that `open_pack` opened. Samples are numbered from 0 in the order of names."""

    def __init__(
        self, path: str | os.PathLike[str], options: dict[str, Any], identity: str | None = None
    ) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100  # keeps links as the user wrote them
        self._options = options
        self._identity = identity
        self._reader: PackReader | None = None
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[type[Pack], tuple[str, dict[str, Any], str]]:
        return (Pack, (str(self.path), self._options, self.identity))

    def __repr__(self) -> str:
        return f"Pack({str(self.path)!r})"

    def __len__(self) -> int:
        return self._open().sample_count

    @property
    def identity(self) -> str:
        """Stands for the whole content: 32 hexadecimal digits, the same for every copy."""
        self._open()
        assert self._identity is not None
        return self._identity

    @property
    def lengths(self) -> NDArray[np.uint64]:
        """Bytes of each sample, shape (n,); mostly a view of the mapped index, as `labels` is."""
        reader = self._open()
        if not len(reader.first_extents):
            return reader.extent_lengths
        ends = np.zeros(len(reader.extent_lengths) + 1, np.uint64)
        np.cumsum(reader.extent_lengths, out=ends[1:])
        return np.diff(ends[reader.first_extents])

    @property
    def labels(self) -> NDArray[np.int32]:
        """Each sample's position in `class_names`; -1 = it lies in no class."""
        return self._open().labels

    @property
    def shards(self) -> NDArray[np.uint32]:
        """The shard in which each sample begins, shape (n,)."""
        reader = self._open()
        if not len(reader.first_extents):
            return reader.extent_shards
        last = max(len(reader.extent_shards) - 1, 0)
        return reader.extent_shards[np.minimum(reader.first_extents[:-1], last)]

    @property
    def modes(self) -> NDArray[np.uint32]:
        """``st_mode`` of each sample's file."""
        return self._open().modes

    @property
    def mtimes_ns(self) -> NDArray[np.int64]:
        """When each sample's file was last written, in nanoseconds since 1970."""
        return self._open().mtimes

    @property
    def shard_count(self) -> int:
        """How many shards there are."""
        return self._open().shard_count

    @property
    def names(self) -> Sequence[str]:
        """Relative paths of the samples, decoded one by one as `os.fsdecode` does."""
        reader = self._open()
        return _Strings(self, reader.sample_count, reader.name)

    @property
    def folder_names(self) -> Sequence[str]:
        """Relative paths of the folders, also of those without samples, depth first."""
        reader = self._open()
        return _Strings(self, reader.folder_count, reader.folder)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the top-level folders."""
        reader = self._open()
        return tuple(_Strings(self, reader.class_count, reader.class_name))

    def find(self, name: str | bytes) -> int:
        """Return the index of the sample whose relative path is `name`.

        Raises:
            NotFound: there is none.
        """
        try:
            sample = self._open().find(os.fsencode(name))
        except PackError as problem:
            raise self._translated(problem) from None
        if sample < 0:
            raise NotFound(
                f"no sample named {os.fsdecode(name)!a}",
                where=str(self.path),
                fix="List the names: paceline store ls",
            )
        return sample

    def read(self, sample: int) -> bytes:
        """Return the verified bytes of a sample.

        Raises:
            CorruptPack: they do not match their checksum.
            IndexError: there is no such sample.
        """
        reader = self._open()
        self._check_range(sample, sample, reader)
        try:
            return reader.read(sample)
        except PackError as problem:
            raise self._translated(problem) from None

    def read_batch(
        self, samples: ArrayLike, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return several samples in one buffer, and where each begins.

        Args:
            samples: indices, shape (n,), in any order and with repetitions.
            out: takes the bytes; large enough, writable and contiguous. None: a buffer that
                serves again for later batches once nothing refers to it any more.

        Returns:
            The buffer, and offsets of shape (n + 1,): sample k is ``buffer[offsets[k]:offsets[k +
            1]]``. Both belong to the caller.

        Raises:
            CorruptPack: a sample does not match its checksum; `out` then holds nothing of use.
            IndexError: there is no such sample.
            UsageError: `out` is too small.
        """
        reader = self._open()
        ids = self._ids(samples, reader)
        try:
            if out is None:
                return reader.read_batch(ids)
            offsets = reader.read_batch_into(ids, out)
        except PackError as problem:
            raise self._translated(problem) from None
        except (ValueError, BufferError) as problem:  # too small; not writable, not contiguous
            raise UsageError(
                "the buffer cannot take the samples",
                where=str(self.path),
                why=str(problem),
                fix="Give a writable, contiguous uint8 array that is large enough, or none",
            ) from None
        return out[: offsets[-1]], offsets

    def view(self, sample: int) -> memoryview:
        """Return a sample where it lies, without a copy; as `views`."""
        return self.views([sample])[0]

    def views(self, samples: ArrayLike) -> list[memoryview]:
        """Return several samples where they lie in the page cache, read-only, without a copy.

        They are verified when they are handed out. What storage returns later, for pages that
        were dropped meanwhile, is not; nor, by policy `first`, are later copies of pages that came
        back because a view was touched. Where that matters, copy (`read_batch`) and keep no views.
        An encoded or chunked sample is copied here as well.

        Raises:
            CorruptPack: a sample does not match its checksum.
            IndexError: there is no such sample.
        """
        reader = self._open()
        ids = self._ids(samples, reader)
        try:
            return reader.views(ids)
        except PackError as problem:
            raise self._translated(problem) from None

    def prefetch(self, samples: ArrayLike) -> None:
        """Start to read from storage what is not in memory of these samples; returns at once."""
        reader = self._open()
        reader.prefetch(self._ids(samples, reader))

    def extents(self, sample: int) -> list[Extent]:
        """Return where the bytes of a sample lie, in order."""
        reader = self._open()
        self._check_range(sample, sample, reader)
        try:
            return [Extent(*one) for one in reader.extents(sample)]
        except PackError as problem:
            raise self._translated(problem) from None

    def scandir(self, folder: str | bytes = "") -> list[PackEntry]:
        """Return what lies in a folder of the pack: its folders, then its samples, each sorted.

        Costs its entries, however much lies deeper.

        Raises:
            NotFound: there is no such folder.
        """
        reader = self._open()
        path = os.fsencode(folder).strip(b"/")
        number = reader.find_folder(path) if path else -1
        if path and number < 0:
            raise NotFound(
                f"no folder named {os.fsdecode(path)!a}",
                where=str(self.path),
                fix="List the folders: paceline store ls",
            )
        return self._entries(number)

    def walk(self, top: str | bytes = "") -> Iterator[tuple[str, list[PackEntry]]]:
        """Yield each folder from `top` on, depth first: its path and its entries."""
        stack = [(os.fsdecode(top).strip("/"), self.scandir(top))]
        while stack:
            path, entries = stack.pop()
            yield path, entries
            below = list(itertools.takewhile(lambda entry: entry.is_folder, entries))
            stack += [
                (f"{path}/{entry.name}" if path else entry.name, self._entries(entry.number))
                for entry in reversed(below)
            ]

    def evict(self) -> None:
        """Drop the pack's pages from this process and, where no other uses them, from memory."""
        self._open().evict()

    def verify(
        self, on_progress: Callable[[int, int], None] | None = None
    ) -> Iterator[CorruptPack]:
        """Read every sample and yield an error for each that is damaged.

        Args:
            on_progress: is given the samples read so far and their total.
        """
        reader = self._open()
        total = reader.sample_count
        for first in range(0, total, _VERIFY_SAMPLES):
            end = min(first + _VERIFY_SAMPLES, total)
            for sample, why in reader.verify(first, end):
                yield self._corrupt_sample(sample, int(self.shards[sample]), why)
            if on_progress is not None:
                on_progress(end, total)

    def close(self) -> None:
        """Let go of the files. Reads that other threads have under way still finish."""
        self._closed = True
        self._reader = None

    def _open(self) -> PackReader:
        reader = self._reader
        if reader is not None:
            return reader
        if self._closed:
            raise UsageError(
                "the pack is closed", where=str(self.path), fix="Open it again: open_pack"
            )
        _refuse_unfinished(self.path)
        try:
            reader = PackReader(os.fsencode(self.path), **self._options)
        except PackError as problem:
            raise self._translated(problem) from None
        identity = hashlib.sha256(reader.head).hexdigest()[:_IDENTITY_DIGITS]
        if self._identity not in (None, identity):
            raise UsageError(
                "the pack is not the one that was opened before",
                where=str(self.path),
                why="another pack has taken its place",
                fix="Open it again",
            )
        self._identity = identity
        self._reader = reader
        return reader

    def _entries(self, folder: int) -> list[PackEntry]:
        try:
            return self._open().entries(folder, PackEntry)
        except PackError as problem:
            raise self._translated(problem) from None

    def _ids(self, samples: ArrayLike, reader: PackReader) -> NDArray[np.int64]:
        ids = np.asarray(samples)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise UsageError(
                "samples are named by a list of integers",
                where=str(self.path),
                why=f"got an array of shape {ids.shape} and type {ids.dtype}",
                fix="Give a list or a flat array of integers",
            )
        if ids.size:
            self._check_range(int(ids.min()), int(ids.max()), reader)
        return np.ascontiguousarray(ids, np.int64)

    def _check_range(self, low: int, high: int, reader: PackReader) -> None:
        if low < 0 or high >= reader.sample_count:
            wrong = low if low < 0 else high
            raise IndexError(
                f"no sample {wrong}: {self.path} has samples 0 to {reader.sample_count - 1}"
            )

    def _translated(self, problem: PackError) -> PacelineError:
        kind, file, why, error, sample, shard, *_, version = problem.args
        where = os.fsdecode(file)
        if kind == "sample":
            return self._corrupt_sample(sample, shard, why)
        if kind == "version":
            needed = f"format version {version}" if version else "a newer format"
            return UsageError(
                f"the pack needs a Paceline that reads {needed}",
                where=where,
                why=f"{why}; this Paceline reads up to version {PACK_FORMAT_VERSION}",
                fix="Use a newer Paceline",
            )
        if kind == "io" and not isinstance(OSError(error, why), FileNotFoundError):
            no_direct = self._options["direct"] and error == errno.EINVAL
            return StorageError(
                "cannot open the pack",
                where=where,
                why="its file system has no O_DIRECT" if no_direct else why,
                fix="Open it without `direct`" if no_direct else "Check that you may read it",
            )
        if kind == "io" and where.endswith(INDEX_NAME):
            return _no_pack(self.path)
        return CorruptPack(
            "the pack is damaged" if kind != "io" else "a file of the pack is missing",
            where=where,
            why=why,
            fix=f"Mend it: paceline store repair {self.path} --source FOLDER, or --replica COPY",
        )

    def _corrupt_sample(self, sample: int, shard: int, why: str) -> CorruptPack:
        try:
            name = os.fsdecode(self._open().name(sample))
        except PackError:
            name = "?"
        return CorruptPack(
            f"sample {sample} {name!a} is damaged",
            where=str(self.path / shard_name(shard)),
            why=why,
            fix=f"Mend it: paceline store repair {self.path} --source FOLDER, or --replica COPY",
        )


class _Strings(Sequence[str]):
    """Names that stay in the mapped index until somebody asks for one."""

    def __init__(self, pack: Pack, count: int, get: Callable[[int], bytes]) -> None:
        self._pack = pack
        self._count = count
        self._get = get

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> str:  # type: ignore[override]  # no slices: they would decode everything
        if not -self._count <= index < self._count:
            raise IndexError(index)
        try:
            return os.fsdecode(self._get(index % self._count))
        except PackError as problem:
            raise self._pack._translated(problem) from None  # noqa: SLF001  # one module, one class in two halves


def open_pack(
    path: str | os.PathLike[str],
    *,
    verify: str = "first",
    threads: int | None = None,
    direct: bool = False,
    index_only: bool = False,
) -> Pack:
    """Open the pack at `path`, checking its index and the length of every shard.

    Args:
        path: the pack's folder.
        verify: `first` checks the checksum of what may have come from storage and skips it for
            pages that this process has checked and that have been in its memory ever since;
            `always` checks every read, `never` none.
        threads: that share the work of a large batch; by default the cores that this process may
            use, at most 8.
        direct: read past the page cache (O_DIRECT), for packs that are larger than memory.
        index_only: open no shard; names, lengths and places can be read, samples cannot.

    Raises:
        NotFound: there is no pack there.
        CorruptPack: the index is damaged, or a shard is missing or cut off; or it is unfinished.
        UsageError: a newer Paceline wrote it, there is no such policy, or `threads` is below 1.
        StorageError: a file cannot be opened.
    """
    if verify not in _POLICIES:
        raise UsageError(
            f"no policy for checksums is called {verify!a}",
            where="verify",
            fix="Use one of " + ", ".join(_POLICIES),
        )
    if threads is not None and threads < 1:
        raise UsageError(
            f"{threads} threads cannot read",
            where="threads",
            fix="Give 1 or more, or None for one a core",
        )
    if threads is None:
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        if direct:
            threads = _DIRECT_THREADS
    options = {"verify": verify, "threads": threads, "direct": direct, "index_only": index_only}
    pack = Pack(path, options)
    pack._open()  # noqa: SLF001  # opening lazily is for unpickling alone
    return pack


def _refuse_unfinished(path: Path) -> None:
    if path.resolve().name.endswith(PARTIAL_SUFFIX):
        raise CorruptPack(
            "the pack is unfinished",
            where=str(path),
            why="packing was killed, or is still under way",
            fix="Run paceline pack again: it replaces what is there",
        )


def _no_pack(path: Path) -> NotFound:
    why = "the folder has no index.pace" if path.is_dir() else ""
    fix = "Make one: paceline pack SRC DST"
    if path.with_name(path.name + PARTIAL_SUFFIX).is_dir() and not path.exists():
        why = f"{path.name}{PARTIAL_SUFFIX} beside it is an unfinished pack"
        fix = "Run paceline pack again: it replaces the unfinished one"
    return NotFound("no pack here", where=str(path), why=why, fix=fix)
