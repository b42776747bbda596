"""In which order the models of a process group issue their collectives: the same on all ranks.

Within a model buckets are reduced in the order of their numbers, whatever order gradients come in.
A loss may also train several models (a generator through its discriminator, two towers), and ranks
may run them in different orders. A collective has no name: the second one of a rank meets the
second one of another, so that ranks which issue the buckets of two models in orders of their own
add gradients of different parameters, without an error where the sizes agree.

    agreed order     model 1: bucket 0, 1, ...  |  model 0: bucket 0, 1, ...  |  ...
    during backward  a bucket is issued when it is full, and all before it were issued
    at its end       the rest, in the same order

The models of the last pass come first, ordered as rank 0 began them when a pass first trained
them together; then the others, as they were made. Nothing is negotiated later. A model's first pass
begins by comparing which models the ranks train, and a digest of what lies in each one's buckets:
until then no bucket of the group is issued before the end of a pass.

A model that comes after one without gradients in a pass waits for the end of that pass: no rank can
know sooner that the other one will bring none.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from paceline.core.errors import UsageError
from paceline.store.feed.phases import PHASES
from paceline.training.engine.ranks import first_difference

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.training.engine.buckets import GradientBucket
    from paceline.training.engine.ranks import Ranks


# A model that this many passes did not train no longer delays the others; nor is it compared.
_PATIENCE = 8


class TrainedModel(Protocol):
    """What the order asks of a model.

    Attributes:
        ranks: that train it.
        buckets: of its gradients, in their order.
    """

    ranks: Ranks
    buckets: list[GradientBucket]

    def issue_full(self) -> bool:
        """Start to reduce buckets that are full; return whether all of this pass have started."""

    def issue_rest(self) -> None:
        """Start to reduce the buckets that have not been in this pass."""

    def end_pass(self) -> None:
        """Wait for what was started, and give gradients to their parameters."""


class CommunicationOrder:
    """The models that ranks train in a process group; made by `order_of`.

    Called by the thread that runs the backward pass.
    """

    def __init__(self) -> None:
        self._models: dict[int, weakref.ref[Any]] = {}  # by number, in which they were made
        self._places: list[int] = []  # numbers, in the order of this pass
        self._begun: list[int] = []  # of this pass, as they began
        self._agreed: dict[frozenset[int], list[int]] = {}  # order of models that train together
        self._expected: dict[int, int] = {}  # models without a pass yet; passes to wait for it

    def add(self, model: TrainedModel) -> int:
        """Take a model, last in order; return its number. All ranks do so in the same order."""
        number = len(self._places)
        self._models[number] = weakref.ref(model)
        self._places.append(number)
        self._expected[number] = _PATIENCE
        return number

    def expect(self, number: int) -> None:
        """Compare a model between the ranks again in its next pass: its buckets are new."""
        self._expected[number] = _PATIENCE

    def begin(self, number: int) -> None:
        """Note that the backward pass has brought a model's first gradient."""
        if not self._begun:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)  # noqa: SLF001  # as DDP
        self._begun.append(number)

    def issue_full(self) -> None:
        """Start to reduce what is full, and before which nothing is missing."""
        if any(self._models[number]() is not None for number in self._expected):
            return
        begun = set(self._begun)
        for number in self._places:
            model = self._models[number]()
            if model is None:  # nothing trains it any more
                continue
            if number not in begun or not model.issue_full():
                return

    def _finish(self) -> None:
        """End a backward pass: all its models' gradients are reduced, and where they belong."""
        PHASES.cores_are_free()
        begun, self._begun = self._begun, []
        alive: dict[int, Any] = {number: self._models[number]() for number in begun}
        if any(number in self._expected for number in begun):
            self._compare(alive)
        models = [alive[number] for number in self._places if number in alive]
        for model in models:
            model.issue_rest()
        for model in models:
            model.end_pass()
        self._order_next(begun, models[0].ranks)

    def _order_next(self, begun: list[int], ranks: Ranks) -> None:
        """Put the models of this pass first, as rank 0 began them when they first came together."""
        together = frozenset(begun)
        if together not in self._agreed:
            agreed: list[Any] = [begun]
            if len(begun) > 1:
                dist.broadcast_object_list(agreed, group=ranks.group, group_src=0)
            self._agreed[together] = agreed[0]
        others = [number for number in self._places if number not in together]
        self._places = self._agreed[together] + others
        waited = {number: left - 1 for number, left in self._expected.items()}
        self._expected = {n: left for n, left in waited.items() if left and n not in together}

    def _compare(self, models: dict[int, Any]) -> None:
        """Raise an error unless all ranks train the same models in this pass.

        Raises:
            UsageError: they do not; the error names two ranks and what they train.
        """
        own = [(number, digest(models[number].buckets)) for number in sorted(models)]
        ranks: Ranks = models[own[0][0]].ranks
        difference = first_difference(own, ranks)
        if difference is None:
            return
        rank, expected, other = difference
        raise UsageError(
            f"rank {rank} reduces the gradients of {_named(other)} while rank 0 reduces those of "
            f"{_named(expected)}",
            where=f"rank {ranks.rank}; the end of a backward pass",
            why="each rank would add what the others have of other parameters",
            fix="Have the losses of all ranks come from the same models; a model that a rank does "
            "not need takes part with a loss of 0 * model(...).sum()",
        )


_orders: weakref.WeakKeyDictionary[Any, CommunicationOrder] = weakref.WeakKeyDictionary()


def order_of(ranks: Ranks) -> CommunicationOrder:
    """Return the order of all models that train in the same process group."""
    group = ranks.group or dist.group.WORLD
    return _orders.setdefault(group, CommunicationOrder())


def digest(buckets: Iterable[GradientBucket]) -> str:
    """Return a digest of which parameters lie in which bucket, and in which type."""
    found = hashlib.sha256()
    for bucket in buckets:
        lengths = [end - begin for begin, end in bucket.extents]
        found.update(repr((bucket.names, lengths, str(bucket.gradients.dtype))).encode())
    return found.hexdigest()[:16]


def _named(models: list[tuple[int, str]]) -> str:
    listed = ", ".join(f"{number} ({buckets})" for number, buckets in models)
    return f"model{'s' if len(models) > 1 else ''} {listed}"
