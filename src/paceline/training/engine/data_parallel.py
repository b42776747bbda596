"""A model whose ranks train it together.

    forward     parameters that other ranks updated are awaited, front layers first
    backward    each gradient is copied into its bucket; a full bucket is reduced, in a fixed order
    end of it   all buckets are reduced; what the optimizer updates has its gradients
    step        what this rank updated returns to the others, front layers first

Buckets are filled in the order in which rank 0's first backward pass brought the gradients. With
overlap a bucket is reduced as soon as it and all before it are full, otherwise at the end of the
backward pass; `order` keeps that order between models, too. All hooks run in the thread that calls
them: `backward` on the CPU is the caller's.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.engine.buckets import GradientBucket, divide, make_buckets
from paceline.training.engine.model_wrapper import ModelWrapper
from paceline.training.engine.modes import (
    AllReduce,
    Root,
    Sharded,
    broadcast_values,
)
from paceline.training.engine.order import order_of
from paceline.training.engine.ranks import first_difference
from paceline.training.engine.shared_memory import SharedMemoryRoot, SharedMemorySharded
from paceline.training.precision.agreement import agree

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from paceline.training.engine.modes import Mode, ModeName
    from paceline.training.engine.ranks import Ranks
    from paceline.training.health import GradientCheck

MIB = 1 << 20
_BUCKET_BYTES = 25 * MIB  # as DistributedDataParallel
# Of the 11 M CNN between two hosts 2, 4 and 8 MiB are equally fast, 25 MiB is 6 % slower
# (bench/LOG.md): until a bucket is full, and after the last one is, nothing is hidden.
_HIDDEN_BUCKET_BYTES = 8 * MIB
_MODES: dict[str, Any] = {"allreduce": AllReduce, "sharded": Sharded, "root": Root}
_SHARED_MEMORY_MODES = _MODES | {"sharded": SharedMemorySharded, "root": SharedMemoryRoot}


class DataParallel(ModelWrapper, nn.Module):  # type: ignore[misc]  # torch has no types here
    """Trains a model on several ranks; each rank passes other samples through it.

    The state dict is that of the model, without a prefix.

    Args:
        module: the model, with equal parameters on all ranks (rank 0's are taken).
        ranks: that train it.
        mode: how gradients are reduced and parameters updated; a name, or what `modes` has.
        bucket_bytes, first_bucket_bytes: gradients that are reduced in one collective. Without
            `bucket_bytes` 25 MiB, or 8 MiB where CPUs of several hosts overlap the reductions.
        overlap_gradients: whether buckets are reduced during the backward pass.
        overlap_parameters: whether updated parameters are awaited layer by layer.
        check: sees the gradients of this rank before they are reduced.
        apart: names of parameters that ranks do not have in common, and that are left alone.

    Raises:
        UsageError: the ranks' models differ; the error names the first difference.
    """

    def __init__(  # noqa: PLR0913  # keywords, of which callers give few
        self,
        module: nn.Module,
        ranks: Ranks,
        *,
        mode: ModeName | Mode = "allreduce",
        bucket_bytes: int | None = None,
        first_bucket_bytes: int = MIB,
        overlap_gradients: bool = True,
        overlap_parameters: bool = True,
        check: GradientCheck | None = None,
        apart: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.ranks = ranks
        self.buckets: list[GradientBucket] = []
        modes = _MODES if ranks.heap is None else _SHARED_MEMORY_MODES
        self.mode: Mode = modes[mode](ranks) if isinstance(mode, str) else mode
        self._check = check
        if bucket_bytes is None:
            on_cpus = all(p.device.type == "cpu" for p in module.parameters())
            is_hidden = overlap_gradients and ranks.heap is None and on_cpus
            bucket_bytes = _HIDDEN_BUCKET_BYTES if is_hidden else _BUCKET_BYTES
        self._sizes = (first_bucket_bytes, bucket_bytes)
        self._overlaps = (overlap_gradients, overlap_parameters)
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._named = [(name, p) for name, p in self._named if name not in apart]
        check_equal(self._named, ranks)
        taken = {*apart, *(name for name, _ in self._named)}
        self._frozen = [(n, p) for n, p in module.named_parameters() if n not in taken]
        self._synchronises = True
        self._begun = False
        self._unreduced: set[str] = set()  # names of gradients of passes without synchronisation
        self._passes = 0  # reduced since the optimizer's last step
        self._versions: dict[int, int] = {}  # of buckets after that step; empty after a pass
        self._optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self._groups: list[int] = []
        self._next = 0  # bucket to reduce
        self._started: list[tuple[GradientBucket, Any]] = []
        self._returning: dict[int, Any] = {}  # works of parameters on their way back, by bucket
        self._brought: list[str] | None = []  # names of gradients, as the first pass brings them
        if ranks.size == 1:
            return
        self._order = order_of(ranks)
        self._number = self._order.add(self)
        broadcast_values(module, ranks.group, apart)
        self._arrange(list(reversed(self._named)))
        for name, parameter in self._named:
            parameter.register_post_accumulate_grad_hook(self._hook_of(name))
        if self.mode.returns_parameters:
            self._await_before_layers()

    # --- the model ---------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass a batch through the model.

        Raises:
            UsageError: a parameter that was frozen before is not, and cannot be trained now.
        """
        if any(parameter.requires_grad for _, parameter in self._frozen) and self.ranks.size > 1:
            self._train_more()
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, also those of the parts that the optimizer updates."""
        self.module.zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in the rank until the first backward pass after this context."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def names_of_updated(self) -> dict[int, str]:
        """Return the name of each parameter, and of each part that the optimizer got, by `id`."""
        whole = {id(parameter): name for name, parameter in self.module.named_parameters()}
        return whole | self.mode.names_of_parts()

    # --- gradients ---------------------------------------------------------------------------

    def _arrange(self, named: list[tuple[str, nn.Parameter]]) -> None:
        self.buckets = make_buckets(divide(named, *self._sizes), self.ranks.size, self.ranks.empty)
        self.mode.arrange(self.buckets)
        self._places = {
            name: (bucket, index)
            for bucket in self.buckets
            for index, name in enumerate(bucket.names)
        }

    def _hook_of(self, name: str) -> Any:
        def take(_parameter: nn.Parameter) -> None:
            if self._versions:
                self._check_forgotten(name)
            if not self._synchronises:
                self._unreduced.add(name)
                return
            if not self._begun:
                self._begin_pass()
            if self._brought is not None:
                self._brought.append(name)
            bucket, index = self._places[name]
            if bucket.take(index) and self._overlaps[0]:
                self._order.issue_full()

        return take

    def _begin_pass(self) -> None:
        """Begin a pass whose gradients are reduced.

        Raises:
            UsageError: earlier passes were reduced, and the mode cannot add to them.
        """
        # What the root has left, the other ranks do not know: they count passes.
        is_second = self._passes > 0 and not self.mode.accumulates
        if is_second and (isinstance(self.mode, Root) or self._has_averages()):
            raise UsageError(
                f"{type(self.mode).__name__} reduces gradients once for each step",
                where="backward pass",
                why="an earlier backward pass was reduced already, and no step came since",
                fix="Put all but the last backward pass of a step into model.no_sync(), add the "
                "losses up, or use engine='allreduce' without compression",
            )
        self._begun = True
        self._check_groups()
        self.mode.begin_pass()
        self._order.begin(self._number)

    def _check_forgotten(self, name: str) -> None:
        """Raise an error if a new step's first gradient was added to that of the last step.

        One that was set to zero in place has changed by more than this.

        Raises:
            UsageError: it was; of `root`, rank 0 has gradients, and raises it.
        """
        bucket, index = self._places[name]
        parameter, view = bucket.parameters[index], bucket.views[index]
        changes = bucket.gradients._version - self._versions.get(bucket.number, -1)  # noqa: SLF001  # torch 2.10 to 2.13
        self._versions = {}
        if parameter.grad.data_ptr() == view.data_ptr() and changes == 1:
            raise UsageError(
                f"the gradient of {name} was not set to zero after the step",
                where="backward pass",
                why=f"{type(self.mode).__name__} cannot add the gradients of several steps up",
                fix="Call optimizer.zero_grad(), or use engine='allreduce' without compression",
            )

    def _has_averages(self) -> bool:
        """Return whether gradients of a pass that was reduced have not been forgotten."""
        return any(
            parameter.grad is not None and parameter.grad.data_ptr() == view.data_ptr()
            for bucket in self.buckets
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        )

    def issue_full(self) -> bool:
        """Start to reduce the buckets that are full, in their order; return whether all are."""
        if self._brought is not None or not self._overlaps[0]:  # the order is not agreed on yet
            return False
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self._complete(self.buckets[self._next])
            self._start(self.buckets[self._next])
        return self._next == len(self.buckets)

    def _start(self, bucket: GradientBucket) -> None:
        self._started.append((bucket, self.mode.reduce(bucket)))
        self._next = bucket.number + 1

    def _complete(self, bucket: GradientBucket) -> None:
        """Make a bucket ready to be reduced; the check sees what the backward pass brought."""
        if self._check is not None:
            brought = [index for index, present in enumerate(bucket.present) if present]
            names = [bucket.names[index] for index in brought]
            self._check.observe(names, [bucket.views[index] for index in brought])
        bucket.complete()

    def issue_rest(self) -> None:
        """Start to reduce the buckets that have not been, at the end of a backward pass."""
        self.await_parameters()  # of layers that this forward pass did not run
        rest = self.buckets[self._next :]
        for bucket in rest:
            self._complete(bucket)
        if not self._may_reduce():
            rest = []
        for bucket in rest:
            self._start(bucket)

    def end_pass(self) -> None:
        """Wait until all buckets are reduced, and put gradients where they belong."""
        for _, work in self._started:
            if work is not None:
                work.wait()
        if self._started:
            self.mode.agree_on_used(self.buckets)
        for bucket, _ in self._started:
            self.mode.reduced(bucket)
        for bucket in self.buckets:
            bucket.reset()
        self._started, self._next, self._begun = [], 0, False
        self._passes += 1
        self._unreduced.clear()
        if self._brought is not None:
            order, self._brought = self._brought, None
            self._rearrange(order)

    def _may_reduce(self) -> bool:
        """Return whether the mode takes these gradients: one with residuals takes finite ones only.

        The ranks agree. Otherwise the gradients stay as they are, and the check has seen them.
        """
        if self._check is None or not self.mode.needs_finite:
            return True
        return not agree(self._check.flag(), self.ranks.group)

    def _rearrange(self, order: list[str]) -> None:
        """Fill the buckets in the order of rank 0's first backward pass from now on."""
        if isinstance(self.mode, Sharded):
            return
        names = list(dict.fromkeys(order))
        rest = [name for name, _ in reversed(self._named) if name not in set(names)]
        agreed = [names + rest]
        dist.broadcast_object_list(agreed, group=self.ranks.group, group_src=0)
        self._arrange_anew(agreed[0])

    def _arrange_anew(self, names: list[str]) -> None:
        """Make new buckets; the gradients there are go into them."""
        parameters = dict(self._named)
        gradients = {name: parameter.grad for name, parameter in self._named}
        self._arrange([(name, parameters[name]) for name in names])
        for name, gradient in gradients.items():
            bucket, index = self._places[name]
            if gradient is not None:
                bucket.views[index].copy_(gradient)
                parameters[name].grad = bucket.views[index]

    # --- what changes later ------------------------------------------------------------------

    def _train_more(self) -> None:
        """Reduce the gradients of parameters that were frozen until now, too. All ranks call this.

        Raises:
            UsageError: the mode cannot, or the ranks do not train the same parameters.
        """
        more = [(name, p) for name, p in self._frozen if p.requires_grad]
        if not self.mode.takes_more:
            raise UsageError(
                f"{more[0][0]} is trained now, and was frozen before",
                where="the model's forward pass",
                why=f"{type(self.mode).__name__} divides the parameters that prepare found trained",
                fix="Unfreeze it before prepare, or use engine='allreduce' without compression",
            )
        ordered = [name for bucket in self.buckets for name in bucket.names]
        self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
        self._named += more
        check_equal(self._named, self.ranks)
        self._arrange_anew(ordered + [name for name, _ in reversed(more)])
        for name, parameter in more:
            parameter.register_post_accumulate_grad_hook(self._hook_of(name))
        self._brought = []
        self._order.expect(self._number)

    def _check_groups(self) -> None:
        """Look at groups that the optimizer got since: it updates what all ranks reduce.

        Raises:
            UsageError: it does not, or the mode has divided what it updates.
        """
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None or _lengths(optimizer) == self._groups:
            return
        self._groups = _lengths(optimizer)
        if isinstance(self.mode, Sharded):
            raise UsageError(
                "the optimizer has got other parameters since prepare",
                where="add_param_group",
                why=f"{type(self.mode).__name__} has divided those that it had",
                fix="Add the group before prepare (its rate may be 0), or use engine='allreduce'",
            )
        known = self.names_of_updated()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise UsageError(
                        f"the optimizer updates a tensor of shape {list(parameter.shape)} that is "
                        "no parameter of the model",
                        where="add_param_group",
                        why="the ranks reduce the gradients of the model's parameters only",
                        fix="Add parameters of the model, or prepare the other model as well",
                    )

    def _check_reduced(self, *_: Any) -> None:
        """Raise an error before a step of gradients that the ranks do not have in common.

        Raises:
            UsageError: they are those of passes under `no_sync`, or of a parameter that was frozen.
        """
        if not self._unreduced and not self._frozen:
            return
        own = [n for n, p in self._named if n in self._unreduced and p.grad is not None]
        frozen = [n for n, p in self._frozen if p.requires_grad and p.grad is not None]
        if not own and not frozen:
            return
        name = (own or frozen)[0]
        why = "the last backward pass was under no_sync" if own else "it was frozen in prepare"
        raise UsageError(
            f"the gradient of {name} is that of this rank alone",
            where=f"rank {self.ranks.rank}; optimizer.step",
            why=f"{why}, so that the ranks did not reduce it",
            fix="Leave the last backward pass before a step out of no_sync"
            if own
            else "Pass batches through the prepared model, and unfreeze before that",
        )

    # --- parameters --------------------------------------------------------------------------

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the optimizer update what this rank updates, and the ranks share it after a step."""
        if self.ranks.size == 1:
            return
        self._optimizer = weakref.ref(optimizer)
        self._groups = _lengths(optimizer)
        if isinstance(self.mode, Sharded):  # whose averages are not those of the parameters
            self.module.zero_grad = _ZeroGrad(self.module, optimizer)
        optimizer.register_step_pre_hook(self._check_reduced)
        self.mode.adopt(optimizer)
        optimizer.register_step_post_hook(self._end_step)

    def _end_step(self, *_: Any) -> None:
        self._passes = 0
        if not self.mode.accumulates:
            self._versions = {b.number: b.gradients._version for b in self.buckets}  # noqa: SLF001  # torch 2.10 to 2.13
        if not self.mode.returns_parameters:
            return
        for bucket in reversed(self.buckets):  # front layers first
            self._returning[bucket.number] = self.mode.updated(bucket)
        if not self._overlaps[1]:
            self.await_parameters()

    def await_parameters(self) -> None:
        """Wait until all parameters are those that the ranks updated."""
        for number in list(self._returning):
            self._await(number)

    def _await(self, number: int) -> None:
        work = self._returning.pop(number, None)
        if work is not None:
            work.wait()

    def _await_before_layers(self) -> None:
        """Have each layer wait for its own parameters before it computes."""
        owners: dict[str, nn.Module] = {}
        for prefix, layer in self.module.named_modules():
            for name, _ in layer.named_parameters(recurse=False):
                owners[f"{prefix}.{name}" if prefix else name] = layer
        layers: dict[nn.Module, list[str]] = {}
        for name, layer in owners.items():
            layers.setdefault(layer, []).append(name)

        def await_own(layer: nn.Module, _given: Any) -> None:
            for name in layers[layer]:
                if self._returning and name in self._places:
                    self._await(self._places[name][0].number)

        for layer in layers:
            layer.register_forward_pre_hook(_OfOriginal(await_own))
        # A script may hold the model itself, and save that.
        self.module.register_state_dict_pre_hook(_OfOriginal(lambda *_: self.await_parameters()))


class _OfOriginal:
    """A hook that a copy of the model does not have, nor a pickled model."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfOriginal, (_nothing,)


class _ZeroGrad:
    """`zero_grad` of a model whose optimizer has parts of the parameters; a copy has no parts."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer

    def __call__(self, set_to_none: bool = True) -> None:
        type(self._model).zero_grad(self._model, set_to_none)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ZeroGrad, (self._model,)


def _lengths(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return how many parameters each group of an optimizer has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _nothing(*_: Any) -> None:
    pass


def check_equal(named: list[tuple[str, nn.Parameter]], ranks: Ranks) -> None:
    """Raise an error unless all ranks have the same parameters in the same order.

    Raises:
        UsageError: they differ; the error names the first difference.
    """
    own = [(name, tuple(p.shape), str(p.dtype)) for name, p in named]
    difference = first_difference(own, ranks)
    if difference is None:
        return
    rank, expected, other = difference
    pairs = enumerate(itertools.zip_longest(expected, other))
    place, (first, second) = next(entry for entry in pairs if entry[1][0] != entry[1][1])
    raise UsageError(
        f"rank {rank} trains another model than rank 0",
        where=f"trainable parameter {place}",
        why=f"{_described(first)} on rank 0, {_described(second)} on rank {rank}",
        fix="Build the same model in the same order on all ranks",
    )


def _described(entry: Any) -> str:
    if entry is None:
        return "none"
    name, shape, dtype = entry
    return f"{name} {list(shape)} {dtype.removeprefix('torch.')}"
