"""How ranks come to equal parameters: what reduces gradients, who updates, what returns.

    mode        gradients         updated by           parameters return by
    allreduce   all-reduce        every rank, all      -
    sharded     reduce-scatter    every rank, its part all-gather, before the next forward pass
    root        reduce            rank 0               broadcast, before the next forward pass

`root` is S-Caffe's: blocking it is SC-B, with the broadcast overlapped SC-OB, with the reduction
overlapped as well SC-OBR. `sharded` has both overlaps without a root. Where all ranks share memory
both take other ways to the same results: `shared_memory`.
Source: A. Awan et al., S-Caffe, PPoPP 2017; S. Rajbhandari et al., ZeRO, SC 2020 (stage 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.engine.optimizer_checks import check_elementwise, refuse_lbfgs
from paceline.training.optimizers.layerwise import LayerwiseOptimizer
from paceline.training.optimizers.norms import ShardedNorms

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.training.compression.hooks import Compressor
    from paceline.training.engine.buckets import GradientBucket
    from paceline.training.engine.ranks import Ranks
    from paceline.training.optimizer_state import State
    from paceline.training.precision.scaling import Scale

# Torch renamed both after 2.12.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

ModeName = Literal["allreduce", "sharded", "root"]


class Mode(Protocol):
    """What `DataParallel` asks of a mode. Works are torch's, or None for what is over.

    Attributes:
        returns_parameters: whether updated parameters come back from other ranks.
        needs_finite: whether no rank's gradients may be infinite or NaN.
        accumulates: whether passes whose gradients are reduced may add up before a step.
        takes_more: whether parameters can be added.
    """

    returns_parameters: bool
    needs_finite: bool
    accumulates: bool
    takes_more: bool

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Take these buckets in place of the ones before."""

    def begin_pass(self) -> None:
        """Keep what earlier passes reduced, before gradients of a new one come into the buckets."""

    def reduce(self, bucket: GradientBucket) -> Any:
        """Start to reduce the gradients of a bucket; return the work."""

    def agree_on_used(self, buckets: Sequence[GradientBucket]) -> None:
        """Find out which parameters any rank has a gradient of; all buckets have been reduced."""

    def reduced(self, bucket: GradientBucket) -> None:
        """Give the reduced gradients to what the optimizer updates."""

    def updated(self, bucket: GradientBucket) -> Any:
        """Start to bring the updated parameters of a bucket back; return the work."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer update what this rank updates."""

    def names_of_parts(self) -> dict[int, str]:
        """Return the parameter's name of each part that the optimizer got, by `id` of the part."""

    def whole_state(self, state: State) -> State:
        """Return the optimizer's state of whole parameters, by name; all ranks call this."""

    def own_state(self, state: State) -> State:
        """Return what this rank's optimizer needs of the state of whole parameters."""


class AllReduce:
    """Every rank has all gradients and updates all parameters."""

    returns_parameters = False
    needs_finite = False
    accumulates = True  # a gradient that all ranks have alike is its own average
    takes_more = True

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Nothing to keep."""

    def begin_pass(self) -> None:
        """Nothing to keep: a pass adds to the averages, which all ranks have."""

    def agree_on_used(self, buckets: Sequence[GradientBucket]) -> None:
        """All ranks know: it was reduced with the gradients."""

    def reduce(self, bucket: GradientBucket) -> Any:
        """Sum the gradients of all ranks, or average them where that costs nothing."""
        if self._ranks.heap is not None:
            self._ranks.heap.average(bucket.gradients)
            return None
        return dist.all_reduce(bucket.gradients, group=self._ranks.group, async_op=True)

    def reduced(self, bucket: GradientBucket) -> None:
        """Give each parameter its average; None to one that no rank used."""
        if self._ranks.heap is None:
            bucket.gradients.div_(self._ranks.size)
        give(bucket, bucket.used.tolist())

    def updated(self, bucket: GradientBucket) -> Any:
        """Nothing returns: every rank made the same update."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the optimizer as it is."""

    def names_of_parts(self) -> dict[int, str]:
        """Nothing: the optimizer has whole parameters."""
        return {}

    def whole_state(self, state: State) -> State:
        """Return the state of this rank, which is that of all."""
        return state

    def own_state(self, state: State) -> State:
        """Return the whole state."""
        return state


class CompressedAllReduce(AllReduce):
    """The same, with a compressor's average in place of the exact one."""

    needs_finite = True
    takes_more = False

    def __init__(self, ranks: Ranks, compressor: Compressor, scale: Scale) -> None:
        super().__init__(ranks)
        self.accumulates = compressor.accumulates
        self._compressor = compressor
        self._scale = scale

    def reduce(self, bucket: GradientBucket) -> None:
        """Average what the ranks send; gradients are unscaled for it, since residuals stay.

        The state of a parameter that no rank used stays as it is, as that of torch's optimizers: it
        gets no gradient, so that what a residual sent would be lost.
        """
        dist.all_reduce(bucket.used, group=self._ranks.group)
        members = zip(bucket.names, bucket.views, bucket.used.tolist(), strict=True)
        named = [(name, view) for name, view, count in members if count]
        gradients = bucket.gradients[: bucket.extents[-1][1]]
        gradients.div_(self._scale.scale)
        self._compressor.reduce_buffer(gradients, named, self._ranks.group)
        gradients.mul_(self._scale.scale)

    def reduced(self, bucket: GradientBucket) -> None:
        """Give each parameter its average; None to one that no rank used."""
        give(bucket, bucket.used.tolist())


class Root:
    """Rank 0 has all gradients and updates all parameters."""

    returns_parameters = True
    needs_finite = False
    accumulates = False  # rank 0 alone has the averages of earlier passes
    takes_more = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._flat: dict[int, torch.Tensor] = {}

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Move the parameters of each bucket into one flat tensor, for one broadcast."""
        self._flat = {bucket.number: flatten(bucket) for bucket in buckets}

    def begin_pass(self) -> None:
        """Nothing to keep: each pass has a step."""

    def agree_on_used(self, buckets: Sequence[GradientBucket]) -> None:
        """The root knows: it was reduced with the gradients."""

    def reduce(self, bucket: GradientBucket) -> Any:
        """Sum the gradients of all ranks at the root."""
        return dist.reduce(
            bucket.gradients,
            group=self._ranks.group,
            group_dst=0,
            async_op=True,
        )

    def reduced(self, bucket: GradientBucket) -> None:
        """Give the root the averages; the others have nothing to update."""
        if self._ranks.rank == 0:
            bucket.gradients.div_(self._ranks.size)
            give(bucket, bucket.used.tolist())
        else:
            give(bucket, [0.0] * len(bucket.parameters))

    def updated(self, bucket: GradientBucket) -> Any:
        """Broadcast the root's parameters."""
        flat = self._flat[bucket.number]
        return dist.broadcast(flat, group=self._ranks.group, group_src=0, async_op=True)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave the optimizer as it is: parameters without gradients are not updated.

        Raises:
            UsageError: it is LBFGS.
        """
        refuse_lbfgs(optimizer, "prepare(engine='root')")

    def names_of_parts(self) -> dict[int, str]:
        """Nothing: the optimizer has whole parameters."""
        return {}

    def whole_state(self, state: State) -> State:
        """Return the state of rank 0, the only one that updates."""
        if self._ranks.size == 1:
            return state
        boxed = [state]
        dist.broadcast_object_list(boxed, group=self._ranks.group, group_src=0)
        return boxed[0]

    def own_state(self, state: State) -> State:
        """Return all of it at the root, nothing elsewhere."""
        return state if self._ranks.rank == 0 else {}


class Sharded:
    """Every rank has the gradients of its part of each bucket, and updates that part."""

    returns_parameters = True
    needs_finite = False
    accumulates = True
    takes_more = False

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._flat: dict[int, torch.Tensor] = {}
        self._own_gradients: dict[int, torch.Tensor] = {}
        self._received: dict[int, torch.Tensor] = {}  # a row of each rank, where they are exchanged
        self._slices: dict[int, list[tuple[nn.Parameter, torch.Tensor]]] = {}
        self._names: dict[int, str] = {}
        self._pieces: dict[str, _Piece] = {}
        self._adopted = False
        self._updated: set[int] = set()  # `id` of the parts that the optimizer has
        self._kept: dict[int, torch.Tensor] = {}  # averages of earlier passes, by `id` of the part
        self._used: dict[int, list[float]] = {}  # of each parameter of a bucket, by its number

    def arrange(self, buckets: Sequence[GradientBucket]) -> None:
        """Move the parameters of each bucket into one flat tensor, of which each rank has a part.

        Raises:
            UsageError: an optimizer has the parts of other buckets already.
        """
        if self._adopted:
            raise UsageError(
                "the buckets of sharded parameters cannot change",
                where="DataParallel",
                fix="Wrap the model again, with another optimizer",
            )
        self._pieces.clear()
        self._received.clear()
        self._names = {
            id(parameter): name
            for bucket in buckets
            for name, parameter in zip(bucket.names, bucket.parameters, strict=True)
        }
        for bucket in buckets:
            flat = self._flatten(bucket)
            length = flat.numel() // self._ranks.size
            begin = self._ranks.rank * length
            own = self._own_gradients_of(bucket, begin, length)
            self._flat[bucket.number], self._own_gradients[bucket.number] = flat, own
            slices = []
            shapes = dict(zip(bucket.names, (p.shape for p in bucket.parameters), strict=True))
            for name, (first, last) in zip(bucket.names, bucket.extents, strict=True):
                low = min(max(first, begin), begin + length)
                high = max(min(last, begin + length), low)
                part = nn.Parameter(flat[low:high])  # empty where this rank has nothing of it
                begin_in_parameter = min(low, last) - first
                self._pieces[name] = _Piece(
                    part, shapes[name], begin_in_parameter, begin_in_parameter + high - low
                )
                slices.append((part, own[low - begin : high - begin]))
            self._slices[bucket.number] = slices

    def _flatten(self, bucket: GradientBucket) -> torch.Tensor:
        return flatten(bucket)

    def _own_gradients_of(self, bucket: GradientBucket, begin: int, length: int) -> torch.Tensor:
        """Return where this rank's part of the reduced gradients goes."""
        del begin
        return torch.zeros(length, dtype=bucket.gradients.dtype, device=bucket.gradients.device)

    def reduce(self, bucket: GradientBucket) -> Any:
        """Sum the gradients of all ranks, of each part on its rank."""
        gradients, group = bucket.gradients, self._ranks.group
        if reduces_by_exchange(gradients.device, group):
            if bucket.number not in self._received:
                self._received[bucket.number] = torch.empty_like(gradients)
            received = self._received[bucket.number]
            return dist.all_to_all_single(received, gradients, group=group, async_op=True)
        own = self._own_gradients[bucket.number]
        return reduce_scatter(own, gradients, group=group, async_op=True)

    def begin_pass(self) -> None:
        """Keep the averages of passes since the last `zero_grad`: their memory is used again."""
        self._kept = {
            id(part): part.grad.clone()
            for slices in self._slices.values()
            for part, _ in slices
            if part.grad is not None and id(part) in self._updated
        }

    def agree_on_used(self, buckets: Sequence[GradientBucket]) -> None:
        """Tell all ranks: what was reduced with the gradients, one rank has."""
        flags = torch.tensor(
            [float(present) for bucket in buckets for present in bucket.present],
            device=buckets[0].gradients.device,
        )
        self._reduce_flags(flags)
        used = iter(flags.tolist())
        self._used = {bucket.number: [next(used) for _ in bucket.parameters] for bucket in buckets}

    def _reduce_flags(self, flags: torch.Tensor) -> None:
        dist.all_reduce(flags, group=self._ranks.group)

    def reduced(self, bucket: GradientBucket) -> None:
        """Give each slice of a parameter its average; None to one that no rank used."""
        own = self._own_gradients[bucket.number]
        if bucket.number in self._received:
            torch.sum(self._received[bucket.number].view(self._ranks.size, -1), 0, out=own)
        own.div_(self._ranks.size)
        self._give_slices(bucket)

    def _give_slices(self, bucket: GradientBucket) -> None:
        slices = self._slices[bucket.number]
        for (part, gradient), count in zip(slices, self._used[bucket.number], strict=True):
            kept = self._kept.pop(id(part), None)
            if kept is not None:
                gradient.add_(kept)
            part.grad = gradient if count or kept is not None else None
        give(bucket, [0.0] * len(bucket.parameters))

    def updated(self, bucket: GradientBucket) -> Any:
        """Gather the parts that the ranks updated."""
        flat = self._flat[bucket.number]
        length = flat.numel() // self._ranks.size
        own = flat[self._ranks.rank * length : (self._ranks.rank + 1) * length]
        return all_gather(flat, own, group=self._ranks.group, async_op=True)

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer update this rank's slices, with the settings of their parameters.

        State that it has already is divided as the parameters are.

        Raises:
            UsageError: it may look at whole tensors.
        """
        check_elementwise(optimizer, "prepare(engine='sharded')")
        for group in optimizer.param_groups:
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in self._names:
                    piece = self._pieces[self._names[id(parameter)]]
                    group["params"][place] = piece.parameter
                    self._updated.add(id(piece.parameter))
                    for key, value in optimizer.state.pop(parameter, {}).items():
                        optimizer.state[piece.parameter][key] = piece.of(key, value)
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.layer_norms = ShardedNorms(self._ranks.group)
        self._adopted = True

    def names_of_parts(self) -> dict[int, str]:
        """Return the parameter's name of each slice, by `id` of the slice."""
        return {id(piece.parameter): name for name, piece in self._pieces.items()}

    def whole_state(self, state: State) -> State:
        """Return the state with slices put together. Cost: one all-reduce per whole tensor."""
        whole = {name: dict(values) for name, values in state.items()}
        for name, key, dtype in self._sliced_values(state):
            piece = self._pieces[name]
            flat = torch.zeros(piece.shape.numel(), dtype=dtype, device=piece.parameter.device)
            value = state.get(name, {}).get(key)
            if value is not None:
                flat[piece.begin : piece.end] = value
            dist.all_reduce(flat, group=self._ranks.group)
            whole.setdefault(name, {})[key] = flat.view(piece.shape)
        return whole

    def own_state(self, state: State) -> State:
        """Return the slices of whole tensors that are this rank's."""
        own: State = {}
        for name, values in state.items():
            piece = self._pieces[name]
            own[name] = {key: piece.of(key, value) for key, value in values.items()}
        return own

    def _sliced_values(self, state: State) -> list[tuple[str, str, torch.dtype]]:
        """Return name, key and type of what any rank has a slice of, in one order on all ranks."""
        own = [
            (name, key, value.dtype)
            for name, values in state.items()
            for key, value in values.items()
            if name in self._pieces and self._pieces[name].has_shape_of(value)
        ]
        if self._ranks.size == 1:
            return own
        every: list[Any] = [None] * self._ranks.size
        dist.all_gather_object(every, own, group=self._ranks.group)
        return list(dict.fromkeys(entry for entries in every for entry in entries))


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The part of a parameter that a rank updates.

    Attributes:
        parameter: the part, flat; what the optimizer has.
        shape: of the whole parameter.
        begin, end: of the part, in the flat parameter.
    """

    parameter: nn.Parameter
    shape: torch.Size
    begin: int
    end: int

    def has_shape_of(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.shape == self.parameter.shape

    def of(self, key: str, value: Any) -> Any:
        """Return this part of a whole tensor; other values as they are."""
        # A parameter without dimensions has state of its shape, and torch's counter has it as well.
        if not isinstance(value, torch.Tensor) or value.shape != self.shape or key == "step":
            return value
        return value.reshape(-1)[self.begin : self.end]


def reduces_by_exchange(device: torch.device, group: Any) -> bool:
    """Return whether a reduce-scatter is made of an all-to-all, and sums on each rank.

    On gloo, whose reduce-scatter is an all-reduce of which each rank keeps a part: it sends twice
    as many bytes.
    Source: torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, 2.13.
    """
    group = group or dist.group.WORLD
    if device.type != "cpu":
        return False
    return bool(getattr(group, "is_flat", dist.get_backend(group) == "gloo"))


def broadcast_values(model: nn.Module, group: Any, apart: Collection[str] = ()) -> None:
    """Have all ranks of a group start from the parameters and buffers of rank 0.

    Args:
        model: of the same structure on all ranks.
        group: the ranks.
        apart: names of parameters that stay as they are.
    """
    parameters = [p for name, p in model.named_parameters() if name not in apart]
    for tensor in [*parameters, *model.buffers()]:
        dist.broadcast(tensor.detach(), group=group, group_src=0)


def give(bucket: GradientBucket, used: Sequence[float]) -> None:
    """Set the gradients of parameters to their views, or to None where `used` is 0."""
    for parameter, view, count in zip(bucket.parameters, bucket.views, used, strict=True):
        parameter.grad = view if count else None


def flatten(bucket: GradientBucket, flat: torch.Tensor | None = None) -> torch.Tensor:
    """Return a flat tensor of which the bucket's parameters are views from now on.

    It is as long as the bucket's gradients, so that both divide into the same parts.

    Args:
        bucket: of the parameters.
        flat: the tensor, or None for a new one.
    """
    flat = torch.zeros_like(bucket.gradients) if flat is None else flat
    for parameter, (begin, end) in zip(bucket.parameters, bucket.extents, strict=True):
        view = flat[begin:end].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return flat
