"""The ranks that train one model, and what they must agree on before they begin."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from paceline.collectives.tensor_heap import TensorHeap
from paceline.core.errors import PacelineError, UsageError, first_line
from paceline.training.engine.buckets import bytes_of_buckets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

Value = TypeVar("Value")
_HEAP_SLACK = 1 << 20
_TIMEOUT_S = 300.0  # the longest wait for a rank, of groups that do not say it
_stores: Counter[tuple[str, str]] = Counter()  # that `new_store` made, by group and purpose


@dataclass(frozen=True, slots=True)
class Ranks:
    """The group that trains together.

    Attributes:
        group: torch's; None: the default one, or one process without any.
        rank: of this process in the group.
        size: of the group.
        heap: shared memory for buckets, where all ranks share a host and train on CPUs; or None.
    """

    group: Any
    rank: int
    size: int
    heap: TensorHeap | None

    def empty(self, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor; in the heap where there is one."""
        if self.heap is not None:
            return self.heap.empty(length, dtype)
        return torch.empty(length, dtype=dtype, device=device)


def first_difference(own: Any, ranks: Ranks) -> tuple[int, Any, Any] | None:
    """Return the first rank whose value is not rank 0's, rank 0's value and its; None if all agree.

    All ranks call this and get the same.

    Args:
        own: of this rank; what torch can send as an object.
        ranks: to compare.
    """
    if ranks.size == 1:
        return None
    every: list[Any] = [None] * ranks.size
    dist.all_gather_object(every, own, group=ranks.group)
    for rank, other in enumerate(every):
        if other != every[0]:
            return rank, every[0], other
    return None


def computed_by_all(compute: Callable[[], Value], ranks: Ranks, where: str) -> list[Value]:
    """Return what each rank computed; if it fails on one, all ranks raise that rank's error.

    All ranks call this, and none waits for one that has failed.

    Args:
        compute: what torch can send as an object.
        ranks: that compute.
        where: the call that this is part of.

    Raises:
        PacelineError: that of the first rank on which it failed.
        UsageError: it raised an error of another kind there.
    """
    own: Any = None
    problem: Exception | None = None
    try:
        own = compute()
    except Exception as error:  # noqa: BLE001  # whatever a model raises; it is raised below
        problem = error
    said = None if problem is None else _carried(problem, ranks.rank, where).to_json()
    every: list[Any] = [(own, said)]
    if ranks.size > 1:
        every = [None] * ranks.size
        dist.all_gather_object(every, (own, said), group=ranks.group)
    first = next((said for _, said in every if said is not None), None)
    if first is not None:
        raise PacelineError.from_json(first) from problem
    return [value for value, _ in every]


def _carried(problem: Exception, rank: int, where: str) -> PacelineError:
    """Return an error as all ranks raise it."""
    if isinstance(problem, PacelineError):
        return problem
    return UsageError(
        f"rank {rank} failed while the others waited for it",
        where=where,
        why=f"{type(problem).__name__}: {first_line(problem)}",
        fix=f"Look at the end of the log of rank {rank}",
    )


def new_group(ranks: Ranks, members: Sequence[int], timeout: timedelta | None = None) -> Any:
    """Return a process group of some of the ranks; all of `ranks` call this with the same.

    A rank that is no member gets a group that it cannot use.

    torch names a group by the number of groups before it: of all that the job has made, which
    every rank of the job must then make too. Where other ranks of the job do not train this model,
    it is the number of groups that a rank is in; ranks that are in fewer would look for the new one
    under another name, and wait forever. They first enter groups of their own.

    Args:
        ranks: that train together.
        members: numbers among `ranks`.
        timeout: of the group's operations; None: torch's.
    """
    whole = ranks.group or dist.group.WORLD
    world = [dist.get_global_rank(whole, rank) for rank in members]
    if ranks.size == dist.get_world_size():
        return dist.new_group(world, timeout=timeout)
    own = len(dist.distributed_c10d._world.pg_names)  # noqa: SLF001  # torch 2.10 to 2.13
    numbers: list[int] = [0] * ranks.size
    dist.all_gather_object(numbers, own, group=ranks.group)
    for _ in range(max(numbers) - own):
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return dist.new_group(world, timeout=timeout, use_local_synchronization=True)


def new_store(group: Any, purpose: str) -> dist.Store:
    """Return a store with keys of its own, which the ranks of a group share.

    All ranks of the group call this, equally often for each purpose.

    Args:
        group: torch's; None: the default one.
        purpose: begins the keys.
    """
    group = group or dist.group.WORLD
    _stores[group.group_name, purpose] += 1
    number = _stores[group.group_name, purpose]
    return dist.PrefixStore(f"{purpose}/{number}", group.get_group_store())


def find_ranks(model: nn.Module | None = None, group: Any = None) -> Ranks:
    """Return the ranks of a process group, or one rank where there is none.

    Every rank calls this. Where all share a host, they get shared memory for a model's buckets.

    Args:
        model: that Paceline's engine will train; None: another engine has its own memory.
        group: a process group in place of the default one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(None, 0, 1, None)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    heap = _form_heap(model, group or dist.group.WORLD, rank, size) if model is not None else None
    return Ranks(group, rank, size, heap)


def _form_heap(model: nn.Module, group: Any, rank: int, size: int) -> TensorHeap | None:
    """Return shared memory with room for the buckets, where all ranks are on one host."""
    parameters = list(model.parameters())  # also those that may be unfrozen later
    if size == 1 or any(parameter.device.type != "cpu" for parameter in parameters):
        return None
    store = new_store(group, "training")
    # Gradients and parameters, twice: new buckets are made beside the old ones. Room that nothing
    # is written to takes no memory.
    needed = 4 * bytes_of_buckets(parameters, size) + _HEAP_SLACK
    return TensorHeap.form(store, rank, size, needed, timeout_of(group).total_seconds(), group)


def timeout_of(group: Any) -> timedelta:
    """Return the longest wait of a process group's CPU collectives, as it was made with."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout  # noqa: SLF001  # torch 2.10 to 2.13
    except (AttributeError, RuntimeError):  # a backend without it, or none for CPUs
        return timedelta(seconds=_TIMEOUT_S)
    return timeout
