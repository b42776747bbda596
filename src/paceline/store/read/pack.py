"""Reads packs: by index, by name, in batches; the work is in C++ with the GIL released.

Unless the policy is `never`, returned bytes were verified: by their checksum, or (policy `first`)
by an earlier verification of pages that have been in this process's memory ever since. A `Pack` may
be used from many threads and survives fork (its mappings are read-only and shared). It pickles its
path, options and identity: the process that unpickles it maps the files again when it first needs
them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from paceline.core.errors import CorruptPack, NotFound, PacelineError, UsageError
from paceline.native import Extent, PackEntry, PackReader, corrupt_sample
from paceline.store.format.index import IndexFile, require_pack
from paceline.store.format.sources import KeyNames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

_VERIFY_SAMPLES = 256  # per call: short enough for Ctrl-C and progress
_MAX_THREADS = 8  # a few fill the memory bus; more only take cores from training
_DIRECT_THREADS = 8  # each has one read past the page cache under way: a disk needs several
_POLICIES = ("first", "always", "never")


class Pack:
    """A data set that `open_pack` opened. Samples are numbered from 0 in the order of names."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: dict[str, Any],
        side_file: Path | None = None,
        identity: str | None = None,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100  # keeps links as the user wrote them
        self._options = options
        self._side_file = side_file  # the index of data in place
        self._identity = identity
        self._reader: PackReader | None = None
        self._index: IndexFile | None = None
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

    def __reduce__(self) -> tuple[type[Pack], tuple[str, dict[str, Any], Path | None, str]]:
        return (Pack, (str(self.path), self._options, self._side_file, self.identity))

    def __repr__(self) -> str:
        return f"Pack({str(self.path)!r})"

    def __len__(self) -> int:
        return self._open().sample_count

    @property
    def identity(self) -> str:
        """Content digest, the same for every copy of the pack; see `IndexFile.identity`."""
        self._open()
        assert self._identity is not None
        return self._identity

    @property
    def index(self) -> IndexFile:
        """The index of the pack, section by section."""
        self._open()
        assert self._index is not None
        return self._index

    @property
    def native_reader(self) -> PackReader:
        """What reads the shards; for other readers of the same files."""
        return self._open()

    @property
    def verify_policy(self) -> str:
        """When checksums are verified: ``first``, ``always`` or ``never``."""
        return str(self._options["verify"])

    @property
    def is_in_place(self) -> bool:
        """Whether the samples lie in the user's own files, and only their index was made."""
        return self._side_file is not None

    @property
    def is_here(self) -> bool:
        """Whether another process of this machine can read the samples at `path`."""
        return True

    @property
    def side_file(self) -> Path | None:
        """The index of data in place; None of a pack, which holds its own."""
        return self._side_file

    @property
    def is_verified(self) -> bool:
        """Whether there are checksums with which samples are compared.

        False only for data in place whose format has none, such as LMDB and tar, until
        ``paceline store verify`` (`paceline.store.add_checksums`) has read all of it once.
        """
        return self._open().has_checksums

    def key(self, sample: int) -> bytes:
        """Return the key of a sample in its LMDB database; otherwise its name.

        Where some key is no relative path, the name of each is its key in hexadecimal digits; of
        databases with integer or reverse keys, from the last byte to the first.

        Raises:
            IndexError: there is no such sample.
        """
        reader = self._open()
        self._check_range(sample, sample, reader)
        name = reader.name(sample)
        sources = self.index.sources
        if sources is None or sources.key_names is KeyNames.PLAIN:
            return name
        key = bytes.fromhex(name.decode())
        return key[::-1] if sources.key_names is KeyNames.REVERSED_HEX else key

    @property
    def lengths(self) -> NDArray[np.uint64]:
        """Bytes of each sample, shape (n,): a view of the mapped index if it holds them so wide.

        All of them are verified by this. Touching a view of a file that another program has
        truncated raises SIGBUS, which ends the process; the same holds for `labels`. `lengths_of`
        and `labels_of` raise an error instead, and read no more than is asked for.
        """
        return self.index.sample_lengths

    @property
    def labels(self) -> NDArray[np.int32]:
        """Each sample's index in `class_names`; -1 = no class."""
        return self.index.labels

    def labels_of(self, samples: ArrayLike) -> NDArray[np.int32]:
        """Return the labels of these samples, copied: unlike `labels`, never a signal.

        Raises:
            CorruptPack: the index was changed, or cut off, since the pack was opened.
            IndexError: there is no such sample.
        """
        reader = self._open()
        return reader.labels(self._ids(samples, reader))

    def lengths_of(self, samples: ArrayLike) -> NDArray[np.int64]:
        """Return the bytes of each of these samples, copied from the index; see `labels_of`."""
        reader = self._open()
        return reader.lengths(self._ids(samples, reader))

    @property
    def shards(self) -> NDArray[np.uint32]:
        """The shard in which each sample begins, shape (n,)."""
        return self.index.sample_shards

    @property
    def modes(self) -> NDArray[np.uint32]:
        """``st_mode`` of the file, or of the member of a tar archive, that each sample was."""
        return self.index.modes

    @property
    def mtimes_ns(self) -> NDArray[np.int64]:
        """When that file or member was last written, in nanoseconds since 1970; by sample."""
        return self.index.mtimes_ns

    @property
    def shard_count(self) -> int:
        """How many shards there are."""
        return self._open().shard_count

    @property
    def names(self) -> Sequence[str]:
        """Relative paths of the samples, decoded when they are asked for, as `os.fsdecode` does."""
        reader = self._open()
        return _Strings(reader.sample_count, reader.name)

    @property
    def folder_names(self) -> Sequence[str]:
        """Relative paths of the folders, also of those without samples, depth first."""
        reader = self._open()
        return _Strings(reader.folder_count, reader.folder)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: the top-level folders, or what ``.cls`` members of archives say."""
        reader = self._open()
        return tuple(_Strings(reader.class_count, reader.class_name))

    def find(self, name: str | bytes) -> int:
        """Return the index of the sample whose relative path is `name`.

        Raises:
            NotFound: there is no such sample.
        """
        sample = self._open().find(os.fsencode(name))
        if sample < 0:
            raise NotFound(
                f"no sample named {os.fsdecode(name)!a}",
                where=str(self.path),
                fix="List the names: paceline store ls",
            )
        return sample

    def read(self, sample: int) -> bytes:
        """Return the bytes of a sample, verified as the policy says.

        Raises:
            CorruptPack: the bytes do not match their checksum.
            IndexError: there is no such sample.
        """
        reader = self._reader or self._open()
        try:
            return reader.read(sample)
        except (IndexError, TypeError):  # C++ takes 64 bits
            self._check_range(sample, sample, reader)
            raise

    def read_batch(
        self, samples: ArrayLike, out: NDArray[np.uint8] | None = None
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return several samples in one buffer, and where each begins.

        Args:
            samples: indices, shape (n,), in any order and with repetitions.
            out: buffer for the bytes; large enough, writable and contiguous. None: a buffer
                from the pack's pool; it returns to the pool when the last reference to it is
                dropped.

        Returns:
            The buffer, and offsets of shape (n + 1,): sample k is ``buffer[offsets[k]:offsets[k +
            1]]``. They stay valid and unchanged while referenced.

        Raises:
            CorruptPack: a sample does not match its checksum; `out` then holds nothing of use.
            IndexError: there is no such sample.
            UsageError: `out` is too small.
        """
        reader = self._reader or self._open()
        ids = self._flat(samples)
        try:
            if out is None:
                return reader.read_batch(ids)
            offsets = reader.read_batch_into(ids, out)
        except PacelineError:
            raise
        except IndexError:
            self._ids(samples, reader)
            raise
        except (ValueError, BufferError) as problem:  # too small; not writable, not contiguous
            raise UsageError(
                "the buffer cannot hold the samples",
                where=str(self.path),
                why=str(problem).rstrip("."),
                fix="Give a writable, contiguous uint8 array that is large enough, or none",
            ) from None
        return out[: offsets[-1]], offsets

    @property
    def read_times_s(self) -> tuple[float, float]:
        """Seconds that threads spent in `read_batch` so far, and the part of it in checksums.

        Summed over threads, in this process; waiting for storage is included.
        """
        reader = self._open()
        return reader.busy_ns / 1e9, reader.verify_ns / 1e9

    def view(self, sample: int) -> memoryview:
        """Return a read-only view of a sample, without a copy; see `views`."""
        return self.views([sample])[0]

    def views(self, samples: ArrayLike) -> list[memoryview]:
        """Return read-only views of several samples in the page cache, without a copy.

        The samples are verified once, in this call. If the kernel drops a page while you hold the
        view, the page is read again without verification. With policy `first`, a later `read` of
        that page is not verified either. Where that matters, copy (`read_batch`) and keep no views.
        Copied are samples that are compressed, or chunked: larger than a shard, and so stored in
        several extents.

        Raises:
            CorruptPack: a sample does not match its checksum.
            IndexError: there is no such sample.
        """
        reader = self._reader or self._open()
        try:
            return reader.views(self._flat(samples))
        except IndexError:
            self._ids(samples, reader)
            raise

    def prefetch(self, samples: ArrayLike) -> None:
        """Start to read these samples from storage, unless they are in memory; returns at once."""
        reader = self._open()
        reader.prefetch(self._ids(samples, reader))

    def expect(self, order: Iterator[NDArray[np.int64]]) -> None:
        """Take note of the samples that are read from now on, in this order; nothing here needs it.

        Args:
            order: sample numbers, in chunks that are made as they are taken. `prefetch` is then
                called with these samples, as their reads come near.
        """

    def extents(self, sample: int) -> list[Extent]:
        """Return where the bytes of a sample lie, in order."""
        reader = self._open()
        self._check_range(sample, sample, reader)
        return reader.extents(sample)

    def scandir(self, folder: str | bytes = "") -> list[PackEntry]:
        """Return the entries of a folder of the pack: its folders, then its samples, each sorted.

        Takes time proportional to the number of entries, not to the samples in sub-folders.

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
        return self._open().entries(number)

    def walk(self, top: str | bytes = "") -> Iterator[tuple[str, list[PackEntry]]]:
        """Yield each folder from `top` on, depth first: its path and its entries."""
        stack = [(os.fsdecode(top).strip("/"), self.scandir(top))]
        while stack:
            path, entries = stack.pop()
            yield path, entries
            below = list(itertools.takewhile(lambda entry: entry.is_folder, entries))
            stack += [
                (f"{path}/{entry.name}" if path else entry.name, self._open().entries(entry.number))
                for entry in reversed(below)
            ]

    def evict(self) -> None:
        """Drop the pack's pages from this process and, where no other uses them, from memory."""
        self._open().evict()

    def verify(
        self, on_progress: Callable[[int, int], None] | None = None
    ) -> Iterator[CorruptPack]:
        """Verify the index, then every sample, and yield an error for whatever is damaged.

        If the bytes of the index are damaged, nothing is known of the samples, and that is the only
        error.

        Where samples have no checksums (`is_verified`), only those that cannot be read are damaged.

        Args:
            on_progress: called with the samples read so far and their total.
        """
        reader = self._open()
        total = reader.sample_count
        try:
            reader.verify_index()
        except CorruptPack as damage:
            yield damage
            return
        found = set()
        for first in range(0, total, _VERIFY_SAMPLES):
            end = min(first + _VERIFY_SAMPLES, total)
            for bad in reader.verify(first, end):
                problem = corrupt_sample(str(self.index.shard_path(bad.shard)), bad)
                found.add(problem.what)
                yield problem
            if on_progress is not None:
                on_progress(end, total)
        try:
            self.index.check()
        except CorruptPack as problem:
            if problem.what not in found:
                yield problem

    def checksums(self, first: int, end: int) -> NDArray[np.uint32]:
        """Compute the CRC-32C of samples `first` to `end` - 1 of data in place."""
        return self._open().checksums(first, end)

    def close(self) -> None:
        """Release the files. Reads in progress in other threads still finish."""
        self._closed = True
        self._reader = self._index = None

    def _open(self) -> PackReader:
        reader = self._reader
        if reader is not None:
            return reader
        if self._closed:
            raise UsageError(
                "the pack is closed", where=str(self.path), fix="Open it again: open_pack"
            )
        if self._side_file is None:
            require_pack(self.path)
        reader = PackReader(os.fsencode(self._side_file or self.path), **self._options)
        index = IndexFile(reader)
        if self._identity not in (None, index.identity):
            raise UsageError(
                "the pack is not the one that was opened before",
                where=str(self.path),
                why="another pack is at its path now",
                fix="Open it again",
            )
        self._identity = index.identity
        self._index = index
        self._reader = reader  # last: another thread that sees it finds the index as well
        return reader

    def _ids(self, samples: ArrayLike, reader: PackReader) -> NDArray[np.int64]:
        """Return the numbers of samples that exist."""
        ids = self._flat(samples)
        if ids.size:
            found = np.asarray(samples)
            self._check_range(int(found.min()), int(found.max()), reader)
        return ids

    def _flat(self, samples: ArrayLike) -> NDArray[np.int64]:
        """Return numbers of samples; whether these exist is for the reader to check."""
        ids = np.asarray(samples)
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise UsageError(
                "samples must be a list of integers",
                where=str(self.path),
                why=f"got an array of shape {ids.shape} and type {ids.dtype}",
                fix="Give a list or a flat array of integers",
            )
        return np.ascontiguousarray(ids, np.int64)

    def _check_range(self, low: int, high: int, reader: PackReader) -> None:
        if low < 0 or high >= reader.sample_count:
            wrong = low if low < 0 else high
            raise IndexError(
                f"no sample {wrong}: {self.path} has samples 0 to {reader.sample_count - 1}"
            )


class _Strings(Sequence[str]):
    """Names in the mapped index, decoded on access."""

    def __init__(self, count: int, get: Callable[[int], bytes]) -> None:
        self._count = count
        self._get = get

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return os.fsdecode(self._get(index % self._count))


def open_packed(path: str | os.PathLike[str], *, index_only: bool = False) -> Pack:
    """Open the pack at `path`, not data in place; otherwise as `paceline.store.open_pack`."""
    pack = Pack(path, read_options(index_only=index_only))
    pack._open()  # noqa: SLF001  # opening lazily is only for unpickling
    return pack


def read_options(
    *,
    verify: str = "first",
    threads: int | None = None,
    direct: bool = False,
    index_only: bool = False,
) -> dict[str, Any]:
    """Return the options of `paceline.store.open_pack` as the reader takes them.

    Raises:
        UsageError: there is no such policy, or `threads` is below 1.
    """
    if verify not in _POLICIES:
        raise UsageError(
            f"unknown policy {verify!a} for verifying checksums",
            where="verify",
            fix="Use one of " + ", ".join(_POLICIES),
        )
    if threads is not None and threads < 1:
        raise UsageError(
            f"threads must be at least 1, got {threads}",
            where="threads",
            fix="Leave threads out: the default is one per core, at most 8, or 8 with direct",
        )
    if threads is None:
        threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
        if direct:
            threads = _DIRECT_THREADS
    return {"verify": verify, "threads": threads, "direct": direct, "index_only": index_only}
