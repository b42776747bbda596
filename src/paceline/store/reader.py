"""Reads packs: by index, by name, in batches; the work is in C++ with the GIL released.

Every read verifies the sample's checksum over the very bytes that it returns. A `Pack` may be used
from many threads, survives fork (its mappings are read-only and shared) and pickles as its path:
the process that unpickles it maps the files anew when it first needs them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from paceline.core.errors import CorruptPack, NotFound, PacelineError, StorageError, UsageError
from paceline.native import PackError, PackReader
from paceline.store.format import FORMAT_VERSION, INDEX_NAME, PARTIAL_SUFFIX, shard_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

_VERIFY_SAMPLES = 256  # a call: short enough that Ctrl-C and progress come through


class Pack:
    """A data set that `open_pack` opened. Samples are numbered from 0 in the order of names."""

    def __init__(self, path: str | os.PathLike[str], identity: int | None = None) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100  # keeps links as the user wrote them
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

    def __reduce__(self) -> tuple[type[Pack], tuple[str, int]]:
        return (Pack, (str(self.path), self._open().identity))

    def __repr__(self) -> str:
        return f"Pack({str(self.path)!r})"

    def __len__(self) -> int:
        return self._open().sample_count

    @property
    def lengths(self) -> NDArray[np.uint64]:
        """Bytes of each sample; a view of the mapped index, as are `labels` and `shards`."""
        return self._open().lengths

    @property
    def labels(self) -> NDArray[np.int32]:
        """Each sample's position in `class_names`; -1 = it lies in no class."""
        return self._open().labels

    @property
    def shards(self) -> NDArray[np.uint32]:
        """The shard in which each sample lies."""
        return self._open().shards

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
        """Relative paths of the folders, also of those without samples."""
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

    def read_batch(self, samples: ArrayLike) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Return several samples in one buffer, and where each begins.

        Args:
            samples: indices, shape (n,), in any order and with repetitions.

        Returns:
            The buffer, and offsets of shape (n + 1,): sample k is ``buffer[offsets[k]:offsets[k +
            1]]``. Both belong to the caller.

        Raises:
            CorruptPack: a sample does not match its checksum; nothing is returned.
            IndexError: there is no such sample.
        """
        ids = np.asarray(samples)
        if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise UsageError(
                "samples are named by a list of integers",
                where=str(self.path),
                why=f"got an array of shape {ids.shape} and type {ids.dtype}",
                fix="Give a list or a flat array of integers",
            )
        reader = self._open()
        if ids.size:
            self._check_range(int(ids.min()), int(ids.max()), reader)
        try:
            return reader.read_batch(np.ascontiguousarray(ids, np.int64))
        except PackError as problem:
            raise self._translated(problem) from None

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
                yield self._corrupt_sample(sample, int(reader.shards[sample]), why)
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
            reader = PackReader(os.fsencode(self.path))
        except PackError as problem:
            raise self._translated(problem) from None
        if self._identity not in (None, reader.identity):
            raise UsageError(
                "the pack is not the one that was opened before",
                where=str(self.path),
                why="another pack has taken its place",
                fix="Open it again",
            )
        self._identity = reader.identity
        self._reader = reader
        return reader

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
                why=f"{why}; this Paceline reads up to version {FORMAT_VERSION}",
                fix="Use a newer Paceline",
            )
        if kind == "io" and not isinstance(OSError(error, why), FileNotFoundError):
            return StorageError(
                "cannot open the pack", where=where, why=why, fix="Check that you may read it"
            )
        if kind == "io" and where.endswith(INDEX_NAME):
            return _no_pack(self.path)
        return CorruptPack(
            "the pack is damaged" if kind != "io" else "a file of the pack is missing",
            where=where,
            why=why,
            fix="Pack the source again, or bring back a good copy",
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
            fix="Pack the source again, or bring back a good copy of the shard",
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


def open_pack(path: str | os.PathLike[str]) -> Pack:
    """Open the pack at `path`, checking its index and the length of every shard.

    Raises:
        NotFound: there is no pack there.
        CorruptPack: the index is damaged, or a shard is missing or cut off; or it is unfinished.
        UsageError: a newer Paceline wrote it.
        StorageError: a file cannot be opened.
    """
    pack = Pack(path)
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
