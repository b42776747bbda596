"""Linear layers that compute with a rank's part of their weights, for the rows of all ranks."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.core.errors import UsageError
from paceline.training.engine.data_parallel import check_equal
from paceline.training.engine.exchange import (
    EVALUATING,
    REDUCING,
    TRAINING,
    UPDATING,
    RowExchange,
    SharedRows,
)
from paceline.training.optimizers.layerwise import LayerwiseOptimizer
from paceline.training.optimizers.norms import DividedNorms, squared_norms
from paceline.training.tensor_parallel.checks import check_alike
from paceline.training.tensor_parallel.choice import ELEMENTWISE
from paceline.training.tensor_parallel.parts import DividedPart, PartProduct, PassedColumns
from paceline.training.tensor_parallel.state import PartStates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.training.engine.ranks import Ranks
    from paceline.training.health import GradientCheck
    from paceline.training.options import TrainingOptions
    from paceline.training.tensor_parallel.choice import DividedLayer

_EQUAL = 1e-5  # of a norm: gradients that were reduced have the same bits on all ranks


class TensorParallel:
    """The divided layers of a model, and what of a training must know of them.

    Args:
        model: whose parameters are whole, and equal on all ranks; the divided ones become parts.
        optimizer: without state.
        layers: to divide; of `choose_layers`, on all ranks the same.
        ranks: of the job.
        options: of `prepare`.
        check: sees whether this rank's own part of a gradient is finite.

    Attributes:
        names: of the divided parameters.
        norms: of whole layers.
        states: of whole parameters.

    Raises:
        UsageError: the ranks' models differ, or an optimizer cannot update parts; all ranks raise
            the same error.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        layers: Sequence[DividedLayer],
        ranks: Ranks,
        *,
        options: TrainingOptions,
        check: GradientCheck,
    ) -> None:
        check_equal(list(model.named_parameters()), ranks)
        shared_by = options.tensor_parallel_ranks or ranks.size
        check_alike(model, optimizer, layers, ranks, shared_by)
        groups = [
            list(range(begin, begin + shared_by)) for begin in range(0, ranks.size, shared_by)
        ]
        self._exchange = RowExchange(ranks, groups, deadline_s=options.deadline_s)
        replicas = [list(range(place, ranks.size, shared_by)) for place in range(shared_by)]
        self._replicas = (
            RowExchange(ranks, replicas, deadline_s=options.deadline_s) if len(groups) > 1 else None
        )
        self._check = check
        self._names = [layer.name for layer in layers]
        modules = dict(model.named_modules())
        self._parts: dict[str, DividedPart] = {}
        self.states = PartStates(self._exchange, self._names)
        for number, (name, division, first) in enumerate(layers):
            module = modules[name]
            length = module.in_features if division == "inputs" else module.out_features
            size = self._exchange.size
            bounds = [rank * length // size for rank in range(size + 1)]
            part = DividedPart(module, name, number, division, bounds)
            part.first = self._parts[first] if first else None
            self._parts[name] = part
            self._divide(part, ranks)
        self.names = frozenset(self.states.dims)
        divided = {
            id(parameter) for name, parameter in model.named_parameters() if name in self.names
        }
        self.norms = DividedNorms(self._exchange.group, divided)
        if isinstance(optimizer, LayerwiseOptimizer):
            optimizer.layer_norms = self.norms
        self._join_pairs(model)
        common = [
            (parameter.numel(), name)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in self.names
        ]
        if common:
            name = min(common)[1]
            see = functools.partial(self._check_common, name, model.get_parameter(name))
            optimizer.register_step_pre_hook(see)  # before `BeforeStep`, which is made later

    def _check_common(self, name: str, parameter: nn.Parameter, *_: Any) -> None:
        """Raise an error on all ranks unless their gradients of a parameter in common are equal.

        They are after each backward pass. A factor that is computed from a rank's own parts of
        divided layers, as torch's `clip_grad_norm_` does, is another one on each rank.
        """
        own = torch.zeros(1, dtype=torch.float64, device=parameter.device)
        if parameter.grad is not None:
            own = squared_norms([parameter.grad]).sqrt()
        every = self._exchange.values(own, (0, UPDATING), self._names).flatten().tolist()
        for norm in every[1:]:
            if math.isfinite(norm) and abs(norm - every[0]) > _EQUAL * max(norm, every[0]):
                raise UsageError(
                    f"the ranks changed the gradient of {name} in different ways",
                    where="optimizer.step()",
                    why=f"its norm is {every[0]:.6g} on one rank and {norm:.6g} on another; "
                    "torch.nn.utils.clip_grad_norm_ sees only a rank's own parts of the layers "
                    f"that are divided, such as {self._names[0]}",
                    fix="Give prepare clip_norm=..., which takes the norm of whole layers, and "
                    "change gradients by hand on all ranks alike",
                )

    def _divide(self, part: DividedPart, ranks: Ranks) -> None:
        """Keep this rank's part of a layer's parameters, and compute with it from now on."""
        layer = part.layer
        for key, dim in part.dims().items():
            parameter = getattr(layer, key)
            name = f"{part.name}.{key}" if part.name else key
            dist.broadcast(parameter.detach(), group=ranks.group, group_src=0)
            self.states.dims[name] = (part, dim)
            parameter.grad = None
            parameter.data = part.own(parameter.detach(), dim, self._exchange.rank)
            if parameter.requires_grad:
                parameter.register_hook(functools.partial(self._take_gradient, name, part))
        # torch's fused layers of transformers use the weights of layers without hooks themselves.
        layer.register_forward_pre_hook(_is_called)
        layer.forward = functools.wraps(layer.forward)(functools.partial(self._compute, part))
        layer.register_state_dict_post_hook(functools.partial(self.states.save, part))
        layer.register_load_state_dict_pre_hook(functools.partial(self.states.load, part))

    # --- computing ---------------------------------------------------------------------------

    def _compute(self, part: DividedPart, x: torch.Tensor) -> torch.Tensor:
        """Return what the whole layer returns for this rank's input.

        Within a pair the first layer returns its columns for all ranks' rows, shape (rows of all
        ranks, columns), and the second one takes them.
        """
        layer, exchange = part.layer, self._exchange
        is_second = part.first is not None and part.first.passed is not None
        weight, bias = layer.weight, layer.bias
        kind = x.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        with torch.autocast(kind, enabled=False):
            if is_second:
                assert part.first is not None
                passed, part.first.passed = part.first.passed, None
                assert passed is not None
            else:
                passed = self._meet(part, x)
                x = x.reshape(-1, layer.in_features)
                if part.division == "outputs":
                    x = passed.rows.gather(x)
                else:
                    x = passed.rows.to_columns(x, part.widths)
            if part.division == "outputs":
                y = PartProduct.apply(x, weight, bias, 1 / exchange.size)
                if part.keeps_columns:
                    part.passed = passed
                    return y
                y = passed.rows.to_rows(y, part.widths)
            else:
                y = passed.rows.sum(PartProduct.apply(x, weight, None, 1 / exchange.size))
        if y.requires_grad:
            # The first layer of a pair has its part of this contribution too.
            members = [part, part.first] if is_second and part.first is not None else [part]
            y.register_hook(functools.partial(_note, members, passed.is_finite))
        if part.division == "inputs" and bias is not None:
            y = y + bias
        return y.view(*passed.shape[:-1], layer.out_features)

    def _meet(self, part: DividedPart, x: torch.Tensor) -> PassedColumns:
        """Agree with the other ranks on the rows that each brings."""
        if x.shape[-1] != part.layer.in_features:
            raise UsageError(
                f"the input has {x.shape[-1]} features, and the layer takes "
                f"{part.layer.in_features}",
                where=part.name,
                fix="Look at the layer before this one",
            )
        is_training = torch.is_grad_enabled()
        kind = TRAINING if is_training else EVALUATING
        rows = x.numel() // part.layer.in_features
        counts = self._exchange.meet(rows, (part.number, kind), self._names, x.device)
        finite = torch.isfinite(squared_norms([x.detach()])[0]) if is_training else torch.empty(0)
        return PassedColumns(
            SharedRows(self._exchange, counts, part.number, self._names), x.shape, finite
        )

    def _take_gradient(self, name: str, part: DividedPart, gradient: torch.Tensor) -> Any:
        """Show the check whether this rank's own rows made a gradient that is not finite.

        A part's gradient is of all ranks' rows: a NaN of one rank is in the parts of all of them.
        """
        norm = squared_norms([gradient])[0].sqrt()
        none = torch.zeros_like(norm)
        seen = torch.where(torch.isfinite(norm), norm, none)
        if part.finite:
            own = torch.stack(part.finite).all()
            seen = torch.where(own, seen, torch.full_like(norm, torch.nan))
            if name.endswith("weight"):
                part.finite.clear()
        self._check.observe([name], [seen.reshape(1)])
        if self._replicas is None:
            return None
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        call = (part.number, REDUCING)
        self._replicas.meet(gradient.numel(), call, self._names, gradient.device)
        self._replicas.run(dist.all_reduce, gradient, what=f"the gradient of {name}")
        return gradient.div_(self._replicas.size)

    def _join_pairs(self, model: nn.Module) -> None:
        """Have sequences leave columns where they are between the layers of a pair."""
        followed = {id(p.first.layer): p.first for p in self._parts.values() if p.first}
        seconds = {id(p.layer): p for p in self._parts.values() if p.first}
        for sequence in model.modules():
            if type(sequence) is not nn.Sequential:
                continue
            firsts: dict[int, DividedPart] = {}
            begin: tuple[int, DividedPart] | None = None
            for place, module in enumerate(sequence):
                if id(module) in seconds and begin and seconds[id(module)].first is begin[1]:
                    firsts[begin[0]] = begin[1]
                if id(module) in followed:
                    begin = (place, followed[id(module)])
                elif type(module) not in ELEMENTWISE:
                    begin = None
            if firsts:
                sequence.forward = functools.partial(_run_pairs, sequence, firsts)


def _is_called(_layer: nn.Module, _given: Any) -> None:
    """Do nothing: a layer with a hook is called, and not replaced by a fused operator."""


def _note(parts: Sequence[DividedPart], is_finite: torch.Tensor, gradient: torch.Tensor) -> None:
    """Keep whether this rank's rows of a layer's inputs and of its outputs' gradient are finite."""
    found = is_finite & torch.isfinite(squared_norms([gradient])[0])
    for part in parts:
        if part.layer.weight.requires_grad:  # else no gradient takes it out again
            part.finite.append(found)


def _run_pairs(sequence: nn.Sequential, firsts: Mapping[int, DividedPart], x: Any) -> Any:
    """Run a sequence's layers, as nn.Sequential does, with columns kept within pairs."""
    for place, module in enumerate(sequence):
        first = firsts.get(place)
        if first is None:
            x = module(x)
            continue
        first.keeps_columns = True
        try:
            x = module(x)
        finally:
            first.keeps_columns = False
    return x
