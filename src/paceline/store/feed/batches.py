"""Makes one batch of a pack for torch: reads, decodes, transforms and collates it.

A loader's worker threads call `BatchMaker`; worker processes get a pickled copy of it.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
import torch.utils.data
from numpy.typing import NDArray

from paceline.core.errors import (
    CorruptData,
    CorruptPack,
    MemoryExceeded,
    PacelineError,
    ScriptFailed,
)
from paceline.store.feed.crops import ImageCrop, output_size
from paceline.store.feed.draws import saying_draws
from paceline.store.feed.images import ImageDecoder, is_jpeg
from paceline.store.feed.node.client import NodeSamples
from paceline.store.feed.options import StageTimes
from paceline.store.feed.stacking import TensorStack, recycled

if TYPE_CHECKING:
    from paceline.store.feed.options import LoaderOptions
    from paceline.store.feed.tasks import BatchTask
    from paceline.store.read.pack import Pack


class RawSamples(Sequence[memoryview]):
    """The bytes of a batch: a view of each sample that is asked for.

    Samples lie in one buffer, or in memory that the ranks of a node share, where the node's reader
    put them. There they are not copied as long as `buffer` is not asked for, and the memory is this
    batch's while a view of it, or a tensor, is referenced.

    Attributes:
        offsets: offset of each sample in `buffer`, and the end, int64, shape (samples + 1,).
    """

    def __init__(self, buffer: torch.Tensor, offsets: NDArray[np.int64]) -> None:
        self.offsets = offsets
        self._buffer: torch.Tensor | None = buffer
        self._memory: NDArray[np.uint8] = buffer.numpy()
        self._begins = offsets[:-1]

    @classmethod
    def shared(cls, samples: NodeSamples) -> RawSamples:
        """Return samples where the node's reader put them."""
        made = cls.__new__(cls)
        made.offsets = np.zeros(len(samples) + 1, np.int64)
        np.cumsum(samples.lengths, out=made.offsets[1:])
        made._buffer = None  # noqa: SLF001  # a constructor
        made._memory, made._begins = samples.data, samples.begins  # noqa: SLF001
        return made

    @property
    def buffer(self) -> torch.Tensor:
        """All samples one after another, uint8, shape (bytes,): a copy where they are shared."""
        if self._buffer is None:
            joined = torch.empty(self.size_bytes, dtype=torch.uint8)
            target = joined.numpy()
            for (begin, end), view in zip(itertools.pairwise(self.offsets), self, strict=True):
                target[begin:end] = view
            self._buffer, self._memory = joined, target
            self._begins = self.offsets[:-1]
        return self._buffer

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
        begin = self._begins[index]
        return self._memory.data[begin : begin + self.offsets[index + 1] - self.offsets[index]]

    def __iter__(self) -> Iterator[memoryview]:
        view = self._memory.data
        sizes = np.diff(self.offsets).tolist()
        return (view[a : a + n] for a, n in zip(self._begins.tolist(), sizes, strict=True))

    @property
    def size_bytes(self) -> int:
        """Bytes of all samples."""
        return int(self.offsets[-1])

    def tensors(self) -> list[torch.Tensor]:
        """Return each sample as a uint8 tensor that shares this batch's memory."""
        sizes = np.diff(self.offsets).tolist()
        if self._buffer is not None:
            return list(torch.split(self._buffer, sizes))
        bounds = zip(self._begins.tolist(), sizes, strict=True)
        return [torch.from_numpy(self._memory[begin : begin + size]) for begin, size in bounds]

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
    stages: StageTimes
    lacks_simplejpeg: bool = False  # JPEGs were decoded without it
    is_from_node: bool = False  # read by the node's reader

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory; torch's DataLoader calls it, too."""
        pinned = torch.utils.data._utils.pin_memory.pin_memory(self.content)  # noqa: SLF001  # torch offers it nowhere else
        return dataclasses.replace(self, content=tuple(pinned))


@dataclass(slots=True)
class _Making:
    """A batch in the making: what a thread knows of it so far.

    Attributes:
        bodies: stored bytes of each sample.
        numbers: number of each sample, shape (samples,).
        draws: random numbers of each sample's crop; None without a crop.
        stages: where the time went.
        failures: by index into `bodies`, why a sample could not be decoded.
        worker: name of the thread.
    """

    bodies: RawSamples | NodeSamples
    numbers: NDArray[np.int64]
    draws: NDArray[np.float64] | None
    stages: StageTimes
    failures: dict[int, CorruptData | MemoryExceeded] = field(default_factory=dict)
    worker: str = field(default_factory=lambda: threading.current_thread().name)


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
        ranks: int = 1,
    ) -> None:
        self.pack = pack
        self.options = options
        self.transform = transform
        self.collate = collate or torch.utils.data.default_collate
        self.stacks = collate is None
        self.raw = transform is None and options.decode is None and collate is None
        self.in_place = transform is None and collate is None  # decodes into the batch's memory
        self.pin = pin
        # Whether to look at the first sample for draws that may be the same on all ranks: worker
        # processes have seeds of their own.
        self._looks_at_draws = ranks > 1 and options.worker_kind == "thread"
        self.at: dict[str, int] = {}  # the sample that each thread is working on
        self._reading = _ReadClock(pack)
        self.decoder = None if options.decode is None else ImageDecoder(options.max_pixels)
        self.crop = options.decode if isinstance(options.decode, ImageCrop) else None

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
            CorruptData: a sample cannot be decoded, with the same policy.
            MemoryExceeded: the batch does not fit into memory, if the index is right.
            ScriptFailed: a sample cannot be transformed or collated.
        """
        began_s = time.perf_counter()
        shared = None if task.node is None else task.node.take(task.step, len(task.numbers))
        bodies: RawSamples | NodeSamples
        if shared is None:
            numbers, skipped, bodies = self._read(task.numbers)
        else:
            numbers, skipped = task.numbers, []
            bodies = RawSamples.shared(shared) if self.raw else shared
        stages = self._reading.split(time.perf_counter() - began_s)
        draws = self.crop.draws(self.options.seed, task.epoch, numbers) if self.crop else None
        making = _Making(bodies, numbers, draws, stages)
        samples: Any = bodies if self.raw else self._process(making)
        skipped += [self._name(int(numbers[index])) for index in making.failures]
        labels = torch.from_numpy(self.pack.labels_of(making.numbers).astype(np.int64))
        content: tuple[Any, ...] = (samples, labels)
        if self.options.numbers:
            content += (torch.from_numpy(making.numbers),)
        stored = bodies.size_bytes
        size = stored if self.raw else _tensor_bytes(samples)
        slow = self.decoder is not None and not self.decoder.has_simplejpeg
        lacks = slow and any(map(is_jpeg, bodies))
        made = Batch(
            content=content,
            sample_count=len(making.numbers),
            stored_bytes=stored,
            size_bytes=size,
            skipped=skipped,
            stages=stages,
            lacks_simplejpeg=lacks,
            is_from_node=shared is not None,
        )
        return made.pin_memory() if self.pin else made

    def describe(self, worker: str) -> str:
        """Say what a thread is working on."""
        number = self.at.get(worker)
        return str(self.pack.path) if number is None else self._named(number)

    def _read(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str], RawSamples]:
        """Return the samples that can be read, the names of the others, and the bytes."""
        skipped: list[str] = []
        try:
            buffer, offsets = self.pack.read_batch(numbers)
        except (CorruptPack, MemoryExceeded) as damage:  # too large: perhaps by a false claim
            if self.options.on_corrupt == "raise":
                raise
            numbers, skipped = self._without_damaged(numbers, damage)
            buffer, offsets = self.pack.read_batch(numbers)
        return numbers, skipped, _raw(buffer, offsets)

    def _process(self, making: _Making) -> Any:
        """Return the decoded, transformed and collated samples, without those that failed."""
        try:
            shape = self._shape_in_place(making)
            if shape is not None:
                return self._decode_in_place(making, shape)
            items = self._items(making)
        finally:
            self.at.pop(making.worker, None)
        if isinstance(items, torch.Tensor):
            return items
        began_s = time.perf_counter()
        try:
            return self.collate(items)
        except Exception as error:
            raise ScriptFailed(
                f"cannot collate the batch that begins with {self._named(int(making.numbers[0]))}",
                where=str(self.pack.path),
                why=f"{type(error).__name__}: {error}",
                fix="Let the transform make samples of one shape (decode=RandomCrop(...) does), or "
                "give a collate",
            ) from error
        finally:
            making.stages.collate_s += time.perf_counter() - began_s

    def _shape_in_place(self, making: _Making) -> tuple[int, int] | None:
        """Return the one shape of all images if they go straight into the batch's memory."""
        if self.decoder is None or not self.in_place:
            return None
        if self.crop is not None:
            return output_size(self.crop.size)
        shapes = {self.decoder.jpeg_size(body) for body in making.bodies}
        return shapes.pop() if len(shapes) == 1 else None  # None: not a JPEG

    def _decode_in_place(self, making: _Making, shape: tuple[int, int]) -> torch.Tensor:
        began_s = time.perf_counter()
        try:
            pixels = recycled((len(making.numbers), *shape, 3), torch.uint8)
        except MemoryError as error:
            raise MemoryExceeded(
                "the decoded batch does not fit into memory",
                where=f"{self.pack.path}: {self._named(int(making.numbers[0]))}",
                why=f"{len(making.numbers)} images of {shape[1]} x {shape[0]} pixels",
                fix="Use smaller batches, or decode=RandomCrop(...) or CenterCrop(...)",
            ) from error
        for index, (body, number) in enumerate(
            zip(making.bodies, making.numbers.tolist(), strict=True)
        ):
            self.at[making.worker] = number
            self._decode(making, index, body, pixels[index].numpy())
        if making.failures:
            pixels = pixels[self._without_failures(making)]
        making.stages.decode_s = time.perf_counter() - began_s
        return pixels.permute(0, 3, 1, 2)

    def _items(self, making: _Making) -> list[Any] | torch.Tensor:
        """Return the transformed samples; stacked if they are tensors that torch would stack."""
        stack, clock = TensorStack(len(making.numbers) if self.stacks else 0), time.perf_counter
        transform = self.transform if self.transform is not None else _unchanged
        began_s = clock()
        for index, (body, number) in enumerate(
            zip(making.bodies, making.numbers.tolist(), strict=True)
        ):
            self.at[making.worker] = number
            item: Any = body
            if self.decoder is not None:
                pixels = self._decode(making, index, body, None)
                if pixels is None:
                    continue
                item = torch.from_numpy(pixels).permute(2, 0, 1)
                decoded_s = clock()
                making.stages.decode_s += decoded_s - began_s
                began_s = decoded_s
            item = self._transformed(transform, item, number)
            if self.decoder is not None:
                transformed_s = clock()
                making.stages.transform_s += transformed_s - began_s
                stack.add(item)
                began_s = clock()
                making.stages.collate_s += began_s - transformed_s
            else:
                stack.add(item)
        if self.decoder is None:
            making.stages.transform_s = clock() - began_s
        if making.failures:
            self._without_failures(making)
        return stack.items if stack.batch is None else stack.batch

    def _transformed(self, transform: Callable[[Any], Any], item: Any, number: int) -> Any:
        try:
            if self._looks_at_draws:
                self._looks_at_draws = False
                transform = saying_draws(transform)
            return transform(item)
        except PacelineError:
            raise
        except Exception as error:
            raise ScriptFailed(
                f"cannot transform {self._named(number)}",
                where=str(self.pack.path),
                why=f"{type(error).__name__}: {error}",
                fix="Correct the transform, or leave the sample out of the pack",
            ) from error

    def _decode(
        self, making: _Making, index: int, body: memoryview, out: NDArray[np.uint8] | None
    ) -> NDArray[np.uint8] | None:
        """Return the pixels of a sample; None if it cannot be decoded and is to be skipped."""
        assert self.decoder is not None
        try:
            if self.crop is None:
                return self.decoder.decode(body, out)
            assert making.draws is not None
            shown = np.empty((*output_size(self.crop.size), 3), np.uint8) if out is None else out
            self.decoder.decode_crop(body, self.crop, making.draws[index], shown)
            return shown
        except Exception as error:
            failure = self._failure(int(making.numbers[index]), error)
            if self.options.on_corrupt == "raise":
                raise failure from error
            making.failures[index] = failure
            return None

    def _failure(self, number: int, error: Exception) -> CorruptData | MemoryExceeded:
        """Return the error for a sample that cannot be decoded."""
        where = str(self.pack.path)
        if isinstance(error, MemoryExceeded):
            what = f"{self._named(number)} is {error.what}"
            return MemoryExceeded(what, where=where, why=error.why, fix=error.fix)
        return CorruptData(
            f"cannot decode {self._named(number)}",
            where=where,
            why=f"{type(error).__name__}: {error}",
            fix="Pack it again from a good copy, or skip such samples: on_corrupt='skip'",
        )

    def _without_failures(self, making: _Making) -> list[int]:
        """Leave out the samples that could not be decoded; return the indices of the others."""
        good = [index for index in range(len(making.numbers)) if index not in making.failures]
        if not good:
            raise next(iter(making.failures.values()))
        making.numbers = making.numbers[good]
        return good

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


class _ReadClock:
    """Splits the time of reading a batch into reading and verifying.

    Several threads read from one pack, which counts for all of them. Each batch gets the share of
    verifying since the last batch that any thread read: the sums over batches are right.
    """

    def __init__(self, pack: Pack) -> None:
        self._pack = pack
        self._lock = threading.Lock()
        self._busy_s, self._verify_s = pack.read_times_s

    def __reduce__(self) -> tuple[type[_ReadClock], tuple[Pack]]:
        return (_ReadClock, (self._pack,))

    def split(self, seconds: float) -> StageTimes:
        """Return the stages of a batch whose reading took so long."""
        with self._lock:
            busy_s, verify_s = self._pack.read_times_s
            since_busy_s, since_verify_s = busy_s - self._busy_s, verify_s - self._verify_s
            self._busy_s, self._verify_s = busy_s, verify_s
        share = min(1.0, since_verify_s / since_busy_s) if since_busy_s > 0 else 0.0
        return StageTimes(read_s=seconds * (1 - share), verify_s=seconds * share)


def _unchanged(item: Any) -> Any:
    return item


def _raw(buffer: NDArray[np.uint8], offsets: NDArray[np.int64]) -> RawSamples:
    return RawSamples(torch.from_numpy(buffer), offsets)


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
