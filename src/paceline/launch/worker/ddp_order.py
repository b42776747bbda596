"""Checks that ranks issue the collectives of several DistributedDataParallel models in one order.

DDP reduces the buckets of a model in the order of their numbers, and rebuilds them once, as rank
0's first backward pass brought the gradients: ranks may compute the gradients of one model in any
order. But models that share a process group know nothing of each other. Where a loss trains two of
them and a rank runs them the other way around, each adds gradients of other parameters; torch says
nothing where the buckets have the same sizes.

So each set of models that a backward pass trains is compared once, through the store of the group,
as gradients are complete and before they are used:

    order in which the models' last gradients came     differs: an error, gradients are wrong
    order of all gradients, by model                   differs: a warning, buckets may be swapped

Imports torch: a rank's worker imports this module with importlib.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.core.errors import UsageError

_PASSES = 64  # backward passes in which new sets of models are looked for
_WAIT = timedelta(seconds=60)  # for rank 0
_LOG = logging.getLogger(__name__)


class ModelOrder:
    """The DDP models of a process group, and the order in which their gradients come.

    Used by the thread that runs the backward pass.
    """

    def __init__(self, group: Any) -> None:
        self._rank = dist.get_rank(group)
        self._store = _store_of(group)
        self._models: list[weakref.ref[Any]] = []
        self._hooks: list[Any] = []
        self._brought: list[int] = []  # model of each gradient of this pass
        self._compared: list[set[int]] = []
        self._passes = 0

    def add(self, model: Any) -> None:
        """Take a model; with the second one, begin to look."""
        self._models.append(weakref.ref(model))
        count = len(self._models)
        if self._store is None or count == 1:
            return
        if not self._hooks:
            self._hook(0)
        self._hook(count - 1)

    def _hook(self, number: int) -> None:
        model = self._models[number]()
        if model is None:
            return
        known = weakref.ref(model)

        def note(_parameter: Any) -> None:
            model = known()
            if model is None or not model.require_backward_grad_sync:  # no_sync: nothing is reduced
                return
            if not self._brought:
                torch.autograd.Variable._execution_engine.queue_callback(self._end)  # noqa: SLF001  # as DDP
            self._brought.append(number)

        parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._hooks += [p.register_post_accumulate_grad_hook(note) for p in parameters]

    def _end(self) -> None:
        brought, self._brought = self._brought, []
        self._passes += 1
        if set(brought) not in self._compared:
            self._compared.append(set(brought))
            self._compare(brought)
        if self._passes >= _PASSES:
            for hook in self._hooks:
                hook.remove()
            self._hooks = []

    def _compare(self, brought: list[int]) -> None:
        """Compare with rank 0.

        Raises:
            UsageError: this rank issues collectives in another order.
        """
        assert self._store is not None
        key = str(len(self._compared))
        if self._rank == 0:
            self._store.set(key, json.dumps(brought))
            return
        try:
            self._store.wait([key], _WAIT)
        except RuntimeError:
            _LOG.warning(
                "rank 0 has not trained the models of this backward pass within %g s: the order of "
                "their collectives is not compared",
                _WAIT.total_seconds(),
            )
            return
        expected: list[int] = json.loads(self._store.get(key))
        if completed(brought) != completed(expected):
            raise UsageError(
                f"rank {self._rank} reduces the gradients of its DistributedDataParallel models in "
                f"the order {completed(brought)}, rank 0 in the order {completed(expected)}",
                where="the end of a backward pass; models are numbered as they were made",
                why="they share a process group, in which a collective meets that of another "
                "model, so that gradients are wrong",
                fix="Call the models in the same order on all ranks, or give each its own group: "
                "DistributedDataParallel(model, process_group=torch.distributed.new_group())",
            )
        if brought != expected:
            _LOG.warning(
                "gradients of several DistributedDataParallel models come in another order than on "
                "rank 0: their buckets may be reduced with those of another model. Give each model "
                "its own process_group"
            )


def completed(brought: list[int]) -> list[int]:
    """Return models in the order of their last gradients.

    >>> completed([0, 1, 0, 2, 1])
    [0, 2, 1]
    """
    return list(reversed(dict.fromkeys(reversed(brought))))


def _store_of(group: Any) -> Any:
    """Return a store with keys of its own; None for a group without one, as MPI's."""
    try:
        return dist.PrefixStore("paceline/ddp-order", group.get_group_store())
    except (RuntimeError, TypeError):
        return None


_groups: weakref.WeakKeyDictionary[Any, ModelOrder] = weakref.WeakKeyDictionary()


@functools.cache
def check_order() -> None:
    """Check each DistributedDataParallel that this process makes from now on."""
    original = DistributedDataParallel.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        group = self.process_group
        if dist.get_world_size(group) > 1:
            if group not in _groups:
                _groups[group] = ModelOrder(group)
            _groups[group].add(self)

    DistributedDataParallel.__init__ = init
