"""Makes one batch of a pack for torch: reads, decodes, transforms and collates it.

A loader's worker threads call `BatchMaker`; worker processes get a pickled copy of it.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
import torch.utils.data

from paceline.core.errors import (
    CorruptPack,
    MemoryExceeded,
    Missing,
    PacelineError,
    ScriptFailed,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paceline.store.feed.options import LoaderOptions
    from paceline.store.feed.tasks import BatchTask
    from paceline.store.read.pack import Pack


class RawSamples(Sequence[memoryview]):
    """The bytes of a batch: one buffer, and a view of it for each sample that is asked for.

    Attributes:
        buffer: all samples one after another, uint8, shape (bytes,).
        offsets: offset of each sample, and the end, int64, shape (samples + 1,).
    """

    def __init__(self, buffer: torch.Tensor, offsets: NDArray[np.int64]) -> None:
        self.buffer = buffer
        self.offsets = offsets
        self._view = memoryview(buffer.numpy())

    def __reduce__(self) -> tuple[type[RawSamples], tuple[torch.Tensor, NDArray[np.int64]]]:
        return (RawSamples, (self.buffer, self.offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...
    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        return self._view[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[memoryview]:
        view, bounds = self._view, self.offsets.tolist()
        return (view[a:b] for a, b in itertools.pairwise(bounds))

    def tensors(self) -> list[torch.Tensor]:
        """Return each sample as a uint8 tensor that shares the buffer."""
        return list(torch.split(self.buffer, np.diff(self.offsets).tolist()))

    def pin_memory(self) -> RawSamples:
        """Return the same in page-locked memory, from where a GPU copies without waiting."""
        return RawSamples(self.buffer.pin_memory(), self.offsets)


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as it is delivered, and what the statistics count."""

    content: tuple[Any, ...]
    sample_count: int
    stored_bytes: int
    size_bytes: int
    skipped: list[str]

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory; torch's DataLoader calls it, too."""
        pinned = torch.utils.data._utils.pin_memory.pin_memory(self.content)  # noqa: SLF001  # torch offers it nowhere else
        return dataclasses.replace(self, content=tuple(pinned))


class BatchMaker:
    """Reads, decodes, transforms and collates one batch; threads and processes call the same."""

    def __init__(
        self,
        pack: Pack,
        options: LoaderOptions,
        transform: Callable[[Any], Any] | None,
        collate: Callable[[list[Any]], Any] | None,
        *,
        pin: bool,
    ) -> None:
        self.pack = pack
        self.options = options
        self.transform = transform
        self.collate = collate or torch.utils.data.default_collate
        self.raw = transform is None and options.decode is None and collate is None
        self.pin = pin
        self.at: dict[str, int] = {}  # the sample that each thread is working on
        if options.decode == "image":
            _require_pillow()

    def __getitem__(self, task: BatchTask) -> Batch | Exception:
        """Return the batch, or the error that it ended with: as a map-style data set does."""
        try:
            return self.make(task)
        except Exception as error:  # noqa: BLE001  # goes through a pipe, raised at its end
            return error

    def make(self, task: BatchTask) -> Batch:
        """Return the batch.

        Raises:
            CorruptPack: a sample is damaged, and the policy is ``raise``; or all of them are.
            MemoryExceeded: the batch does not fit into memory, if the index is right.
            ScriptFailed: a sample cannot be decoded, transformed or collated.
        """
        numbers = task.numbers
        skipped: list[str] = []
        try:
            buffer, offsets = self.pack.read_batch(numbers)
        except (CorruptPack, MemoryExceeded) as damage:  # too large: perhaps by a false claim
            if self.options.on_corrupt == "raise":
                raise
            numbers, skipped = self._without_damaged(numbers, damage)
            buffer, offsets = self.pack.read_batch(numbers)
        bodies = RawSamples(torch.from_numpy(buffer), offsets)
        samples: Any = bodies if self.raw else self._collated(bodies, numbers)
        labels = torch.from_numpy(self.pack.labels_of(numbers).astype(np.int64))
        content: tuple[Any, ...] = (samples, labels)
        if self.options.numbers:
            content += (torch.from_numpy(numbers),)
        stored = int(offsets[-1])
        size = stored if self.raw else _tensor_bytes(samples)
        made = Batch(content, len(numbers), stored, size, skipped)
        return made.pin_memory() if self.pin else made

    def describe(self, worker: str) -> str:
        """Say what a thread is working on."""
        number = self.at.get(worker)
        return str(self.pack.path) if number is None else self._named(number)

    def _collated(self, bodies: RawSamples, numbers: NDArray[np.int64]) -> Any:
        me = threading.current_thread().name
        items = []
        try:
            for body, number in zip(bodies, numbers.tolist(), strict=True):
                self.at[me] = number
                items.append(self._item(body))
        except PacelineError:
            raise
        except Exception as error:
            raise ScriptFailed(
                f"cannot decode or transform {self._named(number)}",
                where=str(self.pack.path),
                why=f"{type(error).__name__}: {error}",
                fix="Correct the transform, or leave the sample out of the pack",
            ) from error
        finally:
            self.at.pop(me, None)
        try:
            return self.collate(items)
        except Exception as error:
            raise ScriptFailed(
                f"cannot collate the batch that begins with {self._named(int(numbers[0]))}",
                where=str(self.pack.path),
                why=f"{type(error).__name__}: {error}",
                fix="Let the transform make samples of one shape, or give a collate",
            ) from error

    def _item(self, body: memoryview) -> Any:
        item = _decode_image(body) if self.options.decode == "image" else body
        return item if self.transform is None else self.transform(item)

    def _without_damaged(
        self, numbers: NDArray[np.int64], damage: CorruptPack | MemoryExceeded
    ) -> tuple[NDArray[np.int64], list[str]]:
        good, skipped = [], []
        for number in numbers.tolist():
            try:
                self.pack.read(number)
                good.append(number)
            except CorruptPack:
                skipped.append(self._name(number))
        if not good:
            raise damage
        return np.array(good, np.int64), skipped

    def _named(self, number: int) -> str:
        return f"sample {number} {self._name(number)!a}"

    def _name(self, number: int) -> str:
        try:
            return self.pack.names[number]
        except CorruptPack:  # the index is damaged there, too
            return "?"


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise Missing(
            "images are decoded by Pillow, which is not installed",
            why=str(error),
            fix="pip install 'paceline[demo]', or pip install Pillow",
        ) from error


def _decode_image(body: memoryview) -> torch.Tensor:
    """Return an image's pixels: uint8, shape (3, height, width)."""
    from PIL import Image

    with Image.open(io.BytesIO(body)) as image:
        pixels_HWC = np.array(image.convert("RGB"))  # noqa: N806  # a copy, and so writable
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous()


def _tensor_bytes(item: Any) -> int:
    """Return the bytes of the tensors in a batch."""
    if isinstance(item, torch.Tensor):
        return int(item.numel() * item.element_size())
    if isinstance(item, Mapping):
        return sum(map(_tensor_bytes, item.values()))
    if isinstance(item, np.ndarray | memoryview | RawSamples):
        return int(item.buffer.numel()) if isinstance(item, RawSamples) else item.nbytes
    if isinstance(item, bytes | str):
        return len(item)
    return sum(map(_tensor_bytes, item)) if isinstance(item, Sequence) else 0
