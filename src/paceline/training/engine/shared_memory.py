"""The modes `sharded` and `root` where all ranks share a host and train on CPUs.

`sharded` has one copy of the parameters, in memory that all ranks have mapped:

    backward    each rank averages its part of all ranks' gradients, which it reads where they lie
    step        barrier; each rank updates its part of the one copy; barrier

so that nothing is gathered, and parameters take memory once. The end of the reduction proves that
no rank's backward pass still reads parameters; the barrier before the update also holds back what
other ranks read between backward pass and step. After `step` has returned, all parameters are
those of the new step. Buffers, and parameters that are not trained, stay with each rank.

`root` keeps S-Caffe's form: each rank has its own parameters. Rank 0 averages gradients that it
reads where they lie, and the other ranks copy its parameters after its update, layer by layer where
they overlap. With overlapped gradients a rank says of each bucket when it is full, and rank 0
reduces it while the others compute on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.training.engine.modes import Root, Sharded, flatten, give

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from paceline.collectives.tensor_heap import TensorHeap
    from paceline.training.engine.buckets import GradientBucket
    from paceline.training.engine.ranks import Ranks


class SharedMemorySharded(Sharded):
    """Every rank updates its part of parameters of which all ranks have one copy."""

    returns_parameters = False  # what the ranks updated is there when `step` returns

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._heap = _heap_of(ranks)

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Move the parameters into the memory that all ranks share; each has its own gradients.

        Raises:
            UsageError: an optimizer has the parts of other buckets already.
        """
        super().arrange(buckets)
        self._heap.barrier()  # every rank has written the values, equal on all

    def _flatten(self, bucket: GradientBucket) -> torch.Tensor:
        gradients = bucket.gradients
        return flatten(bucket, self._heap.shared(gradients.numel(), gradients.dtype))

    def _own_gradients_of(self, bucket: GradientBucket, begin: int, length: int) -> torch.Tensor:
        return bucket.gradients[begin : begin + length]

    def reduce(self, bucket: GradientBucket) -> Any:
        """Average this rank's part of the gradients of all ranks."""
        self._heap.average_part(bucket.gradients)

    def reduced(self, bucket: GradientBucket) -> None:
        """Give each slice of a parameter its average; None to one that no rank used."""
        self._give_slices(bucket)

    def _reduce_flags(self, flags: torch.Tensor) -> None:
        self._heap.average(flags)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer update this rank's slices, between two barriers.

        Raises:
            UsageError: it may look at whole tensors.
        """
        super().adopt(optimizer)
        optimizer.register_step_pre_hook(self._wait)
        optimizer.register_step_post_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self._heap.barrier()


class SharedMemoryRoot(Root):
    """Rank 0 reads all gradients where they lie, and the others copy what it updated."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(ranks)
        self._heap = _heap_of(ranks)
        self._of_root: dict[int, torch.Tensor] = {}
        self._last = 0

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Move the parameters of each bucket into one flat tensor that all ranks can read."""
        self._flat, self._of_root = {}, {}
        for bucket in buckets:
            gradients = bucket.gradients
            own = self._heap.empty(gradients.numel(), gradients.dtype)
            self._flat[bucket.number] = flatten(bucket, own)
            self._of_root[bucket.number] = self._heap.of_root(own)
        self._last = len(buckets) - 1

    def reduce(self, bucket: GradientBucket) -> Any:
        """Say that the gradients can be read; rank 0 reads them when its backward pass is over."""
        if self._ranks.rank == 0:
            return _Deferred(self._heap.average_at_root, bucket.gradients)
        return self._heap.average_at_root(bucket.gradients)

    def reduced(self, bucket: GradientBucket) -> None:
        """Give the root the averages; the others have nothing to update."""
        if bucket.number == self._last:
            self._heap.barrier()  # the root has read all: gradients may change again
        give(bucket, bucket.used.tolist() if self._ranks.rank == 0 else [0.0] * len(bucket.names))

    def updated(self, bucket: GradientBucket) -> Any:
        """Copy the root's parameters, when they are first needed."""
        if bucket.number == self._last:  # the first one: front layers return first
            self._heap.barrier()
        if self._ranks.rank == 0:
            return None
        return _Deferred(self._flat[bucket.number].copy_, self._of_root[bucket.number])


class _Deferred:
    """A work that is done when it is awaited."""

    def __init__(self, do: Any, tensor: torch.Tensor) -> None:
        self._do, self._tensor = do, tensor

    def wait(self) -> None:
        self._do(self._tensor)


def _heap_of(ranks: Ranks) -> TensorHeap:
    assert ranks.heap is not None
    return ranks.heap
