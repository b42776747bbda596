"""Bytes whose memory may be away: in memory, on their way, or in the spill target.

The step's thread owns them. The target calls `_forget_source` when all bytes are there (a file in
its writer's thread): from then on the memory is free, unless somebody else holds the tensor.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import StorageError
from paceline.training.out_of_core.transfers import aligned

if TYPE_CHECKING:
    from paceline.training.out_of_core.spill_target import SpillTarget
    from paceline.training.out_of_core.transfers import SpillTransfer


CHANGED_IN_PLACE = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation, after it was saved for the backward pass"
)


class Managed:
    """Bytes that are away together: of one storage, or the state of one parameter.

    Args:
        target: where they go.
        index: among those of the step, in the order of their first use.
        sources: views of the bytes, each of shape (size,) and dtype uint8.
        watched: a tensor of the same storage, whose version tells of a change in place.

    Attributes:
        sizes: in bytes of the pieces; each begins at a multiple of the alignment.
    """

    __slots__ = (
        "__weakref__", "_is_spilled", "_is_stale", "_loaded", "_part", "_read",
        "_sources", "_target", "_version", "_watched", "_weak", "_write", "index", "sizes",
    )  # fmt: skip

    def __init__(
        self,
        target: SpillTarget,
        index: int,
        sources: list[torch.Tensor],
        watched: torch.Tensor | None = None,
    ) -> None:
        self.index = index
        self.sizes = [source.numel() for source in sources]
        self._target = target
        self._sources: list[torch.Tensor] | None = sources
        self._watched = watched
        self._version = version_of(watched)
        self._loaded: list[tuple[torch.UntypedStorage, int]] | None = None
        self._part: int | None = None
        self._write: SpillTransfer | None = None
        self._read: SpillTransfer | None = None
        self._is_spilled = self._is_stale = False
        # While there is a weak reference, no other storage gets this one's address.
        self._weak = None if watched is None else watched.untyped_storage()._weak_ref()  # noqa: SLF001  # multiprocessing's

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return sum(self.sizes)

    def spill(self) -> None:
        """Begin to write them; their memory is free afterwards."""
        sources = self._sources
        if sources is None or self._is_spilled:
            return
        self._is_spilled = True
        if self._part is None:
            self._part = self._target.allocate(self._extent_bytes())
        self._write = self._target.write(sources, self._part, self._forget_source)

    def _forget_source(self) -> None:
        """Let go of the memory that was written; of a file in its writer's thread."""
        self._is_stale = self._is_stale or version_of(self._watched) != self._version
        self._watched = None
        self._sources = None

    def wait_written(self) -> None:
        """Wait until the memory is free.

        Raises:
            StorageError: they could not be written.
        """
        if self._write is not None:
            self._write.wait()

    def start_reading(self) -> None:
        """Begin to read them, unless they are in memory."""
        sources = self._sources
        if sources is not None:  # its write is under way: the memory is simply kept
            self._loaded = _places(sources)
        elif self._loaded is None and self._read is None:
            assert self._part is not None
            self._read = self._target.read(self._part, self._extent_bytes(), self._write)

    def load(self) -> list[tuple[torch.UntypedStorage, int]]:
        """Return for each piece the storage that has it, and the bytes before its begin.

        Raises:
            StorageError: they could not be written or read.
            RuntimeError: they were changed in place after they were saved, as autograd raises it.
        """
        sources = self._sources
        if sources is not None and version_of(self._watched) not in (None, self._version):
            self._is_stale = True
        if self._is_stale:
            raise RuntimeError(CHANGED_IN_PLACE)
        if sources is not None:
            return _places(sources)
        if self._loaded is None:
            self.start_reading()
            assert self._read is not None
            self._read.wait()
            read = self._read.bytes
            assert read is not None
            self._read = None
            storage, at = read.untyped_storage(), read.storage_offset()
            self._loaded = []
            for size in self.sizes:
                self._loaded.append((storage, at))
                at += aligned(size)
        return self._loaded

    def replace(self, sources: list[torch.Tensor]) -> None:
        """Take new bytes in pieces of the same sizes."""
        assert [source.numel() for source in sources] == self.sizes
        with contextlib.suppress(StorageError):  # of bytes that these here replace
            self.wait_written()
        self._loaded = self._read = None
        self._sources = sources
        self._is_spilled = False

    def drop(self) -> None:
        """Forget the memory of what is away as well."""
        if self._is_spilled:
            self._loaded = self._read = None

    def _extent_bytes(self) -> int:
        return sum(aligned(size) for size in self.sizes)

    def __del__(self) -> None:
        if self._weak is not None:
            torch.UntypedStorage._free_weak_ref(self._weak)  # noqa: SLF001  # as above
        if self._part is not None:
            self._target.release(self._part, self._extent_bytes(), self._write)


def version_of(tensor: torch.Tensor | None) -> int | None:
    """Return how often a tensor, or another one of its storage, was changed in place."""
    return None if tensor is None else tensor._version  # noqa: SLF001  # no public name


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of a tensor's storage, shape (bytes,), uint8."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def own_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a dense tensor, shape (bytes,), uint8; its storage may have more."""
    begin = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), begin, (tensor.nbytes,), (1,))


def _places(sources: list[torch.Tensor]) -> list[tuple[torch.UntypedStorage, int]]:
    return [(source.untyped_storage(), source.storage_offset()) for source in sources]
